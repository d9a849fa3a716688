// A GPU from the host's side, for the tool, tests and benchmarks: memory, streams, graphs. gpu.cpp serves builds with
// the CUDA part; in the others gpu_none.cpp throws Error(unsupported) from every entry but gpu_count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "sparsemla/tensor.h"

namespace sparsemla::harness {

/// GPUs that the driver shows; 0 without a driver or without the CUDA part.
int gpu_count();

/// Where a buffer's bytes lie. Guarded ones touch an address that is not mapped: an access past that end is a fault,
/// which every later call on the GPU reports.
enum class GpuPlacement : std::uint8_t { plain, against_end, against_begin };

struct ByteRange {
    std::size_t begin = 0;
    std::size_t bytes = 0;
};

struct GpuBufferOptions {
    GpuPlacement placement = GpuPlacement::plain;
    /// Guarded: of the data; the end of the mapping is the end of the data rounded up to it. Plain: at most 256.
    std::size_t alignment_bytes = 16;
    /// Guarded: only the granules (2 MiB) that hold these bytes are backed by memory, and an access elsewhere is a
    /// fault; empty: all. The address space, not the memory, limits a buffer of a few ranges.
    std::vector<ByteRange> backed{};
};

/// Memory of a GPU. Every call returns when it is done; work on a GpuStream is the caller's to wait for.
class GpuBuffer {
   public:
    struct Memory;

    GpuBuffer();  ///< no bytes
    GpuBuffer(Device device, std::size_t bytes, const GpuBufferOptions& options = {});
    GpuBuffer(GpuBuffer&&) noexcept;
    GpuBuffer& operator=(GpuBuffer&&) noexcept;
    ~GpuBuffer();

    std::byte* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

    void fill(int byte);  ///< all that is backed by memory
    void fill(int byte, std::size_t bytes, std::size_t offset);
    void upload(const void* from, std::size_t bytes, std::size_t offset = 0);
    void download(void* to, std::size_t bytes, std::size_t offset = 0) const;
    /// Fills the buffer on the stream, without waiting. Of several times the L2's size, it takes the place of what the
    /// caches held.
    void fill(int byte, Stream stream) const;

   private:
    void check_range(std::size_t bytes, std::size_t offset) const;

    std::unique_ptr<Memory> memory_;
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
};

/// A stream that does not wait for the legacy default stream.
class GpuStream {
   public:
    struct Handle;

    explicit GpuStream(Device device);
    GpuStream(GpuStream&&) noexcept;
    GpuStream& operator=(GpuStream&&) noexcept;
    ~GpuStream();

    Stream stream() const;
    Device device() const;
    /// Throws Error(device) for whatever failed since the last call, faults of kernels included.
    void synchronize() const;
    /// Microseconds between two events around the work. Waits for both.
    double time_us(const std::function<void(Stream)>& work) const;
    /// Of pieces of work one after another, with an event between neighbours: of each. The host waits only for the
    /// last.
    std::vector<double> times_us(std::span<const std::function<void(Stream)>> pieces) const;

   private:
    std::unique_ptr<Handle> handle_;
};

/// Work on a stream, captured once and replayed.
class GpuGraph {
   public:
    struct Handle;

    /// Captures what `work` puts on the stream, in thread-local mode: what may not run during capture is an
    /// Error(device).
    GpuGraph(const GpuStream& stream, const std::function<void(Stream)>& work);
    GpuGraph(GpuGraph&&) noexcept;
    GpuGraph& operator=(GpuGraph&&) noexcept;
    ~GpuGraph();

    void replay(Stream stream) const;  ///< does not wait
    /// Microseconds of one replay: `replays` in a row between two events, over their number. Waits for them.
    double time_us(const GpuStream& stream, int replays = 1) const;

    int nodes() const;    ///< of any kind
    int kernels() const;  ///< nodes that launch one

   private:
    std::unique_ptr<Handle> handle_;
};

}  // namespace sparsemla::harness
