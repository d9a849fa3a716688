// Softmax of a chunk: scores, their maximum, powers of two relative to the anchor, their sum, and their rounding to P.
// Everything is vertical: lanes are heads.
#include "cpu/decode_steps.h"

#include "cpu/decode_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/decode_weights.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/decode_math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sparsemla::detail::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Heads = hn::CappedTag<float, head_group>;
using HeadVector = hn::Vec<Heads>;

/// Dots to scores in place; returns the maximum over the keys, at least one.
HWY_INLINE HeadVector scale_scores(const WeightsArgs& args, float* column) {
    const Heads d;
    HeadVector max = hn::Zero(d);
    for (int key = 0; key < args.num_keys; ++key) {
        const float factor = args.score_factor[key < args.first_source_keys ? 0 : 1];
        const HeadVector score = hn::Mul(hn::Load(d, column + key * head_group), hn::Set(d, factor));
        hn::Store(score, d, column + key * head_group);
        max = key == 0 ? score : hn::Max(max, score);
    }
    return max;
}

/// Scores to weights in place; returns the sum of 2^(score - anchor).
template <PFormat kFormat>
HWY_INLINE HeadVector scores_to_weights(const WeightsArgs& args, float* column, HeadVector anchor) {
    const Heads d;
    const HeadVector p_scale = hn::Set(d, args.schedule->p_scale);
    HeadVector sum = hn::Zero(d);
    for (int key = 0; key < args.num_keys; ++key) {
        float* at = column + key * head_group;
        const HeadVector power = exp2_nonpositive(d, hn::Sub(hn::Load(d, at), anchor));
        sum = hn::Add(sum, power);
        const float factor = args.weight_factor[key < args.first_source_keys ? 0 : 1];
        hn::Store(hn::Mul(round_weight<kFormat>(d, hn::Mul(power, p_scale)), hn::Set(d, factor)), d, at);
    }
    return sum;
}

/// The heads of one vector: `column` is their dots at the first key, `head` the first of them.
template <PFormat kFormat>
HWY_INLINE void chunk_softmax(const WeightsArgs& args, float* column, int head) {
    const Heads d;
    const HeadVector chunk_max = scale_scores(args, column);
    HeadVector new_max = chunk_max;
    HeadVector keep = hn::Zero(d);
    if (!args.first_chunk) {
        const HeadVector old_max = hn::Load(d, args.max + head);
        new_max = hn::Max(old_max, chunk_max);
        keep = exp2_nonpositive(d, hn::Sub(old_max, new_max));
    }
    HeadVector anchor = new_max;
    HeadVector chunk_factor = hn::Set(d, 1.0F);
    if (args.schedule->anchor == Anchor::chunk_max) {
        anchor = chunk_max;
        chunk_factor = exp2_nonpositive(d, hn::Sub(chunk_max, new_max));
    } else if (args.schedule->anchor == Anchor::row_max) {
        new_max = anchor = hn::Load(d, args.row_max + head);
        keep = hn::Set(d, args.first_chunk ? 0.0F : 1.0F);
    }
    HeadVector sum = hn::Mul(scores_to_weights<kFormat>(args, column, anchor), chunk_factor);
    if (!args.first_chunk) sum = hn::MulAdd(hn::Load(d, args.sum + head), keep, sum);
    hn::Store(new_max, d, args.max + head);
    hn::Store(sum, d, args.sum + head);
    hn::Store(keep, d, args.keep_factor + head);
    hn::Store(chunk_factor, d, args.chunk_factor + head);
}

/// visit(column, first head) for every vector of heads that holds one.
template <class Visit>
HWY_INLINE void for_each_vector(const WeightsArgs& args, const Visit& visit) {
    const int lanes = static_cast<int>(hn::Lanes(Heads()));
    for (int head = 0; head < args.heads; head += lanes) {
        const std::int64_t group = head / head_group;
        visit(args.dots + group * args.key_capacity * head_group + head % head_group, head);
    }
}

template <PFormat kFormat>
HWY_INLINE void weights_as(const WeightsArgs& args) {
    for_each_vector(args, [&](float* column, int head) HWY_ATTR { chunk_softmax<kFormat>(args, column, head); });
}

void weights(const WeightsArgs& args) {
    switch (args.schedule->p_format) {
        case PFormat::e4m3: weights_as<PFormat::e4m3>(args); break;
        case PFormat::f16: weights_as<PFormat::f16>(args); break;
        case PFormat::bf16: weights_as<PFormat::bf16>(args); break;
        case PFormat::f64: break;  // refused by the plan
    }
}

void maxima(const WeightsArgs& args) {
    const Heads d;
    for_each_vector(args, [&](float* column, int head) HWY_ATTR {
        const HeadVector chunk_max = scale_scores(args, column);
        hn::Store(args.first_chunk ? chunk_max : hn::Max(hn::Load(d, args.max + head), chunk_max), d, args.max + head);
    });
}

}  // namespace sparsemla::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sparsemla::detail {

HWY_EXPORT(weights);
HWY_EXPORT(maxima);

void softmax_weights(const WeightsArgs& args) { HWY_DYNAMIC_DISPATCH(weights)(args); }
void score_maxima(const WeightsArgs& args) { HWY_DYNAMIC_DISPATCH(maxima)(args); }

}  // namespace sparsemla::detail
#endif  // HWY_ONCE
