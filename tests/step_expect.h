// What a step should give: schedules to try it with, and checks against answers known in closed form.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/step.h"

namespace sparsemla::test {

/// For a kernel whose choices are not known here: each one alone, and formats of P with numbers of splits.
inline std::vector<PlanOptions> single_wishes() {
    std::vector<PlanOptions> wishes = {{}};
    for (const PFormat format : {PFormat::e4m3, PFormat::f16, PFormat::bf16})
        for (const std::optional<int> splits : {std::optional<int>(), {1}, {2}, {3}, {4}, {8}, {16}})
            wishes.push_back({.p_format = format, .splits = splits});
    for (const Anchor anchor : {Anchor::split_running_max, Anchor::chunk_max, Anchor::row_max})
        wishes.push_back({.anchor = anchor});
    for (const ColumnRule rule : {ColumnRule::blocks, ColumnRule::interleaved, ColumnRule::round_robin})
        wishes.push_back({.columns = rule});
    for (const int chunk : {16, 32, 64, 128}) wishes.push_back({.chunk = chunk});
    return wishes;
}

/// Schedules that differ in everything a schedule fixes; the first leaves every choice to the plan.
inline std::vector<PlanOptions> schedules() {
    if (on_gpu()) return single_wishes();
    return {
        {},
        {.p_format = PFormat::e4m3, .anchor = Anchor::split_running_max, .splits = 1, .chunk = 64},
        {.p_format = PFormat::e4m3, .p_scale = 256.0F, .anchor = Anchor::chunk_max, .splits = 3, .chunk = 16},
        {.p_format = PFormat::e4m3, .anchor = Anchor::row_max, .splits = 2, .columns = ColumnRule::interleaved},
        {.p_format = PFormat::f16, .splits = 2, .columns = ColumnRule::interleaved, .chunk = 32},
        {.p_format = PFormat::f16, .anchor = Anchor::row_max, .splits = 8, .chunk = 16},
        {.p_format = PFormat::f16, .anchor = Anchor::chunk_max, .splits = 64, .chunk = 128},
        {.p_format = PFormat::bf16, .anchor = Anchor::chunk_max, .splits = 1, .chunk = 128},
        {.p_format = PFormat::bf16, .splits = 5, .columns = ColumnRule::round_robin, .chunk = 64},
    };
}

/// The schedules that a kernel takes for this problem, each one once. Every kernel takes its own choice; a GPU's that
/// takes nothing ends the test as skipped.
inline std::vector<PlanOptions> schedules(const std::string& kernel, const Step& step) {
    std::vector<PlanOptions> taken;
    std::vector<Schedule> planned;
    for (PlanOptions options : schedules()) {
        options.kernel = kernel;
        if (!supports(step.problem, step.device, options)) continue;
        planned.push_back(step.plan(options).schedule);
        if (std::count(planned.begin(), planned.end(), planned.back()) == 1) taken.push_back(options);
    }
    if (taken.empty()) step.plan({.kernel = kernel});
    EXPECT_FALSE(taken.empty()) << kernel;
    return taken;
}

/// Runs the step under every schedule of the kernel and hands each result to `check`; stops at the first failure.
template <class Check>
void for_each_schedule(const std::string& kernel, Step& step, Check check) {
    for (const PlanOptions& options : schedules(kernel, step)) {
        check(step.run(options));
        if (testing::Test::HasFailure()) return;
    }
}

using Values = std::vector<double>;  // one per value dimension

/// The output with equal weights: `weight` times how often each dimension's histogram record was read.
inline Values histogram_of(const std::vector<std::int32_t>& slots, std::int64_t shift = 0) {
    Values values(value_dims, 0.0);
    for (const std::int32_t slot : slots)
        values[static_cast<std::size_t>((slot + shift) % value_dims)] += double{Step::mark} / slots.size();
    return values;
}

inline Values constant(double value) { return Values(value_dims, value); }

/// One rounding to BF16, and a few of FP32 before it.
inline constexpr double one_bf16_rounding = 0x1p-8 * (1 + 0x1p-7);

/// Every element of a row and head against its value: |got - expected| <= relative * |expected| + absolute.
inline void expect_values(const Result& result, std::int64_t row, std::int64_t head, const Values& expected,
                          double relative = one_bf16_rounding, double absolute = 0) {
    for (int d = 0; d < value_dims; ++d) {
        const double want = expected[static_cast<std::size_t>(d)];
        const double got = result.out(row, head, d);
        const bool close = std::fabs(got - want) <= relative * std::fabs(want) + absolute;
        ASSERT_TRUE(close || (std::isnan(want) && std::isnan(got)))
            << to_string(result.schedule) << ": out of row " << row << ", head " << head << ", dimension " << d
            << ": got " << got << ", expected " << want;
    }
}

/// The same for every head of a row.
inline void expect_row(const Result& result, std::int64_t row, const Values& expected,
                       double relative = one_bf16_rounding, double absolute = 0) {
    for (std::int64_t head = 0; head < result.heads; ++head)
        ASSERT_NO_FATAL_FAILURE(expect_values(result, row, head, expected, relative, absolute));
}

inline void expect_lse(const Result& result, std::int64_t row, double expected, double tolerance = 1e-5) {
    for (std::int64_t head = 0; head < result.heads; ++head)
        ASSERT_NEAR(result.lse(row, head), expected, tolerance)
            << to_string(result.schedule) << ": lse of row " << row << ", head " << head;
}

/// q = 0 over a histogram cache: the row read exactly these slots, each as often as it occurs.
inline void expect_histogram(const Result& result, std::int64_t row, const std::vector<std::int32_t>& slots,
                             std::int64_t shift = 0) {
    ASSERT_NO_FATAL_FAILURE(expect_row(result, row, histogram_of(slots, shift)));
    if (!result.lse_bits.empty()) expect_lse(result, row, std::log(static_cast<double>(slots.size())));
}

/// Exactly +0 and -inf: the identity of merge.
inline void expect_empty_row(const Result& result, std::int64_t row) {
    for (const std::uint32_t bits : result.out_bits_of(row))
        ASSERT_EQ(bits, 0U) << to_string(result.schedule) << ": out of the empty row " << row;
    if (result.lse_bits.empty()) return;
    for (std::int64_t head = 0; head < result.heads; ++head)
        ASSERT_EQ(result.lse(row, head), -infinity)
            << to_string(result.schedule) << ": lse of the empty row " << row << ", head " << head;
}

inline void expect_finite(const Result& result, std::int64_t row) {
    for (std::int64_t head = 0; head < result.heads; ++head) {
        for (int d = 0; d < value_dims; ++d)
            ASSERT_TRUE(std::isfinite(result.out(row, head, d)))
                << to_string(result.schedule) << ": row " << row << ", head " << head << ", dimension " << d;
        ASSERT_TRUE(result.lse_bits.empty() || std::isfinite(result.lse(row, head))) << to_string(result.schedule);
    }
}

inline void expect_nan_row(const Result& result, std::int64_t row) {
    for (std::int64_t head = 0; head < result.heads; ++head) {
        ASSERT_TRUE(std::isnan(result.lse(row, head))) << to_string(result.schedule) << ": lse of row " << row;
        for (int d = 0; d < value_dims; ++d)
            ASSERT_TRUE(std::isnan(result.out(row, head, d)))
                << to_string(result.schedule) << ": row " << row << ", head " << head << ", dimension " << d;
    }
}

/// Any step against the float64 oracle, within the bounds computed for the schedule.
inline void expect_oracle(const Step& step, const Result& result) {
    Tensor out, lse;
    std::vector<std::uint16_t> halves(result.out_bits.begin(), result.out_bits.end());
    std::vector<std::uint32_t> words = result.out_bits;
    std::vector<std::uint32_t> lse_words = result.lse_bits;
    if (result.out_dtype == DType::bf16)
        out = dense(halves.data(), DType::bf16, {result.rows, result.heads, value_dims});
    else
        out = dense(words.data(), DType::f32, {result.rows, result.heads, value_dims});
    if (!lse_words.empty()) lse = dense(lse_words.data(), DType::f32, {result.rows, result.heads});
    const harness::Verdict verdict =
        harness::compare(harness::compute_oracle(step.case_step()), out, lse, step.problem.lse_base,
                         harness::accuracy_of(result.schedule), false);
    EXPECT_TRUE(verdict.pass) << to_string(result.schedule) << ": " << verdict.problem;
}

/// The slots first, first + step, ..., `count` of them.
inline std::vector<std::int32_t> slot_range(std::int32_t first, std::int32_t count, std::int32_t step = 1) {
    std::vector<std::int32_t> slots(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = first + static_cast<std::int32_t>(i) * step;
    return slots;
}

/// Random records in every slot and random queries, a function of the seed.
inline void randomise(Step& step, std::uint64_t seed) {
    std::mt19937_64 bits(seed);
    std::normal_distribution<float> normal;
    const auto next = [&](int) { return normal(bits); };
    for (std::size_t i = 0; i < step.problem.sources.size(); ++i)
        for (std::int64_t s = 0; s < step.cache(i).num_slots(); ++s)
            if (step.cache(i).holds(s)) step.record(static_cast<std::int32_t>(s), next, i);
    step.query(next);
    step.args.softmax_scale = 1 / std::sqrt(static_cast<float>(d_qk(step.problem)));
}

/// One test per kernel and record form, named after both.
struct KernelAndLayout {
    std::string kernel;
    Layout layout;
};

inline std::vector<KernelAndLayout> kernels_and_layouts() {
    std::vector<KernelAndLayout> all;
    for (const std::string& kernel : tested_kernels())
        for (const Layout& layout : layouts()) all.push_back({kernel, layout});
    return all;
}

inline std::string test_name(const testing::TestParamInfo<KernelAndLayout>& info) {
    return info.param.kernel + "_" + name(info.param.layout);
}
inline std::string kernel_test_name(const testing::TestParamInfo<std::string>& info) { return info.param; }

/// Why a kernel takes a record form in no query format, or nothing.
inline std::optional<std::string> refusal_of(const std::string& kernel, const Layout& layout) {
    std::optional<std::string> reason;
    for (const DType query_dtype : {DType::bf16, DType::f8_e4m3}) {
        const Problem problem{.rows = 1,
                              .heads = 16,
                              .query_dtype = query_dtype,
                              .sources = {{layout.record, layout.form, layout.split_rope, 64, 0}},
                              .device = tested_device().device};
        reason = refusal(problem, tested_device(), {.kernel = kernel});
        if (!reason) return reason;
    }
    return reason;
}

/// The record forms that a kernel takes: all of them, of a CPU's.
inline std::vector<Layout> layouts_of(const std::string& kernel) {
    std::vector<Layout> taken;
    for (const Layout& layout : layouts())
        if (!refusal_of(kernel, layout)) taken.push_back(layout);
    if (taken.empty()) skip_test(kernel + " takes no record");
    return taken;
}

/// A test class over every kernel of the tested device and every record form. What a GPU kernel does not take of a form
/// in any query format is skipped, with its refusal.
class EveryRecord : public testing::TestWithParam<KernelAndLayout> {
   protected:
    void SetUp() override {
        if (const auto reason = refusal_of(kernel(), layout())) GTEST_SKIP() << *reason;
    }
    const std::string& kernel() const { return GetParam().kernel; }
    const Layout& layout() const { return GetParam().layout; }
    /// How much a weight may be off, relatively, although P holds it: the GPU's kernels multiply it by float32 scales
    /// of groups before it becomes FP16 (docs/numerics.md).
    double weight_rounding() const {
        const bool multiplies =
            kernel().starts_with("decode_") && layout().bytes().scale_encoding == ScaleEncoding::f32;
        return multiplies ? 0x1p-11 : 0.0;
    }
};

/// A test class over every kernel of the tested device.
class EveryKernel : public testing::TestWithParam<std::string> {
   protected:
    const std::string& kernel() const { return GetParam(); }
};

}  // namespace sparsemla::test
