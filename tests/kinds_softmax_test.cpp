// K01, K02, K03: the softmax over lists with holes. A masked column has no weight, and its bytes reach nothing.
#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

std::vector<std::int32_t> absent(std::int64_t columns) {
    return std::vector<std::int32_t>(static_cast<std::size_t>(columns), -1);
}

// ---------------------------------------------------------------------------------------------------------------------
class K01_SoftmaxStateAtMinusInfinity : public EveryRecord {};

// B001: whatever leads the list, a valid block behind masked columns is what the row attends to.
TEST_P(K01_SoftmaxStateAtMinusInfinity, B001_ValidBlockBehindMaskedChunks) {
    constexpr std::int64_t width = 640;
    constexpr std::int32_t block = 64;
    Step step({.rows = width / block, .heads = 2, .sources = {{.layout = layout(), .width = width}}});
    step.histogram();
    for (std::int64_t row = 0; row < width / block; ++row) {
        step.list(row, absent(width));
        for (std::int32_t i = 0; i < block; ++i) step.slot(row, row * block + i) = i;
    }
    for_each_schedule(kernel(), step, [](const Result& result) {
        for (std::int64_t row = 0; row < result.rows; ++row) expect_histogram(result, row, slot_range(0, block));
    });
}

TEST_P(K01_SoftmaxStateAtMinusInfinity, OneValidColumnAnywhere) {
    constexpr std::int64_t width = 257;
    const std::vector<std::int64_t> positions = {0, 1, 15, 16, 31, 32, 63, 64, 65, 127, 128, 255, 256};
    Step step({.rows = std::ssize(positions), .heads = 1, .sources = {{.layout = layout(), .width = width}}});
    step.histogram();
    for (std::int64_t row = 0; row < std::ssize(positions); ++row) {
        step.list(row, absent(width));
        step.slot(row, positions[static_cast<std::size_t>(row)]) = static_cast<std::int32_t>(100 + row);
    }
    for_each_schedule(kernel(), step, [](const Result& result) {
        for (std::int32_t row = 0; row < result.rows; ++row) expect_histogram(result, row, {100 + row});
    });
}

// B001, as reported: the first source holds nothing for the row.
TEST_P(K01_SoftmaxStateAtMinusInfinity, B001_FirstSourceMasked) {
    constexpr std::int64_t first_width = 128;
    Step step({.rows = 8,
               .heads = 16,
               .sources = {{.layout = layout(), .width = first_width},
                           {.layout = layout(), .width = 512, .count_offset = first_width, .counts = true}}});
    step.histogram(0);
    step.histogram(1, 7);
    for (std::int64_t row = 0; row < 8; ++row) {
        step.list(row, absent(512), 1);
        for (std::int32_t i = 0; i < 64; ++i) step.slot(row, row * 64 + i, 1) = i;
    }
    for_each_schedule(kernel(), step, [](const Result& result) {
        for (std::int64_t row = 0; row < result.rows; ++row) expect_histogram(result, row, slot_range(0, 64), 7);
    });
}

// The maximum rises, falls and starts late; no schedule may lose a term or make one up.
TEST_P(K01_SoftmaxStateAtMinusInfinity, MovingMaximum) {
    constexpr std::int64_t width = 200;
    constexpr std::int32_t valid = 150;
    Step step({.rows = 3, .heads = 1, .sources = {{.layout = layout(), .width = width}}});
    // Score of slot s: 0.25 * (s / 10), told apart by the last dimension; the value says which slots were read.
    const int key = d_qk(step.problem) - 1;
    for (std::int32_t s = 0; s < valid; ++s)
        step.record(s, [&](int d) {
            return d == key ? 0.25F * static_cast<float>(s / 10) : d == s ? Step::mark : 0.0F;
        });
    step.query([&](int d) { return d == key ? 1.0F : 0.0F; });
    std::vector<std::int32_t> rising = absent(50), falling = absent(50), shuffled = absent(50);
    for (std::int32_t i = 0; i < valid; ++i) {
        rising.push_back(i);
        falling.push_back(valid - 1 - i);
        shuffled.push_back(i * 67 % valid);
    }
    step.list(0, rising);
    step.list(1, falling);
    step.list(2, shuffled);
    for_each_schedule(kernel(), step, [&](const Result& result) { expect_oracle(step, result); });
}

// B002: a run of empty rows at the front, at the back, and in between.
TEST_P(K01_SoftmaxStateAtMinusInfinity, B002_LeadingEmptyRows) {
    constexpr std::int64_t rows = 40;
    constexpr std::int64_t empty_rows = 14;
    const auto is_empty = [](int order, std::int64_t row) {
        if (order == 0) return row < empty_rows;
        if (order == 1) return row >= rows - empty_rows;
        return row % 2 == 0 && row < 2 * empty_rows;
    };
    Step step({.rows = rows, .heads = 2, .sources = {{.layout = layout(), .width = 70}}, .sinks = true});
    step.histogram();
    step.sink(0) = 1.0F;
    step.sink(1) = 1.0F;
    for (const PlanOptions& options : schedules(kernel(), step)) {
        std::vector<Result> results;
        for (int order = 0; order < 3; ++order) {
            std::int32_t full_rows = 0;
            for (std::int64_t row = 0; row < rows; ++row) {
                const bool empty = is_empty(order, row);
                step.list(row, slot_range(empty ? 0 : full_rows++, 5));
                if (empty) step.count(row, 0);
            }
            results.push_back(step.run(options));
            std::int64_t nth = 0;
            std::int64_t nth_of_first = empty_rows;
            for (std::int64_t row = 0; row < rows; ++row) {
                if (is_empty(order, row)) {
                    expect_empty_row(results.back(), row);
                } else {
                    ASSERT_TRUE(same_bits(results.back(), row, results.front(), nth_of_first + nth++))
                        << to_string(results.back().schedule) << ": order " << order << ", row " << row;
                    ASSERT_NEAR(results.back().lse(row, 0), std::log(5.0), 1e-5);
                }
            }
        }
        Values expected = histogram_of(slot_range(0, 5));
        for (double& value : expected) value *= 5 / (5 + std::exp(1.0));
        ASSERT_NO_FATAL_FAILURE(expect_row(results[0], empty_rows, expected));
    }
}

INSTANTIATE_TEST_SUITE_P(All, K01_SoftmaxStateAtMinusInfinity, testing::ValuesIn(kernels_and_layouts()), test_name);

// ---------------------------------------------------------------------------------------------------------------------
class K02_FiniteMaskValueGetsWeight : public EveryRecord {};

// B003: a chunk of negative ids only. Record 0, where a masked load would go, is as large as can be.
TEST_P(K02_FiniteMaskValueGetsWeight, B003_ChunkOfNegativeIds) {
    Step step(
        {.rows = 2,
         .heads = 3,
         .sources = {{.layout = layout(), .width = 128}, {.layout = layout(), .width = 128, .count_offset = 128}}});
    for (std::size_t source : {0, 1}) {
        step.record(
            0, [](int) { return e4m3_max; }, source);
        for (std::int32_t s = 1; s < 4; ++s) step.histogram_record(s, source);
    }
    step.query([](int) { return 1.0F; });
    for (std::int32_t i = 0; i < 3; ++i) step.slot(1, i, 1) = i + 1;
    for (const float scale : {1 / std::sqrt(512.0F), 1e-6F, 30.0F}) {
        step.args.softmax_scale = scale;
        for_each_schedule(kernel(), step, [&](const Result& result) {
            expect_empty_row(result, 0);
            expect_row(result, 1, histogram_of({1, 2, 3}));
            expect_lse(result, 1, double{scale} * Step::mark + std::log(3.0), 1e-5 + 1e-6 * scale);
        });
    }
}

// Valid scores far below any finite stand-in for "masked": the masked columns still weigh nothing.
TEST_P(K02_FiniteMaskValueGetsWeight, ScoresBelowEveryStandIn) {
    Step step({.rows = 2, .heads = 2, .sources = {{.layout = layout(), .width = 100}}});
    const int key = d_qk(step.problem) - 1;
    step.record(0, [](int) { return e4m3_max; });
    for (std::int32_t s = 1; s <= 4; ++s) step.record(s, [&](int d) { return d == key || d == s ? Step::mark : 0.0F; });
    step.query([&](int d) { return d == key ? -2.0F : 0.0F; });
    for (std::int32_t i = 0; i < 4; ++i) step.slot(0, 3 + 20 * i) = 1 + i;
    step.slot(1, 70) = 2;
    for (const float scale : {1.0F, 100.0F, 1e4F, 1e9F, 1e30F, 5e37F}) {
        step.args.softmax_scale = scale;
        for_each_schedule(kernel(), step, [&](const Result& result) {
            const double score = -2.0 * Step::mark * scale;
            for (std::int64_t row : {0, 1}) {
                expect_finite(result, row);
                expect_lse(result, row, score + (row == 0 ? std::log(4.0) : 0), 1e-5 + std::fabs(score) * 0x1p-21);
            }
            for (const int d : {1, 2, 3, 4}) {
                ASSERT_NEAR(result.out(0, 0, d), Step::mark / 4, Step::mark / 4 * one_bf16_rounding);
                ASSERT_EQ(result.out(1, 1, d), d == 2 ? Step::mark : 0.0F) << to_string(result.schedule);
            }
        });
    }
}

INSTANTIATE_TEST_SUITE_P(All, K02_FiniteMaskValueGetsWeight, testing::ValuesIn(kernels_and_layouts()), test_name);

// ---------------------------------------------------------------------------------------------------------------------
class K03_ZeroWeightTimesNonFinite : public EveryRecord {};

// B004, B005: counts inside and at the edges of chunks; what the list names beyond the count is NaN.
TEST_P(K03_ZeroWeightTimesNonFinite, B004_B005_GarbageBehindTheCount) {
    const std::vector<std::int32_t> counts = {1, 20, 31, 33, 63, 64, 65, 255, 256};
    constexpr std::int32_t poisoned_slot = 400;
    Step step({.rows = std::ssize(counts), .heads = 16, .sources = {{.layout = layout(), .width = 256}}});
    for (std::int32_t s = 0; s < 256; ++s) step.histogram_record(s);
    for (std::int64_t row = 0; row < step.args.rows; ++row) {
        step.list(row, slot_range(0, 256));
        const std::int32_t count = counts[static_cast<std::size_t>(row)];
        for (std::int64_t column = count; column < 256; ++column) step.slot(row, column) = poisoned_slot;
        step.count(row, count);
    }
    for (const PlanOptions& options : schedules(kernel(), step)) {
        step.poison(poisoned_slot, 0, 0xFF);
        const Result negative_nan = step.run(options);
        step.poison(poisoned_slot, 0, 0x7F);
        const Result positive_nan = step.run(options);
        step.poison(poisoned_slot, 0, 0);
        const Result zero = step.run(options);
        for (std::int64_t row = 0; row < step.args.rows; ++row) {
            expect_histogram(zero, row, slot_range(0, counts[static_cast<std::size_t>(row)]));
            ASSERT_TRUE(same_bits(zero, row, negative_nan, row)) << to_string(zero.schedule) << ", row " << row;
            ASSERT_TRUE(same_bits(zero, row, positive_nan, row)) << to_string(zero.schedule) << ", row " << row;
        }
    }
}

// B006: masked columns at the edges of chunks and sources, while record 0 of both caches is NaN.
TEST_P(K03_ZeroWeightTimesNonFinite, B006_MaskedGatherOfRecordZero) {
    constexpr std::int64_t first_width = 128;
    constexpr std::int64_t second_width = 512;
    Step step({.rows = 1,
               .heads = 16,
               .sources = {{.layout = layout(), .width = first_width},
                           {.layout = layout(), .width = second_width, .count_offset = first_width}}});
    for (std::size_t source : {0, 1}) step.histogram(source);
    std::vector<std::int32_t> attended;
    for (std::int32_t column = 0; column < first_width + second_width; ++column) {
        const bool masked = column == 3 || column == 64 || column == 127 || column == 128 || column == 639;
        const bool second = column >= first_width;
        step.slot(0, second ? column - first_width : column, second ? 1 : 0) = masked ? -1 : 1 + column % 500;
        if (!masked) attended.push_back(1 + column % 500);
    }
    for (const bool first_poisoned : {true, false}) {
        first_poisoned ? step.poison(0, 0) : step.histogram_record(0, 0);
        step.poison(0, 1);
        for_each_schedule(kernel(), step, [&](const Result& result) { expect_histogram(result, 0, attended); });
    }
}

// Every byte value as the content of everything that is absent: negative, past the cache, in a gap, past the count.
TEST_P(K03_ZeroWeightTimesNonFinite, EveryByteInAbsentRecords) {
    const bool gaps = layout().form == RecordForm::contiguous;
    Step step(
        {.rows = 1,
         .heads = 2,
         .sources = {{.layout = layout(), .width = 48, .pages = 3, .page_size = 16, .slots_per_page = gaps ? 24 : 0}}});
    const std::int32_t per_page = gaps ? 24 : 16;
    step.histogram_record(1);
    step.histogram_record(per_page + 2);
    step.query([](int d) { return d % 3 == 0 ? 1.0F : -0.5F; });
    const auto num_slots = static_cast<std::int32_t>(step.cache().num_slots());
    std::vector<std::int32_t> list = {-1, 1, num_slots, INT32_MIN, per_page + 2, INT32_MAX, -7, num_slots + 5};
    if (gaps) list.insert(list.end(), {16, 23, per_page + 16});
    list.push_back(0);
    step.list(0, list);
    step.count(0, std::ssize(list) - 1);  // the last names a record that is held, but stands behind the count
    step.args.softmax_scale = 0.25F;
    const auto fill_absent = [&](int byte) {
        for (std::int32_t s = 0; s < num_slots; ++s)
            if (s != 1 && s != per_page + 2) step.poison(s, 0, byte);
    };
    int stride = 1;  // every byte under the kernel's own schedule, some under the others
    for (const PlanOptions& options : schedules(kernel(), step)) {
        const Plan plan = step.plan(options);
        fill_absent(0);
        const Result zero = step.run(plan);
        expect_oracle(step, zero);
        for (int byte = 0xFF; byte > 0; byte -= stride) {
            fill_absent(byte);
            ASSERT_TRUE(same_bits(step.run(plan), 0, zero, 0)) << to_string(plan.schedule) << ", byte " << byte;
        }
        stride = 128;
    }
}

// B005, second part: a NaN that a row attends to stays in that row.
TEST_P(K03_ZeroWeightTimesNonFinite, B005_AttendedNaNStaysInItsRow) {
    constexpr std::int64_t rows = 4;
    constexpr std::int32_t bad_slot = 300;
    Step step({.rows = rows, .heads = 3, .sources = {{.layout = layout(), .width = 90}}});
    step.histogram();
    for (std::int64_t row = 0; row < rows; ++row) step.list(row, slot_range(static_cast<std::int32_t>(10 * row), 80));
    step.slot(2, 40) = bad_slot;
    for (const PlanOptions& options : schedules(kernel(), step)) {
        step.histogram_record(bad_slot);
        const Result clean = step.run(options);
        step.poison(bad_slot);
        const Result result = step.run(options);
        for (std::int64_t row = 0; row < rows; ++row)
            if (row == 2)
                ASSERT_NO_FATAL_FAILURE(expect_nan_row(result, row));
            else
                ASSERT_TRUE(same_bits(result, row, clean, row)) << to_string(result.schedule) << ", row " << row;
    }
}

// A NaN query is one head's affair.
TEST_P(K03_ZeroWeightTimesNonFinite, NaNQueryStaysInItsHead) {
    for (const DType dtype : {DType::f8_e4m3, DType::bf16}) {
        Step step({.rows = 2, .heads = 18, .query_dtype = dtype, .sources = {{.layout = layout(), .width = 70}}});
        if (!step.taken_by(kernel())) continue;
        step.histogram();
        step.list(0, slot_range(0, 70));
        step.list(1, slot_range(5, 33));
        for (const PlanOptions& options : schedules(kernel(), step)) {
            step.query([](int) { return 0.0F; });
            const Result clean = step.run(options);
            step.query(1, 16, [](int d) { return d == 77 ? not_a_number : 0.0F; });
            const Result result = step.run(options);
            ASSERT_TRUE(same_bits(result, 0, clean, 0)) << to_string(result.schedule);
            for (std::int64_t head = 0; head < 18; ++head) {
                ASSERT_EQ(std::isnan(result.lse(1, head)), head == 16) << to_string(result.schedule);
                if (head == 16)
                    expect_values(result, 1, head, constant(not_a_number));
                else
                    expect_values(result, 1, head, histogram_of(slot_range(5, 33)));
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(All, K03_ZeroWeightTimesNonFinite, testing::ValuesIn(kernels_and_layouts()), test_name);

// B084: partials without weight may hold anything.
TEST(K03_ZeroWeightTimesNonFinite_Merge, B084_PayloadOfEmptyPartials) {
    constexpr std::int64_t heads = 2;
    constexpr std::size_t size = heads * value_dims;
    const auto filled = [](float value) { return std::vector<float>(size, value); };
    const std::vector<std::vector<float>> payloads = {filled(not_a_number), filled(1.0F),        filled(infinity),
                                                      filled(448.0F),       filled(-2.0F),       filled(-infinity),
                                                      filled(0.5F),         filled(not_a_number)};
    const std::vector<bool> empty = {true, false, true, true, false, true, false, true};
    // An empty partial says so by its lse, or by its count, whatever its lse.
    const std::vector<float> lses = {-infinity, 0.5F, 100.0F, -infinity, -1.0F, not_a_number, 2.0F, infinity};
    const std::vector<std::int32_t> counts = {7, 3, 0, 1, 1, -5, 9, 0};
    std::vector<std::vector<float>> lse_rows;
    for (const float lse : lses) lse_rows.emplace_back(heads, lse);
    std::vector<Partial> all, others;
    for (std::size_t i = 0; i < payloads.size(); ++i) {
        const Partial partial{.out = dense(payloads[i].data(), DType::f32, {1, heads, value_dims}),
                              .lse = dense(lse_rows[i].data(), DType::f32, {1, heads}),
                              .counts = dense(&counts[i], DType::i32, {1})};
        all.push_back(partial);
        if (!empty[i]) others.push_back(partial);
    }
    std::vector<float> out_all(size), out_others(size), lse_all(heads), lse_others(heads);
    MergeArgs args{.rows = 1, .heads = heads, .partials = all, .sinks = {}, .out = {}, .lse = {}};
    args.out = dense(out_all.data(), DType::f32, {1, heads, value_dims});
    args.lse = dense(lse_all.data(), DType::f32, {1, heads});
    merge(args);
    args.partials = others;
    args.out = dense(out_others.data(), DType::f32, {1, heads, value_dims});
    args.lse = dense(lse_others.data(), DType::f32, {1, heads});
    merge(args);
    EXPECT_EQ(out_all, out_others);
    EXPECT_EQ(lse_all, lse_others);
    const double total = std::exp(0.5) + std::exp(-1.0) + std::exp(2.0);
    const double expected = (std::exp(0.5) - 2 * std::exp(-1.0) + 0.5 * std::exp(2.0)) / total;
    EXPECT_NEAR(out_all[0], expected, 1e-6);
    EXPECT_NEAR(lse_all[1], std::log(total), 1e-6);
}

}  // namespace
}  // namespace sparsemla::test
