// K05: a row's bits come from that row's inputs and the schedule alone.
#include <optional>

#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

class K05_ResultDependsOnBatchmatesOrSplits : public EveryRecord {
   protected:
    static constexpr std::int64_t width = 150;

    Step step_of(std::int64_t rows, std::int64_t heads, std::uint64_t seed) const {
        Step step({.rows = rows, .heads = heads, .sources = {{.layout = layout(), .width = width}}, .sinks = true});
        randomise(step, seed);
        return step;
    }
    /// The row under test: the same list and the same queries wherever it stands.
    static void place(Step& step, std::int64_t row) {
        std::vector<std::int32_t> slots = slot_range(3, 131, 3);
        slots[17] = -1;
        slots[90] = slots[91];
        step.list(row, slots);
        for (std::int64_t head = 0; head < step.problem.heads; ++head)
            step.query(row, head, [&](int d) { return static_cast<float>((d * 7 + head * 13) % 29 - 14) / 16; });
    }
    static void fill_batchmates(Step& step, std::uint64_t seed) {
        std::mt19937_64 bits(seed);
        for (std::int64_t row = 0; row < step.problem.rows; ++row) {
            std::vector<std::int32_t> slots(bits() % (width + 1));
            for (std::int32_t& slot : slots) slot = static_cast<std::int32_t>(bits() % 512);
            step.list(row, slots);
        }
    }
};

// B010: one row at several positions of batches of several sizes, on one plan.
TEST_P(K05_ResultDependsOnBatchmatesOrSplits, B010_PositionAndBatch) {
    constexpr std::int64_t capacity = 16;
    Step step = step_of(capacity, 5, 11);
    for (const PlanOptions& options : schedules(kernel(), step)) {
        const Plan plan = step.plan(options);
        std::optional<Result> first;
        std::uint64_t seed = 1;
        for (const std::int64_t rows : {1, 2, 5, 16})
            for (const std::int64_t row : {rows - 1, std::int64_t{0}}) {
                fill_batchmates(step, seed++);
                place(step, row);
                step.args.rows = rows;
                const Result result = step.run(plan);
                if (!first) first = result;
                ASSERT_TRUE(same_bits(result, row, *first, 0))
                    << to_string(plan.schedule) << ": row " << row << " of " << rows << ", seed " << seed - 1;
            }
    }
}

// Threads change neither the plan's schedule nor a bit.
TEST_P(K05_ResultDependsOnBatchmatesOrSplits, Threads) {
    Step step = step_of(3, 20, 12);
    fill_batchmates(step, 5);
    place(step, 1);
    for (const PlanOptions& options : schedules(kernel(), step)) {
        std::optional<Result> first;
        for (const int threads : {1, 2, 5}) {
            step.device.threads = threads;
            for (int repeat = 0; repeat < 2; ++repeat) {
                const Result result = step.run(options);
                if (!first) first = result;
                ASSERT_EQ(result.schedule, first->schedule);
                ASSERT_EQ(result.out_bits, first->out_bits) << to_string(result.schedule) << ", threads " << threads;
                ASSERT_EQ(result.lse_bits, first->lse_bits) << to_string(result.schedule) << ", threads " << threads;
            }
        }
    }
}

// The heads that share a call, and how many rows the plan could take, change no bit of a schedule that is given.
TEST_P(K05_ResultDependsOnBatchmatesOrSplits, HeadsAndCapacity) {
    Step one = step_of(1, 1, 13);
    place(one, 0);
    std::vector<Step> others;
    for (const auto& [rows, heads] : {std::pair{1, 3}, {1, 17}, {7, 16}, {2, 128}}) {
        Step& step = others.emplace_back(step_of(rows, heads, 13));
        fill_batchmates(step, 8);
        place(step, rows - 1);
    }
    for (PlanOptions options : schedules(kernel(), one)) {
        PlanOptions fixed = options;
        fixed.splits = options.splits.value_or(4);
        if (supports(one.problem, one.device, fixed)) options = fixed;
        const Result alone = one.run(options);
        for (Step& step : others) {
            const std::int64_t row = step.problem.rows - 1;
            if (!supports(step.problem, step.device, options)) continue;
            const Result result = step.run(options);
            Schedule schedule = result.schedule;
            schedule.row_capacity = alone.schedule.row_capacity;
            if (on_gpu() && schedule != alone.schedule) continue;  // what is not fixed may follow the heads
            ASSERT_TRUE(std::ranges::equal(result.out_bits_of(row).first(value_dims), alone.out_bits))
                << to_string(result.schedule) << ", heads " << result.heads;
            ASSERT_EQ(result.lse_bits_of(row)[0], alone.lse_bits[0]) << to_string(result.schedule);
        }
    }
}

// Where in the cache equal records lie is none of the row's inputs.
TEST_P(K05_ResultDependsOnBatchmatesOrSplits, PlaceInTheCache) {
    Step step({.rows = 2, .heads = 3, .sources = {{.layout = layout(), .width = width}}});
    randomise(step, 14);
    std::mt19937_64 bits(15);
    std::vector<std::int32_t> low = slot_range(0, 120);
    std::vector<std::int32_t> high = slot_range(200, 120);
    std::shuffle(high.begin(), high.end(), bits);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < low.size(); ++i) {
        std::vector<float> values(static_cast<std::size_t>(d_qk(step.problem)));
        for (float& value : values) value = normal(bits);
        for (const std::int32_t slot : {low[i], high[i]})
            step.record(slot, [&](int d) { return values[static_cast<std::size_t>(d)]; });
    }
    step.list(0, low);
    step.list(1, high);
    for (std::int64_t head = 0; head < 3; ++head)
        for (std::int64_t row : {0, 1}) step.query(row, head, [&](int d) { return std::sin(static_cast<float>(d)); });
    for_each_schedule(kernel(), step, [](const Result& result) {
        ASSERT_TRUE(same_bits(result, 0, result, 1)) << to_string(result.schedule);
    });
}

// Schedules differ within the computed bounds, all of them around the same answer.
TEST_P(K05_ResultDependsOnBatchmatesOrSplits, SchedulesAgreeWithinTheirBounds) {
    Step step = step_of(3, 4, 16);
    fill_batchmates(step, 17);
    place(step, 2);
    for_each_schedule(kernel(), step, [&](const Result& result) { expect_oracle(step, result); });
}

INSTANTIATE_TEST_SUITE_P(All, K05_ResultDependsOnBatchmatesOrSplits, testing::ValuesIn(kernels_and_layouts()),
                         test_name);

}  // namespace
}  // namespace sparsemla::test
