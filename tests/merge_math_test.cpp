// The arithmetic that CPU and GPU share for merging (src/merge_math.h): exp2 and log2 against the standard library's
// float64, within the bounds that stand at them. The whole merge against a float64 model is merge_test's.
#include "merge_math.h"

#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <limits>
#include <random>
#include <string>

namespace sparsemla::test {
namespace {

using Math = detail::MergeMath<detail::PlainOperations>;

constexpr float infinity = std::numeric_limits<float>::infinity();

/// A unit in the last place of the FP32 numbers around a value.
double ulp_of(double value) {
    const int exponent = std::max(std::ilogb(value), -126);
    return std::ldexp(1.0, exponent - 23);
}

TEST(MergeMath, Exp2IsWithinTwoUlp) {
    double worst = 0;
    float worst_at = 0;
    std::mt19937 random(1);
    std::uniform_real_distribution<float> everywhere(-151.0F, 0.0F), small(-1.0F, 0.0F);
    for (int i = 0; i < 1'000'000; ++i) {
        const float x = i % 2 == 0 ? everywhere(random) : small(random) * std::ldexp(1.0F, -(i % 29));
        const double exact = std::exp2(static_cast<double>(x));
        const double ulps = std::fabs(static_cast<double>(Math::exp2(x)) - exact) / ulp_of(exact);
        if (ulps > worst) {
            worst = ulps;
            worst_at = x;
        }
    }
    EXPECT_LE(worst, 2) << "at " << worst_at;
}

// Around the halves, where the nearest integer changes, and around integers.
TEST(MergeMath, Exp2AroundHalvesAndIntegers) {
    for (int n = 0; n <= 302; ++n) {
        float below = -0.5F * static_cast<float>(n), above = below;
        for (int step = 0; step < 20; ++step) {
            for (const float x : {below, above}) {
                if (x > 0) continue;
                const double exact = std::exp2(static_cast<double>(x));
                ASSERT_LE(std::fabs(static_cast<double>(Math::exp2(x)) - exact), 2 * ulp_of(exact)) << x;
            }
            below = std::nextafter(below, -infinity);
            above = std::nextafter(above, infinity);
        }
    }
}

TEST(MergeMath, Exp2IsExactAtIntegers) {
    for (int n = 0; n <= 150; ++n)
        EXPECT_EQ(Math::exp2(static_cast<float>(-n)), n == 150 ? 0.0F : std::ldexp(1.0F, -n)) << -n;
}

TEST(MergeMath, Exp2OutsideItsRange) {
    EXPECT_EQ(Math::exp2(-0.0F), 1.0F);
    for (float x : {-151.0F, -151.5F, -1e6F, -FLT_MAX, -infinity}) {
        EXPECT_EQ(Math::exp2(x), 0.0F) << x;
        EXPECT_FALSE(std::signbit(Math::exp2(x))) << x;
    }
    EXPECT_TRUE(std::isnan(Math::exp2(std::numeric_limits<float>::quiet_NaN())));
    for (float x : {-FLT_TRUE_MIN, -FLT_MIN, -1e-20F}) EXPECT_EQ(Math::exp2(x), 1.0F) << x;
}

// A larger exponent gives a weight that is no smaller, but for the bound: never by more than two units.
TEST(MergeMath, Exp2IsNearlyMonotone) {
    std::mt19937 random(2);
    std::uniform_real_distribution<float> everywhere(-151.0F, 0.0F);
    for (int i = 0; i < 200'000; ++i) {
        const float x = everywhere(random), next = std::nextafter(x, -infinity);
        const float larger = Math::exp2(x), smaller = Math::exp2(next);
        ASSERT_GE(larger, smaller - 2 * static_cast<float>(ulp_of(larger == 0 ? FLT_TRUE_MIN : larger))) << x;
        ASSERT_LE(larger, 1.0F) << x;
    }
    float previous = 0;
    for (float x = -151; x <= 0; x += 0x1p-10F) {
        ASSERT_GE(Math::exp2(x), previous) << x;
        previous = Math::exp2(x);
    }
}

TEST(MergeMath, Exp2OfSubnormalResultsIsWithinOneStep) {
    for (float x = -150; x <= -126; x += 0x1p-9F) {
        const double exact = std::exp2(static_cast<double>(x));
        ASSERT_LE(std::fabs(static_cast<double>(Math::exp2(x)) - exact), static_cast<double>(FLT_TRUE_MIN)) << x;
    }
}

void expect_log2(float x) {
    const double exact = std::log2(static_cast<double>(x));
    ASSERT_LE(std::fabs(Math::log2(x) - exact), 0x1p-23) << x;
}

// Every mantissa, and sums of up to 32 partials.
TEST(MergeMath, Log2IsWithinItsBound) {
    for (float x = 1; x < 2; x = std::nextafter(x, infinity)) expect_log2(x);
    std::mt19937_64 random(3);
    std::uniform_real_distribution<float> sums(1.0F, 32.0F);
    for (int i = 0; i < 300'000; ++i) expect_log2(sums(random));
}

TEST(MergeMath, Log2AroundPowersOfTwoAndTheirRoots) {
    for (int n = 0; n <= 5; ++n) {
        EXPECT_EQ(Math::log2(std::ldexp(1.0F, n)), n);
        for (const float mantissa : {1.0F, std::sqrt(2.0F)}) {
            float below = std::ldexp(mantissa, n), above = below;
            for (int step = 0; step < 20; ++step) {
                if (below >= 1) expect_log2(below);
                expect_log2(above);
                below = std::nextafter(below, 0.0F);
                above = std::nextafter(above, infinity);
            }
        }
    }
}

// Near 1, where an lse is that of its largest partial and a little: the little is kept.
TEST(MergeMath, Log2NearOneKeepsItsDigits) {
    for (int n = 1; n <= 23; ++n) {
        const float x = 1 + std::ldexp(1.0F, -n);
        EXPECT_NEAR(Math::log2(x) / std::log2(static_cast<double>(x)), 1.0, 0x1p-21) << n;
    }
}

// Compile-time evaluation is the same code: what a test of the GPU may compare with.
static_assert(Math::exp2(-3.0F) == 0.125F);
static_assert(Math::log2(8.0) == 3.0);

}  // namespace
}  // namespace sparsemla::test
