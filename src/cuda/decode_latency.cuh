// Phases of decode_latency (decode_latency.cu tells the story). One CTA: kHeads heads of a row, and every S-th chunk of
// 64 columns of its lists. Lane names: g = lane / 4, t = lane % 4.
#pragma once

#include "cuda/decode_latency.h"
#include "cuda/device/barriers.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/copies.cuh"
#include "cuda/device/exchange.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/reduce.cuh"
#include "latency_layout.h"

namespace sparsemla::detail::latency {

using namespace sparsemla::device;

/// Shared memory that is small and not overlaid.
template <int kHeads>
struct SmallShared {
    std::uint64_t stats_barrier;
    std::uint64_t outputs_barrier;
    std::uint8_t present[max_stages][chunk / 8];  ///< bit: the column names a record
    float2 stats[max_splits][kHeads];             ///< of each split: maximum (log2), sum
    float weight[max_splits][kHeads];             ///< of each split at the merge
    float keep[kHeads];                           ///< what older sums are worth after this chunk raised the maximum
    float factor[kHeads];                         ///< from merged sums to the output
};

template <int kHeads, int kDqk, Half kQuery, bool kTwoSources>
struct Tile {
    static constexpr bool two_sources = kTwoSources;
    static constexpr int heads = kHeads;
    static constexpr int d_qk = kDqk;
    static constexpr Half query_half = kQuery;
    static constexpr int pitch = record_pitch(kDqk);
    static constexpr int stage_bytes = chunk * pitch;
    static constexpr int heads_of_warp = kHeads / warps;
    static constexpr int quads = kHeads / 8;
    static constexpr int steps = kDqk / 16 / warpgroups;  ///< K steps of a warpgroup in K * Q^T
    static constexpr int query_step_bytes = kHeads * 32;
    static constexpr SharedLayout layout = shared_layout(kHeads, kDqk, 1, 1);
    using QueryTile = SwizzledTile<32>;
    using WeightTile = SwizzledTile<128>;
    using Small = SmallShared<kHeads>;
    static_assert(sizeof(Small) <= small_shared_bytes(kHeads) && offsetof(Small, present) % 8 == 0);
    static_assert(kDqk % (32 * warpgroups) == 0 && kHeads % 16 == 0);
    static_assert(layout.weights % WeightTile::alignment_bytes == 0 && layout.query % QueryTile::alignment_bytes == 0);
};

/// Who this thread is and where its CTA's memory lies.
template <class T>
struct Place {
    SharedAddress base;  ///< of the CTA's shared memory: SmallShared, then T::layout
    SharedAddress stages;
    int row;
    int first_head;
    int split;
    int splits;  ///< of the row
    int warp, lane;

    __device__ int warpgroup() const { return warp / 4; }
    __device__ int warp_of_group() const { return warp % 4; }
    /// The unit of the output that this warp holds in its i-th wgmma.
    __device__ int unit(int i) const { return warpgroup() * 4 * units_of_warp + 4 * i + warp_of_group(); }

    __device__ SharedAddress stats_barrier() const { return base + offsetof(typename T::Small, stats_barrier); }
    __device__ SharedAddress outputs_barrier() const { return base + offsetof(typename T::Small, outputs_barrier); }
    __device__ SharedAddress present(int stage) const {
        return base + offsetof(typename T::Small, present) + stage * (chunk / 8);
    }
    __device__ SharedAddress stats(int of_split, int head) const {
        return base + offsetof(typename T::Small, stats) + (of_split * T::heads + head) * 8;
    }
    __device__ SharedAddress weight(int of_split, int head) const {
        return base + offsetof(typename T::Small, weight) + (of_split * T::heads + head) * 4;
    }
    __device__ SharedAddress keep(int head) const { return base + offsetof(typename T::Small, keep) + head * 4; }
    __device__ SharedAddress factor(int head) const { return base + offsetof(typename T::Small, factor) + head * 4; }
    __device__ SharedAddress score(int group, int head, int key) const {
        return base + T::layout.scores + ((group * T::heads + head) * score_pitch + key) * 4;
    }
};

/// The row's columns: which chunks exist and which of them are this CTA's. Chunks [0, first_end) and
/// [second_begin, second_end) hold active columns of sources 0 and 1.
struct Columns {
    int first_active, second_active;  ///< leading columns of each source
    int first_end, second_begin, second_end;
    std::uint32_t splits;  ///< bit s: split s has a chunk

    int second_first;  ///< of this CTA's chunks, the first one of source 1

    /// The first chunk of source 1 that a split owns.
    __device__ int first_of_second(const Params& params, int split) const {
        const int distance = split - params.second_begin_split;
        return second_begin + distance + (distance < 0 ? params.splits : 0);
    }
    __device__ bool is_second(int number) const { return number >= second_begin; }
    __device__ bool has(int number) const {
        return number < first_end || (number >= second_begin && number < second_end);
    }
    /// Of this CTA's chunks, the first one at or after `number` that may hold active columns.
    __device__ int next(int number) const { return number < first_end ? number : max(number, second_first); }
};

/// Of one source: k_scale, and the way from dot products to base-2 scores.
struct Factors {
    float values;
    float score;
};

__device__ inline Factors factors_of(const Params& params, const SourceView& source) {
    if (!params.scale_pointers) return {source.k_scale, source.score_factor};
    const float q = params.q_scale_pointer != nullptr ? *params.q_scale_pointer : params.q_scale;
    const float k = source.k_scale_pointer != nullptr ? *source.k_scale_pointer : source.k_scale;
    return {k, params.score_scale * q * k};
}

/// Where this thread reads first. Computed before the dependency wait, read after it.
template <class T>
struct Inputs {
    const std::int32_t* counts[2];  ///< of this row; null: all columns
    const std::int32_t* slot;       ///< of the CTA's first chunk; null: the list has no such column
    const uint4* query;             ///< of this lane's head of the first 16
};

__device__ inline const std::int32_t* count_of_row(const SourceView& source, int row) {
    return source.counts == nullptr ? nullptr : source.counts + row * source.counts_stride;
}

/// clamp(count - count_offset, 0, width) in 64 bits.
__device__ inline int active_columns(const SourceView& source, const std::int32_t* count) {
    if (count == nullptr) return source.width;
    const std::int64_t columns = load_global(count) - source.count_offset;
    return static_cast<int>(max(std::int64_t{0}, min(columns, std::int64_t{source.width})));
}

template <class T>
__device__ Columns columns_of_row(const Params& params, const Inputs<T>& inputs, int lane, int split) {
    Columns columns;
    columns.first_active = active_columns(params.sources[0], inputs.counts[0]);
    columns.second_active = T::two_sources ? active_columns(params.sources[1], inputs.counts[1]) : 0;
    columns.first_end = (columns.first_active + chunk - 1) / chunk;
    columns.second_begin = params.sources[0].chunks;
    columns.second_end = columns.second_begin + (columns.second_active + chunk - 1) / chunk;
    bool active = lane < columns.first_end;
    columns.second_first = columns.second_begin;
    if constexpr (T::two_sources) {
        active = active || columns.first_of_second(params, lane) < columns.second_end;
        columns.second_first = columns.first_of_second(params, split);
    }
    columns.splits = __ballot_sync(all_lanes, active && lane < params.splits);
    return columns;
}

/// Where the slot of column 8 * warp + lane % 8 of a chunk stands, null where the list ends. Does not look at counts:
/// it need not wait for them.
template <class T>
__device__ const std::int32_t* slot_pointer(const Params& params, const Place<T>& at, int number) {
    const bool second = T::two_sources && number >= params.sources[0].chunks;
    if (second) number -= params.sources[0].chunks;
    const int column = number * chunk + 8 * at.warp + at.lane % 8;
    const std::int32_t* slots = second ? params.sources[1].slots : params.sources[0].slots;
    const std::int64_t stride = second ? params.sources[1].slots_row_stride : params.sources[0].slots_row_stride;
    const int width = second ? params.sources[1].width : params.sources[0].width;
    return column < width ? slots + at.row * stride + column : nullptr;
}

__device__ inline int load_slot(const std::int32_t* pointer) { return pointer == nullptr ? -1 : load_global(pointer); }

/// Starts the copies of a chunk's records into a stage, 8 of them by each warp; absent columns become zeros.
/// `slot`: load_slot of this chunk.
template <class T>
__device__ void gather_chunk(const Params& params, const Place<T>& at, const Columns& columns, int slot, int number,
                             int stage) {
    const bool second = T::two_sources && columns.is_second(number);
    const int column = (second ? number - columns.second_begin : number) * chunk + 8 * at.warp + at.lane % 8;
    const int num_slots = second ? params.sources[1].num_slots : params.sources[0].num_slots;
    bool present = column < (second ? columns.second_active : columns.first_active) &&
                   static_cast<std::uint32_t>(slot) < static_cast<std::uint32_t>(num_slots);
    if (params.gaps) {
        const SourceView& source = params.sources[second ? 1 : 0];
        present = present && slot % source.slots_per_page < source.page_size;
    }
    const std::uint32_t mask = __ballot_sync(all_lanes, present) & 0xFF;
    if (!present) slot = 0;

    const std::byte* records = second ? params.sources[1].records : params.sources[0].records;
    const SharedAddress to = at.stages + stage * T::stage_bytes + 8 * at.warp * T::pitch;
    std::int64_t offset[8];  // all shuffles before the first copy: each costs its latency otherwise
#pragma unroll
    for (int i = 0; i < 8; ++i) offset[i] = std::int64_t{__shfl_sync(all_lanes, slot, i)} * T::d_qk;
    const std::byte* from = records + at.lane * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) copy_16_async(to + i * T::pitch + at.lane * 16, from + offset[i], (mask >> i & 1) == 0);
    if constexpr (T::d_qk > 512) {
        static_assert(T::d_qk == 512 + 8 * 32 / 4);  // 4 pieces of each record are left
        const int i = at.lane / 4;
        const std::int64_t record = __shfl_sync(all_lanes, slot, i);
        const int byte = 512 + at.lane % 4 * 16;
        copy_16_async(to + i * T::pitch + byte, records + record * T::d_qk + byte, (mask >> i & 1) == 0);
    }
    if (at.lane == 0) store_shared_byte(at.present(stage) + at.warp, mask);
}

/// The query's heads as halves. Two lanes take 32 dimensions of a head; within 16 of them, pairs 0 2 4 6 come before
/// pairs 1 3 5 7, as a lane of ldmatrix holds four bytes of a record.
template <class T>
struct QueryLoader {
    static constexpr int jobs_of_heads = T::d_qk / 32;                  ///< of 16 heads, one warp's work each
    static constexpr int rounds = (jobs_of_heads + warps - 1) / warps;  ///< of one group of 16 heads
    static constexpr int words = T::query_half == Half::f16 ? 1 : 2;    ///< of 16 bytes

    uint4 loaded[rounds][words];

    __device__ static const uint4* pointer(const Params& params, const Place<T>& at, int group) {
        const int head = at.first_head + 16 * group + at.lane / 2;
        if (head >= params.heads) return nullptr;
        const std::byte* heads = params.query + at.row * params.query_row_stride_bytes;
        return reinterpret_cast<const uint4*>(heads + head * params.query_head_stride_bytes) +
               (2 * at.warp + at.lane % 2) * words;
    }

    __device__ void load(const Place<T>& at, const uint4* from) {
#pragma unroll
        for (int round = 0; round < rounds; ++round)
#pragma unroll
            for (int i = 0; i < words; ++i)
                loaded[round][i] = from != nullptr && round * warps + at.warp < jobs_of_heads
                                       ? load_global(from + round * warps * 2 * words + i)
                                       : uint4{0, 0, 0, 0};
    }

    __device__ void store(const Place<T>& at, int group) const {
        const int head = 16 * group + at.lane / 2;
        const SharedAddress to = at.base + T::layout.query + (2 * at.warp + at.lane % 2) * T::query_step_bytes;
#pragma unroll
        for (int round = 0; round < rounds; ++round) {
            if (round * warps + at.warp >= jobs_of_heads) break;
            uint4 low, high;
            split_pairs(loaded[round], low, high);
            const SharedAddress step = to + round * warps * 2 * T::query_step_bytes;
            store_shared(step + T::QueryTile::byte(head, 0), low);
            store_shared(step + T::QueryTile::byte(head, 1), high);
        }
    }

   private:
    __device__ static void split_pairs(const uint4 (&from)[words], uint4& low, uint4& high) {
        if constexpr (T::query_half == Half::f16) {
            const TwoPairs x = e4m3x4_to_f16(from[0].x), y = e4m3x4_to_f16(from[0].y);
            const TwoPairs z = e4m3x4_to_f16(from[0].z), w = e4m3x4_to_f16(from[0].w);
            low = {x.low, y.low, z.low, w.low};
            high = {x.high, y.high, z.high, w.high};
        } else {
            low = {from[0].x, from[0].z, from[1].x, from[1].z};
            high = {from[0].y, from[0].w, from[1].y, from[1].w};
        }
    }
};

/// kSteps K steps of a warpgroup's keys as A, from byte `row` on.
template <class T, int kSteps>
__device__ void load_keys(SharedAddress row, FragmentA (&keys)[kSteps]) {
    static_assert(kSteps % 2 == 0);
    const auto take = [](FragmentA& fragment, std::uint32_t upper_rows, std::uint32_t lower_rows) {
        const TwoPairs upper = T::query_half == Half::f16 ? e4m3x4_to_f16(upper_rows) : e4m3x4_to_bf16(upper_rows);
        const TwoPairs lower = T::query_half == Half::f16 ? e4m3x4_to_f16(lower_rows) : e4m3x4_to_bf16(lower_rows);
        fragment[0] = upper.low;
        fragment[1] = lower.low;
        fragment[2] = upper.high;
        fragment[3] = lower.high;
    };
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
        std::uint32_t words[4];
        load_matrices(words, row + step * 16);
        take(keys[step], words[0], words[1]);
        take(keys[step + 1], words[2], words[3]);
    }
#pragma unroll
    for (FragmentA& fragment : keys) pin(fragment);
}

template <class T, int kSteps>
__device__ void start_scores(float (&scores)[T::heads / 2], const FragmentA (&keys)[kSteps], std::uint64_t query,
                             bool first) {
    fence_mma();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        mma_async<T::query_half>(scores, keys[step], query + step * (T::query_step_bytes / 16), !first || step > 0);
    commit_mma();
}

/// K * Q^T of a stage: this warpgroup's half of the dimensions, 64 keys by kHeads heads. Keys become halves while the
/// tensor cores work on those before them; `meanwhile` runs beside the last ones.
template <class T, class Meanwhile>
__device__ void compute_scores(const Place<T>& at, int stage, float (&scores)[T::heads / 2],
                               const Meanwhile& meanwhile) {
    constexpr int steps = 6;  // of a group: two groups of fragments are 48 registers
    constexpr int last_steps = T::steps - 2 * steps;
    const SharedAddress row = at.stages + stage * T::stage_bytes + (16 * at.warp_of_group() + at.lane % 16) * T::pitch +
                              at.warpgroup() * T::steps * 16 + at.lane / 16 * 16;
    const std::uint64_t query =
        T::QueryTile::descriptor(at.base + T::layout.query + at.warpgroup() * T::steps * T::query_step_bytes);
    constexpr int step_of_query = T::query_step_bytes / 16;
    FragmentA keys[2][steps];
    load_keys<T>(row, keys[0]);
    start_scores<T>(scores, keys[0], query, true);
    load_keys<T>(row + steps * 16, keys[1]);
    start_scores<T>(scores, keys[1], query + steps * step_of_query, false);
    wait_for_mma<1>();
    FragmentA last[last_steps];
    load_keys<T>(row + 2 * steps * 16, last);
    start_scores<T>(scores, last, query + 2 * steps * step_of_query, false);
    wait_for_mma<1>();
    meanwhile();
    wait_for_mma<0>();
    pin(scores);
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

/// Softmax of a chunk for heads heads_of_warp * warp .. by one warp, two keys a lane: scores to P, and what older sums
/// are worth now.
template <class T>
__device__ void softmax(const Params& params, const Place<T>& at, float score_factor, int stage,
                        Running (&running)[T::heads_of_warp]) {
    const int first_head = T::heads_of_warp * at.warp;
    const uint2 present = load_shared<uint2>(at.present(stage));
    const std::uint32_t mine = (at.lane < 16 ? present.x : present.y) >> (2 * at.lane % 32);
    float2 score[T::heads_of_warp];
#pragma unroll
    for (int i = 0; i < T::heads_of_warp; ++i) {
        float2 sum = load_shared<float2>(at.score(0, first_head + i, 2 * at.lane));
#pragma unroll
        for (int group = 1; group < warpgroups; ++group) {
            const float2 part = load_shared<float2>(at.score(group, first_head + i, 2 * at.lane));
            sum = {sum.x + part.x, sum.y + part.y};
        }
        score[i] = {(mine & 1) != 0 ? sum.x * score_factor : -INFINITY,
                    (mine & 2) != 0 ? sum.y * score_factor : -INFINITY};
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
        const float2 power = {exp2_approximate(score[i].x - anchor), exp2_approximate(score[i].y - anchor)};
        running[i].sum = running[i].sum * keep + (power.x + power.y);
        const float2 p = {power.x * params.p_scale, power.y * params.p_scale};
        const std::uint32_t halves = params.p_is_e4m3 ? f32x2_to_e4m3_as_f16x2(p.x, p.y) : f32x2_to_f16x2(p.x, p.y);
        const int head = first_head + i;
        store_shared(at.base + T::layout.weights + T::WeightTile::byte(head, at.lane / 4) + at.lane % 4 * 4, halves);
        if (at.lane == 0) store_shared(at.keep(head), keep);
    }
}

/// 16 dimensions by 64 keys of a stage's values as A of four K steps; row g is dimension 2g, row g + 8 is 2g + 1.
template <class T>
__device__ void load_values(const Place<T>& at, int stage, int unit, FragmentA (&values)[4]) {
    const SharedAddress column = at.stages + stage * T::stage_bytes + at.lane * T::pitch + unit * unit_dims;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        std::uint32_t words[4];
        load_matrices_transposed(words, column + half * 32 * T::pitch);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const TwoPairs columns = e4m3x4_to_f16(transpose_byte_pairs(words[i]));
            FragmentA& fragment = values[2 * half + i / 2];
            fragment[i % 2 * 2] = columns.low;
            fragment[i % 2 * 2 + 1] = columns.high;
        }
    }
#pragma unroll
    for (FragmentA& fragment : values) pin(fragment);
}

/// Sums of values times P: of unit(i), dims 2g, 2g + 1 and, for each 8 heads, heads 2t, 2t + 1.
template <class T>
using Outputs = float[units_of_warp][T::heads / 2];

/// Older sums after a chunk that raised the maxima, and where the source changed, from its k_scale to the new one.
template <class T>
__device__ void rescale_outputs(const Place<T>& at, Outputs<T>& outputs, float source_factor) {
#pragma unroll
    for (int j = 0; j < T::quads; ++j) {
        const float2 keep = load_shared<float2>(at.keep(8 * j + 2 * (at.lane % 4)));
        const float2 factor = {keep.x * source_factor, keep.y * source_factor};
#pragma unroll
        for (int i = 0; i < units_of_warp; ++i) {
            outputs[i][4 * j] *= factor.x;
            outputs[i][4 * j + 1] *= factor.y;
            outputs[i][4 * j + 2] *= factor.x;
            outputs[i][4 * j + 3] *= factor.y;
        }
    }
}

/// Starts outputs (+)= V^T * P of one unit.
template <class T>
__device__ void start_values(const Place<T>& at, float (&outputs)[T::heads / 2], const FragmentA (&values)[4],
                             bool first) {
    const std::uint64_t weights = T::WeightTile::descriptor(at.base + T::layout.weights);
    fence_mma();
#pragma unroll
    for (int step = 0; step < 4; ++step)
        mma_async<Half::f16>(outputs, values[step], weights + step * 2, !first || step > 0);
    commit_mma();
}

}  // namespace sparsemla::detail::latency
