#include "sparsemla/nccl_group.h"

#include "gpu.h"
#include "nccl/window.h"
#include "sparsemla/device.h"

namespace sparsemla {

/// In the order in which they come to be; their ends are the other way round.
struct NcclGroup::Parts {
    Parts(const MailboxLayout& layout, std::unique_ptr<detail::GroupDevice> device, const NcclBootstrap& bootstrap,
          const NcclOptions& options)
        : rank(layout, std::move(device), bootstrap, options, 0),
          control(rank.allocate(mailbox_control_bytes)),
          window(rank, static_cast<std::size_t>(layout.bytes)),
          mailbox{.layout = layout,
                  .peers = {.rank = bootstrap.rank, .base = window.bases()},
                  .device = rank.device().device(),
                  .control = {control->data(), mailbox_control_bytes},
                  .wait_limit_s = options.wait_limit_s} {}

    detail::GroupRank rank;
    std::unique_ptr<detail::GroupMemory> control;
    detail::PeerWindow window;
    Mailbox mailbox;
};

namespace {

MailboxLayout layout_with_rows(const DcpShape& shape) {
    const MailboxLayout layout = mailbox_layout(shape);
    if (layout.rows == 0) throw Error(ErrorKind::invalid_argument, "shape.rows", "at least 1", "0");
    return layout;
}

}  // namespace

NcclGroup::NcclGroup(const DcpShape& shape, Device device, const NcclBootstrap& bootstrap, const NcclOptions& options)
    : NcclGroup(shape, detail::group_device(device), bootstrap, options) {}

NcclGroup::NcclGroup(const DcpShape& shape, std::unique_ptr<detail::GroupDevice> device, const NcclBootstrap& bootstrap,
                     const NcclOptions& options)
    : parts_(std::make_unique<Parts>(layout_with_rows(shape), std::move(device), bootstrap, options)) {
    reset(parts_->rank.device().stream());
}

NcclGroup::~NcclGroup() = default;

int NcclGroup::rank() const { return parts_->rank.rank(); }
int NcclGroup::world() const { return parts_->rank.world(); }
Mailbox& NcclGroup::mailbox() { return parts_->mailbox; }

void NcclGroup::barrier(Stream stream) { parts_->rank.barrier(stream); }

void NcclGroup::reset(Stream stream) {
    barrier(stream);
    sparsemla::reset(parts_->mailbox, stream);
    barrier(stream);
    parts_->rank.communicator().wait(stream, "reset of a group");
}

std::string NcclGroup::describe() const {
    return "rank " + std::to_string(rank()) + " of " + std::to_string(world()) + " on " +
           to_string(parts_->mailbox.device) + ", NCCL " + detail::nccl_version_text(parts_->rank.api().version) +
           ", mailbox of " + std::to_string(parts_->mailbox.layout.bytes) + " bytes";
}

std::unique_ptr<detail::GroupDevice> detail::group_device(Device device) {
    if (device.kind != Device::Kind::cuda)
        throw Error(ErrorKind::unsupported, "device", "a GPU, as NCCL is for GPUs (LoopbackGroup has ranks on a CPU)",
                    to_string(device));
    query_device(device);  // names one that is not there
    return gpu_group_device(device.index);
}

}  // namespace sparsemla
