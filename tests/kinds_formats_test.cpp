// K09, K10: the range of the formats that scores, weights and records pass through, and what scales mean.
#include <cstring>

#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
class K09_Fp8Range : public EveryRecord {
   protected:
    /// 256 columns: one at score 0 with V = 0, the others at score -mark * softmax_scale with V = mark. Only the last
    /// dimension enters the scores.
    Step one_strong_key(std::int32_t strong_column) const {
        Step step({.rows = 1, .heads = 2, .sources = {{.layout = layout(), .width = 256}}});
        const int last = d_qk(step.problem) - 1;
        step.record(0, [](int) { return 0.0F; });
        step.record(1, [&](int) { return Step::mark; });
        step.query([&](int d) { return d == last ? -1.0F : 0.0F; });
        step.list(0, std::vector<std::int32_t>(256, 1));
        step.slot(0, strong_column) = 0;
        return step;
    }
};

// B040: weights far below the largest are summed unquantised; E4M3 P keeps them down to its subnormals.
TEST_P(K09_Fp8Range, B040_SmallWeightsDoNotVanish) {
    for (const std::int32_t column : {0, 100, 255}) {
        Step step = one_strong_key(column);
        for (const int octaves : {11, 18, 22}) {
            step.args.softmax_scale = static_cast<float>(octaves) * std::log(2.0F) / Step::mark;
            const double tail = 255 * std::exp2(-octaves);
            const double expected = Step::mark * tail / (1 + tail);
            for_each_schedule(kernel(), step, [&](const Result& result) {
                expect_lse(result, 0, std::log1p(tail));
                // P of e4m3 in steps of 2^-10/448 of the largest weight: nothing is left 22 octaves below it.
                const bool coarse = result.schedule.p_format == PFormat::e4m3;
                const double relative = !coarse ? 0.01 : octaves == 11 ? 0.04 : octaves == 18 ? 0.15 : 1.0;
                expect_row(result, 0, constant(expected), relative);
                if (coarse) expect_oracle(step, result);
            });
        }
    }
}

// The largest values a record holds, in keys, values and query: finite, and exact for one column.
TEST_P(K09_Fp8Range, B089_LargestValuesEverywhere) {
    const float largest = layout().bytes().main.encoding == ValueEncoding::e2m1 ? 1.5F : e4m3_max;
    for (const float sign : {1.0F, -1.0F}) {
        Step step({.rows = 2, .heads = 32, .sources = {{.layout = layout()}}});
        step.record(0, [&](int d) { return d % 2 == 0 ? largest : -largest; });
        step.record(1, [&](int d) { return d % 2 == 0 ? -largest : largest; });
        step.query([&](int d) { return d % 2 == 0 ? sign * e4m3_max : -sign * e4m3_max; });
        step.list(0, {0});
        step.list(1, {0, 1});
        for (const float scale : {1.0F, 1 / std::sqrt(static_cast<float>(d_qk(step.problem))), 1e-9F}) {
            step.args.softmax_scale = scale;
            const double score = double{sign} * scale * e4m3_max * largest * d_qk(step.problem);
            for_each_schedule(kernel(), step, [&](const Result& result) {
                expect_lse(result, 0, score, 1e-5 + std::fabs(score) * 0x1p-21);
                expect_finite(result, 1);
                const double weight = 1 / (1 + std::exp(-2 * score));
                for (int d = 0; d < value_dims; ++d) {
                    const double value = d % 2 == 0 ? largest : -largest;
                    ASSERT_EQ(result.out(0, 31, d), value) << to_string(result.schedule) << ", dimension " << d;
                    ASSERT_NEAR(result.out(1, 0, d), value * (2 * weight - 1), 2 * largest * 0x1p-4);
                }
            });
        }
    }
}

// B089: a rope part of +-448 beside a latent of about 1, as a scale calibrated on the latent alone leaves it.
TEST_P(K09_Fp8Range, B089_ClippedRope) {
    if (layout().bytes().rope.dims == 0) GTEST_SKIP() << "the record has no rope part";
    const int rope = layout().bytes().rope.first_dim;
    Step step({.rows = 1, .heads = 32, .sources = {{.layout = layout()}}});
    for (std::int32_t s = 0; s < 64; ++s)
        step.record(s, [&](int d) {
            if (d >= rope) return (d + s) % 3 == 0 ? -e4m3_max : e4m3_max;
            return d % 16 == s % 16 ? Step::mark : 0.0F;
        });
    step.query([&](int d) { return d >= rope ? ((d * 5) % 7 == 0 ? -e4m3_max : e4m3_max) : 1.0F; });
    step.list(0, slot_range(0, 64));
    for (const float scale : {1 / std::sqrt(static_cast<float>(d_qk(step.problem))), 1e-7F, 1.0F}) {
        step.args.softmax_scale = scale;
        for_each_schedule(kernel(), step, [&](const Result& result) {
            expect_finite(result, 0);
            expect_oracle(step, result);
        });
    }
}

// Every code of every byte of a record, NaN codes included, one column at a time: the output is the stored value.
TEST_P(K09_Fp8Range, EveryCodeAsAValue) {
    Step step({.rows = 16, .heads = 1, .sources = {{.layout = layout(), .width = 1}}});
    for (const RecordRun& run : {layout().bytes().main, layout().bytes().rope}) {
        if (run.first_dim >= value_dims) continue;  // not part of the value
        for (int first = 0; first < 256; first += 16) {
            for (int i = 0; i < 16; ++i) {
                step.record(i, [](int d) { return d % 16 == 1 ? Step::mark : 0.0F; });
                const auto at = locate(step.cache(), i);
                std::byte* bytes = run.first_dim == 0 ? at.data : at.rope;
                std::memset(bytes, first + i, static_cast<std::size_t>(run.bytes()));
                step.list(i, {i});
            }
            std::vector<double> stored(static_cast<std::size_t>(16 * d_qk(step.problem)));
            const auto slots = slot_range(0, 16);
            unpack(step.cache(), dense(slots.data(), DType::i32, {16}),
                   dense(stored.data(), DType::f64, {16, d_qk(step.problem)}));
            const Result result = step.run({.kernel = kernel()});
            for (std::int64_t row = 0; row < 16; ++row) {
                const auto values = std::span(stored).subspan(static_cast<std::size_t>(row * d_qk(step.problem)));
                // One NaN in the key makes the score NaN, and so the whole row.
                const bool finite = std::ranges::none_of(values.first(static_cast<std::size_t>(d_qk(step.problem))),
                                                         [](double v) { return !std::isfinite(v); });
                if (finite)
                    ASSERT_NO_FATAL_FAILURE(expect_row(result, row, {values.begin(), values.begin() + value_dims}));
                else
                    ASSERT_NO_FATAL_FAILURE(expect_nan_row(result, row));
            }
        }
    }
}

// Every query code against one key: the score is the code's value, and NaN codes stay in their head.
TEST_P(K09_Fp8Range, EveryCodeAsAQuery) {
    Step step({.rows = 2, .heads = 128, .sources = {{.layout = layout()}}});
    const int last = d_qk(step.problem) - 1;
    step.record(0, [&](int d) { return d == last ? Step::mark : 0.0F; });
    for (std::int64_t row : {0, 1}) step.list(row, {0});
    for (int code = 0; code < 256; ++code)
        step.query_memory()
            .data()[code / 128 * step.args.query.strides[0] + code % 128 * step.args.query.strides[1] + last] =
            static_cast<std::byte>(code);
    for_each_schedule(kernel(), step, [&](const Result& result) {
        for (int code = 0; code < 256; ++code) {
            const float value = e4m3_to_float(static_cast<std::uint8_t>(code));
            const float lse = result.lse(code / 128, code % 128);
            if (std::isnan(value))
                ASSERT_TRUE(std::isnan(lse)) << "query code " << code;
            else
                ASSERT_NEAR(lse, value * Step::mark, 1e-5 + std::fabs(value) * 0x1p-20) << "query code " << code;
        }
    });
}

// Values and scores at the lower end: subnormal codes and tiny scales are not flushed.
TEST_P(K09_Fp8Range, SubnormalValues) {
    Step step({.rows = 1, .heads = 1, .sources = {{.layout = layout()}}});
    const float tiny = 0x1p-9F;  // e4m3's smallest
    step.record(0, [&](int d) { return d % 2 == 0 ? tiny : -tiny; });
    step.list(0, {0});
    for_each_schedule(kernel(), step, [&](const Result& result) {
        for (int d = 0; d < value_dims; ++d)
            // nvfp4's smallest scale is 2^-9, so this value is code 1.0 there; all records hold it exactly or to 2^-23.
            ASSERT_NEAR(result.out(0, 0, d), d % 2 == 0 ? tiny : -tiny, tiny * 0x1p-8) << to_string(result.schedule);
    });
}

// Scores beyond FP32 leave infinities and NaN in their own row and head, and nowhere else.
TEST_P(K09_Fp8Range, OverflowingScoresStayInTheirHead) {
    Step step({.rows = 2, .heads = 4, .query_dtype = DType::bf16, .sources = {{.layout = layout()}}});
    step.histogram();
    for (std::int64_t row : {0, 1}) step.list(row, slot_range(0, 64));
    step.query(1, 2, [](int) { return 3e38F; });
    step.args.softmax_scale = 100.0F;
    for_each_schedule(kernel(), step, [](const Result& result) {
        for (std::int64_t row : {0, 1})
            for (std::int64_t head = 0; head < 4; ++head)
                if (row != 1 || head != 2) expect_values(result, row, head, histogram_of(slot_range(0, 64)));
    });
}

INSTANTIATE_TEST_SUITE_P(All, K09_Fp8Range, testing::ValuesIn(kernels_and_layouts()), test_name);

// ---------------------------------------------------------------------------------------------------------------------
class K10_ScaleSemantics : public EveryRecord {
   protected:
    /// Writes a group's scale code into the record of a slot.
    static void set_scale(Step& step, std::int32_t slot, int group, float scale) {
        const RecordLayout& bytes = step.cache().layout();
        std::byte* at = locate(step.cache(), slot).scales + bytes.scale_index(group) * bytes.scale_size();
        if (bytes.scale_encoding == ScaleEncoding::f32)
            std::memcpy(at, &scale, sizeof scale);
        else if (bytes.scale_encoding == ScaleEncoding::e4m3)
            *at = static_cast<std::byte>(float_to_e4m3(scale));
        else
            *at = static_cast<std::byte>(std::ilogb(scale) + 127);
    }
    /// Scales that an encoding holds exactly.
    static std::vector<float> scales_of(ScaleEncoding encoding) {
        switch (encoding) {
            case ScaleEncoding::none: return {};
            case ScaleEncoding::f32: return {0.75F, 1.3F, 3.7e-3F, 1 / 448.0F, 1.0F, 0x1p-126F, 0x1.8p-130F, 1e4F};
            case ScaleEncoding::e4m3: return {1.125F, 0.4375F, 1.0F, 448.0F, 0x1p-6F, 0x1p-9F, 0x1.8p-8F};
            case ScaleEncoding::ue8m0: return {1.0F, 0x1p-8F, 0x1p8F, 0x1p60F, 0x1p-60F, 0x1p-126F, 0x1p-127F};
        }
        return {};
    }
};

// B087, B094: each group has its own scale, of any mantissa, at its documented place.
TEST_P(K10_ScaleSemantics, B087_B094_ArbitraryScalesPerGroup) {
    const RecordLayout& bytes = layout().bytes();
    if (bytes.scale_encoding == ScaleEncoding::none) GTEST_SKIP() << "the record has no scales";
    const std::vector<float> scales = scales_of(bytes.scale_encoding);
    Step step({.rows = 1, .heads = 1, .sources = {{.layout = layout()}}});
    const auto scale_of = [&](int group, std::size_t turn) {
        return scales[(static_cast<std::size_t>(group) * 3 + turn) % scales.size()];
    };
    const std::byte one =
        bytes.main.encoding == ValueEncoding::e4m3 ? std::byte{0x38} : std::byte{0x22};  // code of 1.0
    step.list(0, {5});
    for (std::size_t turn = 0; turn < scales.size(); ++turn) {
        step.record(5, [](int) { return 0.0F; });
        std::fill_n(locate(step.cache(), 5).data, bytes.main.bytes(), one);
        for (int group = 0; group < bytes.groups(); ++group) set_scale(step, 5, group, scale_of(group, turn));
        Values expected(value_dims, 0.0);
        for (int d = 0; d < bytes.main.dims; ++d)
            expected[static_cast<std::size_t>(d)] = scale_of(d / bytes.group_dims, turn);
        for_each_schedule(kernel(), step, [&](const Result& result) { expect_row(result, 0, expected); });
    }
}

// The scales enter the scores as they enter the values.
TEST_P(K10_ScaleSemantics, ScalesEnterTheScores) {
    const RecordLayout& bytes = layout().bytes();
    if (bytes.scale_encoding == ScaleEncoding::none) GTEST_SKIP() << "the record has no scales";
    const std::byte one = bytes.main.encoding == ValueEncoding::e4m3 ? std::byte{0x38} : std::byte{0x22};
    Step step({.rows = bytes.groups(), .heads = 1, .sources = {{.layout = layout()}}});
    step.record(5, [](int) { return 0.0F; });
    std::fill_n(locate(step.cache(), 5).data, bytes.main.bytes(), one);
    const auto scale_of = [&](std::int64_t group) {
        const float exact[] = {0.25F, 1.0F, 2.0F, 0.5F};
        return bytes.scale_encoding == ScaleEncoding::f32 ? 0.3F + static_cast<float>(group) : exact[group % 4];
    };
    for (int group = 0; group < bytes.groups(); ++group) {
        set_scale(step, 5, group, scale_of(group));
        step.list(group, {5});
        step.query(group, 0, [&](int d) { return d == group * bytes.group_dims + 3 ? 2.0F : 0.0F; });
    }
    for_each_schedule(kernel(), step, [&](const Result& result) {
        for (std::int64_t group = 0; group < result.rows; ++group)
            expect_lse(result, group, 2.0 * scale_of(group), 1e-5);
    });
}

// B088: the same values written with exact and with power-of-two scales: each is read as it was written.
TEST_P(K10_ScaleSemantics, B088_BothWritersReadRight) {
    if (layout().bytes().scale_rule != ScaleRule::amax_f32) GTEST_SKIP() << "the record has one writer";
    Step step({.rows = 2, .heads = 2, .sources = {{.layout = layout()}}});
    const auto value_of = [](int d) { return 0.9F + 0.001F * static_cast<float>(d); };
    step.record(0, value_of, 0, {.power_of_two_scales = false});
    step.record(1, value_of, 0, {.power_of_two_scales = true});
    step.query([](int d) { return d % 5 == 0 ? 0.125F : 0.0F; });
    step.list(0, {0});
    step.list(1, {1});
    for_each_schedule(kernel(), step, [&](const Result& result) {
        expect_oracle(step, result);
        for (std::int64_t row : {0, 1})
            for (int d = 0; d < layout().bytes().main.dims; ++d)
                ASSERT_NEAR(result.out(row, 0, d), value_of(d), value_of(d) * (0x1p-4 + 0x1p-8));
    });
}

// B097: a factor given for a record that carries its own scales is refused by name; flat fp8 multiplies by it.
TEST_P(K10_ScaleSemantics, B097_KScaleBelongsToFlatFp8) {
    Step step({.rows = 1, .heads = 2, .sources = {{.layout = layout()}}});
    const int last = d_qk(step.problem) - 1;
    step.record(0, [&](int d) { return d == last || d < 4 ? Step::mark : 0.0F; });
    step.query([&](int d) { return d == last ? 1.0F : 0.0F; });
    step.list(0, {0});
    const float three = 3.0F;
    for (const Scale& scale : {Scale{.value = 3.0F}, Scale{.value = 1.0F, .pointer = &three}}) {
        step.args.sources[0].k_scale = scale;
        if (!layout().bytes().takes_k_scale) {
            try {
                step.run({.kernel = kernel()});
                FAIL() << "k_scale was accepted for " << name(layout());
            } catch (const Error& error) {
                EXPECT_EQ(error.argument(), "k_scale") << error.what();
            }
            continue;
        }
        for_each_schedule(kernel(), step, [&](const Result& result) {
            expect_lse(result, 0, 3.0 * Step::mark);
            ASSERT_EQ(result.out(0, 1, 2), 3.0F * Step::mark) << to_string(result.schedule);
        });
    }
}

// Two sources of flat fp8, each with its own factor on scores and values, however far apart these are: 0 (as only a
// pointer may give it), subnormal and very large ones among them.
TEST_P(K10_ScaleSemantics, EachSourceHasItsKScale) {
    if (!layout().bytes().takes_k_scale) GTEST_SKIP() << "the record carries its own scales";
    Step step({.rows = 1, .heads = 1, .sources = {{.layout = layout()}, {.layout = layout(), .count_offset = 64}}});
    const int last = d_qk(step.problem) - 1;
    step.query([&](int d) { return d == last ? 1.0F : 0.0F; });
    for (const std::size_t source : {0, 1}) {
        step.record(
            0, [&](int d) { return d == last || d == static_cast<int>(source) ? 2.0F : 0.0F; }, source);
        step.list(0, {0}, source);
    }
    constexpr float pairs[][2] = {{0.5F, 1e-3F},    {0.5F, 0.0F},        {0.0F, 0.0F},          {1.0F, 1e-39F},
                                  {1e-39F, 1e-39F}, {1.0F, 0x1p-70F},    {0x1p-50F, 0x1p-100F}, {1.0F, 0x1p-90F},
                                  {1.0F, 0x1p120F}, {0x1p100F, 0x1p110F}};
    for (const auto& pair : pairs)
        for (const std::size_t first : {0, 1}) {
            const float scales[] = {pair[first], pair[1 - first]};
            for (const std::size_t source : {0, 1})
                step.args.sources[source].k_scale =
                    scales[source] == 0 ? Scale{.pointer = &scales[source]} : Scale{.value = scales[source]};
            const double max = 2.0 * std::max(scales[0], scales[1]);
            const double weights[] = {std::exp(2.0 * scales[0] - max), std::exp(2.0 * scales[1] - max)};
            const double sum = weights[0] + weights[1];
            for_each_schedule(kernel(), step, [&](const Result& result) {
                const std::string what = to_string(result.schedule) + " with " + testing::PrintToString(scales);
                const double lse = max + std::log(sum);
                ASSERT_NEAR(result.lse(0, 0), lse, 1e-5 + 1e-6 * lse) << what;
                // A scale that is 2^80 times smaller than the other may count as 0.
                const double tiny = 0x1p-79 * max + 0x1p-126;
                for (const int d : {0, 1}) {
                    const double wanted = 2.0 * scales[d] * weights[d] / sum;
                    const double tolerance = result.schedule.p_format == PFormat::e4m3 ? 0x1p-4 : 0x1p-7;
                    ASSERT_NEAR(result.out(0, 0, d), wanted, wanted * tolerance + tiny) << what << ", dimension " << d;
                }
            });
        }
}

INSTANTIATE_TEST_SUITE_P(All, K10_ScaleSemantics, testing::ValuesIn(kernels_and_layouts()), test_name);

}  // namespace
}  // namespace sparsemla::test
