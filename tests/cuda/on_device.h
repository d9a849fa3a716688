// What the tests of device code share: a GPU or a skip, arrays on it, and kernels that are run and waited for.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/launch.h"
#include "cuda/runtime.h"

namespace sparsemla::test {

/// Device code of this build runs on compute capability 9.0 only.
class OnDevice : public testing::Test {
   protected:
    void SetUp() override {
        int count = 0;
        if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
            cudaGetLastError();
            GTEST_SKIP() << "no GPU";
        }
        int major = 0, minor = 0;
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
        if (major != 9 || minor != 0) GTEST_SKIP() << "cuda:0 has compute capability " << major << "." << minor;
    }
};

/// An array on the GPU. Starts as bytes 0xA5, so that what a kernel leaves unwritten shows.
template <class T>
class DeviceArray {
   public:
    explicit DeviceArray(std::size_t size) : size_(size), memory_(size * sizeof(T)) {
        detail::check_cuda(cudaMemset(data(), 0xA5, size * sizeof(T)), "cudaMemset");
        detail::check_cuda(cudaDeviceSynchronize(), "cudaMemset");
    }
    explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
        detail::check_cuda(cudaMemcpy(data(), values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
        detail::check_cuda(cudaDeviceSynchronize(), "cudaMemcpy");
    }

    T* data() const { return static_cast<T*>(memory_.get()); }
    std::vector<T> values() const {
        std::vector<T> values(size_);
        detail::check_cuda(cudaMemcpy(values.data(), data(), size_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
        return values;
    }

   private:
    std::size_t size_;
    detail::DeviceMemory memory_;
};

/// Launches on a stream of its own and waits; the arguments convert to what the kernel takes.
template <class... Args>
void run(void (*kernel)(Args...), detail::LaunchConfig config, const std::type_identity_t<Args>&... args) {
    const detail::OwnedStream stream;
    config.stream = stream.get();
    detail::launch<Args...>(kernel, config, "a kernel of the tests", args...);
    detail::check_cuda(cudaStreamSynchronize(stream.get()), "a kernel of the tests");
}

__device__ inline void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {
    }
}

/// Out(Function(in)) of every element, one a thread.
template <class Out, class Function, class In>
__global__ void map_kernel(const In* in, Out* out, int size) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < size) out[i] = Function()(in[i]);
}

template <class Out, class Function, class In>
std::vector<Out> map(const std::vector<In>& in) {
    constexpr unsigned threads = 256;
    const DeviceArray<In> from(in);
    const DeviceArray<Out> to(in.size());
    const auto blocks = static_cast<unsigned>((in.size() + threads - 1) / threads);
    run(map_kernel<Out, Function, In>, {.grid = dim3(blocks), .threads = threads}, from.data(), to.data(),
        static_cast<int>(in.size()));
    return to.values();
}

}  // namespace sparsemla::test
