// decode_wide's outputs: from a thread's sums, and merged from the partial outputs of a row's splits. A thread has
// heads g and g + 8 of its warp's 16 and, of each 8 dimensions, 2t and 2t + 1 (g = lane / 4, t = lane % 4).
#pragma once

#include "cuda/decode_latency_output.cuh"
#include "cuda/decode_wide_scores.cuh"

namespace sparsemla::detail::wide {

inline constexpr int value_threads = 32 * value_warps;
inline constexpr int quads = 32;  ///< of a thread's sums: 8 dimensions of its warp's 16 heads each

/// Of dimensions 64 * block .. of the warpgroup's.
struct Sums {
    float of_block[4][32];
};

/// Of a thread's sums, 16 bytes: dims 2t, 2t + 1 of 8, of heads g and g + 8.
__device__ inline float4 quad_of(const Sums& sums, int i) {
    const float* quad = sums.of_block[i / 8] + i % 8 * 4;
    return {quad[0], quad[1], quad[2], quad[3]};
}

/// The partial outputs and statistics of all splits of the row and tile that `at` is in.
template <class T>
struct WidePartials {
    static constexpr int float4s_of_split = value_threads * quads;

    float4* outputs;          ///< this thread's, [splits][quads][threads]
    const float2* stats;      ///< [splits][heads]
    std::uint32_t* arrivals;  ///< of splits

    __device__ WidePartials(const Params& params, const WidePlace<T>& at) {
        const std::int64_t tile = std::int64_t{at.row} * params.tiles_of_row + at.first_head / T::heads;
        outputs =
            reinterpret_cast<float4*>(params.partials) + tile * params.call.splits * float4s_of_split + threadIdx.x;
        stats = reinterpret_cast<const float2*>(params.stats) + tile * params.call.splits * T::heads;
        arrivals = params.arrived_splits + tile;
    }
    __device__ float4* quad(int split, int i) const { return outputs + split * float4s_of_split + i * value_threads; }
};

/// Where a thread's outputs go.
template <class T>
struct WideDestination {
    std::int64_t element;  ///< of head g, the warpgroup's first dimension
    int heads_left;        ///< of the row from head g on

    __device__ WideDestination(const latency::Params& params, const WidePlace<T>& at) {
        const int head = at.first_head + 16 * at.warp_of_group() + at.lane / 4;
        element = at.row * params.out_row_stride + head * params.out_head_stride + 256 * at.warpgroup();
        heads_left = params.heads - head;
    }
};

/// What a split's sums are worth, of this thread's two heads.
template <class T>
__device__ float2 weights_of_heads(const WidePlace<T>& at, int split) {
    const int head = 16 * at.warp_of_group() + at.lane / 4;
    return {load_shared<float>(at.weight(split, head)), load_shared<float>(at.weight(split, head + 8))};
}

/// Words of kQuads quads of a head, dims 2t, 2t + 1 of each, become dims of one quad: of four quads lane t has all of
/// quad t, of two quads lane t has half of quad t % 2, dims 4 * (t / 2) ...
template <int kQuads>
__device__ void exchange_quads(std::uint32_t (&words)[kQuads], int t) {
    const auto swap = [&](std::uint32_t& lower, std::uint32_t& upper, int distance) {
        const bool is_upper = (t & distance) != 0;
        const std::uint32_t other = __shfl_xor_sync(all_lanes, is_upper ? lower : upper, distance);
        lower = is_upper ? other : lower;
        upper = is_upper ? upper : other;
    };
#pragma unroll
    for (int i = 0; i < kQuads; i += 2) swap(words[i], words[i + 1], 1);
    if constexpr (kQuads == 4) {
        swap(words[0], words[2], 2);
        swap(words[1], words[3], 2);
    }
}

/// BF16 outputs of kQuads quads from `first` on, of head g (`head` 0) or g + 8 (1), as `exchange_quads` takes them.
template <int kQuads, class T>
__device__ void store_words(const latency::Params& params, const WideDestination<T>& to, int first, int head,
                            std::uint32_t (&words)[kQuads], int t) {
    exchange_quads(words, t);
    const int dim_of_lane = kQuads == 4 ? 8 * t : 8 * (t % 2) + 4 * (t / 2);
    std::byte* const address =
        params.out + 2 * (to.element + 8 * head * params.out_head_stride + dim_of_lane) + 16 * first;
    if constexpr (kQuads == 4)
        store_global_if(to.heads_left > 8 * head, address, uint4{words[0], words[1], words[2], words[3]});
    else
        store_global_if(to.heads_left > 8 * head, address, uint2{words[0], words[1]});
}

/// A quad where outputs are not aligned for that, or not BF16.
template <class T>
__device__ void store_quad(const latency::Params& params, const WideDestination<T>& to, int number, const float4& quad,
                           int t) {
    std::int64_t element = to.element + 2 * t;
    asm volatile("" : "+l"(element));  // addresses of all quads at once would be spilled
    element += 8 * number;
    store_pair<false>(params, to.heads_left > 0, element, quad.x, quad.y);
    store_pair<false>(params, to.heads_left > 8, element + 8 * params.out_head_stride, quad.z, quad.w);
}

/// The only split with columns is summed: the row's outputs.
template <class T>
__device__ void write_row(const latency::Params& params, const WidePlace<T>& at, Sums& sums) {
    const float2 weight = weights_of_heads(at, at.split);
    const WideDestination<T> to(params, at);
    const int t = at.lane % 4;
    if (!params.out_octets) {
#pragma unroll
        for (float(&block)[32] : sums.of_block)
#pragma unroll
            for (int i = 0; i < 32; ++i) block[i] *= i % 4 < 2 ? weight.x : weight.y;
#pragma unroll
        for (int i = 0; i < quads; ++i) wide::store_quad(params, to, i, quad_of(sums, i), t);
        return;
    }
#pragma unroll
    for (int head = 0; head < 2; ++head)
#pragma unroll
        for (int first = 0; first < quads; first += 4) {
            std::uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float4 quad = quad_of(sums, first + i);
                words[i] = head == 0 ? f32x2_to_bf16x2(quad.x * weight.x, quad.y * weight.x)
                                     : f32x2_to_bf16x2(quad.z * weight.y, quad.w * weight.y);
            }
            store_words(params, to, first, head, words, t);
        }
}

/// What the row's splits are worth, to shared memory; 8 lanes a head.
template <class T>
__device__ void weigh_splits(const Params& params, const WidePlace<T>& at, const Columns& columns, bool writes_lse) {
    constexpr int lanes = SplitWeights::lanes, together = value_threads / lanes;
    const WidePartials<T> row(params, at);
    const int lane = at.lane % lanes;
#pragma unroll 1
    for (int head = static_cast<int>(threadIdx.x) / lanes; head < T::heads; head += together) {
        float2 stats[2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
            stats[j] = columns.has_split(lane + 8 * j) ? load_from_grid(row.stats + (lane + 8 * j) * T::heads + head)
                                                       : float2{-INFINITY, 0};
        const SplitWeights splits(params.call, stats, sink_of(params.call, at.first_head + head));
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (columns.has_split(lane + 8 * j))
                store_shared(at.weight(lane + 8 * j, head),
                             splits.weight(j, value_factor<T>(params.call, columns, lane + 8 * j)));
        if (writes_lse && lane == 0 && at.first_head + head < params.call.heads)
            write_lse(params.call, at.row, at.first_head + head, splits.max, splits.sum);
    }
}

/// Of every kQuads quads of a row, those of the split number `begin` of those that have columns.
template <int kQuads, class T>
__device__ void merge_quads(const Params& params, const WidePlace<T>& at, const Columns& columns,
                            const WidePartials<T>& row, const WideDestination<T>& to, int begin) {
    constexpr int together = 16 / kQuads;  // splits whose loads are under way
#pragma unroll 1
    for (int i = kQuads * begin; i < quads; i += kQuads * columns.num_splits()) {
        float4 sums[kQuads] = {};
#pragma unroll 1
        for (int first = 0; first < max_splits && columns.split_mask >> first != 0; first += together) {
            float4 parts[together][kQuads];
#pragma unroll
            for (int j = 0; j < together; ++j)
#pragma unroll
                for (int quad = 0; quad < kQuads; ++quad)
                    if (columns.has_split(first + j)) parts[j][quad] = load_from_grid(row.quad(first + j, i + quad));
#pragma unroll
            for (int j = 0; j < together; ++j) {
                if (!columns.has_split(first + j)) continue;
                const float2 weight = weights_of_heads(at, first + j);
#pragma unroll
                for (int quad = 0; quad < kQuads; ++quad) {
                    sums[quad].x += weight.x * parts[j][quad].x;
                    sums[quad].y += weight.x * parts[j][quad].y;
                    sums[quad].z += weight.y * parts[j][quad].z;
                    sums[quad].w += weight.y * parts[j][quad].w;
                }
            }
        }
        if (params.call.out_octets) {
#pragma unroll
            for (int head = 0; head < 2; ++head) {
                std::uint32_t words[kQuads];
#pragma unroll
                for (int quad = 0; quad < kQuads; ++quad)
                    words[quad] = head == 0 ? f32x2_to_bf16x2(sums[quad].x, sums[quad].y)
                                            : f32x2_to_bf16x2(sums[quad].z, sums[quad].w);
                store_words(params.call, to, i, head, words, at.lane % 4);
            }
        } else {
#pragma unroll
            for (int quad = 0; quad < kQuads; ++quad)
                wide::store_quad(params.call, to, i + quad, sums[quad], at.lane % 4);
        }
    }
}

/// This CTA has ended one of the row's splits: once all are there, its share of the merge, in split order.
template <class T>
__device__ void merge_row(const Params& params, const WidePlace<T>& at, const Columns& columns) {
    const WidePartials<T> row(params, at);
    const int splits = columns.num_splits();
    const int begin = __popc(columns.split_mask & ((1U << at.split) - 1));
    wait_for_flag(row.arrivals, static_cast<std::uint32_t>(splits), at.lane);
    weigh_splits(params, at, columns, begin == 0);
    sync_multipliers();  // also: all have seen the flag
    // Every split arrives once more; the last of them leaves the counter as it was.
    if (threadIdx.x == 0 && count_relaxed(row.arrivals) == 2U * splits - 1) *row.arrivals = 0;
    const WideDestination<T> to(params.call, at);
    // Where splits are many, two quads at a time: else some would have twice as many as others.
    if (splits > quads / 4)
        merge_quads<2>(params, at, columns, row, to, begin);
    else
        merge_quads<4>(params, at, columns, row, to, begin);
}

/// The merges of all rows of which this CTA has ended one of several splits.
template <class T>
__device__ void merge_rows(const Params& params, WidePlace<T>& at, const Share& share) {
    Walk<T> walk(params, share);
    Piece piece;
    bool is_first = true;
    while (walk.next(piece)) {
        if (!piece.ends_split()) continue;
        const Columns columns = enter<T>(params, at, piece);
        if (columns.num_splits() == 1) continue;
        if (!is_first) sync_multipliers();  // the weights of the merge before are not read any more
        is_first = false;
        merge_row(params, at, columns);
    }
}

}  // namespace sparsemla::detail::wide
