// The host's side of decode_latency: what it takes, how it is laid out, and the launch that follows from a plan.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparsemla/decode.h"

namespace sparsemla::detail {

/// The grid of a call: clusters of `cluster` CTAs along x, one cluster for each row; tiles of heads along y.
struct LaunchShape {
    std::int64_t grid_x = 0;
    int grid_y = 0;
    int cluster = 0;
    int threads = 0;
    std::size_t shared_bytes = 0;
};

/// Every CTA's part of a row is one chunk at most.
bool has_one_chunk(const Plan& plan);

LaunchShape latency_launch(const Plan& plan, std::int64_t rows);

}  // namespace sparsemla::detail
