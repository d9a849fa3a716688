// Ranks of decode context parallelism in one process, which run a step's exchanges with one another: what tests, the
// tool and benchmarks share.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "harness/gpu.h"
#include "harness/shard.h"
#include "sparsemla/mailbox.h"

namespace sparsemla::harness {

/// Bytes on a device, from host memory.
class DeviceTensor {
   public:
    DeviceTensor() = default;
    /// A copy of a dense tensor on the device; on a CPU of its own, too.
    DeviceTensor(const ConstTensor& host, Device device);
    /// Filled with a byte.
    DeviceTensor(DType dtype, std::vector<std::int64_t> shape, int byte, Device device);

    const Tensor& view() const { return view_; }
    Memory memory() const { return {view_.data, host_.size_bytes}; }
    /// What it holds, in host memory; whoever writes it has been waited for.
    const OwnedTensor& fetch();
    void fill(int byte);

   private:
    OwnedTensor host_;
    std::optional<GpuBuffer> buffer_;
    Tensor view_;
};

struct DcpGroupOptions {
    Sharing sharing{};
    DeviceSpec device{};
    PlanOptions plan{};
    bool by_calls = false;    ///< receive_query, decode of a plain problem, push: instead of decode of a dcp problem
    bool bf16_query = false;  ///< ranks hold BF16 queries, which become the step's E4M3 codes in gather_query
    LseBase lse_base = LseBase::natural;
    DType out_dtype = DType::bf16;
    double wait_limit_s = 20;
};

/// Rows of the step that take part in an exchange.
struct DcpWindow {
    std::int64_t first_row = 0, rows = 0;
};

/// Results of a rank: [rows of the step, own heads, 512] and [.., own heads].
struct DcpOutputs {
    DeviceTensor out, lse;

    void fill(int byte) {
        out.fill(byte);
        lse.fill(byte);
    }
};
using DcpResults = std::vector<DcpOutputs>;  ///< of every rank

/// What a rank's calls read on the device.
struct DcpInputs {
    std::vector<Memory> gather, decode, merge;
};

/// CTAs of a rank's kernels of one exchange on a GPU, 0 of those that it has not.
struct DcpGrids {
    std::int64_t gather = 0, receive = 0, decode = 0, push = 0, merge = 0;

    /// Of the kernel that a DcpDelay of the stage is about.
    std::int64_t of(DcpStage stage) const;
};

/// How ranks that run at the same time are submitted.
struct DcpConcurrency {
    std::uint64_t seed = 1;  ///< of whose turn it is, and of pauses of the host
    int at_once = 64;        ///< exchanges before the host waits for all of them
    int most_ahead = 8;      ///< exchanges that one rank may be submitted before another
    /// Before a rank's calls of an exchange: sets its delay, say.
    std::function<void(int rank, std::size_t exchange)> before{};
};

/// One rank: its shard, its heads' query and sinks, its memory and results. Calls of one exchange, in this order.
class DcpRank {
   public:
    DcpRank(const CaseStep& whole, const Shard& shard, const DcpGroupOptions& options, const Plan& plan,
            Mailbox& mailbox);

    void gather(const DcpWindow& window, Stream stream = {});
    void decode(const DcpWindow& window, Stream stream = {});
    void merge(const DcpWindow& window, Stream stream = {}) { merge_to(outputs_, window, stream); }
    void merge_to(const DcpOutputs& outputs, const DcpWindow& window, Stream stream = {});

    DcpInputs inputs() const;
    DcpOutputs make_outputs() const;
    void poison() { outputs_.fill(0xFF); }
    /// [rows of the step, own heads, 512] and [.., own heads]; the first window.rows rows are the last exchange's.
    const OwnedTensor& out() { return outputs_.out.fetch(); }
    const OwnedTensor& lse() { return outputs_.lse.fetch(); }
    DcpOutputs& outputs() { return outputs_; }

   private:
    DecodeArgs decode_args(const DcpWindow& window) const;

    const DcpGroupOptions& options_;
    const Plan& plan_;
    Mailbox& mailbox_;
    std::int64_t own_heads_;
    DecodeArgs args_;  ///< of all rows
    std::vector<DeviceTensor> inputs_;
    DeviceTensor query_, sinks_, workspace_, state_;
    DcpOutputs outputs_;
    DeviceTensor received_, partial_out_, partial_lse_;  ///< by_calls
};

/// What every exchange of a window must give: each rank's partial results merged by `merge` on the CPU.
struct DcpExpectation {
    OwnedTensor out;  ///< [rows, heads, 512]
    OwnedTensor lse;  ///< [rows, heads]
};

class DcpGroup {
   public:
    /// Plans and prepares; the step must outlive the group.
    DcpGroup(const CaseStep& whole, const DcpGroupOptions& options);

    const Plan& plan() const { return plan_; }
    const DcpGroupOptions& options() const { return options_; }
    int world() const { return loopback_->world(); }
    const std::vector<Shard>& shards() const { return shards_; }
    Mailbox& mailbox(int rank) { return loopback_->mailbox(rank); }
    DcpRank& rank(int number) { return *ranks_.at(static_cast<std::size_t>(number)); }
    const DcpExpectation& expectation() const { return expectation_; }
    void reset() { loopback_->reset(); }

    /// Exchanges one after another: on a CPU by a thread for each rank, none of which waits for another but in the
    /// exchange itself; on a GPU stage by stage on one stream. Every rank's results of every exchange are compared.
    /// "", or what differed first.
    std::string run(std::span<const DcpWindow> windows);
    /// The same with ranks that run at the same time and wait for one another on a GPU too, on a stream each; results
    /// are compared after every `at_once` exchanges. Throws Error (unsupported) where their CTAs do not fit.
    std::string run_concurrent(std::span<const DcpWindow> windows, const DcpConcurrency& how = {});
    /// Throws Error (unsupported), with the numbers, unless all CTAs that ranks can have on the GPU at the same time
    /// find a place, so that none waits for one that has not started.
    void check_all_resident(std::int64_t rows) const;
    DcpGrids grids(int rank, std::int64_t rows) const;
    DcpResults make_results() const;

    /// On a GPU: all ranks' stages of a window onto the stream, as they may be captured. To the ranks' own results,
    /// unless others are given.
    void lockstep(const DcpWindow& window, Stream stream, const DcpResults* to = nullptr);
    /// "", or where a rank's results (its own, unless others are given) differ from what the window must give; any NaN
    /// is as good as another.
    std::string difference(int rank, const DcpWindow& window, DcpOutputs* of = nullptr);
    /// The results of the last exchange, of all heads.
    DcpExpectation results(const DcpWindow& window);
    const GpuStream& stream() const { return *stream_; }

   private:
    std::string run_threads(std::span<const DcpWindow> windows, const DcpConcurrency& how = {});
    void submit(std::span<const DcpWindow> windows, std::size_t first, const std::vector<DcpResults>& to,
                const DcpConcurrency& how);

    const CaseStep& whole_;
    DcpGroupOptions options_;
    Plan plan_;
    std::vector<Shard> shards_;
    std::unique_ptr<LoopbackGroup> loopback_;
    std::vector<std::unique_ptr<DcpRank>> ranks_;
    std::optional<GpuStream> stream_;
    std::vector<GpuStream> rank_streams_;  ///< of run_concurrent
    DcpExpectation expectation_;
};

}  // namespace sparsemla::harness
