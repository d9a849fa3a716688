// decode_wide with P as the sum of two BF16 numbers, which hold more than p_f16.
#include "cuda/decode_wide.h"

#include "cuda/decode_wide_variants.cuh"

namespace sparsemla::detail::wide {

void prepare_kernel_of_two(StageForm form, std::size_t shared_bytes) { prepare_kernel<2>(form, shared_bytes); }

void launch_kernel_of_two(StageForm form, const LaunchConfig& config, const Params& params) {
    launch_kernel<2>(form, config, params);
}

}  // namespace sparsemla::detail::wide
