// Which chunks are a CTA's, and in which order it takes them. All chunks of the batch stand in one line: row after row,
// of a row tile after tile of heads, of a tile split after split. Every CTA gets as many of them, one after the other,
// but no fewer than the longest split may have: so no split lies in more than two CTAs.
#pragma once

#include "cuda/decode_balanced_tile.cuh"
#include "cuda/device/reduce.cuh"

namespace sparsemla::detail::balanced {

/// A row's columns, from its counts.
struct RowColumns {
    int first, second;  ///< active ones of each source

    __device__ int chunks() const { return chunks_of(first) + chunks_of(second); }
    /// At least the chunks of each split.
    __device__ int most_of_a_split(const Params& params) const {
        return steps(params, chunks_of(first)) + steps(params, chunks_of(second));
    }
    /// How many of n chunks belong to the split of the first one.
    __device__ static int steps(const Params& params, int n) {
        return n <= 0 ? 0 : divide_by_row_splits(params, n - 1) + 1;
    }
    __device__ static int chunks_of(int columns) { return (columns + chunk_keys - 1) / chunk_keys; }
};

template <class T>
__device__ RowColumns columns_of(const Params& params, int row) {
    const auto of = [&](const SourceView& source) { return active_columns(source, count_of_row(source, row)); };
    return {of(params.call.sources[0]), T::two_sources ? of(params.call.sources[1]) : 0};
}

/// Of the split's chunks in a row of these columns.
template <class T>
__device__ int length_of_split(const Params& params, const RowColumns& columns, int split) {
    int length = RowColumns::steps(params, RowColumns::chunks_of(columns.first) - split);
    if (T::two_sources) {
        // Counted from the second list's first chunk on, as Columns::first_of_second counts.
        const int distance = split - params.call.second_begin_split;
        length += RowColumns::steps(
            params, RowColumns::chunks_of(columns.second) - distance - (distance < 0 ? params.call.splits : 0));
    }
    return length;
}

/// The place of chunk number `chunk` of a row over its tiles and splits, as a piece from there to the end of its split.
template <class T>
__device__ Piece piece_from(const Params& params, int row, const RowColumns& columns, int chunk) {
    Piece piece;
    piece.row = row;
    piece.first_active = columns.first;
    piece.second_active = columns.second;
    const int chunks = columns.chunks();
    for (piece.tile = 0; chunk >= chunks; ++piece.tile) chunk -= chunks;
    for (piece.split = 0; chunk >= (piece.length = length_of_split<T>(params, columns, piece.split)); ++piece.split)
        chunk -= piece.length;
    piece.begin = chunk;
    piece.end = piece.length;
    return piece;
}

/// Where there is a CTA for every split of every row and tile: it has that one.
template <class T>
__device__ void take_one_split(const Params& params, typename T::Small& shared) {
    if (threadIdx.x == 0) {
        Piece piece{};
        const int tile = divide_by_row_splits(params, static_cast<int>(blockIdx.x));
        piece.split = static_cast<int>(blockIdx.x) - tile * params.call.splits;
        piece.row = tile / params.tiles_of_row;
        piece.tile = tile - piece.row * params.tiles_of_row;
        if (piece.row < params.rows) {
            const RowColumns columns = columns_of<T>(params, piece.row);
            piece.first_active = columns.first;
            piece.second_active = columns.second;
            piece.length = piece.end = length_of_split<T>(params, columns, piece.split);
        }
        shared.share.chunks = piece.length;
        shared.share.first = piece;
        piece.begin = max(piece.end - 1, 0);
        shared.share.last = piece;
    }
    __syncthreads();
}

/// This CTA's part of the line, to shared.share. By all threads of the CTA.
template <class T>
__device__ void find_share(const Params& params, const Place<T>& at, typename T::Small& shared) {
    if (params.one_split_each) return take_one_split<T>(params, shared);
    constexpr int warps = T::threads / 32;
    RowColumns columns;  // of this thread's row
    int chunks, before;  // of that row over all tiles, and of the rows before it
    int total = 0, longest = 0;
    const auto add_rows = [&](int row) {
        columns = row < params.rows ? columns_of<T>(params, row) : RowColumns{0, 0};
        chunks = columns.chunks() * params.tiles_of_row;
        const int inclusive = warp_prefix_sum(chunks, at.lane);
        const int of_warp = __reduce_max_sync(all_lanes, columns.most_of_a_split(params));
        if (at.lane == 31) {
            shared.sums[at.warp] = inclusive;
            shared.largest[at.warp] = of_warp;
        }
        __syncthreads();
        const int sums = warp_prefix_sum(at.lane < warps ? shared.sums[at.lane] : 0, at.lane);
        before = total + inclusive - chunks + __shfl_sync(all_lanes, sums, max(at.warp - 1, 0)) * (at.warp > 0);
        total += __shfl_sync(all_lanes, sums, 31);
        longest = max(longest, __reduce_max_sync(all_lanes, at.lane < warps ? shared.largest[at.lane] : 0));
    };
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int row = 0; row < params.rows; row += T::threads) {
        if (row > 0) __syncthreads();
        add_rows(row + thread);
    }
    const auto ctas = static_cast<int>(gridDim.x);
    const int even = ctas == 1 ? total : __umulhi(total + ctas - 1, params.cta_multiplier) >> params.cta_shift;
    const int of_cta = max(even, longest);
    const int begin = min(total, static_cast<int>(blockIdx.x) * of_cta), end = min(total, begin + of_cta);
    if (thread == 0) shared.share.chunks = end - begin;
    const bool again = params.rows > T::threads;  // this thread's row is of the last round
    if (again) total = 0;
#pragma unroll 1
    for (int row = 0; row < params.rows; row += T::threads) {
        if (again) {
            __syncthreads();
            add_rows(row + thread);
        }
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const int chunk = i == 0 ? begin : end - 1;
            if (begin < end && chunk >= before && chunk < before + chunks)
                (i == 0 ? shared.share.first : shared.share.last) =
                    piece_from<T>(params, row + thread, columns, chunk - before);
        }
    }
    __syncthreads();
}

/// The pieces of a CTA, one after the other. First the one whose split the next CTA ends, which then never waits long;
/// last the one that the CTA before begins.
template <class T>
class Walk {
   public:
    __device__ Walk(const Params& params, const Share& share)
        : params_(params), share_(share), next_(share.first), left_(share.chunks) {
        if (left_ == 0) return;
        const Piece& last = share.last;
        if (next_.row == last.row && next_.tile == last.tile && next_.split == last.split) {
            first_is_left_ = has_one_piece_ = true;
            left_ = 0;
            return;
        }
        hands_over_next_ = last.begin + 1 < last.length;
        if (hands_over_next_) left_ -= last.begin + 1;
        first_is_left_ = next_.goes_on();
        if (first_is_left_) left_ -= next_.end - next_.begin;
        next_is_ready_ = !first_is_left_;
    }

    __device__ bool next(Piece& piece) {
        if (hands_over_next_) {
            hands_over_next_ = false;
            piece = share_.last;
            piece.end = piece.begin + 1;
            piece.begin = 0;
            return true;
        }
        if (left_ > 0) {
            if (!next_is_ready_) advance();
            next_is_ready_ = false;
            piece = next_;
            left_ -= piece.length;
            return true;
        }
        if (!first_is_left_) return false;
        first_is_left_ = false;
        piece = share_.first;
        if (has_one_piece_) piece.end = share_.last.begin + 1;
        return true;
    }

   private:
    /// To the next split that has chunks; there is one.
    __device__ void advance() {
        RowColumns columns = {next_.first_active, next_.second_active};
        do {
            if (++next_.split == params_.call.splits) {
                next_.split = 0;
                if (++next_.tile == params_.tiles_of_row) {
                    next_.tile = 0;
                    do columns = columns_of<T>(params_, ++next_.row);
                    while (columns.chunks() == 0);
                }
            }
            next_.length = length_of_split<T>(params_, columns, next_.split);
        } while (next_.length == 0);
        next_.first_active = columns.first;
        next_.second_active = columns.second;
        next_.begin = 0;
        next_.end = next_.length;
    }

    const Params& params_;
    const Share& share_;  ///< in shared memory
    Piece next_;          ///< of the splits that lie wholly in this CTA: the next one, or what advance() goes on from
    int left_;            ///< chunks of those that have not been given out
    bool hands_over_next_ = false, first_is_left_ = false, next_is_ready_ = false, has_one_piece_ = false;
};

}  // namespace sparsemla::detail::balanced
