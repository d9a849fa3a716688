// The bounds are the formulas, honest rounding passes, and exact rules are exact.
#include "harness/tolerance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "sparsemla/formats.h"
#include "tests/tolerance_subject.h"

namespace sparsemla::harness {
namespace {

TEST(Tolerance, HonestRoundingPasses) {
    for (const std::int64_t width : {1, 2, 63, 300}) {
        Recipe recipe = plain_recipe();
        recipe.sources[0].width = width;
        const Subject subject(recipe);
        for (const PFormat format : all_formats)
            for (const DType dtype : {DType::bf16, DType::f32})
                for (const LseBase base : {LseBase::natural, LseBase::two}) {
                    const Verdict verdict =
                        judge(subject.oracle, Result(subject.oracle), accuracy_for(format), dtype, base);
                    EXPECT_TRUE(verdict.pass) << "width " << width << ": " << verdict.problem;
                    EXPECT_GT(verdict.worst_ratio, 0.0);
                    EXPECT_LE(verdict.worst_ratio, 1.0);
                }
    }
}

/// Rounds P as a kernel does, relative to the row's maximum, and sums in float64.
Result with_rounded_weights(const CaseStep& step, const Oracle& oracle, PFormat format) {
    Result result(oracle);
    const CaseSource& source = step.sources[0];
    const std::int64_t width = source.slots.shape[1], d_qk = step.query.shape[2];
    std::vector<double> keys(static_cast<std::size_t>(width * d_qk));
    const auto* slots = static_cast<const std::int32_t*>(source.slots.data);
    const auto* query = static_cast<const std::uint16_t*>(step.query.data);
    for (std::int64_t row = 0; row < step.rows; ++row) {
        unpack(source.cache, dense(slots + row * width, DType::i32, {width}),
               dense(keys.data(), DType::f64, {width, d_qk}));
        for (std::int64_t head = 0; head < step.heads; ++head) {
            const auto cell = static_cast<std::size_t>(row * step.heads + head);
            std::vector<double> scores(static_cast<std::size_t>(width), 0.0);
            for (std::size_t c = 0; c < scores.size(); ++c)
                for (std::int64_t d = 0; d < d_qk; ++d)
                    scores[c] += double{step.softmax_scale} *
                                 bf16_to_float(query[static_cast<std::int64_t>(cell) * d_qk + d]) *
                                 keys[c * static_cast<std::size_t>(d_qk) + static_cast<std::size_t>(d)];
            const double max = *std::max_element(scores.begin(), scores.end());
            for (std::size_t d = 0; d < value_dims; ++d) result.out[cell * value_dims + d] = 0;
            for (std::size_t c = 0; c < scores.size(); ++c) {
                const auto p = static_cast<float>(std::exp(scores[c] - max));
                const double rounded = format == PFormat::e4m3  ? e4m3_to_float(float_to_e4m3(448 * p)) / 448.0
                                       : format == PFormat::f16 ? round_to_f16(p)
                                                                : bf16_to_float(float_to_bf16(p));
                for (std::size_t d = 0; d < value_dims; ++d)
                    result.out[cell * value_dims + d] +=
                        rounded * oracle.anchor_weight[cell] * keys[c * static_cast<std::size_t>(d_qk) + d];
            }
        }
    }
    return result;
}

TEST(Tolerance, RoundedWeightsPassTheirOwnFormatAndNotAFinerOne) {
    Recipe recipe = plain_recipe();
    recipe.heads = 32;
    const Subject subject(recipe);
    const PFormat coarse_to_fine[] = {PFormat::e4m3, PFormat::bf16, PFormat::f16, PFormat::f64};
    for (int i = 0; i < 3; ++i) {
        const Result result = with_rounded_weights(subject.step(), subject.oracle, coarse_to_fine[i]);
        const Verdict own = judge(subject.oracle, result, accuracy_for(coarse_to_fine[i]), DType::f32);
        EXPECT_TRUE(own.pass) << own.problem;
        EXPECT_GT(own.worst_rms_ratio, 0.1) << "the RMS bound of p_" << name(coarse_to_fine[i]) << " is idle";
        EXPECT_FALSE(judge(subject.oracle, result, accuracy_for(coarse_to_fine[i + 1]), DType::f32).pass)
            << "p_" << name(coarse_to_fine[i]) << " passes as p_" << name(coarse_to_fine[i + 1]);
    }
}

class ToleranceExact : public testing::Test {
   protected:
    static Recipe recipe() {
        Recipe recipe = plain_recipe();
        recipe.rows = 3;
        recipe.counts = CountsRecipe::list;
        recipe.counts_list = {0, 300, 5};
        return recipe;
    }
    Subject subject{recipe()};

    Verdict judge_with(const std::function<void(Result&)>& fault, DType dtype = DType::bf16) const {
        Result result(subject.oracle);
        fault(result);
        return judge(subject.oracle, result, accuracy_for(PFormat::e4m3), dtype);
    }
};

TEST_F(ToleranceExact, EmptyRowsAreBits) {
    EXPECT_TRUE(judge_with([](Result&) {}).pass);
    for (const DType dtype : {DType::bf16, DType::f32})
        for (const double wrong : {-0.0, 1e-30, double{infinity}, std::nan("")}) {
            const Verdict verdict = judge_with([&](Result& result) { result.at(0, 4, 511) = wrong; }, dtype);
            EXPECT_FALSE(verdict.pass) << wrong;
            EXPECT_NE(verdict.problem.find("row 0, head 4, dim 511"), std::string::npos) << verdict.problem;
        }
    for (const double wrong : {0.0, -1e30, double{infinity}, std::nan("")})
        EXPECT_FALSE(judge_with([&](Result& result) { result.lse[4] = wrong; }).pass) << wrong;
}

TEST_F(ToleranceExact, NonFiniteResultsNeverPassForFiniteOnes) {
    for (const double wrong : {double{infinity}, -double{infinity}, std::nan("")}) {
        EXPECT_FALSE(judge_with([&](Result& result) { result.at(1, 0, 0) = wrong; }).pass) << wrong;
        EXPECT_FALSE(judge_with([&](Result& result) { result.at(2, 5, 511) = wrong; }).pass) << wrong;
        EXPECT_FALSE(judge_with([&](Result& result) { result.lse[7] = wrong; }).pass) << wrong;
    }
}

TEST_F(ToleranceExact, ExpectedNaNMustBeNaN) {
    Oracle oracle = subject.oracle;
    oracle.out[6 * value_dims + 3] = std::nan("");
    oracle.lse[6] = std::nan("");
    Result result(oracle);
    EXPECT_TRUE(judge(oracle, result, accuracy_for(PFormat::f16)).pass);
    result.at(1, 0, 3) = 0;
    EXPECT_FALSE(judge(oracle, result, accuracy_for(PFormat::f16)).pass);
    result.at(1, 0, 3) = std::nan("");
    result.lse[6] = 5;
    EXPECT_FALSE(judge(oracle, result, accuracy_for(PFormat::f16)).pass);
}

TEST_F(ToleranceExact, ProblemNamesPlaceValuesAndBound) {
    const Verdict verdict = judge_with([](Result& result) { result.at(2, 3, 77) += 1000; });
    EXPECT_EQ(verdict.row, 2);
    EXPECT_EQ(verdict.head, 3);
    EXPECT_EQ(verdict.dim, 77);
    EXPECT_NEAR(verdict.got - verdict.expected, 1000, 8);
    EXPECT_GT(verdict.worst_ratio, 1);
    for (const char* part : {"row 2, head 3, dim 77", "got ", "expected ", "bound ", "u_p 0.0625", "A ", "V "})
        EXPECT_NE(verdict.problem.find(part), std::string::npos) << part << " is missing in: " << verdict.problem;
}

/// The formulas of the header once more, for one element of a result in f32.
TEST(Tolerance, BoundsAreTheFormulas) {
    const Subject subject(plain_recipe());
    const Oracle& oracle = subject.oracle;
    const std::size_t cell = 7, value = value_dims + 99, element = cell * value_dims + 99;  // row 1, head 1, dim 99
    for (const PFormat format : {PFormat::e4m3, PFormat::f16, PFormat::bf16}) {
        const double u_p = format == PFormat::e4m3 ? 0x1p-4 : format == PFormat::f16 ? 0x1p-11 : 0x1p-8;
        const double u_sub = format == PFormat::e4m3 ? 0x1p-10 / 448 : format == PFormat::f16 ? 0x1p-25 : 0x1p-126;
        const double u_s = std::expm1(0x1p-20 * oracle.score_scale[cell]);
        const double u_out = 0x1p-24;
        const double v = oracle.anchor_weight[cell] * oracle.value_abs[value];
        const double bound = (1 + u_out) * ((u_p + u_s + 300 * 0x1p-24) * oracle.weighted_abs[element] + u_sub * v) +
                             u_out * std::fabs(oracle.out[element]) + 0x1p-126;
        const double lse_bound = 1e-5 + 0x1p-21 * oracle.score_scale[cell];
        for (const double share : {-1.01, -0.99, 0.99, 1.01}) {
            const Accuracy accuracy = accuracy_for(format);
            Result result(oracle);
            result.out[element] += share * bound;
            const bool inside = std::fabs(share) < 1;
            const Verdict verdict = judge(oracle, result, accuracy, DType::f32);
            EXPECT_EQ(verdict.worst_ratio <= 1, inside) << name(format) << " " << share << " " << verdict.problem;
            EXPECT_NEAR(verdict.worst_ratio, std::fabs(share), 1e-3) << name(format);
            result = Result(oracle);
            result.lse[cell] += share * 1.2 * lse_bound;  // 1.2 and 0.8: the LSE itself is rounded to float32
            EXPECT_FALSE(judge(oracle, result, accuracy).pass) << name(format) << " " << share;
            result.lse[cell] = oracle.lse[cell] + share * 0.8 * lse_bound;
            EXPECT_TRUE(judge(oracle, result, accuracy).pass) << name(format) << " " << share;
        }
    }
}

TEST(Tolerance, StridedOutputsAreRead) {
    const Subject subject(plain_recipe());
    const std::int64_t rows = subject.oracle.rows, heads = subject.oracle.heads;
    const std::int64_t head_stride = value_dims + 8, row_stride = (heads + 1) * head_stride;
    std::vector<float> out(static_cast<std::size_t>(rows * row_stride), std::nanf(""));
    std::vector<float> lse(static_cast<std::size_t>(rows * heads), std::nanf(""));  // transposed: [heads, rows]
    for (std::int64_t row = 0; row < rows; ++row)
        for (std::int64_t head = 0; head < heads; ++head) {
            const auto cell = static_cast<std::size_t>(row * heads + head);
            for (std::int64_t d = 0; d < value_dims; ++d)
                out[static_cast<std::size_t>(row * row_stride + head * head_stride + d)] =
                    static_cast<float>(subject.oracle.out[cell * value_dims + static_cast<std::size_t>(d)]);
            lse[static_cast<std::size_t>(head * rows + row)] = static_cast<float>(subject.oracle.lse[cell]);
        }
    ConstTensor out_view = dense(std::as_const(out).data(), DType::f32, {rows, heads, value_dims});
    out_view.strides = {row_stride, head_stride, 1, 0};
    ConstTensor lse_view = dense(std::as_const(lse).data(), DType::f32, {rows, heads});
    lse_view.strides = {1, rows, 0, 0};
    const Accuracy exact = accuracy_for(PFormat::f64);
    const Verdict verdict = compare(subject.oracle, out_view, lse_view, LseBase::natural, exact, true);
    EXPECT_TRUE(verdict.pass) << verdict.problem;
    EXPECT_TRUE(compare(subject.oracle, {}, lse_view, LseBase::natural, exact, true).pass);
    EXPECT_TRUE(compare(subject.oracle, out_view, {}, LseBase::natural, exact, true).pass);
}

TEST(Tolerance, AccuracyFollowsTheSchedule) {
    EXPECT_EQ(accuracy_with(PFormat::e4m3, 448).u_p, 0x1p-4);
    EXPECT_EQ(accuracy_with(PFormat::e4m3, 448).u_sub, 0x1p-10 / 448);
    EXPECT_EQ(accuracy_with(PFormat::e4m3, 256).u_sub, 0x1p-18);
    EXPECT_EQ(accuracy_with(PFormat::f16, 32768).u_sub, 0x1p-40);
    EXPECT_EQ(accuracy_with(PFormat::bf16, 1).u_p, 0x1p-8);
    EXPECT_EQ(accuracy_with(PFormat::f64, 1).u_p, 0);
}

/// The half step of each format really is u_p: the worst relative rounding over a binade comes close and never passes.
TEST(Tolerance, UnitsAreThoseOfTheFormats) {
    const std::pair<PFormat, std::function<double(float)>> formats[] = {
        {PFormat::e4m3, [](float x) { return e4m3_to_float(float_to_e4m3(x)); }},
        {PFormat::f16, [](float x) { return round_to_f16(x); }},
        {PFormat::bf16, [](float x) { return bf16_to_float(float_to_bf16(x)); }}};
    for (const auto& [format, round] : formats) {
        double worst = 0;
        for (int i = 0; i < 1 << 16; ++i) {
            const float x = 1 + static_cast<float>(i) * 0x1p-16F;
            worst = std::max(worst, std::fabs(round(x) - x) / x);
        }
        EXPECT_LE(worst, accuracy_for(format).u_p) << name(format);
        EXPECT_GT(worst, 0.9 * accuracy_for(format).u_p) << name(format);
    }
}

}  // namespace
}  // namespace sparsemla::harness
