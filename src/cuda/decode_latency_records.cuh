// Records of forms that are not plain, on their way to a stage: codes and wide values as they are, by asynchronous
// copies; E2M1 codes become E4M3 in the stage, once they are there; scales of blocks become BF16 for each 16
// dimensions, through registers.
#pragma once

#include "cuda/decode_latency_gather.cuh"
#include "cuda/device/convert.cuh"

namespace sparsemla::detail::latency {

/// Where a record's parts lie.
struct RecordParts {
    bool present;           ///< where not, some record's; not to be read
    const std::byte* data;  ///< codes, wide values
    const std::byte* more;  ///< scales, or the rope of records in two tensors; null where all is at `data`
};

/// The parts of records that lie planar or in two tensors.
template <class T>
__device__ RecordParts find_placed_parts(const Params& params, const Columns& columns, int slot, int number,
                                         int column) {
    const bool second = columns.is_second(number);
    const SourceView& source = params.sources[second ? 1 : 0];
    const int in_list = (second ? number - columns.second_begin : number) * chunk_keys + column;
    bool present = in_list < (second ? columns.second_active : columns.first_active) &&
                   static_cast<std::uint32_t>(slot) < static_cast<std::uint32_t>(source.num_slots);
    int page = 0;
    if (params.gaps || source.planar) {
        page = source.slots_per_page == 1
                   ? slot
                   : static_cast<int>(__umulhi(slot, source.page_multiplier) >> source.page_shift);
        present = present && slot - page * source.slots_per_page < source.page_size;
    }
    if (!present) slot = page = 0;
    if (source.planar) {
        const std::byte* begin = source.records + page * source.page_stride_bytes;
        const int offset = slot - page * source.slots_per_page;
        return {present, begin + std::int64_t{offset} * source.data_bytes,
                begin + source.scales_of_page + std::int64_t{offset} * source.scale_bytes};
    }
    const std::byte* data = source.records + std::int64_t{slot} * source.data_bytes;
    if (T::record.codes == 0 && source.rope != nullptr)
        return {present, data, source.rope + std::int64_t{slot} * source.scale_bytes};
    return {present, data, data + source.scales_of_page};
}

template <class T>
__device__ RecordParts find_parts(const Params& params, const Columns& columns, int slot, int number, int column) {
    if constexpr (record_stride<T> != 0) {
        const Found found = find_record<T>(params, columns, slot, number, column);
        return {found.present, found.record, nullptr};
    } else {
        return find_placed_parts<T>(params, columns, slot, number, column);
    }
}

/// 16 bytes of a record.
template <class T>
__device__ void copy_piece(const Params& params, SharedAddress to, unsigned long long record, int byte) {
    const auto* from = reinterpret_cast<const std::byte*>(record) + byte;
    if (T::form == StageForm::blocks_rope && params.narrow_copies) {
        copy_8_async(to, from, record == 0);
        copy_8_async(to + 8, from + 8, record == 0);
    } else {
        copy_16_async(to, from, record == 0);
    }
}

/// kPieces pieces of eight records by the whole warp; `record`: of record lane / 4, null where it is absent: zeros.
template <int kPieces, class T>
__device__ void copy_pieces(const Params& params, const Place<T>& at, const std::byte* record, SharedAddress to) {
    const auto pointer = reinterpret_cast<unsigned long long>(record);
#pragma unroll
    for (int first = 0; first + 32 <= kPieces; first += 32)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            copy_piece<T>(params, to + i * T::pitch + (first + at.lane) * 16, __shfl_sync(all_lanes, pointer, 4 * i),
                          (first + at.lane) * 16);
    constexpr int rest = kPieces % 32, done = kPieces - rest;
#pragma unroll
    for (int first = 0; first < 8 * rest; first += 32) {
        const int number = first + at.lane;
        const int i = number / max(rest, 1), piece = done + number - i * rest;
        const unsigned long long from = __shfl_sync(all_lanes, pointer, 4 * min(i, 7));
        if (number < 8 * rest) copy_piece<T>(params, to + i * T::pitch + piece * 16, from, piece * 16);
    }
}

/// What a lane has of the scales of record lane / 4: a quarter, as stored; zeros of an absent one. Of fp8_v41 the first
/// word is all.
template <class T>
struct StoredScales {
    std::uint32_t words[T::form == StageForm::blocks_576 ? 4 : T::form == StageForm::blocks_512 ? 2 : 1];
};

/// Without branches, so that all loads are under way at a time, and nothing is done with what they bring: it would be
/// waited for.
template <class T>
__device__ StoredScales<T> load_scales(const SourceView& source, const RecordParts& parts, int quarter) {
    const bool present = parts.present;
    const std::byte* from = parts.more;
    if constexpr (T::form == StageForm::blocks_rope) {
        return {load_global_if_16(present, from + 2 * quarter)};
    } else if constexpr (T::form == StageForm::blocks_512) {
        const bool eight = source.record == Record::nvfp4_v41;
        from += quarter * (eight ? 8 : 4);
        return {load_global_if_32(present, from), load_global_if_32(present && eight, from + 4)};
    } else {
        // Block b is at 8 * (b & 3) + (b >> 2).
        static_assert(T::form == StageForm::blocks_576);
        from += 2 * quarter;
        return {load_global_if_16(present, from), load_global_if_16(present, from + 8),
                load_global_if_16(present, from + 16), load_global_if_16(present, from + 24)};
    }
}

/// The quarter's eight scales of 16 dimensions as BF16.
template <class T>
__device__ uint4 block_scales(const SourceView& source, const StoredScales<T>& stored, int quarter) {
    const auto& words = stored.words;
    if constexpr (T::form == StageForm::blocks_rope) {
        // Of eight bytes the last one is none.
        const std::uint32_t low = ue8m0_to_bf16_twice(words[0] & 0xFF);
        const std::uint32_t high = ue8m0_to_bf16_twice(quarter == 3 ? 0 : words[0] >> 8);
        return {low, low, high, high};
    } else {
        TwoPairs codes;
        if constexpr (T::form == StageForm::blocks_512) {
            if (source.record == Record::fp8_v41)
                return {ue8m0_to_bf16_twice(words[0] & 0xFF), ue8m0_to_bf16_twice(words[0] >> 8 & 0xFF),
                        ue8m0_to_bf16_twice(words[0] >> 16 & 0xFF), ue8m0_to_bf16_twice(words[0] >> 24)};
            codes = {words[0], words[1]};
        } else {
            const std::uint32_t first = words[0] | words[1] << 16, last = words[2] | words[3] << 16;
            codes = {__byte_perm(first, last, 0x6420), __byte_perm(first, last, 0x7531)};
        }
        const TwoPairs low = e4m3x4_to_bf16(codes.low), high = e4m3x4_to_bf16(codes.high);
        return {low.low, low.high, high.low, high.high};
    }
}

/// Where the copies bring a record's E2M1 codes: the upper half of the room that its E4M3 codes will have.
inline constexpr int packed_bytes = 256;

/// 512 E2M1 codes of each of eight records become E4M3 codes, in place. All of the warp's copies have come.
__device__ inline void unpack_codes(int lane, SharedAddress to, int pitch) {
    constexpr int rounds = 4;  // of two records, 16 bytes of a lane
    uint4 words[rounds];
#pragma unroll
    for (int i = 0; i < rounds; ++i)
        words[i] = load_shared<uint4>(to + (2 * i + lane / 16) * pitch + packed_bytes + lane % 16 * 16);
    __syncwarp();  // all have read
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
        const SharedAddress codes = to + (2 * i + lane / 16) * pitch + lane % 16 * 32;
        const TwoPairs x = e2m1x8_to_e4m3(words[i].x), y = e2m1x8_to_e4m3(words[i].y);
        const TwoPairs z = e2m1x8_to_e4m3(words[i].z), w = e2m1x8_to_e4m3(words[i].w);
        store_shared(codes, uint4{x.low, x.high, y.low, y.high});
        store_shared(codes + 16, uint4{z.low, z.high, w.low, w.high});
    }
}

/// The asynchronous copies of eight records.
template <class T>
__device__ void copy_records_of_form(const Params& params, const Place<T>& at, const SourceView& source,
                                     const RecordParts& parts, SharedAddress to) {
    constexpr RecordLayout stored = stored_layout(T::form);
    const std::byte* data = parts.present ? parts.data : nullptr;
    if constexpr (T::record.has_groups()) {
        copy_pieces<stored.record_bytes / 16>(params, at, data, to);
    } else if constexpr (T::form == StageForm::wide_576) {
        if (source.rope == nullptr) return copy_pieces<stored.record_bytes / 16>(params, at, data, to);
        copy_pieces<stored.main.bytes() / 16>(params, at, data, to);
        copy_pieces<stored.rope.bytes() / 16>(params, at, parts.present ? parts.more : nullptr,
                                              to + stored.rope.offset_bytes);
    } else if constexpr (T::form == StageForm::blocks_rope) {
        copy_pieces<stored.data_bytes / 16>(params, at, data, to);
    } else if constexpr (T::form == StageForm::blocks_576) {
        copy_pieces<packed_bytes / 16>(params, at, data, to + packed_bytes);
        copy_pieces<stored.rope.bytes() / 16>(params, at, data == nullptr ? nullptr : data + stored.rope.offset_bytes,
                                              to + stored.rope.first_dim);
    } else {
        if (source.record == Record::fp8_v41)
            copy_pieces<T::record.codes / 16>(params, at, data, to);
        else
            copy_pieces<packed_bytes / 16>(params, at, data, to + packed_bytes);
    }
}

/// The same by bulk copies, started by one lane a record: how many bytes come.
template <class T>
__device__ int bulk_bytes(const SourceView& source) {
    if (T::record.codes == 0) return stored_layout(T::form).record_bytes;
    return T::form == StageForm::blocks_512 ? T::record.codes : source.data_bytes;
}
template <class T>
__device__ void copy_record_of_form_bulk(const SourceView& source, const RecordParts& parts, SharedAddress to,
                                         SharedAddress barrier) {
    const bool in_two = T::record.codes == 0 && source.rope != nullptr;
    constexpr RecordLayout stored = stored_layout(T::form);
    copy_bulk_async(to, parts.data, in_two ? stored.main.bytes() : bulk_bytes<T>(source), barrier);
    if (in_two) copy_bulk_async(to + stored.rope.offset_bytes, parts.more, stored.rope.bytes(), barrier);
}

/// gather_part for forms that are not plain.
template <class P, class T>
__device__ void gather_records(const Params& params, const Place<T>& at, const Columns& columns,
                               const int (&slots)[P::passes], int number, int stage, SharedAddress barrier) {
    const SourceView& source = params.sources[columns.is_second(number) ? 1 : 0];
    constexpr bool may_be_packed = T::form == StageForm::blocks_512 || T::form == StageForm::blocks_576;
    const bool packed = T::form == StageForm::blocks_576 || (may_be_packed && source.record == Record::nvfp4_v41);
    const bool bulk = params.gather == Gather::bulk && !packed && !params.narrow_copies;
    const int quarter = at.lane % 4;
    RecordParts parts[P::passes];
    [[maybe_unused]] StoredScales<T> scales[P::passes];
    int copies = 0;
#pragma unroll
    for (int pass = 0; pass < P::passes; ++pass) {
        const int column = P::column(at, pass);
        parts[pass] = find_parts<T>(params, columns, slots[pass], number, column);
        if (quarter == 0) store_shared_8(at.present(stage) + column, parts[pass].present ? 1 : 0);
        if constexpr (T::record.has_blocks()) scales[pass] = load_scales<T>(source, parts[pass], quarter);
    }
#pragma unroll
    for (int pass = 0; pass < P::passes; ++pass) {
        const int column = P::column(at, pass);
        if (!bulk) {
            copy_records_of_form(params, at, source, parts[pass], at.record(stage, column - at.lane / 4));
            continue;
        }
        copies += __popc(__ballot_sync(all_lanes, quarter == 0 && parts[pass].present));
        constexpr int pieces = (T::record.has_blocks() ? T::record.scales_offset : T::pitch) / 16;
        if (!parts[pass].present)
            for (int i = quarter; i < pieces; i += 4)
                store_shared(at.record(stage, column) + i * 16, uint4{0, 0, 0, 0});
    }
    if (!bulk && !packed) arrive_after_copies(barrier);
#pragma unroll
    for (int pass = 0; pass < P::passes; ++pass) {
        const SharedAddress record = at.record(stage, P::column(at, pass));
        if constexpr (T::record.has_blocks())
            store_shared(record + T::record.scales_offset + quarter * 16,
                         block_scales<T>(source, scales[pass], quarter));
    }
    if constexpr (may_be_packed)
        if (packed) {
            wait_for_copies();
            __syncwarp();
#pragma unroll
            for (int pass = 0; pass < P::passes; ++pass)
                unpack_codes(at.lane, at.record(stage, P::column(at, pass) - at.lane / 4), T::pitch);
            arrive_after_copies(barrier);
        }
    __syncwarp();  // what the lanes wrote
    if (!bulk) return arrive_as_warp(barrier, at.lane);
    if (at.lane == 0) {
        arrive_expecting(barrier, copies * bulk_bytes<T>(source));
        arrive(barrier, arrivals_of_gather - 1);
    }
    __syncwarp();
#pragma unroll
    for (int pass = 0; pass < P::passes; ++pass)
        if (quarter == 0 && parts[pass].present)
            copy_record_of_form_bulk<T>(source, parts[pass], at.record(stage, P::column(at, pass)), barrier);
}

/// gather_part or gather_records.
template <class P, class T>
__device__ void gather_chunk(const Params& params, const Place<T>& at, const Columns& columns,
                             const int (&slots)[P::passes], int number, int stage, SharedAddress barrier) {
    if constexpr (T::record.is_plain())
        gather_part<P>(params, at, columns, slots, number, stage, barrier);
    else
        gather_records<P>(params, at, columns, slots, number, stage, barrier);
}

}  // namespace sparsemla::detail::latency
