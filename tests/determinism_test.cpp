// Contract 9: for one schedule a row's bits depend on that row's inputs only. Not on threads, position,
// batchmates, capacity, head tiles, waves, workspace contents or repetition.
#include <hwy/targets.h>
#include <tbb/global_control.h>

#include <random>

#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

struct Case {
    PFormat p_format;
    Anchor anchor;
    ColumnRule columns;
};

std::vector<Case> schedules() {
    return {{PFormat::f16, Anchor::split_running_max, ColumnRule::blocks},
            {PFormat::e4m3, Anchor::chunk_max, ColumnRule::interleaved},
            {PFormat::e4m3, Anchor::split_running_max, ColumnRule::round_robin},
            {PFormat::bf16, Anchor::row_max, ColumnRule::blocks}};
}

PlanOptions options_of(const Case& schedule, int splits = 3) {
    return {.kernel = fast_kernel(),
            .p_format = schedule.p_format,
            .anchor = schedule.anchor,
            .splits = splits,
            .columns = schedule.columns,
            .chunk = 16};
}

/// Of every schedule above, or for a GPU kernel of what it takes; never one whose splits the plan would choose.
std::vector<PlanOptions> schedules_for(const Step& step, int splits = 3) {
    std::vector<PlanOptions> list;
    for (const Case& schedule : schedules()) list.push_back(options_of(schedule, splits));
    if (!on_gpu()) return list;
    list = test::schedules(fast_kernel(), step);
    std::erase_if(list, [](const PlanOptions& options) { return !options.splits; });
    if (list.empty()) skip_test(fast_kernel() + " takes no number of splits");
    return list;
}

constexpr std::int64_t width = 150;
const Layout second_layout = {Record::nvfp4_ds_mla};

/// Random records of two sources, random lists with absent columns and ragged counts, sinks.
Step make_step(std::int64_t rows, std::int64_t heads, std::uint64_t seed) {
    StepSpec spec{.rows = rows,
                  .heads = heads,
                  .sources = {{.width = width, .pages = 2}, {.layout = second_layout, .width = 40, .pages = 1}},
                  .sinks = true};
    if (!Step(spec).taken_by(fast_kernel())) spec.sources[1].layout = spec.sources[0].layout;
    Step step(spec);
    randomise(step, seed);
    std::mt19937_64 bits(seed);
    for (std::size_t source = 0; source < 2; ++source) {
        const std::int64_t columns = step.problem.sources[source].width;
        for (std::int64_t row = 0; row < rows; ++row) {
            for (std::int64_t column = 0; column < columns; ++column)
                step.slot(row, column, source) =
                    bits() % 16 == 0 ? -1 : static_cast<std::int32_t>(bits() % step.cache(source).num_slots());
            step.count(row, columns - static_cast<std::int64_t>(bits() % 20), source);
        }
    }
    for (std::int64_t head = 0; head < heads; ++head) step.sink(head) = static_cast<float>(head % 7) - 3.0F;
    return step;
}

/// One row of a step, or some of its heads, as a call of its own.
Result run_part(Step& step, std::int64_t row, std::int64_t first_head, std::int64_t heads, const PlanOptions& options) {
    Problem problem = step.problem;
    problem.rows = 1;
    problem.heads = heads;
    DecodeArgs args = step.args;
    args.rows = 1;
    const auto advance = [](ConstTensor& tensor, std::int64_t elements) {
        tensor.data = static_cast<const std::byte*>(tensor.data) + elements * size_bytes(tensor.dtype);
    };
    advance(args.query, row * args.query.strides[0] + first_head * args.query.strides[1]);
    args.query.shape = {1, heads, args.query.shape[2]};
    advance(args.sinks, first_head * args.sinks.strides[0]);
    args.sinks.shape[0] = heads;
    for (SourceArgs& source : args.sources) {
        advance(source.slots, row * source.slots.strides[0]);
        advance(source.counts, row * source.counts.strides[0]);
        source.slots.shape[0] = source.counts.shape[0] = 1;
    }
    const Plan plan = plan_or_skip(problem, step.device, options);
    std::vector<std::uint16_t> out(static_cast<std::size_t>(heads * value_dims), 0xFFA5);
    std::vector<float> lse(static_cast<std::size_t>(heads), not_a_number);
    args.out = dense(out.data(), DType::bf16, {1, heads, value_dims});
    args.lse = dense(lse.data(), DType::f32, {1, heads});
    DeviceCall(plan, args).decode(plan);
    Result result{
        .rows = 1, .heads = heads, .out_dtype = DType::bf16, .out_bits = {}, .lse_bits = {}, .schedule = plan.schedule};
    result.out_bits.assign(out.begin(), out.end());
    for (const float value : lse) result.lse_bits.push_back(std::bit_cast<std::uint32_t>(value));
    return result;
}

void expect_same(const Result& a, const Result& b, const std::string& what) {
    ASSERT_EQ(a.rows, b.rows);
    for (std::int64_t row = 0; row < a.rows; ++row)
        ASSERT_TRUE(same_bits(a, row, b, row)) << to_string(a.schedule) << ": row " << row << " differs with " << what;
}

TEST(Determinism, ThreadsAndRepetition) {
    const tbb::global_control oversubscribed(tbb::global_control::max_allowed_parallelism, 8);
    Step step = make_step(5, 33, 7);
    for (const PlanOptions& options : schedules_for(step)) {
        step.device.threads = 1;
        const Result alone = step.run(options);
        expect_same(alone, step.run(options), "a second call");
        for (const int threads : {2, 3, 8, 64}) {
            step.device.threads = threads;
            expect_same(alone, step.run(options), std::to_string(threads) + " threads");
        }
    }
}

TEST(Determinism, WorkspaceContents) {
    Step step = make_step(3, 20, 8);
    for (const PlanOptions& options : schedules_for(step)) {
        const Plan plan = step.plan(options);
        const Result poisoned = step.run(plan, 0xFF);
        for (const int byte : {0x00, 0x3F, 0x7F, 0x80})
            expect_same(poisoned, step.run(plan, byte), "a workspace of bytes " + std::to_string(byte));
    }
}

TEST(Determinism, PositionAndBatchmates) {
    Step step = make_step(4, 18, 9);
    for (const PlanOptions& options : schedules_for(step)) {
        const Result batch = step.run(options);
        for (std::int64_t row = 0; row < 4; ++row)
            EXPECT_TRUE(same_bits(batch, row, run_part(step, row, 0, 18, options), 0))
                << to_string(batch.schedule) << ": row " << row << " differs from itself alone";
    }
}

TEST(Determinism, CapacityAndFewerRows) {
    Step step = make_step(4, 18, 10);
    PlanOptions options{.kernel = fast_kernel()};
    const Result full = step.run(options);
    options.splits = full.schedule.splits;  // a larger capacity may plan fewer: another schedule
    step.problem.rows = 50;
    const Plan larger = step.plan(options);
    expect_same(full, step.run(larger), "a plan of capacity 50");
    step.args.rows = 3;
    const Result fewer = step.run(larger);
    for (std::int64_t row = 0; row < 3; ++row)
        EXPECT_TRUE(same_bits(full, row, fewer, row)) << to_string(larger.schedule) << ": row " << row << " of 3";
}

TEST(Determinism, HeadsAlone) {
    Step step = make_step(1, 128, 11);
    for (const PlanOptions& options : schedules_for(step)) {
        const Result all = step.run(options);
        for (const auto& [first, heads] : {std::pair{5, 1}, {0, 17}, {37, 6}, {60, 68}, {127, 1}, {13, 2}, {90, 12}}) {
            const Result part = run_part(step, 0, first, heads, options);
            for (int head = 0; head < heads; ++head) {
                ASSERT_EQ(part.lse_bits[static_cast<std::size_t>(head)],
                          all.lse_bits[static_cast<std::size_t>(first + head)])
                    << to_string(all.schedule) << ": lse of head " << first + head << " among " << heads << " heads";
                const auto out_of = [&](const Result& result, int h) {
                    return result.out_bits_of(0).subspan(static_cast<std::size_t>(h * value_dims), value_dims);
                };
                ASSERT_TRUE(std::ranges::equal(out_of(part, head), out_of(all, first + head)))
                    << to_string(all.schedule) << ": out of head " << first + head << " among " << heads << " heads";
            }
        }
    }
}

TEST(Determinism, WavesOfRows) {
    // The partials of one row of 64 splits x 128 heads take half of what a wave may hold.
    Step step = make_step(3, 128, 12);
    const PlanOptions options = on_gpu() ? schedules_for(step).back() : options_of(schedules().front(), 64);
    const Result batch = step.run(options);
    for (std::int64_t row = 0; row < 3; ++row)
        EXPECT_TRUE(same_bits(batch, row, run_part(step, row, 0, 128, options), 0)) << "row " << row;
}

TEST(Determinism, VectorLength) {
    if (on_gpu()) GTEST_SKIP() << "vectors are the CPU's";
    // Both targets multiply and add in one rounding: register tiles of other shapes must not show.
    const std::int64_t both = HWY_AVX2 | HWY_AVX3;
    if ((hwy::SupportedTargets() & HWY_TARGETS & both) != both) GTEST_SKIP() << "needs AVX2 and AVX-512";
    for (const Case& schedule : schedules()) {
        Step step = make_step(2, 43, 13);
        std::vector<Result> results;
        for (const std::int64_t target : {HWY_AVX2, HWY_AVX3}) {
            hwy::SetSupportedTargetsForTest(target);
            hwy::GetChosenTarget().DeInit();
            results.push_back(step.run(options_of(schedule)));
        }
        hwy::SetSupportedTargetsForTest(0);
        hwy::GetChosenTarget().DeInit();
        expect_same(results[0], results[1], "another vector length");
    }
}

}  // namespace
}  // namespace sparsemla::test
