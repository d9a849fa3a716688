// First uses of the library's kernels while a rank waits on the GPU (K29, B076): prepare has loaded them all, so none
// waits for the GPU to be idle, which it would be only when the waiting rank gives up. A program of its own, in which
// nothing has run before.
#include <chrono>
#include <thread>

#include "tests/cuda/gpu_dcp.h"

namespace sparsemla::test {
namespace {

using harness::DcpOutputs;
using harness::DcpWindow;
using harness::DeviceTensor;
using harness::GpuStream;

constexpr double limit_s = 3;

/// What `merge` and `quantize_query` read and write.
struct OtherVerbs {
    OtherVerbs() {
        for (int i = 0; i < 2; ++i) {
            outs.emplace_back(DType::bf16, std::vector<std::int64_t>{2, 3, value_dims}, 0x3C, tested_device().device);
            lses.emplace_back(DType::f32, std::vector<std::int64_t>{2, 3}, 0, tested_device().device);
            partials.push_back({.out = outs.back().view(), .lse = lses.back().view()});
        }
    }
    void submit(Stream on) {
        merge({.rows = 2, .heads = 3, .partials = partials, .out = merged.view(), .lse = merged_lse.view()}, on);
        quantize_query(outs[0].view(), 1.0F, codes.view(), on);
    }

    std::vector<DeviceTensor> outs, lses;
    std::vector<Partial> partials;
    DeviceTensor merged{DType::bf16, {2, 3, value_dims}, 0xFF, tested_device().device};
    DeviceTensor merged_lse{DType::f32, {2, 3}, 0xFF, tested_device().device};
    DeviceTensor codes{DType::f8_e4m3, {2, 3, value_dims}, 0xFF, tested_device().device};
};

TEST_F(GpuDcp, FirstUsesWhileARankWaits) {
    DcpSpec spec{.rows = 8, .head_offset = {0, 3, 5}, .width = 60, .seed = 3};
    LimitedStep fused(spec, limit_s);
    spec.by_calls = true;
    LimitedStep by_calls(spec, limit_s);
    ASSERT_TRUE(fused.group().plan().fuses_exchange) << fused.text();
    // Rank 0 as one kernel, rank 1 by separate calls, in the same mailboxes.
    by_calls.group().mailbox(1) = fused.group().mailbox(1);
    harness::DcpRank &rank_0 = fused.group().rank(0), &rank_1 = by_calls.group().rank(1);
    DcpOutputs of_0 = rank_0.make_outputs(), of_1 = rank_1.make_outputs();
    OtherVerbs others;
    std::vector<GpuStream> streams;
    for (int i = 0; i < 3; ++i) streams.emplace_back(gpu());
    const DcpWindow window{row_of_all_ranks(fused), 1};

    const auto begin = std::chrono::steady_clock::now();
    const auto seconds = [&] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    rank_0.gather(window, streams[0].stream());
    rank_0.decode(window, streams[0].stream());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(is_done(streams[0].stream())) << "rank 0 was to wait for the query of rank 1";
    others.submit(streams[2].stream());
    while (!is_done(streams[2].stream()) && seconds() < limit_s)
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    EXPECT_FALSE(is_done(streams[0].stream())) << "rank 0 was to wait while other verbs ran";
    rank_1.gather(window, streams[1].stream());
    rank_1.decode(window, streams[1].stream());  // receive, decode and push
    rank_1.merge_to(of_1, window, streams[1].stream());
    rank_0.merge_to(of_0, window, streams[0].stream());
    for (const GpuStream& stream : streams) stream.synchronize();
    EXPECT_LT(seconds(), limit_s / 2) << "something waited for rank 0 to give up";
    EXPECT_EQ(fused.group().difference(0, window, &of_0), "") << fused.text();
    EXPECT_EQ(by_calls.group().difference(1, window, &of_1), "") << by_calls.text();
    EXPECT_EQ(exchanges_of(fused.group()), 1U);
    EXPECT_EQ(others.merged.fetch().bytes[0], others.outs[0].fetch().bytes[0]) << "equal partials merge to themselves";
    EXPECT_STREQ(kept_error(), "");
}

}  // namespace
}  // namespace sparsemla::test
