// What one attention layer holds: its plans for every batch size, and convert / decode / run over them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sparsemla/decode.h"
#include "sparsemla/indices.h"

namespace sparsemla {

/// Plans and one workspace, shared by the layers of a model that run one at a time on one stream. Caller-owned; equal
/// problems get the same plan. Not for use by two threads at once.
class PlanCache {
   public:
    PlanCache();
    ~PlanCache();
    PlanCache(const PlanCache&) = delete;
    PlanCache& operator=(const PlanCache&) = delete;

    /// The plan of a problem, made on first request. The reference lives as long as the cache.
    const Plan& plan(const Problem& problem, const DeviceSpec& device, const PlanOptions& options = {});

    std::size_t plans() const;
    /// Largest workspace and state over all plans so far.
    std::size_t workspace_bytes() const;
    std::size_t state_bytes() const;

    /// Memory for the plans' calls, the caller's, at least workspace_bytes() / state_bytes(). Plans of CPU devices work
    /// without: the cache then allocates on prepare.
    void set_memory(Memory workspace, Memory state);
    /// Loads kernels, zeroes the state, and (CPU, nothing set) allocates. Called after the last plan is made and before
    /// the first decode; decode on an unprepared cache is an Error.
    void prepare(Stream stream = {});

    bool prepared() const;
    Memory workspace() const;
    Memory state() const;

   private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

struct EngineConfig {
    Problem problem{};  ///< heads, sources, dtypes, sinks, lse; its rows and widths are replaced by the lists below,
                        ///< and from_ids is false
    std::vector<std::int64_t> row_capacities{};  ///< e.g. 1, 2, 4, 8, 16, 32
    std::vector<std::int64_t> widths{};          ///< of source 0; empty: problem.sources[0].width
    Sharding sharding{};                         ///< which tokens this rank owns, for convert
    PlanOptions options{};
    /// run converts token ids within decode, without a launch of their own, on every plan whose kernel can.
    bool from_ids = false;
};

/// Plans every row capacity x width on construction. A batch runs on the plan of its width and of the smallest capacity
/// that holds it; more rows than the last capacity, and widths not planned, are refused.
class Engine {
   public:
    /// Throws Error for an empty or negative list, and what make_plan throws. `plans` must outlive the engine, and
    /// needs prepare() after the last engine was made.
    Engine(EngineConfig config, DeviceSpec device, PlanCache& plans);

    const EngineConfig& config() const { return config_; }

    /// The plan of a batch. Throws Error naming rows or width and what is planned.
    const Plan& plan_for(std::int64_t rows, std::int64_t width) const;
    /// The same schedule with Problem::from_ids; null where that is refused or the config does not ask for it.
    const Plan* from_ids_plan_for(std::int64_t rows, std::int64_t width) const;

    /// convert_indices with this engine's sharding, whatever args.sharding says.
    void convert(ConvertArgs args, Stream stream = {}) const;
    /// decode on plan_for(args.rows, width of source 0's slots); workspace and state default to the cache's.
    void decode(DecodeArgs args, Stream stream = {}) const;
    /// convert, then decode over the converted slots and counts as those of source 0. Where from_ids_plan_for is not
    /// null: that plan instead, one launch, the same bits; indices.slots and counts are then not written and may be
    /// left out. indices.cache and args.indices are not looked at: pages are those of source 0's cache.
    void run(const ConvertArgs& indices, DecodeArgs args, Stream stream = {}) const;

    /// For people: which plan serves which batch, why, and every refusal.
    std::string explain() const;

   private:
    struct Entry {
        std::int64_t rows;
        std::int64_t width;
        const Plan* plan;
        const Plan* from_ids;
        std::string refused;  ///< why there is none from ids
    };
    const Entry& entry_for(std::int64_t rows, std::int64_t width) const;
    void decode_on(const Plan& plan, DecodeArgs args, Stream stream) const;
    void add_entry(std::int64_t rows, std::int64_t width);

    EngineConfig config_;
    DeviceSpec device_;
    PlanCache* plans_;
    std::vector<Entry> entries_;  ///< ascending by rows, then width
};

}  // namespace sparsemla
