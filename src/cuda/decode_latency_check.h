// The self-test of decode_latency at start-up: on a GPU of a verified architecture that nobody has tried it on, does it
// run?
#pragma once

#include "sparsemla/decode.h"

namespace sparsemla::detail {

/// Decodes a small step on the current device with the plan's instantiation and tiling, and compares it with float64;
/// once for each of them and device. Allocates, and waits for its own stream. Throws Error (device).
void check_latency(const Plan& plan);

}  // namespace sparsemla::detail
