// decode_wide with P as one number: FP16, or BF16 (p_bf16).
#include "cuda/decode_wide.h"

#include "cuda/decode_wide_variants.cuh"

namespace sparsemla::detail::wide {

void prepare_kernel_of_one(StageForm form, std::size_t shared_bytes) { prepare_kernel<1>(form, shared_bytes); }

void launch_kernel_of_one(StageForm form, const LaunchConfig& config, const Params& params) {
    launch_kernel<1>(form, config, params);
}

}  // namespace sparsemla::detail::wide
