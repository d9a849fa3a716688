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
    float2* running;  ///< [heads of a warp][threads]

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

/// What goes on beside the units, once these are handed over.
template <class T>
__device__ void hand_over(const Params& params, const Partial<T>& partial) {
    const Handover<T> to(params, blockIdx.x);
#pragma unroll
    for (int i = 0; i < T::heads_of_warp; ++i)
        to.running[i * Handover<T>::threads] = {partial.running[i].max, partial.running[i].sum};
    sync_multipliers();
    if (threadIdx.x == 0) set_flag(params.handed_over + blockIdx.x, 1);
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
            const float4 sums = load_from_peers(from.outputs + (i * T::quads + j) * Handover<T>::threads);
            float* to = partial.outputs[i] + 4 * j;
            to[0] = sums.x;
            to[1] = sums.y;
            to[2] = sums.z;
            to[3] = sums.w;
        }
#pragma unroll
    for (int i = 0; i < T::heads_of_warp; ++i) {
        const float2 running = load_from_peers(from.running + i * Handover<T>::threads);
        partial.running[i] = {running.x, running.y};
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
    float* outputs;           ///< [splits][heads][512]
    float2* stats;            ///< [splits][heads]
    std::uint32_t* arrivals;  ///< of splits

    __device__ RowPartials(const Params& params, const Place<T>& at) {
        const std::int64_t tile = std::int64_t{at.row} * params.tiles + at.first_head / T::heads;
        const std::int64_t head = tile * params.call.splits * T::heads;
        outputs = params.partials + head * 512;
        stats = reinterpret_cast<float2*>(params.stats) + head;
        arrivals = params.arrived_splits + tile;
    }
};

/// A unit of the partial output of one of several splits.
template <class T>
__device__ void send_unit_to_memory(const Params& params, const Place<T>& at, int unit,
                                    const float (&sums)[T::heads / 2]) {
    const RowPartials<T> row(params, at);
    float* outputs =
        row.outputs + (at.split * T::heads + 2 * (at.lane % 4)) * 512 + unit * unit_dims + 2 * (at.lane / 4);
#pragma unroll
    for (int j = 0; j < T::quads; ++j) {
        auto* to = reinterpret_cast<float2*>(outputs + 8 * j * 512);
        to[0] = {sums[4 * j], sums[4 * j + 2]};
        to[512 / 2] = {sums[4 * j + 1], sums[4 * j + 3]};
    }
}

/// The rest of it, once its units are sent.
template <class T>
__device__ void send_partial(const Params& params, const Place<T>& at, const Partial<T>& partial) {
    const RowPartials<T> row(params, at);
#pragma unroll
    for (int i = 0; i < T::heads_of_warp; ++i) {
        const float sum = sum_of_shares(partial.running[i].sum);
        if (at.lane == 0)
            row.stats[at.split * T::heads + T::heads_of_warp * at.warp + i] = {partial.running[i].max, sum};
    }
    sync_multipliers();
    if (threadIdx.x == 0) add_to_flag(row.arrivals);
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
        store_shared(at.weight(at.split, head), value_factor * output_factor(params.call, sink, max, sum));
        if (at.first_head + head < params.call.heads) write_lse(params.call, at.row, at.first_head + head, max, sum);
    }
    sync_multipliers();
    store_outputs<T>(params.call, at, partial.outputs);
}

/// What a warp merges at a time: of one head, kBlocks blocks of 64 dimensions over all splits, at most kSplits; two
/// dimensions of each a lane. All loads are under way together.
template <class T, int kBlocks, int kSplits>
__device__ void merge_blocks(const Params& params, const Place<T>& at, const Columns& columns, int head, int block) {
    const RowPartials<T> row(params, at);
    const int lane = at.lane % SplitWeights::lanes;
    float2 stats[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
        stats[j] = columns.has_split(lane + 8 * j) ? load_from_peers(row.stats + (lane + 8 * j) * T::heads + head)
                                                   : float2{-INFINITY, 0};
    const int dim = 64 * block + 2 * at.lane;
    const auto* outputs = reinterpret_cast<const float2*>(row.outputs + head * 512 + dim);
    float2 parts[kSplits][kBlocks] = {};
#pragma unroll
    for (int split = 0; split < kSplits; ++split)
#pragma unroll
        for (int j = 0; j < kBlocks; ++j)
            if (columns.has_split(split)) parts[split][j] = load_from_peers(outputs + split * T::heads * 256 + 32 * j);
    const SplitWeights splits(params.call, stats, sink_of(params.call, at.first_head + head));
    float weights[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
        weights[j] = splits.weight(j, value_factor_of_split<T>(params.call, columns, lane + 8 * j));
    float2 sums[kBlocks] = {};
#pragma unroll
    for (int split = 0; split < kSplits; ++split) {
        const float weight = __shfl_sync(all_lanes, weights[split / 8], split % 8);
        if (!columns.has_split(split)) continue;
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
            sums[j].x += weight * parts[split][j].x;
            sums[j].y += weight * parts[split][j].y;
        }
    }
    const std::int64_t element =
        at.row * params.call.out_row_stride + (at.first_head + head) * params.call.out_head_stride + dim;
    store_all(params.call, [&]<bool kPairs>() {
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) store_pair<kPairs>(params.call, true, element + 64 * j, sums[j].x, sums[j].y);
    });
    if (at.lane == 0 && block == 0) write_lse(params.call, at.row, at.first_head + head, splits.max, splits.sum);
}

/// This CTA has ended one of the row's splits: once all are there, its share of the heads.
template <class T>
__device__ void merge_share(const Params& params, const Place<T>& at, const Columns& columns) {
    const RowPartials<T> row(params, at);
    const auto count = static_cast<std::uint32_t>(columns.num_splits());
    const int shares = columns.num_splits();
    const int share = __popc(columns.split_mask & ((1U << at.split) - 1));
    const int heads = min(T::heads, params.call.heads - at.first_head);
    wait_for_flag(row.arrivals, count, at.lane);
    const auto merge = [&]<int kBlocks, int kSplits>() {
        constexpr int jobs = 512 / 64 / kBlocks;  // of a head
        for (int job = share + at.warp * shares; job < heads * jobs; job += multiplying_warps * shares)
            merge_blocks<T, kBlocks, kSplits>(params, at, columns, job / jobs, job % jobs * kBlocks);
    };
    if (params.call.splits <= 4)
        merge.template operator()<8, 4>();
    else if (params.call.splits <= 8)
        merge.template operator()<4, 8>();
    else
        merge.template operator()<2, 16>();
    sync_multipliers();  // all have seen the flag
    // Every split arrives once more; the last of them leaves the counter as it was.
    if (threadIdx.x == 0 && add_to_flag(row.arrivals) == 2 * count - 1) *row.arrivals = 0;
}

}  // namespace sparsemla::detail::balanced
