// The CUDA runtime with errors as exceptions, and owners for what a host function needs for a moment.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "sparsemla/tensor.h"

namespace sparsemla::detail {

/// Throws Error(device) naming the call. The runtime's sticky copy of the error is cleared.
inline void check_cuda(cudaError_t code, const char* call) {
    if (code == cudaSuccess) return;
    cudaGetLastError();
    throw Error(ErrorKind::device, call, "success", cudaGetErrorString(code));
}

/// Makes a device current for a scope.
class CurrentDevice {
   public:
    explicit CurrentDevice(int index) : index_(index) {
        check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
        if (previous_ != index_) check_cuda(cudaSetDevice(index_), "cudaSetDevice");
    }
    ~CurrentDevice() {
        if (previous_ != index_) cudaSetDevice(previous_);
    }
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;

   private:
    int index_;
    int previous_ = 0;
};

/// A stream that does not synchronise with the legacy default stream.
class OwnedStream {
   public:
    OwnedStream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
    ~OwnedStream() { cudaStreamDestroy(stream_); }
    OwnedStream(const OwnedStream&) = delete;
    OwnedStream& operator=(const OwnedStream&) = delete;

    cudaStream_t get() const { return stream_; }

   private:
    cudaStream_t stream_ = nullptr;
};

class DeviceMemory {
   public:
    explicit DeviceMemory(std::size_t bytes) { check_cuda(cudaMalloc(&data_, bytes), "cudaMalloc"); }
    ~DeviceMemory() { cudaFree(data_); }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    void* get() const { return data_; }

   private:
    void* data_ = nullptr;
};

}  // namespace sparsemla::detail
