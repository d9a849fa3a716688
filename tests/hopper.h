// A GPU for tests of plans, which need none: an H200 as it describes itself.
#pragma once

#include "sparsemla/device.h"

namespace sparsemla::test {

inline DeviceSpec hopper(const char* name = "NVIDIA H200") {
    return {.device = {Device::Kind::cuda, 0},
            .name = name,
            .threads = 1,
            .capability = 90,
            .sms = 132,
            .shared_memory_bytes = 232448,
            .l2_bytes = std::int64_t{60} << 20,
            .resident_clusters = {132, 66, 41, 30, 24, 20, 16, 15, 12, 12, 11, 10, 8, 8, 8, 7}};
}

}  // namespace sparsemla::test
