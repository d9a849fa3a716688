// decode_wide's records: from the cache to shared memory as they are stored, and from there as halves to a stage. A
// warp converts the eight records of a step that it gathered: it waits for its own copies and for a free stage alone.
#pragma once

#include <algorithm>
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
    bool exists;  ///< there is such a step
    bool present;
    bool packed;   ///< E2M1
    bool second;   ///< of source 1
    uint2 scales;  ///< of blocks: a quarter, as stored
};

/// 16-byte pieces of a record by its four lanes in turn: `from` and `to` of this lane's first one. Offsets are known
/// then, and no lane asks another one for an address.
template <int kPieces>
__device__ void copy_quarter(SharedAddress to, const std::byte* from, int quarter, bool absent) {
    [&]<int... kRounds>(std::integer_sequence<int, kRounds...>) {
        (copy_16_async_at<64 * kRounds>(to, from, absent), ...);
    }
    (std::make_integer_sequence<int, kPieces / 4>());
    if (kPieces % 4 != 0 && quarter < kPieces % 4) copy_16_async_at<kPieces / 4 * 64>(to, from, absent);
}

/// Starts the copies of this warp's part of half a chunk; they are a group. `slot`: of this lane's record.
template <class T>
__device__ void gather_half(const latency::Params& params, const WidePlace<T>& at, const Columns& columns, int slot,
                            const StepOfPiece& step, int room, Gathered& gathered) {
    const int number = step.number, column = step.half * step_keys + row_of_lane(at), quarter = at.lane % 4;
    const SharedAddress to = at.record(0, room * step_keys + row_of_lane(at)) + quarter * 16;
    constexpr RecordLayout stored = stored_layout(T::form);
    if constexpr (T::record.is_plain()) {
        const Found found = find_record<T>(params, columns, slot, number, column);
        gathered.present = found.present;
        copy_quarter<T::d_qk / 16>(to, found.record + quarter * 16, quarter, !found.present);
    } else {
        const SourceView& source = params.sources[columns.is_second(number) ? 1 : 0];
        const RecordParts parts = find_parts<T>(params, columns, slot, number, column);
        gathered.present = parts.present;
        gathered.packed = T::form == StageForm::blocks_576 ||
                          (T::form == StageForm::blocks_512 && source.record == Record::nvfp4_v41);
        gathered.second = columns.is_second(number);
        if constexpr (T::record.has_groups()) {
            copy_quarter<stored.record_bytes / 16>(to, parts.data + quarter * 16, quarter, !parts.present);
        } else {
            if constexpr (T::record.has_blocks()) gathered.scales = load_scales<T>(source, parts, quarter);
            copy_records_of_form(params, at, source, parts,
                                 at.record(0, room * step_keys + row_of_lane(at) - at.lane / 4));
        }
    }
    commit_copies();
}

/// A quarter of a block of 64 dimensions of a record.
using Halves = uint4[2];

__device__ inline void scale_halves(std::uint32_t scale, uint4& halves) {
    const std::uint32_t twice = scale * 0x10001U;
    halves = {multiply_bf16x2(halves.x, twice), multiply_bf16x2(halves.y, twice), multiply_bf16x2(halves.z, twice),
              multiply_bf16x2(halves.w, twice)};
}

/// kBlocks blocks from `first` on of eight records, of which this lane has a quarter of one: all loads come before all
/// work. To `to` and, the upper half of the quarter, `to_upper`.
template <class T, int kBlocks>
__device__ void convert_codes(SharedAddress record, int quarter, const Gathered& gathered, int first, SharedAddress to,
                              SharedAddress to_upper) {
    const bool scaled = T::record.has_blocks() && 64 * first < T::record.scaled;
    const bool packed =
        (T::form == StageForm::blocks_512 || T::form == StageForm::blocks_576) && scaled && gathered.packed;
    uint4 codes[kBlocks];
    std::uint32_t scales[kBlocks];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
        const int block = first + i;
        if (packed) {
            const uint2 pairs = load_shared<uint2>(record + packed_bytes + 32 * block + 8 * quarter);
            codes[i].x = pairs.x;
            codes[i].z = pairs.y;
        } else {
            codes[i] = load_shared<uint4>(record + 64 * block + 16 * quarter);
        }
        if (scaled) scales[i] = load_shared_16(record + T::record.scales_offset + (4 * block + quarter) * 2);
    }
    std::uint32_t nan = 0;
    if constexpr (T::half == Half::f16) {
    } else if (packed) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            const TwoPairs lower = e2m1x8_to_e4m3(codes[i].x), upper = e2m1x8_to_e4m3(codes[i].z);
            codes[i] = {lower.low, lower.high, upper.low, upper.high};
        }
    } else {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
            nan |= has_e4m3_nan(codes[i].x) | has_e4m3_nan(codes[i].y) | has_e4m3_nan(codes[i].z) |
                   has_e4m3_nan(codes[i].w);
    }
    const auto store = [&](const auto& convert) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            const TwoPairs x = convert(codes[i].x), y = convert(codes[i].y);
            const TwoPairs z = convert(codes[i].z), w = convert(codes[i].w);
            Halves halves = {{x.low, x.high, y.low, y.high}, {z.low, z.high, w.low, w.high}};
            if (scaled) {
                scale_halves(scales[i], halves[0]);
                scale_halves(scales[i], halves[1]);
            }
            store_shared(to + (first + i) * T::KeyTile::block_bytes, halves[0]);
            store_shared(to_upper + (first + i) * T::KeyTile::block_bytes, halves[1]);
        }
    };
    if constexpr (T::half == Half::f16)
        store(e4m3x4_to_f16);
    else if (nan == 0)
        store(finite_e4m3x4_to_bf16);
    else
        store(e4m3x4_to_bf16);
}

/// The same of a block of BF16 values.
template <class T>
__device__ void convert_wide(SharedAddress record, int quarter, int block, SharedAddress to, SharedAddress to_upper) {
    const SharedAddress from = record + T::record.wide_offset + (64 * block - T::record.codes) * 2 + quarter * 32;
    const uint4 lower = load_shared<uint4>(from), upper = load_shared<uint4>(from + 16);
    store_shared(to + block * T::KeyTile::block_bytes, lower);
    store_shared(to_upper + block * T::KeyTile::block_bytes, upper);
}

/// A warp's eight records of a step, which have come, to a stage.
template <class T>
__device__ void convert_half(const latency::Params& params, const WidePlace<T>& at, const Gathered& gathered, int room,
                             int stage) {
    const int quarter = at.lane % 4, row = row_of_lane(at);
    const SharedAddress record = at.record(0, room * step_keys + row);
    if constexpr (T::record.has_blocks()) {
        store_shared(record + T::record.scales_offset + quarter * 16,
                     block_scales<T>(params.sources[gathered.second ? 1 : 0], gathered.scales));
        __syncwarp();
    }
    if (quarter == 0) store_shared_8(at.present_of_step(stage) + row, gathered.present ? 1 : 0);
    if constexpr (T::record.has_groups())
        store_shared(at.scale(stage, quarter, row), load_shared<float>(record + T::record.scales_offset + quarter * 4));
    const SharedAddress to = at.step_tile(stage) + T::KeyTile::byte(row, 2 * quarter);
    const SharedAddress to_upper = at.step_tile(stage) + T::KeyTile::byte(row, 2 * quarter + 1);
    const auto announce = [&](SharedAddress barrier) {
        fence_async_proxy();
        __syncwarp();
        arrive_as_warp(barrier, at.lane);
    };
    constexpr int code_blocks = T::record.codes / 64;
    constexpr int alike = (T::record.has_blocks() ? T::record.scaled : T::record.codes) / 64;  // codes with scales
    const auto convert_blocks = [&]<int kBegin, int kEnd>() {
        constexpr int end = std::min(kEnd, alike), count = end - kBegin;
        if constexpr (count > 0) {
            constexpr int together = count % 3 == 0 ? 3 : count % 2 == 0 ? 2 : 1;
#pragma unroll 1
            for (int block = kBegin; block < end; block += together)
                convert_codes<T, together>(record, quarter, gathered, block, to, to_upper);
        }
#pragma unroll 1
        for (int block = std::max(kBegin, alike); block < std::min(kEnd, code_blocks); ++block)
            convert_codes<T, 1>(record, quarter, gathered, block, to, to_upper);
#pragma unroll 1
        for (int block = std::max(kBegin, code_blocks); block < kEnd; ++block)
            convert_wide<T>(record, quarter, block, to, to_upper);
    };
    convert_blocks.template operator()<0, T::lower_dims / 64>();
    announce(at.lower_full(stage));
    convert_blocks.template operator()<T::lower_dims / 64, T::blocks>();
    announce(at.full(stage));
}

/// The steps of a CTA, piece after piece, as they are gathered; announces each piece to the other warps.
template <class T>
class Gatherer {
   public:
    __device__ Gatherer(const Params& params, WidePlace<T>& at, WideShared& shared)
        : params_(params), at_(at), shared_(shared), walk_(params, shared.share) {
        begin_piece();
    }

    __device__ bool has_more() const { return has_more_; }

    /// Starts the next step's copies, and loads the slots of the one after it.
    __device__ void gather(Gathered& gathered, int room) {
        gather_half(params_.call, at_, columns_, slot_, step_, room, gathered);
        if (step_.advance(params_, columns_, piece_))
            load_slot_of_lane();
        else
            begin_piece();
    }

   private:
    __device__ void load_slot_of_lane() {
        slot_ = load_slot(slot_pointer<T>(params_.call, at_, step_.number, step_.half * step_keys + row_of_lane(at_)));
    }

    __device__ void begin_piece() {
        has_more_ = walk_.next(piece_);
        if (!has_more_) return;
        columns_ = enter<T>(params_, at_, piece_);
        step_ = StepOfPiece(params_, columns_, piece_);
        load_slot_of_lane();
        if (at_.helper() != 0) return;
        wait_mbarrier(at_.piece_empty(turn_.number), turn_.parity ^ 1);
        if (at_.lane == 0) shared_.pieces[turn_.number] = piece_;
        __syncwarp();
        arrive_as_warp(at_.piece_full(turn_.number), at_.lane);
        turn_.advance(wide::pieces);
    }

    const Params& params_;
    WidePlace<T>& at_;
    WideShared& shared_;
    Walk<T> walk_;
    Piece piece_;
    Columns columns_;
    StepOfPiece step_;
    Turn turn_;
    int slot_;
    bool has_more_;
};

/// What the warps that convert do: the copies of two steps are under way while one before them becomes halves.
template <class T>
__device__ void convert(const Params& params, WidePlace<T>& at, WideShared& shared) {
    static_assert(raw_steps == 2);
    Gatherer<T> gatherer(params, at, shared);
    Turn stage;
    Gathered first, second;
    const auto gather = [&](Gathered& gathered, int room) {
        gathered.exists = gatherer.has_more();
        if (gathered.exists)
            gatherer.gather(gathered, room);
        else
            commit_copies();
    };
    const auto convert_next = [&](const Gathered& gathered, int room) {
        wait_mbarrier(at.empty(stage.number), stage.parity ^ 1);
        wait_for_copy_groups<raw_steps - 1>();
        __syncwarp();  // the copies of all lanes
        convert_half(params.call, at, gathered, room, stage.number);
        stage.advance(at.stages_of_keys);
    };
    gather(first, 0);
    gather(second, 1);
    // The same code for both rooms: instructions come from far.
#pragma unroll 1
    for (int room = 0; first.exists; room ^= 1) {
        convert_next(first, room);
        Gathered next;
        gather(next, room);
        first = second;
        second = next;
    }
}

}  // namespace sparsemla::detail::wide
