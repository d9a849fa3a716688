// The parameters that decode_latency's tiles need, whichever kernel they run in.
#pragma once

#include "cuda/decode_latency.h"
#include "kernels.h"

namespace sparsemla::detail::latency {

/// Everything but what decode_latency has alone: stages_offset, convert and converted_offset.
Params params_of(const DecodeParams& call);

}  // namespace sparsemla::detail::latency
