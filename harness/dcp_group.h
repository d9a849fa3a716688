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

/// One rank: its shard, its heads' query and sinks, its memory and results. Calls of one exchange, in this order.
class DcpRank {
   public:
    DcpRank(const CaseStep& whole, const Shard& shard, const DcpGroupOptions& options, const Plan& plan,
            Mailbox& mailbox);

    void gather(const DcpWindow& window, Stream stream = {});
    void decode(const DcpWindow& window, Stream stream = {});
    void merge(const DcpWindow& window, Stream stream = {});

    void poison();  ///< results
    /// [rows of the step, own heads, 512] and [.., own heads]; the first window.rows rows are the last exchange's.
    const OwnedTensor& out() { return out_.fetch(); }
    const OwnedTensor& lse() { return lse_.fetch(); }

   private:
    DecodeArgs decode_args(const DcpWindow& window) const;

    const DcpGroupOptions& options_;
    const Plan& plan_;
    Mailbox& mailbox_;
    std::int64_t own_heads_;
    DecodeArgs args_;  ///< of all rows
    std::vector<DeviceTensor> inputs_;
    DeviceTensor query_, sinks_, out_, lse_, workspace_, state_;
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
    /// On a GPU: all ranks' stages of a window onto the stream, as they may be captured.
    void lockstep(const DcpWindow& window, Stream stream);
    /// "", or where a rank's results differ from what the window must give; any NaN is as good as another.
    std::string difference(int rank, const DcpWindow& window);
    /// The results of the last exchange, of all heads.
    DcpExpectation results(const DcpWindow& window);
    const GpuStream& stream() const { return *stream_; }

   private:
    std::string run_threads(std::span<const DcpWindow> windows);

    const CaseStep& whole_;
    DcpGroupOptions options_;
    Plan plan_;
    std::vector<Shard> shards_;
    std::unique_ptr<LoopbackGroup> loopback_;
    std::vector<std::unique_ptr<DcpRank>> ranks_;
    std::optional<GpuStream> stream_;
    DcpExpectation expectation_;
};

}  // namespace sparsemla::harness
