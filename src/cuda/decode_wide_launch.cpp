// From a checked call to decode_wide's launch.
#include "balanced_plan.h"
#include "cuda/decode_balanced_launch.h"
#include "cuda/decode_wide.h"
#include "cuda/launch.h"
#include "cuda/self_test.h"
#include "gpu.h"
#include "wide_layout.h"

namespace sparsemla::detail {

namespace {

bool has_one_part(const Plan& plan) {
    return wide::is_f16(stage_form(plan.problem.sources[0].record)) || plan.schedule.p_format == PFormat::bf16;
}

}  // namespace

void prepare_wide(const Plan& plan, Memory state, Stream stream) {
    const auto prepare_kernel = has_one_part(plan) ? wide::prepare_kernel_of_one : wide::prepare_kernel_of_two;
    prepare_shared_out(plan, state, stream, launch_wide, [&] {
        // All that the device has: another plan of the same kernel may need more than this one.
        prepare_kernel(stage_form(plan.problem.sources[0].record),
                       static_cast<std::size_t>(plan.device.shared_memory_bytes));
    });
}

void launch_wide(const DecodeParams& call, Stream stream) {
    const Plan& plan = *call.plan;
    const CurrentDevice current(plan.device.device.index);
    const BalancedShape shape = balanced_shape(plan);
    balanced::Params params = balanced::params_of(call, shape);
    // BF16 has float32's exponents: P needs no scale, with which large values would overflow.
    if (!wide::is_f16(stage_form(plan.problem.sources[0].record)))
        params.call.p_scale = params.call.inverse_p_scale = 1;
    const auto launch_kernel = has_one_part(plan) ? wide::launch_kernel_of_one : wide::launch_kernel_of_two;
    launch_kernel(stage_form(plan.problem.sources[0].record),
                  {.grid = dim3(static_cast<unsigned>(shape.ctas)),
                   .threads = static_cast<unsigned>(wide::threads),
                   .shared_bytes = shape.shared_bytes,
                   .stream = static_cast<cudaStream_t>(stream.handle)},
                  params);
}

}  // namespace sparsemla::detail
