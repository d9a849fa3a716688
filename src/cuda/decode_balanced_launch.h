// What the launches of decode_balanced and decode_wide have in common.
#pragma once

#include <functional>

#include "balanced_plan.h"
#include "cuda/decode_balanced.h"
#include "kernels.h"

namespace sparsemla::detail {

namespace balanced {
Params params_of(const DecodeParams& call, const BalancedShape& shape);
}

/// Refuses more CTAs than the device has SMs, prepares the kernel, runs the self-test, and zeroes the state.
void prepare_shared_out(const Plan& plan, Memory state, Stream stream, void (*launch)(const DecodeParams&, Stream),
                        const std::function<void()>& prepare_kernel);

}  // namespace sparsemla::detail
