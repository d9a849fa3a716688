// Mailboxes in memory of the test's own, on the tested device and between guards: to be looked into, and written to.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "harness/gpu.h"
#include "sparsemla/mailbox.h"
#include "tests/device.h"
#include "tests/merging.h"

namespace sparsemla::test {

using Bytes = std::vector<std::uint8_t>;

/// Memory of the tested device between two places that nobody may touch.
class DeviceBytes {
   public:
    DeviceBytes(std::int64_t bytes, std::size_t alignment_bytes) : size_(static_cast<std::size_t>(bytes)) {
        if (on_gpu())
            gpu_.emplace(tested_device().device, std::max<std::size_t>(size_, 1),
                         harness::GpuBufferOptions{.placement = placement(), .alignment_bytes = alignment_bytes});
        else
            host_ = Fenced(size_, alignment_bytes);
    }

    std::byte* data() const { return gpu_ ? gpu_->data() : host_.data(); }
    Memory memory() const { return {data(), size_}; }
    void write(const void* from, std::size_t bytes, std::int64_t offset) {
        if (gpu_)
            gpu_->upload(from, bytes, static_cast<std::size_t>(offset));
        else
            std::memcpy(data() + offset, from, bytes);
    }
    Bytes read() const {
        Bytes copy(size_);
        gpu_ ? gpu_->download(copy.data(), size_) : static_cast<void>(std::memcpy(copy.data(), data(), size_));
        return copy;
    }
    void fill(std::uint8_t byte) {
        const Bytes all(size_, byte);
        write(all.data(), all.size(), 0);
    }
    bool slack_intact() const { return gpu_ || host_.slack_intact(); }

   private:
    std::size_t size_;
    Fenced host_;
    std::optional<harness::GpuBuffer> gpu_;
};

/// A Padded tensor where the tested device reaches it: on a CPU the given one itself.
class Placed {
   public:
    explicit Placed(const Padded& host)
        : view_(host.view()),
          offset_(static_cast<std::uint8_t*>(view_.data) - host.memory().data()),
          memory_(static_cast<std::uint8_t*>(view_.data) - offset_),
          bytes_(host.memory().size()) {
        if (!on_gpu()) return;
        view_.device = tested_device().device;
        gpu_.emplace(view_.device, bytes_, harness::GpuBufferOptions{.alignment_bytes = 256});
        gpu_->upload(memory_, bytes_);
        view_.data = gpu_->data() + offset_;
    }

    const Tensor& view() const { return view_; }
    /// To the host's tensor, with what surrounds it.
    void fetch() const {
        if (gpu_) gpu_->download(memory_, bytes_);
    }

   private:
    Tensor view_;
    std::int64_t offset_;
    std::uint8_t* memory_;
    std::size_t bytes_;
    std::optional<harness::GpuBuffer> gpu_;
};

/// A group whose calls run in lockstep: stage by stage on one stream, or one thread.
class Mailboxes {
   public:
    explicit Mailboxes(const DcpShape& shape, double wait_limit_s = 20) : layout_(mailbox_layout(shape)) {
        if (on_gpu()) stream_.emplace(tested_device().device);
        for (int rank = 0; rank < world(); ++rank) {
            memory_.emplace_back(layout_.bytes, 16);
            controls_.emplace_back(static_cast<std::int64_t>(mailbox_control_bytes), 64);
        }
        for (int rank = 0; rank < world(); ++rank) {
            Mailbox& box = boxes_.emplace_back(Mailbox{.layout = layout_,
                                                       .peers = {.rank = rank},
                                                       .device = tested_device().device,
                                                       .control = controls_[static_cast<std::size_t>(rank)].memory(),
                                                       .wait_limit_s = wait_limit_s});
            for (int peer = 0; peer < world(); ++peer) box.peers.base[peer] = memory(peer).data();
        }
        reset();
    }

    int world() const { return layout_.world; }
    const MailboxLayout& layout() const { return layout_; }
    Mailbox& operator[](int rank) { return boxes_[static_cast<std::size_t>(rank)]; }
    std::int64_t first_head(int rank) const { return layout_.head_offset[static_cast<std::size_t>(rank)]; }
    DeviceBytes& memory(int rank) { return memory_[static_cast<std::size_t>(rank)]; }
    DeviceBytes& control(int rank) { return controls_[static_cast<std::size_t>(rank)]; }

    Stream stream() const { return stream_ ? stream_->stream() : Stream{}; }
    void synchronize() const {
        if (stream_) stream_->synchronize();
    }
    MailboxStatus status(int rank) { return sparsemla::status((*this)[rank], stream()); }
    void reset() {
        for (const Mailbox& box : boxes_) sparsemla::reset(box, stream());
        synchronize();
    }
    /// As if so many exchanges had been (mailbox_view.h: MailboxControl begins with next and current).
    void start_at(std::uint32_t exchange) {
        const std::uint32_t words[2] = {exchange, exchange - 1};
        for (DeviceBytes& control : controls_) control.write(words, sizeof words, 0);
    }

    /// Where things lie, by the formulas of the specification.
    std::int64_t head_bytes() const { return layout_.d_qk * size_bytes(layout_.query_dtype); }
    std::int64_t query_byte(std::int64_t parity, std::int64_t row, std::int64_t head) const {
        return layout_.query + parity * layout_.query_parity_bytes + (row * layout_.padded_heads + head) * head_bytes();
    }
    std::int64_t values_byte(std::int64_t parity, std::int64_t source, std::int64_t row, std::int64_t head) const {
        return layout_.values + parity * layout_.values_parity_bytes + piece(source, row, head) * value_dims * 2;
    }
    std::int64_t lse_byte(std::int64_t parity, std::int64_t source, std::int64_t row, std::int64_t head) const {
        return layout_.lses + parity * layout_.lses_parity_bytes + piece(source, row, head) * 4;
    }

    /// "", or the first mailbox that holds something, or beside which something was written.
    std::string not_armed() {
        for (int rank = 0; rank < world(); ++rank) {
            const Bytes bytes = memory(rank).read();
            for (std::size_t i = 0; i < bytes.size(); ++i)
                if (bytes[i] != 0xFF)
                    return "byte " + std::to_string(i) + " of rank " + std::to_string(rank) + "'s mailbox is not armed";
            if (!memory(rank).slack_intact() || !control(rank).slack_intact())
                return "written beside the memory of rank " + std::to_string(rank);
        }
        return "";
    }

   private:
    std::int64_t piece(std::int64_t source, std::int64_t row, std::int64_t head) const {
        return (source * layout_.rows + row) * layout_.most_heads + head;
    }

    MailboxLayout layout_;
    std::optional<harness::GpuStream> stream_;
    std::vector<DeviceBytes> memory_, controls_;
    std::vector<Mailbox> boxes_;
};

inline DcpShape shape_of(std::vector<std::int64_t> head_offset, std::int64_t rows) {
    return {.rows = rows, .head_offset = std::move(head_offset)};
}

}  // namespace sparsemla::test
