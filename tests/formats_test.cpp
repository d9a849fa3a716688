// Scalar formats against definitions written out here: every code decoded, every rounding decided by exhaustive search.
#include "sparsemla/formats.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "tests/brute_force.h"

namespace sparsemla {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

using test::magnitudes;
using test::nearest_code;

const std::vector<double>& e4m3 = test::e4m3_magnitudes;
const std::vector<double>& e2m1 = test::e2m1_magnitudes;
const std::vector<double> f16 = magnitudes(31 << 10, 5, 10, 15);
const std::vector<double> bf16 = magnitudes(255 << 7, 8, 7, 127);

/// The values at which an encoder may go wrong: all codes, all midpoints, and float32's neighbours of both.
std::vector<float> critical_inputs(const std::vector<double>& values) {
    std::vector<float> inputs;
    auto add = [&](double x) {
        const auto value = static_cast<float>(x);
        for (float y : {std::nextafter(value, -infinity), value, std::nextafter(value, infinity)}) {
            inputs.push_back(y);
            inputs.push_back(-y);
        }
    };
    for (std::size_t i = 0; i < values.size(); ++i) {
        add(values[i]);
        if (i + 1 < values.size()) add((values[i] + values[i + 1]) / 2);
    }
    return inputs;
}

std::vector<float> random_inputs(std::uint32_t seed, int n) {
    std::mt19937 random(seed);
    std::vector<float> inputs;
    while (static_cast<int>(inputs.size()) < n) {
        const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
        if (std::isfinite(x)) inputs.push_back(x);
        inputs.push_back(std::ldexp(static_cast<float>(random()) - 0x1p31F, -static_cast<int>(random() % 48)));
    }
    return inputs;
}

TEST(E4m3, DecodesAll256Codes) {
    for (int code = 0; code < 256; ++code) {
        const float value = e4m3_to_float(static_cast<std::uint8_t>(code));
        if ((code & 0x7F) == 0x7F) {
            EXPECT_TRUE(std::isnan(value)) << "code " << code;
            continue;
        }
        EXPECT_EQ(value, code < 128 ? e4m3[code] : -e4m3[code - 128]) << "code " << code;
        EXPECT_EQ(std::signbit(value), code >= 128) << "code " << code;
    }
    EXPECT_EQ(e4m3_to_float(0x01), 0x1p-9F);
    EXPECT_EQ(e4m3_to_float(0x08), 0x1p-6F);
    EXPECT_EQ(e4m3_to_float(0xB8), -1.0F);
    EXPECT_EQ(e4m3_to_float(0x7E), 448.0F);
}

TEST(E4m3, EncodesWhatItDecodes) {
    for (int code = 0; code < 256; ++code) {
        const bool is_nan = (code & 0x7F) == 0x7F;
        EXPECT_EQ(float_to_e4m3(e4m3_to_float(static_cast<std::uint8_t>(code))), is_nan ? 0x7F : code);
    }
}

TEST(E4m3, RoundsToTheNearestCode) {
    std::vector<float> inputs = critical_inputs(e4m3);
    for (float x : random_inputs(11, 40000)) inputs.push_back(x);
    for (float x : inputs)
        ASSERT_EQ(float_to_e4m3(x), nearest_code(e4m3, x) | (std::signbit(x) ? 0x80 : 0)) << std::hexfloat << x;
}

TEST(E4m3, SaturatesAndKeepsNanAndTheSignOfZero) {
    for (float x : {448.0F, 463.0F, 464.0F, 480.0F, 1e30F, std::numeric_limits<float>::max(), infinity}) {
        EXPECT_EQ(float_to_e4m3(x), 0x7E) << x;
        EXPECT_EQ(float_to_e4m3(-x), 0xFE) << x;
    }
    EXPECT_EQ(float_to_e4m3(nan_value), 0x7F);
    EXPECT_EQ(float_to_e4m3(-nan_value), 0x7F);
    EXPECT_EQ(float_to_e4m3(0.0F), 0x00);
    EXPECT_EQ(float_to_e4m3(-0.0F), 0x80);
    EXPECT_EQ(float_to_e4m3(std::numeric_limits<float>::denorm_min()), 0x00);
    EXPECT_EQ(float_to_e4m3(-std::numeric_limits<float>::denorm_min()), 0x80);
}

TEST(E2m1, DecodesAndEncodesAll16Codes) {
    EXPECT_EQ(e2m1, (std::vector<double>{0, .5, 1, 1.5, 2, 3, 4, 6}));
    for (int code = 0; code < 16; ++code) {
        const float value = e2m1_to_float(static_cast<std::uint8_t>(code));
        EXPECT_EQ(value, code < 8 ? e2m1[code] : -e2m1[code - 8]) << "code " << code;
        EXPECT_EQ(std::signbit(value), code >= 8) << "code " << code;
        EXPECT_EQ(float_to_e2m1(value), code);
    }
}

TEST(E2m1, RoundsToTheNearestCodeAndSaturates) {
    std::vector<float> inputs = critical_inputs(e2m1);
    for (float x : random_inputs(12, 40000)) inputs.push_back(x);
    for (float x : {6.5F, 7.0F, 8.0F, 1e30F, infinity, -infinity}) inputs.push_back(x);
    for (float x : inputs)
        ASSERT_EQ(float_to_e2m1(x), nearest_code(e2m1, x) | (std::signbit(x) ? 8 : 0)) << std::hexfloat << x;
}

TEST(Ue8m0, DecodesAll256CodesExactly) {
    for (int code = 0; code < 255; ++code)
        EXPECT_EQ(double{ue8m0_to_float(static_cast<std::uint8_t>(code))}, std::pow(2.0, code - 127)) << code;
    EXPECT_TRUE(std::isnan(ue8m0_to_float(255)));
    EXPECT_GT(ue8m0_to_float(0), 0.0F);
}

TEST(F16, DecodesAll65536Codes) {
    for (int code = 0; code < 65536; ++code) {
        const float value = f16_to_float(static_cast<std::uint16_t>(code));
        const int magnitude = code & 0x7FFF;
        if (magnitude > 0x7C00) {
            ASSERT_TRUE(std::isnan(value)) << code;
            continue;
        }
        const double expected = magnitude == 0x7C00 ? double{infinity} : f16[magnitude];
        ASSERT_EQ(std::fabs(value), expected) << code;
        ASSERT_EQ(std::signbit(value), code >= 0x8000) << code;
        ASSERT_EQ(round_to_f16(value), value) << code;
        ASSERT_EQ(std::signbit(round_to_f16(value)), code >= 0x8000) << code;
    }
}

/// Calls check(between, expected) for the points around the midpoint of every pair of neighbouring codes. Past the last
/// code the neighbour is what it would be with one more exponent, and encodes as infinity.
template <class Check>
void at_midpoints(const std::vector<double>& values, Check check) {
    for (std::size_t code = 0; code < values.size(); ++code) {
        const bool last = code + 1 == values.size();
        const double above = last ? 2 * values[code] - values[code - 1] : values[code + 1];
        check(code, (values[code] + above) / 2, values[code], last ? double{infinity} : above);
    }
}

TEST(F16, RoundsToNearestEven) {
    at_midpoints(f16, [](std::size_t code, double middle, double below, double above) {
        const auto x = static_cast<float>(middle);
        ASSERT_EQ(double{x}, middle);
        ASSERT_EQ(round_to_f16(x), code % 2 == 0 ? below : above) << middle;
        ASSERT_EQ(round_to_f16(std::nextafter(x, 0.0F)), below) << middle;
        ASSERT_EQ(round_to_f16(-std::nextafter(x, infinity)), -above) << middle;
    });
    EXPECT_EQ(round_to_f16(std::numeric_limits<float>::max()), infinity);
    EXPECT_EQ(round_to_f16(-infinity), -infinity);
    EXPECT_TRUE(std::isnan(round_to_f16(nan_value)));
}

TEST(Bf16, DecodesAndEncodesAll65536Codes) {
    for (int code = 0; code < 65536; ++code) {
        const auto bits = static_cast<std::uint16_t>(code);
        const float value = bf16_to_float(bits);
        const int magnitude = code & 0x7FFF;
        if (magnitude > 0x7F80) {
            ASSERT_TRUE(std::isnan(value)) << code;
            ASSERT_EQ(float_to_bf16(value), 0x7FFF) << code;
            ASSERT_EQ(double_to_bf16(value), 0x7FFF) << code;
            continue;
        }
        const double expected = magnitude == 0x7F80 ? double{infinity} : bf16[magnitude];
        ASSERT_EQ(std::fabs(value), expected) << code;
        ASSERT_EQ(std::signbit(value), code >= 0x8000) << code;
        ASSERT_EQ(float_to_bf16(value), bits);
        ASSERT_EQ(double_to_bf16(value), bits);
    }
}

TEST(Bf16, RoundsToNearestEvenInOneStep) {
    at_midpoints(bf16, [](std::size_t code, double middle, double, double) {
        const auto below = static_cast<std::uint16_t>(code);
        const auto above = static_cast<std::uint16_t>(code + 1);
        const std::uint16_t tie = code % 2 == 0 ? below : above;
        const auto x = static_cast<float>(middle);
        ASSERT_EQ(double{x}, middle);
        ASSERT_EQ(float_to_bf16(x), tie) << middle;
        ASSERT_EQ(float_to_bf16(std::nextafter(x, 0.0F)), below) << middle;
        ASSERT_EQ(float_to_bf16(-std::nextafter(x, infinity)), above | 0x8000) << middle;
        // A float64 just off the midpoint rounds to it in float32; its own side must win all the same.
        ASSERT_EQ(double_to_bf16(middle), tie) << middle;
        for (double nudge : {0x1p-52, 0x1p-40, 0x1p-25}) {
            ASSERT_EQ(double_to_bf16(middle * (1 - nudge)), below) << middle << " * (1 - " << nudge << ")";
            ASSERT_EQ(double_to_bf16(-middle * (1 + nudge)), above | 0x8000) << middle << " * (1 + " << nudge << ")";
        }
    });
}

TEST(Bf16, RoundsFloat64BeyondFloat32) {
    EXPECT_EQ(double_to_bf16(1e300), 0x7F80);
    EXPECT_EQ(double_to_bf16(-1e300), 0xFF80);
    EXPECT_EQ(double_to_bf16(1e-300), 0x0000);
    EXPECT_EQ(double_to_bf16(-1e-300), 0x8000);
    EXPECT_EQ(double_to_bf16(0x1p-134), 0x0000) << "half the smallest code is a tie, to even";
    EXPECT_EQ(double_to_bf16(0x1p-134 * (1 + 0x1p-52)), 0x0001);
    EXPECT_EQ(double_to_bf16(0.0), 0x0000);
    EXPECT_EQ(double_to_bf16(-0.0), 0x8000);
    EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7F80);
}

}  // namespace
}  // namespace sparsemla
