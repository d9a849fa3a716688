// What this machine's CPU can do at most, measured now: the limits that a benchmark's percentages refer to.
#pragma once

namespace sparsemla::tool {

struct MachineLimits {
    double fma_flops_per_s = 0;   ///< FP32 multiply-adds in registers, two operations each, all threads
    double read_bytes_per_s = 0;  ///< sums over a buffer larger than the caches, all threads
    int threads = 1;
};

/// Takes well under a second, and 256 MiB while it runs.
MachineLimits measure_limits(int threads);

}  // namespace sparsemla::tool
