// Does a kernel of this build run on the GPU? Phases: poison the memory, write the pattern, copy it back, compare.
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/device_check.h"
#include "cuda/runtime.h"

namespace sparsemla::detail {

namespace {

constexpr int num_words = 1000;  // not a multiple of the block: the last block is partly idle
constexpr int block_threads = 128;

__host__ __device__ constexpr std::uint32_t pattern(std::uint32_t i) { return i * 2654435761U ^ 0x5A5A5A5AU; }

__global__ void write_pattern(std::uint32_t* words) {
    const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < num_words) words[i] = pattern(i);
}

/// Only asked about, never launched.
__global__ void occupy_sm() {}

std::string current_device_name() {
    int index = 0;
    cudaDeviceProp properties{};
    check_cuda(cudaGetDevice(&index), "cudaGetDevice");
    check_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    return std::string(properties.name) + " of compute capability " + std::to_string(properties.major) + "." +
           std::to_string(properties.minor);
}

bool succeeded(cudaError_t code) {
    if (code != cudaSuccess) cudaGetLastError();
    return code == cudaSuccess;
}

}  // namespace

void check_current_device() {
    constexpr std::size_t bytes = num_words * sizeof(std::uint32_t);
    cudaFuncAttributes attributes{};
    if (!succeeded(cudaFuncGetAttributes(&attributes, write_pattern)))
        throw Error(ErrorKind::unsupported, "device",
                    "a GPU of the architectures that this build has kernels for (" SPARSEMLA_CUDA_PORTABLE ")",
                    current_device_name());

    const OwnedStream stream;
    const DeviceMemory memory(bytes);
    check_cuda(cudaMemsetAsync(memory.get(), 0xFF, bytes, stream.get()), "cudaMemsetAsync");
    const int blocks = (num_words + block_threads - 1) / block_threads;
    write_pattern<<<blocks, block_threads, 0, stream.get()>>>(static_cast<std::uint32_t*>(memory.get()));
    check_cuda(cudaGetLastError(), "launch of the device check");
    std::vector<std::uint32_t> words(num_words);
    check_cuda(cudaMemcpyAsync(words.data(), memory.get(), bytes, cudaMemcpyDeviceToHost, stream.get()),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
    for (std::uint32_t i = 0; i < num_words; ++i)
        if (words[i] != pattern(i))
            throw Error(ErrorKind::device, "device check",
                        "word " + std::to_string(i) + " = " + std::to_string(pattern(i)), std::to_string(words[i]));
}

std::array<int, 16> resident_clusters(int shared_memory_bytes) {
    std::array<int, 16> clusters{};
    if (!succeeded(cudaFuncSetAttribute(occupy_sm, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_memory_bytes)) ||
        !succeeded(cudaFuncSetAttribute(occupy_sm, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)))
        return clusters;
    for (unsigned ctas = 1; ctas <= clusters.size(); ++ctas) {
        cudaLaunchAttribute attribute{};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {ctas, 1, 1};
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(ctas);
        config.blockDim = dim3(block_threads);
        // All of an SM's shared memory: no second CTA fits beside the first.
        config.dynamicSmemBytes = static_cast<std::size_t>(shared_memory_bytes);
        config.attrs = &attribute;
        config.numAttrs = 1;
        int resident = 0;
        if (succeeded(cudaOccupancyMaxActiveClusters(&resident, occupy_sm, &config))) clusters[ctas - 1] = resident;
    }
    return clusters;
}

}  // namespace sparsemla::detail
