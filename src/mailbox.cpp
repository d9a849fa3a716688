// The verbs of an exchange: every argument checked, then the device's code.
#include "sparsemla/mailbox.h"

#include <algorithm>
#include <new>
#include <span>

#include "check.h"
#include "gpu.h"
#include "mailbox_view.h"

namespace sparsemla {

namespace {

using detail::Extent;
using detail::MailboxView;

constexpr std::int64_t vector_alignment_bytes = 16;
constexpr std::size_t control_alignment_bytes = 64;

[[noreturn]] void refuse(std::string_view argument, const std::string& required, const std::string& received) {
    throw Error(ErrorKind::invalid_argument, std::string(argument), required, received);
}

bool is_gpu(const Mailbox& mailbox) { return mailbox.device.kind == Device::Kind::cuda; }

void check_rows(std::int64_t rows, const Mailbox& mailbox) {
    if (rows < 0 || rows > mailbox.layout.rows)
        refuse("rows", "0 .. " + std::to_string(mailbox.layout.rows) + ", the mailbox's capacity",
               std::to_string(rows));
}

/// From one to the next along a dimension, in bytes: 0 where there is only one, whatever its stride says.
std::int64_t stride_bytes(const ConstTensor& tensor, int dimension) {
    return tensor.shape[dimension] > 1 ? tensor.strides[dimension] * size_bytes(tensor.dtype) : 0;
}

/// What outputs may not lie in.
detail::Region own_memory(const Mailbox& mailbox) {
    return detail::region_of(mailbox.peers.base[mailbox.peers.rank], static_cast<std::size_t>(mailbox.layout.bytes),
                             "mailbox");
}

bool share_bytes(const void* a, std::int64_t a_bytes, const void* b, std::int64_t b_bytes) {
    const auto first = reinterpret_cast<std::uintptr_t>(a), second = reinterpret_cast<std::uintptr_t>(b);
    return first < second ? second - first < static_cast<std::uintptr_t>(a_bytes)
                          : first - second < static_cast<std::uintptr_t>(b_bytes);
}

void check_addresses(const Mailbox& mailbox) {
    const std::int64_t bytes = mailbox.layout.bytes;
    for (int rank = 0; rank < mailbox.layout.world; ++rank) {
        const std::byte* base = mailbox.peers.base[rank];
        const auto argument = [&] { return "mailbox.peers.base[" + std::to_string(rank) + "]"; };
        if (base == nullptr) refuse(argument(), "the mailbox of that rank", "nothing");
        if (reinterpret_cast<std::uintptr_t>(base) % vector_alignment_bytes != 0)
            refuse(argument(), "16-byte alignment", "an unaligned address");
        for (int other = 0; other < rank; ++other)
            if (share_bytes(mailbox.peers.base[other], bytes, base, bytes))
                refuse(argument(), "memory of its own", "that of rank " + std::to_string(other));
    }
    if (mailbox.control.data == nullptr || mailbox.control.bytes < mailbox_control_bytes)
        refuse("mailbox.control", std::to_string(mailbox_control_bytes) + " bytes",
               mailbox.control.data == nullptr ? "nothing" : std::to_string(mailbox.control.bytes) + " bytes");
    if (reinterpret_cast<std::uintptr_t>(mailbox.control.data) % control_alignment_bytes != 0)
        refuse("mailbox.control", "64-byte alignment", "an unaligned address");
    for (int rank = 0; rank < mailbox.layout.world; ++rank)
        if (share_bytes(mailbox.peers.base[rank], bytes, mailbox.control.data, std::int64_t{mailbox_control_bytes}))
            refuse("mailbox.control", "memory of its own", "that of rank " + std::to_string(rank));
}

}  // namespace

MailboxView detail::view_of(const Mailbox& mailbox) {
    const MailboxLayout& layout = mailbox.layout;
    if (layout.world < 1 || layout.world > max_ranks || layout.bytes == 0)
        refuse("mailbox.layout", "one of mailbox_layout, of at least a row", "an empty one");
    if (mailbox.peers.rank < 0 || mailbox.peers.rank >= layout.world)
        refuse("mailbox.peers.rank", "0 .. " + std::to_string(layout.world - 1), std::to_string(mailbox.peers.rank));
    check_addresses(mailbox);
    if (!(mailbox.wait_limit_s > 0) || mailbox.wait_limit_s > 1e6)
        refuse("mailbox.wait_limit_s", "above 0 and at most 10^6", std::to_string(mailbox.wait_limit_s));
    if (!(mailbox.delay.us >= 0) || mailbox.delay.us > 1e7F)
        refuse("mailbox.delay.us", "0 .. 10^7", std::to_string(mailbox.delay.us));
    MailboxView view{.peers = {},
                     .control = static_cast<MailboxControl*>(mailbox.control.data),
                     .limit_ns = static_cast<std::uint64_t>(mailbox.wait_limit_s * 1e9),
                     .rank = mailbox.peers.rank,
                     .world = layout.world,
                     .heads = static_cast<std::int32_t>(layout.heads),
                     .own_heads = static_cast<std::int32_t>(layout.heads_of(mailbox.peers.rank)),
                     .most_heads = static_cast<std::int32_t>(layout.most_heads),
                     .rows = static_cast<std::int32_t>(layout.rows),
                     .head_offset = {},
                     .query_head_bytes = static_cast<std::int32_t>(layout.d_qk * size_bytes(layout.query_dtype)),
                     .query_row_bytes = layout.padded_heads * layout.d_qk * size_bytes(layout.query_dtype),
                     .query_parity_bytes = layout.query_parity_bytes,
                     .values = layout.values,
                     .values_parity_bytes = layout.values_parity_bytes,
                     .lses = layout.lses,
                     .lses_parity_bytes = layout.lses_parity_bytes,
                     .delayed_stage = mailbox.delay.stage,
                     .delayed_cta = mailbox.delay.cta,
                     .delay_ns = static_cast<std::uint64_t>(static_cast<double>(mailbox.delay.us) * 1e3)};
    std::copy_n(mailbox.peers.base.begin(), max_ranks, view.peers);
    std::copy_n(layout.head_offset.begin(), max_ranks + 1, view.head_offset);
    return view;
}

void reset(const Mailbox& mailbox, Stream stream) {
    const MailboxView view = detail::view_of(mailbox);
    if (is_gpu(mailbox))
        detail::reset_gpu(view, mailbox.layout.bytes, mailbox.device.index, stream);
    else
        detail::reset_cpu(view, mailbox.layout.bytes);
}

MailboxStatus status(const Mailbox& mailbox, Stream stream) {
    const MailboxView view = detail::view_of(mailbox);
    const detail::MailboxControl control =
        is_gpu(mailbox) ? detail::control_gpu(view, mailbox.device.index, stream) : *view.control;
    MailboxStatus status{.exchanges = control.next, .failed = control.failed != 0};
    if (!status.failed) return status;
    status.exchanges = control.exchange;  // a GPU's `next` may have gone on
    status.stage = static_cast<DcpStage>(control.stage);
    status.missing_rank = static_cast<int>(control.peer);
    status.row = control.row;
    status.exchange = control.exchange;
    return status;
}

void gather_query(const Mailbox& mailbox, const GatherQueryArgs& args, Stream stream) {
    const MailboxView view = detail::view_of(mailbox);
    check_rows(args.rows, mailbox);
    if (args.rows == 0) return;
    const DType to = mailbox.layout.query_dtype;
    detail::TensorRule rule{
        .argument = "query",
        .dtypes = {DType::bf16},
        .shape = {Extent::at_least(args.rows, "rows"), Extent::at_least(view.own_heads, "own heads"),
                  Extent::exactly(mailbox.layout.d_qk)},
        .device = mailbox.device,
        .alignment_bytes = vector_alignment_bytes};
    if (to == DType::f8_e4m3) rule.dtypes.push_back(DType::f8_e4m3);
    detail::check_tensor(args.query, rule);
    detail::check_positive_finite(args.q_scale, "q_scale");
    if (args.query.dtype == to && args.q_scale != 1.0F)
        refuse("q_scale", "1 where nothing is quantised", detail::to_text(args.q_scale));
    const detail::GatherQueryParams params{.mailbox = view,
                                           .rows = args.rows,
                                           .query = static_cast<const std::byte*>(args.query.data),
                                           .query_row_stride_bytes = stride_bytes(args.query, 0),
                                           .query_head_stride_bytes = stride_bytes(args.query, 1),
                                           .dims = static_cast<std::int32_t>(mailbox.layout.d_qk),
                                           .from = args.query.dtype,
                                           .to = to,
                                           .q_scale = args.q_scale};
    is_gpu(mailbox) ? detail::gather_query_gpu(params, mailbox.device.index, stream) : detail::gather_query_cpu(params);
}

void receive_query(const Mailbox& mailbox, std::int64_t rows, const Tensor& out, Stream stream) {
    const MailboxView view = detail::view_of(mailbox);
    check_rows(rows, mailbox);
    if (rows == 0) return;
    detail::check_tensor(out,
                         {.argument = "out",
                          .dtypes = {mailbox.layout.query_dtype},
                          .shape = {Extent::at_least(rows, "rows"), Extent::at_least(mailbox.layout.heads, "heads"),
                                    Extent::exactly(mailbox.layout.d_qk)},
                          .device = mailbox.device,
                          .alignment_bytes = vector_alignment_bytes});
    detail::check_no_overlap({detail::region_of(out, "out", {rows, mailbox.layout.heads})}, {own_memory(mailbox)});
    const detail::ReceiveQueryParams params{.mailbox = view,
                                            .rows = rows,
                                            .out = static_cast<std::byte*>(out.data),
                                            .out_row_stride_bytes = stride_bytes(out, 0),
                                            .out_head_stride_bytes = stride_bytes(out, 1)};
    is_gpu(mailbox) ? detail::receive_query_gpu(params, mailbox.device.index, stream)
                    : detail::receive_query_cpu(params);
}

void push(const Mailbox& mailbox, const PushArgs& args, Stream stream) {
    const MailboxView view = detail::view_of(mailbox);
    check_rows(args.rows, mailbox);
    if (args.rows == 0) return;
    const Extent rows = Extent::at_least(args.rows, "rows"), heads = Extent::at_least(mailbox.layout.heads, "heads");
    detail::check_tensor(args.out, {.argument = "out",
                                    .dtypes = {DType::bf16, DType::f32},
                                    .shape = {rows, heads, Extent::exactly(value_dims)},
                                    .device = mailbox.device});
    detail::check_tensor(args.lse, {.argument = "lse",
                                    .dtypes = {DType::f32},
                                    .shape = {rows, heads},
                                    .device = mailbox.device,
                                    .dense_last = false});
    if (args.counts.present())
        detail::check_tensor(args.counts, {.argument = "counts",
                                           .dtypes = {DType::i32},
                                           .shape = {rows},
                                           .device = mailbox.device,
                                           .dense_last = false});
    const detail::PushParams params{
        .mailbox = view,
        .rows = args.rows,
        .out = args.out.data,
        .out_dtype = args.out.dtype,
        .out_row_stride = args.out.strides[0],
        .out_head_stride = args.out.strides[1],
        .lse = static_cast<const float*>(args.lse.data),
        .lse_row_stride = args.lse.strides[0],
        .lse_head_stride = args.lse.strides[1],
        .counts = args.counts.present() ? static_cast<const std::int32_t*>(args.counts.data) : nullptr,
        .counts_stride = args.counts.strides[0],
        .lse_base = args.lse_base};
    is_gpu(mailbox) ? detail::push_gpu(params, mailbox.device.index, stream) : detail::push_cpu(params);
}

void merge_pushed(const Mailbox& mailbox, const MergePushedArgs& args, Stream stream) {
    const MailboxView view = detail::view_of(mailbox);
    check_rows(args.rows, mailbox);
    if (args.rows == 0) return;
    const Extent rows = Extent::at_least(args.rows, "rows"), heads = Extent::at_least(view.own_heads, "own heads");
    detail::check_tensor(args.out, {.argument = "out",
                                    .dtypes = {DType::bf16, DType::f32},
                                    .shape = {rows, heads, Extent::exactly(value_dims)},
                                    .device = mailbox.device});
    if (args.lse.present())
        detail::check_tensor(args.lse, {.argument = "lse",
                                        .dtypes = {DType::f32},
                                        .shape = {rows, heads},
                                        .device = mailbox.device,
                                        .dense_last = false});
    if (args.sinks.present())
        detail::check_tensor(args.sinks, {.argument = "sinks",
                                          .dtypes = {DType::f32},
                                          .shape = {heads},
                                          .device = mailbox.device,
                                          .dense_last = false});
    detail::check_no_overlap({detail::region_of(args.out, "out", {args.rows, view.own_heads}),
                              detail::region_of(args.lse, "lse", {args.rows, view.own_heads})},
                             {detail::region_of(args.sinks, "sinks", {view.own_heads}), own_memory(mailbox)});
    const detail::MergePushedParams params{
        .mailbox = view,
        .rows = args.rows,
        .sinks = args.sinks.present() ? static_cast<const float*>(args.sinks.data) : nullptr,
        .sinks_stride = args.sinks.strides[0],
        .out = args.out.data,
        .out_dtype = args.out.dtype,
        .out_row_stride = args.out.strides[0],
        .out_head_stride = args.out.strides[1],
        .lse = args.lse.present() ? static_cast<float*>(args.lse.data) : nullptr,
        .lse_row_stride = args.lse.strides[0],
        .lse_head_stride = args.lse.strides[1],
        .lse_base = args.lse_base,
        .query_gathered = args.query_gathered};
    is_gpu(mailbox) ? detail::merge_pushed_gpu(params, mailbox.device.index, stream) : detail::merge_pushed_cpu(params);
}

namespace {

constexpr std::align_val_t memory_alignment{128};

std::byte* allocate(std::size_t bytes, Device device) {
    if (device.kind == Device::Kind::cuda) return static_cast<std::byte*>(detail::allocate_gpu(bytes, device.index));
    return static_cast<std::byte*>(::operator new(bytes, memory_alignment));
}

}  // namespace

LoopbackGroup::LoopbackGroup(const DcpShape& shape, Device device) {
    const MailboxLayout layout = mailbox_layout(shape);
    const auto ranks = static_cast<std::size_t>(layout.world), bytes = static_cast<std::size_t>(layout.bytes);
    // The control of each rank lies apart from what ranks share.
    constexpr std::size_t control_bytes = 128;
    memory_ = allocate(ranks * (bytes + control_bytes), device);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        Mailbox mailbox{.layout = layout, .peers = {.rank = static_cast<int>(rank)}, .device = device};
        mailbox.control = {memory_ + ranks * bytes + rank * control_bytes, mailbox_control_bytes};
        for (std::size_t peer = 0; peer < ranks; ++peer) mailbox.peers.base[peer] = memory_ + peer * bytes;
        mailboxes_.push_back(mailbox);
    }
    try {
        reset();
    } catch (...) {
        release();
        throw;
    }
}

LoopbackGroup::~LoopbackGroup() { release(); }

void LoopbackGroup::release() {
    if (memory_ == nullptr) return;
    const Device device = mailboxes_.front().device;
    if (device.kind == Device::Kind::cuda)
        detail::free_gpu(memory_, device.index);
    else
        ::operator delete(memory_, memory_alignment);
    memory_ = nullptr;
}

void LoopbackGroup::reset() {
    for (const Mailbox& mailbox : mailboxes_) sparsemla::reset(mailbox);
    // The default stream's work has ended when a copy of it has.
    for (const Mailbox& mailbox : mailboxes_) status(mailbox);
}

}  // namespace sparsemla
