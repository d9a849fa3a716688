// The kernel decode_wide: many heads. A CTA on every SM takes chunks as in decode_balanced (decode_balanced_walk.cuh),
// for 64 heads at a time, and works in steps of half a chunk:
//   warps that convert   slots -> records as they are stored, two steps ahead -> halves in a ring of stages, once for
//                        all heads
//   warps of the scores  queries times keys, beside the softmax of the step before; P to
//   warps of the values  P times values, 256 dimensions a warpgroup; then the sums of a piece: handed over, written, or
//                        sent as a partial output; at last the merges
#pragma once

#include "cuda/decode_wide_convert.cuh"
#include "cuda/decode_wide_values.cuh"

namespace sparsemla::detail::wide {

namespace {

/// Barriers of a CTA, before the dependency wait.
template <class T>
__device__ void set_up_barriers(const WidePlace<T>& at) {
    if (threadIdx.x != 0) return;
    for (int i = 0; i < wide::max_stages; ++i) {
        init_mbarrier(at.full(i), arrivals_of_warp * converting_warps);
        init_mbarrier(at.empty(i), arrivals_of_warp * (score_warps + value_warps));
    }
    init_mbarrier(at.weights_full(), arrivals_of_warp * score_warps);
    init_mbarrier(at.weights_empty(), arrivals_of_warp * value_warps);
    for (int i = 0; i < wide::pieces; ++i) {
        init_mbarrier(at.piece_full(i), arrivals_of_warp);
        init_mbarrier(at.piece_empty(i), arrivals_of_warp * (score_warps + value_warps));
    }
    init_mbarrier(at.first_query(), arrivals_of_warp * (score_warps + value_warps));
    init_mbarrier(at.end_full(), arrivals_of_warp * score_warps);
    init_mbarrier(at.end_empty(), arrivals_of_warp * value_warps);
    fence_mbarrier_init();
}

/// Rows without columns, by the warps that convert.
template <class T>
__device__ void write_empty_rows(const Params& params, WidePlace<T>& at) {
    for (int row = static_cast<int>(blockIdx.x); row < params.rows; row += static_cast<int>(gridDim.x)) {
        if (columns_of<T>(params, row).chunks() > 0) continue;
        at.row = row;
        for (at.first_head = 0; at.first_head < params.call.heads; at.first_head += T::heads)
            write_empty<T>(params.call, at, at.helper(), converting_warps);
    }
}

template <class T>
__global__ void __launch_bounds__(wide::threads, 1) decode(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<WideShared*>(memory);
    WidePlace<T> at;
    at.base = shared_address(memory);
    at.stages_of_keys = params.call.stages;
    at.keys = at.base + static_cast<SharedAddress>(T::layout.stages);
    at.weights_begin = at.keys + at.stages_of_keys * T::step_bytes;
    at.stages = at.weights_begin + T::heads * step_keys * 4;
    at.warp = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 32), 0);  // uniform, and known to be
    at.lane = static_cast<int>(threadIdx.x % 32);
    set_up_barriers(at);
    if (params.call.trigger == Trigger::start) launch_dependent_grids();
    __syncthreads();  // the barriers are there
    wait_for_prerequisite_grids();
    find_share<T>(params, at, shared);
    if (at.warp < value_warps) {
        take_registers<T::value_registers>();
        sum_values(params, at, shared);
        if (params.call.trigger == Trigger::end) launch_dependent_grids();
    } else if (at.converts()) {
        keep_registers<T::converter_registers>();
        convert(params, at, shared);
        if (params.call.trigger == Trigger::loaded) launch_dependent_grids();
        write_empty_rows(params, at);
    } else {
        keep_registers<T::score_registers>();
        score(params, at, shared);
    }
}

}  // namespace

}  // namespace sparsemla::detail::wide
