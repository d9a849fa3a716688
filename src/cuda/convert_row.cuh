// A row's token ids to slots, by one CTA: what is kept is compacted in input order. A warp has 32 * kColumnsOfLane
// columns one after the other. It first compacts the tokens that this rank holds, of which there are few where ranks
// are many, and looks up only their blocks; where a kept one goes follows from ballots, and from the warps' numbers of
// kept ones.
#pragma once

#include "cuda/convert_indices.h"
#include "cuda/device/copies.cuh"
#include "cuda/device/reduce.cuh"

namespace sparsemla::detail {

/// Of n below 2^31, by 1 too; 0 by Divider().
__device__ inline std::uint32_t divide(std::uint32_t n, const Divider& by) {
    return __umulhi(2 * n, by.multiplier) >> (by.shift + 1);
}

/// kSharedIds: the row's ids lie in shared memory.
template <int kWarps, int kColumnsOfLane, bool kSharedIds = false>
class RowConverter {
   public:
    static_assert(kWarps <= 32);
    static constexpr int columns_of_warp = 32 * kColumnsOfLane;
    /// Of shared memory: u32 [2][kWarps], kept by each warp; and, which others may use before and after, [kWarps]
    /// [columns_of_warp], positions among the rank's tokens of those that it holds.
    static constexpr int kept_bytes = 2 * kWarps * 4;
    static constexpr int scratch_bytes = kWarps * columns_of_warp * 4;

    /// Before the dependency wait: constants come from far.
    __device__ RowConverter(const ConvertView& view, std::int64_t row, int warp, int lane)
        : RowConverter(view, view.ids + row * view.ids_row_stride, row, warp, lane) {}

    /// Of these ids instead of the view's.
    __device__ RowConverter(const ConvertView& view, const std::int32_t* ids, std::int64_t row, int warp, int lane)
        : view_(view), warp_(warp), lane_(lane), first_column_(warp * columns_of_warp + lane) {
        ids_ = ids + first_column_;
        request_ = view.request_of_row + row * view.request_stride;
        turn_ = view.turn;
        first_ = view.first;
        interleave_ = view.interleave;
        by_turn_ = view.by_turn;
        asm volatile("" : "+l"(ids_), "+l"(request_), "+r"(turn_), "+r"(first_), "+r"(interleave_));
        asm volatile("" : "+r"(by_turn_.multiplier), "+r"(by_turn_.shift));
    }

    /// Calls store(true, i, slot) for the i-th kept column and store(false, ...) otherwise, and returns how many were
    /// kept. By all threads of the CTA, after the dependency wait. What was stored is there for other threads after a
    /// barrier.
    template <class Store>
    __device__ int run(device::SharedAddress kept_of_warps, device::SharedAddress scratch, const Store& store) {
        const device::SharedAddress locals = scratch + warp_ * columns_of_warp * 4;
        int kept_before = 0, parity = 0;
        for (int left = view_.width; left > 0; left -= kWarps * columns_of_warp, parity ^= 1) {
            const int held = compact(locals, left, left == view_.width);
            Slots slots;
            const bool one = held <= 32;  // as usual where ranks are many
            const int kept_here = one ? look_up<1>(locals, held, slots) : look_up<kColumnsOfLane>(locals, held, slots);
            const device::SharedAddress kept_now = kept_of_warps + parity * (kWarps * 4);
            device::store_shared_if(lane_ == 0, kept_now + warp_ * 4, static_cast<std::uint32_t>(kept_here));
            __syncthreads();
            const int of_lane =
                lane_ < kWarps ? static_cast<int>(device::load_shared<std::uint32_t>(kept_now + lane_ * 4)) : 0;
            const int to = kept_before + __reduce_add_sync(device::all_lanes, lane_ < warp_ ? of_lane : 0);
            kept_before += __reduce_add_sync(device::all_lanes, of_lane);
            one ? put<1>(slots, to, store) : put<kColumnsOfLane>(slots, to, store);
            ids_ += kWarps * columns_of_warp;
        }
        return kept_before;
    }

   private:
    /// Of the tokens that a warp holds, 32 at a time.
    struct Slots {
        std::uint32_t kept[kColumnsOfLane];  ///< bit l: lane l's is kept
        int slot[kColumnsOfLane];
    };

    /// The slots of `held` tokens, at most 32 * kRounds, and how many of them are kept.
    template <int kRounds>
    __device__ int look_up(device::SharedAddress locals, int held, Slots& slots) const {
        int block[kRounds], offset[kRounds];
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            const bool exists = 32 * i + lane_ < held;
            const auto local = device::load_shared<std::uint32_t>(locals + (32 * i + lane_) * 4);
            const std::uint32_t page = divide(local, view_.by_page_size);
            offset[i] = static_cast<int>(local - page * view_.page_size);
            block[i] =
                device::load_global_if(exists && page < static_cast<std::uint32_t>(view_.max_pages), table_ + page, -1);
        }
        int kept = 0;
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            const bool keeps = static_cast<std::uint32_t>(block[i]) < static_cast<std::uint32_t>(view_.pages);
            slots.slot[i] = static_cast<int>(static_cast<std::uint32_t>(block[i]) * view_.slots_per_page + offset[i]);
            slots.kept[i] = __ballot_sync(device::all_lanes, keeps);
            kept += __popc(slots.kept[i]);
        }
        return kept;
    }

    template <int kRounds, class Store>
    __device__ void put(const Slots& slots, int to, const Store& store) const {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            store((slots.kept[i] >> lane_ & 1) != 0, to + __popc(slots.kept[i] & before_lane()), slots.slot[i]);
            to += __popc(slots.kept[i]);
        }
    }

    __device__ std::uint32_t before_lane() const { return (1U << lane_) - 1; }

    /// Of the warp's next columns, of which `left` are there for the CTA, the tokens that the rank holds and the
    /// request has: their local positions. Returns their number. `first`: of the row's columns; its request is not
    /// known yet.
    __device__ int compact(device::SharedAddress locals, int left, bool first) {
        int token[kColumnsOfLane];
#pragma unroll
        for (int i = 0; i < kColumnsOfLane; ++i)
            token[i] = kSharedIds ? device::load_generic_if(first_column_ + i * 32 < left, ids_ + i * 32, -1)
                                  : device::load_global_if_less(first_column_ + i * 32, left, ids_ + i * 32, -1);
        if (first) find_request();  // while the ids are on their way
        int held = 0;
        __syncwarp();  // the positions before are not read any more
#pragma unroll
        for (int i = 0; i < kColumnsOfLane; ++i) {
            const auto id = static_cast<std::uint32_t>(token[i]);
            const std::uint32_t round = divide(id, by_turn_);           // of an id that is none: some number, not used
            const std::uint32_t of_rank = id - first_ - round * turn_;  // its place in the rank's part of a turn
            const bool holds = id < limit_ && of_rank < interleave_;
            const std::uint32_t all = __ballot_sync(device::all_lanes, holds);
            device::store_shared_if(holds, locals + (held + __popc(all & before_lane())) * 4,
                                    round * interleave_ + of_rank);
            held += __popc(all);
        }
        __syncwarp();
        return held;
    }

    /// A row that names no request keeps nothing.
    __device__ void find_request() {
        const int request = device::load_global(request_);
        if (static_cast<std::uint32_t>(request) >= static_cast<std::uint32_t>(view_.requests)) return;
        table_ = view_.table + request * view_.table_row_stride;
        limit_ = 0x80000000U;
        if (view_.lengths != nullptr)
            limit_ = max(device::load_global(view_.lengths + request * view_.lengths_stride), 0);
    }

    const ConvertView& view_;
    int warp_, lane_, first_column_;
    const std::int32_t* ids_;
    const std::int32_t* request_;
    const std::int32_t* table_ = nullptr;
    std::uint32_t limit_ = 0;  ///< of ids
    std::uint32_t turn_, first_, interleave_;
    Divider by_turn_;
};

}  // namespace sparsemla::detail
