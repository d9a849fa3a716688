// What one CTA of decode_wide is: 64 heads on M, its shared memory, and who each warp is in it.
#pragma once

#include "cuda/decode_balanced_walk.cuh"
#include "wide_layout.h"

namespace sparsemla::detail::wide {

using namespace balanced;
using balanced::Params;

/// What those that multiply need to know of a step beside its records.
enum StepFlags : std::uint32_t {
    of_second_source = 1,
    last_of_piece = 2,
    last_of_cta = 4,
};

/// Steps that are gathered, or under way to those that multiply: two more than there are stages, and one to spare.
inline constexpr int step_infos = 2 * max_stages;
/// A step's number in those.
__device__ inline int info_of(const Turn& stage) { return stage.number + max_stages * static_cast<int>(stage.parity); }

/// Between the scales of two groups: as records' scales are stored together, few may meet in the same bank.
inline constexpr int scales_of_group = step_keys + 4;

/// Shared memory that is small.
struct WideShared {
    std::uint64_t full[max_stages];   ///< the step's records are there as halves
    std::uint64_t empty[max_stages];  ///< nobody reads the stage any more
    std::uint64_t weights_full;       ///< P of a step is there
    std::uint64_t weights_empty;      ///< all have read it
    std::uint64_t piece_full[wide::pieces];
    std::uint64_t piece_empty[wide::pieces];
    std::uint64_t first_query;  ///< is there, as halves
    std::uint64_t end_full;     ///< of a piece: what the warps of the scores do at its end is done
    std::uint64_t end_empty;    ///< what it left in `weight` is read
    Piece pieces[wide::pieces];
    int sums[wide::threads / 32], largest[wide::threads / 32];  ///< of each warp, while the CTA's chunks are found
    Share share;
    // Of steps from their gather on (step_infos):
    uint4 present[step_infos];  ///< of its columns four bits each: whether it names a record
    alignas(16) float scales[step_infos][4][scales_of_group];  ///< of groups: [t][key / 8][key % 2], t = key % 8 / 2
    std::uint32_t flags[step_infos];                           ///< StepFlags
    float2 keep[32 * score_warps];                             ///< what older sums are worth, of a thread's two heads
    float weight[max_splits][wide::heads];                     ///< of each split's sums in the output
    float query_scale[wide::heads];                            ///< what scores are to be multiplied by
};
static_assert(sizeof(WideShared) <= small_shared_bytes);

/// Codes without scales, or with those of groups, are FP16 in shared memory, and so is P. Otherwise all is BF16, and P
/// the sum of kParts such numbers.
template <StageForm kForm, int kParts>
struct WideTile {
    static constexpr int heads = wide::heads;
    static constexpr int threads = wide::threads;
    static constexpr bool two_sources = true;
    static constexpr bool exchanges_weights = false;
    static constexpr bool from_ids = false;
    static constexpr bool dcp = false;
    static constexpr StageForm form = kForm;
    static constexpr StageLayout record = stage_layout(kForm);
    static constexpr int d_qk = record.d_qk;
    static constexpr int blocks = d_qk / 64;
    static constexpr Half half = is_f16(kForm) ? Half::f16 : Half::bf16;
    static constexpr int parts = kParts;
    static_assert(half == Half::bf16 || parts == 1);
    static constexpr RawLayout raw = raw_layout(kForm);
    static constexpr int pitch = raw.lower_pitch;  ///< what the gather of decode_latency takes for a stage's
    static constexpr int step_bytes = static_cast<int>(wide::step_bytes(kForm));
    static constexpr SharedLayout layout = shared_layout(kForm, 1);  ///< what does not depend on the stages
    /// Such that nothing is spilled.
    static constexpr int value_registers = record.has_groups() ? 176 : 184;
    static constexpr int score_registers = record.has_groups() ? 96 : 80;
    static constexpr int converter_registers = 512 - 2 * value_registers - score_registers;
    using Small = WideShared;
    using KeyTile = BlockTile<step_keys>;
    using QueryTile = BlockTile<wide::heads>;
    static_assert(layout.query % QueryTile::alignment_bytes == 0 && layout.stages % KeyTile::alignment_bytes == 0 &&
                  step_bytes % KeyTile::alignment_bytes == 0);
};

/// Where this CTA's memory lies, and who this thread is. The part that the gather of decode_latency knows is its own:
/// its `stages` are the records as they are stored, its helpers the warps that convert.
template <class T>
struct WidePlace : Place<T> {
    SharedAddress keys, weights_begin;
    int stages_of_keys;

    __device__ bool converts() const {
        return this->warp >= value_warps && this->warp < value_warps + converting_warps;
    }
    __device__ int score_warp() const { return this->warp - value_warps - converting_warps; }

    __device__ SharedAddress small(std::size_t offset) const { return this->base + static_cast<SharedAddress>(offset); }
    __device__ SharedAddress weights_full() const { return small(offsetof(WideShared, weights_full)); }
    __device__ SharedAddress weights_empty() const { return small(offsetof(WideShared, weights_empty)); }
    __device__ SharedAddress piece_full(int i) const { return small(offsetof(WideShared, piece_full)) + i * 8; }
    __device__ SharedAddress piece_empty(int i) const { return small(offsetof(WideShared, piece_empty)) + i * 8; }
    __device__ SharedAddress first_query() const { return small(offsetof(WideShared, first_query)); }
    __device__ SharedAddress end_full() const { return small(offsetof(WideShared, end_full)); }
    __device__ SharedAddress end_empty() const { return small(offsetof(WideShared, end_empty)); }
    __device__ SharedAddress present_of_step(int info) const {
        return small(offsetof(WideShared, present)) + info * 16;
    }
    __device__ SharedAddress flags_of_step(int info) const { return small(offsetof(WideShared, flags)) + info * 4; }
    /// Of a group: the scales of all keys as they lie, those of the eight keys that a thread multiplies, and of a key.
    __device__ SharedAddress scales_of_step(int info, int group) const {
        return small(offsetof(WideShared, scales)) + (info * 4 + group) * scales_of_group * 4;
    }
    __device__ SharedAddress scales_of_thread(int info, int group) const {
        return scales_of_step(info, group) + this->lane % 4 * 32;
    }
    __device__ SharedAddress scale(int info, int group, int key) const {
        return scales_of_step(info, group) + (key % 8 / 2 * 8 + key / 8 * 2 + key % 2) * 4;
    }
    __device__ SharedAddress keep_of_thread(int thread) const { return small(offsetof(WideShared, keep)) + thread * 8; }
    /// Of P: 16 bytes of each thread of a warpgroup.
    __device__ SharedAddress weights_of_thread(int quad, int thread) const {
        return weights_begin + (quad * 32 * score_warps + thread) * 16;
    }
    /// Of a record as it is stored: the lower dimensions, where it is whole all of it.
    __device__ SharedAddress lower_of_record(int room, int row) const {
        return this->stages + (room * step_keys + row) * T::raw.lower_pitch;
    }
    __device__ SharedAddress upper_of_record(int row) const {
        return this->stages + static_cast<SharedAddress>(T::raw.upper()) + row * T::raw.upper_pitch;
    }
    __device__ SharedAddress query_scale(int head) const { return small(offsetof(WideShared, query_scale)) + head * 4; }
    __device__ SharedAddress query_tile() const { return this->base + static_cast<SharedAddress>(T::layout.query); }
    __device__ SharedAddress step_tile(int stage) const { return keys + stage * T::step_bytes; }
};

/// The lane's number in a register of the role: ptxas would read it anew wherever it is used, and wait for that as long
/// as for shared memory.
template <class T>
__device__ void keep_lane(WidePlace<T>& at) {
    at.lane = __shfl_sync(all_lanes, at.lane, at.lane) & 31;
}

/// The steps of a piece: halves of its chunks, but for those past the row's columns.
struct StepOfPiece {
    int chunk;   ///< of the piece's split
    int number;  ///< in the lists
    int half = 0;

    StepOfPiece() = default;
    __device__ StepOfPiece(const Params& params, const Columns& columns, const Piece& piece)
        : chunk(piece.begin), number(number_of(params, columns, piece.split, piece.begin)) {}

    /// Whether there is one more.
    __device__ bool advance(const Params& params, const Columns& columns, const Piece& piece) {
        const bool second = columns.is_second(number);
        const int first_column = (second ? number - columns.second_begin : number) * chunk_keys;
        if (half == 0 && first_column + step_keys < (second ? columns.second_active : columns.first_active)) {
            half = 1;
            return true;
        }
        half = 0;
        if (++chunk == piece.end) return false;
        number = number_of(params, columns, piece.split, chunk);
        return true;
    }
};

/// The next piece of the queue, for a warp of those that multiply; its place is taken again once all have released it.
template <class T>
__device__ Piece wait_for_piece(const WidePlace<T>& at, const WideShared& shared, const Turn& turn) {
    wait_mbarrier(at.piece_full(turn.number), turn.parity);
    return shared.pieces[turn.number];
}
/// At its end: meanwhile neither it nor what follows from it, or from the lane, took registers.
template <class T>
__device__ Piece piece_again(WidePlace<T>& at, const WideShared& shared, const Turn& turn) {
    asm volatile("" : "+r"(at.lane)::"memory");
    at.lane &= 31;
    return shared.pieces[turn.number];
}
template <class T>
__device__ void release_piece(const WidePlace<T>& at, Turn& turn) {
    __syncwarp();
    arrive_as_warp(at.piece_empty(turn.number), at.lane);
    turn.advance(wide::pieces);
}

}  // namespace sparsemla::detail::wide
