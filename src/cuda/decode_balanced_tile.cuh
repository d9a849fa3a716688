// What one CTA of decode_balanced is: its shared memory, and the pieces that it works on.
#pragma once

#include "balanced_layout.h"
#include "cuda/decode_balanced.h"
#include "cuda/decode_latency_gather.cuh"
#include "cuda/decode_latency_ring.cuh"

namespace sparsemla::detail::balanced {

using namespace latency;

/// Chunks [begin, end) of those that a split of a row has, for one tile of heads. A split that lies in two pieces is
/// summed by two CTAs: the second one goes on from the sums of the first.
struct alignas(16) Piece {
    int row, tile, split;
    int begin, end;
    int length;        ///< chunks of the split
    int first_active;  ///< leading columns of each source that the row has
    int second_active;

    __device__ bool goes_on() const { return begin > 0; }
    __device__ bool ends_split() const { return end == length; }
};

/// The chunks of a CTA.
struct Share {
    Piece first;  ///< from the CTA's first chunk to the end of that chunk's split
    Piece last;   ///< from the CTA's last chunk to the end of its split: last.begin is that chunk
    int chunks;
};

/// Shared memory that is small.
template <int kHeads>
struct BalancedShared {
    std::uint64_t full[max_stages];      ///< the stage's records are there
    std::uint64_t empty[max_stages];     ///< nobody reads the stage any more
    std::uint64_t piece_full[queries];   ///< a piece and its query as halves are there
    std::uint64_t piece_empty[queries];  ///< nobody reads them any more
    std::uint64_t sums_stored;           ///< this CTA's sums of a split that the next one ends are in memory
    Piece pieces[queries];
    int sums[threads / 32], largest[threads / 32];  ///< of each warp, while the CTA's chunks are found
    Share share;
    std::uint8_t present[max_stages][chunk_keys];  ///< of the stage's chunk: 1 where the column names a record
    float weight[max_splits][kHeads];              ///< of each split's sums in the output
    float keep[kHeads];                            ///< what older sums are worth after this chunk raised the maximum
};

/// decode_latency's tile in this kernel's shared memory: any number of splits, whose partial outputs are exchanged.
template <int kHeads, StageForm kForm, Half kQuery, bool kTwoSources>
struct BalancedTile : Tile<kHeads, kForm, kQuery, kTwoSources, 0> {
    static constexpr int threads = latency::threads;
    static constexpr int queries = balanced::queries;
    static constexpr bool units_take_turns = false;  // a warp merges what it holds: the same units of every split
    static constexpr balanced::SharedLayout layout = balanced::shared_layout(kHeads, kForm, 1);
    /// Such that nothing is spilled: 12 warps have 168 a thread together.
    static constexpr int multiplier_registers = kForm == StageForm::groups_512    ? 184
                                                : kForm == StageForm::blocks_rope ? 200
                                                                                  : 192;
    static constexpr int helper_registers =
        (168 * (multiplying_warps + helper_warps) - multiplier_registers * multiplying_warps) / helper_warps;
    using Small = BalancedShared<kHeads>;
    static_assert(sizeof(Small) <= balanced::small_shared_bytes(kHeads));
    static_assert(layout.weights % SwizzledTile<128>::alignment_bytes == 0 &&
                  layout.query % SwizzledTile<32>::alignment_bytes == 0);
};

template <class T>
__device__ SharedAddress piece_full(const Place<T>& at, int i) {
    return at.base + offsetof(typename T::Small, piece_full) + i * 8;
}
template <class T>
__device__ SharedAddress piece_empty(const Place<T>& at, int i) {
    return at.base + offsetof(typename T::Small, piece_empty) + i * 8;
}
template <class T>
__device__ SharedAddress sums_stored(const Place<T>& at) {
    return at.base + offsetof(typename T::Small, sums_stored);
}
template <class T>
__device__ BalancedShared<T::heads>& small_shared(unsigned char* shared) {
    return *reinterpret_cast<BalancedShared<T::heads>*>(shared);
}

/// From here on `at` is in this piece; returns its row's columns.
template <class T>
__device__ Columns enter(const Params& params, Place<T>& at, const Piece& piece) {
    at.row = piece.row;
    at.first_head = piece.tile * T::heads;
    at.split = piece.split;
    return columns_of_counts<T>(params.call, piece.first_active, piece.second_active, at.lane, piece.split);
}

/// n / splits, of a number that is known at run time only.
__device__ inline int divide_by_row_splits(const Params& params, int n) {
    if (params.call.splits == 1) return n;
    return static_cast<int>(__umulhi(n, params.call.split_multiplier) >> params.call.split_shift);
}

/// The number in the lists of a split's i-th chunk.
__device__ inline int number_of(const Params& params, const Columns& columns, int split, int i) {
    const int splits = params.call.splits;
    if (split + i * splits < columns.first_end) return split + i * splits;
    const int of_first =
        split < columns.first_end ? divide_by_row_splits(params, columns.first_end - 1 - split) + 1 : 0;
    return columns.second_first + (i - of_first) * splits;
}

}  // namespace sparsemla::detail::balanced
