// merge on a GPU: a warp has a (row, head).
#include <algorithm>
#include <string>

#include "cuda/launch.h"
#include "cuda/merge_head.cuh"
#include "cuda/verbs.h"
#include "gpu.h"

namespace sparsemla::detail {

namespace {

using namespace device;

constexpr int warps = 4;
constexpr int threads = 32 * warps;
constexpr int most_partials = 32;  ///< a lane each

struct PartialView {
    const void* out;
    const float* lse;
    const std::int32_t* counts;  ///< null: none
    std::int64_t row_stride, head_stride, lse_row_stride, lse_head_stride, counts_stride;
    bool is_f32;
};

struct MergeParams {
    PartialView partials[most_partials];
    const float* sinks;  ///< null: none
    std::int64_t sinks_stride;
    MergedOut to;
    std::int32_t num_partials, heads;
    std::int64_t pieces;  ///< rows * heads
    LseBase partial_base;
    bool plus_inf_is_empty;
};

__device__ float lse_of(const MergeParams& params, const PartialView& partial, std::int64_t row, int head) {
    if (partial.counts != nullptr && partial.counts[row * partial.counts_stride] <= 0) return -INFINITY;
    const float lse = partial.lse[row * partial.lse_row_stride + head * partial.lse_head_stride];
    return params.plus_inf_is_empty && lse == INFINITY ? -INFINITY : lse;
}

/// Dimensions lane, lane + 32 ..
__device__ void load(const PartialView& partial, std::int64_t row, int head, int lane, float (&values)[dims_of_lane]) {
    const std::int64_t element = row * partial.row_stride + head * partial.head_stride + lane;
#pragma unroll
    for (int i = 0; i < dims_of_lane; ++i)
        values[i] = partial.is_f32 ? static_cast<const float*>(partial.out)[element + 32 * i]
                                   : bf16_low(static_cast<const std::uint16_t*>(partial.out)[element + 32 * i]);
}

/// The partial's values: of equal types every bit, NaN payloads included.
__device__ void pass(const MergeParams& params, const PartialView& partial, std::int64_t row, int head, int lane) {
    const std::int64_t from = row * partial.row_stride + head * partial.head_stride + lane;
    const std::int64_t to = params.to.element(row, head) + lane;
    for (int i = 0; i < 512; i += 32) {
        if (partial.is_f32 && params.to.is_f32)
            static_cast<std::uint32_t*>(params.to.out)[to + i] =
                static_cast<const std::uint32_t*>(partial.out)[from + i];
        else if (!partial.is_f32 && !params.to.is_f32)
            static_cast<std::uint16_t*>(params.to.out)[to + i] =
                static_cast<const std::uint16_t*>(partial.out)[from + i];
        else if (partial.is_f32)
            params.to.store(to + i, static_cast<const float*>(partial.out)[from + i]);
        else
            params.to.store(to + i, bf16_low(static_cast<const std::uint16_t*>(partial.out)[from + i]));
    }
}

__global__ void __launch_bounds__(threads) merge_partials(const __grid_constant__ MergeParams params) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::int64_t number = std::int64_t{blockIdx.x} * warps + threadIdx.x / 32;
    const std::int64_t row = number / params.heads;
    const int head = static_cast<int>(number % params.heads);
    launch_dependent_grids();
    wait_for_prerequisite_grids();
    if (number >= params.pieces) return;
    const float own_lse = lane < params.num_partials ? lse_of(params, params.partials[lane], row, head) : -INFINITY;
    const bool has_sink = params.sinks != nullptr;
    const HeadWeights weights(own_lse, params.num_partials, params.partial_base, has_sink,
                              has_sink ? params.sinks[head * params.sinks_stride] : 0);
    if (lane == 0) params.to.write_lse(row, head, weights.merged_lse(params.partial_base, params.to.lse_base));
    if (weights.passes) return pass(params, params.partials[weights.summary.last], row, head, lane);
    HeadSums sums;
    if (!weights.summary.defined)
        for (float& sum : sums.of) sum = merged_nan();
    else
        for (int i = 0; i < params.num_partials; ++i) {
            if (!weights.counts(i)) continue;
            float values[dims_of_lane];
            load(params.partials[i], row, head, lane, values);
            sums.add(weights.weight(i), values);
        }
    const std::int64_t to = params.to.element(row, head) + lane;
#pragma unroll
    for (int i = 0; i < dims_of_lane; ++i) params.to.store(to + 32 * i, sums.of[i]);
}

}  // namespace

void merge_gpu(const MergeArgs& args, int device, Stream stream) {
    if (args.partials.size() > most_partials)
        throw Error(ErrorKind::unsupported, "partials", "at most " + std::to_string(most_partials) + " on a GPU",
                    std::to_string(args.partials.size()));
    const CurrentDevice current(device);
    MergeParams params{.partials = {},
                       .sinks = args.sinks.present() ? static_cast<const float*>(args.sinks.data) : nullptr,
                       .sinks_stride = args.sinks.strides[0],
                       .to = {.out = args.out.data,
                              .lse = args.lse.present() ? static_cast<float*>(args.lse.data) : nullptr,
                              .row_stride = args.out.strides[0],
                              .head_stride = args.out.strides[1],
                              .lse_row_stride = args.lse.strides[0],
                              .lse_head_stride = args.lse.strides[1],
                              .lse_base = args.lse_base,
                              .is_f32 = args.out.dtype == DType::f32},
                       .num_partials = static_cast<std::int32_t>(args.partials.size()),
                       .heads = static_cast<std::int32_t>(args.heads),
                       .pieces = args.rows * args.heads,
                       .partial_base = args.partial_base,
                       .plus_inf_is_empty = args.plus_inf_is_empty};
    for (std::size_t i = 0; i < args.partials.size(); ++i) {
        const auto& [out, lse, counts] = args.partials[i];
        params.partials[i] = {.out = out.data,
                              .lse = static_cast<const float*>(lse.data),
                              .counts = counts.present() ? static_cast<const std::int32_t*>(counts.data) : nullptr,
                              .row_stride = out.strides[0],
                              .head_stride = out.strides[1],
                              .lse_row_stride = lse.strides[0],
                              .lse_head_stride = lse.strides[1],
                              .counts_stride = counts.strides[0],
                              .is_f32 = out.dtype == DType::f32};
    }
    const std::int64_t ctas = (params.pieces + warps - 1) / warps;
    if (args.heads > 1 << 30 || ctas > 0x7FFFFFFF)
        throw Error(ErrorKind::unsupported, "rows", "rows * heads below 2^33 on a GPU", std::to_string(args.rows));
    launch(merge_partials,
           {.grid = dim3(static_cast<unsigned>(ctas)),
            .threads = threads,
            .stream = static_cast<cudaStream_t>(stream.handle)},
           "merge", params);
}

void prepare_merge() {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, merge_partials), "merge");
}

}  // namespace sparsemla::detail
