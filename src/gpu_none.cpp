// Answers for the CUDA part in a build without it.
#include "gpu.h"

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

void check_gpu(int index) {
    throw Error(ErrorKind::unsupported, "device",
                "a build with the CUDA part for " + to_string({Device::Kind::cuda, index}), "built without CUDA");
}

}  // namespace sparsemla::detail
