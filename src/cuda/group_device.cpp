// A GPU as a rank of an nccl group sees it.
#include <cuda_runtime_api.h>

#include <array>
#include <cstdio>

#include "cuda/copy_heads.h"
#include "cuda/runtime.h"
#include "gpu.h"

namespace sparsemla::detail {

namespace {

cudaStream_t handle_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

class GpuGroupDevice final : public GroupDevice {
   public:
    explicit GpuGroupDevice(int index) : index_(index) {
        const CurrentDevice current(index_);
        check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    ~GpuGroupDevice() override {
        int previous = 0;
        if (cudaGetDevice(&previous) != cudaSuccess || cudaSetDevice(index_) != cudaSuccess) return;
        cudaStreamDestroy(stream_);
        cudaSetDevice(previous);
    }
    GpuGroupDevice(const GpuGroupDevice&) = delete;
    GpuGroupDevice& operator=(const GpuGroupDevice&) = delete;

    Device device() const override { return {Device::Kind::cuda, index_}; }
    Stream stream() const override { return {stream_}; }
    void with_current(const std::function<void()>& work) const override {
        const CurrentDevice current(index_);
        work();
    }

    std::string identity() const override {
        cudaDeviceProp properties{};
        check_cuda(cudaGetDeviceProperties(&properties, index_), "cudaGetDeviceProperties");
        std::string text = "GPU-";
        std::array<char, 16> part{};
        for (const char byte : properties.uuid.bytes) {
            std::snprintf(part.data(), part.size(), "%02x", static_cast<unsigned>(static_cast<unsigned char>(byte)));
            text += part.data();
        }
        std::snprintf(part.data(), part.size(), " %04x:%02x:%02x", static_cast<unsigned>(properties.pciDomainID),
                      static_cast<unsigned>(properties.pciBusID), static_cast<unsigned>(properties.pciDeviceID));
        return text + part.data();
    }

    void* allocate(std::size_t bytes) const override { return allocate_gpu(bytes, index_); }
    void release(void* memory) const override {
        try {
            free_gpu(memory, index_);
        } catch (const Error&) {
            // No device to make current: nothing can be freed.
        }
    }
    void upload(void* to, const void* from, std::size_t bytes, Stream stream) const override {
        move(to, from, bytes, stream, "a copy to the GPU");
    }
    void download(void* to, const void* from, std::size_t bytes, Stream stream) const override {
        move(to, from, bytes, stream, "a copy from the GPU");
        check_cuda(cudaStreamSynchronize(handle_of(stream)), "a copy from the GPU");
    }
    void copy(void* to, const void* from, std::size_t bytes, Stream stream) const override {
        const CurrentDevice current(index_);
        check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, handle_of(stream)), "a copy on the GPU");
    }
    void copy_heads(const HeadCopy& heads, Stream stream) const override {
        const CurrentDevice current(index_);
        copy_heads_gpu(heads, stream);
    }

    bool idle(Stream stream) const override {
        const CurrentDevice current(index_);
        const cudaError_t state = cudaStreamQuery(handle_of(stream));
        if (state == cudaErrorNotReady) {
            cudaGetLastError();
            return false;
        }
        check_cuda(state, "cudaStreamQuery");
        return true;
    }
    bool holds(const void* address) const override {
        const CurrentDevice current(index_);
        cudaPointerAttributes attributes{};
        if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
            cudaGetLastError();
            return false;
        }
        return attributes.type == cudaMemoryTypeDevice && attributes.device == index_;
    }

   private:
    /// The addresses say which is where; those of other ranks' memory too.
    void move(void* to, const void* from, std::size_t bytes, Stream stream, const char* what) const {
        const CurrentDevice current(index_);
        check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, handle_of(stream)), what);
    }

    int index_;
    cudaStream_t stream_ = nullptr;
};

}  // namespace

std::unique_ptr<GroupDevice> gpu_group_device(int index) {
    check_gpu(index);
    return std::make_unique<GpuGroupDevice>(index);
}

}  // namespace sparsemla::detail
