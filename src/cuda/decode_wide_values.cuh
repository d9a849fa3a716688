// decode_wide's values: P * V by two warpgroups, of 256 dimensions each, and where the sums of a piece go: to the next
// CTA, to the output, or to memory, from where the CTAs that ended the row's splits merge them. A thread has heads g
// and g + 8 of its warp's 16 and, of each 8 dimensions, 2t and 2t + 1 (g = lane / 4, t = lane % 4).
#pragma once

#include "cuda/decode_wide_output.cuh"

namespace sparsemla::detail::wide {

/// Powers of two that sums of the warpgroup's two groups of 128 dimensions are in units of, as exponent fields of
/// float32: the smallest ones above all scales that the split has met, as of decode_latency's Anchors.
struct GroupAnchors {
    int fields[2] = {1, 1};

    /// What the group's scales of a step are to be multiplied by; `older` falls where the anchor rises.
    template <class T>
    __device__ float raise(const WidePlace<T>& at, int info, int half, float& older) {
        const float scale = load_shared<float>(at.scales_of_step(info, 2 * at.warpgroup() + half) + at.lane * 4);
        const int largest = __reduce_max_sync(all_lanes, exponent_field(__float_as_uint(scale))) + 1;
        int& field = fields[half];
        older = power_of_two(127 + min(field - largest, 0));
        field = max(field, largest);
        return power_of_two(254 - field);
    }

    /// Complete sums, to units of 1 and without p_scale, with which they might be too large.
    __device__ void finish(float inverse_p_scale, int half, float (&sums)[32]) const {
        const float factor = power_of_two(fields[half] - 1), rest = 2 * inverse_p_scale;
#pragma unroll
        for (float& sum : sums) sum = sum * rest * factor;
    }
};

/// P of a step as what wgmma takes: 32 keys, FP16, or as the sum of kParts BF16 numbers.
template <Half kHalf, int kParts>
struct WeightFragments {
    FragmentA parts[kParts][2];

    /// `scales`: of keys 8j + 2t and 8j + 2t + 1 of the step.
    __device__ WeightFragments(const float4 (&p)[4], const KeyScales& keys) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            set(j / 2, j % 2 * 2, p[j].x * keys.scales[j].x, p[j].y * keys.scales[j].y);
            set(j / 2, j % 2 * 2 + 1, p[j].z * keys.scales[j].x, p[j].w * keys.scales[j].y);
        }
        pin_all();
    }
    __device__ explicit WeightFragments(const float4 (&p)[4]) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            set(j / 2, j % 2 * 2, p[j].x, p[j].y);
            set(j / 2, j % 2 * 2 + 1, p[j].z, p[j].w);
        }
        pin_all();
    }

   private:
    __device__ void pin_all() {
#pragma unroll
        for (FragmentA(&fragments)[2] : parts)
#pragma unroll
            for (FragmentA& fragment : fragments) pin(fragment);
    }
    __device__ void set(int step, int word, float x, float y) {
        if constexpr (kHalf == Half::f16) {
            parts[0][step][word] = f32x2_to_f16x2(x, y);
        } else {
            const std::uint32_t high = f32x2_to_bf16x2(x, y);
            parts[0][step][word] = high;
            if constexpr (kParts == 2)
                parts[1][step][word] =
                    f32x2_to_bf16x2(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xFFFF0000));
        }
    }
};

template <class T>
using Weights = WeightFragments<T::half, T::parts>;

/// Starts sums (+)= P * V of one half of the warpgroup's dimensions. Products of 64 dimensions: those of the scores,
/// which are small, take turns with these.
template <class T>
__device__ void start_values(const WidePlace<T>& at, int stage, int half, const Weights<T>& weights, Sums& sums,
                             bool first) {
    const std::uint64_t values =
        T::KeyTile::values(at.step_tile(stage)) + T::KeyTile::values_from(256 * at.warpgroup() + 128 * half, 0);
    fence_mma();
#pragma unroll
    for (int part = 0; part < T::parts; ++part)
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int block = 0; block < 2; ++block)
                mma_async_values<T::half>(sums.of_block[2 * half + block], weights.parts[part][step],
                                          values + T::KeyTile::values_from(64 * block, 16 * step),
                                          !first || part + step > 0);
    commit_mma();
}

/// Older sums, where some maximum or anchor rose.
__device__ inline void rescale(Sums& sums, int half, const float2& keep) {
    if (!__any_sync(all_lanes, keep.x != 1 || keep.y != 1)) return;
#pragma unroll
    for (int block = 0; block < 2; ++block)
#pragma unroll
        for (int i = 0; i < 32; ++i) sums.of_block[2 * half + block][i] *= i % 4 < 2 ? keep.x : keep.y;
}

/// P * V of a step, complete when it returns; the step's flags.
template <class T>
__device__ std::uint32_t add_step(const WidePlace<T>& at, const Turn& stage, Turn& weights_turn, GroupAnchors& anchors,
                                  Sums& sums, bool first) {
    wait_mbarrier(at.full(stage.number), stage.parity);
    __syncwarp();
    const int info = info_of(stage);
    // What needs no P comes before it.
    const std::uint32_t flags = load_shared<std::uint32_t>(at.flags_of_step(info));
    float older[2] = {1, 1}, factors[2];
    if constexpr (T::record.has_groups())
#pragma unroll
        for (int half = 0; half < 2; ++half) factors[half] = anchors.raise(at, info, half, older[half]);
    const auto keys_of = [&](int half) {
        KeyScales keys(at, info, 2 * at.warpgroup() + half);
#pragma unroll
        for (float2& scale : keys.scales) scale = {scale.x * factors[half], scale.y * factors[half]};
        return keys;
    };
    [[maybe_unused]] const auto lower_keys = [&] {
        if constexpr (T::record.has_groups())
            return keys_of(0);
        else
            return 0;
    }();
    wait_mbarrier(at.weights_full(), weights_turn.parity);
    __syncwarp();
    const int thread = 32 * at.warp_of_group() + at.lane;
    const float2 keep = load_shared<float2>(at.keep_of_thread(thread));
    float4 p[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) p[j] = load_shared<float4>(at.weights_of_thread(j, thread));
    __syncwarp();
    arrive_as_warp(at.weights_empty(), at.lane);
    weights_turn.advance(1);
    if (!first)
#pragma unroll
        for (int half = 0; half < 2; ++half) rescale(sums, half, {keep.x * older[half], keep.y * older[half]});
    if constexpr (T::record.has_groups()) {
        const Weights<T> lower(p, lower_keys);
        start_values(at, stage.number, 0, lower, sums, first);
        const Weights<T> upper(p, keys_of(1));
        start_values(at, stage.number, 1, upper, sums, first);
        wait_for_mma<0>();
    } else {
        const Weights<T> weights(p);
#pragma unroll
        for (int half = 0; half < 2; ++half) start_values(at, stage.number, half, weights, sums, first);
        wait_for_mma<0>();
    }
    for (float(&block)[32] : sums.of_block) pin(block);
    arrive_as_warp(at.empty(stage.number), at.lane);
    return flags;
}

/// What this CTA's threads hand over: [quads][threads].
__device__ inline float4* handed_sums(const Params& params, int cta) {
    return reinterpret_cast<float4*>(params.handovers + cta * params.handover_bytes) + threadIdx.x;
}

/// Behind the running sums, of each warpgroup.
__device__ inline float2* handed_anchors(const Params& params, int cta, int warpgroup) {
    return reinterpret_cast<float2*>(handed_running(params, cta, score_threads)) + warpgroup;
}

/// The sums of the CTA before.
template <class T>
__device__ void take_over(const Params& params, const WidePlace<T>& at, GroupAnchors& anchors, Sums& sums) {
    std::uint32_t* flag = params.handed_over + blockIdx.x - 1;
    wait_for_flag(flag, 1, at.lane);
    const float4* from = handed_sums(params, static_cast<int>(blockIdx.x) - 1);
#pragma unroll
    for (int i = 0; i < quads; ++i) {
        const float4 quad = load_from_grid(from + i * value_threads);
        float* to = sums.of_block[i / 8] + i % 8 * 4;
        to[0] = quad.x;
        to[1] = quad.y;
        to[2] = quad.z;
        to[3] = quad.w;
    }
    if constexpr (T::record.has_groups()) {
        const float2 fields = load_from_grid(handed_anchors(params, static_cast<int>(blockIdx.x) - 1, at.warpgroup()));
        anchors = {__float_as_int(fields.x), __float_as_int(fields.y)};
    }
    sync_multipliers();  // all have seen the flag
    leave_flag(flag, threadIdx.x == 0);
}

/// What becomes of a piece's sums. Afterwards the row's partial outputs may have to be merged.
template <class T>
__device__ void end_values(const Params& params, const WidePlace<T>& at, const Columns& columns, const Piece& piece,
                           const GroupAnchors& anchors, Sums& sums, Turn& end) {
    const bool hands_over = !piece.ends_split(), writes = !hands_over && columns.num_splits() == 1;
    const WidePartials<T> row(params, at);
    if constexpr (T::record.has_groups()) {
        if (hands_over && threadIdx.x % 128 == 0)
            *handed_anchors(params, static_cast<int>(blockIdx.x), at.warpgroup()) = {__int_as_float(anchors.fields[0]),
                                                                                     __int_as_float(anchors.fields[1])};
        if (!hands_over)
#pragma unroll
            for (int block = 0; block < 4; ++block)
                anchors.finish(params.call.inverse_p_scale, block / 2, sums.of_block[block]);
    }
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

/// What the warps of the values do.
template <class T>
__device__ void sum_values(const Params& params, WidePlace<T>& at, const WideShared& shared) {
    if constexpr (!T::record.has_groups()) keep_lane(at);
    Turn stage, weights, pieces, end;
    Sums sums;
    help_with_first_query(params, at, shared.share);
    for (std::uint32_t flags = shared.share.chunks > 0 ? 0 : last_of_cta; (flags & last_of_cta) == 0;) {
        Piece piece = wait_for_piece(at, shared, pieces);
        bool first = !piece.goes_on();
        GroupAnchors anchors;
        if (!first) take_over(params, at, anchors, sums);
        do {
            flags = add_step(at, stage, weights, anchors, sums, first);
            first = false;
            stage.advance(at.stages_of_keys);
        } while ((flags & last_of_piece) == 0);
        piece = shared.pieces[pieces.number];  // no registers meanwhile
        const Columns columns = enter<T>(params, at, piece);
        end_values(params, at, columns, piece, anchors, sums, end);
        release_piece(at, pieces);
    }
    if (params.call.splits > 1) {
        sync_multipliers();  // weights of rows that were written are not read any more
        merge_rows(params, at, shared.share);
    }
}

}  // namespace sparsemla::detail::wide
