// harness/gpu.h and gpu_probes.h in host memory, for tests that mirror steps or time decodes without a GPU. Linked into
// a test, it takes the place of the harness's own. Guarded buffers lie between pages that nobody may touch, as on a
// GPU.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "harness/gpu.h"
#include "harness/gpu_probes.h"

namespace sparsemla::harness {
namespace {

const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

// Filling what spans gigabytes would commit them. Only the gaps between far strides are that large.
constexpr std::size_t largest_fill_bytes = std::size_t{256} << 20;

std::size_t pages_up(std::size_t bytes) { return (bytes + page_bytes - 1) / page_bytes * page_bytes; }

}  // namespace

int gpu_count() { return 1; }

struct GpuBuffer::Memory {
    Memory(std::size_t bytes, std::size_t shift, const std::vector<ByteRange>& backed)
        : mapped(bytes + 2 * page_bytes) {
        void* at = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) throw std::runtime_error("fake GPU: mmap failed");
        base = static_cast<std::byte*>(at);
        for (const ByteRange& range : backed) {
            const std::size_t begin = (shift + range.begin) / page_bytes * page_bytes;
            const std::size_t end = pages_up(shift + range.begin + range.bytes);
            pages.push_back({begin, end - begin});
            if (mprotect(base + page_bytes + begin, end - begin, PROT_READ | PROT_WRITE) != 0)
                throw std::runtime_error("fake GPU: mprotect failed");
        }
    }
    ~Memory() { munmap(base, mapped); }

    std::size_t mapped;
    std::byte* base = nullptr;
    std::vector<ByteRange> pages;
};

GpuBuffer::GpuBuffer() = default;
GpuBuffer::GpuBuffer(GpuBuffer&&) noexcept = default;
GpuBuffer& GpuBuffer::operator=(GpuBuffer&&) noexcept = default;
GpuBuffer::~GpuBuffer() = default;

GpuBuffer::GpuBuffer(Device, std::size_t bytes, const GpuBufferOptions& options) : bytes_(bytes) {
    const std::size_t alignment = options.alignment_bytes;
    const std::size_t rounded = (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
    const std::size_t mapping = pages_up(rounded);
    const std::size_t shift = options.placement == GpuPlacement::against_end ? mapping - rounded : 0;
    std::vector<ByteRange> backed = options.backed;
    if (backed.empty()) backed = {{0, rounded}};
    memory_ = std::make_unique<Memory>(mapping, shift, backed);
    data_ = memory_->base + page_bytes + shift;
    fill(0x5A);  // what fresh memory holds is anything
}

void GpuBuffer::check_range(std::size_t bytes, std::size_t offset) const {
    if (offset > bytes_ || bytes > bytes_ - offset)
        throw Error(ErrorKind::invalid_argument, "bytes", "a range of the buffer", std::to_string(bytes));
}
void GpuBuffer::fill(int byte) {
    if (memory_ == nullptr) return;
    for (const ByteRange& pages : memory_->pages)
        if (pages.bytes <= largest_fill_bytes) std::memset(memory_->base + page_bytes + pages.begin, byte, pages.bytes);
}
void GpuBuffer::fill(int byte, std::size_t bytes, std::size_t offset) {
    check_range(bytes, offset);
    if (bytes != 0) std::memset(data_ + offset, byte, bytes);
}
void GpuBuffer::fill(int byte, Stream) const { std::memset(data_, byte, bytes_); }
void GpuBuffer::upload(const void* from, std::size_t bytes, std::size_t offset) {
    check_range(bytes, offset);
    if (bytes != 0) std::memcpy(data_ + offset, from, bytes);
}
void GpuBuffer::download(void* to, std::size_t bytes, std::size_t offset) const {
    check_range(bytes, offset);
    if (bytes != 0) std::memcpy(to, data_ + offset, bytes);
}

struct GpuStream::Handle {
    Device device;
};
GpuStream::GpuStream(Device device) : handle_(new Handle{device}) {}
GpuStream::GpuStream(GpuStream&&) noexcept = default;
GpuStream& GpuStream::operator=(GpuStream&&) noexcept = default;
GpuStream::~GpuStream() = default;
Stream GpuStream::stream() const { return {}; }
Device GpuStream::device() const { return handle_->device; }
void GpuStream::synchronize() const {}
double GpuStream::time_us(const std::function<void(Stream)>& work) const {
    const auto start = std::chrono::steady_clock::now();
    work({});
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}
std::vector<double> GpuStream::times_us(std::span<const std::function<void(Stream)>> pieces) const {
    std::vector<double> times;
    for (const std::function<void(Stream)>& piece : pieces) times.push_back(time_us(piece));
    return times;
}

/// A CPU's work has no stream to be captured from: every replay does it again.
struct GpuGraph::Handle {
    std::function<void(Stream)> work;
};
GpuGraph::GpuGraph(const GpuStream&, const std::function<void(Stream)>& work) : handle_(new Handle{work}) {}
GpuGraph::GpuGraph(GpuGraph&&) noexcept = default;
GpuGraph& GpuGraph::operator=(GpuGraph&&) noexcept = default;
GpuGraph::~GpuGraph() = default;
void GpuGraph::replay(Stream stream) const { handle_->work(stream); }
double GpuGraph::time_us(const GpuStream& stream, int replays) const {
    return stream.time_us([&](Stream on) {
        for (int i = 0; i < replays; ++i) replay(on);
    }) / replays;
}

int GpuGraph::nodes() const { return 0; }
int GpuGraph::kernels() const { return 0; }

void copy_on(Device, Stream, void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
void read_on(Device, Stream, const void*, std::size_t) {}
void empty_on(Device, Stream) {}
GpuClocks measure_clocks(Device) { return {}; }

}  // namespace sparsemla::harness
