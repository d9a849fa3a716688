// Chunks of records that are not plain: scores and values where codes have scales, or values are wide. The query is
// BF16 then, and so are keys: a code times a scale of a block is exact in BF16, its eight bits hold both. Scales of
// groups, any float32, multiply dot products instead. Values are FP16 times a power of two that the split's sums have
// in common (Anchors), but BF16 in wide_576. docs/numerics.md says what that loses.
#pragma once

#include <algorithm>

#include "cuda/decode_latency_tile.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/copies.cuh"
#include "cuda/device/reduce.cuh"

namespace sparsemla::detail::latency {

/// The exponent field of a float32 or BF16 in the upper half; infinities and NaN have none.
__device__ inline int exponent_field(std::uint32_t bits) {
    const std::uint32_t field = bits >> 23 & 0xFF;
    return static_cast<int>(field == 0xFF ? 0 : field);
}

/// Powers of two that outputs are in units of, as exponent fields of float32: of each group or block of dimensions the
/// smallest one above all scales that the split has met, of wide values above those of a unit. They rise like the
/// maximum of the softmax, and what older sums are worth then falls.
template <class T>
struct Anchors {
    static constexpr bool of_scales = T::record.scale_dims > 0;
    static constexpr bool of_wide = of_scales && T::record.has_wide_values();
    /// FP16 has room above 448: what the tables of blocks, and wide values, are too large by.
    static constexpr int scale_bits = T::record.has_blocks() ? 7 : 0, wide_bits = 15;

    /// Of the groups; or of blocks 4 * warp .., whose table this warp writes. None is so small that of_scale has no
    /// value.
    int fields[4] = {scale_bits + 1, scale_bits + 1, scale_bits + 1, scale_bits + 1};
    int wide = wide_bits + 1;            ///< of this warp's unit of wide values, if it has one
    int of_unit[T::units_of_warp] = {};  ///< what unit(i) is in units of
    float older[T::units_of_warp] = {};  ///< what the sums of unit(i) before the last chunk are worth

    /// unit(i) is of wide values.
    __device__ static bool is_wide(const Place<T>& at, int i) {
        return of_wide && at.unit(i) >= T::record.codes / unit_dims;
    }
    /// Of scales with exponent fields below `field`: what they are to be multiplied by.
    __device__ static float of_scale(int field) { return power_of_two(254 + scale_bits - field); }
    __device__ float of_wide_value() const { return power_of_two(254 + wide_bits - wide); }

    /// `largest`: the exponent field of a chunk's largest value. Returns what older sums are worth.
    __device__ static float raise(int& field, int largest) {
        const int old = field;
        field = max(field, largest + 1);
        return power_of_two(127 + old - field);
    }

    /// Once the chunk's anchors are known, in `fields` or in shared memory.
    __device__ void take(const Place<T>& at, int stage, const float (&older_groups)[4]) {
        if constexpr (!of_scales) return;
        float older_wide = 1;
        if constexpr (of_wide) older_wide = raise_wide(at, stage);
#pragma unroll
        for (int i = 0; i < T::units_of_warp; ++i) {
            if constexpr (T::record.has_groups()) {
                const int group = at.unit(i) / (128 / unit_dims);
                of_unit[i] = group < 2 ? (group == 0 ? fields[0] : fields[1]) : group == 2 ? fields[2] : fields[3];
                older[i] = group < 2    ? (group == 0 ? older_groups[0] : older_groups[1])
                           : group == 2 ? older_groups[2]
                                        : older_groups[3];
            } else {
                const float2 anchor = load_shared<float2>(at.block_anchor(stage, at.unit(i)));
                of_unit[i] = is_wide(at, i) ? wide : __float_as_int(anchor.x);
                older[i] = is_wide(at, i) ? older_wide : anchor.y;
            }
        }
    }

    /// The complete sums of unit(i), to units of 1 and without p_scale, with which they might be too large.
    template <int kRegisters>
    __device__ void finish(const Params& params, const Place<T>& at, int i, float (&sums)[kRegisters]) const {
        if constexpr (!of_scales) return;
        // In two steps: 2^(of_unit - 127) may be too large, and its product with the rest too small, for one.
        const float factor = power_of_two(of_unit[i] - 1);
        const float bits =
            params.inverse_p_scale * (is_wide(at, i) ? 2.0F / (1 << wide_bits) : 2.0F / (1 << scale_bits));
#pragma unroll
        for (float& sum : sums) sum = sum * bits * factor;
    }

   private:
    /// Of dims 2g, 2g + 1 of 16 keys, a lane.
    __device__ float raise_wide(const Place<T>& at, int stage) {
        if (!is_wide(at, 0) && !is_wide(at, 1) && !is_wide(at, 2) && !is_wide(at, 3)) return 1;
        const SharedAddress from = at.record(stage, at.lane % 4) + T::record.wide_offset +
                                   at.warp_of_group() * unit_dims * 2 + at.lane / 4 * 4;
        int largest = 0;
#pragma unroll
        for (int i = 0; i < chunk_keys / 4; ++i) {
            const std::uint32_t pair = load_shared<std::uint32_t>(from + 4 * i * T::pitch);
            largest = max(largest, max(exponent_field(pair), exponent_field(pair << 16)));
        }
        return raise(wide, __reduce_max_sync(all_lanes, largest));
    }
};

/// How a warpgroup goes through half of a record's keys: half of the codes with scales, of those without, and of the
/// wide values, in K steps of 16.
template <class T>
struct KeySteps {
    static constexpr int scaled = T::record.scaled / 32;
    static constexpr int bare = (T::record.codes - T::record.scaled) / 32;
    static constexpr int wide = T::record.wide() / 32;
    static constexpr int all = scaled + bare + wide;
    /// Whose fragments are in registers together.
    static constexpr int of_group = T::record.codes == 0 ? 3 : T::record.has_groups() && T::heads > 16 ? 2 : 4;

    /// The first dimension of a step.
    __device__ static int dim(int warpgroup, int step) {
        if (step < scaled) return 16 * (warpgroup * scaled + step);
        if (step < scaled + bare) return T::record.scaled + 16 * (warpgroup * bare + step - scaled);
        return T::record.codes + 16 * (warpgroup * wide + step - scaled - bare);
    }
};

/// Keys of `kSteps` steps from `kFirst` on, as BF16.
template <class T, int kFirst, int kSteps>
struct FormKeys {
    using S = KeySteps<T>;
    std::uint32_t pairs[(kSteps + 1) / 2][4];  ///< codes of two steps; of one wide step the fragment
    std::uint32_t wide[kSteps][4];
    std::uint32_t scales[(kSteps + 1) / 2][2];  ///< of two steps, for rows g and g + 8

    __device__ static constexpr bool is_code(int step) { return kFirst + step < S::scaled + S::bare; }
    __device__ static constexpr bool is_scaled(int step) { return T::record.has_blocks() && kFirst + step < S::scaled; }

    __device__ void fetch(const Place<T>& at, int stage) {
        const SharedAddress rows = at.record(stage, 16 * at.warp_of_group());
        const SharedAddress row = rows + at.lane / 4 * T::pitch;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int dim = S::dim(at.warpgroup(), kFirst + step);
            if (is_code(step)) {
                if (step % 2 == 0)
                    load_matrices(pairs[step / 2], rows + at.lane % 16 * T::pitch + dim + at.lane / 16 * 16);
                if (is_scaled(step) && step % 2 == 0) {
                    scales[step / 2][0] = load_shared<std::uint32_t>(row + T::record.scales_offset + dim / 8);
                    scales[step / 2][1] =
                        load_shared<std::uint32_t>(row + 8 * T::pitch + T::record.scales_offset + dim / 8);
                }
            } else {
                const SharedAddress values =
                    row + T::record.wide_offset + (dim - T::record.codes) * 2 + at.lane % 4 * 8;
                const uint2 upper = load_shared<uint2>(values), lower = load_shared<uint2>(values + 8 * T::pitch);
                wide[step][0] = upper.x;
                wide[step][1] = lower.x;
                wide[step][2] = upper.y;
                wide[step][3] = lower.y;
            }
        }
    }

    __device__ void to_fragments(FragmentA (&keys)[S::of_group]) const {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            FragmentA& key = keys[step];
            if (!is_code(step)) {
#pragma unroll
                for (int i = 0; i < 4; ++i) key[i] = wide[step][i];
            } else {
                const TwoPairs upper = e4m3x4_to_bf16(pairs[step / 2][step % 2 * 2]);
                const TwoPairs lower = e4m3x4_to_bf16(pairs[step / 2][step % 2 * 2 + 1]);
                key[0] = upper.low;
                key[1] = lower.low;
                key[2] = upper.high;
                key[3] = lower.high;
                if (is_scaled(step)) {
                    const std::uint32_t select = step % 2 == 0 ? 0x1010 : 0x3232;
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        key[i] = multiply_bf16x2(key[i], __byte_perm(scales[step / 2][i % 2], 0, select));
                }
            }
            pin(key);
        }
    }
};

/// K * Q^T of a chunk, as compute_scores.
template <class T>
struct FormScores {
    using S = KeySteps<T>;
    static_assert(S::scaled % 2 == 0 && S::bare % 2 == 0 && T::query_half == Half::bf16);
    static constexpr bool in_two = T::record.has_groups();

    const Place<T>& at;
    int stage;
    float (&scores)[T::heads / 2];
    float of_second[in_two ? T::heads / 2 : 1];  ///< group; `scores` is of the first one, then of wide values too
    FragmentA keys[2][S::of_group];

    __device__ FormScores(const Place<T>& place, int stage_number, float (&sums_of_keys)[T::heads / 2])
        : at(place), stage(stage_number), scores(sums_of_keys) {}

    template <class Meanwhile>
    __device__ void compute(const Meanwhile& meanwhile) {
        FormKeys<T, 0, S::of_group> first;
        first.fetch(at, stage);
        go_on<0>(first);
        wait_for_mma<1>();
        meanwhile();
        wait_for_mma<0>();
        pin(scores);
        if constexpr (in_two) {
            pin(of_second);
            if constexpr (S::wide == 0) scale_first();
            add_second();
        }
    }

   private:
    static constexpr int first_wide = S::scaled + S::bare;
    static_assert(!in_two || S::of_group <= first_wide / 2);  // the first group's products are done by then

    template <int kFirst, class Keys>
    __device__ void go_on(const Keys& bytes) {
        constexpr int group = kFirst / S::of_group, count = std::min(S::of_group, S::all - kFirst);
        constexpr int next = kFirst + count, next_count = std::max(std::min(S::of_group, S::all - next), 1);
        FormKeys<T, next, next_count> ahead;
        if constexpr (next < S::all) ahead.fetch(at, stage);
        if constexpr (group >= 2) wait_for_mma<1>();
        bytes.to_fragments(keys[group % 2]);
        if constexpr (in_two && kFirst == first_wide) {
            pin(scores);  // complete
            scale_first();
        }
        fence_mma();
#pragma unroll
        for (int step = 0; step < count; ++step) start<kFirst>(step, keys[group % 2][step]);
        commit_mma();
        if constexpr (next < S::all) go_on<next>(ahead);
    }

    template <int kFirst>
    __device__ void start(int step, const FragmentA& key) {
        const int number = kFirst + step;
        const std::uint64_t query =
            T::QueryTile::descriptor(at.query() + S::dim(at.warpgroup(), number) / 16 * T::query_step_bytes);
        if constexpr (in_two) {
            if (number >= first_wide / 2 && number < first_wide)
                return mma_async<Half::bf16>(of_second, key, query, number > first_wide / 2);
        }
        mma_async<Half::bf16>(scores, key, query, number > 0);
    }

    /// Of this warpgroup's group `number`, for rows g and g + 8.
    __device__ float2 scales_of_group(int number) const {
        const SharedAddress row = at.record(stage, 16 * at.warp_of_group() + at.lane / 4) + T::record.scales_offset +
                                  (2 * at.warpgroup() + number) * 4;
        return {load_shared<float>(row), load_shared<float>(row + 8 * T::pitch)};
    }
    __device__ void scale_first() {
        const float2 scales = scales_of_group(0);
#pragma unroll
        for (int i = 0; i < T::heads / 2; ++i) scores[i] *= i % 4 < 2 ? scales.x : scales.y;
    }
    __device__ void add_second() {
        const float2 scales = scales_of_group(1);
#pragma unroll
        for (int i = 0; i < T::heads / 2; ++i) scores[i] += of_second[i] * (i % 4 < 2 ? scales.x : scales.y);
    }
};

/// The scales of a stage's blocks as FP16 in units of their anchors, by all warps that multiply: each has four blocks.
/// A lane of scale_values finds its 16 keys in one piece.
template <class T>
__device__ void store_scale_table(const Place<T>& at, int stage, Anchors<T>& anchors) {
    static_assert(multiplying_warps * 4 == value_blocks && chunk_keys == 64);
    std::uint32_t scales[2][4];  ///< of keys lane and lane + 32, as float32
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint2 pairs =
            load_shared<uint2>(at.record(stage, at.lane + 32 * i) + T::record.scales_offset + at.warp * 8);
        scales[i][0] = pairs.x << 16;
        scales[i][1] = pairs.x & 0xFFFF0000;
        scales[i][2] = pairs.y << 16;
        scales[i][3] = pairs.y & 0xFFFF0000;
    }
    const int place = at.lane % 8 / 2 * 16 + at.lane / 16 * 4 + at.lane % 16 / 8 * 2 + at.lane % 2;
    int largest[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
        largest[j] = __reduce_max_sync(all_lanes, max(exponent_field(scales[0][j]), exponent_field(scales[1][j])));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float older = Anchors<T>::raise(anchors.fields[j], largest[j]);
        const int block = 4 * at.warp + j;
        store_shared_if(at.lane == 0, at.block_anchor(stage, block), __int_as_float(anchors.fields[j]), older);
        const float factor = Anchors<T>::of_scale(anchors.fields[j]);
        const std::uint32_t halves =
            f32x2_to_f16x2(__uint_as_float(scales[0][j]) * factor, __uint_as_float(scales[1][j]) * factor);
        const SharedAddress to = at.scale_table(stage, block) + place * 2;
        store_shared_16(to, halves);
        store_shared_16(to + 8 * 2, halves >> 16);  // two steps of 16 keys further
    }
}

/// Values of a unit as FP16 codes, times the scales of its block.
template <class T>
__device__ void scale_values(const Place<T>& at, int stage, int unit, FragmentA (&values)[4]) {
    const SharedAddress from = at.scale_table(stage, unit) + at.lane % 4 * 32;
    const uint4 first = load_shared<uint4>(from), last = load_shared<uint4>(from + 16);
    const std::uint32_t scales[8] = {first.x, first.y, first.z, first.w, last.x, last.y, last.z, last.w};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[step][i] = multiply_f16x2(values[step][i], scales[2 * step + i / 2]);
        pin(values[step]);
    }
}

/// A unit of wide values as they are, or as FP16 in units of the anchor.
template <class T>
__device__ void load_wide_values(const Place<T>& at, int stage, int unit, const Anchors<T>& anchors,
                                 FragmentA (&values)[4]) {
    const SharedAddress from = at.record(stage, 2 * (at.lane % 4)) + T::record.wide_offset +
                               (unit * unit_dims - T::record.codes) * 2 + at.lane / 4 * 4;
    const float factor = anchors.of_wide_value();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Dims 2g, 2g + 1 of two keys.
            const SharedAddress key = from + (16 * step + 8 * half) * T::pitch;
            std::uint32_t one = load_shared<std::uint32_t>(key), other = load_shared<std::uint32_t>(key + T::pitch);
            if constexpr (T::value_half == Half::f16) {
                values[step][2 * half] =
                    f32x2_to_f16x2(__uint_as_float(one << 16) * factor, __uint_as_float(other << 16) * factor);
                values[step][2 * half + 1] = f32x2_to_f16x2(__uint_as_float(one & 0xFFFF0000) * factor,
                                                            __uint_as_float(other & 0xFFFF0000) * factor);
            } else {
                values[step][2 * half] = __byte_perm(one, other, 0x5410);
                values[step][2 * half + 1] = __byte_perm(one, other, 0x7632);
            }
        }
        pin(values[step]);
    }
}

}  // namespace sparsemla::detail::latency
