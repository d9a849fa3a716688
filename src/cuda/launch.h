// One typed launch: explicit stream, cluster, programmatic dependency on the grid before it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/runtime.h"

namespace sparsemla::detail {

struct LaunchConfig {
    dim3 grid = 1;
    dim3 cluster = 1;  ///< CTAs
    unsigned threads = 1;
    std::size_t shared_bytes = 0;
    cudaStream_t stream = nullptr;
};

/// What every launch of a kernel needs to have been allowed, once per device: more than 48 KiB of shared memory and
/// clusters of more than 8 CTAs.
template <class... Args>
void allow_launches(void (*kernel)(Args...), std::size_t shared_bytes, const char* name) {
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        name);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name);
}

/// Launches a kernel that waits for its prerequisite grids itself: it may start while the grid before it still runs.
template <class... Args>
void launch(void (*kernel)(Args...), const LaunchConfig& config, const char* name, const Args&... args) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {config.cluster.x, config.cluster.y, config.cluster.z};
    cudaLaunchConfig_t launch_config = {};
    launch_config.gridDim = config.grid;
    launch_config.blockDim = dim3(config.threads);
    launch_config.dynamicSmemBytes = config.shared_bytes;
    launch_config.stream = config.stream;
    launch_config.attrs = attributes;
    launch_config.numAttrs = 2;
    check_cuda(cudaLaunchKernelEx(&launch_config, kernel, args...), name);
}

}  // namespace sparsemla::detail
