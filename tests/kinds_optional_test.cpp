// K08: sinks, counts, LSE, out_scale and q_scale, given or left out: nothing is dropped, nothing is folded in twice.
#include <limits>

#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

class K08_OptionalInputDroppedOrFoldedWrongly : public EveryRecord {
   protected:
    static constexpr std::int64_t keys = 4;
    static inline const std::vector<float> sink_values = {-infinity, -std::numeric_limits<float>::max(),
                                                          -1e30F,    -80.0F,
                                                          -1.0F,     -0.0F,
                                                          0.0F,      1.0F,
                                                          20.0F,     80.0F,
                                                          1e4F,      2.4e38F,
                                                          3e38F,     std::numeric_limits<float>::max(),
                                                          infinity};

    /// All heads attend to four equal keys, whose every value is the mark; scores are `score`.
    Step four_keys(bool sinks, float score = 0.0F) const {
        StepSpec spec{.rows = 2,
                      .heads = std::ssize(sink_values),
                      .query_dtype = DType::bf16,
                      .sources = {{.layout = layout()}},
                      .sinks = sinks};
        // That rounds the score of 1, which no test looks at.
        if (!Step(spec).taken_by(kernel())) spec.query_dtype = DType::f8_e4m3;
        Step step(spec);
        for (std::int32_t s = 0; s < keys; ++s) step.record(s, [](int) { return Step::mark; });
        for (std::int64_t row : {0, 1}) step.list(row, slot_range(0, keys));
        const int last = d_qk(step.problem) - 1;
        step.query([&](int d) { return d == last ? score / Step::mark : 0.0F; });
        return step;
    }
};

// B013: 4 * mark / (4 + e^sink) for sinks from -inf to +inf, whatever the scores; the LSE never sees the sink.
TEST_P(K08_OptionalInputDroppedOrFoldedWrongly, B013_SinksOfEverySize) {
    for (const float score : {0.0F, 3.0F, -192.0F, 192.0F}) {
        Step step = four_keys(true, score);
        for (std::int64_t h = 0; h < std::ssize(sink_values); ++h)
            step.sink(h) = sink_values[static_cast<std::size_t>(h)];
        for_each_schedule(kernel(), step, [&](const Result& result) {
            expect_lse(result, 0, score + std::log(4.0), 1e-4);
            for (std::int64_t h = 0; h < result.heads; ++h) {
                const double sink = sink_values[static_cast<std::size_t>(h)];
                const double expected = keys * Step::mark / (keys + std::exp(sink - score));
                // FP32 holds e^(sink - score) to 2^-23 * |sink - score| only.
                const double relative = one_bf16_rounding + 0x1p-20 * std::min(std::fabs(sink - score), 300.0);
                expect_values(result, 0, h, constant(expected), relative, 1e-36);
                expect_values(result, 1, h, constant(expected), relative, 1e-36);
            }
        });
    }
}

TEST_P(K08_OptionalInputDroppedOrFoldedWrongly, B013_NoSinks) {
    Step step = four_keys(false);
    for_each_schedule(kernel(), step, [&](const Result& result) { expect_row(result, 0, constant(Step::mark), 0); });
}

// A sink of -inf is no sink: the same bits.
TEST_P(K08_OptionalInputDroppedOrFoldedWrongly, SinkOfMinusInfinityIsNone) {
    Step with = four_keys(true, 1.5F);
    Step without = four_keys(false, 1.5F);
    for (std::int64_t h = 0; h < std::ssize(sink_values); ++h) with.sink(h) = -infinity;
    for (const PlanOptions& options : schedules(kernel(), with)) {
        const Result a = with.run(options);
        const Result b = without.run(options);
        for (std::int64_t row : {0, 1}) ASSERT_TRUE(same_bits(a, row, b, row)) << to_string(a.schedule);
    }
}

TEST_P(K08_OptionalInputDroppedOrFoldedWrongly, NaNSinkStaysInItsHead) {
    Step step = four_keys(true);
    step.sink(3) = not_a_number;
    for_each_schedule(kernel(), step, [&](const Result& result) {
        for (std::int64_t h = 0; h < result.heads; ++h)
            expect_values(result, 0, h, constant(h == 3 ? double{not_a_number} : keys * Step::mark / (keys + 1.0)));
        expect_lse(result, 0, std::log(4.0));
    });
}

// One sink term per row and head, however many sources and splits there are.
TEST_P(K08_OptionalInputDroppedOrFoldedWrongly, SinkCountsOnceOverTwoSources) {
    Step step({.rows = 1,
               .heads = 2,
               .sources = {{.layout = layout(), .width = 100}, {.layout = layout(), .width = 100, .count_offset = 100}},
               .sinks = true});
    for (std::size_t source : {0, 1}) {
        step.record(
            0, [](int) { return Step::mark; }, source);
        step.list(0, std::vector<std::int32_t>(100, 0), source);
    }
    for (std::int64_t h : {0, 1}) step.sink(h) = std::log(200.0F);
    for_each_schedule(kernel(), step, [](const Result& result) {
        expect_row(result, 0, constant(Step::mark / 2), one_bf16_rounding + 1e-6);
        expect_lse(result, 0, std::log(200.0));
    });
}

// Counts left out: every column is active. LSE left out: the output keeps its bits.
TEST_P(K08_OptionalInputDroppedOrFoldedWrongly, CountsAndLseLeftOut) {
    Step full({.rows = 2, .heads = 3, .sources = {{.layout = layout(), .width = 90}}});
    Step bare({.rows = 2, .heads = 3, .sources = {{.layout = layout(), .width = 90, .counts = false}}, .lse = false});
    for (Step* step : {&full, &bare}) {
        step->histogram();
        step->list(0, slot_range(0, 90));
        step->list(1, slot_range(50, 90, 3));
    }
    for (const PlanOptions& options : schedules(kernel(), full)) {
        const Result a = full.run(options);
        const Result b = bare.run(options);
        expect_histogram(a, 1, slot_range(50, 90, 3));
        ASSERT_EQ(a.out_bits, b.out_bits) << to_string(a.schedule);
    }
}

// out_scale multiplies the output alone: powers of two keep the bits, the sign and zero too.
TEST_P(K08_OptionalInputDroppedOrFoldedWrongly, OutScale) {
    Step step = four_keys(false, 1.0F);
    for_each_schedule(kernel(), step, [&](const Result& plain) {
        for (const float factor : {0.5F, -2.0F, 0.0F, 0x1p-40F}) {
            step.args.out_scale = factor;
            const Result scaled = step.run(PlanOptions{.kernel = plain.schedule.kernel});
            expect_row(scaled, 1, constant(double{factor} * Step::mark), 0);
            ASSERT_EQ(scaled.lse_bits, step.run(PlanOptions{.kernel = plain.schedule.kernel}).lse_bits);
        }
        step.args.out_scale = 1.0F;
    });
}

// q_scale is a factor of the scores, by value or by pointer.
TEST_P(K08_OptionalInputDroppedOrFoldedWrongly, QScaleByValueAndPointer) {
    Step step = four_keys(false, 0.75F);
    const float four = 4.0F;
    for (const PlanOptions& options : schedules(kernel(), step)) {
        step.args.q_scale = {.value = 4.0F};
        const Result by_value = step.run(options);
        step.args.q_scale = {.value = not_a_number, .pointer = &four};
        const Result by_pointer = step.run(options);
        step.args.q_scale = {};
        expect_lse(by_value, 0, 3.0 + std::log(4.0));
        ASSERT_EQ(by_value.out_bits, by_pointer.out_bits);
        ASSERT_EQ(by_value.lse_bits, by_pointer.lse_bits);
    }
}

INSTANTIATE_TEST_SUITE_P(All, K08_OptionalInputDroppedOrFoldedWrongly, testing::ValuesIn(kernels_and_layouts()),
                         test_name);

}  // namespace
}  // namespace sparsemla::test
