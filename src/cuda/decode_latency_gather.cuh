// The first phase of decode_latency: which columns are this CTA's, and their records to shared memory.
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
    std::uint32_t split_mask;  ///< bit s: split s has a chunk
    int weights_travel;        ///< 1: instead of partial outputs, as no split has two chunks; a bool is spilled

    int second_first;  ///< of this CTA's chunks, the first one of source 1

    /// The first chunk of source 1 that a split owns.
    __device__ int first_of_second(const Params& params, int split) const {
        const int distance = split - params.second_begin_split;
        return second_begin + distance + (distance < 0 ? params.splits : 0);
    }
    __device__ int num_splits() const { return __popc(split_mask); }
    __device__ bool has_split(int split) const { return (split_mask >> split & 1) != 0; }
    /// Whether a CTA has anything to do: where only one split has columns, its CTA writes the row, and where none has,
    /// CTA 0 does; otherwise all of them merge.
    __device__ bool concern(int split) const {
        return num_splits() > 1 || has_split(split) || (split_mask == 0 && split == 0);
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
    const std::int32_t* counts[2];      ///< of this row; null: all columns
    const std::int32_t* slot;           ///< of the first chunk; null: the list has no such column, or a helper
    const uint4* query[T::heads / 16];  ///< of this lane's head of each 16
};

/// Where a split has columns of both sources: its sums are without k_scale of the second one, and older sums, without
/// that of the first, become the same by `older`. Where the second scale is nothing beside the first (0, or 2^80 times
/// smaller) the sums stay as they are instead, and P of the second source is 0.
struct SourceChange {
    float older;
    bool second_vanishes;
};

__device__ inline SourceChange change_of_source(float first, float second) {
    // Both by the same power of two: where the reciprocal has a value and is not subnormal.
    const float size = fabsf(second);
    const float shift = size < 0x1p-60F ? 0x1p64F : size > 0x1p60F ? 0x1p-64F : 1.0F;
    const float ratio = first * shift * reciprocal_approximate(second * shift);
    if (fabsf(ratio) <= 0x1p80F) return {ratio, false};
    return {1.0F, true};
}

__device__ inline const std::int32_t* count_of_row(const SourceView& source, int row) {
    return source.counts == nullptr ? nullptr : source.counts + row * source.counts_stride;
}

/// clamp(count - count_offset, 0, width) in 64 bits.
__device__ inline int active_columns(const SourceView& source, const std::int32_t* count) {
    if (count == nullptr) return source.width;
    const std::int64_t columns = load_global(count) - source.count_offset;
    return static_cast<int>(max(std::int64_t{0}, min(columns, std::int64_t{source.width})));
}

/// From the numbers of active columns; of the row, for the CTA that has `split`.
template <class T>
__device__ Columns columns_of_counts(const Params& params, int first_active, int second_active, int lane, int split) {
    Columns columns;
    columns.first_active = first_active;
    columns.second_active = second_active;
    columns.first_end = (columns.first_active + chunk_keys - 1) / chunk_keys;
    columns.second_begin = params.sources[0].chunks;
    columns.second_end = columns.second_begin + (columns.second_active + chunk_keys - 1) / chunk_keys;
    bool active = lane < columns.first_end;
    bool more = lane + params.splits < columns.first_end;
    columns.second_first = columns.second_begin;
    if constexpr (T::two_sources) {
        const int second = columns.first_of_second(params, lane);
        more = more || second + (active ? 0 : params.splits) < columns.second_end;
        active = active || second < columns.second_end;
        columns.second_first = columns.first_of_second(params, split);
    }
    columns.split_mask = __ballot_sync(all_lanes, active && lane < params.splits);
    columns.weights_travel =
        T::exchanges_weights && columns.num_splits() > 1 && !__any_sync(all_lanes, more && lane < params.splits);
    return columns;
}

/// A warp's part of a chunk's columns, 8 at a time; four lanes share a record. The first chunk is shared out to the
/// warps that multiply, each of the others to the helpers.
template <bool kFirst>
struct Part {
    static constexpr int records = chunk_keys / (kFirst ? multiplying_warps : helper_warps);
    static constexpr int passes = records / 8;

    /// Of the chunk, the column that this lane copies in a pass.
    template <class T>
    __device__ static int column(const Place<T>& at, int pass) {
        return records * (kFirst ? at.warp : at.helper()) + 8 * pass + at.lane / 4;
    }
};

/// Where a chunk's column stands: in which list, and there.
struct ListPlace {
    bool second, exists;  ///< not: the list ends before
    int column;
};

template <class T>
__device__ ListPlace list_place(const Params& params, int number, int column) {
    const bool second = T::two_sources && number >= params.sources[0].chunks;
    if (second) number -= params.sources[0].chunks;
    const int in_list = number * chunk_keys + column;
    return {second, in_list < (second ? params.sources[1].width : params.sources[0].width), in_list};
}

/// Where the slot stands, null where the list ends. Does not look at counts: it need not wait for them.
template <class T>
__device__ const std::int32_t* slot_pointer(const Params& params, const Place<T>& at, const ListPlace& place) {
    const std::int32_t* slots = place.second ? params.sources[1].slots : params.sources[0].slots;
    const std::int64_t stride = place.second ? params.sources[1].slots_row_stride : params.sources[0].slots_row_stride;
    return place.exists ? slots + at.row * stride + place.column : nullptr;
}

/// A slot of the list that has been converted.
template <class T>
__device__ SharedAddress converted_slot(const Params& params, const Place<T>& at, int column) {
    return at.base + params.converted_offset + static_cast<std::uint32_t>(converted_slots_offset) + column * 4;
}

/// The slot of a chunk's column, -1 where the list ends.
template <class T>
__device__ int load_slot(const Params& params, const Place<T>& at, int number, int column) {
    const ListPlace place = list_place<T>(params, number, column);
    const std::int32_t* pointer = slot_pointer(params, at, place);
    if constexpr (!T::from_ids) {
        return load_global_if(place.exists, pointer, -1);
    } else {
        if (!place.second)
            pointer =
                static_cast<const std::int32_t*>(__cvta_shared_to_generic(converted_slot(params, at, place.column)));
        return load_generic_if(place.exists, pointer, -1);
    }
}

/// The slots that a warp needs for its part of a chunk.
template <class P, class T>
__device__ void load_slots(const Params& params, const Place<T>& at, int number, int (&slots)[P::passes]) {
#pragma unroll
    for (int pass = 0; pass < P::passes; ++pass) slots[pass] = load_slot(params, at, number, P::column(at, pass));
}

/// From one record to the next, of forms that lie contiguous in one tensor; 0 of the others.
template <class T>
inline constexpr int record_stride = T::record.is_plain()     ? T::d_qk
                                     : T::record.has_groups() ? stored_layout(T::form).record_bytes
                                                              : 0;

/// What a column's slot names: nothing, or a record.
struct Found {
    bool present;
    const std::byte* record;  ///< where absent, some record; not to be read
};

template <class T>
__device__ Found find_record(const Params& params, const Columns& columns, int slot, int number, int column) {
    static_assert(record_stride<T> != 0);
    const bool second = T::two_sources && columns.is_second(number);
    const int in_list = (second ? number - columns.second_begin : number) * chunk_keys + column;
    const int num_slots = second ? params.sources[1].num_slots : params.sources[0].num_slots;
    bool present = in_list < (second ? columns.second_active : columns.first_active) &&
                   static_cast<std::uint32_t>(slot) < static_cast<std::uint32_t>(num_slots);
    if (params.gaps) {
        const SourceView& source = params.sources[second ? 1 : 0];
        const auto page = static_cast<int>(__umulhi(slot, source.page_multiplier) >> source.page_shift);
        present = present && slot - page * source.slots_per_page < source.page_size;
    }
    const std::byte* records = second ? params.sources[1].records : params.sources[0].records;
    return {present, records + std::int64_t{present ? slot : 0} * record_stride<T>};
}

/// Gather::copies: 512 bytes of a record by the whole warp at a time, then what is left of eight records. `found`: of
/// record lane / 4, which goes to `to` + lane / 4 * pitch.
template <class T>
__device__ void copy_records(const Place<T>& at, const Found& found, SharedAddress to) {
    const auto record = found.present ? reinterpret_cast<unsigned long long>(found.record) : 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const unsigned long long from = __shfl_sync(all_lanes, record, 4 * i);
        copy_16_async(to + i * T::pitch + at.lane * 16, reinterpret_cast<const std::byte*>(from) + at.lane * 16,
                      from == 0);
    }
    if constexpr (T::d_qk > 512) {
        static_assert(T::d_qk == 512 + 4 * 16);
        const int byte = 512 + at.lane % 4 * 16;
        copy_16_async(to + at.lane / 4 * T::pitch + byte, found.record + byte, !found.present);
    }
}

/// Gather::bulk: a copy a record, `issues` by a lane of each. The CTAs of a cluster that hold other tiles of heads need
/// the same records: each of them fetches its share of every eight for all.
template <class T>
__device__ void copy_record_bulk(const Params& params, const Place<T>& at, const Found& found, bool issues,
                                 SharedAddress to, SharedAddress barrier) {
    if (!issues || at.lane / 4 * at.tiles / 8 != at.tile) return;
    if (at.tiles == 1) return copy_bulk_async(to, found.record, T::d_qk, barrier);
    copy_bulk_multicast(to, found.record, T::d_qk, barrier,
                        static_cast<std::uint16_t>(params.sharing_ctas << at.split));
}

/// Arrivals of a warp that gathers at the barrier of its copies: every lane's once these are there, and the warp's.
inline constexpr int arrivals_of_gather = 32 + arrivals_of_warp;

/// Starts the copies of this warp's part of a chunk into a stage; they arrive at `barrier`. `slots`: load_slots of this
/// chunk. Absent records become zeros.
template <class P, class T>
__device__ void gather_part(const Params& params, const Place<T>& at, const Columns& columns,
                            const int (&slots)[P::passes], int number, int stage, SharedAddress barrier) {
    constexpr int pieces = T::d_qk / 64;  // of 16 bytes, of each of a record's lanes
    const SharedAddress records = at.stages + stage * T::stage_bytes;
    const bool leads = at.lane % 4 == 0;
    Found found[P::passes];
    int copies = 0;
#pragma unroll
    for (int pass = 0; pass < P::passes; ++pass) {
        const int column = P::column(at, pass);
        found[pass] = find_record<T>(params, columns, slots[pass], number, column);
        const bool absent = !found[pass].present;
        if (leads) store_shared_8(at.present(stage) + column, absent ? 0 : 1);
        if (params.gather == Gather::copies) {
            copy_records(at, found[pass], records + (column - at.lane / 4) * T::pitch);
        } else {
            copies += __popc(__ballot_sync(all_lanes, leads && !absent));
#pragma unroll
            for (int i = 0; i < pieces; ++i)
                if (absent) store_shared(records + column * T::pitch + (at.lane % 4 + 4 * i) * 16, uint4{0, 0, 0, 0});
        }
    }
    if (params.gather == Gather::copies) arrive_after_copies(barrier);
    __syncwarp();  // what the lanes wrote
    if (params.gather == Gather::copies) {
        arrive_as_warp(barrier, at.lane);
        return;
    }
    if (at.lane == 0) {
        arrive_expecting(barrier, copies * T::d_qk);
        arrive(barrier, arrivals_of_gather - 1);
    }
    __syncwarp();
#pragma unroll
    for (int pass = 0; pass < P::passes; ++pass) {
        const int column = P::column(at, pass);
        copy_record_bulk(params, at, found[pass], leads && found[pass].present, records + column * T::pitch, barrier);
    }
}

/// Transport::weights: starts the copies of this CTA's dimensions of the records of all other splits. A helper has 16
/// records of each; half a warp finds those of one split, then the whole warp copies pieces of several.
template <class T>
__device__ void gather_slices(const Params& params, const Place<T>& at, const Columns& columns) {
    using S = Slices<T>;
    constexpr int records = chunk_keys / helper_warps;
    static_assert(records == 16);
    constexpr int pieces = S::dims / 16;   // of a record
    constexpr int together = 32 / pieces;  // records of which the warp copies pieces at a time
    constexpr int pairs = T::splits / 2;   // of splits; the last one has only one
    const auto split_of = [&](int other) { return other + (other < at.split ? 0 : 1); };
    const int column = records * at.helper() + at.lane % 16;
    int slots[pairs], numbers[pairs];
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
        const int split = split_of(2 * pair + at.lane / 16);
        numbers[pair] = columns.first_of_split(params, split);
        slots[pair] = columns.has_split(split) ? load_slot(params, at, numbers[pair], column) : -1;
    }
    const int row = records * at.helper() + at.lane / pieces;
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
        const Found found = find_record<T>(params, columns, slots[pair], numbers[pair], column);
        const auto record = found.present ? reinterpret_cast<unsigned long long>(found.record + at.split * S::dims) : 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (2 * pair + half == T::splits - 1) break;
            const int split = split_of(2 * pair + half);
            if (!columns.has_split(split)) continue;
            const SharedAddress to = S::slice(at, split) + row * S::pitch + at.lane % pieces * 16;
#pragma unroll
            for (int first = 0; first < records; first += together) {
                const int lane = 16 * half + first + at.lane / pieces;
                const unsigned long long from = __shfl_sync(all_lanes, record, lane);
                copy_16_async(to + first * S::pitch, reinterpret_cast<const std::byte*>(from) + at.lane % pieces * 16,
                              from == 0);
            }
        }
    }
    arrive_after_copies(at.slices_barrier());
    arrive_as_warp(at.slices_barrier(), at.lane);
}

}  // namespace sparsemla::detail::latency
