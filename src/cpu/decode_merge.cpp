// From the splits of a row to its output: weights of the splits, the sink, one rounding of each value, and the lse.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/decode_steps.h"

#include "cpu/decode_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/decode_merge.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/decode_math-inl.h"
#include "hwy/highway.h"

#ifndef SPARSEMLA_CPU_DECODE_MERGE_ONCE
#define SPARSEMLA_CPU_DECODE_MERGE_ONCE
namespace sparsemla::detail {

/// The splits of one head that have keys, in order.
struct HeadPartials {
    int count = 0;
    const float* sums[max_splits];  ///< [count] -> [value_dims]
    float max[max_splits];
    float sum[max_splits];
    float weight[max_splits];  ///< 2^(max - largest max)
};

}  // namespace sparsemla::detail
#endif

HWY_BEFORE_NAMESPACE();
namespace sparsemla::detail::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Dims = hn::CappedTag<float, 16>;

/// Nearest even; NaN becomes the canonical 0x7FFF.
HWY_INLINE void store_bf16(hn::Vec<Dims> x, std::uint16_t* out) {
    const hn::RebindToUnsigned<Dims> du;
    const hn::RebindToSigned<Dims> di;
    const hn::Rebind<std::uint16_t, Dims> d16;
    const auto bits = hn::BitCast(du, x);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1U));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFU))));
    const auto canonical = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), hn::Set(du, 0x7FFFU), rounded);
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, canonical)), d16, out);
}

/// factor * sum over the splits of weight * sums.
void merge(const HeadPartials& head, float factor, DType out_dtype, void* out) {
    const Dims d;
    const int lanes = static_cast<int>(hn::Lanes(d));
    for (int dim = 0; dim < value_dims; dim += lanes) {
        auto total = hn::Mul(hn::Load(d, head.sums[0] + dim), hn::Set(d, head.weight[0]));
        for (int i = 1; i < head.count; ++i)
            total = hn::MulAdd(hn::Load(d, head.sums[i] + dim), hn::Set(d, head.weight[i]), total);
        total = hn::Mul(total, hn::Set(d, factor));
        if (out_dtype == DType::bf16)
            store_bf16(total, static_cast<std::uint16_t*>(out) + dim);
        else
            hn::StoreU(total, d, static_cast<float*>(out) + dim);
    }
}

/// The largest of the splits' maxima, and every split's weight relative to it.
float weigh(HeadPartials& head) {
    const hn::CappedTag<float, 1> d;
    float largest = head.max[0];
    for (int i = 1; i < head.count; ++i) largest = std::max(largest, head.max[i]);
    for (int i = 0; i < head.count; ++i)
        hn::StoreU(exp2_nonpositive(d, hn::Set(d, head.max[i] - largest)), d, head.weight + i);
    return largest;
}

}  // namespace sparsemla::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sparsemla::detail {

HWY_EXPORT(merge);
HWY_EXPORT(weigh);

namespace {

constexpr double log2_e = 1.4426950408889634;
constexpr double ln_2 = 0.6931471805599453;

HeadPartials partials_of(const MergeRowArgs& args, std::int64_t head) {
    HeadPartials partials;
    for (int i = 0; i < args.num_splits; ++i) {
        const SplitPartial& split = args.splits[i];
        if (split.num_keys == 0) continue;
        partials.sums[partials.count] = split.sums + head * value_dims;
        partials.max[partials.count] = split.max[head];
        partials.sum[partials.count] = split.sum[head];
        ++partials.count;
    }
    return partials;
}

/// 1 / (l + 2^(sink - m)), both in base 2. The larger of m and sink is the reference, so that neither power overflows:
/// a sink of +inf gives 0, one of -inf nothing, NaN gives NaN.
double reciprocal_of_denominator(double m_log2, double l, double sink_log2) {
    if (sink_log2 > m_log2) {
        const double weight = std::exp2(m_log2 - sink_log2);
        return weight / (l * weight + 1.0);
    }
    return 1.0 / (l + std::exp2(sink_log2 - m_log2));
}

void write_lse(const DecodeParams& params, std::int64_t row, std::int64_t head, double lse_log2) {
    if (params.lse == nullptr) return;
    params.lse[row * params.lse_row_stride + head * params.lse_head_stride] =
        static_cast<float>(params.lse_base == LseBase::two ? lse_log2 : lse_log2 * ln_2);
}

void* out_of(const DecodeParams& params, std::int64_t row, std::int64_t head) {
    return static_cast<std::byte*>(params.out) +
           (row * params.out_row_stride + head * params.out_head_stride) * size_bytes(params.out_dtype);
}

}  // namespace

void merge_row(const MergeRowArgs& args) {
    const DecodeParams& params = *args.params;
    for (std::int64_t head = args.first_head; head < args.end_head; ++head) {
        HeadPartials partials = partials_of(args, head);
        void* out = out_of(params, args.row, head);
        if (partials.count == 0) {
            std::fill_n(static_cast<std::byte*>(out), value_dims * size_bytes(params.out_dtype), std::byte{0});
            write_lse(params, args.row, head, -std::numeric_limits<double>::infinity());
            continue;
        }
        const double m_log2 = HWY_DYNAMIC_DISPATCH(weigh)(partials);
        float l = 0;
        for (int i = 0; i < partials.count; ++i) l += partials.weight[i] * partials.sum[i];
        const double sink_log2 = params.sinks == nullptr ? -std::numeric_limits<double>::infinity()
                                                         : params.sinks[head * params.sinks_stride] * log2_e;
        const double reciprocal = reciprocal_of_denominator(m_log2, l, sink_log2);
        const auto factor = static_cast<float>(params.out_scale * args.value_scale * reciprocal);
        HWY_DYNAMIC_DISPATCH(merge)(partials, factor, params.out_dtype, out);
        write_lse(params, args.row, head, m_log2 + std::log2(static_cast<double>(l)));
    }
}

}  // namespace sparsemla::detail
#endif  // HWY_ONCE
