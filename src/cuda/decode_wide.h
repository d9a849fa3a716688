// What the host hands to decode_wide: decode_balanced's parameters.
#pragma once

#include "cuda/decode_balanced.h"

namespace sparsemla::detail::wide {

/// Allows the launches of one instantiation on the current device, and loads it: P as one number, or as the sum of two,
/// which are compiled apart.
void prepare_kernel_of_one(StageForm form, std::size_t shared_bytes);
void prepare_kernel_of_two(StageForm form, std::size_t shared_bytes);
void launch_kernel_of_one(StageForm form, const LaunchConfig& config, const balanced::Params& params);
void launch_kernel_of_two(StageForm form, const LaunchConfig& config, const balanced::Params& params);

}  // namespace sparsemla::detail::wide
