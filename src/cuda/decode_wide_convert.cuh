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
template <class T>
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
/// that were asked for later. They lie, as stored, in the last 32 bytes of
/// where their BF16 will.
template <class T>
__device__ SharedAddress stored_scales(SharedAddress record) {
    return record + T::record.scales_offset + 2 * value_blocks - 32;
}

template <class T>
__device__ void copy_scales(const SourceView& source, const RecordParts& parts, int quarter, SharedAddress record) {
    const bool absent = !parts.present;
    constexpr bool always_eight = T::form == StageForm::blocks_576;  // bytes of a lane, else four, or two lanes' four
    const bool eight = always_eight || (T::form == StageForm::blocks_512 && source.record == Record::nvfp4_v41);
    const int offset = quarter * (eight ? 8 : 4);
    const SharedAddress to = stored_scales<T>(record) + offset;
    copy_4_async(to, parts.more + offset, absent || (T::form == StageForm::blocks_rope && quarter >= 2));
    if (eight) copy_4_async(to + 4, parts.more + offset + 4, absent);
}

/// A lane's quarter, once it has come.
template <class T>
__device__ StoredScales<T> read_scales(SharedAddress record, bool packed, int quarter) {
    const SharedAddress from = stored_scales<T>(record);
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
                                   const RecordParts& parts, const Gathered<T>& gathered, SharedAddress to) {
    constexpr int pitch = T::raw.lower_pitch;
    if (T::form == StageForm::blocks_rope && params.narrow_copies)
        return copy_records_of_form(params, at, source, parts, to);
    const RecordCopies copies(gathered.record, at.lane);
    if constexpr (T::form == StageForm::blocks_rope) {
        copies.copy<4, pitch>(to, 0);
        copies.copy_half_run<pitch>(to + 512, 512);
    } else if constexpr (T::form == StageForm::blocks_576) {
        constexpr RecordRun rope = stored_layout(T::form).rope;
        copies.copy<packed_bytes / 128, pitch>(to + packed_bytes, 0);
        copies.copy_half_run<pitch>(to + rope.first_dim, rope.offset_bytes);
    } else if (gathered.packed) {
        copies.copy<packed_bytes / 128, pitch>(to + packed_bytes, 0);
    } else {
        copies.copy<4, pitch>(to, 0);
    }
}

/// Starts the copies of this warp's part of half a chunk, its lower dimensions or, of records that stay whole, all of
/// it; they are a group. `slot`: of this lane's record.
template <class T>
__device__ void gather_lower(const latency::Params& params, const WidePlace<T>& at, const Columns& columns, int slot,
                             const StepOfPiece& step, int room, int info, Gathered<T>& gathered) {
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
            copy_scales<T>(source, parts, quarter, at.lower_of_record(room, row_of_lane(at)));
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
__device__ void gather_upper(const WidePlace<T>& at, const Gathered<T>& gathered) {
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

/// A quarter of a block of 64 dimensions of a record.
struct SixteenHalves {
    uint4 low, high;
};

__device__ inline void scale_halves(std::uint32_t scale, uint4& halves) {
    halves = {multiply_bf16x2(halves.x, scale), multiply_bf16x2(halves.y, scale), multiply_bf16x2(halves.z, scale),
              multiply_bf16x2(halves.w, scale)};
}

/// kBlocks blocks from `first` on of eight records, of which this lane has a quarter of one: all loads come before all
/// work. To `to` and, the upper half of the quarter, `to_upper`.
template <class T, int kBlocks>
__device__ void convert_codes(const RawRecord<T>& record, int quarter, const Gathered<T>& gathered, int first,
                              SharedAddress to, SharedAddress to_upper) {
    const bool scaled = T::record.has_blocks() && 64 * first < T::record.scaled;
    const bool packed =
        (T::form == StageForm::blocks_512 || T::form == StageForm::blocks_576) && scaled && gathered.packed;
    uint4 codes[kBlocks];
    std::uint32_t scales[kBlocks];
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
    // NaN, and scales that are not below 2^8, take a slower way.
    std::uint32_t rare = 0;
    if constexpr (T::half == Half::bf16) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            if (packed) {
                const TwoPairs lower = e2m1x8_to_e4m3(codes[i].x), upper = e2m1x8_to_e4m3(codes[i].z);
                codes[i] = {lower.low, lower.high, upper.low, upper.high};
            } else {
                rare |= has_e4m3_nan(codes[i].x) | has_e4m3_nan(codes[i].y) | has_e4m3_nan(codes[i].z) |
                        has_e4m3_nan(codes[i].w);
            }
            if (!scaled) continue;
            rare |= (scales[i] & 0x7FFF) >= bf16_of_power(8);
            scales[i] *= 0x10001U;  // twice
        }
    }
    const auto store = [&](const auto& convert) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            const auto [low, high] = convert(i);
            store_shared(to + (first + i) * T::KeyTile::block_bytes, low);
            store_shared(to_upper + (first + i) * T::KeyTile::block_bytes, high);
        }
    };
    const auto halves_of = [&](const uint4& words, const auto& convert) {
        const TwoPairs x = convert(words.x), y = convert(words.y), z = convert(words.z), w = convert(words.w);
        return SixteenHalves{{x.low, x.high, y.low, y.high}, {z.low, z.high, w.low, w.high}};
    };
    if constexpr (T::half == Half::f16) {
        store([&](int i) { return halves_of(codes[i], e4m3x4_to_f16); });
    } else if (rare == 0) {
        store([&](int i) {
            // What codes lack to be BF16, and their scale, in one product.
            const std::uint32_t factor = scaled ? multiply_bf16x2(scales[i], e4m3_bf16_factor) : e4m3_bf16_factor;
            return halves_of(codes[i], [factor](std::uint32_t word) { return finite_e4m3x4_to_bf16(word, factor); });
        });
    } else {
        store([&](int i) {
            SixteenHalves halves = halves_of(codes[i], e4m3x4_to_bf16);
            if (scaled) {
                scale_halves(scales[i], halves.low);
                scale_halves(scales[i], halves.high);
            }
            return halves;
        });
    }
}

/// The same of a block of BF16 values.
template <class T>
__device__ void convert_wide(const RawRecord<T>& record, int quarter, int block, SharedAddress to,
                             SharedAddress to_upper) {
    const SharedAddress from = record.half_of_wide(block, quarter / 2) + quarter % 2 * 32;
    const uint4 lower = load_shared<uint4>(from), upper = load_shared<uint4>(from + 16);
    store_shared(to + block * T::KeyTile::block_bytes, lower);
    store_shared(to_upper + block * T::KeyTile::block_bytes, upper);
}

/// Blocks [kBegin, kEnd) of a warp's eight records of a step, which have come, to a stage.
template <int kBegin, int kEnd, class T>
__device__ void convert_blocks(const WidePlace<T>& at, const RawRecord<T>& record, const Gathered<T>& gathered,
                               int stage) {
    const int quarter = at.lane % 4, row = row_of_lane(at);
    const SharedAddress to = at.step_tile(stage) + T::KeyTile::byte(row, 2 * quarter);
    const SharedAddress to_upper = at.step_tile(stage) + T::KeyTile::byte(row, 2 * quarter + 1);
    constexpr int code_blocks = T::record.codes / 64;
    constexpr int alike = (T::record.has_blocks() ? T::record.scaled : T::record.codes) / 64;  // codes with scales
    constexpr int end = std::min(kEnd, alike), count = end - kBegin;
    if constexpr (T::half == Half::f16) {  // straight code, and all loads at once as far as there are registers
        constexpr int later = kBegin > 0 && count % 2 == 0 ? count / 2 : 0;
        convert_codes<T, count - later>(record, quarter, gathered, kBegin, to, to_upper);
        if constexpr (later > 0) convert_codes<T, later>(record, quarter, gathered, end - later, to, to_upper);
    } else if constexpr (count > 0) {
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
}

/// A step's records, which columns name one, and scales.
template <class T>
__device__ void convert_step(const latency::Params& params, const WidePlace<T>& at, const Gathered<T>& gathered,
                             int room, int stage) {
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
    __device__ void gather(Gathered<T>& gathered, int room, int info) {
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
    Gathered<T> first, second, third;
    int steps = 0;  // that are gathered and not yet converted
    // A group of copies, even where there is no such step: they are counted.
    const auto gather = [&](Gathered<T>& gathered, int room, int ahead) {
        if (gatherer.has_more()) {
            Turn turn = stage;
            for (int i = 0; i < ahead; ++i) turn.advance(at.stages_of_keys);
            gatherer.gather(gathered, room, info_of(turn));
            ++steps;
        } else {
            commit_copies();
        }
    };
    const auto gather_rest = [&](const Gathered<T>& gathered) {
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
