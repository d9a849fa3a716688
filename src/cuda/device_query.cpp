// Which GPUs does the driver show, and what must a plan know of them?
#include <string>

#include "cuda/device_check.h"
#include "cuda/runtime.h"
#include "gpu.h"

namespace sparsemla::detail {

namespace {

/// CUDA's 13020 is version 13.2.
std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

int attribute(cudaDeviceAttr which, int index) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, index), "cudaDeviceGetAttribute");
    return value;
}

DeviceSpec spec_of(int index) {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    DeviceSpec spec;
    spec.device = {Device::Kind::cuda, index};
    spec.name = properties.name;
    spec.capability = properties.major * 10 + properties.minor;
    spec.sms = properties.multiProcessorCount;
    const int shared_memory_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    spec.shared_memory_bytes = shared_memory_bytes;
    spec.l2_bytes = properties.l2CacheSize;
    const CurrentDevice current(index);
    spec.resident_clusters = resident_clusters(shared_memory_bytes);
    return spec;
}

}  // namespace

GpuStatus query_gpus() {
    GpuStatus status;
    status.built = true;
    status.toolkit = SPARSEMLA_CUDA_TOOLKIT;
    status.architectures = SPARSEMLA_CUDA_ARCHITECTURES;
    int driver = 0;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver != 0) status.driver = version_text(driver);
    int count = 0;
    const cudaError_t counted = cudaGetDeviceCount(&count);
    if (counted != cudaSuccess) {
        cudaGetLastError();
        status.problem = status.driver.empty() ? "no NVIDIA driver" : cudaGetErrorString(counted);
        return status;
    }
    for (int index = 0; index < count; ++index) {
        try {
            status.devices.push_back(spec_of(index));
        } catch (const Error& error) {
            if (status.problem.empty())
                status.problem = to_string({Device::Kind::cuda, index}) + " does not answer (" + error.what() + ")";
        }
    }
    if (status.devices.empty() && status.problem.empty()) status.problem = "the driver shows no GPU";
    if (!status.devices.empty()) status.problem.clear();
    return status;
}

bool gpu_built() { return true; }

void check_gpu(int index) {
    const CurrentDevice current(index);
    check_current_device();
}

}  // namespace sparsemla::detail
