// Phases of a record: prefetch those to come, decode its group scales, then its runs of values, vector by vector.
#include "cpu/dequantise.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "sparsemla/formats.h"

#include "cpu/decode_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/dequantise.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sparsemla::detail::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// The widest vector used: every run and every group of a record is a multiple of it.
using Floats = hn::CappedTag<float, 16>;

/// The bits of a code, moved to the fields of an f16, are an f16 of the code's value divided by this: the difference of
/// the formats' exponent biases. Subnormal codes become subnormal f16.
constexpr float e4m3_factor = 0x1p8F;
constexpr float e2m1_factor = 0x1p14F;

/// Without an instruction for it, a vector library may convert f16's NaN as if it were a number of 2^16 or more.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
constexpr bool f16_nan_survives = true;
#else
constexpr bool f16_nan_survives = false;
#endif

/// One code a lane to its value / e4m3_factor. Exact, NaN included.
template <class D>
HWY_INLINE hn::Vec<D> load_e4m3(D d, const std::byte* bytes) {
    const hn::Rebind<std::int8_t, D> d8;
    const hn::Rebind<std::int16_t, D> d16;
    const hn::Rebind<hwy::float16_t, D> d_half;
    const auto codes = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const std::int8_t*>(bytes)));
    // Sign extension puts the sign into bit 8 too, which the shift moves to bit 15.
    const auto moved = hn::And(hn::ShiftLeft<7>(codes), hn::Set(d16, static_cast<std::int16_t>(0xBF80)));
    // One more than the largest magnitude carries into the top exponent bit: the NaN code becomes f16's NaN.
    const auto carried = hn::Add(moved, hn::Set(d16, std::int16_t{0x0080}));
    const auto half = hn::OrAnd(moved, carried, hn::Set(d16, std::int16_t{0x4000}));
    const auto value = hn::PromoteTo(d, hn::BitCast(d_half, half));
    if constexpr (f16_nan_survives) return value;
    return hn::IfThenElse(hn::Ge(hn::Abs(value), hn::Set(d, 0x1p16F)), hn::NaN(d), value);
}

/// Two codes a byte, the even dimension in the low nibble, to their values / e2m1_factor. Exact. At least two lanes.
template <class D>
HWY_INLINE hn::Vec<D> load_e2m1(D d, const std::byte* bytes) {
    const hn::Rebind<std::uint16_t, D> d16;
    const hn::Repartition<std::uint32_t, decltype(d16)> d32;
    const hn::Rebind<std::uint8_t, decltype(d32)> d8;
    const hn::Rebind<hwy::float16_t, D> d_half;
    const auto pairs = hn::PromoteTo(d32, hn::LoadU(d8, reinterpret_cast<const std::uint8_t*>(bytes)));
    const auto codes = hn::BitCast(d16, hn::Or(pairs, hn::ShiftLeft<12>(pairs)));  // in the low four bits of each
    const auto magnitude = hn::And(hn::ShiftLeft<9>(codes), hn::Set(d16, std::uint16_t{0x0E00}));
    const auto half = hn::OrAnd(magnitude, hn::ShiftLeft<12>(codes), hn::Set(d16, std::uint16_t{0x8000}));
    return hn::PromoteTo(d, hn::BitCast(d_half, half));
}

template <class D>
HWY_INLINE hn::Vec<D> load_bf16(D d, const std::byte* bytes) {
    const hn::Rebind<std::uint16_t, D> d16;
    const hn::RebindToUnsigned<D> du;
    const auto codes = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(bytes));
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, codes)));
}

/// `count` values times `scale`, rounded once: the factor's power of two joins the scale, or where that would overflow
/// the value, and is exact in both.
HWY_INLINE void dequantise_e4m3(const std::byte* bytes, int count, float scale, float* values) {
    const Floats d;
    const int lanes = static_cast<int>(hn::Lanes(d));
    if (std::fabs(scale) < 0x1p119F) {
        const auto factor = hn::Set(d, scale * e4m3_factor);
        for (int i = 0; i < count; i += lanes) hn::StoreU(hn::Mul(load_e4m3(d, bytes + i), factor), d, values + i);
    } else {
        for (int i = 0; i < count; i += lanes) {
            const auto exact = hn::Mul(load_e4m3(d, bytes + i), hn::Set(d, e4m3_factor));
            hn::StoreU(hn::Mul(exact, hn::Set(d, scale)), d, values + i);
        }
    }
}

HWY_INLINE void dequantise_bf16(const std::byte* bytes, int count, float* values) {
    const Floats d;
    const int lanes = static_cast<int>(hn::Lanes(d));
    for (int i = 0; i < count; i += lanes) hn::StoreU(load_bf16(d, bytes + 2 * i), d, values + i);
}

/// Scales of e2m1 are e4m3, which leaves room for the factor.
HWY_INLINE void dequantise_e2m1(const std::byte* bytes, int count, float scale, float* values) {
    const Floats d;
    if constexpr (hn::MaxLanes(d) > 1) {
        const auto factor = hn::Set(d, scale * e2m1_factor);
        const int lanes = static_cast<int>(hn::Lanes(d));
        for (int i = 0; i < count; i += lanes) hn::StoreU(hn::Mul(load_e2m1(d, bytes + i / 2), factor), d, values + i);
    } else {
        for (int i = 0; i < count; ++i)
            values[i] = scale * e2m1_to_float(static_cast<std::uint8_t>(bytes[i / 2]) >> (i % 2 * 4) & 15);
    }
}

HWY_INLINE void dequantise_run(ValueEncoding encoding, const std::byte* bytes, int count, float scale, float* values) {
    switch (encoding) {
        case ValueEncoding::bf16: dequantise_bf16(bytes, count, values); break;
        case ValueEncoding::e4m3: dequantise_e4m3(bytes, count, scale, values); break;
        case ValueEncoding::e2m1: dequantise_e2m1(bytes, count, scale, values); break;
    }
}

/// The most groups that a record has.
constexpr int max_groups = [] {
    int most = 1;
    for (const RecordLayout& layout : record_layouts) most = std::max(most, layout.groups());
    return most;
}();

HWY_INLINE float decode_ue8m0(std::uint8_t code) {
    if (code == 0) return 0x1p-127F;
    return std::bit_cast<float>(code == 0xFF ? 0x7FC00000U : static_cast<std::uint32_t>(code) << 23);
}

/// The scales of a record in the order of its groups, exact.
HWY_INLINE void load_scales(const RecordLayout& layout, const std::byte* bytes, float* scales) {
    const int groups = layout.groups();
    if (layout.scale_encoding == ScaleEncoding::f32) {
        std::memcpy(scales, bytes, static_cast<std::size_t>(groups) * sizeof(float));
    } else if (layout.scale_encoding == ScaleEncoding::ue8m0) {
        for (int g = 0; g < groups; ++g)
            scales[g] = decode_ue8m0(static_cast<std::uint8_t>(bytes[layout.scale_index(g)]));
    } else {
        float stored[max_groups];
        dequantise_e4m3(bytes, groups, 1.0F, stored);
        for (int g = 0; g < groups; ++g) scales[g] = stored[layout.scale_index(g)];
    }
}

HWY_INLINE void dequantise_record(const RecordLayout& layout, const RecordPointers& record, float* values) {
    const RecordRun& main = layout.main;
    if (layout.scale_encoding == ScaleEncoding::none) {
        dequantise_run(main.encoding, record.data, main.dims, 1.0F, values);
    } else {
        float scales[max_groups];
        load_scales(layout, record.scales, scales);
        const int group_bytes = main.bytes() / layout.groups();
        for (int g = 0; g < layout.groups(); ++g)
            dequantise_run(main.encoding, record.data + g * group_bytes, layout.group_dims, scales[g],
                           values + g * layout.group_dims);
    }
    dequantise_run(layout.rope.encoding, record.rope, layout.rope.dims, 1.0F, values + layout.rope.first_dim);
}

HWY_INLINE void prefetch_bytes(const std::byte* bytes, int count) {
    constexpr int line_bytes = 64;
    for (int i = 0; i < count; i += line_bytes) hwy::Prefetch(bytes + i);
}

void records(const CacheView& cache, const std::int64_t* slots, int n, float* tile, std::int64_t tile_stride) {
    // Records lie at random addresses, where no hardware prefetcher follows: at about 100 cycles a record, eight ahead
    // cover a memory access.
    constexpr int ahead = 8;
    const RecordLayout& layout = cache.layout();
    for (int i = -ahead; i < n; ++i) {
        if (i + ahead < n) {
            const RecordPointers next = locate(cache, slots[i + ahead]);
            prefetch_bytes(next.data, layout.main.bytes());
            if (layout.rope.dims != 0) prefetch_bytes(next.rope, layout.rope.bytes());
            if (next.scales != nullptr) hwy::Prefetch(next.scales);
        }
        if (i >= 0) dequantise_record(layout, locate(cache, slots[i]), tile + i * tile_stride);
    }
}

void values(ValueEncoding encoding, const std::byte* bytes, int count, float* out) {
    dequantise_run(encoding, bytes, count, 1.0F, out);
}

}  // namespace sparsemla::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sparsemla::detail {

HWY_EXPORT(records);
HWY_EXPORT(values);

void dequantise_records(const CacheView& cache, const std::int64_t* slots, int n, float* tile,
                        std::int64_t tile_stride) {
    HWY_DYNAMIC_DISPATCH(records)(cache, slots, n, tile, tile_stride);
}

void dequantise_values(ValueEncoding encoding, const std::byte* bytes, int count, float* out) {
    HWY_DYNAMIC_DISPATCH(values)(encoding, bytes, count, out);
}

}  // namespace sparsemla::detail
#endif  // HWY_ONCE
