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
