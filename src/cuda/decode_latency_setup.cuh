// decode_latency before its dependency wait: barriers, who this thread is, where it will read first.
#pragma once

#include <type_traits>

#include "cuda/convert_row.cuh"
#include "cuda/decode_latency_gather.cuh"
#include "cuda/decode_latency_query.cuh"

namespace sparsemla::detail::latency {

/// The whole tile's heads, by the warps that multiply.
template <class T>
using FirstQuery = QueryLoader<T, multiplying_warps, T::heads / 16>;

template <class T>
__device__ int divide_by_splits(const Params& params, int number) {
    // Only kernels from ids and of dcp serve 1 with any other number; the multiplier of 1 is none that umulhi could
    // take.
    if ((T::from_ids || T::dcp) && T::splits == 0 && params.splits == 1) return number;
    if constexpr (T::splits > 0) return static_cast<int>(static_cast<unsigned>(number) / T::splits);
    return static_cast<int>(__umulhi(number, params.split_multiplier) >> params.split_shift);
}

/// Barriers whose numbers of arrivals no parameter changes: before any parameter is needed.
template <class T>
__device__ void init_barriers(const Place<T>& at) {
    if (threadIdx.x != 0) return;
    init_mbarrier(at.stats_barrier(), 1);
    init_mbarrier(at.outputs_barrier(), 1);
    init_mbarrier(at.slices_barrier(), arrivals_of_gather * helper_warps);
    init_mbarrier(at.sums_barrier(), arrivals_of_warp * multiplying_warps);
    init_mbarrier(at.weights_barrier(), arrivals_of_warp * helper_warps);
    init_mbarrier(at.first_barrier(),
                  (arrivals_of_gather + arrivals_of_warp) * multiplying_warps);  // and each warp's part of the query
#pragma unroll
    for (int i = 0; i < max_stages; ++i) init_mbarrier(at.full(i), arrivals_of_gather * helper_warps);
    fence_mbarrier_init();
}

/// Who this CTA and this thread are.
template <class T>
__device__ void find_place(const Params& params, Place<T>& at) {
    at.stages = at.base + params.stages_offset;
    // Of the CTA's number in the grid and in the cluster; the special registers of clusters are slow divisions.
    at.splits = T::splits > 0 ? T::splits : params.splits;
    at.tiles = params.tiles;
    const auto rank = static_cast<int>(cta_of_cluster());
    at.tile = divide_by_splits<T>(params, rank);
    at.split = rank - at.tile * at.splits;
    at.row = divide_by_splits<T>(params, static_cast<int>(blockIdx.x));
    at.first_head = static_cast<int>(blockIdx.y) * T::heads;
    at.warp = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 32), 0);  // uniform, and known to be
    at.lane = static_cast<int>(threadIdx.x % 32);
    // Here, before the dependency wait, and not once more after it.
    asm volatile("" : "+r"(at.row), "+r"(at.split), "+r"(at.tile), "+r"(at.tiles), "+r"(at.first_head));
}

/// The other barriers, and arrival at the cluster: a peer's memory may be touched once the cluster has been waited for.
template <class T>
__device__ void set_up(const Params& params, const Place<T>& at) {
    if (threadIdx.x == 32 * multiplying_warps) {
#pragma unroll
        for (int i = 0; i < max_stages; ++i)
            init_mbarrier(at.empty(i), multiplying_warps * (at.tiles == 1 ? arrivals_of_warp : at.tiles));
        fence_mbarrier_init();
    }
    arrive_at_cluster();
    if (params.trigger == Trigger::start) launch_dependent_grids();
}

/// A peer's memory may be touched from here on. Once for each thread: where tiles share copies, before the first of
/// them; otherwise late, when nobody is still on the way. Not while loads are: it drops what the L1 waits for.
template <class T>
__device__ void join_cluster(const Place<T>& at, bool before_copies) {
    if (before_copies == (at.tiles > 1)) wait_for_cluster();
}

/// Before the dependency wait: addresses.
template <class T>
__device__ Inputs<T> find_inputs(const Params& params, const Place<T>& at) {
    Inputs<T> inputs;
    inputs.counts[0] = count_of_row(params.sources[0], at.row);
    inputs.counts[1] = T::two_sources ? count_of_row(params.sources[1], at.row) : nullptr;
    const ListPlace place = list_place<T>(params, at.split, Part<true>::column(at, 0));
    const bool reads = at.multiplies() && (!T::from_ids || place.second);
    inputs.slot = reads ? slot_pointer(params, at, place) : nullptr;
    asm volatile("" : "+l"(inputs.counts[0]), "+l"(inputs.counts[1]), "+l"(inputs.slot));
#pragma unroll
    for (int group = 0; group < FirstQuery<T>::groups; ++group) {
        inputs.query[group] = at.multiplies() && !T::dcp ? FirstQuery<T>::pointer(params, at, at.warp, group) : nullptr;
        asm volatile("" : "+l"(inputs.query[group]));
    }
    return inputs;
}

/// Of the whole CTA: 2304 columns at a time, so that lists of 2048 take one pass.
inline constexpr int columns_of_lane = 6;
using Converter = RowConverter<multiplying_warps + helper_warps, columns_of_lane>;
struct NoConverter {
    __device__ NoConverter(const ConvertView&, std::int64_t, int, int) {}
};
template <class T>
using ConverterOf = std::conditional_t<T::from_ids, Converter, NoConverter>;

/// Active columns of source 0, whose token ids become slots in shared memory. By all threads of the CTA, before a query
/// is in it: its place serves as scratch.
template <class T>
__device__ int convert_list(const Params& params, const Place<T>& at, Converter& converter) {
    static_assert(Converter::kept_bytes <= converted_slots_offset && Converter::scratch_bytes <= T::query_bytes);
    const int kept = converter.run(at.base + params.converted_offset, at.query(), [&](bool keeps, int i, int slot) {
        store_shared_if(keeps, converted_slot(params, at, i), static_cast<std::uint32_t>(slot));
    });
    __syncthreads();
    return kept;
}

}  // namespace sparsemla::detail::latency
