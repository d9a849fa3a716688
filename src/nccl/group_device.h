// What a rank of a group asks of its device, besides the verbs. gpu_group_device (gpu.h) makes a GPU's; tests have one
// of host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "sparsemla/tensor.h"

namespace sparsemla::detail {

/// Heads from one place to another, strides in bytes, multiples of 16 like the addresses and head_bytes.
struct HeadCopy {
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    std::int64_t rows = 0, heads = 0, head_bytes = 0;
    std::int64_t from_row_stride = 0, from_head_stride = 0;
    std::int64_t to_row_stride = 0, to_head_stride = 0;
};

class GroupDevice {
   public:
    virtual ~GroupDevice() = default;

    virtual Device device() const = 0;
    /// Of the physical device: no other one has it.
    virtual std::string identity() const = 0;
    /// A stream of the group's own, beside the legacy default stream.
    virtual Stream stream() const = 0;
    /// Runs the work with the device current.
    virtual void with_current(const std::function<void()>& work) const = 0;

    /// At least 256-byte aligned. Throws Error(device).
    virtual void* allocate(std::size_t bytes) const = 0;
    virtual void release(void* memory) const = 0;
    /// In the order of the stream; host memory is free again when they return.
    virtual void upload(void* to, const void* from, std::size_t bytes, Stream stream) const = 0;
    virtual void download(void* to, const void* from, std::size_t bytes, Stream stream) const = 0;
    virtual void copy(void* to, const void* from, std::size_t bytes, Stream stream) const = 0;
    virtual void copy_heads(const HeadCopy& heads, Stream stream) const = 0;
    /// Whether all that is on the stream has ended. Throws Error(device) for what failed there.
    virtual bool idle(Stream stream) const = 0;
    /// Whether it is memory of this device, as far as the driver knows.
    virtual bool holds(const void* address) const = 0;
};

/// Throws Error (unsupported) for a CPU, and for a GPU in a build without the CUDA part.
std::unique_ptr<GroupDevice> group_device(Device device);

/// Memory of a device that ends with its owner.
class GroupMemory {
   public:
    GroupMemory(const GroupDevice& device, std::size_t bytes)
        : device_(device), data_(static_cast<std::byte*>(device.allocate(bytes))) {}
    ~GroupMemory() { device_.release(data_); }
    GroupMemory(const GroupMemory&) = delete;
    GroupMemory& operator=(const GroupMemory&) = delete;

    std::byte* data() const { return data_; }

   private:
    const GroupDevice& device_;
    std::byte* data_;
};

}  // namespace sparsemla::detail
