// Answers for the CUDA part in a build without it.
#include "gpu.h"
#include "mailbox_view.h"
#include "nccl/group_device.h"

namespace sparsemla::detail {

GpuStatus query_gpus() {
    GpuStatus status;
    status.problem = "built without CUDA";
    return status;
}

bool gpu_built() { return false; }

// No plan for a GPU is made in this build.
void prepare_latency(const Plan&) {}
void launch_latency(const DecodeParams&, Stream) {}
void prepare_balanced(const Plan&, Memory, Stream) {}
void launch_balanced(const DecodeParams&, Stream) {}
void prepare_wide(const Plan&, Memory, Stream) {}
void launch_wide(const DecodeParams&, Stream) {}

void convert_indices_gpu(const ConvertParams&, int device, Stream) { check_gpu(device); }
void merge_topk_gpu(const MergeTopkParams&, int device, Stream) { check_gpu(device); }

void pack_gpu(const PackParams& params, Stream) { check_gpu(params.cache.device.index); }
void unpack_gpu(const UnpackParams& params, Stream) { check_gpu(params.cache.device.index); }
void quantize_query_gpu(const QuantizeParams&, int device, Stream) { check_gpu(device); }

void reset_gpu(const MailboxView&, std::int64_t, int device, Stream) { check_gpu(device); }
MailboxControl control_gpu(const MailboxView&, int device, Stream) {
    check_gpu(device);
    return {};
}
void gather_query_gpu(const GatherQueryParams&, int device, Stream) { check_gpu(device); }
void receive_query_gpu(const ReceiveQueryParams&, int device, Stream) { check_gpu(device); }
void push_gpu(const PushParams&, int device, Stream) { check_gpu(device); }
void merge_pushed_gpu(const MergePushedParams&, int device, Stream) { check_gpu(device); }
void merge_gpu(const MergeArgs&, int device, Stream) { check_gpu(device); }
void* allocate_gpu(std::size_t, int device) {
    check_gpu(device);
    return nullptr;
}
void free_gpu(void*, int) {}
std::unique_ptr<GroupDevice> gpu_group_device(int index) {
    check_gpu(index);
    return nullptr;
}

void check_gpu(int index) {
    throw Error(ErrorKind::unsupported, "device",
                "a build with the CUDA part for " + to_string({Device::Kind::cuda, index}), "built without CUDA");
}

}  // namespace sparsemla::detail
