// The first phase of decode_latency: which columns are this CTA's, their records and the query's heads to shared
// memory.
#pragma once

#include "cuda/decode_latency_tile.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/copies.cuh"
#include "cuda/device/reduce.cuh"

namespace sparsemla::detail::latency {

/// The row's columns: which chunks exist and which of them are this CTA's. Chunks [0, first_end) and
/// [second_begin, second_end) hold active columns of sources 0 and 1.
struct Columns {
    int first_active, second_active;  ///< leading columns of each source
    int first_end, second_begin, second_end;
    std::uint32_t splits;  ///< bit s: split s has a chunk
    bool weights_travel;   ///< instead of partial outputs: no split has two chunks

    int second_first;  ///< of this CTA's chunks, the first one of source 1

    /// The first chunk of source 1 that a split owns.
    __device__ int first_of_second(const Params& params, int split) const {
        const int distance = split - params.second_begin_split;
        return second_begin + distance + (distance < 0 ? params.splits : 0);
    }
    __device__ int num_splits() const { return __popc(splits); }
    __device__ bool has_split(int split) const { return (splits >> split & 1) != 0; }
    /// Whether a CTA has anything to do: where only one split has columns, its CTA writes the row, and where none has,
    /// CTA 0 does; otherwise all of them merge.
    __device__ bool concern(int split) const {
        return num_splits() > 1 || has_split(split) || (splits == 0 && split == 0);
    }
    __device__ bool is_second(int number) const { return number >= second_begin; }
    __device__ bool has(int number) const {
        return number < first_end || (number >= second_begin && number < second_end);
    }
    /// The first chunk of a split that has one.
    __device__ int first_of_split(const Params& params, int split) const {
        return split < first_end ? split : first_of_second(params, split);
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
    bool more = lane + params.splits < columns.first_end;
    columns.second_first = columns.second_begin;
    if constexpr (T::two_sources) {
        const int second = columns.first_of_second(params, lane);
        more = more || second + (active ? 0 : params.splits) < columns.second_end;
        active = active || second < columns.second_end;
        columns.second_first = columns.first_of_second(params, split);
    }
    columns.splits = __ballot_sync(all_lanes, active && lane < params.splits);
    columns.weights_travel = params.transport == Transport::weights && columns.num_splits() > 1 &&
                             (T::one_chunk || !__any_sync(all_lanes, more && lane < params.splits));
    return columns;
}

/// Where the slot of column records_of_warp * i + lane % records_of_warp of a chunk, i the number of the gather warp,
/// stands, null where the list ends. Does not look at counts: it need not wait for them.
template <class T>
__device__ const std::int32_t* slot_pointer(const Params& params, const Place<T>& at, int number) {
    const bool second = T::two_sources && number >= params.sources[0].chunks;
    if (second) number -= params.sources[0].chunks;
    const int column = number * chunk + T::records_of_warp * at.gatherer() + at.lane % T::records_of_warp;
    const std::int32_t* slots = second ? params.sources[1].slots : params.sources[0].slots;
    const std::int64_t stride = second ? params.sources[1].slots_row_stride : params.sources[0].slots_row_stride;
    const int width = second ? params.sources[1].width : params.sources[0].width;
    return column < width ? slots + at.row * stride + column : nullptr;
}

__device__ inline int load_slot(const std::int32_t* pointer) { return pointer == nullptr ? -1 : load_global(pointer); }

/// The records of a chunk that one gather warp brings to a stage: lane i has the slot of record i % records_of_warp.
struct Records {
    const std::byte* source;
    int slot;            ///< 0 where absent
    std::uint32_t mask;  ///< bit i: record i is present
};

template <class T>
__device__ Records records_of_chunk(const Params& params, const Place<T>& at, const Columns& columns, int slot,
                                    int number) {
    const bool second = T::two_sources && columns.is_second(number);
    const int column = (second ? number - columns.second_begin : number) * chunk + T::records_of_warp * at.gatherer() +
                       at.lane % T::records_of_warp;
    const int num_slots = second ? params.sources[1].num_slots : params.sources[0].num_slots;
    bool present = column < (second ? columns.second_active : columns.first_active) &&
                   static_cast<std::uint32_t>(slot) < static_cast<std::uint32_t>(num_slots);
    if (params.gaps) {
        const SourceView& source = params.sources[second ? 1 : 0];
        present = present && slot % source.slots_per_page < source.page_size;
    }
    constexpr std::uint32_t all_records = (1U << T::records_of_warp) - 1;
    return {.source = second ? params.sources[1].records : params.sources[0].records,
            .slot = present ? slot : 0,
            .mask = __ballot_sync(all_lanes, present) & all_records};
}

/// Gather::copies: 16 bytes a lane, absent records become zeros.
template <class T>
__device__ void copy_records(const Place<T>& at, const Records& records, SharedAddress to, int stage) {
    std::int64_t offset[T::records_of_warp];  // all shuffles before the first copy: each costs its latency otherwise
#pragma unroll
    for (int i = 0; i < T::records_of_warp; ++i)
        offset[i] = std::int64_t{__shfl_sync(all_lanes, records.slot, i)} * T::d_qk;
    const std::byte* from = records.source + at.lane * 16;
#pragma unroll
    for (int i = 0; i < T::records_of_warp; ++i)
        copy_16_async(to + i * T::pitch + at.lane * 16, from + offset[i], (records.mask >> i & 1) == 0);
    if constexpr (T::d_qk > 512) {
        constexpr int rest = (T::d_qk - 512) / 16;  // pieces of each record that are left
        constexpr int together = 32 / rest;         // records whose rest one warp copies at a time
        const int byte = 512 + at.lane % rest * 16;
#pragma unroll
        for (int first = 0; first < T::records_of_warp; first += together) {
            const int i = first + at.lane / rest;
            const std::int64_t record = __shfl_sync(all_lanes, records.slot, i);
            copy_16_async(to + i * T::pitch + byte, records.source + record * T::d_qk + byte,
                          (records.mask >> i & 1) == 0);
        }
    }
    arrive_after_copies(at.full(stage));
    if (at.lane == 0) arrive(at.full(stage));
}

/// Gather::bulk: a copy a record, issued by a lane each. The CTAs of a cluster that hold other tiles of heads need the
/// same records: each of them fetches every tiles-th one for all.
template <class T>
__device__ void copy_records_bulk(const Place<T>& at, const Records& records, SharedAddress to, int stage) {
    constexpr std::uint32_t all_records = (1U << T::records_of_warp) - 1;
    for (std::uint32_t absent = ~records.mask & all_records; absent != 0; absent &= absent - 1)
        for (int piece = at.lane; piece < T::d_qk / 16; piece += 32)
            store_shared(to + (__ffs(absent) - 1) * T::pitch + piece * 16, uint4{0, 0, 0, 0});
    __syncwarp();
    if (at.lane == 0) arrive_expecting(at.full(stage), __popc(records.mask) * T::d_qk);
    __syncwarp();
    if (at.lane >= T::records_of_warp || (records.mask >> at.lane & 1) == 0) return;
    const SharedAddress here = to + at.lane * T::pitch;
    const std::byte* from = records.source + std::int64_t{records.slot} * T::d_qk;
    if (at.tiles == 1) return copy_bulk_async(here, from, T::d_qk, at.full(stage));
    if (at.lane % at.tiles != at.tile) return;
    std::uint32_t ctas = 0;
    for (int tile = 0; tile < at.tiles; ++tile) ctas |= 1U << (at.split + tile * at.splits);
    copy_bulk_multicast(here, from, T::d_qk, at.full(stage), static_cast<std::uint16_t>(ctas));
}

/// Starts the copies of a chunk's records into a stage, records_of_warp by each gather warp. `slot`: load_slot of this
/// chunk.
template <class T>
__device__ void gather_chunk(const Params& params, const Place<T>& at, const Columns& columns, int slot, int number,
                             int stage) {
    const Records records = records_of_chunk(params, at, columns, slot, number);
    const SharedAddress to = at.stages + stage * T::stage_bytes + T::records_of_warp * at.gatherer() * T::pitch;
    if (at.lane == 0) store_shared_16(at.present(stage) + 2 * at.gatherer(), records.mask);
    if (params.gather == Gather::copies)
        copy_records(at, records, to, stage);
    else
        copy_records_bulk(at, records, to, stage);
}

/// Transport::weights: starts the copies of this CTA's dimensions of the records of all other splits.
template <class T, int kSplits>
__device__ void gather_slices(const Params& params, const Place<T>& at, const Columns& columns) {
    using S = Slices<T, kSplits>;
    constexpr int pieces = S::dims / 16;   // of a record
    constexpr int together = 32 / pieces;  // records of which one warp copies pieces at a time
    static_assert(T::records_of_warp % together == 0);
    int slots[kSplits - 1];
#pragma unroll
    for (int i = 0; i + 1 < kSplits; ++i) {
        const int split = i + (i < at.split ? 0 : 1);
        const int number = columns.first_of_split(params, split);
        slots[i] = columns.has_split(split) ? load_slot(slot_pointer(params, at, number)) : -1;
    }
#pragma unroll
    for (int i = 0; i + 1 < kSplits; ++i) {
        const int split = i + (i < at.split ? 0 : 1);
        if (!columns.has_split(split)) continue;
        const Records records = records_of_chunk(params, at, columns, slots[i], columns.first_of_split(params, split));
        const std::byte* from = records.source + at.split * S::dims + at.lane % pieces * 16;
        const SharedAddress to = S::slice(at, split) +
                                 (T::records_of_warp * at.gatherer() + at.lane / pieces) * S::pitch +
                                 at.lane % pieces * 16;
#pragma unroll
        for (int first = 0; first < T::records_of_warp; first += together) {
            const int record = first + at.lane / pieces;
            const std::int64_t slot = __shfl_sync(all_lanes, records.slot, record);
            copy_16_async(to + first * S::pitch, from + slot * T::d_qk, (records.mask >> record & 1) == 0);
        }
    }
    arrive_after_copies(at.slices_barrier());
    if (at.lane == 0) arrive(at.slices_barrier());
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

    /// All heads of the CTA; `loaded` holds the first 16.
    __device__ void store_all(const Params& params, const Place<T>& at) {
        store(at, 0);
#pragma unroll 1
        for (int group = 1; group < T::heads / 16; ++group) {
            load(at, pointer(params, at, group));
            store(at, group);
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

}  // namespace sparsemla::detail::latency
