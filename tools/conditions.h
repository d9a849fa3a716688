// The GPU that times come from, and its limits, measured in the same run.
#pragma once

#include <string>

#include "harness/decode_timer.h"
#include "harness/gpu_probes.h"
#include "tools/flags.h"
#include "tools/output.h"

namespace sparsemla::tool {

/// f16 mma.sync on an H200, measured once (docs/performance.md), not in every run.
inline constexpr double f16_flops_per_s = 629e12;

struct Conditions {
    DeviceSpec device;
    std::string driver;  ///< "580.95.05", "" where the system does not say
    harness::GpuClocks clocks;
    harness::GpuLimits limits;
};

/// The GPU of --device. Throws Error (unsupported) where that is a CPU; `what` needs a GPU.
DeviceSpec gpu_of(const RunFlags& flags, const std::string& what);

Conditions measure_conditions(const DeviceSpec& device, const harness::DecodeTimer& timer);

/// Lines for people, each ended by a newline.
std::string text_of(const Conditions& conditions);
Json to_json(const Conditions& conditions);

}  // namespace sparsemla::tool
