// Times decode on a GPU as it runs in a model: a graph of calls that depend on each other, cold (every call reads
// records that the caches do not hold) or warm (one call repeated).
//
// Cold: each call has a slots list of its own, of records that are next in the order of a RecordPool: a record comes
// back after more than a gigabyte of others. Before each timed replay the L2 is evicted (by reading, so that nothing is
// left to be written back), then the lists, counts, sinks and query are written anew, as a model's kernels before would
// have done, and one more call runs untimed. Lists of late calls may be gone from the L2 again when a replay reads more
// than it holds; they are under 1 % of the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "harness/spread.h"
#include "sparsemla/decode.h"

namespace sparsemla::harness {

struct ChainSource {
    Record record = Record::fp8_576;  ///< in its default form
    std::int64_t width = 2048;
    std::int64_t active = 2048;          ///< the count of every row, or the largest; what follows in a list is absent
    std::vector<std::int64_t> counts{};  ///< of each row, where they differ: 1 .. active

    std::int64_t count(std::int64_t row) const {
        return counts.empty() ? active : counts[static_cast<std::size_t>(row)];
    }
    friend bool operator==(const ChainSource&, const ChainSource&) = default;
};

/// Where source 0's slots and counts come from: they are there; by convert_indices before each decode; or from token
/// ids that decode itself converts.
enum class Conversion : std::uint8_t { none, before, within };

/// The size of a decode step.
struct ChainShape {
    std::int64_t rows = 1;
    std::int64_t heads = 16;
    std::vector<ChainSource> sources{};
    bool sinks = false;
    DType query_dtype = DType::f8_e4m3;
    Conversion conversion = Conversion::none;
    std::int64_t world = 1;  ///< ranks: of a row's ids, those that are kept stand among others

    Problem problem(Device device) const;
    std::int64_t active_columns() const;                          ///< of a row, the longest one
    std::int64_t total_columns(const ChainSource& source) const;  ///< active ones of all rows
    double record_bytes() const;                                  ///< of the active columns
    double operations() const;                                    ///< multiplications and additions of Q*K and P*V
};

struct GpuLimits {
    double copy_bytes_per_s = 0;  ///< of a large copy within the device, bytes read plus bytes written
    double empty_launch_us = 0;   ///< from one empty kernel to the next, in a graph, with programmatic edges
};

struct TimerSizes {
    std::int64_t records = std::int64_t{1} << 21;      ///< of each pool: over a gigabyte
    std::size_t evict_bytes = std::size_t{512} << 20;  ///< several times any L2
    std::size_t copy_bytes = std::size_t{1} << 30;     ///< of the copy that measures the rate
};

class DecodeTimer {
   public:
    explicit DecodeTimer(Device device, const TimerSizes& sizes = {});
    DecodeTimer(DecodeTimer&&) noexcept;
    DecodeTimer& operator=(DecodeTimer&&) noexcept;
    ~DecodeTimer();

    GpuLimits measure_limits() const;

    /// Makes the inputs of a step, with a list for each of `calls` calls of a graph and the untimed one.
    void load(const ChainShape& shape, int calls);
    /// Arguments of a call of the loaded step: 0 .. calls - 1, or `calls` for the untimed one. On the device.
    DecodeArgs args(int call) const;
    /// What converts the call's token ids; where decode does, without slots and counts.
    ConvertArgs indices(int call) const;

    /// Microseconds a call, over `repeats` replays of a graph. The plan is one of the loaded step's problem. Throws
    /// Error(device) where a call left something unwritten or NaN.
    Spread cold(const Plan& plan, int repeats);
    Spread warm(const Plan& plan, int calls, int repeats);

   private:
    void step(const Plan& plan, int call, Stream stream) const;  ///< decode, and what comes before it

    struct Parts;
    std::unique_ptr<Parts> parts_;
};

}  // namespace sparsemla::harness
