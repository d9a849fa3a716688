// The arithmetic of merging partial results of one (row, head), for CPU and GPU alike: the same operations in the same
// order, each rounded once, so that both give the same bits. Only additions, multiplications and divisions of float32
// (of float64 in the lse), and no fused ones: exp2 and the logarithm are computed here for that reason.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "sparsemla/decode.h"

namespace sparsemla::detail {

/// Operations that a compiler does not fuse: this library is compiled without contraction. The GPU has its own
/// (cuda/device/rounded.cuh).
struct PlainOperations {
    template <class T>
    static constexpr T add(T a, T b) {
        return a + b;
    }
    template <class T>
    static constexpr T multiply(T a, T b) {
        return a * b;
    }
    template <class T>
    static constexpr T divide(T a, T b) {
        return a / b;
    }
};

/// What the lse of all partials say of one (row, head), in the partials' base.
struct MergeSummary {
    float peak = -std::numeric_limits<float>::infinity();  ///< the largest lse
    float sum = 0;                                         ///< of power(lse - peak)
    bool defined = true;                                   ///< no lse is NaN or +inf
    int contributors = 0;                                  ///< partials whose lse is not -inf
    int last = -1;                                         ///< the last of them
};

/// The softmax over all partials and the sink: a partial's weight is power(lse - top) / total.
struct MergeSoftmax {
    float top = 0;  ///< of the peak and the sink, so that no power overflows
    float total = 1;
};

template <class Operations>
struct MergeMath {
    static constexpr float infinity = std::numeric_limits<float>::infinity();
    static constexpr float log2_e = 1.44269504F;

    static constexpr float add(float a, float b) { return Operations::add(a, b); }
    static constexpr float multiply(float a, float b) { return Operations::multiply(a, b); }

    static constexpr float power_of_two(int n) {  // normal
        return std::bit_cast<float>(static_cast<std::uint32_t>(127 + n) << 23);
    }

    /// 2^x for x <= 0, within 2 ulp, exact where x is an integer; NaN of NaN.
    static constexpr float exp2(float x) {
        if (!(x > -151.0F)) return x == x ? 0.0F : x;
        constexpr float to_integer = 12582912.0F;  // 1.5 * 2^23: adding it rounds to the nearest integer
        const float rounded = add(x, to_integer);
        const int n = static_cast<int>(std::bit_cast<std::uint32_t>(rounded) & 0x7FFFFF) - 0x400000;
        const float f = add(x, -add(rounded, -to_integer));  // -0.5 .. 0.5
        // ln(2)^k / k!
        constexpr float factors[] = {1.52527338e-5F, 1.54035304e-4F, 1.33335581e-3F, 9.61812911e-3F,
                                     5.55041087e-2F, 2.40226507e-1F, 6.93147181e-1F, 1.0F};
        float sum = factors[0];
        for (int k = 1; k < 8; ++k) sum = add(multiply(sum, f), factors[k]);
        return n >= -126 ? multiply(sum, power_of_two(n)) : multiply(multiply(sum, power_of_two(n + 64)), 0x1p-64F);
    }

    /// log2(x) of a finite x >= 1, within 2^-23.
    static constexpr double log2(float x) {
        const auto bits = std::bit_cast<std::uint32_t>(x);
        int n = static_cast<int>(bits >> 23) - 127;
        float m = std::bit_cast<float>((bits & 0x7FFFFF) | 0x3F800000);
        if (m > 1.41421356F) {
            m = multiply(m, 0.5F);
            ++n;
        }
        // ln(m) = 2 (s + s^3 / 3 + s^5 / 5 ..), s = (m - 1) / (m + 1), s^2 < 0.0295
        const float s = Operations::divide(add(m, -1.0F), add(m, 1.0F));
        const float square = multiply(s, s);
        constexpr float factors[] = {1.0F / 9, 1.0F / 7, 1.0F / 5, 1.0F / 3, 1.0F};
        float sum = factors[0];
        for (int k = 1; k < 5; ++k) sum = add(multiply(sum, square), factors[k]);
        constexpr float twice_log2_e = 2.88539008F;
        return Operations::add(static_cast<double>(multiply(multiply(sum, s), twice_log2_e)), static_cast<double>(n));
    }

    static constexpr float power(LseBase base, float exponent) {
        return exp2(base == LseBase::two ? exponent : multiply(exponent, log2_e));
    }

    /// lse_of(i): of partial i, -inf where it contributes nothing.
    template <class LseOf>
    static constexpr MergeSummary summarise(int partials, LseBase base, const LseOf& lse_of) {
        MergeSummary summary;
        for (int i = 0; i < partials; ++i) {
            const float lse = lse_of(i);
            if (lse == -infinity) continue;
            summary.defined = summary.defined && lse < infinity;  // false for NaN
            summary.peak = summary.peak < lse ? lse : summary.peak;
            ++summary.contributors;
            summary.last = i;
        }
        if (!summary.defined) return summary;
        for (int i = 0; i < partials; ++i) {
            const float lse = lse_of(i);
            if (lse != -infinity) summary.sum = add(summary.sum, power(base, add(lse, -summary.peak)));
        }
        return summary;
    }

    static constexpr MergeSoftmax softmax(const MergeSummary& summary) { return {summary.peak, summary.sum}; }

    /// With a sink, of natural base whatever the partials' is.
    static constexpr MergeSoftmax softmax(const MergeSummary& summary, LseBase base, float sink) {
        if (base == LseBase::two) sink = multiply(sink, log2_e);
        // A NaN sink stays out of the top, and reaches the total.
        const float top = summary.peak < sink ? sink : summary.peak;
        const float sink_term = sink == top ? 1.0F : power(base, add(sink, -top));
        return {top, add(multiply(summary.sum, power(base, add(summary.peak, -top))), sink_term)};
    }

    static constexpr float weight(LseBase base, float lse, const MergeSoftmax& softmax) {
        return Operations::divide(power(base, add(lse, -softmax.top)), softmax.total);
    }

    /// One partial of weight 1: there is no sink, or one too small to matter. Its values pass as they are.
    static constexpr bool passes_through(const MergeSummary& summary, const MergeSoftmax& softmax) {
        return summary.contributors == 1 && softmax.total == 1.0F && softmax.top == summary.peak;
    }

    static constexpr float lse(const MergeSummary& summary, LseBase from, LseBase to) {
        if (!summary.defined) return std::numeric_limits<float>::quiet_NaN();
        if (summary.contributors == 0) return -infinity;
        if (summary.contributors == 1 && from == to) return summary.peak;
        constexpr double ln_2 = 0.69314718055994531, log2_of_e = 1.4426950408889634;
        const double of_sum = log2(summary.sum);
        const double peak = static_cast<double>(summary.peak);
        if (from == LseBase::two) {
            const double two = Operations::add(peak, of_sum);
            return static_cast<float>(to == LseBase::two ? two : Operations::multiply(two, ln_2));
        }
        const double natural = Operations::add(peak, Operations::multiply(of_sum, ln_2));
        return static_cast<float>(to == LseBase::two ? Operations::multiply(natural, log2_of_e) : natural);
    }
};

}  // namespace sparsemla::detail
