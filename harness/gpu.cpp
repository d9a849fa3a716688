// Memory, streams and graphs of a GPU by the CUDA runtime. The driver's virtual memory calls, which place guarded
// buffers, are looked up at run time: nothing links libcuda, so that programs start on machines without a driver.
#include "harness/gpu.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <utility>

#include "harness/gpu_runtime.h"

namespace sparsemla::harness {
namespace {

/// Copies and fills on the legacy default stream may still run when their call returns.
void finish(const char* call) { check(cudaStreamSynchronize(cudaStreamLegacy), call); }

constexpr std::size_t round_up(std::size_t value, std::size_t step) { return (value + step - 1) / step * step; }

/// A driver call as of CUDA 10.2, when the virtual memory calls came.
template <class Function>
Function* driver_call(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    check(cudaGetDriverEntryPointByVersion(name, &found, 10020, cudaEnableDefault, &result), name);
#else
    check(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result), name);
#endif
    if (result != cudaDriverEntryPointSuccess || found == nullptr)
        throw Error(ErrorKind::unsupported, name, "a driver that has this call", "one without");
    return reinterpret_cast<Function*>(found);
}

struct VirtualMemory {
    decltype(cuMemGetAllocationGranularity)* granularity =
        driver_call<decltype(cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity");
    decltype(cuMemAddressReserve)* reserve = driver_call<decltype(cuMemAddressReserve)>("cuMemAddressReserve");
    decltype(cuMemAddressFree)* free = driver_call<decltype(cuMemAddressFree)>("cuMemAddressFree");
    decltype(cuMemCreate)* create = driver_call<decltype(cuMemCreate)>("cuMemCreate");
    decltype(cuMemRelease)* release = driver_call<decltype(cuMemRelease)>("cuMemRelease");
    decltype(cuMemMap)* map = driver_call<decltype(cuMemMap)>("cuMemMap");
    decltype(cuMemUnmap)* unmap = driver_call<decltype(cuMemUnmap)>("cuMemUnmap");
    decltype(cuMemSetAccess)* set_access = driver_call<decltype(cuMemSetAccess)>("cuMemSetAccess");
};

const VirtualMemory& virtual_memory() {
    static const VirtualMemory calls;
    return calls;
}

using harness::check;  // which the overload would hide

void check(CUresult code, const char* call) {
    if (code != CUDA_SUCCESS)
        throw Error(ErrorKind::device, call, "success", "CUDA driver error " + std::to_string(code));
}

CUmemAllocationProp properties_of(int index) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = index};
    return properties;
}

std::size_t granule_of(int index) {
    const CUmemAllocationProp properties = properties_of(index);
    std::size_t granule = 0;
    check(virtual_memory().granularity(&granule, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
          "cuMemGetAllocationGranularity");
    return granule;
}

/// The ranges as whole granules, ascending, apart from each other.
std::vector<ByteRange> whole_granules(std::vector<ByteRange> ranges, std::size_t granule) {
    std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
    std::vector<ByteRange> whole;
    for (const ByteRange& range : ranges) {
        const std::size_t begin = range.begin / granule * granule;
        const std::size_t end = round_up(range.begin + range.bytes, granule);
        if (whole.empty() || begin > whole.back().begin + whole.back().bytes)
            whole.push_back({begin, end - begin});
        else
            whole.back().bytes = std::max(whole.back().bytes, end - whole.back().begin);
    }
    return whole;
}

/// Address space with a granule before and one behind that are never mapped.
class GuardedMapping {
   public:
    /// `shift`: where the caller's offset 0 lies in the mapping.
    GuardedMapping(int index, std::size_t bytes, std::size_t shift, std::vector<ByteRange> backed, std::size_t granule)
        : granule_(granule), reserved_bytes_(bytes + 2 * granule) {
        check(virtual_memory().reserve(&base_, reserved_bytes_, 0, 0, 0), "cuMemAddressReserve");
        for (ByteRange& range : backed) range.begin += shift;
        try {
            for (const ByteRange& range : whole_granules(std::move(backed), granule)) map(index, range);
        } catch (...) {
            unmap();
            throw;
        }
    }
    ~GuardedMapping() {
        cudaDeviceSynchronize();  // what still runs would fault
        unmap();
    }
    GuardedMapping(const GuardedMapping&) = delete;
    GuardedMapping& operator=(const GuardedMapping&) = delete;

    std::byte* data() const { return reinterpret_cast<std::byte*>(base_ + granule_); }
    const std::vector<ByteRange>& mapped() const { return mapped_; }

   private:
    void map(int index, const ByteRange& range) {
        const VirtualMemory& driver = virtual_memory();
        const CUmemAllocationProp properties = properties_of(index);
        CUmemGenericAllocationHandle handle{};
        check(driver.create(&handle, range.bytes, &properties, 0), "cuMemCreate");
        const CUdeviceptr at = base_ + granule_ + range.begin;
        const CUresult mapped = driver.map(at, range.bytes, 0, handle, 0);
        driver.release(handle);  // the mapping keeps the memory
        check(mapped, "cuMemMap");
        mapped_.push_back(range);
        CUmemAccessDesc access{};
        access.location = properties.location;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        check(driver.set_access(at, range.bytes, &access, 1), "cuMemSetAccess");
    }
    void unmap() {
        for (const ByteRange& range : mapped_) virtual_memory().unmap(base_ + granule_ + range.begin, range.bytes);
        virtual_memory().free(base_, reserved_bytes_);
    }

    std::size_t granule_;
    std::size_t reserved_bytes_;
    CUdeviceptr base_ = 0;
    std::vector<ByteRange> mapped_;
};

}  // namespace

int gpu_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
struct GpuBuffer::Memory {
    explicit Memory(Device of) : device(of) {}
    ~Memory() {
        try {
            const CurrentDevice current(device);
            mapping.reset();
            cudaFree(allocated);
        } catch (const Error&) {
            // A GPU that answers nothing any more frees nothing either.
        }
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    Device device;
    void* allocated = nullptr;
    std::unique_ptr<GuardedMapping> mapping;
};

GpuBuffer::GpuBuffer() = default;
GpuBuffer::GpuBuffer(GpuBuffer&&) noexcept = default;
GpuBuffer& GpuBuffer::operator=(GpuBuffer&&) noexcept = default;
GpuBuffer::~GpuBuffer() = default;

GpuBuffer::GpuBuffer(Device device, std::size_t bytes, const GpuBufferOptions& options)
    : memory_(std::make_unique<Memory>(device)), bytes_(bytes) {
    const CurrentDevice current(device);
    if (options.placement == GpuPlacement::plain) {
        check(cudaMalloc(&memory_->allocated, std::max<std::size_t>(bytes, 1)), "cudaMalloc");
        data_ = static_cast<std::byte*>(memory_->allocated);
        return;
    }
    const std::size_t granule = granule_of(device.index);
    const std::size_t rounded = round_up(std::max<std::size_t>(bytes, 1), options.alignment_bytes);
    const std::size_t mapping_bytes = round_up(rounded, granule);
    const std::size_t shift = options.placement == GpuPlacement::against_end ? mapping_bytes - rounded : 0;
    std::vector<ByteRange> backed = options.backed;
    for (const ByteRange& range : backed) check_range(range.bytes, range.begin);
    if (backed.empty()) backed = {{0, rounded}};
    memory_->mapping = std::make_unique<GuardedMapping>(device.index, mapping_bytes, shift, std::move(backed), granule);
    data_ = memory_->mapping->data() + shift;
}

void GpuBuffer::check_range(std::size_t bytes, std::size_t offset) const {
    if (offset > bytes_ || bytes > bytes_ - offset)
        throw Error(ErrorKind::invalid_argument, "bytes", "at most " + std::to_string(bytes_) + " of the buffer",
                    std::to_string(bytes) + " at " + std::to_string(offset));
}

void GpuBuffer::fill(int byte) {
    if (memory_ == nullptr) return;
    if (memory_->mapping == nullptr) {
        fill(byte, bytes_, 0);
        return;
    }
    const CurrentDevice current(memory_->device);
    for (const ByteRange& range : memory_->mapping->mapped())
        check(cudaMemset(memory_->mapping->data() + range.begin, byte, range.bytes), "cudaMemset");
    finish("cudaMemset");
}

void GpuBuffer::fill(int byte, std::size_t bytes, std::size_t offset) {
    check_range(bytes, offset);
    if (bytes == 0) return;
    const CurrentDevice current(memory_->device);
    check(cudaMemset(data_ + offset, byte, bytes), "cudaMemset");
    finish("cudaMemset");
}

void GpuBuffer::fill(int byte, Stream stream) const {
    if (memory_ == nullptr) return;
    const CurrentDevice current(memory_->device);
    check(cudaMemsetAsync(data_, byte, bytes_, handle_of(stream)), "cudaMemsetAsync");
}

void GpuBuffer::upload(const void* from, std::size_t bytes, std::size_t offset) {
    check_range(bytes, offset);
    if (bytes == 0) return;
    const CurrentDevice current(memory_->device);
    check(cudaMemcpy(data_ + offset, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the GPU");
    finish("cudaMemcpy to the GPU");
}

void GpuBuffer::download(void* to, std::size_t bytes, std::size_t offset) const {
    check_range(bytes, offset);
    if (bytes == 0) return;
    const CurrentDevice current(memory_->device);
    check(cudaMemcpy(to, data_ + offset, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy from the GPU");
    finish("cudaMemcpy from the GPU");
}

// ---------------------------------------------------------------------------------------------------------------------
struct GpuStream::Handle {
    explicit Handle(Device of) : device(of) {
        const CurrentDevice current(device);
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    ~Handle() { cudaStreamDestroy(stream); }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;

    Device device;
    cudaStream_t stream = nullptr;
};

GpuStream::GpuStream(Device device) : handle_(std::make_unique<Handle>(device)) {}
GpuStream::GpuStream(GpuStream&&) noexcept = default;
GpuStream& GpuStream::operator=(GpuStream&&) noexcept = default;
GpuStream::~GpuStream() = default;

Stream GpuStream::stream() const { return {handle_->stream}; }
Device GpuStream::device() const { return handle_->device; }

void GpuStream::synchronize() const {
    const CurrentDevice current(handle_->device);
    check(cudaStreamSynchronize(handle_->stream), "work on the stream");
    check(cudaGetLastError(), "work on the stream");
}

namespace {

struct Event {
    Event() { check(cudaEventCreate(&event), "cudaEventCreate"); }
    ~Event() { cudaEventDestroy(event); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    void record(cudaStream_t stream) const { check(cudaEventRecord(event, stream), "cudaEventRecord"); }

    cudaEvent_t event = nullptr;
};

}  // namespace

double GpuStream::time_us(const std::function<void(Stream)>& work) const { return times_us({&work, 1}).front(); }

std::vector<double> GpuStream::times_us(std::span<const std::function<void(Stream)>> pieces) const {
    const CurrentDevice current(handle_->device);
    const std::vector<Event> events(pieces.size() + 1);
    events.front().record(handle_->stream);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        pieces[i](stream());
        events[i + 1].record(handle_->stream);
    }
    synchronize();
    std::vector<double> times;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        float milliseconds = 0;
        check(cudaEventElapsedTime(&milliseconds, events[i].event, events[i + 1].event), "cudaEventElapsedTime");
        times.push_back(1e3 * double{milliseconds});
    }
    return times;
}

// ---------------------------------------------------------------------------------------------------------------------
struct GpuGraph::Handle {
    explicit Handle(Device of) : device(of) {}
    ~Handle() {
        if (executable != nullptr) cudaGraphExecDestroy(executable);
        if (graph != nullptr) cudaGraphDestroy(graph);
    }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;

    Device device;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
};

GpuGraph::GpuGraph(const GpuStream& stream, const std::function<void(Stream)>& work)
    : handle_(std::make_unique<Handle>(stream.device())) {
    const CurrentDevice current(handle_->device);
    const cudaStream_t on = handle_of(stream.stream());
    check(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    try {
        work(stream.stream());
    } catch (...) {
        cudaStreamEndCapture(on, &handle_->graph);
        cudaGetLastError();
        throw;
    }
    check(cudaStreamEndCapture(on, &handle_->graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&handle_->executable, handle_->graph, 0), "cudaGraphInstantiate");
    check(cudaGraphUpload(handle_->executable, on), "cudaGraphUpload");
    stream.synchronize();
}
GpuGraph::GpuGraph(GpuGraph&&) noexcept = default;
GpuGraph& GpuGraph::operator=(GpuGraph&&) noexcept = default;
GpuGraph::~GpuGraph() = default;

void GpuGraph::replay(Stream stream) const {
    const CurrentDevice current(handle_->device);
    check(cudaGraphLaunch(handle_->executable, handle_of(stream)), "cudaGraphLaunch");
}

double GpuGraph::time_us(const GpuStream& stream, int replays) const {
    return stream.time_us([&](Stream on) {
        for (int i = 0; i < replays; ++i) replay(on);
    }) / replays;
}

int GpuGraph::nodes() const {
    std::size_t count = 0;
    check(cudaGraphGetNodes(handle_->graph, nullptr, &count), "cudaGraphGetNodes");
    return static_cast<int>(count);
}

int GpuGraph::kernels() const {
    std::size_t count = static_cast<std::size_t>(nodes());
    std::vector<cudaGraphNode_t> all(count);
    check(cudaGraphGetNodes(handle_->graph, all.data(), &count), "cudaGraphGetNodes");
    return static_cast<int>(std::ranges::count_if(all, [](cudaGraphNode_t node) {
        cudaGraphNodeType type{};
        check(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
        return type == cudaGraphNodeTypeKernel;
    }));
}

}  // namespace sparsemla::harness
