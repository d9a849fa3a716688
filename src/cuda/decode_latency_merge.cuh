// Transports `stores` and `bulk` of decode_latency: partial sums to the CTAs that merge them, and from there to the
// output.
#pragma once

#include "cuda/decode_latency_output.cuh"

namespace sparsemla::detail::latency {

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

/// What a warp merges at a time: a quad, kHeads = 2 heads a lane; or half of the lanes of one, a head a lane.
template <class T, int kHeads>
struct MergeJob {
    static constexpr int of_quad = 2 / kHeads;  ///< jobs

    bool exists;
    int heads_left;                ///< of the row from the lane's first one on
    std::int64_t element;          ///< of the output
    SharedAddress peers;           ///< of dcp: Place::peer of the lane's first head
    int dim;                       ///< the same: of the output
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
        if constexpr (T::dcp) {
            peers = at.peer(head);
            dim = (at.split * params.units_of_cta + unit) * unit_dims + sender / 4 * 2;
        }
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
        store_all<T>(params, [&]<bool kPairs>() {
#pragma unroll
            for (int j = 0; j < kJobs; ++j) {
                const Job job(params, at, begin + j * multiplying_warps);
#pragma unroll
                for (int head = 0; head < kHeads; ++head) {
                    const float2& pair = sums[j][head];
                    if constexpr (T::dcp)
                        push_pair(job.exists ? load_shared<std::uint64_t>(job.peers + 8 * head) : 0, job.dim, pair.x,
                                  pair.y);
                    else
                        store_pair<kPairs>(params, job.exists && head < job.heads_left,
                                           job.element + head * params.out_head_stride, pair.x, pair.y);
                }
            }
        });
    }
}

}  // namespace sparsemla::detail::latency
