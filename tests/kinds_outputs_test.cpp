// K04, K18: everything declared is written and nothing else is, with the answer of the right row and head.
#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Step::run poisons outputs and workspace before every call and fails where an element was not written, or where a byte
// beyond the declared rows and heads was.
class K04_OutputOrPartialNeverWritten : public EveryRecord {};

// B007: more splits than columns, as many, and fewer; whatever the workspace held.
TEST_P(K04_OutputOrPartialNeverWritten, B007_EverySplitCountAndCount) {
    constexpr std::int64_t width = 256;
    for (const int splits : {1, 2, 7, 16, 64}) {
        const std::vector<std::int32_t> counts = {1, 2, splits - 1, splits, splits + 1, width};
        Step step({.rows = std::ssize(counts), .heads = 2, .sources = {{.layout = layout(), .width = width}}});
        step.histogram();
        for (std::int64_t row = 0; row < step.args.rows; ++row)
            step.list(row, slot_range(static_cast<std::int32_t>(row), counts[static_cast<std::size_t>(row)]));
        for (PlanOptions options : schedules()) {
            options.kernel = kernel();
            options.splits = splits;
            if (!supports(step.problem, step.device, options)) continue;
            const Plan plan = step.plan(options);
            const Result first = step.run(plan, 0xFF);
            for (std::int64_t row = 0; row < step.args.rows; ++row) {
                const std::int32_t count = counts[static_cast<std::size_t>(row)];
                if (count == 0)
                    expect_empty_row(first, row);
                else
                    expect_histogram(first, row, slot_range(static_cast<std::int32_t>(row), count));
            }
            for (const int byte : {0x00, 0x41}) {
                const Result again = step.run(plan, byte);
                ASSERT_EQ(again.out_bits, first.out_bits) << to_string(plan.schedule) << ", workspace of " << byte;
                ASSERT_EQ(again.lse_bits, first.lse_bits) << to_string(plan.schedule) << ", workspace of " << byte;
            }
            if (HasFailure()) return;
        }
    }
}

// B008: rows of length 0 between others.
TEST_P(K04_OutputOrPartialNeverWritten, B008_EmptyRowsAreWritten) {
    const std::vector<std::int32_t> counts = {0, 5, 0, 0, 7, 0, 1, 0};
    for (const DType out_dtype : {DType::bf16, DType::f32}) {
        Step step({.rows = 8, .heads = 5, .sources = {{.layout = layout()}}, .out_dtype = out_dtype});
        step.histogram();
        for (std::int64_t row = 0; row < 8; ++row) step.list(row, slot_range(3, counts[static_cast<std::size_t>(row)]));
        for_each_schedule(kernel(), step, [&](const Result& result) {
            for (std::int64_t row = 0; row < 8; ++row)
                if (counts[static_cast<std::size_t>(row)] == 0)
                    expect_empty_row(result, row);
                else
                    expect_histogram(result, row, slot_range(3, counts[static_cast<std::size_t>(row)]));
        });
    }
}

// B009: a small batch on a plan of large capacity; the padded rows and heads keep their canaries.
TEST_P(K04_OutputOrPartialNeverWritten, B009_PaddedRowsAndHeadsStayUntouched) {
    for (const std::int64_t heads : {1, 12, 96})
        for (const bool lse : {true, false}) {
            Step step({.rows = 32, .heads = heads, .sources = {{.layout = layout()}}, .lse = lse});
            step.histogram();
            for (std::int64_t row = 0; row < 32; ++row) step.list(row, {static_cast<std::int32_t>(row), 40});
            step.args.rows = 5;
            const Result result = step.run({.kernel = kernel()});
            for (std::int32_t row = 0; row < 5; ++row)
                ASSERT_NO_FATAL_FAILURE(expect_histogram(result, row, {row, 40}));
        }
}

INSTANTIATE_TEST_SUITE_P(All, K04_OutputOrPartialNeverWritten, testing::ValuesIn(kernels_and_layouts()), test_name);

// ---------------------------------------------------------------------------------------------------------------------
class K18_RowOrHeadMapping : public EveryRecord {};

// B021: every head of a row shows that row's list, at head counts that fold into tiles and ones that do not.
TEST_P(K18_RowOrHeadMapping, B021_EveryHeadReadsItsRowsList) {
    for (const std::int64_t heads : {1, 7, 16, 17, 32, 48, 66, 96, 127, 128}) {
        Step step({.rows = 3, .heads = heads, .sources = {{.layout = layout(), .width = 40}}});
        step.histogram();
        for (std::int32_t row = 0; row < 3; ++row) step.list(row, slot_range(100 * row, 40 - row));
        const Result result = step.run({.kernel = kernel()});
        for (std::int32_t row = 0; row < 3; ++row)
            ASSERT_NO_FATAL_FAILURE(expect_histogram(result, row, slot_range(100 * row, 40 - row)));
    }
}

// Every head's query picks another record, told by its only non-zero dimension; every row shifts the choice.
TEST_P(K18_RowOrHeadMapping, EveryQueryPicksItsRecord) {
    constexpr std::int64_t rows = 3;
    constexpr std::int64_t heads = 128;
    Step step({.rows = rows, .heads = heads, .sources = {{.layout = layout(), .width = 256}}});
    step.histogram();
    const auto pick = [](std::int64_t row, std::int64_t head) { return static_cast<int>((head * 2 + row * 77) % 256); };
    for (std::int64_t row = 0; row < rows; ++row) {
        step.list(row, slot_range(0, 256));
        for (std::int64_t head = 0; head < heads; ++head)
            step.query(row, head, [&](int d) { return d == pick(row, head) ? e4m3_max : 0.0F; });
    }
    for_each_schedule(kernel(), step, [&](const Result& result) {
        for (std::int64_t row = 0; row < rows; ++row)
            for (std::int64_t head = 0; head < heads; ++head)
                ASSERT_NO_FATAL_FAILURE(expect_values(result, row, head, histogram_of({pick(row, head)})));
    });
}

// B022: rows of several requests in one call, or one call each, on the same plan.
TEST_P(K18_RowOrHeadMapping, B022_BatchEqualsRowsOneByOne) {
    constexpr std::int64_t rows = 9;
    Step batch({.rows = rows, .heads = 6, .sources = {{.layout = layout(), .width = 100}}});
    Step single({.rows = rows, .heads = 6, .sources = {{.layout = layout(), .width = 100}}});
    randomise(batch, 21);
    randomise(single, 21);
    const auto slots_of = [](std::int32_t row) { return slot_range(row * 31, 100 - row * 11, 2); };
    const auto value_of = [](std::int64_t row, std::int64_t head) {
        return [=](int d) { return std::cos(static_cast<float>(d + 10 * head + 100 * row)); };
    };
    for (std::int32_t row = 0; row < rows; ++row) {
        batch.list(row, slots_of(row));
        for (std::int64_t head = 0; head < 6; ++head) batch.query(row, head, value_of(row, head));
    }
    single.args.rows = 1;
    for (const PlanOptions& options : schedules(kernel(), batch)) {
        const Result together = batch.run(options);
        expect_oracle(batch, together);
        for (std::int32_t row = 0; row < rows; ++row) {
            single.list(0, slots_of(row));
            for (std::int64_t head = 0; head < 6; ++head) single.query(0, head, value_of(row, head));
            ASSERT_TRUE(same_bits(single.run(options), 0, together, row))
                << to_string(together.schedule) << ", row " << row;
        }
    }
}

INSTANTIATE_TEST_SUITE_P(All, K18_RowOrHeadMapping, testing::ValuesIn(kernels_and_layouts()), test_name);

}  // namespace
}  // namespace sparsemla::test
