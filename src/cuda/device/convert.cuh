// Number formats: E4M3 to halves (exact), FP32 to E4M3, halves and BF16 (nearest even).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace sparsemla::device {

/// Four values as two pairs.
struct TwoPairs {
    std::uint32_t low, high;
};

// Four E4M3 bytes to FP16: every code, NaN too, has an FP16 of the same value.
__device__ inline TwoPairs e4m3x4_to_f16(std::uint32_t codes) {
    TwoPairs halves;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(halves.low), "=r"(halves.high)
        : "r"(codes));
    return halves;
}

// Nearest even, saturating at 448; x goes to the low byte. NaN becomes 0x7F.
__device__ inline std::uint16_t f32x2_to_e4m3x2(float x, float y) {
    std::uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(y), "f"(x));
    return codes;
}

__device__ inline std::uint32_t f32x2_to_f16x2(float x, float y) {
    std::uint32_t halves;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(y), "f"(x));
    return halves;
}

// NaN becomes 0x7FFF.
__device__ inline std::uint32_t f32x2_to_bf16x2(float x, float y) {
    std::uint32_t halves;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(y), "f"(x));
    return halves;
}

// FP16 to BF16, exact for what E4M3 holds.
__device__ inline std::uint32_t f16x2_to_bf16x2(std::uint32_t halves) {
    const float2 values = __half22float2(reinterpret_cast<const __half2&>(halves));
    return f32x2_to_bf16x2(values.x, values.y);
}

__device__ inline TwoPairs e4m3x4_to_bf16(std::uint32_t codes) {
    const TwoPairs halves = e4m3x4_to_f16(codes);
    return {f16x2_to_bf16x2(halves.low), f16x2_to_bf16x2(halves.high)};
}

// Products of two pairs, nearest even.
__device__ inline std::uint32_t multiply_f16x2(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
__device__ inline std::uint32_t multiply_bf16x2(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

/// 2^n as BF16, a normal number.
__device__ constexpr std::uint32_t bf16_of_power(int n) { return static_cast<std::uint32_t>(127 + n) << 7; }

/// Two BF16 of 2^120, what the biases of E4M3's and BF16's exponents differ by.
inline constexpr std::uint32_t e4m3_bf16_factor = 0x7B807B80;

/// Of pairs of magnitudes of E4M3 codes in places 4 .. 10 of a half, the largest ones so far.
struct LargestCodes {
    std::uint32_t pair = 0;
    __device__ bool has_nan() const { return (pair & 0x7F0) == 0x7F0 || (pair >> 16 & 0x7F0) == 0x7F0; }
};

// E4M3 to BF16, times `factor` / e4m3_bf16_factor, two equal numbers: by integers and one product a pair, as
// conversions are slow. NaN becomes 480, and `largest` tells.
__device__ inline TwoPairs finite_e4m3x4_to_bf16(std::uint32_t codes, std::uint32_t factor, LargestCodes& largest) {
    const auto pair = [&](std::uint32_t bytes) {  // each code the upper byte of a half
        const std::uint32_t magnitudes = bytes >> 4 & 0x07F007F0;
        largest.pair = __vmaxu2(largest.pair, magnitudes);
        return multiply_bf16x2(magnitudes | (bytes & 0x80008000), factor);
    };
    return {pair(__byte_perm(codes, 0, 0x1404)), pair(__byte_perm(codes, 0, 0x3424))};
}

// 2^(code - 127) as two equal BF16, exactly; 255 is NaN.
__device__ inline std::uint32_t ue8m0_to_bf16_twice(std::uint32_t code) {
    const std::uint32_t half = code == 0 ? 0x0040U : code == 255 ? 0x7FC0U : code << 7;
    return half * 0x10001U;
}

// Eight E2M1 codes, the first one lowest, as the E4M3 codes of the same values.
__device__ inline TwoPairs e2m1x8_to_e4m3(std::uint32_t codes) {
    // Codes 0 .. 7 are 0, .5, 1, 1.5 and 2, 3, 4, 6.
    constexpr std::uint32_t small = 0x3C383000, large = 0x4C484440;
    const auto four = [](std::uint32_t nibbles) {
        const std::uint32_t magnitudes = __byte_perm(small, large, nibbles & 0x7777);
        std::uint32_t signs = nibbles & 0x8888;  // of byte i at bit 4 i + 3, to be at 8 i + 7
        signs = (signs & 0x0088) | (signs & 0x8800) << 8;
        return magnitudes | (signs & 0x00080008) << 4 | (signs & 0x00800080) << 8;
    };
    return {four(codes), four(codes >> 16)};
}

// The larger of each pair's magnitudes; of a NaN the other one.
__device__ inline std::uint32_t largest_bf16x2(std::uint32_t a, std::uint32_t b) {
    std::uint32_t larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a & 0x7FFF7FFF), "r"(b & 0x7FFF7FFF));
    return larger;
}

// 2^(field - 127), for an exponent field of FP32 up to 254; subnormal from 0 down, and 0 below those.
__device__ inline float power_of_two(int field) {
    if (field <= 0) return field < -22 ? 0.0F : __int_as_float(1 << (22 + field));
    return __int_as_float(field << 23);
}

// P as E4M3, handed on as the FP16 of the same value.
__device__ inline std::uint32_t f32x2_to_e4m3_as_f16x2(float x, float y) {
    return e4m3x4_to_f16(f32x2_to_e4m3x2(x, y)).low;
}

// 2^x, flushing results below FP32's normal range; relative error 2^-22.
__device__ inline float exp2_approximate(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// 1 / x within one unit in the last place.
__device__ inline float reciprocal_approximate(float x) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
    return reciprocal;
}

// log2; absolute error 2^-22 around 1, relative 2^-22 elsewhere.
__device__ inline float log2_approximate(float x) {
    float logarithm;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(x));
    return logarithm;
}

// {b0, b1, b2, b3} to {b0, b2, b1, b3}: of two rows of two bytes, the two columns.
__device__ inline std::uint32_t transpose_byte_pairs(std::uint32_t word) { return __byte_perm(word, 0, 0x3120); }

}  // namespace sparsemla::device
