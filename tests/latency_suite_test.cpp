// The list of steps whose latency is measured, for a GPU that need not be there.
#include "harness/latency_suite.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "tests/hopper.h"

namespace sparsemla::harness {
namespace {

std::vector<LatencyShape> suite() { return latency_suite(test::hopper(), {}); }

TEST(LatencySuite, NamesAreUniqueAndShapesAreTaken) {
    const std::vector<LatencyShape> shapes = suite();
    std::set<std::string> names;
    for (const LatencyShape& shape : shapes) {
        EXPECT_TRUE(names.insert(shape.name).second) << shape.name;
        for (const ChainSource& source : shape.shape.sources) EXPECT_LE(source.active, source.width) << shape.name;
        const auto reason = refusal(shape.shape.problem(test::hopper().device), test::hopper());
        EXPECT_EQ(reason.has_value(), !build_info().cuda) << shape.name << reason.value_or("");
    }
    for (const char* name : {"goal/fp8_576/h96/r5/256of2048", "goal/fp8_512+fp8_512/h16/r6/128+512/sinks",
                             "goal/fp8_512/h16/r6/128", "gb300/fp8_576/h128/r320/2048"})
        EXPECT_EQ(names.count(name), 1U) << name;
}

TEST(LatencySuite, GroupsAreComplete) {
    std::size_t goals = 0, large = 0;
    for (const LatencyShape& shape : suite()) {
        goals += shape.goal_us > 0 ? 1 : 0;
        large += shape.gb300_us > 0 ? 1 : 0;
        EXPECT_EQ(shape.series.empty(), shape.name.rfind("cliff_", 0) != 0) << shape.name;
    }
    EXPECT_EQ(goals, 11U);
    EXPECT_EQ(large, 10U);
}

// The one-wave limit of every head count is looked at from both sides, and so is every change of layout.
TEST(LatencySuite, RowsSurroundEveryBoundary) {
    if (!build_info().cuda) GTEST_SKIP() << "plans of a GPU need the CUDA part";
    const std::vector<LatencyShape> shapes = suite();
    for (const std::int64_t heads : {16, 64, 96}) {
        const std::string series = "rows, " + std::to_string(heads) + " heads";
        std::set<std::int64_t> rows;
        for (const LatencyShape& shape : shapes)
            if (shape.series == series) rows.insert(shape.step);
        ASSERT_FALSE(rows.empty()) << series;
        const auto plan_of = [&](std::int64_t count) {
            ChainShape shape{.rows = count, .heads = heads, .sources = {{}}};
            return make_plan(shape.problem(test::hopper().device), test::hopper());
        };
        const std::int64_t last = *rows.rbegin();
        const std::int64_t tiles = heads == 16 ? 1 : heads / 32;
        EXPECT_EQ(last, test::hopper().sms / tiles + 1) << series;
        EXPECT_TRUE(rows.count(last - 1) == 1 && rows.count(last - 2) == 1) << series;
        for (std::int64_t count = 1; count + 1 < last; ++count) {
            const Plan before = plan_of(count), after = plan_of(count + 1);
            const bool change =
                before.schedule.splits != after.schedule.splits || before.schedule.kernel != after.schedule.kernel;
            EXPECT_TRUE(!change || (rows.count(count) == 1 && rows.count(count + 1) == 1)) << series << ", " << count;
        }
    }
}

TEST(LatencySuite, PairsAreOneApart) {
    const std::vector<LatencyShape> shapes = suite();
    const std::vector<CliffPair> pairs = cliff_pairs(shapes);
    EXPECT_GE(pairs.size(), 6U + 2 * 6U);
    for (const CliffPair& pair : pairs) {
        EXPECT_EQ(shapes[pair.before].series, shapes[pair.after].series);
        EXPECT_EQ(shapes[pair.before].step + 1, shapes[pair.after].step);
    }
}

}  // namespace
}  // namespace sparsemla::harness
