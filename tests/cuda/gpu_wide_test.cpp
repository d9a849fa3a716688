// decode_wide: every record and format of P within its bounds, and bits that do not depend on the number of CTAs that
// share out the rows' chunks.
#include <algorithm>
#include <cmath>

#include "stage_layout.h"
#include "tests/cuda/gpu_grids.h"

namespace sparsemla::test {
namespace {

class GpuWide : public OnGpu {};

Plan plan_for(const Step& step, int sms, const PlanOptions& options) {
    return plan_on_grid(step, "decode_wide", sms, options);
}

/// The oracle for one grid, and the same bits for others, called twice.
void expect_right_on_every_grid(Step& step, const PlanOptions& schedule, const std::string& what) {
    const Plan first = plan_for(step, 132, schedule);
    DeviceCall first_call = step.place(first);
    const Result expected = run(step, first, first_call);
    SCOPED_TRACE(what + ", " + text_of(first));
    expect_oracle(step, expected);
    for (const int sms : {1, 2, 3, 5, 13, 64}) {
        if (testing::Test::HasFailure()) return;
        PlanOptions options = schedule;
        if (sms == 3) options.stages = 2;
        options.trigger = sms % 3 == 0 ? Trigger::start : sms % 3 == 1 ? Trigger::loaded : Trigger::end;
        const Plan plan = plan_for(step, sms, options);
        DeviceCall call = step.place(plan);
        expect_same_bits(run(step, plan, call), expected, text_of(plan));
        expect_same_bits(run(step, plan, call), expected, "again, " + text_of(plan));
    }
}

TEST_F(GpuWide, OneRowOfOneStep) {
    for (const Record record : {Record::fp8_512, Record::fp8_576}) {
        Step step = random_step({.rows = 1, .heads = 64, .record = record, .widths = {20}}, 1);
        expect_right_on_every_grid(step, {.splits = 1}, "one step");
        if (HasFailure()) return;
    }
}

TEST_F(GpuWide, EveryRecordAndFormat) {
    std::mt19937_64 bits(21);
    for (const RecordLayout& layout : record_layouts)
        for (std::uint64_t number = 0; number < 4; ++number) {
            RandomSpec spec;
            spec.rows = 1 + static_cast<std::int64_t>(bits() % 9);
            spec.heads = pick({1, 12, 17, 64, 65, 96, 128}, bits);
            spec.record = layout.record;
            spec.widths = {pick({1, 32, 33, 65, 513, 1000}, bits)};
            if (number % 2 == 1) spec.widths.push_back(pick({70, 512}, bits));
            spec.query_dtype = number == 0 ? DType::f8_e4m3 : DType::bf16;
            spec.sinks = number == 2;
            spec.out_dtype = number == 3 ? DType::f32 : DType::bf16;
            Step step = random_step(spec, 700 + number);
            const detail::StageLayout stage = detail::stage_layout(detail::stage_form(layout.record));
            const bool f16 = number % 2 == 0 || stage.is_plain() || stage.has_groups();
            const PFormat format = f16 ? PFormat::f16 : PFormat::bf16;
            expect_right_on_every_grid(step, {.p_format = format, .splits = pick({1, 2, 7}, bits)}, to_string(spec));
            if (HasFailure()) return;
        }
}

// k_scale of two sources, however far apart.
TEST_F(GpuWide, ScalesOfTwoSources) {
    for (const auto& [first, second] : {std::pair{1.0F, 0.375F}, {0x1p-90F, 1.0F}, {1.0F, 0x1p-90F}}) {
        Step step = random_step({.rows = 4, .heads = 70, .widths = {300, 170}}, 9);
        step.args.sources[0].k_scale.value = first;
        step.args.sources[1].k_scale.value = second;
        for (const int splits : {1, 3}) expect_right_on_every_grid(step, {.splits = splits}, "two scales");
        if (HasFailure()) return;
    }
}

// Heads whose values lie at the ends of BF16's range, alone and beside many small ones; softmax_scale brings the scores
// back to a size at which they matter.
TEST_F(GpuWide, QueriesOfEveryMagnitude) {
    for (const Record record : {Record::fp8_576, Record::fp8_ds_mla})
        for (const int exponent : {-130, -126, -60, 15, 60, 95}) {
            Step step =
                random_step({.rows = 2, .heads = 66, .record = record, .widths = {200}, .query_dtype = DType::bf16}, 6);
            std::mt19937_64 bits(7);
            std::normal_distribution<float> normal;
            for (std::int64_t row = 0; row < 2; ++row)
                for (std::int64_t head = 0; head < 66; ++head)
                    step.query(row, head, [&](int d) {
                        // Of some heads one value is a million times larger than the others, in rope or before it.
                        const bool large = head % 3 == 1 ? d == 540 : head % 3 == 2 ? d == 7 : false;
                        return std::ldexp(normal(bits), exponent - (head % 3 == 0 || large ? 0 : 20));
                    });
            step.args.softmax_scale = std::ldexp(0.1F, std::clamp(-exponent, -100, 100));
            expect_right_on_every_grid(step, {.splits = 2}, to_string(record) + " x 2^" + std::to_string(exponent));
            if (HasFailure()) return;
        }
}

// One split of many columns that weigh the same beside one that weighs more: the sum of P is rounded over and over.
TEST_F(GpuWide, LongTiedRow) {
    constexpr std::int64_t width = 40'000;
    Step step = random_step({.rows = 1, .heads = 64, .widths = {width}}, 8);
    for (std::int64_t column = 0; column < width; ++column) step.slot(0, column) = column == 0 ? 7 : 5;
    step.count(0, width);
    expect_right_on_every_grid(step, {.splits = 1}, "a long tied row");
}

TEST_F(GpuWide, ManyRows) {
    Step step = random_step({.rows = 700, .heads = 33, .record = Record::fp8_512, .widths = {130, 70}}, 3);
    for (const int splits : {1, 3}) {
        expect_right_on_every_grid(step, {.splits = splits}, "700 rows");
        if (HasFailure()) return;
    }
}

// One long row among short ones: it is not waited for in a chain.
TEST_F(GpuWide, OneLongRow) {
    Step step = random_step({.rows = 16, .heads = 64, .widths = {2048}}, 4);
    for (std::int64_t row = 0; row < 16; ++row) step.count(row, row == 7 ? 2048 : 64);
    for (const int splits : {1, 8, 16}) {
        expect_right_on_every_grid(step, {.splits = splits}, "one long row");
        if (HasFailure()) return;
    }
}

// Rows without columns, and fewer rows than the plan's.
TEST_F(GpuWide, FewerRowsAndEmptyOnes) { expect_fewer_and_empty_rows("decode_wide"); }

}  // namespace
}  // namespace sparsemla::test
