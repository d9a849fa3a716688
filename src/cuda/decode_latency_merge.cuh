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
    bring(at.sums_barrier(), at.lane);
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

/// Transport `stores`: every lane's sums of a unit straight from its registers. Both dimensions of head 2t come before
/// those of head 2t + 1.
template <class T>
__device__ void send_unit(const Params& params, const Place<T>& at, std::uint32_t unit,
                          const float (&sums)[T::heads / 2]) {
    const std::uint32_t owner = unit * params.owner_multiplier >> 16;
    const SharedAddress here = at.base + T::layout.inbox + inbox_of_split<T>(params, at.split) +
                               (unit - owner * params.units_of_cta) * (T::quads * quad_bytes) + at.lane * 16;
    if (owner == at.split) {
#pragma unroll
        for (int j = 0; j < T::quads; ++j)
            store_shared(here + j * quad_bytes, sums[4 * j], sums[4 * j + 2], sums[4 * j + 1], sums[4 * j + 3]);
        return;
    }
    const SharedAddress to = map_to_cta(here, at.cta(owner));
    const SharedAddress arrived = map_to_cta(at.outputs_barrier(), at.cta(owner));
#pragma unroll
    for (int j = 0; j < T::quads; ++j)
        store_async(to + j * quad_bytes, sums[4 * j], sums[4 * j + 2], sums[4 * j + 1], sums[4 * j + 3], arrived);
}

/// Transport `bulk`: staged where the records were, then one copy for each CTA of the cluster.
template <class T>
__device__ void copy_outputs(const Params& params, const Place<T>& at, const Outputs<T>& outputs) {
    constexpr int unit_bytes = T::quads * quad_bytes;
    sync_multipliers();  // every warp has its values out of the stages
#pragma unroll
    for (int i = 0; i < T::units_of_warp; ++i)
#pragma unroll
        for (int j = 0; j < T::quads; ++j) {
            const int unit_here = at.unit(i) - at.split * params.units_of_cta;
            const bool stays = unit_here >= 0 && unit_here < params.units_of_cta;
            const SharedAddress to =
                stays ? at.base + T::layout.inbox + inbox_of_split<T>(params, at.split) + unit_here * unit_bytes
                      : at.stages + at.unit(i) * unit_bytes;
            store_shared(to + j * quad_bytes + at.lane * 16, outputs[i][4 * j], outputs[i][4 * j + 2],
                         outputs[i][4 * j + 1], outputs[i][4 * j + 3]);
        }
    fence_async_proxy();
    sync_multipliers();
    const int count = units_here(params, at.lane);
    if (at.warp != 0 || at.lane >= at.splits || at.lane == at.split || count == 0) return;
    copy_bulk_to_cta(map_to_cta(at.base + T::layout.inbox + inbox_of_split<T>(params, at.split), at.cta(at.lane)),
                     at.stages + at.lane * params.units_of_cta * unit_bytes, count * unit_bytes,
                     map_to_cta(at.outputs_barrier(), at.cta(at.lane)));
}

/// Transport `weights`: this CTA's P to all others of the row, by the helpers.
template <class T>
__device__ void send_weights(const Place<T>& at) {
    constexpr int step = 32 * helper_warps * 16;
    static_assert(T::weights_bytes % step == 0);
    constexpr int pieces = T::weights_bytes / step;  // of a thread
    const int first = (32 * at.helper() + at.lane) * 16;
    float4 p[pieces];
#pragma unroll
    for (int i = 0; i < pieces; ++i) p[i] = load_shared<float4>(at.weights() + first + i * step);
    const SharedAddress to = at.base + T::layout.inbox + at.split * T::weights_bytes + first;
    const SharedAddress barrier = at.outputs_barrier();
#pragma unroll
    for (int distance = 1; distance < T::splits; ++distance) {
        const int cta = at.cta((at.split + distance) % T::splits);
        const SharedAddress inbox = map_to_cta(to, cta), arrived = map_to_cta(barrier, cta);
#pragma unroll
        for (int i = 0; i < pieces; ++i) store_async(inbox + i * step, p[i].x, p[i].y, p[i].z, p[i].w, arrived);
    }
}

/// A head's sink in base 2, -inf where there is none.
__device__ inline float sink_of(const Params& params, int head) {
    return params.sinks == nullptr || head >= params.heads ? -INFINITY
                                                           : params.sinks[head * params.sinks_stride] * 1.44269504F;
}

/// out_scale / (l + 2^(sink - max)): the larger of max and sink is the reference, so that neither power overflows.
__device__ inline float output_factor(const Params& params, float sink, float max, float sum) {
    const bool above = sink > max;
    const float less = exp2_approximate(above ? max - sink : sink - max);
    const float of_sum = above ? less : 1.0F, of_sink = above ? 1.0F : less;
    const float factor = params.out_scale * (of_sum * reciprocal_approximate(sum * of_sum + of_sink));
    return sum == 0 ? 0 : factor;  // no column: +0, whatever the sink
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
    float maxima[rounds], sums[rounds];  ///< of this CTA's columns, then of the row

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
            if (lane == 0)
                store_shared(at.weight(at.split, heads[i]),
                             value_factor * output_factor(params, sinks[i], maxima[i], sums[i]));
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

/// Calls store.operator()<pairs>(): whether dimensions 2i, 2i + 1 are one aligned word of BF16, or type, strides and
/// alignment allow only single elements. Asked once for all of a warp's outputs: code that is not taken between the
/// stores would be fetched too.
template <class Store>
__device__ void store_all(const Params& params, const Store& store) {
    if (params.out_pairs)
        store.template operator()<true>();
    else
        store.template operator()<false>();
}

/// Dimensions dim, dim + 1 of a head, if it `exists`.
template <bool kPairs>
__device__ void store_pair(const Params& params, bool exists, std::int64_t element, float x, float y) {
    const std::uint32_t halves = f32x2_to_bf16x2(x, y);
    if constexpr (kPairs) {
        store_global_if(exists, params.out + 2 * element, halves);
    } else if (!exists) {
    } else if (params.out_is_f32) {
        float* to = reinterpret_cast<float*>(params.out) + element;
        to[0] = x;
        to[1] = y;
    } else {
        std::uint16_t* to = reinterpret_cast<std::uint16_t*>(params.out) + element;
        to[0] = static_cast<std::uint16_t>(halves);
        to[1] = static_cast<std::uint16_t>(halves >> 16);
    }
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
template <bool kPairs, class T>
__device__ void store_quad(const Params& params, const Destination<T>& to, int unit, int quad, const float4& outputs) {
    const std::int64_t element = to.element + 8 * quad * params.out_head_stride + unit * unit_dims;
    store_pair<kPairs>(params, 8 * quad < to.heads_left, element, outputs.x, outputs.z);
    store_pair<kPairs>(params, 8 * quad + 1 < to.heads_left, element + params.out_head_stride, outputs.y, outputs.w);
}

/// No split has columns: +0 and -inf, by CTA 0.
template <class T>
__device__ void write_empty(const Params& params, const Place<T>& at) {
    for (int head = at.first_head + at.warp; head < min(at.first_head + T::heads, params.heads);
         head += multiplying_warps) {
        const std::int64_t element = at.row * params.out_row_stride + head * params.out_head_stride;
        for (int dim = 2 * at.lane; dim < 512; dim += 64) store_pair<false>(params, true, element + dim, 0, 0);
        if (at.lane == 0) write_lse(params, at.row, head, -INFINITY, 0);
    }
}

/// Only one split of the row has columns: its registers are the row's sums.
template <class T>
__device__ void store_outputs(const Params& params, const Place<T>& at, Outputs<T>& outputs) {
    const Destination<T> to(params, at);
#pragma unroll
    for (int j = 0; j < T::quads; ++j) {
        const float2 weight = load_shared<float2>(at.weight(at.split, 8 * j + 2 * (at.lane % 4)));
#pragma unroll
        for (int i = 0; i < T::units_of_warp; ++i) {
            float* sums = outputs[i] + 4 * j;
            sums[0] *= weight.x;
            sums[1] *= weight.y;
            sums[2] *= weight.x;
            sums[3] *= weight.y;
        }
    }
    store_all(params, [&]<bool kPairs>() {
#pragma unroll
        for (int j = 0; j < T::quads; ++j)
#pragma unroll
            for (int i = 0; i < T::units_of_warp; ++i) {
                const float* sums = outputs[i] + 4 * j;
                store_quad<kPairs>(params, to, at.unit(i), j, {sums[0], sums[1], sums[2], sums[3]});
            }
    });
}

/// What a warp merges at a time: a quad, kHeads = 2 heads a lane; or half of the lanes of one, a head a lane.
template <class T, int kHeads>
struct MergeJob {
    static constexpr int of_quad = 2 / kHeads;  ///< jobs

    bool exists;
    int heads_left;                ///< of the row from the lane's first one on
    std::int64_t element;          ///< of the output
    SharedAddress parts, weights;  ///< of split 0

    __device__ MergeJob(const Params& params, const Place<T>& at, int job) {
        const int quad = job / of_quad;
        const int sender = kHeads == 2 ? at.lane : job % 2 * 16 + at.lane / 2;  // which lane's sums
        const int unit = quad / T::quads;
        const int head = quad % T::quads * 8 + sender % 4 * 2 + (kHeads == 2 ? 0 : at.lane % 2);
        exists = unit < units_here(params, at.split);
        heads_left = params.heads - at.first_head - head;
        element = at.row * params.out_row_stride + (at.first_head + head) * params.out_head_stride +
                  (at.split * params.units_of_cta + unit) * unit_dims + sender / 4 * 2;
        parts = static_cast<SharedAddress>(at.base + T::layout.inbox + job * (quad_bytes / of_quad) +
                                           at.lane * (8 * kHeads));
        weights = at.weight(0, head);
    }
};

/// Of one split, two dimensions of kHeads heads, and what they are worth.
template <int kHeads>
struct MergePart {
    float2 sums[kHeads];
    float weights[kHeads];

    __device__ void load(SharedAddress part, SharedAddress weight) {
        if constexpr (kHeads == 2) {
            const float4 both = load_shared<float4>(part);
            const float2 factors = load_shared<float2>(weight);
            sums[0] = {both.x, both.y};
            sums[1] = {both.z, both.w};
            weights[0] = factors.x;
            weights[1] = factors.y;
        } else {
            sums[0] = load_shared<float2>(part);
            weights[0] = load_shared<float>(weight);
        }
    }
};

/// This CTA's units of the output over all splits, in split order: kJobs jobs a warp at a time, kSplits splits at a
/// time. All loads come before the sums, so that their latencies overlap. Splits without columns have sent nothing, and
/// are left out.
template <class T, int kHeads, int kJobs, int kSplits>
__device__ void merge_units(const Params& params, const Place<T>& at, std::uint32_t split_mask) {
    using Job = MergeJob<T, kHeads>;
    const std::uint32_t split_bytes = inbox_of_split<T>(params, 1);
    const int jobs = units_here(params, at.split) * T::quads * Job::of_quad;
    for (int begin = at.warp; begin < jobs; begin += kJobs * multiplying_warps) {
        float2 sums[kJobs][kHeads] = {};
        for (int first = 0; first < at.splits; first += kSplits) {
            MergePart<kHeads> parts[kJobs][kSplits] = {};
#pragma unroll
            for (int j = 0; j < kJobs; ++j) {
                const Job job(params, at, begin + j * multiplying_warps);
#pragma unroll
                for (int i = 0; i < kSplits; ++i)
                    if (job.exists && (split_mask >> (first + i) & 1) != 0)
                        parts[j][i].load(job.parts + (first + i) * split_bytes,
                                         job.weights + (first + i) * T::heads * 4);
            }
#pragma unroll
            for (int j = 0; j < kJobs; ++j)
#pragma unroll
                for (int i = 0; i < kSplits; ++i)
#pragma unroll
                    for (int head = 0; head < kHeads; ++head) {
                        sums[j][head].x += parts[j][i].weights[head] * parts[j][i].sums[head].x;
                        sums[j][head].y += parts[j][i].weights[head] * parts[j][i].sums[head].y;
                    }
        }
        store_all(params, [&]<bool kPairs>() {
#pragma unroll
            for (int j = 0; j < kJobs; ++j) {
                const Job job(params, at, begin + j * multiplying_warps);
#pragma unroll
                for (int head = 0; head < kHeads; ++head)
                    store_pair<kPairs>(params, job.exists && head < job.heads_left,
                                       job.element + head * params.out_head_stride, sums[j][head].x, sums[j][head].y);
            }
        });
    }
}

/// Transport `weights`: this CTA's dimensions over the columns of all splits. A job is a split and a block.
template <class T>
struct SlicesProduct {
    using S = Slices<T>;
    static constexpr int jobs = T::splits * S::dim_blocks;
    static constexpr int loaded = 4;  ///< under way at a time
    static_assert(loaded <= jobs);

    FragmentA values[loaded][4];
    float outputs[jobs][S::heads / 2];

    __device__ void fetch(const Place<T>& at, int job, ValueBytes& bytes) const {
        const int split = job / S::dim_blocks;
        const int unit = S::unit(at, job % S::dim_blocks);
        const bool own = split == at.split;
        bytes.fetch((own ? at.stages + at.split * S::dims : S::slice(at, split)) + unit * unit_dims,
                    own ? T::pitch : S::pitch, at.lane);
    }

    __device__ void start(const Place<T>& at, int job) {
        const int split = job / S::dim_blocks;
        const SharedAddress weights =
            at.base + (split == at.split ? T::layout.weights : T::layout.inbox + split * T::weights_bytes);
        pin(outputs[job]);
        start_unit<T>(weights + S::first_head(at) * chunk_keys * 2, outputs[job], values[job % loaded], true);
    }

    __device__ void load_first(const Place<T>& at) {
        ValueBytes bytes[loaded];
#pragma unroll
        for (int job = 0; job < loaded; ++job) fetch(at, job, bytes[job]);
#pragma unroll
        for (int job = 0; job < loaded; ++job) bytes[job].to_halves(values[job]);
    }

    /// Once P of all splits is there.
    __device__ void start_all(const Place<T>& at) {
#pragma unroll
        for (int job = 0; job < loaded; ++job) start(at, job);
        constexpr int more = jobs - loaded;
        if constexpr (more > 0) {
            ValueBytes bytes[2];
            fetch(at, loaded, bytes[0]);
#pragma unroll
            for (int i = 0; i < more; ++i) {
                if (i + 1 < more) fetch(at, loaded + i + 1, bytes[(i + 1) % 2]);
                wait_for_mma<loaded - 1>();
                bytes[i % 2].to_halves(values[(loaded + i) % loaded]);
                start(at, loaded + i);
            }
        }
    }

    /// In split order. Splits without columns left garbage.
    __device__ void store(const Params& params, const Place<T>& at, std::uint32_t split_mask) {
        wait_for_mma<0>();
#pragma unroll
        for (float(&sums)[S::heads / 2] : outputs) pin(sums);
        const int first_head = S::first_head(at);
        float4 sums[S::dim_blocks][S::quads] = {};
#pragma unroll
        for (int block = 0; block < S::dim_blocks; ++block)
#pragma unroll
            for (int quad = 0; quad < S::quads; ++quad) {
                float4& sum = sums[block][quad];
#pragma unroll
                for (int split = 0; split < T::splits; ++split) {
                    if ((split_mask >> split & 1) == 0) continue;
                    const float2 weight =
                        load_shared<float2>(at.weight(split, first_head + 8 * quad + 2 * (at.lane % 4)));
                    const float* part = outputs[split * S::dim_blocks + block] + 4 * quad;
                    sum.x += weight.x * part[0];
                    sum.y += weight.y * part[1];
                    sum.z += weight.x * part[2];
                    sum.w += weight.y * part[3];
                }
            }
        const Destination<T> to(params, at);
        store_all(params, [&]<bool kPairs>() {
#pragma unroll
            for (int block = 0; block < S::dim_blocks; ++block)
#pragma unroll
                for (int quad = 0; quad < S::quads; ++quad)
                    store_quad<kPairs>(params, to, at.split * S::units_here + S::unit(at, block), first_head / 8 + quad,
                                       sums[block][quad]);
        });
    }
};

}  // namespace sparsemla::detail::latency
