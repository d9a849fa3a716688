// What a cache writer chooses and stores, with the bits of the CPU's (sparsemla/formats.h, cpu/records_pack.cpp).
#pragma once

#include "cuda/device/convert.cuh"
#include "sparsemla/records.h"

namespace sparsemla::detail {

using namespace device;

__device__ inline std::uint8_t float_to_e4m3(float x) { return static_cast<std::uint8_t>(f32x2_to_e4m3x2(x, x)); }
__device__ inline std::uint16_t float_to_bf16(float x) { return static_cast<std::uint16_t>(f32x2_to_bf16x2(x, x)); }

__device__ inline float e4m3_to_float(std::uint8_t code) {
    const std::uint32_t halves = e4m3x4_to_f16(code).low;
    return __low2float(reinterpret_cast<const __half2&>(halves));
}
__device__ inline float ue8m0_to_float(std::uint8_t code) { return __uint_as_float(ue8m0_to_bf16_twice(code) << 16); }

/// Nearest even, saturating; NaN gives 0.
__device__ inline std::uint32_t float_to_e2m1(float x) {
    constexpr float midpoints[7] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
    const float magnitude = fabsf(x);
    std::uint32_t code = 0;
#pragma unroll
    for (int i = 0; i < 7; ++i) code += magnitude > midpoints[i] || (magnitude == midpoints[i] && i % 2 == 1) ? 1 : 0;
    return code | (signbit(x) ? 8 : 0);
}

__device__ inline float e2m1_to_float(std::uint32_t code) {
    const std::uint32_t magnitude = code & 7;
    // From 2 on the exponent, which is a half more than the code's: .5 and the rest are 2^(e - 1) * (1 + m / 2).
    const float value =
        magnitude < 2 ? 0.5F * magnitude : __uint_as_float((126 + (magnitude >> 1)) << 23 | (magnitude & 1) << 22);
    return (code & 8) != 0 ? -value : value;
}

/// ceil(log2(x)) of a positive finite x.
__device__ inline int ceil_log2(float x) {
    const std::uint32_t bits = __float_as_uint(x), mantissa = bits & 0x7FFFFF;
    const int field = static_cast<int>(bits >> 23);
    if (field != 0) return field - 127 + (mantissa != 0 ? 1 : 0);
    return 31 - __clz(mantissa) - 149 + ((mantissa & (mantissa - 1)) != 0 ? 1 : 0);
}

struct GroupScale {
    float value;
    std::uint32_t code;
};

/// Of a group whose largest finite magnitude is amax. The rule is a constant of the record.
template <ScaleRule kRule>
__device__ GroupScale choose_scale(float amax, bool rounds_up) {
    constexpr float smallest_pow2_source = 1e-4F, smallest_f32 = 0x1p-126F, e4m3_largest = 448.0F, e2m1_largest = 6.0F;
    const auto pow2 = [](int exponent) {
        const auto code = static_cast<std::uint8_t>(exponent + 127);
        return GroupScale{ue8m0_to_float(code), code};
    };
    const float exact = __fdiv_rn(amax, e4m3_largest);
    if constexpr (kRule == ScaleRule::amax_f32) {
        const float scale =
            rounds_up ? power_of_two(127 + ceil_log2(fmaxf(exact, smallest_pow2_source))) : fmaxf(exact, smallest_f32);
        return {scale, __float_as_uint(scale)};
    } else if constexpr (kRule == ScaleRule::amax_pow2_1e4) {
        return pow2(ceil_log2(fmaxf(exact, smallest_pow2_source)));
    } else if constexpr (kRule == ScaleRule::amax_pow2) {
        return pow2(exact == 0 ? -127 : max(-127, min(127, ceil_log2(exact))));
    } else {
        static_assert(kRule == ScaleRule::amax_e4m3 || kRule == ScaleRule::amax_e4m3_up);
        const float wanted = fminf(fmaxf(__fdiv_rn(amax, e2m1_largest), 0x1p-9F), e4m3_largest);
        std::uint8_t code = float_to_e4m3(wanted);
        if (kRule == ScaleRule::amax_e4m3_up && e4m3_to_float(code) < wanted) ++code;
        return {e4m3_to_float(code), code};
    }
}

}  // namespace sparsemla::detail
