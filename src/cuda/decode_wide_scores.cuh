// decode_wide's scores and softmax, by one warpgroup: a thread has heads g and g + 8 of its warp's 16 and, of each 8
// keys of a step, keys 2t and 2t + 1 (g = lane / 4, t = lane % 4). P goes to the warps of the values thread by thread.
#pragma once

#include "cuda/decode_latency_statistics.cuh"
#include "cuda/decode_wide_query.cuh"
#include "cuda/device/handover.cuh"

namespace sparsemla::detail::wide {

/// Heads times keys of a step.
using Scores = float[16];

/// Starts the products of dimensions [begin, end).
template <class T, Half kHalf>
__device__ void start_products(const WidePlace<T>& at, int stage, Scores& sums, int begin, int end, bool first) {
    const std::uint64_t keys = T::KeyTile::rows(at.step_tile(stage)), query = T::QueryTile::rows(at.query_tile());
    fence_mma();
#pragma unroll
    for (int dim = begin; dim < end; dim += 16)
        mma_async_shared<kHalf>(sums, query + T::QueryTile::rows_from(dim), keys + T::KeyTile::rows_from(dim),
                                !first || dim > begin);
    commit_mma();
}

/// Of this thread's keys in a step, the scales of a group.
struct KeyScales {
    float2 scales[4];

    template <class T>
    __device__ KeyScales(const WidePlace<T>& at, int stage, int group) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scales[j] = load_shared<float2>(at.scale(stage, group, 8 * j + 2 * (at.lane % 4)));
    }
};

/// sums (+)= those of a group times its scales.
__device__ inline void add_group(Scores& sums, const Scores& of_group, const KeyScales& keys, bool first) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float scale = i % 2 == 0 ? keys.scales[i / 4].x : keys.scales[i / 4].y;
        sums[i] = first ? of_group[i] * scale : sums[i] + of_group[i] * scale;
    }
}

/// Dot products of a step, with the scales of groups. Waits for the step's records.
template <class T>
__device__ void compute_dot_products(const WidePlace<T>& at, const Turn& stage, Scores& sums) {
    const int i = stage.number;
    const auto wait_for = [&](SharedAddress barrier) {
        wait_mbarrier(barrier, stage.parity);
        __syncwarp();
    };
    wait_for(at.lower_full(i));
    if constexpr (!T::record.has_groups()) {
        start_products<T, T::half>(at, i, sums, 0, T::lower_dims, true);
        wait_for(at.full(i));
        start_products<T, T::half>(at, i, sums, T::lower_dims, T::d_qk, false);
        wait_for_mma<0>();
        pin(sums);
    } else {
        Scores even, odd;  // groups
        start_products<T, T::half>(at, i, even, 0, 128, true);
        start_products<T, T::half>(at, i, odd, 128, 256, true);
        {
            const KeyScales keys(at, i, 0);
            wait_for_mma<1>();
            pin(even);
            add_group(sums, even, keys, true);
        }
        wait_for(at.full(i));
        start_products<T, T::half>(at, i, even, 256, 384, true);
        {
            const KeyScales keys(at, i, 1);
            wait_for_mma<1>();
            pin(odd);
            add_group(sums, odd, keys, false);
        }
        if constexpr (T::record.wide() > 0) {
            pin(sums);
            start_products<T, Half::bf16>(at, i, sums, T::record.codes, T::d_qk, false);
        }
        start_products<T, T::half>(at, i, odd, 384, 512, true);
        {
            const KeyScales keys(at, i, 2);
            wait_for_mma<1>();
            pin(even);
            pin(sums);
            add_group(sums, even, keys, false);
        }
        const KeyScales keys(at, i, 3);
        wait_for_mma<0>();
        pin(odd);
        add_group(sums, odd, keys, false);
    }
}

/// Where the step's records change from source 0 to source 1, older sums change their k_scale.
struct SumsOfSource {
    bool second;
    float p_scale;  ///< 0: values of source 1 count as nothing (SourceChange)
    float score_factor;

    /// Before a piece's first step: of the source of the step before it, if there is one.
    template <class T>
    __device__ SumsOfSource(const Params& params, const WidePlace<T>& at, const Columns& columns, const Piece& piece) {
        second = columns.is_second(number_of(params, columns, piece.split, max(piece.begin - 1, 0)));
        const Factors factors = factors_of(params.call, params.call.sources[second ? 1 : 0]);
        score_factor = factors.score;
        p_scale = params.call.p_scale;
        if (T::record.is_plain() && second && piece.split < columns.first_end &&
            change_of_source(factors_of(params.call, params.call.sources[0]).values, factors.values).second_vanishes)
            p_scale = 0;
    }

    /// Before a step; returns what older sums are worth.
    template <class T>
    __device__ float enter(const latency::Params& params, bool step_is_second) {
        if (step_is_second == second) return 1;
        second = true;
        const Factors factors = factors_of(params, params.sources[1]);
        score_factor = factors.score;
        if constexpr (!T::record.is_plain()) return 1;
        const SourceChange change = change_of_source(factors_of(params, params.sources[0]).values, factors.values);
        if (change.second_vanishes) p_scale = 0;
        return change.older;
    }
};

/// Softmax of a step: dot products to P times p_scale, and what older sums are worth, to the warps of the values.
template <class T>
__device__ void weigh_step(const WidePlace<T>& at, int stage, const std::uint32_t (&present)[4], Scores& scores,
                           const SumsOfSource& sums, const float (&query_scales)[2], float older, Running (&running)[2],
                           Turn& buffer) {
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& score = scores[4 * j + i];
            score = (present[j] & (i % 2 == 0 ? 0xFFU : 0xFF00U)) != 0 ? score * sums.score_factor * query_scales[i / 2]
                                                                       : -INFINITY;
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
    for (int j = 0; j < 16; ++j) scores[j] = exp2_approximate(scores[j] - anchor[j % 4 / 2]);
        // As a tree: few roundings a step, however many steps a row has (numerics.md, LSE).
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float* of_head = scores + 2 * i;  // of 8 keys, the thread's two
        running[i].sum += ((of_head[0] + of_head[1]) + (of_head[4] + of_head[5])) +
                          ((of_head[8] + of_head[9]) + (of_head[12] + of_head[13]));
    }
#pragma unroll
    for (float& score : scores) score *= sums.p_scale;
    const int thread = 32 * at.score_warp() + at.lane;
    wait_mbarrier(at.weights_empty(buffer.number), buffer.parity ^ 1);
#pragma unroll
    for (int j = 0; j < 4; ++j)
        store_shared(at.weights_of_thread(buffer.number, j, thread), scores[4 * j], scores[4 * j + 1],
                     scores[4 * j + 2], scores[4 * j + 3]);
    store_shared(at.keep_of_thread(buffer.number, thread), keep[0] * older, keep[1] * older);
    __syncwarp();
    arrive_as_warp(at.weights_full(buffer.number), at.lane);
    buffer.advance(weight_buffers);
}

/// What a split's sums are to be multiplied by: they lack a k_scale, and are times p_scale; of groups neither, as their
/// anchors are gone too (GroupAnchors::finish).
template <class T>
__device__ float value_factor(const latency::Params& params, const Columns& columns, int split) {
    if (T::record.has_groups()) return 1;
    float k_scale = factors_of(params, params.sources[0]).values;
    if (columns.first_of_second(params, split) < columns.second_end) {
        const float second = factors_of(params, params.sources[1]).values;
        const bool only_second = split >= columns.first_end;
        if (only_second || !change_of_source(k_scale, second).second_vanishes) k_scale = second;
    }
    return k_scale * params.inverse_p_scale;
}

/// Where running maxima and sums of a CTA are handed over: behind the outputs, [score_threads]. Behind them 16 bytes of
/// the values' anchors.
__device__ inline float4* handed_running(const Params& params, int cta, int thread) {
    constexpr int sums_bytes = 32 * value_warps * wide::heads / 2 * 16;
    static_assert(sums_bytes + score_threads * 16 + 16 <= workspace_layout(wide::heads, 1, 1, 1).handover_bytes);
    return reinterpret_cast<float4*>(params.handovers + cta * params.handover_bytes + sums_bytes) + thread;
}

/// What becomes of the running sums at a piece's end: handed over, the split's statistics, or weight and lse.
template <class T>
__device__ void end_scores(const Params& params, const WidePlace<T>& at, const Columns& columns, const Piece& piece,
                           const Running (&running)[2], Turn& end) {
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
                store_shared(at.weight(piece.split, head), value_factor<T>(params.call, columns, piece.split) *
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
    Turn stage, buffer, pieces, end;
    bool is_first = true;
    for (int left = shared.share.chunks; left > 0;) {
        const Piece piece = take_piece(at, shared, pieces);
        left -= piece.end - piece.begin;
        const Columns columns = enter<T>(params, at, piece);
        load_query(params.call, at, is_first);
        is_first = false;
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
        const int head = 16 * at.score_warp() + at.lane / 4;
        float query_scales[2] = {1, 1};
        if constexpr (T::half == Half::f16) {
            query_scales[0] = load_shared<float>(at.query_scale(head));
            query_scales[1] = load_shared<float>(at.query_scale(head + 8));
        }
        SumsOfSource sums(params, at, columns, piece);
        StepOfPiece step(params, columns, piece);
        do {
            const float older = sums.enter<T>(params.call, columns.is_second(step.number));
            Scores products;
            compute_dot_products(at, stage, products);
            std::uint32_t present[4];  // two keys each
#pragma unroll
            for (int j = 0; j < 4; ++j)
                present[j] = load_shared_16(at.present_of_step(stage.number) + 8 * j + 2 * (at.lane % 4));
            weigh_step(at, stage.number, present, products, sums, query_scales, older, running, buffer);
            stage.advance(at.stages_of_keys);
        } while (step.advance(params, columns, piece));
        end_scores(params, at, columns, piece, running, end);
        sync_scores();  // nobody reads the query any more
    }
}

}  // namespace sparsemla::detail::wide
