// The self-test of a GPU kernel at start-up: on a GPU of a verified architecture that nobody has tried it on, does it
// run?
#pragma once

#include "kernels.h"

namespace sparsemla::detail {

/// Decodes a small step on the current device with the plan's instantiation and tiling, and compares it with float64;
/// once for each of them and device. `launch`: of the plan's kernel. Allocates, and waits for its own stream. Throws
/// Error (device).
void self_test(const Plan& plan, void (*launch)(const DecodeParams&, Stream));

}  // namespace sparsemla::detail
