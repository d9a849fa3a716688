// Query transposition and q . k. A register tile of heads (lanes) x keys runs over 64 dimensions, then adds its partial
// sums to the dots in memory: the error of an FP32 sum grows with the length of the run.
#include <algorithm>

#include "cpu/decode_steps.h"
#include "cpu/dequantise.h"

#include "cpu/decode_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/decode_dots.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sparsemla::detail::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int block_dims = 64;
static_assert(std::all_of(record_layouts.begin(), record_layouts.end(),
                          [](const RecordLayout& layout) { return layout.d_qk() % block_dims == 0; }));

/// Where a register tile starts, in the arrays of DotsArgs.
struct Corner {
    const float* query;  ///< first vector's lanes at dimension 0
    const float* keys;   ///< first key
    float* dots;         ///< first vector's lanes at the first key
    std::int64_t query_vector_stride, dots_vector_stride;
};

/// kVectors of heads times kKeys keys, over dimensions [0, d_qk).
template <int kVectors, int kKeys, class D>
HWY_INLINE void tile_dots(D d, const Corner& corner, int d_qk) {
    using V = hn::Vec<D>;
    for (int block = 0; block < d_qk; block += block_dims) {
        V sums[kVectors][kKeys];
        for (auto& row : sums)
            for (V& sum : row) sum = hn::Zero(d);
        const float* query = corner.query + static_cast<std::int64_t>(block) * head_group;
        const float* keys = corner.keys + block;
        for (int dim = 0; dim < block_dims; ++dim, query += head_group, ++keys) {
            V q[kVectors];
            for (int v = 0; v < kVectors; ++v) q[v] = hn::LoadU(d, query + v * corner.query_vector_stride);
            for (int key = 0; key < kKeys; ++key) {
                const V k = hn::Set(d, keys[key * tile_stride]);
                for (int v = 0; v < kVectors; ++v) sums[v][key] = hn::MulAdd(q[v], k, sums[v][key]);
            }
        }
        for (int v = 0; v < kVectors; ++v)
            for (int key = 0; key < kKeys; ++key) {
                float* dots = corner.dots + v * corner.dots_vector_stride + key * head_group;
                hn::StoreU(block == 0 ? sums[v][key] : hn::Add(hn::LoadU(d, dots), sums[v][key]), d, dots);
            }
    }
}

/// All keys of the chunk for kVectors vectors of heads.
template <int kVectors, int kKeys, class D>
HWY_INLINE void all_keys(D d, const DotsArgs& args, Corner corner) {
    static_assert(kKeys <= key_padding);
    // What a tile computes of keys past the last is not used; zeros keep it from being slow.
    const int padding = (kKeys - args.num_keys % kKeys) % kKeys;
    std::fill_n(args.keys + std::int64_t{args.num_keys} * tile_stride, std::int64_t{padding} * tile_stride, 0.0F);
    for (int key = 0; key < args.num_keys; key += kKeys) {
        tile_dots<kVectors, kKeys>(d, corner, args.d_qk);
        corner.keys += kKeys * tile_stride;
        corner.dots += kKeys * head_group;
    }
}

HWY_INLINE Corner corner_of(const DotsArgs& args, int group, int lane) {
    const std::int64_t query_group = static_cast<std::int64_t>(args.d_qk) * head_group;
    const std::int64_t dots_group = static_cast<std::int64_t>(args.key_capacity) * head_group;
    return {args.query + group * query_group + lane, args.keys, args.dots + group * dots_group + lane, 0, 0};
}

/// One group of heads in vectors no wider than the heads left in it.
template <class D>
HWY_INLINE void narrow_group(D d, const DotsArgs& args, int group, int heads) {
    const int lanes = static_cast<int>(hn::Lanes(d));
    for (int lane = 0; lane < heads; lane += lanes) all_keys<1, 8>(d, args, corner_of(args, group, lane));
}

/// Two vectors at once, side by side in a group, or in neighbouring groups where one fills a group.
template <class D>
HWY_INLINE void wide_groups(D d, const DotsArgs& args, int& group, int groups) {
    constexpr int lanes = static_cast<int>(hn::MaxLanes(d));
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3) || HWY_ARCH_ARM
    constexpr int keys = 8;  // 16 accumulators of 32 registers
#else
    constexpr int keys = 6;  // 12 accumulators of 16 registers
#endif
    if constexpr (lanes == head_group) {
        for (; group + 2 <= groups; group += 2) {
            Corner corner = corner_of(args, group, 0);
            corner.query_vector_stride = static_cast<std::int64_t>(args.d_qk) * head_group;
            corner.dots_vector_stride = static_cast<std::int64_t>(args.key_capacity) * head_group;
            all_keys<2, keys>(d, args, corner);
        }
        for (; group < groups; ++group) all_keys<1, 2 * keys>(d, args, corner_of(args, group, 0));
    } else {
        for (; group < groups; ++group)
            for (int lane = 0; lane < head_group; lane += 2 * lanes) {
                Corner corner = corner_of(args, group, lane);
                corner.query_vector_stride = lanes;
                corner.dots_vector_stride = lanes;
                all_keys<2, keys>(d, args, corner);
            }
    }
}

void dots(const DotsArgs& args) {
    const int last_heads = args.heads % head_group;  // of a group that is not full
    const bool narrow = last_heads != 0 && last_heads <= head_group / 2;
    int group = 0;
    wide_groups(hn::CappedTag<float, head_group>(), args, group, head_groups(args.heads) - (narrow ? 1 : 0));
    if (!narrow) return;
    if (last_heads <= 4)
        narrow_group(hn::CappedTag<float, 4>(), args, group, last_heads);
    else
        narrow_group(hn::CappedTag<float, 8>(), args, group, last_heads);
}

}  // namespace sparsemla::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sparsemla::detail {

HWY_EXPORT(dots);

void dot_products(const DotsArgs& args) { HWY_DYNAMIC_DISPATCH(dots)(args); }

void transpose_query(const DecodeParams& params, std::int64_t row, int first_group, int groups, float* tiles) {
    const ValueEncoding encoding = params.query_dtype == DType::bf16 ? ValueEncoding::bf16 : ValueEncoding::e4m3;
    const auto* base = static_cast<const std::byte*>(params.query);
    const std::int64_t element_bytes = size_bytes(params.query_dtype);
    const auto d_qk = static_cast<int>(params.d_qk);
    for (int group = 0; group < groups; ++group) {
        float* tile = tiles + static_cast<std::int64_t>(group) * d_qk * head_group;
        for (int lane = 0; lane < head_group; ++lane) {
            const std::int64_t head = static_cast<std::int64_t>(first_group + group) * head_group + lane;
            float values[max_d_qk] = {};
            if (head < params.heads)
                dequantise_values(
                    encoding, base + (row * params.query_row_stride + head * params.query_head_stride) * element_bytes,
                    d_qk, values);
            for (int dim = 0; dim < d_qk; ++dim) tile[dim * head_group + lane] = values[dim];
        }
    }
}

}  // namespace sparsemla::detail
#endif  // HWY_ONCE
