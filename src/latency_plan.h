// The host's side of decode_latency: what it takes, how it is laid out, and the launch that follows from a plan.
#pragma once

#include <cstddef>
#include <cstdint>

#include "latency_layout.h"
#include "sparsemla/decode.h"

namespace sparsemla::detail {

/// The grid of a call: along x clusters of `cluster` CTAs, one for each row; along y tiles of heads, `cluster_tiles` of
/// them in a cluster.
struct LaunchShape {
    std::int64_t grid_x = 0;
    int grid_y = 0;
    int cluster = 0;
    int cluster_tiles = 1;
    int threads = 0;
    std::size_t shared_bytes = 0;
};

/// Every CTA's part of a row is one chunk at most.
bool has_one_chunk(const Plan& plan);

LaunchShape latency_launch(const Plan& plan, std::int64_t rows);
latency::SharedLayout latency_memory(const Plan& plan);

}  // namespace sparsemla::detail
