// Answers for harness/gpu.h and gpu_probes.h in a build without the CUDA part.
#include "harness/gpu.h"
#include "harness/gpu_probes.h"

namespace sparsemla::harness {
namespace {

[[noreturn]] void refuse(Device device) {
    throw Error(ErrorKind::unsupported, "device", "a build with the CUDA part for " + to_string(device),
                "built without CUDA");
}

[[noreturn]] void refuse() { refuse({Device::Kind::cuda, 0}); }

}  // namespace

struct GpuBuffer::Memory {};
struct GpuStream::Handle {};
struct GpuGraph::Handle {};

int gpu_count() { return 0; }

GpuBuffer::GpuBuffer() = default;
GpuBuffer::GpuBuffer(Device device, std::size_t, const GpuBufferOptions&) { refuse(device); }
GpuBuffer::GpuBuffer(GpuBuffer&&) noexcept = default;
GpuBuffer& GpuBuffer::operator=(GpuBuffer&&) noexcept = default;
GpuBuffer::~GpuBuffer() = default;
void GpuBuffer::fill(int) { refuse(); }
void GpuBuffer::fill(int, std::size_t, std::size_t) { refuse(); }
void GpuBuffer::fill(int, Stream) const { refuse(); }
void GpuBuffer::upload(const void*, std::size_t, std::size_t) { refuse(); }
void GpuBuffer::download(void*, std::size_t, std::size_t) const { refuse(); }

GpuStream::GpuStream(Device device) { refuse(device); }
GpuStream::GpuStream(GpuStream&&) noexcept = default;
GpuStream& GpuStream::operator=(GpuStream&&) noexcept = default;
GpuStream::~GpuStream() = default;
Stream GpuStream::stream() const { refuse(); }
Device GpuStream::device() const { refuse(); }
void GpuStream::synchronize() const { refuse(); }
double GpuStream::time_us(const std::function<void(Stream)>&) const { refuse(); }
std::vector<double> GpuStream::times_us(std::span<const std::function<void(Stream)>>) const { refuse(); }

GpuGraph::GpuGraph(const GpuStream&, const std::function<void(Stream)>&) { refuse(); }
GpuGraph::GpuGraph(GpuGraph&&) noexcept = default;
GpuGraph& GpuGraph::operator=(GpuGraph&&) noexcept = default;
GpuGraph::~GpuGraph() = default;
void GpuGraph::replay(Stream) const { refuse(); }
double GpuGraph::time_us(const GpuStream&, int) const { refuse(); }
int GpuGraph::nodes() const { refuse(); }
int GpuGraph::kernels() const { refuse(); }

void copy_on(Device device, Stream, void*, const void*, std::size_t) { refuse(device); }
void read_on(Device device, Stream, const void*, std::size_t) { refuse(device); }
void empty_on(Device device, Stream) { refuse(device); }
GpuClocks measure_clocks(Device device) { refuse(device); }

}  // namespace sparsemla::harness
