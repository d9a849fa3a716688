// What decode_latency does with a chunk of records in shared memory: scores, softmax, values. Lane names: g = lane /
// 4, t = lane % 4.
#pragma once

#include "cuda/decode_latency_forms.cuh"
#include "cuda/device/reduce.cuh"

namespace sparsemla::detail::latency {

/// kSteps K steps of a warp's 16 keys: the bytes of A. Fetched some time before they become halves, as ldmatrix takes
/// 100 to 200 cycles where all warps come at once.
template <int kSteps>
struct KeyBytes {
    std::uint32_t pairs[kSteps / 2][4];  ///< of two steps
    std::uint32_t last[2];               ///< of the last step of an odd number

    /// From byte `row` on.
    __device__ void fetch(SharedAddress row) {
#pragma unroll
        for (int i = 0; i < kSteps / 2; ++i) load_matrices(pairs[i], row + i * 32);
        if constexpr (kSteps % 2 == 1) load_matrices(last, row + (kSteps - 1) * 16);
    }

    template <Half kHalf>
    __device__ void to_halves(FragmentA (&keys)[kSteps]) const {
        const auto take = [](FragmentA& fragment, std::uint32_t upper_rows, std::uint32_t lower_rows) {
            const TwoPairs upper = kHalf == Half::f16 ? e4m3x4_to_f16(upper_rows) : e4m3x4_to_bf16(upper_rows);
            const TwoPairs lower = kHalf == Half::f16 ? e4m3x4_to_f16(lower_rows) : e4m3x4_to_bf16(lower_rows);
            fragment[0] = upper.low;
            fragment[1] = lower.low;
            fragment[2] = upper.high;
            fragment[3] = lower.high;
        };
#pragma unroll
        for (int i = 0; i < kSteps / 2; ++i) {
            take(keys[2 * i], pairs[i][0], pairs[i][1]);
            take(keys[2 * i + 1], pairs[i][2], pairs[i][3]);
        }
        if constexpr (kSteps % 2 == 1) take(keys[kSteps - 1], last[0], last[1]);
#pragma unroll
        for (FragmentA& fragment : keys) pin(fragment);
    }
};

template <class T, int kSteps>
__device__ void start_scores(float (&scores)[T::heads / 2], const FragmentA (&keys)[kSteps], std::uint64_t query,
                             bool first) {
    fence_mma();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        mma_async<T::query_half>(scores, keys[step], query + step * (T::query_step_bytes / 16), !first || step > 0);
    commit_mma();
}

/// K * Q^T of a chunk: this warpgroup's half of the dimensions, 64 keys by T::heads heads. Keys become halves while the
/// tensor cores work on those before them; `meanwhile` runs beside the last ones. Products that were started before
/// this call have ended when `meanwhile` runs: start_values relies on it.
template <class T, class Meanwhile>
__device__ void compute_plain_scores(const Place<T>& at, int stage, float (&scores)[T::heads / 2],
                                     const Meanwhile& meanwhile) {
    // Of a group: the fragments of two groups are in registers.
    constexpr bool few_registers = T::query_half == Half::bf16 && T::two_sources;
    constexpr int steps = T::steps % 6 != 0 ? 4 : few_registers ? 3 : 6;
    constexpr int groups = T::steps / steps;
    static_assert(groups * steps == T::steps);
    const SharedAddress row = at.stages + stage * T::stage_bytes + (16 * at.warp_of_group() + at.lane % 16) * T::pitch +
                              at.warpgroup() * T::steps * 16 + at.lane / 16 * 16;
    const std::uint64_t query = T::QueryTile::descriptor(at.query() + at.warpgroup() * T::steps * T::query_step_bytes);
    KeyBytes<steps> bytes[2];
    FragmentA keys[2][steps];
    bytes[0].fetch(row);
#pragma unroll
    for (int group = 0; group < groups; ++group) {
        if (group + 1 < groups) bytes[(group + 1) % 2].fetch(row + (group + 1) * steps * 16);
        if (group >= 2) wait_for_mma<1>();
        bytes[group % 2].template to_halves<T::query_half>(keys[group % 2]);
        start_scores<T>(scores, keys[group % 2], query + group * steps * (T::query_step_bytes / 16), group == 0);
    }
    wait_for_mma<1>();
    meanwhile();
    wait_for_mma<0>();
    pin(scores);
}

/// The same for every form.
template <class T, class Meanwhile>
__device__ void compute_scores(const Place<T>& at, int stage, float (&scores)[T::heads / 2],
                               const Meanwhile& meanwhile) {
    if constexpr (!T::record.is_plain()) {
        FormScores<T>(at, stage, scores).compute(meanwhile);
    } else {
        compute_plain_scores(at, stage, scores, meanwhile);
    }
}

/// This warpgroup's part of the scores to shared memory, [heads][keys].
template <class T>
__device__ void store_scores(const Place<T>& at, const float (&scores)[T::heads / 2]) {
    const SharedAddress to = at.score(at.warpgroup(), 2 * (at.lane % 4), 16 * at.warp_of_group() + at.lane / 4);
#pragma unroll
    for (int j = 0; j < T::quads; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            store_shared(to + ((8 * j + i % 2) * score_pitch + i / 2 * 8) * 4, scores[4 * j + i]);
}

/// A head's running maximum (log2, every lane) and this lane's share of its sum.
struct Running {
    float max = -INFINITY;
    float sum = 0;
};

/// A lane's two keys of a chunk: P of one head to shared memory. Where codes have scales of groups, once for each
/// group, times its scales.
template <class T>
struct WeightStore {
    // Of groups; set by find_scales, and not looked at where there are none.
    float scales[2][4];  ///< of a key's groups, in units of their anchors
    float older[4];      ///< what older sums of the groups are worth

    /// Of a stage's groups, which raise the anchors. Needs the records alone.
    __device__ void find_scales(const Place<T>& at, int stage, Anchors<T>& anchors) {
        if constexpr (T::record.has_groups()) {
#pragma unroll
            for (int key = 0; key < 2; ++key) {
                const float4 of_key =
                    load_shared<float4>(at.record(stage, 2 * at.lane + key) + T::record.scales_offset);
                scales[key][0] = of_key.x;
                scales[key][1] = of_key.y;
                scales[key][2] = of_key.z;
                scales[key][3] = of_key.w;
            }
#pragma unroll
            for (int group = 0; group < 4; ++group) {
                const int largest = max(exponent_field(__float_as_uint(scales[0][group])),
                                        exponent_field(__float_as_uint(scales[1][group])));
                older[group] = Anchors<T>::raise(anchors.fields[group], __reduce_max_sync(all_lanes, largest));
                const float factor = Anchors<T>::of_scale(anchors.fields[group]);
                scales[0][group] *= factor;
                scales[1][group] *= factor;
            }
        }
    }

    __device__ void store(const Params& params, const Place<T>& at, int head, const float2& p) const {
        const SharedAddress to = at.weights() + T::WeightTile::byte(head, at.lane / 4) + at.lane % 4 * 4;
        if constexpr (T::record.has_groups()) {
#pragma unroll
            for (int group = 0; group < 4; ++group)
                store_shared(to + group * T::weights_bytes,
                             f32x2_to_f16x2(p.x * scales[0][group], p.y * scales[1][group]));
        } else if constexpr (T::value_half == Half::bf16) {
            store_shared(to, f32x2_to_bf16x2(p.x, p.y));
        } else {
            store_shared(to, params.p_is_e4m3 ? f32x2_to_e4m3_as_f16x2(p.x, p.y) : f32x2_to_f16x2(p.x, p.y));
        }
    }
};

/// Softmax of a chunk for heads heads_of_warp * warp .. by one warp, two keys a lane: scores to P, and what older sums
/// are worth now.
template <class T>
__device__ void softmax(const Params& params, const Place<T>& at, float score_factor, float p_scale, int stage,
                        const WeightStore<T>& weights, Running (&running)[T::heads_of_warp]) {
    const int first_head = T::heads_of_warp * at.warp;
    const std::uint32_t present = load_shared_16(at.present(stage) + 2 * at.lane);
    float2 score[T::heads_of_warp];
#pragma unroll
    for (int i = 0; i < T::heads_of_warp; ++i) {
        const float2 part = load_shared<float2>(at.score(0, first_head + i, 2 * at.lane));
        const float2 rest = load_shared<float2>(at.score(1, first_head + i, 2 * at.lane));
        score[i] = {(present & 0xFF) != 0 ? (part.x + rest.x) * score_factor : -INFINITY,
                    (present & 0xFF00) != 0 ? (part.y + rest.y) * score_factor : -INFINITY};
    }
    float largest[T::heads_of_warp];
#pragma unroll
    for (int i = 0; i < T::heads_of_warp; ++i) largest[i] = warp_max(fmaxf(score[i].x, score[i].y));
#pragma unroll
    for (int i = 0; i < T::heads_of_warp; ++i) {
        const float old_max = running[i].max;
        running[i].max = fmaxf(old_max, largest[i]);
        const float anchor = running[i].max == -INFINITY ? 0.0F : running[i].max;  // no key yet: all are masked
        const float keep = exp2_approximate(old_max - anchor);
        const int head = first_head + i;
        const float2 power = {exp2_approximate(score[i].x - anchor), exp2_approximate(score[i].y - anchor)};
        weights.store(params, at, head, {power.x * p_scale, power.y * p_scale});
        running[i].sum = running[i].sum * keep + (power.x + power.y);
        if (at.lane == 0) store_shared(at.keep(head), keep);
    }
}

/// 16 dimensions by 64 keys of values: the bytes of A of four K steps; row g is dimension 2g, row g + 8 is 2g + 1.
/// Fetched ahead like KeyBytes.
struct ValueBytes {
    std::uint32_t words[2][4];

    /// `first`: the first key's 16 bytes.
    __device__ void fetch(SharedAddress first, int pitch, int lane) {
        const SharedAddress column = first + lane * pitch;
        load_matrices_transposed(words[0], column);
        load_matrices_transposed(words[1], column + 32 * pitch);
    }

    __device__ void to_halves(FragmentA (&values)[4]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const TwoPairs columns = e4m3x4_to_f16(transpose_byte_pairs(words[half][i]));
                FragmentA& fragment = values[2 * half + i / 2];
                fragment[i % 2 * 2] = columns.low;
                fragment[i % 2 * 2 + 1] = columns.high;
            }
#pragma unroll
        for (FragmentA& fragment : values) pin(fragment);
    }
};

/// The codes of unit(i) of a stage's values, where there are any.
template <class T>
__device__ void fetch_values(const Place<T>& at, int stage, int i, ValueBytes& bytes) {
    if (T::record.codes == 0 || Anchors<T>::is_wide(at, i)) return;
    bytes.fetch(at.record(stage, 0) + at.unit(i) * unit_dims, T::pitch, at.lane);
}

/// What wgmma takes of unit(i), from its codes or else from the stage.
template <class T>
__device__ void prepare_values(const Place<T>& at, int stage, int i, const ValueBytes& bytes, const Anchors<T>& anchors,
                               FragmentA (&values)[4]) {
    if constexpr (T::record.codes == 0) {
        load_wide_values(at, stage, at.unit(i), anchors, values);
    } else if (Anchors<T>::is_wide(at, i)) {
        load_wide_values(at, stage, at.unit(i), anchors, values);
    } else {
        bytes.to_halves(values);
        if constexpr (T::record.has_blocks()) scale_values(at, stage, at.unit(i), values);
    }
}

/// Sums of values times P: of unit(i), dims 2g, 2g + 1 and, for each 8 heads, heads 2t, 2t + 1.
template <class T>
using Outputs = float[T::units_of_warp][T::heads / 2];

/// Older sums after a chunk that raised the maxima or the anchors, and where the source changed, from its k_scale to
/// the new one.
template <class T>
__device__ void rescale_outputs(const Place<T>& at, Outputs<T>& outputs, float source_factor,
                                const Anchors<T>& anchors) {
#pragma unroll
    for (int j = 0; j < T::quads; ++j) {
        const float2 keep = load_shared<float2>(at.keep(8 * j + 2 * (at.lane % 4)));
#pragma unroll
        for (int i = 0; i < T::units_of_warp; ++i) {
            const float older = Anchors<T>::of_scales ? source_factor * anchors.older[i] : source_factor;
            const float2 factor = {keep.x * older, keep.y * older};
            outputs[i][4 * j] *= factor.x;
            outputs[i][4 * j + 1] *= factor.y;
            outputs[i][4 * j + 2] *= factor.x;
            outputs[i][4 * j + 3] *= factor.y;
        }
    }
}

/// Starts outputs (+)= V^T * P of one unit; `weights`: where P of the outputs' first head lies.
template <class T, int kRegisters>
__device__ void start_unit(SharedAddress weights, float (&outputs)[kRegisters], const FragmentA (&values)[4],
                           bool first) {
    const std::uint64_t descriptor = T::WeightTile::descriptor(weights);
    fence_mma();
#pragma unroll
    for (int step = 0; step < 4; ++step)
        mma_async<T::value_half>(outputs, values[step], descriptor + step * 2, !first || step > 0);
    commit_mma();
}

}  // namespace sparsemla::detail::latency
