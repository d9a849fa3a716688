// Which measured layout a problem gets, and that plans take the layouts of the table that is built in.
#include "tuning_table.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "sparsemla/decode.h"
#include "tests/hopper.h"

namespace sparsemla::detail {
namespace {

constexpr std::string_view h200 = "NVIDIA H200";

TuningRow row(std::int64_t rows, std::int64_t heads, std::int64_t chunks, std::string_view gpu = h200,
              Record record = Record::fp8_576, int sources = 1) {
    return {.gpu = gpu,
            .record = record,
            .sources = sources,
            .rows = rows,
            .heads = heads,
            .chunks = chunks,
            .splits = 1,
            .tile_heads = 16,
            .stages = 1,
            .us = 5};
}

TuningKey key(std::int64_t rows, std::int64_t heads, std::int64_t chunks) {
    return {.gpu = h200, .record = Record::fp8_576, .sources = 1, .rows = rows, .heads = heads, .chunks = chunks};
}

/// Which row of the table is found, or -1.
std::ptrdiff_t found(const std::vector<TuningRow>& table, const TuningKey& wanted) {
    const TuningRow* best = find_tuning(table, wanted);
    return best == nullptr ? -1 : best - table.data();
}

TEST(TuningTable, NearestLargerInEveryDirection) {
    std::vector<TuningRow> table;
    for (const std::int64_t rows : {1, 4, 16})
        for (const std::int64_t heads : {16, 64})
            for (const std::int64_t chunks : {1, 8, 32}) table.push_back(row(rows, heads, chunks));
    const auto expect = [&](const TuningKey& wanted, std::int64_t rows, std::int64_t heads, std::int64_t chunks) {
        const std::ptrdiff_t at = found(table, wanted);
        ASSERT_GE(at, 0);
        const TuningRow& best = table[static_cast<std::size_t>(at)];
        EXPECT_EQ(best.rows, rows);
        EXPECT_EQ(best.heads, heads);
        EXPECT_EQ(best.chunks, chunks);
    };
    expect(key(1, 16, 1), 1, 16, 1);
    expect(key(2, 17, 2), 4, 64, 8);
    expect(key(16, 64, 32), 16, 64, 32);
    expect(key(0, 0, 0), 1, 16, 1);
    for (const TuningKey& larger : {key(17, 16, 1), key(1, 65, 1), key(1, 16, 33)}) EXPECT_EQ(found(table, larger), -1);
    EXPECT_EQ(found({}, key(1, 16, 1)), -1);
}

TEST(TuningTable, DimensionsAndSourcesAreExact) {
    const std::vector<TuningRow> table = {row(8, 16, 8, h200, Record::fp8_512, 2), row(16, 16, 8)};
    EXPECT_EQ(found(table, key(1, 1, 1)), 1);
    TuningKey two = key(1, 1, 1);
    two.record = Record::fp8_512;
    EXPECT_EQ(found(table, two), -1);
    two.sources = 2;
    EXPECT_EQ(found(table, two), 0);
}

TEST(TuningTable, AnotherGpuOnlyWhereThereIsNoneOfThisName) {
    const std::vector<TuningRow> table = {row(1, 16, 1, "NVIDIA H100"), row(8, 16, 8)};
    EXPECT_EQ(found(table, key(1, 16, 1)), 1);
    TuningKey other = key(1, 16, 1);
    other.gpu = "NVIDIA GH200 480GB";
    EXPECT_EQ(found(table, other), 0);
    EXPECT_EQ(found({table.back()}, other), 0);
}

constexpr const char* swept_kernel = "decode_latency";

/// A problem of exactly the row's size.
Problem problem_of(const TuningRow& measured) {
    Problem problem;
    problem.rows = measured.rows;
    problem.heads = measured.heads;
    problem.device = test::hopper().device;
    const RecordLayout& layout = layout_of(measured.record);
    problem.query_dtype = layout.takes_k_scale ? DType::f8_e4m3 : DType::bf16;
    for (int i = 0; i < measured.sources; ++i)
        problem.sources.push_back({.record = layout.record,
                                   .form = layout.default_form(),
                                   .width = 64 * (i == 0 ? measured.chunks - (measured.sources - 1) : 1)});
    return problem;
}

TEST(TuningTable, PlansTakeTheLayoutsThatAreBuiltIn) {
    if (!build_info().cuda) GTEST_SKIP() << "plans of a GPU need the CUDA part";
    for (const TuningRow& measured : tuning_table()) {
        const Problem problem = problem_of(measured);
        const DeviceSpec device = test::hopper(std::string(measured.gpu).c_str());
        const Plan plan = make_plan(problem, device, {.kernel = swept_kernel});
        EXPECT_EQ(plan.schedule.splits, measured.splits);
        EXPECT_EQ(plan.tiling->heads, measured.tile_heads);
        EXPECT_EQ(plan.tiling->stages, measured.stages);
        EXPECT_EQ(plan.tiling->cluster_tiles, measured.cluster_tiles);
        EXPECT_EQ(plan.tiling->gather, measured.gather);
        EXPECT_EQ(plan.expected_us, measured.us);
        EXPECT_NE(plan.reason.find("measured on " + std::string(measured.gpu)), std::string::npos) << plan.reason;
        const Plan forced = make_plan(problem, device, {.kernel = swept_kernel, .splits = 1});
        EXPECT_EQ(forced.schedule.splits, 1);
        EXPECT_EQ(forced.reason.find("measured"), std::string::npos) << forced.reason;
        // Of another GPU, what runs at once here too.
        const std::string elsewhere =
            make_plan(problem, test::hopper("a Hopper of its own"), {.kernel = swept_kernel}).reason;
        const bool borrowed = elsewhere.find(": not measured on this GPU") != std::string::npos;
        EXPECT_EQ(borrowed, plan.reason.find("waves") == std::string::npos) << elsewhere << "; " << plan.reason;
    }
}

// Rows between two measured numbers: the layout of fewer rows, while its clusters still fit at once.
TEST(TuningTable, RowsBetweenMeasuredOnes) {
    if (!build_info().cuda) GTEST_SKIP() << "plans of a GPU need the CUDA part";
    int fewer = 0;
    for (const std::int64_t heads : {16, 64, 96})
        for (const std::int64_t rows : {7, 9, 13, 17, 25, 33, 49, 65, 66, 67, 100}) {
            const TuningRow& covering = *find_tuning(tuning_table(), key(rows, heads, 32));
            const Plan plan = make_plan(problem_of(row(rows, heads, 32)), test::hopper(), {.kernel = swept_kernel});
            EXPECT_NE(plan.reason.find("measured on NVIDIA H200"), std::string::npos) << plan.reason;
            EXPECT_LE(plan.expected_us, covering.us) << rows << " rows, " << heads << " heads";
            if (plan.schedule.splits > covering.splits) ++fewer;
        }
    EXPECT_GT(fewer, 5);
    // 66 clusters of two fit.
    ASSERT_EQ(find_tuning(tuning_table(), key(64, 16, 32))->splits, 2);
    EXPECT_EQ(make_plan(problem_of(row(66, 16, 32)), test::hopper(), {.kernel = swept_kernel}).schedule.splits, 2);
    EXPECT_NE(make_plan(problem_of(row(67, 16, 32)), test::hopper(), {.kernel = swept_kernel}).schedule.splits, 2);
}

// What is past the table, or forced, comes from the expectation, which is then no measured time.
TEST(TuningTable, LargerProblemsAreExpectedOnly) {
    if (!build_info().cuda) GTEST_SKIP() << "plans of a GPU need the CUDA part";
    Problem problem = problem_of(row(5000, 128, 400));
    const Plan plan = make_plan(problem, test::hopper());
    EXPECT_EQ(plan.reason.find("measured"), std::string::npos) << plan.reason;
    EXPECT_GT(plan.expected_us, 0);
}

}  // namespace
}  // namespace sparsemla::detail
