// What decode_latency's helpers find out: maxima and sums of a row, its lse, and what each split is worth.
#pragma once

#include "cuda/decode_latency_chunk.cuh"
#include "cuda/decode_latency_gather.cuh"
#include "cuda/decode_latency_mailbox.cuh"
#include "cuda/device/exchange.cuh"

namespace sparsemla::detail::latency {

/// Maxima and each lane's share of the sums of this CTA's columns, for the helpers.
template <class T>
__device__ void publish_sums(const Place<T>& at, const Running (&running)[T::heads_of_warp]) {
#pragma unroll
    for (int i = 0; i < T::heads_of_warp; ++i) {
        const int head = T::heads_of_warp * at.warp + i;
        store_shared(at.sums(head, at.lane), running[i].sum);
        if (at.lane == 0) store_shared(at.maximum(head), running[i].max);
    }
    bring(at.sums_barrier(), at.lane);
}

/// A head's sink in base 2, -inf where there is none.
__device__ inline float sink_of(const Params& params, int head) {
    return params.sinks == nullptr || head >= params.heads ? -INFINITY
                                                           : params.sinks[head * params.sinks_stride] * 1.44269504F;
}

/// What sums that lack `value_factor` are worth in the output: that times out_scale / (l + 2^(sink - max)). The larger
/// of max and sink is the reference, so that neither power overflows. 0 where no column counts, whatever the other
/// factors.
__device__ inline float output_weight(const Params& params, float value_factor, float sink, float max, float sum) {
    const bool above = sink > max;
    const float less = exp2_approximate(above ? max - sink : sink - max);
    const float of_sum = above ? less : 1.0F, of_sink = above ? 1.0F : less;
    const float factor = params.out_scale * (of_sum * reciprocal_approximate(sum * of_sum + of_sink));
    return sum == 0 ? 0 : value_factor * factor;
}

/// Base 2.
__device__ inline float lse_of(float max, float sum) { return sum == 0 ? -INFINITY : max + log2_approximate(sum); }

__device__ inline void write_lse(const Params& params, int row, int head, float max, float sum) {
    if (params.lse == nullptr) return;
    const float lse = lse_of(max, sum);
    params.lse[row * params.lse_row_stride + head * params.lse_head_stride] =
        params.lse_natural ? lse * 0.693147181F : lse;
}

/// What a split's sums are to be multiplied by: they lack a k_scale, and are times p_scale; where records have scales,
/// neither (Anchors::finish).
template <class T>
__device__ float value_factor_of_split(const Params& params, const Columns& columns, int split) {
    if (Anchors<T>::of_scales) return 1;
    float k_scale = factors_of(params, params.sources[0]).values;
    if (T::two_sources && columns.first_of_second(params, split) < columns.second_end) {
        const float second = factors_of(params, params.sources[1]).values;
        const bool only_second = split >= columns.first_end;
        if (only_second || !change_of_source(k_scale, second).second_vanishes) k_scale = second;
    }
    return k_scale * params.inverse_p_scale;
}

/// What splits are worth. 8 lanes a head, of two splits each.
struct SplitWeights {
    static_assert(max_splits == 16);
    static constexpr int lanes = 8;

    float weights[2];  ///< of splits lane and lane + 8; without their value factors
    float max, sum;    ///< of the row

    /// From each split's maximum (-inf where it has no columns) and sum.
    __device__ SplitWeights(const Params& params, const float2 (&stats)[2], float sink) {
        max = fmaxf(stats[0].x, stats[1].x);
#pragma unroll
        for (int distance = lanes / 2; distance > 0; distance /= 2)
            max = fmaxf(max, __shfl_xor_sync(all_lanes, max, distance));
#pragma unroll
        for (int j = 0; j < 2; ++j) weights[j] = stats[j].x == -INFINITY ? 0 : exp2_approximate(stats[j].x - max);
        sum = warp_sum<lanes>(weights[0] * stats[0].y + weights[1] * stats[1].y);
        factor = output_weight(params, 1, sink, max, sum);
    }
    /// 0 of a split without columns, whatever its value factor.
    __device__ float weight(int j, float value_factor) const {
        return weights[j] == 0 ? 0 : weights[j] * value_factor * factor;
    }

   private:
    float factor;
};

/// What the helpers do at the end: sums of this CTA's columns to all CTAs of the row, and from those of all splits what
/// each split's partial outputs are worth. 8 lanes a head, of two splits each; 4 heads a warp at a time.
template <class T>
struct Statistics {
    static_assert(T::heads % (4 * helper_warps) == 0);
    static constexpr int rounds = T::heads / (4 * helper_warps);
    static constexpr int lanes_of_head = SplitWeights::lanes;

    int lane;                            ///< of the head
    int heads[rounds];                   ///< of the tile
    float sinks[rounds];                 ///< base 2
    float value_factors[2];              ///< of splits lane and lane + 8
    float maxima[rounds], sums[rounds];  ///< of this CTA's columns, then of the row

    /// All that can be known before the sums.
    __device__ Statistics(const Params& params, const Place<T>& at, const Columns& columns) : lane(at.lane % 8) {
#pragma unroll
        for (int i = 0; i < rounds; ++i) {
            heads[i] = 4 * helper_warps * i + 4 * at.helper() + at.lane / 8;
            sinks[i] = sink_of(params, at.first_head + heads[i]);
            if constexpr (T::dcp)
                if (lane == 0) find_owner(params, at, heads[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) value_factors[i] = value_factor_of_split<T>(params, columns, lane + 8 * i);
    }

    /// Maxima and sums of this CTA's columns.
    __device__ void add_up(const Place<T>& at) {
#pragma unroll
        for (int i = 0; i < rounds; ++i) {
            const float4 shares = load_shared<float4>(at.sums(heads[i], 4 * lane));
            maxima[i] = load_shared<float>(at.maximum(heads[i]));
            sums[i] = warp_sum<lanes_of_head>((shares.x + shares.y) + (shares.z + shares.w));
        }
    }

    /// They are the row's: no other CTA has columns.
    __device__ void weigh_alone(const Params& params, const Place<T>& at, const Columns& columns) const {
        const float value_factor = value_factor_of_split<T>(params, columns, at.split);
#pragma unroll
        for (int i = 0; i < rounds; ++i)
            if (lane == 0) {
                store_shared(at.weight(at.split, heads[i]),
                             output_weight(params, value_factor, sinks[i], maxima[i], sums[i]));
                if constexpr (T::dcp) check_owner(at, heads[i], sums[i]);
            }
    }

    /// To every CTA of the row.
    __device__ void send(const Place<T>& at) const {
#pragma unroll
        for (int i = 0; i < rounds; ++i) {
            const SharedAddress to = at.stats(at.split, heads[i]);
#pragma unroll
            for (int cta = lane; cta < max_splits; cta += 8) {
                if (cta == at.split)
                    store_shared(to, maxima[i], sums[i]);
                else if (cta < at.splits)
                    store_async(map_to_cta(to, at.cta(cta)), maxima[i], sums[i],
                                map_to_cta(at.stats_barrier(), at.cta(cta)));
            }
        }
    }

    /// The splits' weights to shared memory, once the stats of all are there.
    __device__ void weigh(const Params& params, const Place<T>& at, const Columns& columns) {
#pragma unroll
        for (int i = 0; i < rounds; ++i) {
            float2 stats[2];
#pragma unroll
            for (int j = 0; j < 2; ++j)
                stats[j] = columns.has_split(lane + 8 * j) ? load_shared<float2>(at.stats(lane + 8 * j, heads[i]))
                                                           : float2{-INFINITY, 0};
            const SplitWeights splits(params, stats, sinks[i]);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (columns.has_split(lane + 8 * j))
                    store_shared(at.weight(lane + 8 * j, heads[i]), splits.weight(j, value_factors[j]));
            maxima[i] = splits.max;
            sums[i] = splits.sum;
            if constexpr (T::dcp)
                if (lane == 0) check_owner(at, heads[i], sums[i]);
        }
    }

    __device__ void write_lses(const Params& params, const Place<T>& at) const {
#pragma unroll
        for (int i = 0; i < rounds; ++i)
            if constexpr (T::dcp) {
                if (lane == 0) push_lse_of(params, at, heads[i], lse_of(maxima[i], sums[i]));
            } else if (lane == 0 && at.first_head + heads[i] < params.heads)
                write_lse(params, at.row, at.first_head + heads[i], maxima[i], sums[i]);
    }
};

}  // namespace sparsemla::detail::latency
