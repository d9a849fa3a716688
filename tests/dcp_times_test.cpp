// Times of an exchange's stages: a late rank shows in its own stage and in what the others wait for; in lockstep, on a
// GPU, nobody waits.
#include "harness/dcp_times.h"

#include "tests/dcp.h"

namespace sparsemla::test {
namespace {

TEST(DcpTimes, ALateRank) {
    constexpr float late_us = 20'000;
    DcpStep step({.rows = 4, .head_offset = {0, 2, 3, 5}, .width = 24, .seed = 9});
    step.group().mailbox(1).delay = {.stage = DcpStage::gather, .us = late_us};
    const std::vector<harness::DcpWindow> windows = {{0, 4}, {1, 2}, {0, 3}};
    const auto times = harness::time_exchanges(step.group(), windows);
    ASSERT_EQ(times.size(), windows.size());
    for (const std::vector<harness::DcpTimes>& ranks : times) {
        ASSERT_EQ(ranks.size(), 3U);
        EXPECT_GT(ranks[1].gather_us, 0.9 * late_us);
        for (const int other : {0, 2}) {
            EXPECT_LT(ranks[other].gather_us, ranks[1].gather_us);
            EXPECT_EQ(ranks[other].decode_us > 0.5 * late_us, !on_gpu());
        }
        for (const harness::DcpTimes& rank : ranks)
            EXPECT_GE(1.001 * rank.step_us, rank.gather_us + rank.decode_us + rank.merge_us);
    }
    // What comes after it is as if nobody had looked at the clock.
    step.group().mailbox(1).delay = {};
    step.expect_run(20);
}

}  // namespace
}  // namespace sparsemla::test
