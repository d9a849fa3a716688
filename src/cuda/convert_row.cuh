// A row's token ids to slots, by one CTA: its columns are compacted in input order. A warp has 32 * kColumnsOfLane of
// them one after the other; where a kept one goes follows from ballots, and from the warps' numbers of kept ones.
#pragma once

#include "cuda/convert_indices.h"
#include "cuda/device/copies.cuh"
#include "cuda/device/reduce.cuh"

namespace sparsemla::detail {

/// Of n below 2^31, by 1 too; 0 by Divider().
__device__ inline std::uint32_t divide(std::uint32_t n, const Divider& by) {
    return __umulhi(2 * n, by.multiplier) >> (by.shift + 1);
}

/// Calls store(i, slot) for the i-th kept column of the row, and returns how many were kept. By all threads of a CTA of
/// kWarps warps; `kept_of_warp` is shared memory. What was stored is there for other threads after a barrier of the
/// CTA. Reads ids, lengths, the row's request and the table: after the dependency wait. Every instruction counts: each
/// CTA of a decode that converts does it for all of the row.
template <int kWarps, int kColumnsOfLane, class Store>
__device__ int convert_row(const ConvertView& view, std::int64_t row, int warp, int lane, int (*kept_of_warp)[kWarps],
                           const Store& store) {
    using namespace device;
    static_assert(kWarps <= 32);
    constexpr int columns_of_warp = 32 * kColumnsOfLane;
    const int first_column = warp * columns_of_warp + lane;
    const std::int32_t* ids = view.ids + row * view.ids_row_stride + first_column;
    const std::int32_t* table = view.table;
    std::uint32_t limit = 0;  // of ids
    int kept_before = 0, turn = 0;
    for (int left = view.width; left > 0; left -= kWarps * columns_of_warp, turn ^= 1) {
        int token[kColumnsOfLane], block[kColumnsOfLane], offset[kColumnsOfLane];
#pragma unroll
        for (int i = 0; i < kColumnsOfLane; ++i)
            token[i] = load_global_if_less(first_column + i * 32, left, ids + i * 32, -1);
        if (left == view.width) {
            const int request = load_global(view.request_of_row + row * view.request_stride);
            if (static_cast<std::uint32_t>(request) < static_cast<std::uint32_t>(view.requests)) {
                table += request * view.table_row_stride;
                limit = 0x80000000U;
                if (view.lengths != nullptr) limit = max(load_global(view.lengths + request * view.lengths_stride), 0);
            }
        }
#pragma unroll
        for (int i = 0; i < kColumnsOfLane; ++i) {
            const auto id = static_cast<std::uint32_t>(token[i]);
            const std::uint32_t round = divide(id, view.by_turn);
            const std::uint32_t of_rank =
                id - round * view.turn - view.first;  // its place in the rank's part of a turn
            const std::uint32_t local = round * view.interleave + of_rank;
            const std::uint32_t page = divide(local, view.by_page_size);
            offset[i] = static_cast<int>(local - page * view.page_size);
            const bool wanted =
                id < limit && of_rank < view.interleave && page < static_cast<std::uint32_t>(view.max_pages);
            block[i] = load_global_if(wanted, table + page, -1);
        }
        std::uint32_t kept[kColumnsOfLane];
        int kept_here = 0;
#pragma unroll
        for (int i = 0; i < kColumnsOfLane; ++i) {
            kept[i] =
                __ballot_sync(all_lanes, static_cast<std::uint32_t>(block[i]) < static_cast<std::uint32_t>(view.pages));
            kept_here += __popc(kept[i]);
        }
        if (lane == 0) kept_of_warp[turn][warp] = kept_here;
        __syncthreads();
        const int of_lane = lane < kWarps ? kept_of_warp[turn][lane] : 0;
        int to = kept_before + __reduce_add_sync(all_lanes, lane < warp ? of_lane : 0);
        kept_before += __reduce_add_sync(all_lanes, of_lane);
#pragma unroll
        for (int i = 0; i < kColumnsOfLane; ++i) {
            if ((kept[i] >> lane & 1) != 0)
                store(to + __popc(kept[i] & ((1U << lane) - 1)), block[i] * view.slots_per_page + offset[i]);
            to += __popc(kept[i]);
        }
        ids += kWarps * columns_of_warp;
    }
    return kept_before;
}

}  // namespace sparsemla::detail
