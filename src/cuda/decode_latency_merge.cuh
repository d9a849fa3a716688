// The end of decode_latency: partial sums and their maxima to the CTAs that merge them, and from there to the output.
#pragma once

#include "cuda/decode_latency_chunk.cuh"
#include "cuda/decode_latency_gather.cuh"
#include "cuda/device/exchange.cuh"

namespace sparsemla::detail::latency {

/// Every lane's share of the warp's sums to their total, in all lanes; the heads' shuffles overlap.
template <class T>
__device__ void sum_lanes(Running (&running)[T::heads_of_warp]) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
#pragma unroll
        for (Running& head : running) head.sum += __shfl_xor_sync(all_lanes, head.sum, distance);
}

/// The maximum and sum of head `i` of the warp, i different between lanes.
template <class T>
__device__ float2 stats_of_lane(const Running (&running)[T::heads_of_warp], int i) {
    float2 stats = {running[0].max, running[0].sum};
#pragma unroll
    for (int j = 1; j < T::heads_of_warp; ++j)
        if (i == j) stats = {running[j].max, running[j].sum};
    return stats;
}

/// The warp's maxima and sums to every CTA of the cluster, two CTAs a step: lane l sends head l % 16 to CTA l / 16.
template <class T>
__device__ void send_stats(const Params& params, const Place<T>& at, const Running (&running)[T::heads_of_warp]) {
    static_assert(T::heads_of_warp <= 16);
    constexpr int ctas = 32 / T::heads_of_warp;  // served at a time
    const int i = at.lane % T::heads_of_warp;
    const float2 stats = stats_of_lane<T>(running, i);
    const SharedAddress to = at.stats(at.split, T::heads_of_warp * at.warp + i);
    const SharedAddress barrier = at.stats_barrier();
    for (int cta = at.lane / T::heads_of_warp; cta < at.splits; cta += ctas) {
        if (cta == at.split)
            store_shared(to, stats.x, stats.y);
        else
            store_async(map_to_cta(to, cta), stats.x, stats.y, map_to_cta(barrier, cta));
    }
}

/// Units of the output that this CTA merges.
__device__ inline int units_here(const Params& params, int split) {
    return max(0, min(params.units_of_cta, units - split * params.units_of_cta));
}

/// Announces what the peers will send.
template <class T>
__device__ void expect_partials(const Params& params, const Place<T>& at, int peers) {
    arrive_expecting(at.stats_barrier(), peers * T::heads * sizeof(float2));
    arrive_expecting(at.outputs_barrier(), peers * units_here(params, at.split) * T::quads * quad_bytes);
}

/// Byte of a split's units in the inbox of the CTA that merges them.
template <class T>
__device__ std::uint32_t inbox_of_split(const Params& params, int split) {
    return split * params.units_of_cta * (T::quads * quad_bytes);
}

/// Transport `stores`: every lane's sums of a unit straight from its registers.
template <class T>
__device__ void send_unit(const Params& params, const Place<T>& at, std::uint32_t unit,
                          const float (&sums)[T::heads / 2]) {
    const std::uint32_t owner = unit * params.owner_multiplier >> 16;
    const SharedAddress here = at.base + T::layout.inbox + inbox_of_split<T>(params, at.split) +
                               (unit - owner * params.units_of_cta) * (T::quads * quad_bytes) + at.lane * 16;
    if (owner == at.split) {
#pragma unroll
        for (int j = 0; j < T::quads; ++j)
            store_shared(here + j * quad_bytes, sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
        return;
    }
    const SharedAddress to = map_to_cta(here, owner);
    const SharedAddress arrived = map_to_cta(at.outputs_barrier(), owner);
#pragma unroll
    for (int j = 0; j < T::quads; ++j)
        store_async(to + j * quad_bytes, sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3], arrived);
}

/// Transport `bulk`: staged where the records were, then one copy for each CTA of the cluster.
template <class T>
__device__ void copy_outputs(const Params& params, const Place<T>& at, const Outputs<T>& outputs) {
    constexpr int unit_bytes = T::quads * quad_bytes;
    sync_multipliers();  // every warp has its values out of the stages
#pragma unroll
    for (int i = 0; i < units_of_warp; ++i)
#pragma unroll
        for (int j = 0; j < T::quads; ++j) {
            const int unit_here = at.unit(i) - at.split * params.units_of_cta;
            const bool stays = unit_here >= 0 && unit_here < params.units_of_cta;
            const SharedAddress to =
                stays ? at.base + T::layout.inbox + inbox_of_split<T>(params, at.split) + unit_here * unit_bytes
                      : at.stages + at.unit(i) * unit_bytes;
            store_shared(to + j * quad_bytes + at.lane * 16, outputs[i][4 * j], outputs[i][4 * j + 1],
                         outputs[i][4 * j + 2], outputs[i][4 * j + 3]);
        }
    fence_async_proxy();
    sync_multipliers();
    const int count = units_here(params, at.lane);
    if (at.warp != 0 || at.lane >= at.splits || at.lane == at.split || count == 0) return;
    copy_bulk_to_cta(map_to_cta(at.base + T::layout.inbox + inbox_of_split<T>(params, at.split), at.lane),
                     at.stages + at.lane * params.units_of_cta * unit_bytes, count * unit_bytes,
                     map_to_cta(at.outputs_barrier(), at.lane));
}

/// out_scale / (l + 2^(sink - max)): the larger of max and sink is the reference, so that neither power overflows.
__device__ inline float output_factor(const Params& params, int head, float max, float sum) {
    if (sum == 0) return 0;  // no column: +0, whatever the sink
    if (params.sinks == nullptr) return params.out_scale * reciprocal_approximate(sum);
    const float sink = params.sinks[head * params.sinks_stride] * 1.44269504F;
    if (sink > max) {
        const float weight = exp2_approximate(max - sink);
        return params.out_scale * (weight * reciprocal_approximate(sum * weight + 1.0F));
    }
    return params.out_scale * reciprocal_approximate(sum + exp2_approximate(sink - max));
}

__device__ inline void write_lse(const Params& params, int row, int head, float max, float sum) {
    if (params.lse == nullptr) return;
    const float lse = sum == 0 ? -INFINITY : max + log2_approximate(sum);
    params.lse[row * params.lse_row_stride + head * params.lse_head_stride] =
        params.lse_natural ? lse * 0.693147181F : lse;
}

/// What a split's sums are to be multiplied by: they lack k_scale of its last source, and are times p_scale.
template <class T>
__device__ float value_factor_of_split(const Params& params, const Columns& columns, int split) {
    const bool second = T::two_sources && columns.first_of_second(params, split) < columns.second_end;
    const SourceView& source = params.sources[second ? 1 : 0];
    return factors_of(params, source).values * params.inverse_p_scale;
}

/// The warp's heads of the row from the stats of their splits: weights, factors, lse. Half a warp a head, a lane a
/// split.
template <class T>
__device__ void weigh_splits(const Params& params, const Place<T>& at, const Columns& columns, bool writes_lse) {
    static_assert(max_splits == 16);
    constexpr int together = T::heads_of_warp < 2 ? 1 : 2;
    const int split = at.lane % 16;
    const bool mine = (columns.splits >> split & 1) != 0 && at.lane / 16 < together;
    const float value_factor = value_factor_of_split<T>(params, columns, split);
#pragma unroll
    for (int i = 0; i < T::heads_of_warp; i += together) {
        const int head = T::heads_of_warp * at.warp + i + at.lane / 16 % together;
        const float2 stats = mine ? load_shared<float2>(at.stats(split, head)) : float2{-INFINITY, 0};
        float max = stats.x;
#pragma unroll
        for (int distance = 1; distance < max_splits; distance *= 2)
            if (distance < at.splits) max = fmaxf(max, __shfl_xor_sync(all_lanes, max, distance));
        const float weight = stats.x == -INFINITY ? 0 : exp2_approximate(stats.x - max);
        float sum = weight * stats.y;
#pragma unroll
        for (int distance = 1; distance < max_splits; distance *= 2)
            if (distance < at.splits) sum += __shfl_xor_sync(all_lanes, sum, distance);
        if (mine) store_shared(at.weight(split, head), weight * value_factor);
        const int head_of_row = at.first_head + head;
        if (split != 0 || at.lane / 16 >= together || head_of_row >= params.heads) continue;
        store_shared(at.factor(head), output_factor(params, head_of_row, max, sum));
        if (writes_lse) write_lse(params, at.row, head_of_row, max, sum);
    }
}

/// Dimensions dim, dim + 1 of a head, wherever the output's type, strides and alignment allow only single elements.
__device__ inline void store_elements(const Params& params, std::int64_t element, float x, float y) {
    if (params.out_is_f32) {
        float* to = reinterpret_cast<float*>(params.out) + element;
        to[0] = x;
        to[1] = y;
        return;
    }
    const std::uint32_t halves = f32x2_to_bf16x2(x, y);
    std::uint16_t* to = reinterpret_cast<std::uint16_t*>(params.out) + element;
    to[0] = static_cast<std::uint16_t>(halves);
    to[1] = static_cast<std::uint16_t>(halves >> 16);
}

/// Where a lane's outputs go: heads 2t, 2t + 1 of each 8, dims 2g, 2g + 1 of each 16.
template <class T>
struct Destination {
    std::int64_t element;  ///< of head 2t, dim 2g
    int heads_left;        ///< of the row from head 2t on

    __device__ Destination(const Params& params, const Place<T>& at) {
        const int head = at.first_head + 2 * (at.lane % 4);
        element = at.row * params.out_row_stride + head * params.out_head_stride + 2 * (at.lane / 4);
        heads_left = params.heads - head;
    }
};

/// Four sums of a lane in a quad: dims 2g, 2g + 1 of heads 2t, 2t + 1. `factor`: of those heads.
template <class T>
__device__ void store_quad(const Params& params, const Destination<T>& to, int unit, int quad, const float4& sums,
                           const float2& factor) {
    const std::int64_t element = to.element + 8 * quad * params.out_head_stride + unit * unit_dims;
    const std::int64_t next = element + params.out_head_stride;
    const bool first = 8 * quad < to.heads_left;
    const bool second = 8 * quad + 1 < to.heads_left;
    if (params.out_pairs) {  // BF16, and 4-byte aligned
        const std::uint32_t x = f32x2_to_bf16x2(sums.x * factor.x, sums.z * factor.x);
        const std::uint32_t y = f32x2_to_bf16x2(sums.y * factor.y, sums.w * factor.y);
        if (first) *reinterpret_cast<std::uint32_t*>(params.out + 2 * element) = x;
        if (second) *reinterpret_cast<std::uint32_t*>(params.out + 2 * next) = y;
        return;
    }
    if (first) store_elements(params, element, sums.x * factor.x, sums.z * factor.x);
    if (second) store_elements(params, next, sums.y * factor.y, sums.w * factor.y);
}

/// No split has columns: +0 and -inf, by CTA 0.
template <class T>
__device__ void write_empty(const Params& params, const Place<T>& at) {
    for (int head = at.first_head + at.warp; head < min(at.first_head + T::heads, params.heads); head += warps) {
        const std::int64_t element = at.row * params.out_row_stride + head * params.out_head_stride;
        for (int dim = 2 * at.lane; dim < 512; dim += 64) store_elements(params, element + dim, 0, 0);
        if (at.lane == 0) write_lse(params, at.row, head, -INFINITY, 0);
    }
}

/// Only one split of the row has columns: its registers are the row's sums.
template <class T>
__device__ void store_outputs(const Params& params, const Place<T>& at, const Outputs<T>& outputs) {
    const Destination<T> to(params, at);
#pragma unroll
    for (int j = 0; j < T::quads; ++j) {
        const int head = 8 * j + 2 * (at.lane % 4);
        const float2 weight = load_shared<float2>(at.weight(at.split, head));
        const float2 factor = load_shared<float2>(at.factor(head));
#pragma unroll
        for (int i = 0; i < units_of_warp; ++i)
            store_quad(params, to, at.unit(i), j,
                       {outputs[i][4 * j] * weight.x, outputs[i][4 * j + 1] * weight.y,
                        outputs[i][4 * j + 2] * weight.x, outputs[i][4 * j + 3] * weight.y},
                       factor);
    }
}

/// sums += weight * part of `kSplits` splits, for a quad. Loads come before sums: their latencies overlap. Splits
/// without columns have sent nothing, and are left out.
template <class T, int kSplits>
__device__ void add_splits(SharedAddress parts, std::uint32_t split_bytes, SharedAddress weights, std::uint32_t splits,
                           float4& sums) {
    float2 weight[kSplits];
    float4 part[kSplits];
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
        weight[i] = {0, 0};
        part[i] = {0, 0, 0, 0};
        if ((splits >> i & 1) == 0) continue;
        weight[i] = load_shared<float2>(weights + i * T::heads * 4);
        part[i] = load_shared<float4>(parts + i * split_bytes);
    }
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
        sums.x += weight[i].x * part[i].x;
        sums.y += weight[i].y * part[i].y;
        sums.z += weight[i].x * part[i].z;
        sums.w += weight[i].y * part[i].w;
    }
}

/// This CTA's units of the output over all splits, in split order; a quad of a unit at a time by each warp.
template <class T>
__device__ void merge_units(const Params& params, const Place<T>& at, std::uint32_t splits) {
    const int jobs = units_here(params, at.split) * T::quads;
    const std::uint32_t split_bytes = inbox_of_split<T>(params, 1);
    const Destination<T> to(params, at);
    for (int job = at.warp; job < jobs; job += warps) {
        const int quad = job % T::quads;
        const int head = 8 * quad + 2 * (at.lane % 4);
        const SharedAddress parts = at.base + T::layout.inbox + job * quad_bytes + at.lane * 16;
        float4 sums = {0, 0, 0, 0};
        for (int first = 0; first < at.splits; first += 4)
            add_splits<T, 4>(parts + first * split_bytes, split_bytes, at.weight(first, head), splits >> first, sums);
        store_quad(params, to, at.split * params.units_of_cta + job / T::quads, quad, sums,
                   load_shared<float2>(at.factor(head)));
    }
}

}  // namespace sparsemla::detail::latency
