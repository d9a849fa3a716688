// The two questions about a GPU that only a kernel of ours can answer.
#pragma once

#include <array>

namespace sparsemla::detail {

/// Clusters of 1 .. 16 CTAs resident at once with one CTA on an SM, on the current device. 0 where the
/// device (or this build) has no such cluster.
std::array<int, 16> resident_clusters(int shared_memory_bytes);

/// Launches a kernel on the current device and compares what it wrote. Throws Error (device, unsupported).
void check_current_device();

}  // namespace sparsemla::detail
