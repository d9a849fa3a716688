// Host memory as a rank of an nccl group sees a GPU.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "nccl/group_device.h"

namespace sparsemla::test {

class HostGroupDevice final : public detail::GroupDevice {
   public:
    explicit HostGroupDevice(std::string identity) : identity_(std::move(identity)) {}

    Device device() const override { return {}; }
    std::string identity() const override { return identity_; }
    Stream stream() const override { return {}; }
    void with_current(const std::function<void()>& work) const override { work(); }

    void* allocate(std::size_t bytes) const override { return ::operator new (bytes, std::align_val_t{256}); }
    void release(void* memory) const override { ::operator delete (memory, std::align_val_t{256}); }
    void upload(void* to, const void* from, std::size_t bytes, Stream) const override { std::memcpy(to, from, bytes); }
    void download(void* to, const void* from, std::size_t bytes, Stream) const override {
        std::memcpy(to, from, bytes);
    }
    void copy(void* to, const void* from, std::size_t bytes, Stream) const override { std::memcpy(to, from, bytes); }
    void copy_heads(const detail::HeadCopy& c, Stream) const override {
        for (std::int64_t row = 0; row < c.rows; ++row)
            for (std::int64_t head = 0; head < c.heads; ++head)
                std::memcpy(c.to + row * c.to_row_stride + head * c.to_head_stride,
                            c.from + row * c.from_row_stride + head * c.from_head_stride,
                            static_cast<std::size_t>(c.head_bytes));
    }
    bool idle(Stream) const override { return true; }
    /// The fake NCCL's handles that are no windows are odd.
    bool holds(const void* address) const override { return reinterpret_cast<std::uintptr_t>(address) % 16 == 0; }

   private:
    std::string identity_;
};

}  // namespace sparsemla::test
