// Times the stages of an exchange on one GPU, where all ranks run in lockstep: nobody waits for anybody, and what goes
// to peers goes to memory of the same GPU. What a stage costs, then, without links and skew.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "harness/decode_timer.h"
#include "harness/spread.h"
#include "sparsemla/mailbox.h"

namespace sparsemla::harness {

struct DcpTimerShape {
    std::string name{};
    int world = 2;
    std::int64_t own_heads = 48;  ///< of every rank
    std::int64_t rows = 5;
    Record record = Record::fp8_576;
    std::int64_t width = 2048;
    std::int64_t active = 256;  ///< columns that a rank owns of every row
    DType query_dtype = DType::f8_e4m3;
};

/// Microseconds a call of one rank, in graphs of calls that follow one another. Records are cold.
struct DcpTimes {
    std::string schedule{}, tiling{};
    Spread decode{};       ///< of a problem that is not dcp, the same schedule: query and results in tensors
    Spread gather{};       ///< gather_query from BF16
    Spread decode_push{};  ///< of the dcp problem; its query is there
    Spread merge{};        ///< by difference: exchanges with it, and the same without
    Spread step{};         ///< gather_query, decode of the dcp problem, merge_pushed
    Spread by_calls{};     ///< the same with receive_query, decode and push as calls of their own
};

class DcpTimer {
   public:
    explicit DcpTimer(Device device, const TimerSizes& sizes = {});
    ~DcpTimer();
    DcpTimer(const DcpTimer&) = delete;
    DcpTimer& operator=(const DcpTimer&) = delete;

    /// `exchanges` of all ranks in a graph, replayed `repeats` times.
    DcpTimes measure(const DcpTimerShape& shape, const DeviceSpec& device, PlanOptions options, int exchanges,
                     int repeats);

   private:
    struct Parts;
    std::unique_ptr<Parts> parts_;
};

/// What the issue of context parallelism asks for: rows 1, 5, 10 and 20 of 96 heads, of 2 ranks and of 8.
std::vector<DcpTimerShape> dcp_suite();

}  // namespace sparsemla::harness
