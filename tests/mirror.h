// Memory of the host and a copy of it on a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "harness/gpu.h"
#include "sparsemla/tensor.h"

namespace sparsemla::test {

/// Memory of the host, and a copy of it on the GPU; tensors over the one become tensors over the other.
class Mirror {
   public:
    template <class T>
    Mirror(Device device, const std::vector<T>& host)
        : host_(reinterpret_cast<const std::byte*>(host.data())),
          buffer_(device, std::max<std::size_t>(host.size() * sizeof(T), 16)),
          device_(device) {
        buffer_.upload(host.data(), host.size() * sizeof(T));
    }
    template <class Void>
    BasicTensor<Void> operator()(BasicTensor<Void> tensor) const {
        tensor.data = buffer_.data() + (static_cast<const std::byte*>(tensor.data) - host_);
        tensor.device = device_;
        return tensor;
    }
    std::byte* data() const { return buffer_.data(); }
    template <class T>
    std::vector<T> download(std::size_t size) const {
        std::vector<T> values(size);
        buffer_.download(values.data(), size * sizeof(T));
        return values;
    }

   private:
    const std::byte* host_;
    harness::GpuBuffer buffer_;
    Device device_;
};

}  // namespace sparsemla::test
