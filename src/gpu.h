// What the rest of the library asks of the CUDA part. cuda/device_query.cpp answers, or gpu_none.cpp in a build
// without.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"
#include "sparsemla/device.h"

namespace sparsemla::detail {

struct GpuStatus {
    bool built = false;
    std::string toolkit;        ///< "13.0"
    std::string architectures;  ///< "90a"
    std::string driver;         ///< "13.0": newest CUDA version the driver takes; empty without a driver
    std::string problem;        ///< why there is no usable GPU, one clause; empty if there is one
    std::vector<DeviceSpec> devices;
};

/// Never throws for a missing driver or GPU; leaves the current device as it was.
GpuStatus query_gpus();

/// Whether this build has the CUDA part.
bool gpu_built();

/// decode_latency (latency_plan.h has its launch): loads the plan's kernel, allows what its launch needs, and runs the
/// self-test once per device and kernel. Throws Error (device, unsupported).
void prepare_latency(const Plan& plan);
void launch_latency(const DecodeParams& params, Stream stream);

/// The same of decode_balanced (balanced_plan.h); also zeroes the state.
void prepare_balanced(const Plan& plan, Memory state, Stream stream);
void launch_balanced(const DecodeParams& params, Stream stream);

/// The same of decode_wide (balanced_plan.h).
void prepare_wide(const Plan& plan, Memory state, Stream stream);
void launch_wide(const DecodeParams& params, Stream stream);

/// On tensors of GPU `device`. Needs no preparation; a first call within a stream capture needs prepare of a plan
/// before.
void convert_indices_gpu(const ConvertParams& params, int device, Stream stream);

/// The same for writers and readers of records, on the cache's GPU, and for the query quantiser.
void pack_gpu(const PackParams& params, Stream stream);
void unpack_gpu(const UnpackParams& params, Stream stream);
void quantize_query_gpu(const QuantizeParams& params, int device, Stream stream);

/// Runs a trivial kernel on the GPU and looks at what it wrote. Throws Error (device, unsupported).
void check_gpu(int index);

}  // namespace sparsemla::detail
