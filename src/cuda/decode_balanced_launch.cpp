// From a checked call to decode_balanced's parameters and its launch.
#include "cuda/decode_balanced_launch.h"

#include <algorithm>
#include <string>

#include "cuda/decode_latency_launch.h"
#include "cuda/divider.h"
#include "cuda/launch.h"
#include "cuda/self_test.h"
#include "cuda/verbs.h"
#include "gpu.h"

namespace sparsemla::detail {

namespace {

using namespace balanced;

Variant variant_of(const Plan& plan) {
    return {.heads = plan.tiling->heads,
            .form = stage_form(plan.problem.sources[0].record),
            .bf16_query = plan.problem.query_dtype == DType::bf16,
            .two_sources = plan.problem.sources.size() == 2};
}

}  // namespace

balanced::Params balanced::params_of(const DecodeParams& call, const BalancedShape& shape) {
    const WorkspaceLayout workspace = balanced_workspace(*call.plan);
    const Divider ctas(std::max(shape.ctas, 2));  // of one the kernel needs none
    auto* flags = reinterpret_cast<std::uint32_t*>(call.state);
    return {.call = latency::params_of(call),
            .rows = static_cast<std::int32_t>(call.rows),
            .tiles_of_row = shape.tiles,
            .one_split_each = shape.one_split_each,
            .cta_multiplier = ctas.multiplier,
            .cta_shift = ctas.shift,
            .handovers = call.workspace,
            .handover_bytes = static_cast<std::int64_t>(workspace.handover_bytes),
            .partials = reinterpret_cast<float*>(call.workspace + workspace.partials),
            .stats = reinterpret_cast<float*>(call.workspace + workspace.stats),
            .handed_over = flags,
            .arrived_splits = flags + shape.ctas};
}

void prepare_shared_out(const Plan& plan, Memory state, Stream stream, void (*launch)(const DecodeParams&, Stream),
                        const std::function<void()>& prepare_kernel) {
    const CurrentDevice current(plan.device.device.index);
    // Its CTAs wait for each other.
    int sms = 0;
    check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, plan.device.device.index),
               "cudaDeviceGetAttribute");
    if (sms < balanced_shape(plan).ctas)
        throw Error(ErrorKind::invalid_argument, "plan.device.sms", "at most the device's " + std::to_string(sms),
                    std::to_string(plan.device.sms));
    prepare_kernel();
    prepare_verbs();
    self_test(plan, launch);
    check_cuda(cudaMemsetAsync(state.data, 0, plan.state_bytes, static_cast<cudaStream_t>(stream.handle)),
               "cudaMemsetAsync");
}

void prepare_balanced(const Plan& plan, Memory state, Stream stream) {
    prepare_shared_out(plan, state, stream, launch_balanced, [&] {
        // All that the device has: another plan of the same kernel may need more than this one.
        prepare_kernel(variant_of(plan), static_cast<std::size_t>(plan.device.shared_memory_bytes));
    });
}

void launch_balanced(const DecodeParams& call, Stream stream) {
    const CurrentDevice current(call.plan->device.device.index);
    const BalancedShape shape = balanced_shape(*call.plan);
    launch_kernel(variant_of(*call.plan),
                  {.grid = dim3(static_cast<unsigned>(shape.ctas)),
                   .threads = static_cast<unsigned>(latency::threads),
                   .shared_bytes = shape.shared_bytes,
                   .stream = static_cast<cudaStream_t>(stream.handle)},
                  params_of(call, shape));
}

}  // namespace sparsemla::detail
