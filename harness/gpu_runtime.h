// What the harness's CUDA sources share: errors as exceptions, the current device for a scope, the handle of a stream.
#pragma once

#include <cuda_runtime_api.h>

#include "sparsemla/tensor.h"

namespace sparsemla::harness {

inline void check(cudaError_t code, const char* call) {
    if (code == cudaSuccess) return;
    cudaGetLastError();
    throw Error(ErrorKind::device, call, "success", cudaGetErrorString(code));
}

inline int index_of(Device device) {
    if (device.kind == Device::Kind::cuda) return device.index;
    throw Error(ErrorKind::invalid_argument, "device", "cuda:N", to_string(device));
}

/// Makes a device current for a scope, with its context alive.
class CurrentDevice {
   public:
    explicit CurrentDevice(Device device) : index_(index_of(device)) {
        check(cudaGetDevice(&previous_), "cudaGetDevice");
        check(cudaSetDevice(index_), "cudaSetDevice");
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

inline cudaStream_t handle_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace sparsemla::harness
