// What this machine offers: devices with the facts that planning needs, and what is built in.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "sparsemla/tensor.h"

namespace sparsemla {

/// What a plan must know of a device. Queried once by the caller; make_plan reads no other machine state.
struct DeviceSpec {
    Device device{};
    std::string name;    ///< of the GPU, or of the CPU's instruction set in use
    int threads = 1;     ///< CPU: threads that a call may use; never changes a bit of the result
    int capability = 0;  ///< GPU: compute capability, 90 for 9.0
    int sms = 0;         ///< GPU: that a launch can have at once; more than there are is refused by prepare
    std::int64_t shared_memory_bytes = 0;  ///< GPU: opt-in limit of one block
    std::int64_t l2_bytes = 0;
    /// GPU: clusters of i + 1 CTAs that are resident at once with one CTA an SM; 0: no such cluster.
    std::array<int, 16> resident_clusters{};
};

/// The spec of a device of this machine. Throws Error (unsupported) where the device or its support is missing.
DeviceSpec query_device(Device device);

/// One device of this machine, usable or not.
struct DeviceReport {
    DeviceSpec spec;
    bool usable = false;
    std::string reason;  ///< why not, or what to know; empty otherwise
};

/// The CPU, then every GPU that the driver shows. Never throws for a missing driver or GPU.
std::vector<DeviceReport> list_devices();

struct BuildInfo {
    std::string version;   ///< of sparsemla
    std::string compiler;  ///< that built the library
    bool cuda = false;     ///< the CUDA part is built in
    std::string cuda_toolkit;
    std::string cuda_architectures;
    std::string cuda_driver;   ///< newest CUDA version the driver takes, "" without a driver
    std::string cuda_problem;  ///< why no GPU can be used, "" if one can
};

BuildInfo build_info();

}  // namespace sparsemla
