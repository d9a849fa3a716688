// Scalar number formats of caches, queries and weights: bf16, f16, e4m3, e2m1, ue8m0.
// Decoders are exact. Encoders round to nearest even; the 4- and 8-bit ones saturate and keep NaN.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace sparsemla {

namespace detail {

/// Nearest-even rounding of a positive finite x to a format with `mantissa_bits` and smallest normal exponent
/// `min_exponent`, of unbounded range above.
inline float round_to_step(float x, int mantissa_bits, int min_exponent) {
    int exponent = 0;
    std::frexp(x, &exponent);  // x = f * 2^exponent, f in [0.5, 1)
    const int step = std::max(exponent - 1, min_exponent) - mantissa_bits;
    return std::ldexp(std::nearbyint(std::ldexp(x, -step)), step);  // steps fit 24 bits: both ldexp are exact
}

}  // namespace detail

inline float bf16_to_float(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

/// Nearest even; every NaN becomes the canonical 0x7FFF, so that all-ones never occurs in data.
inline std::uint16_t float_to_bf16(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    if (x != x) return 0x7FFF;
    return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/// As float_to_bf16, from float64 in one rounding.
inline std::uint16_t double_to_bf16(double x) {
    if (x != x) return 0x7FFF;
    auto rounded = static_cast<float>(x);
    // Round to odd at float32, so that the second rounding sees the discarded bits.
    if (static_cast<double>(rounded) != x && std::isfinite(rounded)) {
        auto bits = std::bit_cast<std::uint32_t>(rounded);
        if (std::fabs(static_cast<double>(rounded)) > std::fabs(x)) --bits;
        rounded = std::bit_cast<float>(bits | 1U);
    }
    return float_to_bf16(rounded);
}

inline float f16_to_float(std::uint16_t bits) {
    const int exponent = (bits >> 10) & 31;
    const int mantissa = bits & 0x3FF;
    float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
    if (exponent == 31)
        value = mantissa == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
    return (bits & 0x8000) != 0 ? -value : value;
}

/// The float32 nearest to x among the f16 values (nearest even, overflow to infinity).
inline float round_to_f16(float x) {
    if (x == 0 || !std::isfinite(x)) return x;
    const float magnitude = detail::round_to_step(std::fabs(x), 10, -14);
    return std::copysign(magnitude > 65504.0F ? std::numeric_limits<float>::infinity() : magnitude, x);
}

/// OCP E4M3: bias 7, no infinity, 0x7F and 0xFF are NaN, largest 448.
constexpr float e4m3_max = 448.0F;

inline float e4m3_to_float(std::uint8_t code) {
    const int exponent = (code >> 3) & 15;
    const int mantissa = code & 7;
    float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(static_cast<float>(mantissa + 8), exponent - 10);
    if ((code & 0x7F) == 0x7F) value = std::numeric_limits<float>::quiet_NaN();
    return (code & 0x80) != 0 ? -value : value;
}

/// Nearest even, saturating at +-448 (infinity too); NaN gives 0x7F whatever its sign.
inline std::uint8_t float_to_e4m3(float x) {
    if (x != x) return 0x7F;
    const auto sign = static_cast<std::uint8_t>(std::signbit(x) ? 0x80 : 0);
    const float magnitude = std::fabs(x);
    if (magnitude >= e4m3_max) return sign | 0x7E;
    if (magnitude < 0x1p-6F) {  // subnormal codes count steps of 2^-9, which are float32's steps from 2^14 on
        constexpr float unit = 0x1p14F;
        const auto steps = std::bit_cast<std::uint32_t>(magnitude + unit) - std::bit_cast<std::uint32_t>(unit);
        return sign | static_cast<std::uint8_t>(steps);
    }
    auto bits = std::bit_cast<std::uint32_t>(magnitude);
    bits += 0x7FFFF + ((bits >> 20) & 1);  // 20 of float32's 23 mantissa bits go
    return sign | static_cast<std::uint8_t>((bits >> 20) - ((127 - 7) << 3));
}

/// E2M1: 0, .5, 1, 1.5, 2, 3, 4, 6 with the sign in bit 3.
constexpr float e2m1_max = 6.0F;

inline float e2m1_to_float(std::uint8_t code) {
    constexpr float values[8] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
    const float value = values[code & 7];
    return (code & 8) != 0 ? -value : value;
}

/// Nearest even, saturating at +-6. The format has no NaN: the caller marks NaN in the group's scale.
inline std::uint8_t float_to_e2m1(float x) {
    const auto sign = static_cast<std::uint8_t>(std::signbit(x) ? 8 : 0);
    // The midpoints between neighbours; a tie goes to the even code.
    constexpr float midpoints[7] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
    const float magnitude = std::fabs(x);
    std::uint8_t code = 0;
    while (code < 7 && (magnitude > midpoints[code] || (magnitude == midpoints[code] && (code & 1) != 0))) ++code;
    return sign | code;
}

/// UE8M0: 2^(code - 127), 255 = NaN. Code 0 is 2^-127, below float32's normal range and exact.
inline float ue8m0_to_float(std::uint8_t code) {
    return code == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0F, code - 127);
}

}  // namespace sparsemla
