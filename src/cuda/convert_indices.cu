// Token ids to slots: a CTA a row, which it compacts in input order, 2048 columns at a time. A warp has 128 columns one
// after the other; where a kept one goes follows from ballots, and from the warps' numbers of kept ones.
#include <algorithm>
#include <limits>

#include "cuda/device/barriers.cuh"
#include "cuda/device/copies.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/divider.h"
#include "cuda/launch.h"
#include "cuda/verbs.h"
#include "gpu.h"

namespace sparsemla::detail {

namespace {

using namespace device;

constexpr int warps = 16;
constexpr int columns_of_lane = 4;
constexpr int columns_of_warp = 32 * columns_of_lane;
constexpr int columns_of_cta = warps * columns_of_warp;

struct Params {
    const std::int32_t* ids;
    const std::int32_t* table;
    const std::int32_t* request_of_row;
    const std::int32_t* lengths;  ///< null: no limit
    std::int32_t* slots;
    std::int32_t* counts;
    std::int64_t ids_row_stride, table_row_stride, request_stride, lengths_stride, slots_row_stride, counts_stride;
    std::int32_t width, requests, max_pages, pages;  ///< those of the table at most 2^31 - 1
    std::int32_t world, rank, interleave, page_size, slots_per_page;
    Divider by_world, by_interleave, by_page_size;
};

__device__ int divide(int n, const Divider& by) {
    return static_cast<int>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(n)) * by.multiplier >>
                            (32 + by.shift));
}

/// Where a token of this rank lies; page -1 for the others, and for those past the table.
struct Place {
    int page, offset;
};

__device__ Place place_of(const Params& params, int token) {
    const int turn = divide(token, params.by_interleave), round = divide(turn, params.by_world);
    const int local = round * params.interleave + token - turn * params.interleave;
    const int page = divide(local, params.by_page_size);
    const bool here = turn - round * params.world == params.rank && page < params.max_pages;
    return {here ? page : -1, local - page * params.page_size};
}

__global__ void __launch_bounds__(32 * warps) convert(const __grid_constant__ Params params) {
    __shared__ int kept_of_warp[2][warps];
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    const std::int64_t row = blockIdx.x;
    const std::int32_t* ids = params.ids + row * params.ids_row_stride;
    std::int32_t* slots = params.slots + row * params.slots_row_stride;
    launch_dependent_grids();
    wait_for_prerequisite_grids();
    const int request = load_global(params.request_of_row + row * params.request_stride);
    const bool exists = static_cast<std::uint32_t>(request) < static_cast<std::uint32_t>(params.requests);
    const std::int32_t* table = params.table + (exists ? request : 0) * params.table_row_stride;
    const bool limited = exists && params.lengths != nullptr;
    const int length = limited ? load_global(params.lengths + request * params.lengths_stride) : 0;
    int kept_before = 0, turn = 0;
    for (std::int64_t first = 0; first < params.width; first += columns_of_cta, turn ^= 1) {
        int token[columns_of_lane], block[columns_of_lane], slot[columns_of_lane];
        Place place[columns_of_lane];
#pragma unroll
        for (int i = 0; i < columns_of_lane; ++i) {
            const std::int64_t column = first + warp * columns_of_warp + i * 32 + lane;
            token[i] = load_global_if(column < params.width, ids + column, -1);
        }
#pragma unroll
        for (int i = 0; i < columns_of_lane; ++i) {
            const bool wanted = exists && token[i] >= 0 && (!limited || token[i] < length);
            place[i] = place_of(params, max(token[i], 0));
            block[i] = load_global_if(wanted && place[i].page >= 0, table + place[i].page, -1);
        }
        std::uint32_t kept[columns_of_lane];
        int kept_here = 0;
#pragma unroll
        for (int i = 0; i < columns_of_lane; ++i) {
            const bool keeps = static_cast<std::uint32_t>(block[i]) < static_cast<std::uint32_t>(params.pages);
            slot[i] = keeps ? block[i] * params.slots_per_page + place[i].offset : -1;
            kept[i] = __ballot_sync(all_lanes, slot[i] >= 0);
            kept_here += __popc(kept[i]);
        }
        if (lane == 0) kept_of_warp[turn][warp] = kept_here;
        __syncthreads();
        const int of_lane = lane < warps ? kept_of_warp[turn][lane] : 0;
        int to = kept_before + __reduce_add_sync(all_lanes, lane < warp ? of_lane : 0);
        kept_before += __reduce_add_sync(all_lanes, of_lane);
#pragma unroll
        for (int i = 0; i < columns_of_lane; ++i) {
            if (slot[i] >= 0) slots[to + __popc(kept[i] & ((1U << lane) - 1))] = slot[i];
            to += __popc(kept[i]);
        }
    }
    for (std::int64_t column = std::int64_t{kept_before} + threadIdx.x; column < params.width; column += 32 * warps)
        slots[column] = -1;
    if (threadIdx.x == 0) params.counts[row * params.counts_stride] = kept_before;
}

std::int32_t at_most_int32(std::int64_t value) {
    return static_cast<std::int32_t>(std::min<std::int64_t>(value, std::numeric_limits<std::int32_t>::max()));
}

}  // namespace

void prepare_convert_indices() {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, convert), "convert_indices");
}

void convert_indices_gpu(const ConvertParams& call, int device, Stream stream) {
    if (call.rows == 0) return;
    const CurrentDevice current(device);
    const Params params = {.ids = call.token_ids,
                           .table = call.block_table,
                           .request_of_row = call.request_of_row,
                           .lengths = call.lengths,
                           .slots = call.slots,
                           .counts = call.counts,
                           .ids_row_stride = call.ids_row_stride,
                           .table_row_stride = call.table_row_stride,
                           .request_stride = call.request_stride,
                           .lengths_stride = call.lengths_stride,
                           .slots_row_stride = call.slots_row_stride,
                           .counts_stride = call.counts_stride,
                           .width = static_cast<std::int32_t>(call.width),
                           .requests = at_most_int32(call.requests),
                           .max_pages = at_most_int32(call.max_pages),
                           .pages = static_cast<std::int32_t>(call.pages),
                           .world = static_cast<std::int32_t>(call.sharding.world),
                           .rank = static_cast<std::int32_t>(call.sharding.rank),
                           .interleave = static_cast<std::int32_t>(call.sharding.interleave),
                           .page_size = static_cast<std::int32_t>(call.page_size),
                           .slots_per_page = static_cast<std::int32_t>(call.slots_per_page),
                           .by_world = Divider(call.sharding.world),
                           .by_interleave = Divider(call.sharding.interleave),
                           .by_page_size = Divider(call.page_size)};
    launch(convert,
           {.grid = dim3(static_cast<unsigned>(call.rows)),
            .threads = 32 * warps,
            .stream = static_cast<cudaStream_t>(stream.handle)},
           "convert_indices", params);
}

}  // namespace sparsemla::detail
