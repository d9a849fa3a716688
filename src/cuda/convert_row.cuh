// A row's token ids to slots, by one CTA: its columns are compacted in input order. A warp has 32 * kColumnsOfLane of
// them one after the other; where a kept one goes follows from ballots, and from the warps' numbers of kept ones.
#pragma once

#include "cuda/convert_indices.h"
#include "cuda/device/copies.cuh"
#include "cuda/device/reduce.cuh"

namespace sparsemla::detail {

__device__ inline int divide(int n, const Divider& by) {
    return static_cast<int>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(n)) * by.multiplier >>
                            (32 + by.shift));
}

/// Where a token of this rank lies; page -1 for the others, and for those past the table.
struct TokenPlace {
    int page, offset;
};

__device__ inline TokenPlace place_of(const ConvertView& view, int token) {
    const int turn = divide(token, view.by_interleave), round = divide(turn, view.by_world);
    const int local = round * view.interleave + token - turn * view.interleave;
    const int page = divide(local, view.by_page_size);
    const bool here = turn - round * view.world == view.rank && page < view.max_pages;
    return {here ? page : -1, local - page * view.page_size};
}

/// Calls store(i, slot) for the i-th kept column of the row, and returns how many were kept. By all threads of a CTA of
/// kWarps warps; `kept_of_warp` is shared memory. What was stored is there for other threads after a barrier of the
/// CTA. Reads ids, lengths, the row's request and the table: after the dependency wait.
template <int kWarps, int kColumnsOfLane, class Store>
__device__ int convert_row(const ConvertView& view, std::int64_t row, int warp, int lane, int (*kept_of_warp)[kWarps],
                           const Store& store) {
    using namespace device;
    static_assert(kWarps <= 32);
    constexpr int columns_of_warp = 32 * kColumnsOfLane;
    const std::int32_t* ids = view.ids + row * view.ids_row_stride;
    int kept_before = 0, turn = 0;
    int request = 0, length = 0;
    bool exists = false, limited = false;
    for (std::int64_t first = 0; first < view.width; first += kWarps * columns_of_warp, turn ^= 1) {
        int token[kColumnsOfLane], block[kColumnsOfLane], slot[kColumnsOfLane];
        TokenPlace place[kColumnsOfLane];
#pragma unroll
        for (int i = 0; i < kColumnsOfLane; ++i) {
            const std::int64_t column = first + warp * columns_of_warp + i * 32 + lane;
            token[i] = load_global_if(column < view.width, ids + column, -1);
        }
        if (first == 0) {
            request = load_global(view.request_of_row + row * view.request_stride);
            exists = static_cast<std::uint32_t>(request) < static_cast<std::uint32_t>(view.requests);
            limited = exists && view.lengths != nullptr;
            length = load_global_if(limited, view.lengths + request * view.lengths_stride, 0);
        }
        const std::int32_t* table = view.table + (exists ? request : 0) * view.table_row_stride;
#pragma unroll
        for (int i = 0; i < kColumnsOfLane; ++i) {
            const bool wanted = exists && token[i] >= 0 && (!limited || token[i] < length);
            place[i] = place_of(view, max(token[i], 0));
            block[i] = load_global_if(wanted && place[i].page >= 0, table + place[i].page, -1);
        }
        std::uint32_t kept[kColumnsOfLane];
        int kept_here = 0;
#pragma unroll
        for (int i = 0; i < kColumnsOfLane; ++i) {
            const bool keeps = static_cast<std::uint32_t>(block[i]) < static_cast<std::uint32_t>(view.pages);
            slot[i] = keeps ? block[i] * view.slots_per_page + place[i].offset : -1;
            kept[i] = __ballot_sync(all_lanes, slot[i] >= 0);
            kept_here += __popc(kept[i]);
        }
        if (lane == 0) kept_of_warp[turn][warp] = kept_here;
        __syncthreads();
        const int of_lane = lane < kWarps ? kept_of_warp[turn][lane] : 0;
        int to = kept_before + __reduce_add_sync(all_lanes, lane < warp ? of_lane : 0);
        kept_before += __reduce_add_sync(all_lanes, of_lane);
#pragma unroll
        for (int i = 0; i < kColumnsOfLane; ++i) {
            if (slot[i] >= 0) store(to + __popc(kept[i] & ((1U << lane) - 1)), slot[i]);
            to += __popc(kept[i]);
        }
    }
    return kept_before;
}

}  // namespace sparsemla::detail
