// decode_wide's values: P * V by two warpgroups, of 256 dimensions each, and where the sums of a piece go: to the next
// CTA, to the output, or to memory, from where the CTAs that ended the row's splits merge them. A thread has heads g
// and g + 8 of its warp's 16 and, of each 8 dimensions, 2t and 2t + 1 (g = lane / 4, t = lane % 4).
#pragma once

#include "cuda/decode_latency_output.cuh"
#include "cuda/decode_wide_scores.cuh"
#include "cuda/device/handover.cuh"

namespace sparsemla::detail::wide {

inline constexpr int value_threads = 32 * value_warps;
inline constexpr int quads = 32;  ///< of a thread's sums: 8 dimensions of its warp's 16 heads each

/// Of dimensions 128 * half .. of the warpgroup's.
struct Sums {
    float of_half[2][64];
};

/// P of a step as what wgmma takes: 32 keys, as the sum of kParts BF16 numbers.
template <int kParts>
struct WeightFragments {
    FragmentA parts[kParts][2];

    /// Where codes have scales of groups, times those of the group: of half `half` of the warpgroup's dimensions.
    template <class T>
    __device__ WeightFragments(const WidePlace<T>& at, int buffer, int stage, int half) {
        const int thread = static_cast<int>(threadIdx.x) % score_threads;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float4 p = load_shared<float4>(at.weights_of_thread(buffer, j, thread));
            if constexpr (T::record.has_groups()) {
                const float2 scale =
                    load_shared<float2>(at.scale(stage, 2 * at.warpgroup() + half, 8 * j + 2 * (at.lane % 4)));
                p = {p.x * scale.x, p.y * scale.y, p.z * scale.x, p.w * scale.y};
            }
            set(j / 2, j % 2 * 2, p.x, p.y);
            set(j / 2, j % 2 * 2 + 1, p.z, p.w);
        }
#pragma unroll
        for (FragmentA(&fragments)[2] : parts)
#pragma unroll
            for (FragmentA& fragment : fragments) pin(fragment);
    }

   private:
    __device__ void set(int step, int word, float x, float y) {
        const std::uint32_t high = f32x2_to_bf16x2(x, y);
        parts[0][step][word] = high;
        if constexpr (kParts == 2)
            parts[1][step][word] =
                f32x2_to_bf16x2(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xFFFF0000));
    }
};

/// Starts sums (+)= P * V of one half of the warpgroup's dimensions.
template <class T>
__device__ void start_values(const WidePlace<T>& at, int stage, int half, const WeightFragments<T::parts>& weights,
                             float (&sums)[64], bool first) {
    const std::uint64_t values =
        T::KeyTile::values(at.step_tile(stage)) + T::KeyTile::values_from(256 * at.warpgroup() + 128 * half, 0);
    fence_mma();
#pragma unroll
    for (int part = 0; part < T::parts; ++part)
#pragma unroll
        for (int step = 0; step < 2; ++step)
            mma_async_values(sums, weights.parts[part][step], values + T::KeyTile::values_from(0, 16 * step),
                             !first || part + step > 0);
    commit_mma();
}

/// Older sums, where some maximum rose.
__device__ inline void rescale(Sums& sums, const float2& keep) {
    if (!__any_sync(all_lanes, keep.x != 1 || keep.y != 1)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 64; ++i) sums.of_half[half][i] *= i % 4 < 2 ? keep.x : keep.y;
}

/// P * V of a step, complete when it returns.
template <class T>
__device__ void add_step(const WidePlace<T>& at, const Turn& stage, Turn& buffer, Sums& sums, bool first) {
    using Weights = WeightFragments<T::parts>;
    const auto leave_weights = [&] {
        __syncwarp();
        arrive_as_warp(at.weights_empty(buffer.number), at.lane);
    };
    wait_mbarrier(at.weights_full(buffer.number), buffer.parity);
    wait_mbarrier(at.full(stage.number), stage.parity);
    __syncwarp();
    const int thread = static_cast<int>(threadIdx.x) % score_threads;
    if (!first) rescale(sums, load_shared<float2>(at.keep_of_thread(buffer.number, thread)));
    const Weights lower(at, buffer.number, stage.number, 0);
    if constexpr (!T::record.has_groups()) leave_weights();
    start_values(at, stage.number, 0, lower, sums.of_half[0], first);
    if constexpr (T::record.has_groups()) {
        if constexpr (T::parts == 2) wait_for_mma<0>();  // registers are not enough for both
        const Weights upper(at, buffer.number, stage.number, 1);
        leave_weights();
        start_values(at, stage.number, 1, upper, sums.of_half[1], first);
    } else {
        start_values(at, stage.number, 1, lower, sums.of_half[1], first);
    }
    wait_for_mma<0>();
    pin(sums.of_half[0]);
    pin(sums.of_half[1]);
    buffer.advance(weight_buffers);
    arrive_as_warp(at.empty(stage.number), at.lane);
}

/// Of a thread's sums, 16 bytes: dims 2t, 2t + 1 of 8, of heads g and g + 8.
__device__ inline float4 quad_of(const Sums& sums, int i) {
    const float* quad = sums.of_half[i / 16] + i % 16 * 4;
    return {quad[0], quad[1], quad[2], quad[3]};
}

/// What this CTA's threads hand over: [quads][threads].
__device__ inline float4* handed_sums(const Params& params, int cta) {
    return reinterpret_cast<float4*>(params.handovers + cta * params.handover_bytes) + threadIdx.x;
}

/// The sums of the CTA before.
template <class T>
__device__ void take_over(const Params& params, const WidePlace<T>& at, Sums& sums) {
    std::uint32_t* flag = params.handed_over + blockIdx.x - 1;
    wait_for_flag(flag, 1, at.lane);
    const float4* from = handed_sums(params, static_cast<int>(blockIdx.x) - 1);
#pragma unroll
    for (int i = 0; i < quads; ++i) {
        const float4 quad = load_from_grid(from + i * value_threads);
        float* to = sums.of_half[i / 16] + i % 16 * 4;
        to[0] = quad.x;
        to[1] = quad.y;
        to[2] = quad.z;
        to[3] = quad.w;
    }
    sync_multipliers();  // all have seen the flag
    leave_flag(flag, threadIdx.x == 0);
}

/// The partial outputs and statistics of all splits of the row and tile that `at` is in.
template <class T>
struct WidePartials {
    static constexpr int float4s_of_split = value_threads * quads;

    float4* outputs;          ///< this thread's, [splits][quads][threads]
    const float2* stats;      ///< [splits][heads]
    std::uint32_t* arrivals;  ///< of splits

    __device__ WidePartials(const Params& params, const WidePlace<T>& at) {
        const std::int64_t tile = std::int64_t{at.row} * params.tiles_of_row + at.first_head / T::heads;
        outputs =
            reinterpret_cast<float4*>(params.partials) + tile * params.call.splits * float4s_of_split + threadIdx.x;
        stats = reinterpret_cast<const float2*>(params.stats) + tile * params.call.splits * T::heads;
        arrivals = params.arrived_splits + tile;
    }
    __device__ float4* quad(int split, int i) const { return outputs + split * float4s_of_split + i * value_threads; }
};

/// Where a thread's outputs go.
template <class T>
struct WideDestination {
    std::int64_t element;  ///< of head g, dim 2t of the warpgroup's first
    int heads_left;        ///< of the row from head g on

    __device__ WideDestination(const latency::Params& params, const WidePlace<T>& at) {
        const int head = at.first_head + 16 * at.warp_of_group() + at.lane / 4;
        element =
            at.row * params.out_row_stride + head * params.out_head_stride + 256 * at.warpgroup() + 2 * (at.lane % 4);
        heads_left = params.heads - head;
    }
};

template <bool kPairs, class T>
__device__ void store_quad(const latency::Params& params, const WideDestination<T>& to, int i, const float4& quad) {
    const std::int64_t element = to.element + 8 * i;
    store_pair<kPairs>(params, to.heads_left > 0, element, quad.x, quad.y);
    store_pair<kPairs>(params, to.heads_left > 8, element + 8 * params.out_head_stride, quad.z, quad.w);
}

/// What a split's sums are worth, of this thread's two heads.
template <class T>
__device__ float2 weights_of_heads(const WidePlace<T>& at, int split) {
    const int head = 16 * at.warp_of_group() + at.lane / 4;
    return {load_shared<float>(at.weight(split, head)), load_shared<float>(at.weight(split, head + 8))};
}

/// The only split with columns is summed: the row's outputs.
template <class T>
__device__ void write_row(const latency::Params& params, const WidePlace<T>& at, const Sums& sums) {
    const float2 weight = weights_of_heads(at, at.split);
    const WideDestination<T> to(params, at);
    store_all(params, [&]<bool kPairs>() {
#pragma unroll
        for (int i = 0; i < quads; ++i) {
            const float4 quad = quad_of(sums, i);
            wide::store_quad<kPairs>(params, to, i,
                                     {quad.x * weight.x, quad.y * weight.x, quad.z * weight.y, quad.w * weight.y});
        }
    });
}

/// What becomes of a piece's sums. Afterwards the row's partial outputs may have to be merged.
template <class T>
__device__ void end_values(const Params& params, const WidePlace<T>& at, const Columns& columns, const Piece& piece,
                           const Sums& sums, Turn& end) {
    const bool hands_over = !piece.ends_split(), writes = !hands_over && columns.num_splits() == 1;
    const WidePartials<T> row(params, at);
    if (!writes) {
        float4* const to = hands_over ? handed_sums(params, static_cast<int>(blockIdx.x)) : row.quad(piece.split, 0);
#pragma unroll
        for (int i = 0; i < quads; ++i) to[i * value_threads] = quad_of(sums, i);
    }
    wait_mbarrier(at.end_full(), end.parity);
    __syncwarp();
    if (writes) {
        write_row(params.call, at, sums);
    } else {
        sync_multipliers();  // all sums are stored
        if (threadIdx.x == 0) {
            if (hands_over)
                raise_flag(params.handed_over + blockIdx.x);
            else
                count_arrival(row.arrivals);
        }
    }
    __syncwarp();
    arrive_as_warp(at.end_empty(), at.lane);
    end.advance(1);
}

/// What the row's splits are worth, to shared memory; 8 lanes a head.
template <class T>
__device__ void weigh_splits(const Params& params, const WidePlace<T>& at, const Columns& columns, bool writes_lse) {
    constexpr int lanes = SplitWeights::lanes, together = value_threads / lanes;
    const WidePartials<T> row(params, at);
    const int lane = at.lane % lanes;
    const float value_factor = ValueScales(params.call).largest * params.call.inverse_p_scale;
#pragma unroll 1
    for (int head = static_cast<int>(threadIdx.x) / lanes; head < T::heads; head += together) {
        float2 stats[2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
            stats[j] = columns.has_split(lane + 8 * j) ? load_from_grid(row.stats + (lane + 8 * j) * T::heads + head)
                                                       : float2{-INFINITY, 0};
        const SplitWeights splits(params.call, stats, sink_of(params.call, at.first_head + head));
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (columns.has_split(lane + 8 * j))
                store_shared(at.weight(lane + 8 * j, head), splits.weight(j, value_factor));
        if (writes_lse && lane == 0 && at.first_head + head < params.call.heads)
            write_lse(params.call, at.row, at.first_head + head, splits.max, splits.sum);
    }
}

/// This CTA has ended one of the row's splits: once all are there, its share of the merge, in split order.
template <class T>
__device__ void merge_row(const Params& params, const WidePlace<T>& at, const Columns& columns) {
    const WidePartials<T> row(params, at);
    const int splits = columns.num_splits();
    const int begin = __popc(columns.split_mask & ((1U << at.split) - 1));
    wait_for_flag(row.arrivals, static_cast<std::uint32_t>(splits), at.lane);
    weigh_splits(params, at, columns, begin == 0);
    sync_multipliers();  // also: all have seen the flag
    // Every split arrives once more; the last of them leaves the counter as it was.
    if (threadIdx.x == 0 && count_relaxed(row.arrivals) == 2U * splits - 1) *row.arrivals = 0;
    const WideDestination<T> to(params.call, at);
#pragma unroll 1
    for (int i = begin; i < quads; i += splits) {
        constexpr int together = 8;
        float4 sum = {0, 0, 0, 0};
#pragma unroll 1
        for (int first = 0; first < max_splits; first += together) {
            if (columns.split_mask >> first == 0) break;
            float4 parts[together];
#pragma unroll
            for (int j = 0; j < together; ++j)
                if (columns.has_split(first + j)) parts[j] = load_from_grid(row.quad(first + j, i));
#pragma unroll
            for (int j = 0; j < together; ++j) {
                if (!columns.has_split(first + j)) continue;
                const float2 weight = weights_of_heads(at, first + j);
                sum.x += weight.x * parts[j].x;
                sum.y += weight.x * parts[j].y;
                sum.z += weight.y * parts[j].z;
                sum.w += weight.y * parts[j].w;
            }
        }
        store_all(params.call, [&]<bool kPairs>() { wide::store_quad<kPairs>(params.call, to, i, sum); });
    }
}

/// The merges of all rows of which this CTA has ended one of several splits.
template <class T>
__device__ void merge_rows(const Params& params, WidePlace<T>& at, const Share& share) {
    Walk<T> walk(params, share);
    Piece piece;
    bool is_first = true;
    while (walk.next(piece)) {
        if (!piece.ends_split()) continue;
        const Columns columns = enter<T>(params, at, piece);
        if (columns.num_splits() == 1) continue;
        if (!is_first) sync_multipliers();  // the weights of the merge before are not read any more
        is_first = false;
        merge_row(params, at, columns);
    }
}

/// What the warps of the values do.
template <class T>
__device__ void sum_values(const Params& params, WidePlace<T>& at, const WideShared& shared) {
    Turn stage, buffer, pieces, end;
    Sums sums;
    bool merges = false;
    for (int left = shared.share.chunks; left > 0;) {
        const Piece piece = take_piece(at, shared, pieces);
        left -= piece.end - piece.begin;
        const Columns columns = enter<T>(params, at, piece);
        bool first = !piece.goes_on();
        if (!first) take_over(params, at, sums);
        StepOfPiece step(params, columns, piece);
        do {
            add_step(at, stage, buffer, sums, first);
            first = false;
            stage.advance(at.stages_of_keys);
        } while (step.advance(params, columns, piece));
        end_values(params, at, columns, piece, sums, end);
        merges = merges || (piece.ends_split() && columns.num_splits() > 1);
    }
    if (merges) {
        sync_multipliers();  // weights of rows that were written are not read any more
        merge_rows(params, at, shared.share);
    }
}

}  // namespace sparsemla::detail::wide
