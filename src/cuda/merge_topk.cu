// The exact global top k of several lists: a CTA a row, keys of 64 bits (topk_key.h). The phases:
//   narrow   a histogram of the next bits of all candidates, again and again, until the k-th key is known, or what may
//            be selected fits in shared memory
//   gather   that to shared memory, where narrowing goes on until the k-th key is known
//   keep     the selected tokens of this rank
//   sort     them
//   write    them, or what convert_row.cuh makes of them
// The first four are merge_topk_select.cuh's. Which thread has which candidate changes nothing: equal keys are one
// score and one id, and sorting fixes the order.
#include <algorithm>

#include "cuda/convert_row.cuh"
#include "cuda/launch.h"
#include "cuda/merge_topk_select.cuh"
#include "cuda/verbs.h"
#include "gpu.h"
#include "sparsemla/topk.h"

namespace sparsemla::detail {

namespace {

using namespace topk;

static_assert(capacity == max_gpu_topk);

using Converter = RowConverter<warps, 2, true>;

struct Params {
    Candidates candidates;
    ConvertView to;  ///< sharding; to slots also table, requests, lengths and cache
    std::int32_t k;
    std::int32_t* list;
    std::int32_t* counts;
    std::int64_t list_row_stride, counts_stride;
};

struct Shared {
    Selection selection;
    __align__(4) std::byte kept_of_warps[Converter::kept_bytes];
};
static_assert(Converter::scratch_bytes <= sizeof(Selection::bins));
static_assert(sizeof(Shared) <= 48 << 10, "more needs an attribute of the kernel");

/// As RowConverter: the rank's part of a turn.
__device__ bool is_own(const ConvertView& to, std::uint64_t key) {
    const auto id = static_cast<std::uint32_t>(id_of_key(key));
    return id - to.first - divide(id, to.by_turn) * to.turn < to.interleave;
}

/// The ids of the first `kept` keys, -1 up to k, in place of the keys.
__device__ const std::int32_t* ids_in_place(Selection& shared, int kept) {
    std::int32_t id[keys_of_thread];
#pragma unroll
    for (int i = 0; i < keys_of_thread; ++i) {
        const int column = i * threads + static_cast<int>(threadIdx.x);
        id[i] = column < kept ? id_of_key(shared.keys[column]) : -1;
    }
    __syncthreads();
    auto* ids = reinterpret_cast<std::int32_t*>(shared.keys);
#pragma unroll
    for (int i = 0; i < keys_of_thread; ++i) ids[i * threads + threadIdx.x] = id[i];
    __syncthreads();
    return ids;
}

template <bool kToSlots>
__global__ void __launch_bounds__(threads) merge_lists(const __grid_constant__ Params params) {
    __shared__ Shared shared;
    Selection& selection = shared.selection;
    const std::int64_t row = blockIdx.x;
    std::int32_t* list = params.list + row * params.list_row_stride;
    launch_dependent_grids();
    wait_for_prerequisite_grids();

    const auto all = [&](auto use) { params.candidates.for_each(row, use); };
    Threshold threshold(params.k, params.candidates.columns);
    while (!threshold.known() && threshold.reach() > capacity) narrow(selection, threshold, all);
    const int gathered = gather(selection, threshold, all);
    const auto those = [&](auto use) { for_each_gathered(selection, gathered, use); };
    while (!threshold.known()) narrow(selection, threshold, those);
    int kept = keep(selection, threshold, gathered, [&](std::uint64_t key) { return is_own(params.to, key); });
    sort(selection, kept);

    if constexpr (kToSlots) {
        const std::int32_t* ids = ids_in_place(selection, kept);
        const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
        Converter converter(params.to, ids, row, warp, lane);
        kept = converter.run(shared_address(shared.kept_of_warps), shared_address(selection.bins),
                             [&](bool keeps, int i, int slot) {
                                 if (keeps) list[i] = slot;
                             });
    } else {
        for (int column = static_cast<int>(threadIdx.x); column < kept; column += threads)
            list[column] = id_of_key(selection.keys[column]);
    }
    for (int column = kept + static_cast<int>(threadIdx.x); column < params.k; column += threads) list[column] = -1;
    if (threadIdx.x == 0) params.counts[row * params.counts_stride] = kept;
}

Candidates candidates_of(const MergeTopkParams& call) {
    const auto width = static_cast<std::int32_t>(call.width);
    return {.score_bits = reinterpret_cast<const std::int32_t*>(call.scores),
            .ids = call.ids,
            .counts = call.source_counts,
            .scores_source_stride = call.scores_source_stride,
            .scores_row_stride = call.scores_row_stride,
            .ids_source_stride = call.ids_source_stride,
            .ids_row_stride = call.ids_row_stride,
            .counts_source_stride = call.counts_source_stride,
            .counts_row_stride = call.counts_row_stride,
            .columns = call.conversion.width == 0 ? 0 : static_cast<std::int32_t>(call.sources * call.width),
            .width = width,
            .by_width = Divider(std::max(width, 1))};
}

}  // namespace

void prepare_merge_topk() {
    cudaFuncAttributes attributes{};
    for (const auto kernel : {merge_lists<false>, merge_lists<true>})
        check_cuda(cudaFuncGetAttributes(&attributes, kernel), "merge_topk");
}

void merge_topk_gpu(const MergeTopkParams& call, int device, Stream stream) {
    const ConvertParams& to = call.conversion;
    if (to.rows == 0) return;
    const CurrentDevice current(device);
    const Params params = {.candidates = candidates_of(call),
                           .to = convert_view(to),
                           .k = static_cast<std::int32_t>(to.width),
                           .list = to.slots,
                           .counts = to.counts,
                           .list_row_stride = to.slots_row_stride,
                           .counts_stride = to.counts_stride};
    launch(call.to_slots ? merge_lists<true> : merge_lists<false>,
           {.grid = dim3(static_cast<unsigned>(to.rows)),
            .threads = threads,
            .stream = static_cast<cudaStream_t>(stream.handle)},
           "merge_topk", params);
}

}  // namespace sparsemla::detail
