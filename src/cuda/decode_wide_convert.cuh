// decode_wide's records as halves: from shared memory, where they lie as stored, to a stage. A warp converts the eight
// records of a step that it gathered: it waits for its own copies and for a free stage alone.
#pragma once

#include <algorithm>

#include "cuda/decode_wide_gather.cuh"

namespace sparsemla::detail::wide {

__device__ inline void scale_halves(std::uint32_t scale, uint4& halves) {
    halves = {multiply_bf16x2(halves.x, scale), multiply_bf16x2(halves.y, scale), multiply_bf16x2(halves.z, scale),
              multiply_bf16x2(halves.w, scale)};
}

/// kBlocks blocks from `first` on of eight records, of which this lane has a quarter of one: all loads come before all
/// work. Of the quarter the lower half goes to `to`, the upper one beside it: to ^ 16.
template <class T, int kBlocks>
__device__ void convert_codes(const RawRecord<T>& record, int quarter, const Gathered& gathered, int first,
                              SharedAddress to) {
    const bool scaled = T::record.has_blocks() && 64 * first < T::record.scaled;
    const bool packed =
        (T::form == StageForm::blocks_512 || T::form == StageForm::blocks_576) && scaled && gathered.packed;
    uint4 codes[kBlocks];
    std::uint32_t scales[kBlocks];  // twice
    const auto load = [&] {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            const int block = first + i;
            if (packed) {
                const uint2 pairs = load_shared<uint2>(record.lower + packed_bytes + 32 * block + 8 * quarter);
                codes[i].x = pairs.x;
                codes[i].z = pairs.y;
            } else {
                codes[i] = load_shared<uint4>(record.block(block) + 16 * quarter);
            }
            if (scaled) scales[i] = load_shared_16(record.lower + T::record.scales_offset + (4 * block + quarter) * 2);
        }
        if constexpr (T::half == Half::bf16) {
#pragma unroll
            for (int i = 0; i < kBlocks; ++i) {
                if (packed) {
                    const TwoPairs lower = e2m1x8_to_e4m3(codes[i].x), upper = e2m1x8_to_e4m3(codes[i].z);
                    codes[i] = {lower.low, lower.high, upper.low, upper.high};
                }
                if (scaled) scales[i] *= 0x10001U;
            }
        }
    };
    load();
    const auto store = [&](const auto& convert, const auto& finish) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            const TwoPairs x = convert(codes[i].x, i), y = convert(codes[i].y, i);
            const TwoPairs z = convert(codes[i].z, i), w = convert(codes[i].w, i);
            uint4 halves[2] = {{x.low, x.high, y.low, y.high}, {z.low, z.high, w.low, w.high}};
            finish(halves, i);
            const SharedAddress place = to + (first + i) * T::KeyTile::block_bytes;
            store_shared(place, halves[0]);
            store_shared(place ^ 16, halves[1]);
        }
    };
    const auto nothing = [](uint4(&)[2], int) {};
    if constexpr (T::half == Half::f16) {
        store([](std::uint32_t word, int) { return e4m3x4_to_f16(word); }, nothing);
    } else {
        // What codes lack to be BF16, and their scale, in one product.
        const auto factor = [&](int i) {
            return scaled ? multiply_bf16x2(scales[i], e4m3_bf16_factor) : e4m3_bf16_factor;
        };
        LargestCodes largest;
        bool rare = false;  // scales that are not below 2^8, or NaN
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) rare = rare || (scaled && (scales[i] & 0x7FFF) >= bf16_of_power(8));
        store([&](std::uint32_t word, int i) { return finite_e4m3x4_to_bf16(word, factor(i), largest); }, nothing);
        if (!rare && !largest.has_nan()) return;
        load();  // again: no registers meanwhile
        store([](std::uint32_t word, int) { return e4m3x4_to_bf16(word); },
              [&](uint4(&halves)[2], int i) {
                  if (!scaled) return;
                  scale_halves(scales[i], halves[0]);
                  scale_halves(scales[i], halves[1]);
              });
    }
}

/// The same of a block of BF16 values.
template <class T>
__device__ void convert_wide(const RawRecord<T>& record, int quarter, int block, SharedAddress to) {
    const SharedAddress from = record.half_of_wide(block, quarter / 2) + quarter % 2 * 32;
    const uint4 lower = load_shared<uint4>(from), upper = load_shared<uint4>(from + 16);
    const SharedAddress place = to + block * T::KeyTile::block_bytes;
    store_shared(place, lower);
    store_shared(place ^ 16, upper);
}

/// Blocks [kBegin, kEnd) of a warp's eight records of a step, which have come, to a stage.
template <int kBegin, int kEnd, class T>
__device__ void convert_blocks(const WidePlace<T>& at, const RawRecord<T>& record, const Gathered& gathered,
                               int stage) {
    const int quarter = at.lane % 4, row = row_of_lane(at);
    const SharedAddress to = at.step_tile(stage) + T::KeyTile::byte(row, 2 * quarter);
    constexpr int code_blocks = T::record.codes / 64;
    constexpr int alike = (T::record.has_blocks() ? T::record.scaled : T::record.codes) / 64;  // codes with scales
    constexpr int end = std::min(kEnd, alike), count = end - kBegin;
    if constexpr (T::half == Half::f16) {  // straight code, and all loads at once as far as there are registers
        constexpr int later = kBegin > 0 && count % 2 == 0 ? count / 2 : 0;
        convert_codes<T, count - later>(record, quarter, gathered, kBegin, to);
        if constexpr (later > 0) convert_codes<T, later>(record, quarter, gathered, end - later, to);
    } else if constexpr (count > 0) {
        constexpr int together = count % 3 == 0 ? 3 : count % 2 == 0 ? 2 : 1;
#pragma unroll 1
        for (int block = kBegin; block < end; block += together)
            convert_codes<T, together>(record, quarter, gathered, block, to);
    }
#pragma unroll 1
    for (int block = std::max(kBegin, alike); block < std::min(kEnd, code_blocks); ++block)
        convert_codes<T, 1>(record, quarter, gathered, block, to);
#pragma unroll 1
    for (int block = std::max(kBegin, code_blocks); block < kEnd; ++block) convert_wide<T>(record, quarter, block, to);
}

/// A step's records, which columns name one, and scales.
template <class T>
__device__ void convert_step(const latency::Params& params, const WidePlace<T>& at, const Gathered& gathered, int room,
                             int stage) {
    const int quarter = at.lane % 4, row = row_of_lane(at);
    const RawRecord<T> record(at, room);
    // Under way since: the upper dimensions of this step, and the lower ones, or all, of the next.
    wait_for_copy_groups<T::raw.is_whole() ? 1 : 2>();
    __syncwarp();  // the copies of all lanes
    if constexpr (T::record.has_blocks()) {
        const StoredScales<T> scales = read_scales<T>(record.lower, gathered.packed, quarter);
        __syncwarp();  // they are replaced
        store_shared(record.lower + T::record.scales_offset + quarter * 16,
                     block_scales<T>(params.sources[gathered.second ? 1 : 0], scales, quarter));
        __syncwarp();
    }
    convert_blocks<0, lower_dims / 64>(at, record, gathered, stage);
    if constexpr (!T::raw.is_whole()) {
        wait_for_copy_groups<1>();
        __syncwarp();
    }
    convert_blocks<lower_dims / 64, T::blocks>(at, record, gathered, stage);
    fence_async_proxy();
    __syncwarp();  // also: all have read the records
    arrive_as_warp(at.full(stage), at.lane);
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

    /// Starts the next step's first copies, and loads the slots of the one after it.
    __device__ void gather(Gathered& gathered, int room, int info) {
        gather_lower(params_.call, at_, columns_, slot_, step_, room, info, gathered);
        std::uint32_t flags = columns_.is_second(step_.number) ? of_second_source : 0;
        if (step_.advance(params_, columns_, piece_)) {
            load_slot_of_lane();
        } else {
            begin_piece();
            flags |= has_more_ ? last_of_piece : last_of_piece | last_of_cta;
        }
        store_shared_if(at_.helper() == 0 && at_.lane == 0, at_.flags_of_step(info), flags);
    }

   private:
    __device__ void load_slot_of_lane() {
        slot_ = load_slot(params_.call, at_, step_.number, step_.half * step_keys + row_of_lane(at_));
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

/// What the warps that convert do: while a step becomes halves, the copies of the next one are under way, and those of
/// the one after that as far as there is room (RawLayout).
template <class T>
__device__ void convert(const Params& params, WidePlace<T>& at, WideShared& shared) {
    keep_lane(at);
    Gatherer<T> gatherer(params, at, shared);
    Turn stage;
    Gathered first, second, third;
    int steps = 0;  // that are gathered and not yet converted
    // A group of copies, even where there is no such step: they are counted.
    const auto gather = [&](Gathered& gathered, int room, int ahead) {
        if (gatherer.has_more()) {
            Turn turn = stage;
            for (int i = 0; i < ahead; ++i) turn.advance(at.stages_of_keys);
            gatherer.gather(gathered, room, info_of(turn));
            ++steps;
        } else {
            commit_copies();
        }
    };
    const auto gather_rest = [&](const Gathered& gathered) {
        if constexpr (!T::raw.is_whole()) {
            if (steps > 0)
                gather_upper(at, gathered);
            else
                commit_copies();
        }
    };
    gather(first, 0, 0);
    gather_rest(first);
    gather(second, 1, 1);
    // The same code for both rooms: instructions come from far.
#pragma unroll 1
    for (int room = 0; steps > 0; room ^= 1) {
        wait_mbarrier(at.empty(stage.number), stage.parity ^ 1);
        convert_step(params.call, at, first, room, stage.number);
        --steps;
        // The stage is announced before anything else is done: all others wait for it.
        gather_rest(second);
        gather(third, room, 2);
        stage.advance(at.stages_of_keys);
        first = second;
        second = third;
    }
}

}  // namespace sparsemla::detail::wide
