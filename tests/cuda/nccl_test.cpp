// A group of one rank with the real NCCL: set-up, windows, exchanges through them and by collectives. SPARSEMLA_NCCL
// names the library, libnccl.so.2 unless it is set; without one the tests are skipped. Several ranks: nccl_ranks.cpp.
#include "sparsemla/nccl_exchange.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "tests/cuda/gpu_calls.h"
#include "tests/dcp.h"
#include "tests/nccl_ranks.h"

namespace sparsemla::test {
namespace {

class OneNcclRank : public OnGpu {
   protected:
    void SetUp() override {
        OnGpu::SetUp();
        if (IsSkipped()) return;
        try {
            new_nccl_id(options().library);
        } catch (const Error& error) {
            if (error.kind() == ErrorKind::unsupported) GTEST_SKIP() << error.what();
            throw;
        }
    }
    static Device device() { return tested_device().device; }
    static NcclOptions options() { return {.library = environment("SPARSEMLA_NCCL", default_nccl_library)}; }
};

TEST_F(OneNcclRank, MailboxesGiveTheBitsOfTheMergedPartials) {
    DcpStep step({.head_offset = {0, 5}, .width = 130, .sinks = true, .seed = 31});
    const std::vector<harness::DcpWindow> windows = step.windows(100);
    NcclGroup group(shape_of(step.group(), step.step()), device(), {}, options());
    SCOPED_TRACE(group.describe());
    const harness::GpuStream stream(device());
    EXPECT_EQ(run_by_mailbox(group, step.group(), step.step(), windows, stream.stream()), "");
    EXPECT_EQ(status(group.mailbox(), stream.stream()).exchanges, 100U);
    group.barrier(stream.stream());
    group.reset(stream.stream());
    EXPECT_EQ(status(group.mailbox(), stream.stream()).exchanges, 0U);
    EXPECT_EQ(run_by_mailbox(group, step.group(), step.step(), {{0, 3}}, stream.stream()), "");
    // The same exchanges of ranks of one process.
    EXPECT_EQ(step.group().run(windows), "");
}

// What reset writes is there, through the address that kernels use.
TEST_F(OneNcclRank, ItsMailboxIsMemoryOfTheDevice) {
    const DcpShape shape = equal_shares(1, 3, 4);
    NcclGroup group(shape, device(), {}, options());
    const MailboxLayout layout = mailbox_layout(shape);
    EXPECT_EQ(group.mailbox().layout, layout);
    std::vector<std::byte> bytes(static_cast<std::size_t>(layout.bytes));
    ASSERT_EQ(cudaMemcpy(bytes.data(), group.mailbox().peers.base[0], bytes.size(), cudaMemcpyDefault), cudaSuccess);
    EXPECT_EQ(std::count(bytes.begin(), bytes.end(), std::byte{0xFF}), layout.bytes);
    cudaPointerAttributes attributes{};
    ASSERT_EQ(cudaPointerGetAttributes(&attributes, group.mailbox().peers.base[0]), cudaSuccess);
    EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
    EXPECT_EQ(attributes.device, device().index);
}

TEST_F(OneNcclRank, CollectivesGiveTheBitsOfTheMergedPartials) {
    DcpStep step({.head_offset = {0, 5}, .width = 130, .sinks = true, .by_calls = true, .seed = 32});
    NcclExchange exchange(shape_of(step.group(), step.step()), device(), {}, options());
    SCOPED_TRACE(exchange.describe());
    const harness::GpuStream stream(device());
    EXPECT_EQ(run_by_collectives(exchange, step.group(), step.step(), step.windows(30), &stream), "");
}

TEST_F(OneNcclRank, CollectivesAreCaptured) {
    DcpStep step({.head_offset = {0, 5}, .width = 130, .by_calls = true, .seed = 33});
    NcclExchange exchange(shape_of(step.group(), step.step()), device(), {}, options());
    CollectiveRank rank(exchange, step.group(), step.step());
    rank.make_tensors();
    const harness::GpuStream stream(device());
    for (const bool pushed : {false, true}) {
        const harness::DcpWindow window{1, 4};
        const harness::GpuGraph graph(stream, [&](Stream s) { rank.enqueue(window, pushed, s); });
        for (int i = 0; i < 3; ++i) {
            rank.poison();
            graph.replay(stream.stream());
            stream.synchronize();
            EXPECT_EQ(rank.difference_of(window), "");
        }
    }
}

TEST_F(OneNcclRank, GroupsComeAndGo) {
    for (int i = 0; i < 3; ++i) {
        NcclGroup group(equal_shares(1, 3, 4), device(), {}, options());
        NcclExchange exchange(equal_shares(1, 3, 4), device(), {}, options());
        EXPECT_EQ(status(group.mailbox()).exchanges, 0U);
    }
}

}  // namespace
}  // namespace sparsemla::test
