// Token ids to slots: a CTA a row, 2048 columns at a time.
#include <algorithm>
#include <limits>

#include "cuda/convert_row.cuh"
#include "cuda/device/barriers.cuh"
#include "cuda/launch.h"
#include "cuda/verbs.h"
#include "gpu.h"

namespace sparsemla::detail {

namespace {

using namespace device;

constexpr int warps = 16;
constexpr int columns_of_lane = 4;

struct Params {
    ConvertView from;
    std::int32_t* slots;
    std::int32_t* counts;
    std::int64_t slots_row_stride, counts_stride;
};

__global__ void __launch_bounds__(32 * warps) convert(const __grid_constant__ Params params) {
    using Converter = RowConverter<warps, columns_of_lane>;
    __shared__ __align__(4) std::byte kept_of_warps[Converter::kept_bytes], scratch[Converter::scratch_bytes];
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    const std::int64_t row = blockIdx.x;
    std::int32_t* slots = params.slots + row * params.slots_row_stride;
    launch_dependent_grids();
    Converter converter(params.from, row, warp, lane);
    wait_for_prerequisite_grids();
    const int kept =
        converter.run(shared_address(kept_of_warps), shared_address(scratch), [&](bool keeps, int i, int slot) {
            if (keeps) slots[i] = slot;
        });
    for (std::int64_t column = std::int64_t{kept} + threadIdx.x; column < params.from.width; column += 32 * warps)
        slots[column] = -1;
    if (threadIdx.x == 0) params.counts[row * params.counts_stride] = kept;
}

std::int32_t at_most_int32(std::int64_t value) {
    return static_cast<std::int32_t>(std::min<std::int64_t>(value, std::numeric_limits<std::int32_t>::max()));
}

}  // namespace

ConvertView convert_view(const ConvertParams& call) {
    const auto& [world, rank, interleave] = call.sharding;
    constexpr std::int64_t largest = std::numeric_limits<std::int32_t>::max();
    const std::int64_t turn = world * interleave, first = rank * interleave;
    const bool turns = turn <= largest;
    return {.ids = call.token_ids,
            .table = call.block_table,
            .request_of_row = call.request_of_row,
            .lengths = call.lengths,
            .ids_row_stride = call.ids_row_stride,
            .table_row_stride = call.table_row_stride,
            .request_stride = call.request_stride,
            .lengths_stride = call.lengths_stride,
            .width = static_cast<std::int32_t>(call.width),
            .requests = at_most_int32(call.requests),
            .max_pages = at_most_int32(call.max_pages),
            .pages = static_cast<std::int32_t>(call.pages),
            .page_size = static_cast<std::int32_t>(call.page_size),
            .slots_per_page = static_cast<std::int32_t>(call.slots_per_page),
            .turn = turns ? static_cast<std::uint32_t>(turn) : 0,
            .first = static_cast<std::uint32_t>(std::min(first, largest)),
            .interleave = first > largest ? 0 : static_cast<std::uint32_t>(interleave),
            .by_turn = turns ? Divider(turn) : Divider(),
            .by_page_size = Divider(call.page_size)};
}

void prepare_convert_indices() {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, convert), "convert_indices");
}

void convert_indices_gpu(const ConvertParams& call, int device, Stream stream) {
    if (call.rows == 0) return;
    const CurrentDevice current(device);
    const Params params = {.from = convert_view(call),
                           .slots = call.slots,
                           .counts = call.counts,
                           .slots_row_stride = call.slots_row_stride,
                           .counts_stride = call.counts_stride};
    launch(convert,
           {.grid = dim3(static_cast<unsigned>(call.rows)),
            .threads = 32 * warps,
            .stream = static_cast<cudaStream_t>(stream.handle)},
           "convert_indices", params);
}

}  // namespace sparsemla::detail
