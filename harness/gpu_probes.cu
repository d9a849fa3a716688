#include "harness/gpu_probes.h"

#include <cuda_runtime.h>

#include "harness/gpu_runtime.h"

namespace sparsemla::harness {
namespace {

constexpr unsigned threads = 256;

int attribute(Device device, cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, index_of(device)), "cudaDeviceGetAttribute");
    return value;
}

/// Of a clock that the driver states in kHz, or 0 where it does not.
double stated_mhz(Device device, cudaDeviceAttr which) {
    int khz = 0;
    if (cudaDeviceGetAttribute(&khz, which, index_of(device)) == cudaSuccess) return 1e-3 * khz;
    cudaGetLastError();
    return 0;
}

__global__ void empty_kernel() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// The values decide about a short sleep: without a use, the loads would be left out.
__global__ void read_kernel(const uint4* from, std::size_t elements) {
    const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
    unsigned mix = 0;
#pragma unroll 8
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
        const uint4 value = from[i];
        mix ^= value.x ^ value.y ^ value.z ^ value.w;
    }
    if (mix == 0x9E3779B9U) __nanosleep(20);
}

__device__ unsigned long long now_ns() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
    return ns;
}

/// result: SM cycles and nanoseconds of the same while.
__global__ void clock_kernel(unsigned long long ns, unsigned long long* result) {
    const unsigned long long start_ns = now_ns();
    const long long start = clock64();
    unsigned long long end_ns = start_ns;
    while (end_ns - start_ns < ns) end_ns = now_ns();
    result[0] = static_cast<unsigned long long>(clock64() - start);
    result[1] = end_ns - start_ns;
}

/// Memory and a stream for one measurement.
struct ClockRun {
    ClockRun() {
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
        check(cudaMalloc(&result, 2 * sizeof *result), "cudaMalloc");
    }
    ~ClockRun() {
        cudaFree(result);
        cudaStreamDestroy(stream);
    }
    ClockRun(const ClockRun&) = delete;
    ClockRun& operator=(const ClockRun&) = delete;

    double mhz(unsigned long long ns) const {
        clock_kernel<<<1, 1, 0, stream>>>(ns, result);
        check(cudaGetLastError(), "clock_kernel");
        unsigned long long held[2] = {};
        check(cudaMemcpyAsync(held, result, sizeof held, cudaMemcpyDeviceToHost, stream), "cudaMemcpy from the GPU");
        check(cudaStreamSynchronize(stream), "clock_kernel");
        return 1e3 * static_cast<double>(held[0]) / static_cast<double>(held[1]);
    }

    cudaStream_t stream = nullptr;
    unsigned long long* result = nullptr;
};

}  // namespace

void copy_on(Device device, Stream stream, void* to, const void* from, std::size_t bytes) {
    const CurrentDevice current(device);
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, handle_of(stream)), "cudaMemcpyAsync");
}

void read_on(Device device, Stream stream, const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    const CurrentDevice current(device);
    const auto grid = static_cast<unsigned>(8 * attribute(device, cudaDevAttrMultiProcessorCount));
    read_kernel<<<grid, threads, 0, handle_of(stream)>>>(static_cast<const uint4*>(from), bytes / sizeof(uint4));
    check(cudaGetLastError(), "read_kernel");
}

void empty_on(Device device, Stream stream) {
    const CurrentDevice current(device);
    cudaLaunchAttribute programmatic = {};
    programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    programmatic.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(attribute(device, cudaDevAttrMultiProcessorCount)));
    config.blockDim = dim3(threads);
    config.stream = handle_of(stream);
    config.attrs = &programmatic;
    config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, empty_kernel), "empty_kernel");
}

GpuClocks measure_clocks(Device device) {
    const CurrentDevice current(device);
    const ClockRun run;
    run.mhz(20'000'000);  // until the clocks have risen
    return {.sm_mhz = run.mhz(10'000'000),
            .largest_sm_mhz = stated_mhz(device, cudaDevAttrClockRate),
            .largest_memory_mhz = stated_mhz(device, cudaDevAttrMemoryClockRate)};
}

}  // namespace sparsemla::harness
