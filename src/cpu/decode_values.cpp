// Weights times values. A register tile of heads x vectors of dimensions runs over the chunk's keys.
#include "cpu/decode_steps.h"

#include "cpu/decode_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/decode_values.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sparsemla::detail::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Dims = hn::CappedTag<float, 16>;
using DimVector = hn::Vec<Dims>;

constexpr int tile_heads = 4;
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3) || HWY_ARCH_ARM
constexpr int tile_vectors = 4;  // 16 accumulators of 32 registers
#else
constexpr int tile_vectors = 2;  // 8 accumulators of 16 registers
#endif

/// How a chunk's sums meet those before it. The modes differ in bits where factors are not 1: the order is the plan's.
enum class Join {
    first,         ///< there are none before: sums = w . v
    continue_run,  ///< sums = (sums * keep), then w . v added key by key
    scale_first,   ///< sums = chunk * (w . v)
    scale_chunk,   ///< sums = sums * keep + chunk * (w . v)
};

/// Heads [head, head + kHeads), which do not straddle two groups, times tile_vectors of dimensions from `dim` on.
template <Join kJoin, int kHeads>
HWY_INLINE void tile_values(const ValuesArgs& args, int head, int dim) {
    const Dims d;
    const int lanes = static_cast<int>(hn::Lanes(d));
    float* const out = args.sums + std::int64_t{head} * value_dims + dim;
    DimVector sums[kHeads][tile_vectors];
    for (int h = 0; h < kHeads; ++h)
        for (int v = 0; v < tile_vectors; ++v) {
            sums[h][v] = hn::Zero(d);
            if constexpr (kJoin == Join::continue_run)
                sums[h][v] =
                    hn::Mul(hn::Load(d, out + h * value_dims + v * lanes), hn::Set(d, args.keep_factor[head + h]));
        }
    const float* weights =
        args.weights + std::int64_t{head / head_group} * args.key_capacity * head_group + head % head_group;
    const float* values = args.values + dim;
    for (int key = 0; key < args.num_keys; ++key, weights += head_group, values += tile_stride) {
        DimVector value[tile_vectors];
        for (int v = 0; v < tile_vectors; ++v) value[v] = hn::Load(d, values + v * lanes);
        for (int h = 0; h < kHeads; ++h) {
            const DimVector weight = hn::Set(d, weights[h]);
            for (int v = 0; v < tile_vectors; ++v) sums[h][v] = hn::MulAdd(weight, value[v], sums[h][v]);
        }
    }
    for (int h = 0; h < kHeads; ++h)
        for (int v = 0; v < tile_vectors; ++v) {
            float* at = out + h * value_dims + v * lanes;
            if constexpr (kJoin == Join::scale_first || kJoin == Join::scale_chunk)
                sums[h][v] = hn::Mul(sums[h][v], hn::Set(d, args.chunk_factor[head + h]));
            if constexpr (kJoin == Join::scale_chunk)
                sums[h][v] = hn::MulAdd(hn::Load(d, at), hn::Set(d, args.keep_factor[head + h]), sums[h][v]);
            hn::Store(sums[h][v], d, at);
        }
}

template <Join kJoin>
HWY_INLINE void values_joining(const ValuesArgs& args) {
    const int step = tile_vectors * static_cast<int>(hn::Lanes(Dims()));
    for (int dim = 0; dim < value_dims; dim += step) {
        int head = 0;
        for (; head + tile_heads <= args.heads; head += tile_heads) tile_values<kJoin, tile_heads>(args, head, dim);
        for (; head < args.heads; ++head) tile_values<kJoin, 1>(args, head, dim);
    }
}

void values(const ValuesArgs& args) {
    const bool scaled = args.chunk_factor != nullptr;
    if (scaled && args.first_chunk)
        values_joining<Join::scale_first>(args);
    else if (scaled)
        values_joining<Join::scale_chunk>(args);
    else if (args.first_chunk)
        values_joining<Join::first>(args);
    else
        values_joining<Join::continue_run>(args);
}

}  // namespace sparsemla::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sparsemla::detail {

HWY_EXPORT(values);

void weighted_values(const ValuesArgs& args) { HWY_DYNAMIC_DISPATCH(values)(args); }

}  // namespace sparsemla::detail
#endif  // HWY_ONCE
