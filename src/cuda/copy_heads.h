#pragma once

#include "nccl/group_device.h"

namespace sparsemla::detail {

/// On the current device. Does not wait.
void copy_heads_gpu(const HeadCopy& heads, Stream stream);

}  // namespace sparsemla::detail
