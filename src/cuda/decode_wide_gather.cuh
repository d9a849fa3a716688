// decode_wide's records: from the cache to shared memory, as they are stored. A warp copies the eight records of a step
// that it will convert: it waits for its own copies alone.
#pragma once

#include <utility>

#include "cuda/decode_latency_records.cuh"
#include "cuda/decode_wide_tile.cuh"

namespace sparsemla::detail::wide {

inline constexpr int records_of_warp = step_keys / converting_warps;
static_assert(records_of_warp == 8);

/// Of a step's records, the one that four lanes share.
template <class T>
__device__ int row_of_lane(const WidePlace<T>& at) {
    return records_of_warp * at.helper() + at.lane / 4;
}

/// What a lane keeps of record lane / 4 from its gather to its conversion.
struct Gathered {
    const std::byte* record;  ///< null where it is absent
    const std::byte* rope;    ///< of wide records the same
    bool packed;              ///< of blocks: E2M1
    bool second;              ///< of blocks: of source 1
};

/// Where a lane's record was copied to. Blocks of 64 bytes; odd records may have each two of them exchanged.
template <class T>
struct RawRecord {
    SharedAddress lower, upper;
    int exchanged_lower, exchanged_upper;  ///< 64, where they are

    __device__ RawRecord(const WidePlace<T>& at, int room) {
        const int row = row_of_lane(at), odd = row % 2 * 64;
        lower = at.lower_of_record(room, row);
        upper = T::raw.is_whole() ? lower + lower_dims : at.upper_of_record(row);
        exchanged_lower = exchanges_blocks(T::raw.lower_pitch) ? odd : 0;
        exchanged_upper = !T::raw.is_whole() && exchanges_blocks(T::raw.upper_pitch) ? odd : 0;
    }
    /// Of codes: 64 dimensions.
    __device__ SharedAddress block(int number) const {
        return number < lower_dims / 64 ? lower + (64 * number ^ exchanged_lower)
                                        : upper + ((64 * number - lower_dims) ^ exchanged_upper);
    }
    /// Of wide values: half a block of 64 dimensions.
    __device__ SharedAddress half_of_wide(int number, int half) const {
        if (T::record.codes > 0)
            return T::raw.is_whole()
                       ? lower + T::record.wide_offset + 64 * (2 * number + half) - 2 * T::record.codes
                       : upper + ((64 * (2 * number + half) - T::record.codes - lower_dims) ^ exchanged_upper);
        return (number < lower_dims / 64 ? lower + 128 * number : upper + 128 * number - 2 * lower_dims) + 64 * half;
    }
};

/// Copies of eight records, 128 bytes of each by eight lanes: as much of a record at a time as a line of the L1 holds.
/// Each lane helps with two records. Offsets are known when this is compiled.
struct RecordCopies {
    const std::byte* from[2];  ///< null where the record is absent
    int row, piece;            ///< of the warp's eight, the first record; of 128 bytes, the lane's 16

    /// `record`: of record lane / 4, null where it is absent.
    __device__ RecordCopies(const std::byte* record, int lane) : row(lane / 8), piece(lane % 8) {
        const auto pointer = reinterpret_cast<unsigned long long>(record);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            from[i] = reinterpret_cast<const std::byte*>(__shfl_sync(all_lanes, pointer, 4 * (row + 4 * i)));
    }

    /// kRuns * 128 bytes of each from byte `offset` on; `to`: of the warp's first record.
    template <int kRuns, int kPitch>
    __device__ void copy(SharedAddress to, int offset) const {
        constexpr bool exchanges = exchanges_blocks(kPitch);
        to += row * kPitch + (exchanges ? piece ^ row % 2 * 4 : piece) * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) [&]<int... kNumbers>(std::integer_sequence<int, kNumbers...>) {
                (copy_16_async_at<128 * kNumbers>(to + i * 4 * kPitch, from[i] + offset + 16 * piece,
                                                  from[i] == nullptr),
                 ...);
            }
        (std::make_integer_sequence<int, kRuns>());
    }

    /// 64 bytes of each: half of the lanes have the first record, the others the second.
    template <int kPitch>
    __device__ void copy_half_run(SharedAddress to, int offset) const {
        static_assert(!exchanges_blocks(kPitch));
        const int half = piece / 4;
        const std::byte* record = half == 0 ? from[0] : from[1];
        copy_16_async(to + (row + 4 * half) * kPitch + piece % 4 * 16, record + offset + piece % 4 * 16,
                      record == nullptr);
    }
};

/// Scales of blocks come by asynchronous copies, as a register that is loaded would be waited for together with slots
/// that were asked for later. They lie, as stored, a byte for 16 dimensions or less, in the upper half of where their
/// BF16 will.
template <class T>
__device__ SharedAddress place_of_stored_scales(SharedAddress record) {
    return record + T::record.scales_offset + value_blocks;
}

template <class T>
__device__ void copy_scales(const RecordParts& parts, bool packed, int quarter, SharedAddress record) {
    const bool absent = !parts.present;
    // Of a quarter eight bytes (E2M1's scales) or four; of fp8_v4, which has eight in all, two lanes copy four each.
    const int offset = quarter * (packed ? 8 : 4);
    const SharedAddress to = place_of_stored_scales<T>(record) + offset;
    copy_4_async(to, parts.more + offset,
                 absent || (T::form == StageForm::blocks_rope && offset >= stored_layout(T::form).scale_bytes));
    if (packed) copy_4_async(to + 4, parts.more + offset + 4, absent);
}

/// A lane's quarter, once it has come.
template <class T>
__device__ StoredScales<T> read_scales(SharedAddress record, bool packed, int quarter) {
    const SharedAddress from = place_of_stored_scales<T>(record);
    if constexpr (T::form == StageForm::blocks_rope) {
        return {load_shared_16(from + 2 * quarter)};
    } else if constexpr (T::form == StageForm::blocks_512) {
        const uint2 words = load_shared<uint2>(from + quarter / (packed ? 1 : 2) * 8);
        return {!packed && quarter % 2 == 1 ? words.y : words.x, words.y};
    } else {
        return {load_shared_16(from + 2 * quarter), load_shared_16(from + 2 * quarter + 8),
                load_shared_16(from + 2 * quarter + 16), load_shared_16(from + 2 * quarter + 24)};
    }
}

/// Copies of eight records that stay whole, but for their scales.
template <class T>
__device__ void copy_whole_records(const latency::Params& params, const WidePlace<T>& at, const SourceView& source,
                                   const RecordParts& parts, const Gathered& gathered, SharedAddress to) {
    constexpr int pitch = T::raw.lower_pitch;
    if (T::form == StageForm::blocks_rope && params.narrow_copies)
        return copy_records_of_form(params, at, source, parts, to);
    const RecordCopies copies(gathered.record, at.lane);
    if constexpr (T::form == StageForm::blocks_rope) {
        constexpr int bytes = stored_layout(T::form).data_bytes, whole_runs = bytes / 128;
        static_assert(bytes % 128 == 64);
        copies.copy<whole_runs, pitch>(to, 0);
        copies.copy_half_run<pitch>(to + whole_runs * 128, whole_runs * 128);
    } else if constexpr (T::form == StageForm::blocks_576) {
        constexpr RecordRun rope = stored_layout(T::form).rope;
        copies.copy<packed_bytes / 128, pitch>(to + packed_bytes, 0);
        copies.copy_half_run<pitch>(to + rope.first_dim, rope.offset_bytes);
    } else if (gathered.packed) {
        copies.copy<packed_bytes / 128, pitch>(to + packed_bytes, 0);
    } else {
        copies.copy<T::record.codes / 128, pitch>(to, 0);
    }
}

/// Starts the copies of this warp's part of half a chunk, its lower dimensions or, of records that stay whole, all of
/// it; they are a group. `slot`: of this lane's record.
template <class T>
__device__ void gather_lower(const latency::Params& params, const WidePlace<T>& at, const Columns& columns, int slot,
                             const StepOfPiece& step, int room, int info, Gathered& gathered) {
    const int number = step.number, column = step.half * step_keys + row_of_lane(at), quarter = at.lane % 4;
    const int first_row = records_of_warp * at.helper();
    if constexpr (T::record.is_plain()) {
        const Found found = find_record<T>(params, columns, slot, number, column);
        gathered.record = found.present ? found.record : nullptr;
    } else {
        const SourceView& source = params.sources[columns.is_second(number) ? 1 : 0];
        const RecordParts parts = find_parts<T>(params, columns, slot, number, column);
        gathered.record = parts.present ? parts.data : nullptr;
        if constexpr (T::record.codes == 0) {
            const std::byte* rope = source.rope != nullptr ? parts.more : parts.data + 2 * value_dims;
            gathered.rope = parts.present ? rope : nullptr;
        }
        if constexpr (T::record.has_blocks()) {
            gathered.second = columns.is_second(number);
            gathered.packed = T::form == StageForm::blocks_576 ||
                              (T::form == StageForm::blocks_512 && source.record == Record::nvfp4_v41);
            copy_scales<T>(parts, gathered.packed, quarter, at.lower_of_record(room, row_of_lane(at)));
            copy_whole_records(params, at, source, parts, gathered, at.lower_of_record(room, first_row));
        }
    }
    const std::uint32_t present = __ballot_sync(all_lanes, gathered.record != nullptr);
    store_shared_if(at.lane == 0, at.present_of_step(info) + at.helper() * 4, present);
    if constexpr (!T::raw.is_whole()) {
        constexpr int lower_bytes = T::record.codes > 0 ? lower_dims : 2 * lower_dims;
        const RecordCopies copies(gathered.record, at.lane);
        copies.copy<lower_bytes / 128, T::raw.lower_pitch>(at.lower_of_record(room, first_row), 0);
        if constexpr (T::record.has_groups())
            copy_4_async(at.scale(info, quarter, row_of_lane(at)),
                         gathered.record + T::record.scales_offset + quarter * 4, gathered.record == nullptr);
    }
    commit_copies();
}

/// The same of the upper dimensions of records that do not stay whole.
template <class T>
__device__ void gather_upper(const WidePlace<T>& at, const Gathered& gathered) {
    static_assert(!T::raw.is_whole());
    const SharedAddress to = at.upper_of_record(records_of_warp * at.helper());
    constexpr int pitch = T::raw.upper_pitch;
    const RecordCopies copies(gathered.record, at.lane);
    if constexpr (T::record.codes == 0) {
        constexpr int latent_bytes = 2 * (value_dims - lower_dims);
        copies.copy<latent_bytes / 128, pitch>(to, 2 * lower_dims);
        RecordCopies(gathered.rope, at.lane).copy<1, pitch>(to + latent_bytes, 0);
    } else {
        constexpr int code_bytes = T::record.codes - lower_dims;
        copies.copy<code_bytes / 128, pitch>(to, lower_dims);
        if constexpr (code_bytes % 128 != 0)
            copies.copy_half_run<pitch>(to + code_bytes / 128 * 128, lower_dims + code_bytes / 128 * 128);
        if constexpr (T::record.wide() > 0) copies.copy<1, pitch>(to + code_bytes, T::record.wide_offset);
    }
    commit_copies();
}

}  // namespace sparsemla::detail::wide
