// decode_balanced: whatever the number of CTAs that share out the rows' chunks, and wherever they cut them, its bits
// are those of decode_latency with as many splits.
#include "stage_layout.h"
#include "tests/cuda/gpu_grids.h"

namespace sparsemla::test {
namespace {

class GpuBalanced : public OnGpu {};

Plan plan_for(const Step& step, int sms, const PlanOptions& options) {
    return plan_on_grid(step, "decode_balanced", sms, options);
}

constexpr int grids[] = {1, 2, 3, 5, 8, 13, 29, 64, 132};

/// Several grids, tiles and ways to gather; returns after the first that differs.
void expect_bits_of_latency(Step& step, const PlanOptions& schedule, const std::string& what, bool with_oracle = true) {
    PlanOptions latency = schedule;
    latency.kernel = "decode_latency";
    const Result expected = step.run(step.plan(latency));
    const int splits = schedule.splits.value_or(1);
    if (with_oracle) expect_oracle(step, expected);
    for (const int tile : {16, 32})
        for (const int sms : grids) {
            PlanOptions options = schedule;
            options.tile_heads = tile;
            options.gather = sms % 2 == 0 ? Gather::bulk : Gather::copies;
            // Larger records leave less room.
            if (detail::stage_layout(detail::stage_form(step.problem.sources[0].record)).is_plain())
                options.stages = splits > 8 ? 2 + sms % 2 : 1 + sms % 3;
            options.trigger = sms % 3 == 0 ? Trigger::start : sms % 3 == 1 ? Trigger::loaded : Trigger::end;
            const Plan plan = plan_for(step, sms, options);
            DeviceCall call = step.place(plan);
            expect_same_bits(run(step, plan, call), expected, what + ", " + text_of(plan));
            expect_same_bits(run(step, plan, call), expected, what + ", again");
            if (testing::Test::HasFailure()) return;
        }
}

// Rows of many lengths, empty ones among them: splits are cut at every place, and lie in one CTA or two.
TEST_F(GpuBalanced, BitsDoNotDependOnWhereCtasBeginAndEnd) {
    std::mt19937_64 bits(11);
    for (std::uint64_t number = 0; number < 24; ++number) {
        RandomSpec spec;
        spec.rows = 1 + static_cast<std::int64_t>(bits() % 20);
        spec.heads = pick({1, 12, 16, 17, 33, 96, 128}, bits);
        spec.record = pick({Record::fp8_576, Record::fp8_512}, bits);
        spec.widths = {pick({1, 64, 65, 513, 1000, 2048}, bits)};
        if (bits() % 2 == 0) spec.widths.push_back(pick({64, 70, 512}, bits));
        spec.query_dtype = pick({DType::f8_e4m3, DType::bf16}, bits);
        spec.sinks = bits() % 2 == 0;
        spec.out_dtype = bits() % 4 == 0 ? DType::f32 : DType::bf16;
        Step step = random_step(spec, 500 + number);
        // A split may be cut where its source changes. Beside a scale that is 2^80 times larger the second source may
        // count as nothing (docs/numerics.md): then it does so in both kernels.
        float scales[] = {1.0F, 1.0F};
        for (std::size_t i = 0; i < step.args.sources.size(); ++i)
            step.args.sources[i].k_scale.value = scales[i] = pick({1.0F, 0.375F, 0x1p-90F}, bits);
        const bool with_oracle = scales[1] > 0x1p-80F * scales[0];
        for (const int splits : {1, 1 + static_cast<int>(bits() % 16)}) {
            const PFormat format = number % 2 == 0 ? PFormat::f16 : PFormat::e4m3;
            expect_bits_of_latency(step, {.p_format = format, .splits = splits}, to_string(spec), with_oracle);
            if (HasFailure()) return;
        }
    }
}

// Records with scales or wide values: what the sums are relative to is handed over with them.
TEST_F(GpuBalanced, EveryRecord) {
    std::mt19937_64 bits(12);
    for (const RecordLayout& layout : record_layouts)
        for (std::uint64_t number = 0; number < 3; ++number) {
            RandomSpec spec;
            spec.rows = 1 + static_cast<std::int64_t>(bits() % 9);
            spec.heads = pick({1, 12, 17, 64, 128}, bits);
            spec.record = layout.record;
            spec.widths = {pick({65, 513, 1000}, bits)};
            if (number % 2 == 1) spec.widths.push_back(pick({70, 512}, bits));
            spec.query_dtype = number == 0 ? DType::f8_e4m3 : DType::bf16;
            spec.sinks = number == 2;
            Step step = random_step(spec, 900 + number);
            expect_bits_of_latency(step, {.splits = pick({1, 2, 7}, bits)}, to_string(spec));
            if (HasFailure()) return;
        }
}

// More rows than a CTA has threads, most of them short.
TEST_F(GpuBalanced, MoreRowsThanThreads) {
    Step step = random_step({.rows = 900, .heads = 16, .record = Record::fp8_512, .widths = {130, 70}}, 3);
    for (const int splits : {1, 3}) {
        expect_bits_of_latency(step, {.splits = splits}, "900 rows");
        if (HasFailure()) return;
    }
}

// One long row among short ones: it is not waited for in a chain.
TEST_F(GpuBalanced, OneLongRow) {
    Step step = random_step({.rows = 16, .heads = 64, .widths = {2048}}, 4);
    for (std::int64_t row = 0; row < 16; ++row) step.count(row, row == 7 ? 2048 : 64);
    for (const int splits : {1, 8, 16}) {
        expect_bits_of_latency(step, {.splits = splits}, "one long row");
        if (HasFailure()) return;
    }
}

// Fewer rows than the plan's, down to none that has columns: the state is as it was after every call.
TEST_F(GpuBalanced, FewerRowsAndEmptyOnes) { expect_fewer_and_empty_rows("decode_balanced"); }

}  // namespace
}  // namespace sparsemla::test
