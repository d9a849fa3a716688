// The C interface of decode context parallelism: structs to the library's own, one call, exceptions to statuses.
#include "c_api_dcp_structs.h"
#include "c_api_error.h"

using namespace sparsemla;
using namespace sparsemla::detail;

/// A group with what its mailboxes point to.
struct sparsemla_loopback {
    sparsemla_loopback(const DcpShape& shape_of_group, Device device)
        : shape(shape_of_group), c_shape(from_shape(view_of(shape))), group(shape, device) {
        for (int rank = 0; rank < group.world(); ++rank) bases[rank] = group.mailbox(rank).peers.base[rank];
    }

    DcpShape shape;
    sparsemla_dcp_shape c_shape;
    LoopbackGroup group;
    std::array<void*, max_ranks> bases{};
};

extern "C" {

sparsemla_status sparsemla_mailbox_layout_of(const sparsemla_dcp_shape* shape, sparsemla_mailbox_layout* out) {
    return guarded([&] {
        write_struct(from_mailbox_layout(layout_of(to_shape(shape, "shape"))), out,
                     offsetof(sparsemla_mailbox_layout, fingerprint), "out");
    });
}

sparsemla_status sparsemla_mailbox_reset(const sparsemla_mailbox* mailbox, void* stream) {
    return guarded([&] { reset(to_mailbox(mailbox, "mailbox"), {stream}); });
}

sparsemla_status sparsemla_mailbox_status_of(const sparsemla_mailbox* mailbox, sparsemla_mailbox_status* out,
                                             void* stream) {
    return guarded([&] {
        constexpr std::size_t min_size = offsetof(sparsemla_mailbox_status, stage);
        stated_size(out, min_size, "out");
        write_struct(from_mailbox_status(status(to_mailbox(mailbox, "mailbox"), {stream})), out, min_size, "out");
    });
}

sparsemla_status sparsemla_gather_query(const sparsemla_mailbox* mailbox, const sparsemla_gather_query_args* args,
                                        void* stream) {
    return guarded([&] { gather_query(to_mailbox(mailbox, "mailbox"), to_gather_query_args(args), {stream}); });
}

sparsemla_status sparsemla_receive_query(const sparsemla_mailbox* mailbox, int64_t rows, const sparsemla_tensor* out,
                                         void* stream) {
    return guarded(
        [&] { receive_query(to_mailbox(mailbox, "mailbox"), rows, to_tensor(not_null(out, "out"), "out"), {stream}); });
}

sparsemla_status sparsemla_push(const sparsemla_mailbox* mailbox, const sparsemla_push_args* args, void* stream) {
    return guarded([&] { push(to_mailbox(mailbox, "mailbox"), to_push_args(args), {stream}); });
}

sparsemla_status sparsemla_merge_pushed(const sparsemla_mailbox* mailbox, const sparsemla_merge_pushed_args* args,
                                        void* stream) {
    return guarded([&] { merge_pushed(to_mailbox(mailbox, "mailbox"), to_merge_pushed_args(args), {stream}); });
}

sparsemla_status sparsemla_loopback_create(const sparsemla_dcp_shape* shape, int32_t device_kind, int32_t device_index,
                                           sparsemla_loopback** out_loopback) {
    return guarded([&] {
        not_null(out_loopback, "out_loopback");
        const ShapeView view = to_shape(shape, "shape");
        const Device device = to_device(device_kind, device_index, "device");
        *out_loopback = new sparsemla_loopback({.rows = view.rows,
                                                .head_offset = {view.head_offset.begin(), view.head_offset.end()},
                                                .padded_heads = view.padded_heads,
                                                .query_dtype = view.query_dtype,
                                                .d_qk = view.d_qk},
                                               device);
    });
}

void sparsemla_loopback_destroy(sparsemla_loopback* loopback) { delete loopback; }

sparsemla_status sparsemla_loopback_mailbox(const sparsemla_loopback* loopback, int32_t rank, sparsemla_mailbox* out) {
    return guarded([&] {
        const sparsemla_loopback& owner = not_null(loopback, "loopback");
        check_value(rank, owner.c_shape.world, "rank");
        sparsemla_mailbox mailbox = from_mailbox(owner.group.mailbox(rank));
        mailbox.shape = &owner.c_shape;
        mailbox.bases = owner.bases.data();
        write_struct(mailbox, out, offsetof(sparsemla_mailbox, delayed_stage), "out");
    });
}

sparsemla_status sparsemla_loopback_reset(sparsemla_loopback* loopback) {
    return guarded([&] { not_null(loopback, "loopback").group.reset(); });
}

sparsemla_status sparsemla_merge_topk(const sparsemla_merge_topk_args* args, void* stream) {
    return guarded([&] { merge_topk(to_merge_topk_args(args), {stream}); });
}

}  // extern "C"
