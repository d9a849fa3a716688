// The end of decode_latency: partial sums and their maxima to the CTAs that merge them, and from there to the output.
#pragma once

#include "cuda/decode_latency_chunk.cuh"
#include "cuda/decode_latency_gather.cuh"
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
    bring<T>(Handover::sums);
}

/// Units of the output that this CTA merges.
__device__ inline int units_here(const Params& params, int split) {
    return max(0, min(params.units_of_cta, units - split * params.units_of_cta));
}

/// Announces what the peers will send.
template <class T>
__device__ void expect_partials(const Params& params, const Place<T>& at, bool weights, int peers) {
    arrive_expecting(at.stats_barrier(), peers * T::heads * sizeof(float2));
    arrive_expecting(at.outputs_barrier(),
                     peers * (weights ? T::weights_bytes : units_here(params, at.split) * T::quads * quad_bytes));
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
    const SharedAddress to = map_to_cta(here, at.cta(owner));
    const SharedAddress arrived = map_to_cta(at.outputs_barrier(), at.cta(owner));
#pragma unroll
    for (int j = 0; j < T::quads; ++j)
        store_async(to + j * quad_bytes, sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3], arrived);
}

/// Transport `bulk`: staged where the records were, then one copy for each CTA of the cluster.
template <class T>
__device__ void copy_outputs(const Params& params, const Place<T>& at, const Outputs<T>& outputs) {
    constexpr int unit_bytes = T::quads * quad_bytes;
    sync_multipliers<T>();  // every warp has its values out of the stages
#pragma unroll
    for (int i = 0; i < T::units_of_warp; ++i)
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
    sync_multipliers<T>();
    const int count = units_here(params, at.lane);
    if (at.warp != 0 || at.lane >= at.splits || at.lane == at.split || count == 0) return;
    copy_bulk_to_cta(map_to_cta(at.base + T::layout.inbox + inbox_of_split<T>(params, at.split), at.cta(at.lane)),
                     at.stages + at.lane * params.units_of_cta * unit_bytes, count * unit_bytes,
                     map_to_cta(at.outputs_barrier(), at.cta(at.lane)));
}

/// Transport `weights`: this CTA's P to all others of the row.
template <class T, int kSplits>
__device__ void send_weights(const Place<T>& at) {
    constexpr int pieces = T::weights_bytes / 16;
    constexpr int ctas = 32 * T::warps / pieces;  // served at a time
    const int thread = 32 * at.warp + at.lane;
    const int piece = thread % pieces * 16;
    const float4 p = load_shared<float4>(at.base + T::layout.weights + piece);
    const SharedAddress to = at.base + T::layout.inbox + at.split * T::weights_bytes + piece;
    const SharedAddress barrier = at.outputs_barrier();
#pragma unroll
    for (int first = 1; first < kSplits; first += ctas) {
        const int distance = first + thread / pieces;
        if (distance >= kSplits) break;
        const int cta = at.cta((at.split + distance) % kSplits);
        store_async(map_to_cta(to, cta), p.x, p.y, p.z, p.w, map_to_cta(barrier, cta));
    }
}

/// A head's sink in base 2, -inf where there is none.
__device__ inline float sink_of(const Params& params, int head) {
    return params.sinks == nullptr || head >= params.heads ? -INFINITY
                                                           : params.sinks[head * params.sinks_stride] * 1.44269504F;
}

/// out_scale / (l + 2^(sink - max)): the larger of max and sink is the reference, so that neither power overflows.
__device__ inline float output_factor(const Params& params, float sink, float max, float sum) {
    if (sum == 0) return 0;  // no column: +0, whatever the sink
    if (sink == -INFINITY) return params.out_scale * reciprocal_approximate(sum);
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

/// What the helpers do at the end: sums of this CTA's columns to all CTAs of the row, and from those of all splits what
/// each split's partial outputs are worth. 8 lanes a head, of two splits each; 4 heads a warp at a time.
template <class T>
struct Statistics {
    static_assert(max_splits == 16 && T::heads % (4 * helper_warps) == 0);
    static constexpr int rounds = T::heads / (4 * helper_warps);
    static constexpr int lanes_of_head = 8;

    int lane;                            ///< of the head
    int heads[rounds];                   ///< of the tile
    float sinks[rounds];                 ///< base 2
    float value_factors[2];              ///< of splits lane and lane + 8
    float maxima[rounds], sums[rounds];  ///< of the row

    /// All that can be known before the sums.
    __device__ Statistics(const Params& params, const Place<T>& at, const Columns& columns) : lane(at.lane % 8) {
#pragma unroll
        for (int i = 0; i < rounds; ++i) {
            heads[i] = 4 * helper_warps * i + 4 * at.helper() + at.lane / 8;
            sinks[i] = sink_of(params, at.first_head + heads[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) value_factors[i] = value_factor_of_split<T>(params, columns, lane + 8 * i);
    }

    /// This CTA's maxima and sums to every CTA of the row; or only to itself, where no other has columns.
    __device__ void send(const Place<T>& at, bool to_others) const {
#pragma unroll
        for (int i = 0; i < rounds; ++i) {
            const float4 shares = load_shared<float4>(at.sums(heads[i], 4 * lane));
            const float sum = warp_sum<lanes_of_head>((shares.x + shares.y) + (shares.z + shares.w));
            const float max = load_shared<float>(at.maximum(heads[i]));
            const SharedAddress to = at.stats(at.split, heads[i]);
#pragma unroll
            for (int cta = lane; cta < max_splits; cta += 8) {
                if (cta == at.split)
                    store_shared(to, max, sum);
                else if (to_others && cta < at.splits)
                    store_async(map_to_cta(to, at.cta(cta)), max, sum, map_to_cta(at.stats_barrier(), at.cta(cta)));
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
            float max = fmaxf(stats[0].x, stats[1].x);
#pragma unroll
            for (int distance = lanes_of_head / 2; distance > 0; distance /= 2)
                max = fmaxf(max, __shfl_xor_sync(all_lanes, max, distance));
            float weight[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) weight[j] = stats[j].x == -INFINITY ? 0 : exp2_approximate(stats[j].x - max);
            const float sum = warp_sum<lanes_of_head>(weight[0] * stats[0].y + weight[1] * stats[1].y);
            const float factor = output_factor(params, sinks[i], max, sum);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (columns.has_split(lane + 8 * j))
                    store_shared(at.weight(lane + 8 * j, heads[i]), weight[j] * value_factors[j] * factor);
            maxima[i] = max;
            sums[i] = sum;
        }
    }

    __device__ void write_lses(const Params& params, const Place<T>& at) const {
#pragma unroll
        for (int i = 0; i < rounds; ++i)
            if (lane == 0 && at.first_head + heads[i] < params.heads)
                write_lse(params, at.row, at.first_head + heads[i], maxima[i], sums[i]);
    }
};

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

/// Four outputs of a lane in a quad: dims 2g, 2g + 1 of heads 2t, 2t + 1.
template <class T>
__device__ void store_quad(const Params& params, const Destination<T>& to, int unit, int quad, const float4& outputs) {
    const std::int64_t element = to.element + 8 * quad * params.out_head_stride + unit * unit_dims;
    const std::int64_t next = element + params.out_head_stride;
    const bool first = 8 * quad < to.heads_left;
    const bool second = 8 * quad + 1 < to.heads_left;
    if (params.out_pairs) {  // BF16, and 4-byte aligned
        if (first) *reinterpret_cast<std::uint32_t*>(params.out + 2 * element) = f32x2_to_bf16x2(outputs.x, outputs.z);
        if (second) *reinterpret_cast<std::uint32_t*>(params.out + 2 * next) = f32x2_to_bf16x2(outputs.y, outputs.w);
        return;
    }
    if (first) store_elements(params, element, outputs.x, outputs.z);
    if (second) store_elements(params, next, outputs.y, outputs.w);
}

/// No split has columns: +0 and -inf, by CTA 0.
template <class T>
__device__ void write_empty(const Params& params, const Place<T>& at) {
    for (int head = at.first_head + at.warp; head < min(at.first_head + T::heads, params.heads); head += T::warps) {
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
        const float2 weight = load_shared<float2>(at.weight(at.split, 8 * j + 2 * (at.lane % 4)));
#pragma unroll
        for (int i = 0; i < T::units_of_warp; ++i)
            store_quad(params, to, at.unit(i), j,
                       {outputs[i][4 * j] * weight.x, outputs[i][4 * j + 1] * weight.y,
                        outputs[i][4 * j + 2] * weight.x, outputs[i][4 * j + 3] * weight.y});
    }
}

/// A quad of a unit that a warp merges: where its partial sums and their weights lie, of split 0.
struct MergeJob {
    bool exists;
    int unit, quad;
    SharedAddress parts, weights;
};

template <class T>
__device__ MergeJob merge_job(const Params& params, const Place<T>& at, int job) {
    const int quad = job % T::quads;
    return {.exists = job < units_here(params, at.split) * T::quads,
            .unit = at.split * params.units_of_cta + job / T::quads,
            .quad = quad,
            .parts = static_cast<SharedAddress>(at.base + T::layout.inbox + job * quad_bytes + at.lane * 16),
            .weights = at.weight(0, 8 * quad + 2 * (at.lane % 4))};
}

/// sums[j] += weight * part of `kSplits` splits for two jobs. All loads come before the sums, so that their latencies
/// overlap. Splits without columns have sent nothing, and are left out.
template <class T, int kSplits>
__device__ void add_splits(const MergeJob (&jobs)[2], int first, std::uint32_t split_bytes, std::uint32_t split_mask,
                           float4 (&sums)[2]) {
    float2 weight[2][kSplits];
    float4 part[2][kSplits];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < kSplits; ++i) {
            weight[j][i] = {0, 0};
            part[j][i] = {0, 0, 0, 0};
            if (!jobs[j].exists || (split_mask >> (first + i) & 1) == 0) continue;
            weight[j][i] = load_shared<float2>(jobs[j].weights + (first + i) * T::heads * 4);
            part[j][i] = load_shared<float4>(jobs[j].parts + (first + i) * split_bytes);
        }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < kSplits; ++i) {
            sums[j].x += weight[j][i].x * part[j][i].x;
            sums[j].y += weight[j][i].y * part[j][i].y;
            sums[j].z += weight[j][i].x * part[j][i].z;
            sums[j].w += weight[j][i].y * part[j][i].w;
        }
}

/// This CTA's units of the output over all splits, in split order; two quads at a time by each warp.
template <class T>
__device__ void merge_units(const Params& params, const Place<T>& at, std::uint32_t split_mask) {
    constexpr int together = T::blocks == 1 ? 8 : 4;  // splits: what registers allow
    const std::uint32_t split_bytes = inbox_of_split<T>(params, 1);
    const Destination<T> to(params, at);
    for (int job = at.warp; job < units_here(params, at.split) * T::quads; job += 2 * T::warps) {
        const MergeJob jobs[2] = {merge_job(params, at, job), merge_job(params, at, job + T::warps)};
        float4 sums[2] = {};
        for (int first = 0; first < at.splits; first += together)
            add_splits<T, together>(jobs, first, split_bytes, split_mask, sums);
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (jobs[j].exists) store_quad(params, to, jobs[j].unit, jobs[j].quad, sums[j]);
    }
}

/// Transport `weights`: this CTA's dimensions over the columns of all splits. A job is a split and a block.
template <class T, int kSplits>
struct SlicesProduct {
    using S = Slices<T, kSplits>;
    static constexpr int jobs = kSplits * S::dim_blocks;
    static constexpr int loaded = jobs < 4 ? jobs : 4;  ///< under way at a time
    static_assert(loaded == 4);

    FragmentA values[loaded][4];
    float outputs[jobs][S::heads / 2];

    __device__ void load(const Place<T>& at, int job) {
        const int split = job / S::dim_blocks;
        const int unit = S::unit(at, job % S::dim_blocks);
        const bool own = split == at.split;
        load_unit((own ? at.stages + at.split * S::dims : S::slice(at, split)) + unit * unit_dims,
                  own ? T::pitch : S::pitch, at.lane, values[job % loaded]);
    }

    __device__ void start(const Place<T>& at, int job) {
        const int split = job / S::dim_blocks;
        const SharedAddress weights =
            at.base + (split == at.split ? T::layout.weights : T::layout.inbox + split * T::weights_bytes);
        pin(outputs[job]);
        start_unit<T>(weights + S::first_head(at) * block_keys * 2, outputs[job], values[job % loaded], true);
    }

    __device__ void load_first(const Place<T>& at) {
#pragma unroll
        for (int job = 0; job < loaded; ++job) load(at, job);
    }

    /// Once P of all splits is there.
    __device__ void start_all(const Place<T>& at) {
#pragma unroll
        for (int job = 0; job < loaded; ++job) start(at, job);
#pragma unroll
        for (int job = loaded; job < jobs; ++job) {
            wait_for_mma<loaded - 1>();
            load(at, job);
            start(at, job);
        }
    }

    /// In split order. Splits without columns left garbage.
    __device__ void store(const Params& params, const Place<T>& at, std::uint32_t split_mask) {
        wait_for_mma<0>();
#pragma unroll
        for (float(&sums)[S::heads / 2] : outputs) pin(sums);
        const Destination<T> to(params, at);
        const int first_head = S::first_head(at);
#pragma unroll
        for (int block = 0; block < S::dim_blocks; ++block)
#pragma unroll
            for (int quad = 0; quad < S::quads; ++quad) {
                float4 sums = {};
#pragma unroll
                for (int split = 0; split < kSplits; ++split) {
                    if ((split_mask >> split & 1) == 0) continue;
                    const float2 weight =
                        load_shared<float2>(at.weight(split, first_head + 8 * quad + 2 * (at.lane % 4)));
                    const float* part = outputs[split * S::dim_blocks + block] + 4 * quad;
                    sums.x += weight.x * part[0];
                    sums.y += weight.y * part[1];
                    sums.z += weight.x * part[2];
                    sums.w += weight.y * part[3];
                }
                store_quad(params, to, at.split * S::units_here + S::unit(at, block), first_head / 8 + quad, sums);
            }
    }
};

}  // namespace sparsemla::detail::latency
