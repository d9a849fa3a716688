// decode_wide's scores and softmax, by one warpgroup: a thread has heads g and g + 8 of its warp's 16 and, of each 8
// keys of a step, keys 2t and 2t + 1 (g = lane / 4, t = lane % 4). P goes to the warps of the values thread by thread.
#pragma once

#include "cuda/decode_latency_statistics.cuh"
#include "cuda/decode_wide_tile.cuh"
#include "cuda/device/handover.cuh"

namespace sparsemla::detail::wide {

inline constexpr int score_threads = 32 * score_warps;

__device__ inline void sync_scores() { sync_threads(2, score_threads); }

/// The piece's heads as BF16, by all warps of the scores; zeros past the row's heads.
template <class T>
__device__ void load_query(const latency::Params& params, const WidePlace<T>& at) {
    const std::byte* row = params.query + at.row * params.query_row_stride_bytes;
    const int thread = 32 * at.score_warp() + at.lane, heads_left = params.heads - at.first_head;
    const auto head_pointer = [&](int head) {
        return row + (at.first_head + min(head, heads_left - 1)) * params.query_head_stride_bytes;
    };
    const SharedAddress to = at.query_tile();
    if (params.query_is_e4m3) {
        constexpr int pieces = T::d_qk / 16, rounds = wide::heads * pieces / score_threads;  // of 16 codes
        static_assert(rounds % 2 == 0);
#pragma unroll 1
        for (int round = 0; round < rounds; round += 2) {
            uint4 codes[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int number = (round + i) * score_threads + thread, head = number / pieces;
                codes[i] = load_global_if(
                    head < heads_left, reinterpret_cast<const uint4*>(head_pointer(head)) + (number - head * pieces));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int number = (round + i) * score_threads + thread, head = number / pieces;
                const int piece = 2 * (number - head * pieces);
                const TwoPairs x = e4m3x4_to_bf16(codes[i].x), y = e4m3x4_to_bf16(codes[i].y);
                const TwoPairs z = e4m3x4_to_bf16(codes[i].z), w = e4m3x4_to_bf16(codes[i].w);
                store_shared(to + T::QueryTile::byte(head, piece), uint4{x.low, x.high, y.low, y.high});
                store_shared(to + T::QueryTile::byte(head, piece + 1), uint4{z.low, z.high, w.low, w.high});
            }
        }
    } else {
        constexpr int pieces = T::d_qk / 8, rounds = wide::heads * pieces / score_threads;
#pragma unroll 4
        for (int round = 0; round < rounds; ++round) {
            const int number = round * score_threads + thread, head = number / pieces, piece = number - head * pieces;
            copy_16_async(to + T::QueryTile::byte(head, piece), head_pointer(head) + piece * 16, head >= heads_left);
        }
        wait_for_copies();
    }
    fence_async_proxy();
    sync_scores();
}

/// Heads times keys of a step.
using Scores = float[16];

/// Starts the products of dimensions [begin, end).
template <class T>
__device__ void start_products(const WidePlace<T>& at, int stage, Scores& sums, int begin, int end, bool first) {
    const std::uint64_t keys = T::KeyTile::rows(at.step_tile(stage)), query = T::QueryTile::rows(at.query_tile());
#pragma unroll
    for (int dim = begin; dim < end; dim += 16)
        mma_async_shared(sums, query + T::QueryTile::rows_from(dim), keys + T::KeyTile::rows_from(dim),
                         !first || dim > begin);
    commit_mma();
}

/// Dot products of a step, with the scales of groups.
template <class T>
__device__ void compute_dot_products(const WidePlace<T>& at, int stage, Scores& sums) {
    if constexpr (!T::record.has_groups()) {
        fence_mma();
        start_products(at, stage, sums, 0, T::d_qk, true);
        wait_for_mma<0>();
        pin(sums);
    } else {
        Scores of_group[2];
        fence_mma();
        if constexpr (T::record.wide() > 0) {
            start_products(at, stage, sums, T::record.codes, T::d_qk, true);
        } else {
#pragma unroll
            for (float& sum : sums) sum = 0;
        }
        start_products(at, stage, of_group[0], 0, 128, true);
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            if (group < 3) {
                fence_mma();
                start_products(at, stage, of_group[(group + 1) % 2], 128 * (group + 1), 128 * (group + 2), true);
                wait_for_mma<1>();
            } else {
                wait_for_mma<0>();
            }
            if (group == 0) pin(sums);
            pin(of_group[group % 2]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 scale = load_shared<float2>(at.scale(stage, group, 8 * j + 2 * (at.lane % 4)));
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sums[4 * j + i] += of_group[group % 2][4 * j + i] * (i % 2 == 0 ? scale.x : scale.y);
            }
        }
    }
}

/// Softmax of a step: dot products to P times p_scale, and what older sums are worth, to the warps of the values.
template <class T>
__device__ void weigh_step(const WidePlace<T>& at, int stage, Scores& scores, float score_factor, float p_scale,
                           Running (&running)[2], Turn& buffer) {
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const std::uint32_t present = load_shared_16(at.present_of_step(stage) + 8 * j + 2 * (at.lane % 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& score = scores[4 * j + i];
            score = (present & (i % 2 == 0 ? 0xFFU : 0xFF00U)) != 0 ? score * score_factor : -INFINITY;
            largest[i / 2] = fmaxf(largest[i / 2], score);
        }
    }
    __syncwarp();  // scales and masks are read
    arrive_as_warp(at.empty(stage), at.lane);
    float keep[2], anchor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        largest[i] = fmaxf(largest[i], __shfl_xor_sync(all_lanes, largest[i], 1));
        largest[i] = fmaxf(largest[i], __shfl_xor_sync(all_lanes, largest[i], 2));
        const float old_max = running[i].max;
        running[i].max = fmaxf(old_max, largest[i]);
        anchor[i] = running[i].max == -INFINITY ? 0.0F : running[i].max;  // no key yet: all are masked
        keep[i] = exp2_approximate(old_max - anchor[i]);
        running[i].sum *= keep[i];
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float power = exp2_approximate(scores[j] - anchor[j % 4 / 2]);
        running[j % 4 / 2].sum += power;
        scores[j] = power * p_scale;
    }
    const int thread = 32 * at.score_warp() + at.lane;
    wait_mbarrier(at.weights_empty(buffer.number), buffer.parity ^ 1);
#pragma unroll
    for (int j = 0; j < 4; ++j)
        store_shared(at.weights_of_thread(buffer.number, j, thread), scores[4 * j], scores[4 * j + 1],
                     scores[4 * j + 2], scores[4 * j + 3]);
    store_shared(at.keep_of_thread(buffer.number, thread), keep[0], keep[1]);
    __syncwarp();
    arrive_as_warp(at.weights_full(buffer.number), at.lane);
    buffer.advance(weight_buffers);
}

/// Where running maxima and sums of a CTA are handed over: behind the outputs (Handover).
__device__ inline float4* handed_running(const Params& params, int cta, int thread) {
    return reinterpret_cast<float4*>(params.handovers + cta * params.handover_bytes + 32 * value_warps * 32 * 16) +
           thread;
}

/// What becomes of the running sums at a piece's end: handed over, the split's statistics, or weight and lse.
template <class T>
__device__ void end_scores(const Params& params, const WidePlace<T>& at, const Columns& columns, const Piece& piece,
                           const Running (&running)[2], const ValueScales& scales, Turn& end) {
    wait_mbarrier(at.end_empty(), end.parity ^ 1);
    if (!piece.ends_split()) {
        *handed_running(params, static_cast<int>(blockIdx.x), 32 * at.score_warp() + at.lane) = {
            running[0].max, running[0].sum, running[1].max, running[1].sum};
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float sum = running[i].sum;
            sum += __shfl_xor_sync(all_lanes, sum, 1);
            sum += __shfl_xor_sync(all_lanes, sum, 2);
            const int head = 16 * at.score_warp() + at.lane / 4 + 8 * i;
            if (at.lane % 4 != 0) continue;
            if (columns.num_splits() > 1) {
                const std::int64_t tile = std::int64_t{at.row} * params.tiles_of_row + piece.tile;
                reinterpret_cast<float2*>(params.stats)[(tile * params.call.splits + piece.split) * T::heads + head] = {
                    running[i].max, sum};
            } else {
                const float sink = sink_of(params.call, at.first_head + head);
                store_shared(at.weight(piece.split, head), scales.largest * params.call.inverse_p_scale *
                                                               output_factor(params.call, sink, running[i].max, sum));
                if (at.first_head + head < params.call.heads)
                    write_lse(params.call, at.row, at.first_head + head, running[i].max, sum);
            }
        }
    }
    __syncwarp();
    arrive_as_warp(at.end_full(), at.lane);
    end.advance(1);
}

/// Once the warps of the scores or those of the values have seen the flag that the CTA before raised to 1: the later
/// ones lower it.
__device__ inline void leave_flag(std::uint32_t* flag, bool first_thread) {
    if (first_thread && count_relaxed(flag) == 2) *flag = 0;
}

/// What the warps of the scores do.
template <class T>
__device__ void score(const Params& params, WidePlace<T>& at, const WideShared& shared) {
    const ValueScales scales(params.call);
    const float first_factor = factors_of(params.call, params.call.sources[0]).score;
    const float second_factor = factors_of(params.call, params.call.sources[1]).score;
    Turn stage, buffer, pieces, end;
    for (int left = shared.share.chunks; left > 0;) {
        const Piece piece = take_piece(at, shared, pieces);
        left -= piece.end - piece.begin;
        const Columns columns = enter<T>(params, at, piece);
        load_query(params.call, at);
        Running running[2];
        if (piece.goes_on()) {
            const int thread = 32 * at.score_warp() + at.lane;
            std::uint32_t* flag = params.handed_over + blockIdx.x - 1;
            wait_for_flag(flag, 1, at.lane);
            const float4 handed = load_from_grid(handed_running(params, static_cast<int>(blockIdx.x) - 1, thread));
            running[0] = {handed.x, handed.y};
            running[1] = {handed.z, handed.w};
            sync_scores();  // all have seen the flag
            leave_flag(flag, thread == 0);
        }
        StepOfPiece step(params, columns, piece);
        do {
            const bool second = columns.is_second(step.number);
            wait_mbarrier(at.full(stage.number), stage.parity);
            __syncwarp();
            Scores products;
            compute_dot_products(at, stage.number, products);
            weigh_step(at, stage.number, products, second ? second_factor : first_factor,
                       params.call.p_scale * (second ? scales.second : scales.first), running, buffer);
            stage.advance(at.stages_of_keys);
        } while (step.advance(params, columns, piece));
        end_scores(params, at, columns, piece, running, scales, end);
        sync_scores();  // nobody reads the query any more
    }
}

}  // namespace sparsemla::detail::wide
