// Where the sums of a piece go: to the next CTA, which goes on from them; to the output; or to memory, as the partial
// output of a split, from where the CTAs that ended the row's splits merge them.
#pragma once

#include "cuda/decode_balanced_walk.cuh"
#include "cuda/decode_latency_multiply.cuh"
#include "cuda/decode_latency_output.cuh"
#include "cuda/device/handover.cuh"

namespace sparsemla::detail::balanced {

/// A CTA's place in the workspace: its registers, thread by thread.
template <class T>
struct Handover {
    static constexpr int threads = 32 * multiplying_warps;
    static constexpr int parts = T::units_of_warp * T::quads;  ///< of four sums

    float4* outputs;  ///< [parts][threads]
    float2* running;  ///< [heads of a warp][threads], then the anchors

    __device__ Handover(const Params& params, int cta) {
        outputs = reinterpret_cast<float4*>(params.handovers + cta * params.handover_bytes) + threadIdx.x;
        running = reinterpret_cast<float2*>(params.handovers + cta * params.handover_bytes +
                                            sizeof(float4) * parts * threads) +
                  threadIdx.x;
    }
};

/// A warp's unit i of a piece whose split the next CTA ends.
template <class T>
__device__ void hand_unit_over(const Params& params, int i, const float (&sums)[T::heads / 2]) {
    const Handover<T> to(params, blockIdx.x);
#pragma unroll
    for (int j = 0; j < T::quads; ++j)
        to.outputs[(i * T::quads + j) * Handover<T>::threads] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2],
                                                                 sums[4 * j + 3]};
}

/// Lane j hands over fields[j].
template <class T>
__device__ int field_of_lane(const Place<T>& at, const Anchors<T>& anchors) {
    const int(&fields)[4] = anchors.fields;
    return at.lane == 0 ? fields[0] : at.lane == 1 ? fields[1] : at.lane == 2 ? fields[2] : fields[3];
}

/// What goes on beside the units; the helpers tell the next CTA once all warps have come here.
template <class T>
__device__ void hand_running_over(const Params& params, const Place<T>& at, const Partial<T>& partial) {
    const Handover<T> to(params, blockIdx.x);
#pragma unroll
    for (int i = 0; i < T::heads_of_warp; ++i)
        to.running[i * Handover<T>::threads] = {partial.running[i].max, partial.running[i].sum};
    if constexpr (Anchors<T>::of_scales)
        to.running[T::heads_of_warp * Handover<T>::threads] = {__int_as_float(field_of_lane(at, partial.anchors)),
                                                               __int_as_float(partial.anchors.wide)};
    __syncwarp();
    arrive_as_warp(sums_stored(at), at.lane);
}

/// The sums of the CTA before.
template <class T>
__device__ void take_over(const Params& params, const Place<T>& at, Partial<T>& partial) {
    std::uint32_t* flag = params.handed_over + blockIdx.x - 1;
    wait_for_flag(flag, 1, at.lane);
    const Handover<T> from(params, static_cast<int>(blockIdx.x) - 1);
#pragma unroll
    for (int i = 0; i < T::units_of_warp; ++i)
#pragma unroll
        for (int j = 0; j < T::quads; ++j) {
            const float4 sums = load_from_grid(from.outputs + (i * T::quads + j) * Handover<T>::threads);
            float* to = partial.outputs[i] + 4 * j;
            to[0] = sums.x;
            to[1] = sums.y;
            to[2] = sums.z;
            to[3] = sums.w;
        }
#pragma unroll
    for (int i = 0; i < T::heads_of_warp; ++i) {
        const float2 running = load_from_grid(from.running + i * Handover<T>::threads);
        partial.running[i] = {running.x, running.y};
    }
    if constexpr (Anchors<T>::of_scales) {
        const float2 anchors = load_from_grid(from.running + T::heads_of_warp * Handover<T>::threads);
#pragma unroll
        for (int j = 0; j < 4; ++j) partial.anchors.fields[j] = __shfl_sync(all_lanes, __float_as_int(anchors.x), j);
        partial.anchors.wide = __float_as_int(anchors.y);
    }
    sync_multipliers();  // all have seen the flag
    if (threadIdx.x == 0) *flag = 0;
}

/// A head's sum over the lanes' shares, added up as decode_latency's helpers do: the same bits.
__device__ inline float sum_of_shares(float share) {
#pragma unroll
    for (const int distance : {1, 2, 16, 8, 4}) share += __shfl_xor_sync(all_lanes, share, distance);
    return share;
}

/// The partial outputs and statistics of all splits of the row and tile that `at` is in.
template <class T>
struct RowPartials {
    static constexpr int items = T::units_of_warp * T::quads;  ///< of a warp: quads of units, quad_bytes each
    static constexpr int float4s_of_split = multiplying_warps * items * 32;

    float4* outputs;          ///< this lane's, [splits][warps][items][lanes]
    float2* stats;            ///< [splits][heads]
    std::uint32_t* arrivals;  ///< of splits

    __device__ RowPartials(const Params& params, const Place<T>& at) {
        const std::int64_t tile = std::int64_t{at.row} * params.tiles_of_row + at.first_head / T::heads;
        const std::int64_t split = tile * params.call.splits;
        outputs =
            reinterpret_cast<float4*>(params.partials) + split * float4s_of_split + at.warp * (items * 32) + at.lane;
        stats = reinterpret_cast<float2*>(params.stats) + split * T::heads;
        arrivals = params.arrived_splits + tile;
    }
    __device__ float4* item(int split, int i) const { return outputs + split * float4s_of_split + i * 32; }
};

/// Of a warp's items, bit i: item i of the row is merged by the CTA that ended this split. The splits that have columns
/// take turns.
template <class T>
__device__ std::uint32_t items_to_merge(const Columns& columns, int split) {
    std::uint32_t mask = 0;
    for (int i = __popc(columns.split_mask & ((1U << split) - 1)); i < RowPartials<T>::items; i += columns.num_splits())
        mask |= 1U << i;
    return mask;
}

/// Where a warp keeps the items of its own split that it will merge, this lane's part of the first one: in place of the
/// last piece's query.
template <class T>
__device__ SharedAddress own_items(const Place<T>& at) {
    static_assert(T::query_bytes >= multiplying_warps * (RowPartials<T>::items / 2) * quad_bytes);
    return at.query() + at.warp * (RowPartials<T>::items / 2) * quad_bytes + at.lane * 16;
}

/// A warp's unit i of the partial output of one of several splits: to memory, but for the items that stay.
template <class T>
__device__ void send_unit_to_memory(const Params& params, const Place<T>& at, int i, const float (&sums)[T::heads / 2],
                                    std::uint32_t staying) {
    const RowPartials<T> row(params, at);
#pragma unroll
    for (int j = 0; j < T::quads; ++j) {
        const int item = i * T::quads + j;
        const float* quad = sums + 4 * j;
        if ((staying >> item & 1) != 0)
            store_shared(own_items(at) + __popc(staying & ((1U << item) - 1)) * quad_bytes, quad[0], quad[1], quad[2],
                         quad[3]);
        else
            *row.item(at.split, item) = {quad[0], quad[1], quad[2], quad[3]};
    }
}

/// The rest of it, once the units are sent.
template <class T>
__device__ void send_stats(const Params& params, const Place<T>& at, const Partial<T>& partial) {
    const RowPartials<T> row(params, at);
#pragma unroll
    for (int i = 0; i < T::heads_of_warp; ++i) {
        const float sum = sum_of_shares(partial.running[i].sum);
        if (at.lane == 0)
            row.stats[at.split * T::heads + T::heads_of_warp * at.warp + i] = {partial.running[i].max, sum};
    }
    sync_multipliers();
    if (threadIdx.x == 0) count_arrival(row.arrivals);
}

/// The only split with columns is summed: the row's outputs.
template <class T>
__device__ void write_row(const Params& params, const Place<T>& at, const Columns& columns, Partial<T>& partial) {
    const float value_factor = value_factor_of_split<T>(params.call, columns, at.split);
#pragma unroll
    for (int i = 0; i < T::heads_of_warp; ++i) {
        const int head = T::heads_of_warp * at.warp + i;
        const float max = partial.running[i].max, sum = sum_of_shares(partial.running[i].sum);
        if (at.lane != 0) continue;
        const float sink = sink_of(params.call, at.first_head + head);
        store_shared(at.weight(at.split, head), output_weight(params.call, value_factor, sink, max, sum));
        if (at.first_head + head < params.call.heads) write_lse(params.call, at.row, at.first_head + head, max, sum);
    }
    sync_multipliers();
    store_outputs<T>(params.call, at, partial.outputs);
}

/// What the row's splits are worth, to shared memory; 8 lanes a head.
template <class T>
__device__ void weigh_splits(const Params& params, const Place<T>& at, const Columns& columns, bool writes_lse) {
    constexpr int lanes = SplitWeights::lanes;
    static_assert(T::heads_of_warp <= 32 / lanes);
    const RowPartials<T> row(params, at);
    const int head = T::heads_of_warp * at.warp + min(at.lane / lanes, T::heads_of_warp - 1), lane = at.lane % lanes;
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
                         splits.weight(j, value_factor_of_split<T>(params.call, columns, lane + 8 * j)));
    if (writes_lse && lane == 0 && at.lane / lanes < T::heads_of_warp && at.first_head + head < params.call.heads)
        write_lse(params.call, at.row, at.first_head + head, splits.max, splits.sum);
}

/// This CTA has ended one of the row's splits: once all are there, its items of the merge, in split order. `stays`:
/// those of its own split are in shared memory; the others come to where the records were. Loops instead of straight
/// code: it runs once, and instructions come from far.
template <class T>
__device__ void merge_items(const Params& params, const Place<T>& at, const Columns& columns, bool stays) {
    using Row = RowPartials<T>;
    const Row row(params, at);
    const int splits = columns.num_splits();
    const int begin = __popc(columns.split_mask & ((1U << at.split) - 1));
    wait_for_flag(row.arrivals, static_cast<std::uint32_t>(splits), at.lane);
    // As many items at a time as there is room for.
    const int room = params.call.stages * (T::stage_bytes / (multiplying_warps * quad_bytes));
    static_assert(T::stage_bytes / (multiplying_warps * quad_bytes) >= max_splits_of(1));
    const int step = room / splits * splits;
    const SharedAddress inbox = at.stages + at.warp * room * quad_bytes + at.lane * 16;
    SharedAddress own = own_items(at);
    const Destination<T> to(params.call, at);
#pragma unroll 1
    for (int first = begin; first < Row::items || first == begin; first += step) {
        const int end = min(first + step, Row::items);
        SharedAddress place = inbox;
#pragma unroll 1
        for (int i = first; i < end; i += splits)
#pragma unroll 1
            for (std::uint32_t rest = columns.split_mask; rest != 0; rest &= rest - 1) {
                const int split = __ffs(static_cast<int>(rest)) - 1;
                if (!stays || split != at.split) copy_16_async(place, row.item(split, i), false);
                place += quad_bytes;
            }
        if (first == begin) {
            weigh_splits(params, at, columns, begin == 0);
            sync_multipliers();  // also: all have seen the flag
            // Every split arrives once more; the last of them leaves the counter as it was.
            if (threadIdx.x == 0 && count_relaxed(row.arrivals) == 2U * splits - 1) *row.arrivals = 0;
        }
        wait_for_copies();
        place = inbox;
#pragma unroll 1
        for (int i = first; i < end; i += splits) {
            float4 sum = {0, 0, 0, 0};
            const SharedAddress weights = at.weight(0, i % T::quads * 8 + 2 * (at.lane % 4));
#pragma unroll 2
            for (std::uint32_t rest = columns.split_mask; rest != 0; rest &= rest - 1) {
                const int split = __ffs(static_cast<int>(rest)) - 1;
                const float4 part = load_shared<float4>(stays && split == at.split ? own : place);
                const float2 weight = load_shared<float2>(weights + split * (T::heads * 4));
                place += quad_bytes;
                sum.x += weight.x * part.x;
                sum.y += weight.y * part.y;
                sum.z += weight.x * part.z;
                sum.w += weight.y * part.w;
            }
            own += quad_bytes;
            store_all<T>(params.call, [&]<bool kPairs>() {
                store_quad<kPairs>(params.call, to, at.unit(i / T::quads), i % T::quads, sum);
            });
        }
    }
}

}  // namespace sparsemla::detail::balanced
