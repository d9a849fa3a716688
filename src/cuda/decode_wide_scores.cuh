// decode_wide's scores and softmax, by one warpgroup: a thread has heads g and g + 8 of its warp's 16 and, of each 8
// keys of a step, keys 2t and 2t + 1 (g = lane / 4, t = lane % 4). P goes to the warps of the values thread by thread.
#pragma once

#include "cuda/decode_latency_statistics.cuh"
#include "cuda/decode_wide_query.cuh"
#include "cuda/device/handover.cuh"

namespace sparsemla::detail::wide {

/// Heads times keys of a step.
using Scores = float[16];

/// Starts the products of dimensions [kBegin, kEnd).
template <Half kHalf, int kBegin, int kEnd, class T>
__device__ void start_products(const WidePlace<T>& at, int stage, Scores& sums) {
    // Their lower words alone change. In registers, or all of them would be computed before the loop, and spilled.
    std::uint32_t keys = lower_word(T::KeyTile::rows(at.step_tile(stage)));
    std::uint32_t query = lower_word(T::QueryTile::rows(at.query_tile()));
    asm volatile("" : "+r"(keys), "+r"(query));
    constexpr std::uint32_t upper = T::QueryTile::upper_word();
    static_assert(upper == T::KeyTile::upper_word());
    fence_mma();
#pragma unroll
    for (int dim = kBegin; dim < kEnd; dim += 16)
        mma_async_shared<kHalf, upper>(sums, query + static_cast<std::uint32_t>(T::QueryTile::rows_from(dim)),
                                       keys + static_cast<std::uint32_t>(T::KeyTile::rows_from(dim)), dim > kBegin);
    commit_mma();
}

/// Of this thread's keys in a step, the scales of a group.
struct KeyScales {
    float2 scales[4];

    template <class T>
    __device__ KeyScales(const WidePlace<T>& at, int info, int group) {
        const SharedAddress from = at.scales_of_thread(info, group);
        const float4 first = load_shared<float4>(from), second = load_shared<float4>(from + 16);
        scales[0] = {first.x, first.y};
        scales[1] = {first.z, first.w};
        scales[2] = {second.x, second.y};
        scales[3] = {second.z, second.w};
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

/// Dot products of a step that are under way: of groups each one's own, before its scales.
struct Products {
    Scores even, odd, rope;
};

/// Starts them, once the keys are there: of groups the first two and the rope, as there are no registers for more.
/// The step's flags.
template <class T>
__device__ std::uint32_t begin_products(const WidePlace<T>& at, const Turn& stage, Products& products) {
    const int i = stage.number;
    wait_mbarrier(at.full(i), stage.parity);
    __syncwarp();
    const std::uint32_t flags = load_shared<std::uint32_t>(at.flags_of_step(info_of(stage)));
    if constexpr (!T::record.has_groups()) {
        start_products<T::half, 0, T::d_qk>(at, i, products.even);
    } else {
        start_products<T::half, 0, 128>(at, i, products.even);
        start_products<T::half, 128, 256>(at, i, products.odd);
        if constexpr (T::record.wide() > 0) start_products<Half::bf16, T::record.codes, T::d_qk>(at, i, products.rope);
    }
    return flags;
}

/// The others, and what becomes of all of them: the step's dot products, with the scales of groups. `present`: of its
/// columns, loaded while products are waited for.
template <class T>
__device__ void finish_products(const WidePlace<T>& at, const Turn& stage, Products& products, Scores& sums,
                                uint4& present) {
    auto& [even, odd, rope] = products;
    const int i = stage.number, info = info_of(stage);
    present = load_shared<uint4>(at.present_of_step(info));
    if constexpr (!T::record.has_groups()) {
        wait_for_mma<0>();
        pin(even);
#pragma unroll
        for (int j = 0; j < 16; ++j) sums[j] = even[j];
    } else {
        {
            const KeyScales first(at, info, 0), second(at, info, 1);
            wait_for_mma<0>();  // ptxas counts groups in straight code only
            pin(even);
            pin(odd);
            add_group(sums, even, first, true);
            add_group(sums, odd, second, false);
            if constexpr (T::record.wide() > 0) {
                pin(rope);
#pragma unroll
                for (int j = 0; j < 16; ++j) sums[j] += rope[j];
            }
        }
        const KeyScales third(at, info, 2), fourth(at, info, 3);  // before the products, behind which they would wait
        start_products<T::half, 256, 384>(at, i, even);
        start_products<T::half, 384, 512>(at, i, odd);
        wait_for_mma<1>();
        pin(even);
        add_group(sums, even, third, false);
        wait_for_mma<0>();
        pin(odd);
        add_group(sums, odd, fourth, false);
    }
}

/// Where the step's records change from source 0 to source 1, older sums change their k_scale.
struct SumsOfSource {
    bool second;
    bool vanish = false;  ///< values of source 1 count as nothing (SourceChange)
    float score_factor;

    /// Before a piece's first step: of the source of the step before it, if there is one.
    template <class T>
    __device__ SumsOfSource(const Params& params, const WidePlace<T>& at, const Columns& columns, const Piece& piece) {
        second = columns.is_second(number_of(params, columns, piece.split, max(piece.begin - 1, 0)));
        const Factors factors = factors_of(params.call, params.call.sources[second ? 1 : 0]);
        score_factor = factors.score;
        if (T::record.is_plain() && second && piece.split < columns.first_end &&
            change_of_source(factors_of(params.call, params.call.sources[0]).values, factors.values).second_vanishes)
            vanish = true;
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
        vanish = change.second_vanishes;
        return change.older;
    }
};

/// What a thread's heads' scores are to be multiplied by; loaded some time before that.
struct QueryScales {
    float of_head[2] = {1, 1};

    template <class T>
    __device__ explicit QueryScales(const WidePlace<T>& at) {
        if constexpr (T::half == Half::f16)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                of_head[i] = load_shared<float>(at.query_scale(16 * at.score_warp() + at.lane / 4 + 8 * i));
    }
};

/// Softmax of a step: dot products to P times p_scale, and what older sums are worth, to the warps of the values.
template <class T>
__device__ void weigh_step(const WidePlace<T>& at, const Turn& stage, Scores& scores, const uint4& present,
                           const QueryScales& query_scales, const SumsOfSource& sums, float p_scale, float older,
                           Running (&running)[2], Turn& weights) {
    // One after the other: their product might overflow.
#pragma unroll
    for (int j = 0; j < 16; ++j) scores[j] = scores[j] * sums.score_factor * query_scales.of_head[j % 4 / 2];
    if ((present.x & present.y & present.z & present.w) != ~0U) {
        const std::uint32_t words[4] = {present.x, present.y, present.z, present.w};  // four bits a key
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const std::uint32_t word = words[j] >> (8 * (at.lane % 4));
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if ((word & (i % 2 == 0 ? 0x1 : 0x10)) == 0) scores[4 * j + i] = -INFINITY;
        }
    }
    __syncwarp();  // scales and masks are read
    arrive_as_warp(at.empty(stage.number), at.lane);
    float largest[2], keep[2] = {1, 1};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float* of_head = scores + 2 * i;  // of each 8 keys, the thread's two
        largest[i] = fmaxf(fmaxf(fmaxf(of_head[0], of_head[1]), fmaxf(of_head[4], of_head[5])),
                           fmaxf(fmaxf(of_head[8], of_head[9]), fmaxf(of_head[12], of_head[13])));
    }
    // Exchanges between lanes take as long as shared memory does: only where a maximum rises.
    if (__any_sync(all_lanes, largest[0] > running[0].max || largest[1] > running[1].max)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(all_lanes, largest[i], 1));
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(all_lanes, largest[i], 2));
            if (!(largest[i] > running[i].max)) continue;
            keep[i] = exp2_approximate(running[i].max - largest[i]);
            running[i].max = largest[i];
            running[i].sum *= keep[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float anchor = running[i].max == -INFINITY ? 0.0F : running[i].max;  // no key yet: all are masked
        float* const of_head = scores + 2 * i;
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            of_head[j] = exp2_approximate(of_head[j] - anchor);
            of_head[j + 1] = exp2_approximate(of_head[j + 1] - anchor);
        }
        // As a tree: few roundings a step, however many steps a row has (numerics.md, LSE).
        running[i].sum += ((of_head[0] + of_head[1]) + (of_head[4] + of_head[5])) +
                          ((of_head[8] + of_head[9]) + (of_head[12] + of_head[13]));
    }
    const float factor = sums.vanish ? 0.0F : p_scale;
#pragma unroll
    for (float& score : scores) score *= factor;
    const int thread = 32 * at.score_warp() + at.lane;
    wait_mbarrier(at.weights_empty(), weights.parity ^ 1);
#pragma unroll
    for (int j = 0; j < 4; ++j)
        store_shared(at.weights_of_thread(j, thread), scores[4 * j], scores[4 * j + 1], scores[4 * j + 2],
                     scores[4 * j + 3]);
    store_shared(at.keep_of_thread(thread), keep[0] * older, keep[1] * older);
    __syncwarp();
    arrive_as_warp(at.weights_full(), at.lane);
    weights.advance(1);
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
    asm volatile("" : "+r"(thread));  // an address that is computed before all pieces is spilled
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
                store_shared(at.weight(piece.split, head),
                             output_weight(params.call, value_factor<T>(params.call, columns, piece.split), sink,
                                           running[i].max, sum));
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
    keep_lane(at);
    Turn stage, weights, pieces, end;
    bool is_first = true;
    for (std::uint32_t flags = shared.share.chunks > 0 ? 0 : last_of_cta; (flags & last_of_cta) == 0;) {
        Piece piece = wait_for_piece(at, shared, pieces);
        Columns columns = enter<T>(params, at, piece);
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
        SumsOfSource sums(params, at, columns, piece);
        Products products;
        Scores scores;
        uint4 present;
        flags = begin_products(at, stage, products);
        finish_products(at, stage, products, scores, present);
        while (true) {
            const Turn weighed = stage;
            const QueryScales query_scales(at);
            const float older = sums.enter<T>(params.call, (flags & of_second_source) != 0);
            stage.advance(at.stages_of_keys);
            if ((flags & last_of_piece) != 0) {
                weigh_step(at, weighed, scores, present, query_scales, sums, params.call.p_scale, older, running,
                           weights);
                break;
            }
            flags = begin_products(at, stage, products);
            weigh_step(at, weighed, scores, present, query_scales, sums, params.call.p_scale, older, running, weights);
            finish_products(at, stage, products, scores, present);
        }
        piece = piece_again(at, shared, pieces);
        columns = enter<T>(params, at, piece);
        end_scores(params, at, columns, piece, running, end);
        release_piece(at, pieces);
        sync_scores();  // nobody reads the query any more
    }
}

}  // namespace sparsemla::detail::wide
