#include "tests/cuda/kernels.h"

#include <algorithm>
#include <stdexcept>

#include "cuda/device/barriers.cuh"
#include "cuda/runtime.h"

namespace sparsemla::test {

namespace {

constexpr int max_writes = 8;
constexpr unsigned write_blocks = 16;
constexpr unsigned block_threads = 256;

struct Writes {
    LateWrite of[max_writes];
    int count;
    long long cycles;
};

__device__ inline void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {
    }
}

__device__ inline std::size_t first_byte() { return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline std::size_t byte_step() { return std::size_t{gridDim.x} * blockDim.x; }

template <bool kTriggers>
__global__ void write_kernel(Writes writes) {
    if (kTriggers) device::launch_dependent_grids();
    spin(writes.cycles);
    for (int i = 0; i < writes.count; ++i)
        for (std::size_t at = first_byte(); at < writes.of[i].bytes; at += byte_step())
            writes.of[i].to[at] = writes.of[i].from[at];
}

__global__ void fill_kernel(std::byte* to, int byte, std::size_t bytes) {
    device::launch_dependent_grids();
    for (std::size_t at = first_byte(); at < bytes; at += byte_step()) to[at] = static_cast<std::byte>(byte);
}

__global__ void compare_kernel(const std::byte* a, const std::byte* b, std::size_t bytes, std::uint32_t* count) {
    std::uint32_t differences = 0;
    for (std::size_t at = first_byte(); at < bytes; at += byte_step()) differences += a[at] != b[at] ? 1 : 0;
    if (differences != 0) atomicAdd(count, differences);
}

__global__ void occupy_kernel(long long cycles) { spin(cycles); }

cudaStream_t handle_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

int attribute(cudaDeviceAttr which) {
    int value = 0;
    detail::check_cuda(cudaDeviceGetAttribute(&value, which, current_device()), "cudaDeviceGetAttribute");
    return value;
}

long long cycles_of(double microseconds) {
    // At a lower clock everything takes longer, what is waited for too.
    constexpr double cycles_of_us = 2000;
    return static_cast<long long>(microseconds * cycles_of_us);
}

Writes writes_of(const std::vector<LateWrite>& list, double microseconds) {
    if (list.size() > max_writes) throw std::invalid_argument("at most 8 writes");
    Writes writes{};
    std::copy(list.begin(), list.end(), writes.of);
    writes.count = static_cast<int>(list.size());
    writes.cycles = cycles_of(microseconds);
    return writes;
}

unsigned blocks_for(std::size_t bytes) {
    const std::size_t blocks = (bytes + 16 * block_threads - 1) / (16 * block_threads);
    return static_cast<unsigned>(std::clamp<std::size_t>(blocks, 1, 64));
}

void check_launch(const char* kernel) { detail::check_cuda(cudaGetLastError(), kernel); }

}  // namespace

void late_write(const std::vector<LateWrite>& writes, double microseconds, Stream stream) {
    write_kernel<true><<<write_blocks, block_threads, 0, handle_of(stream)>>>(writes_of(writes, microseconds));
    check_launch("late_write");
}

void plain_write(const std::vector<LateWrite>& writes, double microseconds, Stream stream) {
    write_kernel<false><<<write_blocks, block_threads, 0, handle_of(stream)>>>(writes_of(writes, microseconds));
    check_launch("plain_write");
}

void late_fill(std::byte* to, int byte, std::size_t bytes, Stream stream) {
    fill_kernel<<<blocks_for(bytes), block_threads, 0, handle_of(stream)>>>(to, byte, bytes);
    check_launch("late_fill");
}

void count_differences(const std::byte* a, const std::byte* b, std::size_t bytes, std::uint32_t* count, Stream stream) {
    compare_kernel<<<blocks_for(bytes), block_threads, 0, handle_of(stream)>>>(a, b, bytes, count);
    check_launch("count_differences");
}

void occupy(int sms, double microseconds, Stream stream) {
    const int shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    detail::check_cuda(cudaFuncSetAttribute(occupy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                       "occupy");
    const auto shared = static_cast<std::size_t>(shared_bytes);
    occupy_kernel<<<static_cast<unsigned>(sms), 32, shared, handle_of(stream)>>>(cycles_of(microseconds));
    check_launch("occupy");
}

// ---------------------------------------------------------------------------------------------------------------------
struct Holder::Flags {
    volatile int released;
    volatile int ended;
};

namespace {

__global__ void hold_kernel(volatile int* released, volatile int* ended, long long cycles) {
    const long long start = clock64();
    while (*released == 0 && clock64() - start < cycles) {
    }
    *ended = 1;
    __threadfence_system();
}

}  // namespace

Holder::Holder(Stream stream) {
    void* memory = nullptr;
    detail::check_cuda(cudaHostAlloc(&memory, sizeof(Flags), cudaHostAllocMapped), "cudaHostAlloc");
    flags_ = static_cast<Flags*>(memory);
    flags_->released = 0;
    flags_->ended = 0;
    constexpr double ten_seconds_us = 1e7;
    // With unified addresses the GPU knows pinned memory by the host's own.
    hold_kernel<<<1, 1, 0, handle_of(stream)>>>(&flags_->released, &flags_->ended, cycles_of(ten_seconds_us));
    check_launch("hold");
}
Holder::~Holder() {
    release();
    cudaDeviceSynchronize();
    cudaFreeHost(flags_);
}
void Holder::release() { flags_->released = 1; }
bool Holder::ended() const { return flags_->ended != 0; }

// ---------------------------------------------------------------------------------------------------------------------
void upload(void* to, const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    detail::check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    detail::check_cuda(cudaStreamSynchronize(cudaStreamLegacy), "cudaMemcpy");
}

void download(void* to, const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    detail::check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

int current_device() {
    int index = 0;
    detail::check_cuda(cudaGetDevice(&index), "cudaGetDevice");
    return index;
}
void set_current_device(int index) { detail::check_cuda(cudaSetDevice(index), "cudaSetDevice"); }

const char* kept_error() {
    const cudaError_t error = cudaPeekAtLastError();
    return error == cudaSuccess ? "" : cudaGetErrorName(error);
}

bool is_done(Stream stream) {
    const cudaError_t state = cudaStreamQuery(handle_of(stream));
    if (state == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
    }
    detail::check_cuda(state, "cudaStreamQuery");
    return true;
}

}  // namespace sparsemla::test
