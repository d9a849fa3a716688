// What the rest of the library asks of the CUDA part. cuda/device_query.cpp answers, or gpu_none.cpp in a build
// without.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "sparsemla/device.h"

namespace sparsemla::detail {

struct GpuStatus {
    bool built = false;
    std::string toolkit;        ///< "13.0"
    std::string architectures;  ///< "90a"
    std::string driver;         ///< "13.0": newest CUDA version the driver takes; empty without a driver
    std::string problem;        ///< why there is no usable GPU, one clause; empty if there is one
    std::vector<DeviceSpec> devices;
};

/// Never throws for a missing driver or GPU; leaves the current device as it was.
GpuStatus query_gpus();

/// Whether this build has the CUDA part.
bool gpu_built();

/// decode_latency (latency_plan.h has its launch): loads the plan's kernel, allows what its launch needs, and runs the
/// self-test once per device and kernel. Throws Error (device, unsupported).
void prepare_latency(const Plan& plan);
void launch_latency(const DecodeParams& params, Stream stream);

/// The same of decode_balanced (balanced_plan.h); also zeroes the state.
void prepare_balanced(const Plan& plan, Memory state, Stream stream);
void launch_balanced(const DecodeParams& params, Stream stream);

/// The same of decode_wide (balanced_plan.h).
void prepare_wide(const Plan& plan, Memory state, Stream stream);
void launch_wide(const DecodeParams& params, Stream stream);

/// On tensors of GPU `device`. Need no preparation; a first call within a stream capture needs prepare of a plan
/// before.
void convert_indices_gpu(const ConvertParams& params, int device, Stream stream);
void merge_topk_gpu(const MergeTopkParams& params, int device, Stream stream);

/// The same for writers and readers of records, on the cache's GPU, and for the query quantiser.
void pack_gpu(const PackParams& params, Stream stream);
void unpack_gpu(const UnpackParams& params, Stream stream);
void quantize_query_gpu(const QuantizeParams& params, int device, Stream stream);

/// The verbs of an exchange on GPU `device` (mailbox_view.h). prepare of a plan loads them.
struct MailboxView;
struct MailboxControl;
struct GatherQueryParams;
struct ReceiveQueryParams;
struct PushParams;
struct MergePushedParams;
void reset_gpu(const MailboxView& mailbox, std::int64_t bytes, int device, Stream stream);
MailboxControl control_gpu(const MailboxView& mailbox, int device, Stream stream);  ///< waits for the stream
void gather_query_gpu(const GatherQueryParams& params, int device, Stream stream);
void receive_query_gpu(const ReceiveQueryParams& params, int device, Stream stream);
void push_gpu(const PushParams& params, int device, Stream stream);
void merge_pushed_gpu(const MergePushedParams& params, int device, Stream stream);

/// merge on GPU `device`; every argument is checked.
void merge_gpu(const MergeArgs& args, int device, Stream stream);

/// What a rank of an nccl group asks of GPU `index` (nccl/group_device.h). Throws Error (device, unsupported).
class GroupDevice;
std::unique_ptr<GroupDevice> gpu_group_device(int index);

/// Memory that every kernel of the device reaches. Throws Error (device).
void* allocate_gpu(std::size_t bytes, int device);
void free_gpu(void* memory, int device);

/// Runs a trivial kernel on the GPU and looks at what it wrote. Throws Error (device, unsupported).
void check_gpu(int index);

}  // namespace sparsemla::detail
