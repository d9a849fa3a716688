// Vector arithmetic of the softmax: powers of two and the rounding of weights to the formats of P. Per SIMD target.
#if defined(SPARSEMLA_CPU_DECODE_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARSEMLA_CPU_DECODE_MATH_INL_H_
#undef SPARSEMLA_CPU_DECODE_MATH_INL_H_
#else
#define SPARSEMLA_CPU_DECODE_MATH_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "sparsemla/decode.h"

HWY_BEFORE_NAMESPACE();
namespace sparsemla::detail::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// 2^x for x <= 0 with relative error below 2^-23, exact at integers. Below 2^-126 (so at -inf too) 0; NaN gives NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp2_nonpositive(D d, V x) {
    const hn::Rebind<std::int32_t, D> di;
    const V lowest = hn::Set(d, -126.0F);
    const V clamped = hn::Max(x, lowest);
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits; the shift moves them onto the exponent field and
    // drops the rest.
    const V magic = hn::Set(d, 0x1.8p23F);
    const V shifted = hn::Add(clamped, magic);
    const V f = hn::Sub(clamped, hn::Sub(shifted, magic));
    // 2^f = 1 + f * (...) on [-1/2, 1/2]: minimax of the relative error, 2^-28.9 before rounding.
    V p = hn::Set(d, 0x1.41fbbcp-13F);
    p = hn::MulAdd(p, f, hn::Set(d, 0x1.5f3e52p-10F));
    p = hn::MulAdd(p, f, hn::Set(d, 0x1.3b2d4cp-7F));
    p = hn::MulAdd(p, f, hn::Set(d, 0x1.c6aee8p-5F));
    p = hn::MulAdd(p, f, hn::Set(d, 0x1.ebfbdcp-3F));
    p = hn::MulAdd(p, f, hn::Set(d, 0x1.62e43p-1F));
    p = hn::MulAdd(p, f, hn::Set(d, 1.0F));
    const V power = hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
    return hn::IfThenElse(hn::IsNaN(x), x, hn::IfThenElseZero(hn::Ge(x, lowest), power));
}

/// x >= 0 rounded to nearest even with `kDropped` mantissa bits fewer than float32. NaN may change to anything.
template <int kDropped, class D, class V = hn::Vec<D>>
HWY_INLINE V round_mantissa(D d, V x) {
    const hn::Rebind<std::uint32_t, D> du;
    const auto bits = hn::BitCast(du, x);
    const auto odd = hn::And(hn::ShiftRight<kDropped>(bits), hn::Set(du, 1U));
    const auto half = hn::Set(du, (1U << (kDropped - 1)) - 1U);
    return hn::BitCast(d, hn::AndNot(hn::Set(du, (1U << kDropped) - 1U), hn::Add(bits, hn::Add(half, odd))));
}

/// x >= 0 rounded to nearest even to multiples of `step`, a power of two; for x < step * 2^22.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V round_to_multiple(D d, V x, float step) {
    const V magic = hn::Set(d, step * 0x1p23F);
    return hn::Sub(hn::Add(x, magic), magic);
}

/// x >= 0 as the P format would hold it: nearest even, its subnormals included, e4m3 saturating. f16 does not overflow
/// because a plan's p_scale is at most 32768. NaN stays NaN.
template <PFormat kFormat, class D, class V = hn::Vec<D>>
HWY_INLINE V round_weight(D d, V x) {
    V rounded = x;
    if constexpr (kFormat == PFormat::f16) {
        rounded = hn::IfThenElse(hn::Lt(x, hn::Set(d, 0x1p-14F)), round_to_multiple(d, x, 0x1p-24F),
                                 round_mantissa<13>(d, x));
    } else if constexpr (kFormat == PFormat::bf16) {
        rounded = round_mantissa<16>(d, x);
    } else if constexpr (kFormat == PFormat::e4m3) {
        rounded = hn::IfThenElse(hn::Lt(x, hn::Set(d, 0x1p-6F)), round_to_multiple(d, x, 0x1p-9F),
                                 hn::Min(round_mantissa<20>(d, x), hn::Set(d, 448.0F)));
    }
    return hn::IfThenElse(hn::IsNaN(x), x, rounded);
}

}  // namespace sparsemla::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
