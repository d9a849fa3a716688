// K13, K14: lists and counts that name nothing, too much, or the same record again.
#include <chrono>

#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Caches, lists and counts lie between pages that nobody may touch: a wild access ends the program.
class K13_InvalidIndexOrCount : public EveryRecord {};

// B014, B015: negative slots and slots past the cache inside the active columns.
TEST_P(K13_InvalidIndexOrCount, B014_B015_SlotsThatNameNothing) {
    for (const Against fence : {Against::front, Against::end}) {
        Step step({.rows = 4, .heads = 3, .sources = {{.layout = layout(), .width = 640, .fence = fence}}});
        step.histogram();
        const auto num_slots = static_cast<std::int32_t>(step.cache().num_slots());
        std::vector<std::int32_t> list = slot_range(0, 16);
        list[5] = -1;
        list[9] = INT32_MIN;
        step.list(0, list);
        std::erase_if(list, [](std::int32_t slot) { return slot < 0; });  // n = 14

        std::vector<std::int32_t> wide, wide_kept;
        for (std::int32_t column = 0; column < 640; ++column) {
            const bool bad = column == 0 || column == 63 || column == 64 || column == 511 || column % 100 == 17;
            const std::int32_t bad_slots[] = {-1, num_slots, num_slots + 1, INT32_MAX, INT32_MIN, -2};
            wide.push_back(bad ? bad_slots[column % 6] : column % num_slots);
            if (!bad) wide_kept.push_back(wide.back());
        }
        step.list(1, wide);
        step.list(2, {num_slots, -1, num_slots - 1, 0, INT32_MAX, INT32_MAX - 63});
        std::vector<std::int32_t> behind(640, num_slots);  // B015: past the cache, in columns past the count
        behind[0] = 1;
        step.list(3, behind);
        step.count(3, 1);
        for_each_schedule(kernel(), step, [&](const Result& result) {
            expect_histogram(result, 0, list);
            expect_histogram(result, 1, wide_kept);
            expect_histogram(result, 2, {num_slots - 1, 0});
            expect_histogram(result, 3, {1});
        });
    }
}

// B016: counts as an engine's arithmetic leaves them; <= 0 is empty, > width is width, other rows do not care.
TEST_P(K13_InvalidIndexOrCount, B016_CountsOutOfRange) {
    constexpr std::int32_t width = 70;
    const std::vector<std::int32_t> counts = {-5, -1,   0, width + 1, 1 << 30, INT32_MIN, INT32_MAX, INT32_MIN + 1,
                                              1,  width};
    Step step({.rows = std::ssize(counts), .heads = 2, .sources = {{.layout = layout(), .width = width}}});
    step.histogram();
    for (std::int64_t row = 0; row < step.args.rows; ++row) {
        step.list(row, slot_range(static_cast<std::int32_t>(row), width));
        step.count(row, counts[static_cast<std::size_t>(row)]);
    }
    const auto start = std::chrono::steady_clock::now();
    for_each_schedule(kernel(), step, [&](const Result& result) {
        for (std::int64_t row = 0; row < result.rows; ++row) {
            const std::int32_t count = std::clamp(counts[static_cast<std::size_t>(row)], 0, width);
            if (count == 0)
                expect_empty_row(result, row);
            else
                expect_histogram(result, row, slot_range(static_cast<std::int32_t>(row), count));
        }
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

// One count over two sources' columns: clamp(count - offset, 0, width) in 64 bits, for extreme offsets too.
TEST_P(K13_InvalidIndexOrCount, CountsAgainstOffsets) {
    constexpr std::int64_t big = INT32_MAX;
    for (const std::int64_t offset : {std::int64_t{0}, std::int64_t{1}, std::int64_t{128}, big - 1, big}) {
        const std::vector<std::int64_t> counts = {INT32_MIN, -1,         0,          1,           offset - 1,
                                                  offset,    offset + 1, offset + 9, offset + 10, big};
        Step step(
            {.rows = std::ssize(counts),
             .heads = 1,
             .sources = {{.layout = layout(), .width = 5}, {.layout = layout(), .width = 9, .count_offset = offset}}});
        step.histogram(0);
        step.histogram(1, 100);
        std::vector<std::vector<std::int32_t>> read(counts.size());
        for (std::size_t row = 0; row < counts.size(); ++row) {
            const std::int64_t count = std::min(counts[row], big);
            const auto i = static_cast<std::int64_t>(row);
            for (const std::size_t source : {0, 1}) {
                const std::int64_t width = source == 0 ? 5 : 9;
                step.list(i, slot_range(10, static_cast<std::int32_t>(width)), source);
                step.count(i, count, source);
                const std::int64_t active = std::clamp<std::int64_t>(count - (source == 0 ? 0 : offset), 0, width);
                for (std::int32_t c = 0; c < active; ++c) read[row].push_back(10 + c + (source == 0 ? 0 : 100));
            }
        }
        const Result result = step.run({.kernel = kernel()});
        for (std::size_t row = 0; row < counts.size(); ++row)
            if (read[row].empty())
                ASSERT_NO_FATAL_FAILURE(expect_empty_row(result, static_cast<std::int64_t>(row)));
            else
                ASSERT_NO_FATAL_FAILURE(expect_histogram(result, static_cast<std::int64_t>(row), read[row]))
                    << "offset " << offset << ", count " << counts[row];
    }
}

// B017: early in a sequence the window is not full. Unused columns hold -1 and do not count; 0 is a record.
TEST_P(K13_InvalidIndexOrCount, B017_WindowNotFull) {
    constexpr std::int32_t window = 128;
    Step step({.rows = 2,
               .heads = 4,
               .sources = {{.layout = layout(), .width = window},
                           {.layout = layout(), .width = 512, .count_offset = window}}});
    step.histogram(0);
    step.histogram(1, 200);
    std::vector<std::int32_t> masked = slot_range(10, 4), zeros = slot_range(10, 4);
    masked.resize(window, -1);
    zeros.resize(window, 0);
    step.list(0, masked);
    step.list(1, zeros);
    for (std::int64_t row : {0, 1}) {
        step.list(row, slot_range(0, 64), 1);
        step.count(row, window + 64, 0);
    }
    std::vector<std::int32_t> first = slot_range(200, 64);
    first.insert(first.end(), {10, 11, 12, 13});
    std::vector<std::int32_t> second = first;
    second.insert(second.end(), window - 4, 0);
    for_each_schedule(kernel(), step, [&](const Result& result) {
        expect_histogram(result, 0, first);
        expect_lse(result, 0, std::log(68.0));
        expect_histogram(result, 1, second);
    });
}

// B025, B028: rows and columns left over from a larger step name a cache that is gone.
TEST_P(K13_InvalidIndexOrCount, B028_StaleListsOfAnIdleRank) {
    for (const std::int64_t pages : {0, 1}) {
        Step step({.rows = 6, .heads = 2, .sources = {{.layout = layout(), .width = 100, .pages = pages}}});
        for (std::int64_t row = 0; row < 6; ++row) {
            step.list(row, slot_range(64, 100, 1000));
            step.count(row, row % 2 == 0 ? 0 : 100);
        }
        for_each_schedule(kernel(), step, [](const Result& result) {
            for (std::int64_t row = 0; row < 6; ++row) expect_empty_row(result, row);
        });
    }
}

// The list of the last row ends where memory ends, and so do the counts: nothing behind them is read.
TEST_P(K13_InvalidIndexOrCount, ListsEndAtUnmappedMemory) {
    for (const std::int64_t width : {1, 3, 63, 65, 129}) {
        Step step({.rows = 3, .heads = 1, .sources = {{.layout = layout(), .width = width}}});
        step.histogram();
        Fenced slots(static_cast<std::size_t>(3 * width * 4), 4);
        Fenced counts(3 * 4, 4);
        for (std::int64_t i = 0; i < 3 * width; ++i) slots.as<std::int32_t>()[i] = static_cast<std::int32_t>(i);
        for (const std::int32_t count : {static_cast<std::int32_t>(width), INT32_MAX}) {
            std::fill_n(counts.as<std::int32_t>(), 3, count);
            step.args.sources[0].slots = dense(slots.data(), DType::i32, {3, width});
            step.args.sources[0].counts = dense(counts.data(), DType::i32, {3});
            const Result result = step.run({.kernel = kernel()});
            for (std::int32_t row = 0; row < 3; ++row)
                ASSERT_NO_FATAL_FAILURE(expect_histogram(
                    result, row, slot_range(row * static_cast<std::int32_t>(width), static_cast<std::int32_t>(width))));
        }
    }
}

// `validate` turns what decode would treat as absent into an error that says where; nothing is written.
TEST_P(K13_InvalidIndexOrCount, ValidateNamesTheFault) {
    if (on_gpu()) GTEST_SKIP() << "validate reads lists on the host: CPU problems only";
    Step step({.rows = 3, .heads = 2, .sources = {{.layout = layout(), .width = 20}}});
    step.histogram();
    for (std::int64_t row = 0; row < 3; ++row) step.list(row, {1, -1, 2});
    step.args.validate = true;
    const auto expect_error = [&](const std::string& argument, const std::string& text) {
        step.poison_outputs();
        try {
            step.run({.kernel = kernel()});
            ADD_FAILURE() << "accepted: " << text;
        } catch (const Error& error) {
            EXPECT_EQ(error.argument(), argument) << error.what();
            EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
            EXPECT_TRUE(step.outputs_untouched());
        }
    };
    expect_histogram(step.run({.kernel = kernel()}), 2, {1, 2});
    step.slot(1, 2) = static_cast<std::int32_t>(step.cache().num_slots());
    expect_error("slots", "row 1, column 2");
    step.count(1, 2);  // now past the count
    expect_histogram(step.run({.kernel = kernel()}), 1, {1});
    step.count(2, 21);
    expect_error("counts", "21 at row 2");
    step.count(2, -1);
    expect_error("counts", "-1 at row 2");
}

INSTANTIATE_TEST_SUITE_P(All, K13_InvalidIndexOrCount, testing::ValuesIn(kernels_and_layouts()), test_name);

// ---------------------------------------------------------------------------------------------------------------------
class K14_DuplicateIndices : public EveryRecord {};

// B018: each occurrence counts.
TEST_P(K14_DuplicateIndices, B018_DuplicatesCountOncePerOccurrence) {
    Step step({.rows = 4, .heads = 3, .sources = {{.layout = layout(), .width = 256}}});
    step.histogram();
    step.list(0, {7, 7, 7, 9});
    step.list(1, std::vector<std::int32_t>(256, 33));
    std::vector<std::int32_t> mixed, pairs;
    for (std::int32_t i = 0; i < 256; ++i) mixed.push_back(i * i % 17);
    for (std::int32_t i = 0; i < 200; ++i) pairs.push_back(i / 2);
    step.list(2, mixed);
    step.list(3, pairs);
    for_each_schedule(kernel(), step, [&](const Result& result) {
        expect_histogram(result, 0, {7, 7, 7, 9});
        for (const auto& [d, share] : {std::pair{7, 0.75}, {9, 0.25}})
            ASSERT_NEAR(result.out(0, 0, d), share * Step::mark, share * Step::mark * one_bf16_rounding);
        expect_row(result, 1, histogram_of({33}), 0);
        expect_lse(result, 1, std::log(256.0));
        expect_histogram(result, 2, mixed);
        expect_histogram(result, 3, pairs);
    });
}

// The same record in both sources counts in both.
TEST_P(K14_DuplicateIndices, DuplicatesAcrossSources) {
    Step step({.rows = 1, .heads = 2, .sources = {{.layout = layout()}, {.layout = layout(), .count_offset = 64}}});
    step.histogram(0);
    step.histogram(1);
    step.list(0, {5, 5, 6});
    step.list(0, {6, 5}, 1);
    for_each_schedule(kernel(), step, [](const Result& result) { expect_histogram(result, 0, {5, 5, 6, 6, 5}); });
}

// Order of the columns is a matter of rounding only.
TEST_P(K14_DuplicateIndices, OrderOfColumns) {
    Step step({.rows = 3, .heads = 2, .sources = {{.layout = layout(), .width = 200}}});
    randomise(step, 41);
    std::vector<std::int32_t> list = slot_range(0, 200, 2);
    step.list(0, list);
    std::reverse(list.begin(), list.end());
    step.list(1, list);
    std::mt19937_64 bits(42);
    std::shuffle(list.begin(), list.end(), bits);
    step.list(2, list);
    for_each_schedule(kernel(), step, [&](const Result& result) { expect_oracle(step, result); });
}

INSTANTIATE_TEST_SUITE_P(All, K14_DuplicateIndices, testing::ValuesIn(kernels_and_layouts()), test_name);

}  // namespace
}  // namespace sparsemla::test
