// Heads of a query from one layout to another. A thread has 16 bytes.
#include "cuda/copy_heads.h"
#include "cuda/device/barriers.cuh"
#include "cuda/launch.h"
#include "cuda/verbs.h"

namespace sparsemla::detail {

namespace {

constexpr int threads = 256;
constexpr int piece_bytes = 16;

__global__ void __launch_bounds__(threads) copy_pieces(const __grid_constant__ HeadCopy params) {
    const std::int64_t pieces = params.head_bytes / piece_bytes;
    const std::int64_t number = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    const std::int64_t head = number / pieces, piece = number % pieces, row = blockIdx.y;
    device::launch_dependent_grids();
    device::wait_for_prerequisite_grids();
    if (head >= params.heads) return;
    const std::byte* from = params.from + row * params.from_row_stride + head * params.from_head_stride;
    std::byte* to = params.to + row * params.to_row_stride + head * params.to_head_stride;
    reinterpret_cast<uint4*>(to)[piece] = reinterpret_cast<const uint4*>(from)[piece];
}

}  // namespace

void copy_heads_gpu(const HeadCopy& heads, Stream stream) {
    const std::int64_t pieces = heads.heads * (heads.head_bytes / piece_bytes);
    launch(copy_pieces,
           {.grid = dim3(static_cast<unsigned>((pieces + threads - 1) / threads), static_cast<unsigned>(heads.rows)),
            .threads = threads,
            .stream = static_cast<cudaStream_t>(stream.handle)},
           "copy_heads", heads);
}

void prepare_copy_heads() {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, copy_pieces), "copy_heads");
}

}  // namespace sparsemla::detail
