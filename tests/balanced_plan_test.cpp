// What decode_balanced would launch, and when plans choose it, without a GPU.
#include <gtest/gtest.h>

#include "balanced_plan.h"
#include "gpu.h"
#include "tests/hopper.h"

namespace sparsemla {
namespace {

using detail::BalancedShape;
using test::hopper;

class BalancedPlan : public testing::Test {
   protected:
    void SetUp() override {
        if (!detail::gpu_built()) GTEST_SKIP() << "this build has no CUDA part";
    }
};

Problem problem_of(std::int64_t rows, std::int64_t heads, std::vector<std::int64_t> widths = {2048},
                   Record record = Record::fp8_576) {
    Problem problem{.rows = rows, .heads = heads, .sources = {}, .device = {Device::Kind::cuda, 0}};
    for (const std::int64_t width : widths) problem.sources.push_back({.record = record, .width = width});
    return problem;
}

Plan balanced(const Problem& problem, PlanOptions options = {}, const DeviceSpec& device = hopper()) {
    options.kernel = "decode_balanced";
    return make_plan(problem, device, options);
}

std::string refused(const Problem& problem, PlanOptions options) {
    options.kernel = "decode_balanced";
    return refusal(problem, hopper(), options).value_or("");
}

void expect_launchable(const Plan& plan) {
    SCOPED_TRACE(plan.describe());
    const BalancedShape shape = detail::balanced_shape(plan);
    const int tile = plan.tiling->heads;
    EXPECT_GE(shape.ctas, 1);
    EXPECT_LE(shape.ctas, plan.device.sms) << "CTAs wait for each other: all of them must run at a time";
    EXPECT_GE(shape.tiles * tile, plan.problem.heads);
    EXPECT_LT((shape.tiles - 1) * tile, std::max<std::int64_t>(plan.problem.heads, 1));
    EXPECT_LE(shape.shared_bytes, static_cast<std::size_t>(plan.device.shared_memory_bytes));
    EXPECT_LE(plan.schedule.splits, detail::balanced::max_splits_of(plan.tiling->stages));
    EXPECT_EQ(plan.tiling->cluster_tiles, 1);
    EXPECT_EQ(shape.one_split_each, plan.problem.rows * shape.tiles * plan.schedule.splits == shape.ctas);

    // What a CTA hands over: 512 sums of every head, and a maximum and a share of a sum for each of its 32 lanes; 8
    // bytes of each of the 256 threads besides.
    const auto tiles_of_rows = static_cast<std::size_t>(plan.problem.rows * shape.tiles);
    const std::size_t handovers =
        static_cast<std::size_t>(shape.ctas) * (static_cast<std::size_t>(tile) * (512 * 4 + 256) + 2048);
    const std::size_t partials =
        plan.schedule.splits == 1 ? 0 : tiles_of_rows * static_cast<std::size_t>(plan.schedule.splits * tile) * 2056;
    EXPECT_GE(plan.workspace_bytes, handovers + partials);
    EXPECT_LT(plan.workspace_bytes, handovers + partials + 64);
    EXPECT_GE(plan.state_bytes, (tiles_of_rows + static_cast<std::size_t>(shape.ctas)) * 4);
}

TEST_F(BalancedPlan, AnyProblemIsLaunchable) {
    for (const std::int64_t rows : {0, 1, 2, 31, 132, 133, 1000, 100'000})
        for (const std::int64_t heads : {0, 1, 16, 17, 96, 128})
            for (const std::int64_t width : {0, 1, 64, 65, 2048, 16384})
                for (const int sms : {1, 78, 132}) {
                    DeviceSpec device = hopper();
                    device.sms = sms;
                    expect_launchable(balanced(problem_of(rows, heads, {width}), {}, device));
                    expect_launchable(balanced(problem_of(rows, heads, {128, width}, Record::fp8_512), {}, device));
                    if (HasFailure()) return;
                }
}

TEST_F(BalancedPlan, WishesAreHonouredOrRefusedByName) {
    const Problem problem = problem_of(20, 96);
    for (const int splits : {1, 2, 8, 16})
        for (const int tile : {16, 32})
            for (const int stages : {1, 2, 3, 4}) {
                const PlanOptions options{.splits = splits, .tile_heads = tile, .stages = stages};
                if (const std::string reason = refused(problem, options); !reason.empty()) {
                    EXPECT_TRUE(splits > 8 * stages || (tile == 32 && stages == 4)) << reason;
                    continue;
                }
                const Plan plan = balanced(problem, options);
                EXPECT_EQ(plan.schedule.splits, splits);
                EXPECT_EQ(plan.tiling->heads, tile);
                EXPECT_EQ(plan.tiling->stages, stages);
                expect_launchable(plan);
            }
    const auto names = [&](const PlanOptions& options, const std::string& text) {
        EXPECT_NE(refused(problem, options).find(text), std::string::npos) << refused(problem, options);
    };
    names({.splits = 9, .stages = 1}, "splits must be 1 .. 8 with 1 stages, got 9");
    names({.splits = 17}, "splits must be 1 .. 16, got 17");
    names({.cluster_tiles = 2}, "cluster_tiles must be 1");
    names({.transport = Transport::weights}, "transport must be stores, got weights");
    names({.tile_heads = 32, .stages = 4}, "tile_heads and stages must be such that a CTA needs at most 232448 bytes");
    Problem ids = problem_of(4, 64, {512});
    ids.from_ids = true;
    EXPECT_NE(refused(ids, {}).find("from_ids must be false"), std::string::npos) << refused(ids, {});
    EXPECT_NE(refused(problem_of(10'000'000, 128, {16384}), {}).find("rows must be 0 .. "), std::string::npos);
}

// Where clusters would leave SMs idle, or a few rows begin a further wave.
TEST_F(BalancedPlan, IsChosenWhereItIsExpectedToBeFaster) {
    const auto kernel = [](std::int64_t rows, std::int64_t heads) {
        return make_plan(problem_of(rows, heads), hopper()).schedule.kernel;
    };
    EXPECT_EQ(kernel(1, 16), "decode_latency");
    EXPECT_EQ(kernel(5, 96), "decode_latency");
    EXPECT_EQ(kernel(132, 16), "decode_latency");
    EXPECT_EQ(kernel(133, 16), "decode_balanced");
    EXPECT_EQ(kernel(67, 64), "decode_balanced");
    EXPECT_EQ(kernel(45, 96), "decode_balanced");
    const Plan plan = make_plan(problem_of(133, 16), hopper());
    EXPECT_NE(plan.reason.find("expected to be the fastest that takes it: one launch for many rows"), std::string::npos)
        << plan.reason;
    ASSERT_FALSE(plan.declined.empty());
    EXPECT_EQ(plan.declined[0].kernel, "decode_latency");
    EXPECT_NE(plan.declined[0].reason.find("is expected to take"), std::string::npos) << plan.declined[0].reason;
}

}  // namespace
}  // namespace sparsemla
