// decode_wide's query: a tile's heads as halves, by the warps of the scores, the first one with those of the values.
// Where records are FP16, a BF16 head is multiplied by the power of two that brings its largest value just below 2^15,
// as FP16 has fewer exponents: exact for values down to 2^-31 of that one.
#pragma once

#include "cuda/decode_wide_tile.cuh"

namespace sparsemla::detail::wide {

inline constexpr int score_threads = 32 * score_warps;

__device__ inline void sync_scores() { sync_threads(2, score_threads); }

/// Eight lanes take a head: 16-byte pieces lane, lane + 8, ... of it.
template <class T>
struct QueryHeads {
    static constexpr int lanes_of_head = 8, heads_of_warp = 32 / lanes_of_head;

    const std::byte* row;
    int first_head, last;  ///< of the row's heads
    std::int64_t stride_bytes;
    int lane;

    __device__ QueryHeads(const latency::Params& params, const WidePlace<T>& at)
        : row(params.query + at.row * params.query_row_stride_bytes),
          first_head(at.first_head),
          last(params.heads - 1),
          stride_bytes(params.query_head_stride_bytes),
          lane(at.lane % lanes_of_head) {}

    __device__ bool exists(int head) const { return first_head + head <= last; }
    __device__ const uint4* pieces(int head) const {
        return reinterpret_cast<const uint4*>(row + min(first_head + head, last) * stride_bytes) + lane;
    }
};

/// 2^n, where it is a normal number.
__device__ inline float power_of_two_of(int n) { return __int_as_float((127 + n) << 23); }

/// Four pairs of BF16 times a power of two as FP16.
__device__ inline uint4 bf16x8_to_f16(const uint4& pairs, float factor) {
    const auto convert = [factor](std::uint32_t pair) {
        return f32x2_to_f16x2(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xFFFF0000) * factor);
    };
    return {convert(pairs.x), convert(pairs.y), convert(pairs.z), convert(pairs.w)};
}

__device__ inline uint4 scale_bf16x8(const uint4& pairs, float factor) {
    const auto scale = [factor](std::uint32_t pair) {
        return f32x2_to_bf16x2(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xFFFF0000) * factor);
    };
    return {scale(pairs.x), scale(pairs.y), scale(pairs.z), scale(pairs.w)};
}

template <class T>
__device__ void load_bf16_query(const latency::Params& params, const WidePlace<T>& at, int worker, int workers) {
    using Heads = QueryHeads<T>;
    constexpr int pieces = T::blocks;  // of 16 bytes, of a lane
    const Heads heads(params, at);
    const SharedAddress to = at.query_tile();
#pragma unroll 1
    for (int first = worker * Heads::heads_of_warp; first < T::heads; first += workers * Heads::heads_of_warp) {
        const int head = first + at.lane / Heads::lanes_of_head;
        const uint4* from = heads.pieces(head);
        uint4 values[pieces];
#pragma unroll
        for (int i = 0; i < pieces; ++i)
            values[i] = load_global_if(heads.exists(head), from + i * Heads::lanes_of_head);
        if constexpr (T::half == Half::f16) {
            std::uint32_t largest = 0;
#pragma unroll
            for (int i = 0; i < pieces; ++i)
                largest = largest_bf16x2(largest_bf16x2(largest_bf16x2(largest, values[i].x), values[i].y),
                                         largest_bf16x2(values[i].z, values[i].w));
#pragma unroll
            for (int distance = 1; distance < Heads::lanes_of_head; distance *= 2)
                largest = largest_bf16x2(largest, __shfl_xor_sync(all_lanes, largest, distance));
            const int field = static_cast<int>(max(largest & 0xFFFF, largest >> 16) >> 7);  // of the exponent
            const int shift = min(127 + 14 - field, 126);
#pragma unroll
            for (int i = 0; i < pieces; ++i)
                values[i] = 64 * i < T::record.codes ? bf16x8_to_f16(values[i], power_of_two_of(shift))
                                                     : scale_bf16x8(values[i], power_of_two_of(shift));
            if (heads.lane == 0) store_shared(at.query_scale(head), power_of_two_of(-shift));
        }
#pragma unroll
        for (int i = 0; i < pieces; ++i)
            store_shared(to + T::QueryTile::byte(head, i * Heads::lanes_of_head + heads.lane), values[i]);
    }
}

/// E4M3, of which 16 bytes are 16 dimensions; halves hold all codes.
template <class T>
__device__ void load_e4m3_query(const latency::Params& params, const WidePlace<T>& at, int worker, int workers) {
    using Heads = QueryHeads<T>;
    const Heads heads(params, at);
    const SharedAddress to = at.query_tile();
#pragma unroll 1
    for (int first = worker * Heads::heads_of_warp; first < T::heads; first += workers * Heads::heads_of_warp) {
        const int head = first + at.lane / Heads::lanes_of_head;
        const uint4* from = heads.pieces(head);
        constexpr int pieces = T::d_qk / 16, rounds = (pieces + Heads::lanes_of_head - 1) / Heads::lanes_of_head;
        uint4 codes[rounds];
#pragma unroll
        for (int i = 0; i < rounds; ++i)
            codes[i] = load_global_if(heads.exists(head) && i * Heads::lanes_of_head + heads.lane < pieces,
                                      from + i * Heads::lanes_of_head);
#pragma unroll
        for (int i = 0; i < rounds; ++i) {
            const int piece = i * Heads::lanes_of_head + heads.lane;
            if (piece >= pieces) break;
            const bool f16 = T::half == Half::f16 && 16 * piece < T::record.codes;
            const auto convert = [f16](std::uint32_t word) { return f16 ? e4m3x4_to_f16(word) : e4m3x4_to_bf16(word); };
            const TwoPairs x = convert(codes[i].x), y = convert(codes[i].y);
            const TwoPairs z = convert(codes[i].z), w = convert(codes[i].w);
            store_shared(to + T::QueryTile::byte(head, 2 * piece), uint4{x.low, x.high, y.low, y.high});
            store_shared(to + T::QueryTile::byte(head, 2 * piece + 1), uint4{z.low, z.high, w.low, w.high});
        }
        if (T::half == Half::f16 && heads.lane == 0) store_shared(at.query_scale(head), 1.0F);
    }
}

/// The piece's heads, zeros past the row's heads, by `workers` warps of which this is number `worker`.
template <class T>
__device__ void load_heads(const latency::Params& params, const WidePlace<T>& at, int worker, int workers) {
    if (params.query_is_e4m3)
        load_e4m3_query(params, at, worker, workers);
    else
        load_bf16_query(params, at, worker, workers);
    fence_async_proxy();
}

/// By the warps of the scores; at first with those of the values, which have nothing else to do yet.
template <class T>
__device__ void load_query(const latency::Params& params, const WidePlace<T>& at, bool is_first) {
    if (is_first) {
        load_heads(params, at, at.score_warp(), score_warps + value_warps);
        __syncwarp();
        arrive_as_warp(at.first_query(), at.lane);
        wait_mbarrier(at.first_query(), 0);
        __syncwarp();
    } else {
        load_heads(params, at, at.score_warp(), score_warps);
        sync_scores();
    }
}

template <class T>
__device__ void help_with_first_query(const Params& params, WidePlace<T>& at, const Share& share) {
    Piece piece;
    if (!Walk<T>(params, share).next(piece)) return;
    enter<T>(params, at, piece);
    load_heads(params.call, at, score_warps + at.warp, score_warps + value_warps);
    __syncwarp();
    arrive_as_warp(at.first_query(), at.lane);
}

}  // namespace sparsemla::detail::wide
