#include "c_api_dcp_structs.h"

namespace sparsemla::detail {

namespace {

static_assert(SPARSEMLA_MAX_RANKS == max_ranks);
static_assert(SPARSEMLA_STAGE_NONE == static_cast<int>(DcpStage::none) &&
              SPARSEMLA_STAGE_GATHER == static_cast<int>(DcpStage::gather) &&
              SPARSEMLA_STAGE_DECODE == static_cast<int>(DcpStage::decode) &&
              SPARSEMLA_STAGE_PUSH == static_cast<int>(DcpStage::push) &&
              SPARSEMLA_STAGE_MERGE == static_cast<int>(DcpStage::merge));

}  // namespace

ShapeView to_shape(const sparsemla_dcp_shape* given, const ArgumentName& argument) {
    const auto shape =
        read_struct(given, sparsemla_dcp_shape_default(), offsetof(sparsemla_dcp_shape, query_dtype), argument);
    if (shape.world < 1 || shape.world > max_ranks)
        throw Error(ErrorKind::invalid_argument, (argument + ".world").text(), "1 .. " + std::to_string(max_ranks),
                    std::to_string(shape.world));
    return {.rows = shape.rows,
            .head_offset = {&not_null(shape.head_offset, argument + ".head_offset"),
                            static_cast<std::size_t>(shape.world) + 1},
            .padded_heads = shape.padded_heads,
            .query_dtype = to_dtype(shape.query_dtype, argument + ".query_dtype"),
            .d_qk = shape.d_qk};
}

Mailbox to_mailbox(const sparsemla_mailbox* given, const ArgumentName& argument) {
    const auto mailbox =
        read_struct(given, sparsemla_mailbox_default(), offsetof(sparsemla_mailbox, delayed_stage), argument);
    Mailbox result{.layout = layout_of(to_shape(mailbox.shape, argument + ".shape")),
                   .peers = {.rank = mailbox.rank},
                   .device = to_device(mailbox.device_kind, mailbox.device_index, argument),
                   .control = to_memory(mailbox.control, mailbox.control_bytes),
                   .wait_limit_s = mailbox.wait_limit_s,
                   .delay = {.stage = to_enum<DcpStage>(mailbox.delayed_stage, SPARSEMLA_STAGE_MERGE + 1,
                                                        argument + ".delayed_stage"),
                             .cta = mailbox.delayed_cta,
                             .us = mailbox.delay_us}};
    const ArgumentName bases = argument + ".bases";
    not_null(mailbox.bases, bases);
    for (int rank = 0; rank < result.layout.world; ++rank)
        result.peers.base[rank] = &not_null(static_cast<std::byte*>(mailbox.bases[rank]), bases[rank]);
    return result;
}

GatherQueryArgs to_gather_query_args(const sparsemla_gather_query_args* given) {
    const auto args = read_struct(given, sparsemla_gather_query_args_default(),
                                  offsetof(sparsemla_gather_query_args, q_scale), "args");
    check_reserved(args.reserved, "args.reserved");
    return {.rows = args.rows, .query = to_const_tensor(args.query, "query"), .q_scale = args.q_scale};
}

PushArgs to_push_args(const sparsemla_push_args* given) {
    const auto args = read_struct(given, sparsemla_push_args_default(), offsetof(sparsemla_push_args, counts), "args");
    check_reserved(args.reserved, "args.reserved");
    return {.rows = args.rows,
            .out = to_const_tensor(args.out, "out"),
            .lse = to_const_tensor(args.lse, "lse"),
            .counts = to_const_tensor(args.counts, "counts"),
            .lse_base = to_enum<LseBase>(args.lse_base, 2, "args.lse_base")};
}

MergePushedArgs to_merge_pushed_args(const sparsemla_merge_pushed_args* given) {
    const auto args =
        read_struct(given, sparsemla_merge_pushed_args_default(), offsetof(sparsemla_merge_pushed_args, lse), "args");
    return {.rows = args.rows,
            .sinks = to_const_tensor(args.sinks, "sinks"),
            .out = to_tensor(args.out, "out"),
            .lse = to_tensor(args.lse, "lse"),
            .lse_base = to_enum<LseBase>(args.lse_base, 2, "args.lse_base"),
            .query_gathered = to_flag(args.query_gathered, "args.query_gathered")};
}

MergeTopkArgs to_merge_topk_args(const sparsemla_merge_topk_args* given) {
    const auto args =
        read_struct(given, sparsemla_merge_topk_args_default(), offsetof(sparsemla_merge_topk_args, slots), "args");
    const Tensor slots = to_tensor(args.slots, "slots");
    return {.rows = args.rows,
            .k = args.k,
            .scores = to_const_tensor(args.scores, "scores"),
            .ids = to_const_tensor(args.ids, "ids"),
            .source_counts = to_const_tensor(args.source_counts, "source_counts"),
            .sharding = {.world = args.world, .rank = args.rank, .interleave = args.interleave},
            .token_ids = to_tensor(args.token_ids, "token_ids"),
            .block_table = to_const_tensor(args.block_table, "block_table"),
            .request_of_row = to_const_tensor(args.request_of_row, "request_of_row"),
            .lengths = to_const_tensor(args.lengths, "lengths"),
            .cache = slots.present() ? to_cache(args.cache, "cache") : MutableCacheView{},
            .slots = slots,
            .counts = to_tensor(args.counts, "counts")};
}

sparsemla_dcp_shape from_shape(const ShapeView& shape) {
    sparsemla_dcp_shape result = sparsemla_dcp_shape_default();
    result.rows = shape.rows;
    result.head_offset = shape.head_offset.data();
    result.world = static_cast<std::int32_t>(shape.head_offset.size()) - 1;
    result.query_dtype = static_cast<std::int32_t>(shape.query_dtype);
    result.padded_heads = shape.padded_heads;
    result.d_qk = shape.d_qk;
    return result;
}

sparsemla_mailbox_layout from_mailbox_layout(const MailboxLayout& layout) {
    sparsemla_mailbox_layout result{};
    result.bytes = layout.bytes;
    result.control_bytes = mailbox_control_bytes;
    result.fingerprint = layout.fingerprint();
    result.world = layout.world;
    result.query_dtype = static_cast<std::int32_t>(layout.query_dtype);
    result.rows = layout.rows;
    result.heads = layout.heads;
    result.padded_heads = layout.padded_heads;
    result.most_heads = layout.most_heads;
    result.d_qk = layout.d_qk;
    result.query_offset_bytes = layout.query;
    result.query_parity_bytes = layout.query_parity_bytes;
    result.values_offset_bytes = layout.values;
    result.values_parity_bytes = layout.values_parity_bytes;
    result.lses_offset_bytes = layout.lses;
    result.lses_parity_bytes = layout.lses_parity_bytes;
    return result;
}

sparsemla_mailbox from_mailbox(const Mailbox& mailbox) {
    sparsemla_mailbox result = sparsemla_mailbox_default();
    result.control = mailbox.control.data;
    result.control_bytes = mailbox.control.bytes;
    result.wait_limit_s = mailbox.wait_limit_s;
    result.rank = mailbox.peers.rank;
    result.device_kind = static_cast<std::int32_t>(mailbox.device.kind);
    result.device_index = mailbox.device.index;
    result.delayed_stage = static_cast<std::int32_t>(mailbox.delay.stage);
    result.delayed_cta = mailbox.delay.cta;
    result.delay_us = mailbox.delay.us;
    return result;
}

sparsemla_mailbox_status from_mailbox_status(const MailboxStatus& status) {
    sparsemla_mailbox_status result{};
    result.exchanges = status.exchanges;
    result.failed = status.failed;
    result.stage = static_cast<std::int32_t>(status.stage);
    result.missing_rank = status.missing_rank;
    result.row = status.row;
    result.exchange = status.exchange;
    copy_text(result.text, status.text());
    return result;
}

}  // namespace sparsemla::detail
