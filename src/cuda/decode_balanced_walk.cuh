// Which chunks are a CTA's, and in which order it takes them. All chunks of the batch stand in one line: row after row,
// of a row tile after tile of heads, of a tile split after split. Every CTA gets as many of them, one after the other,
// but at least as many as the longest split has: so no split lies in more than two CTAs.
#pragma once

#include "cuda/decode_balanced_tile.cuh"
#include "cuda/device/reduce.cuh"

namespace sparsemla::detail::balanced {

/// A row's columns, from its counts.
struct RowColumns {
    int first, second;  ///< active ones of each source

    __device__ int chunks() const { return chunks_of(first) + chunks_of(second); }
    /// At least the chunks of each split.
    __device__ int longest_split(const Params& params) const {
        return steps(params, chunks_of(first)) + steps(params, chunks_of(second));
    }
    /// How many of n chunks belong to the split of the first one.
    __device__ static int steps(const Params& params, int n) {
        return n <= 0 ? 0 : divide_by_splits(params, n - 1) + 1;
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

/// From a chunk of a row on to the end of its split.
template <class T>
__device__ Piece piece_from(const Params& params, const RowPlace& place) {
    const RowColumns columns = {place.first_active, place.second_active};
    Piece piece;
    piece.row = place.row;
    piece.tile = place.chunk / columns.chunks();
    piece.first_active = columns.first;
    piece.second_active = columns.second;
    int rest = place.chunk - piece.tile * columns.chunks();
    piece.split = 0;
    while (rest >= (piece.length = length_of_split<T>(params, columns, piece.split))) {
        rest -= piece.length;
        ++piece.split;
    }
    piece.begin = rest;
    piece.end = piece.length;
    return piece;
}

/// A CTA's pieces, from its first chunk, its last one, and how many it has.
template <class T>
__device__ Share share_of(const Params& params, const RowPlace& first, const RowPlace& last, int chunks) {
    Share share{};
    share.chunks = share.whole_chunks = chunks;
    share.first = piece_from<T>(params, first);
    Piece end = piece_from<T>(params, last);
    end.end = end.begin + 1;
    if (share.first.row == end.row && share.first.tile == end.tile && share.first.split == end.split) {
        share.first.end = end.end;
        share.whole_chunks = 0;
        share.first_comes_last = true;
        return share;
    }
    if (!end.ends_split()) {
        share.lead = end;
        share.lead.begin = 0;
        share.has_lead = true;
        share.whole_chunks -= share.lead.end;
    }
    share.first_comes_last = share.first.goes_on();
    if (share.first_comes_last) share.whole_chunks -= share.first.end - share.first.begin;
    return share;
}

/// This CTA's part of the line, to shared.share. By all threads of the CTA.
template <class T>
__device__ void find_share(const Params& params, const Place<T>& at, BalancedShared<T::heads>& shared) {
    constexpr int warps = threads / 32;
    struct Rows {
        RowColumns columns;  ///< of this thread's row
        int chunks;          ///< of it, over all tiles
        int before;          ///< of the rows before it
    };
    int longest = 0;
    std::int64_t total = 0;
    const auto add_rows = [&](int first_row) {
        const int row = first_row + static_cast<int>(threadIdx.x);
        const RowColumns columns = row < params.rows ? columns_of<T>(params, row) : RowColumns{0, 0};
        Rows rows = {columns, columns.chunks() * params.tiles, 0};
        const int inclusive = warp_prefix_sum(rows.chunks, at.lane);
        const int of_warp = __reduce_max_sync(all_lanes, columns.longest_split(params));
        if (at.lane == 31) {
            shared.sums[at.warp] = inclusive;
            shared.largest[at.warp] = of_warp;
        }
        __syncthreads();
        int sum = 0;
        for (int warp = 0; warp < warps; ++warp) {
            if (warp == at.warp) rows.before = sum + inclusive - rows.chunks;
            sum += shared.sums[warp];
            longest = max(longest, shared.largest[warp]);
        }
        __syncthreads();
        rows.before += static_cast<int>(total);
        total += sum;
        return rows;
    };
    Rows rows{};
    for (int row = 0; row < params.rows; row += threads) rows = add_rows(row);
    const std::int64_t ctas = gridDim.x;
    const std::int64_t chunks = max((total + ctas - 1) / ctas, std::int64_t{longest});
    const std::int64_t begin = min(total, blockIdx.x * chunks), end = min(total, begin + chunks);
    if (begin == end) {
        if (threadIdx.x == 0) shared.share = {};
        __syncthreads();
        return;
    }
    const auto publish = [&](int first_row) {
        const int row = first_row + static_cast<int>(threadIdx.x);
        const auto holds = [&](std::int64_t chunk) {
            return chunk >= rows.before && chunk < rows.before + rows.chunks;
        };
        const auto place = [&](std::int64_t chunk) {
            return RowPlace{row, static_cast<int>(chunk - rows.before), rows.columns.first, rows.columns.second};
        };
        if (holds(begin)) shared.first = place(begin);
        if (holds(end - 1)) shared.last = place(end - 1);
    };
    if (params.rows <= threads) {
        publish(0);
    } else {
        total = 0;
        for (int row = 0; row < params.rows; row += threads) {
            rows = add_rows(row);
            publish(row);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) shared.share = share_of<T>(params, shared.first, shared.last, static_cast<int>(end - begin));
    __syncthreads();
}

/// The pieces of a CTA, one after the other. First the one whose split the next CTA ends, which then never waits long;
/// last the one that the CTA before begins.
template <class T>
class Walk {
   public:
    __device__ Walk(const Params& params, const Share& share)
        : params_(params),
          share_(share),
          next_(share.first),
          left_(share.whole_chunks),
          lead_is_next_(share.has_lead),
          first_is_left_(share.first_comes_last),
          fresh_(!share.first_comes_last) {}

    __device__ bool next(Piece& piece) {
        if (lead_is_next_) {
            lead_is_next_ = false;
            piece = share_.lead;
            return true;
        }
        if (left_ > 0) {
            if (!fresh_) advance();
            fresh_ = false;
            piece = next_;
            left_ -= piece.length;
            return true;
        }
        if (!first_is_left_) return false;
        first_is_left_ = false;
        piece = share_.first;
        return true;
    }

   private:
    /// To the next split that has chunks; there is one.
    __device__ void advance() {
        RowColumns columns = {next_.first_active, next_.second_active};
        do {
            if (++next_.split == params_.call.splits) {
                next_.split = 0;
                if (++next_.tile == params_.tiles) {
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
    Piece next_;          ///< or the last one, of those that lie in this CTA alone
    int left_;            ///< chunks of those
    bool lead_is_next_, first_is_left_, fresh_;
};

}  // namespace sparsemla::detail::balanced
