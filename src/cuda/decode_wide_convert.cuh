// decode_wide's records: from the cache to shared memory as they are stored, and from there as BF16 to a stage. A warp
// converts the eight records of a step that it gathered, so that it waits for nobody but its own copies.
#pragma once

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
    bool present;
    bool packed;   ///< E2M1
    bool second;   ///< of source 1
    uint2 scales;  ///< of blocks: a quarter, as stored
};

/// Starts the copies of this warp's part of half a chunk; they are a group. `slot`: of this lane's record.
template <class T>
__device__ Gathered gather_half(const latency::Params& params, const WidePlace<T>& at, const Columns& columns, int slot,
                                const StepOfPiece& step, int room) {
    const int number = step.number, column = step.half * step_keys + row_of_lane(at);
    const SharedAddress to = at.record(0, room * step_keys + row_of_lane(at) - at.lane / 4);
    Gathered gathered{};
    if constexpr (T::record.is_plain()) {
        const Found found = find_record<T>(params, columns, slot, number, column);
        gathered.present = found.present;
        copy_records(at, found, to);
    } else {
        const SourceView& source = params.sources[columns.is_second(number) ? 1 : 0];
        const RecordParts parts = find_parts<T>(params, columns, slot, number, column);
        gathered.present = parts.present;
        gathered.packed = T::form == StageForm::blocks_576 ||
                          (T::form == StageForm::blocks_512 && source.record == Record::nvfp4_v41);
        gathered.second = columns.is_second(number);
        if constexpr (T::record.has_blocks()) gathered.scales = load_scales<T>(source, parts, at.lane % 4);
        copy_records_of_form(params, at, source, parts, to);
    }
    commit_copies();
    return gathered;
}

/// 16 E4M3 codes as BF16.
__device__ inline void codes_to_halves(const uint4& codes, uint4 (&halves)[2]) {
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    TwoPairs pairs[4];
    std::uint32_t nan = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = finite_e4m3x4_to_bf16(words[i]);
        nan |= has_e4m3_nan(words[i]);
    }
    if (nan != 0)
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = e4m3x4_to_bf16(words[i]);
    halves[0] = {pairs[0].low, pairs[0].high, pairs[1].low, pairs[1].high};
    halves[1] = {pairs[2].low, pairs[2].high, pairs[3].low, pairs[3].high};
}

__device__ inline void scale_halves(std::uint32_t scale, uint4& halves) {
    const std::uint32_t twice = scale * 0x10001U;
    halves = {multiply_bf16x2(halves.x, twice), multiply_bf16x2(halves.y, twice), multiply_bf16x2(halves.z, twice),
              multiply_bf16x2(halves.w, twice)};
}

/// Block `block` of 64 dimensions of eight records, a quarter of one record a lane.
template <class T>
__device__ void convert_block(const WidePlace<T>& at, SharedAddress record, const Gathered& gathered, int block,
                              SharedAddress tile, int row) {
    const int quarter = at.lane % 4;
    uint4 halves[2];
    if (64 * block >= T::record.codes) {
        const SharedAddress from = record + T::record.wide_offset + (64 * block - T::record.codes) * 2 + quarter * 32;
        halves[0] = load_shared<uint4>(from);
        halves[1] = load_shared<uint4>(from + 16);
    } else {
        const bool scaled = T::record.has_blocks() && 64 * block < T::record.scaled;
        if ((T::form == StageForm::blocks_512 || T::form == StageForm::blocks_576) && scaled && gathered.packed) {
            const uint2 packed = load_shared<uint2>(record + packed_bytes + 32 * block + 8 * quarter);
            const TwoPairs first = e2m1x8_to_e4m3(packed.x), last = e2m1x8_to_e4m3(packed.y);
            codes_to_halves({first.low, first.high, last.low, last.high}, halves);
        } else {
            codes_to_halves(load_shared<uint4>(record + 64 * block + 16 * quarter), halves);
        }
        if (scaled) {
            const std::uint32_t scale = load_shared_16(record + T::record.scales_offset + (4 * block + quarter) * 2);
            scale_halves(scale, halves[0]);
            scale_halves(scale, halves[1]);
        }
    }
    store_shared(tile + T::KeyTile::byte(row, 8 * block + 2 * quarter), halves[0]);
    store_shared(tile + T::KeyTile::byte(row, 8 * block + 2 * quarter + 1), halves[1]);
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
    const SharedAddress tile = at.step_tile(stage);
    // As many as registers are enough for, by trial.
    constexpr int together = T::form == StageForm::groups_576   ? T::blocks
                             : T::form == StageForm::blocks_576 ? 1
                             : T::blocks % 3 == 0               ? 3
                                                                : 4;
#pragma unroll together
    for (int block = 0; block < T::blocks; ++block) convert_block(at, record, gathered, block, tile, row);
    fence_async_proxy();
    __syncwarp();
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
    __device__ Gathered gather(int room) {
        const Gathered gathered = gather_half(params_.call, at_, columns_, slot_, step_, room);
        if (step_.advance(params_, columns_, piece_))
            load_slot_of_lane();
        else
            begin_piece();
        return gathered;
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

/// What the warps that convert do: the copies of two steps are under way while one before them becomes BF16.
template <class T>
__device__ void convert(const Params& params, WidePlace<T>& at, WideShared& shared) {
    static_assert(raw_steps == 2);
    Gatherer<T> gatherer(params, at, shared);
    Turn stage;
    Gathered gathered[raw_steps];
    bool exists[raw_steps];
    const auto gather = [&](int room) {
        exists[room] = gatherer.has_more();
        if (exists[room])
            gathered[room] = gatherer.gather(room);
        else
            commit_copies();
    };
    gather(0);
    gather(1);
    while (true)
#pragma unroll
        for (int room = 0; room < raw_steps; ++room) {
            if (!exists[room]) return;
            wait_mbarrier(at.empty(stage.number), stage.parity ^ 1);
            wait_for_copy_groups<raw_steps - 1>();
            __syncwarp();  // the copies of all lanes
            convert_half(params.call, at, gathered[room], room, stage.number);
            arrive_as_warp(at.full(stage.number), at.lane);
            stage.advance(at.stages_of_keys);
            gather(room);
        }
}

}  // namespace sparsemla::detail::wide
