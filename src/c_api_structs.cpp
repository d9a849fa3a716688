#include "c_api_structs.h"

#include <iterator>

#include "c_api_dcp_structs.h"

namespace sparsemla::detail {

namespace {

static_assert(SPARSEMLA_F64 == static_cast<int>(DType::f64) && SPARSEMLA_F8_E4M3 == static_cast<int>(DType::f8_e4m3) &&
              SPARSEMLA_BF16 == static_cast<int>(DType::bf16) && SPARSEMLA_I32 == static_cast<int>(DType::i32));
static_assert(SPARSEMLA_CUDA == static_cast<int>(Device::Kind::cuda));
static_assert(SPARSEMLA_RECORD_BF16 == static_cast<int>(Record::bf16) &&
              SPARSEMLA_RECORD_FP8_576 == static_cast<int>(Record::fp8_576) &&
              SPARSEMLA_RECORD_FP8_512 == static_cast<int>(Record::fp8_512) &&
              SPARSEMLA_RECORD_FP8_DS_MLA == static_cast<int>(Record::fp8_ds_mla) &&
              SPARSEMLA_RECORD_FP8_DS_MLA_NOROPE == static_cast<int>(Record::fp8_ds_mla_norope) &&
              SPARSEMLA_RECORD_FP8_V4 == static_cast<int>(Record::fp8_v4) &&
              SPARSEMLA_RECORD_FP8_V41 == static_cast<int>(Record::fp8_v41) &&
              SPARSEMLA_RECORD_NVFP4_V41 == static_cast<int>(Record::nvfp4_v41) &&
              SPARSEMLA_RECORD_NVFP4_DS_MLA == static_cast<int>(Record::nvfp4_ds_mla) &&
              SPARSEMLA_RECORD_NVFP4_DS_MLA + 1 == static_cast<int>(record_layouts.size()));
static_assert(SPARSEMLA_PLANAR == static_cast<int>(RecordForm::planar));
static_assert(SPARSEMLA_LSE_LOG2 == static_cast<int>(LseBase::two));
static_assert(SPARSEMLA_P_E4M3 == static_cast<int>(PFormat::e4m3) &&
              SPARSEMLA_P_F16 == static_cast<int>(PFormat::f16) &&
              SPARSEMLA_P_BF16 == static_cast<int>(PFormat::bf16) && SPARSEMLA_P_F64 == static_cast<int>(PFormat::f64));
static_assert(SPARSEMLA_ANCHOR_CHUNK_MAX == static_cast<int>(Anchor::chunk_max) &&
              SPARSEMLA_ANCHOR_ROW_MAX == static_cast<int>(Anchor::row_max));
static_assert(SPARSEMLA_COLUMNS_INTERLEAVED == static_cast<int>(ColumnRule::interleaved));
static_assert(SPARSEMLA_COLUMNS_ROUND_ROBIN == static_cast<int>(ColumnRule::round_robin));
// One more than the library's own: 0 is the plan's choice, for callers of structs without these fields too.
static_assert(SPARSEMLA_TRANSPORT_STORES == 1 + static_cast<int>(Transport::stores) &&
              SPARSEMLA_TRANSPORT_BULK == 1 + static_cast<int>(Transport::bulk) &&
              SPARSEMLA_TRANSPORT_WEIGHTS == 1 + static_cast<int>(Transport::weights));
static_assert(SPARSEMLA_GATHER_COPIES == 1 + static_cast<int>(Gather::copies) &&
              SPARSEMLA_GATHER_BULK == 1 + static_cast<int>(Gather::bulk));
static_assert(SPARSEMLA_TRIGGER_START == 1 + static_cast<int>(Trigger::start) &&
              SPARSEMLA_TRIGGER_LOADED == 1 + static_cast<int>(Trigger::loaded) &&
              SPARSEMLA_TRIGGER_END == 1 + static_cast<int>(Trigger::end));

Record to_record(std::int32_t value, const ArgumentName& argument) {
    return to_enum<Record>(value, static_cast<std::int32_t>(record_layouts.size()), argument);
}

SourceProblem to_source_problem(const sparsemla_source_problem* given, const ArgumentName& argument) {
    const auto source = read_struct(given, {}, offsetof(sparsemla_source_problem, count_offset), argument);
    check_reserved(source.reserved, argument + ".reserved");
    return {.record = to_record(source.record, argument + ".record"),
            .form = to_enum<RecordForm>(source.form, 2, argument + ".form"),
            .split_rope = to_flag(source.split_rope, argument + ".split_rope"),
            .width = source.width,
            .count_offset = source.count_offset};
}

SourceArgs to_source_args(const sparsemla_source_args* given, const ArgumentName& argument) {
    const auto source =
        read_struct(given, sparsemla_source_args_default(), offsetof(sparsemla_source_args, counts), argument);
    return {.cache = to_cache(source.cache, argument + ".cache"),
            .slots = to_const_tensor(source.slots, argument + ".slots"),
            .counts = to_const_tensor(source.counts, argument + ".counts"),
            .k_scale = to_scale(source.k_scale)};
}

}  // namespace

std::int32_t check_value(std::int32_t value, std::int32_t count, const ArgumentName& argument) {
    if (value < 0 || value >= count)
        throw Error(ErrorKind::invalid_argument, argument.text(),
                    count == 1 ? std::string("0") : "a value of 0 .. " + std::to_string(count - 1),
                    std::to_string(value));
    return value;
}

Device to_device(std::int32_t kind, std::int32_t index, const ArgumentName& argument) {
    if (index < 0)
        throw Error(ErrorKind::invalid_argument, (argument + ".device_index").text(), "0 or more",
                    std::to_string(index));
    return {to_enum<Device::Kind>(kind, 2, argument + ".device_kind"), index};
}

Tensor to_tensor(const sparsemla_tensor& given, const ArgumentName& argument) {
    Tensor tensor;
    if (given.rank == 0) return tensor;
    tensor.rank = check_value(given.rank, Tensor::max_rank + 1, argument + ".rank");
    tensor.data = given.data;
    tensor.dtype = to_dtype(given.dtype, argument + ".dtype");
    tensor.device = to_device(given.device_kind, given.device_index, argument);
    std::copy(std::begin(given.shape), std::end(given.shape), tensor.shape.begin());
    std::copy(std::begin(given.strides), std::end(given.strides), tensor.strides.begin());
    return tensor;
}

ConstTensor to_const_tensor(const sparsemla_tensor& given, const ArgumentName& argument) {
    return to_tensor(given, argument);
}

Scale to_scale(const sparsemla_scale& given) { return {given.value, given.pointer}; }

MutableCacheView to_cache(const sparsemla_cache* given, const ArgumentName& argument) {
    const auto cache = read_struct(given, {}, offsetof(sparsemla_cache, slots_per_page), argument);
    return {.record = to_record(cache.record, argument + ".record"),
            .form = to_enum<RecordForm>(cache.form, 2, argument + ".form"),
            .data = static_cast<std::byte*>(cache.data),
            .rope = static_cast<std::byte*>(cache.rope),
            .pages = cache.pages,
            .page_size = cache.page_size,
            .slots_per_page = cache.slots_per_page,
            .page_stride_bytes = cache.page_stride_bytes,
            .device = to_device(cache.device_kind, cache.device_index, argument)};
}

Sharding to_sharding(std::int64_t world, std::int64_t rank, std::int64_t interleave) {
    // Products of the three stay in 64 bits.
    constexpr std::int64_t most = 1LL << 31;
    if (world < 1 || world >= most)
        throw Error(ErrorKind::invalid_argument, "world", "1 .. 2^31 - 1", std::to_string(world));
    if (rank < 0 || rank >= world)
        throw Error(ErrorKind::invalid_argument, "rank", "0 .. world - 1", std::to_string(rank));
    if (interleave < 1 || interleave >= most)
        throw Error(ErrorKind::invalid_argument, "interleave", "1 .. 2^31 - 1", std::to_string(interleave));
    return {.world = world, .rank = rank, .interleave = interleave};
}

DeviceSpec to_device_spec(const sparsemla_device_spec* given) {
    const auto spec = read_struct(given, {}, sizeof(sparsemla_device_spec), "device");
    DeviceSpec result{.device = to_device(spec.device_kind, spec.device_index, "device"),
                      .name = std::string(spec.name, strnlen(spec.name, sizeof spec.name)),
                      .threads = spec.threads,
                      .capability = spec.capability,
                      .sms = spec.sms,
                      .shared_memory_bytes = spec.shared_memory_bytes,
                      .l2_bytes = spec.l2_bytes};
    std::copy(std::begin(spec.resident_clusters), std::end(spec.resident_clusters), result.resident_clusters.begin());
    return result;
}

Problem to_problem(const sparsemla_problem* given) {
    sparsemla_problem defaults = sparsemla_problem_default();
    const auto problem = read_struct(given, defaults, offsetof(sparsemla_problem, query_dtype), "problem");
    Problem result{.rows = problem.rows,
                   .heads = problem.heads,
                   .query_dtype = to_dtype(problem.query_dtype, "problem.query_dtype"),
                   .sources = {},
                   .sinks = to_flag(problem.sinks, "problem.sinks"),
                   .lse = to_flag(problem.lse, "problem.lse"),
                   .lse_base = to_enum<LseBase>(problem.lse_base, 2, "problem.lse_base"),
                   .out_dtype = to_dtype(problem.out_dtype, "problem.out_dtype"),
                   .device = to_device(problem.device_kind, problem.device_index, "problem")};
    result.from_ids = to_flag(problem.from_ids, "problem.from_ids");
    result.dcp = to_flag(problem.dcp, "problem.dcp");
    check_value(problem.num_sources, 3, "problem.num_sources");
    const ArgumentName sources("problem.sources");
    for (std::int32_t i = 0; i < problem.num_sources; ++i) {
        const auto* source = struct_at(problem.sources, i, offsetof(sparsemla_source_problem, count_offset), sources);
        result.sources.push_back(to_source_problem(source, sources[i]));
    }
    return result;
}

PlanOptions to_plan_options(const sparsemla_plan_options* given) {
    PlanOptions result;
    if (given == nullptr) return result;
    const auto options =
        read_struct(given, sparsemla_plan_options_default(), offsetof(sparsemla_plan_options, kernel), "options");
    check_reserved(options.reserved, "options.reserved");
    if (options.kernel != nullptr) result.kernel = options.kernel;
    if (options.p_format != SPARSEMLA_CHOOSE)
        result.p_format = to_enum<PFormat>(options.p_format, 4, "options.p_format");
    if (options.p_scale != 0) result.p_scale = options.p_scale;
    if (options.anchor != SPARSEMLA_CHOOSE) result.anchor = to_enum<Anchor>(options.anchor, 3, "options.anchor");
    if (options.column_rule != SPARSEMLA_CHOOSE)
        result.columns = to_enum<ColumnRule>(options.column_rule, 3, "options.column_rule");
    if (options.splits != 0) result.splits = options.splits;
    if (options.chunk != 0) result.chunk = options.chunk;
    result.allow_unverified = to_flag(options.allow_unverified, "options.allow_unverified");
    if (options.tile_heads != 0) result.tile_heads = options.tile_heads;
    if (options.stages != 0) result.stages = options.stages;
    result.transport = to_choice<Transport>(options.transport, 3, "options.transport");
    result.trigger = to_choice<Trigger>(options.trigger, 3, "options.trigger");
    result.gather = to_choice<Gather>(options.gather, 2, "options.gather");
    if (options.cluster_tiles != 0) result.cluster_tiles = options.cluster_tiles;
    if (options.usual_columns != 0) result.usual_columns = options.usual_columns;
    return result;
}

PackOptions to_pack_options(const sparsemla_pack_options* given) {
    if (given == nullptr) return {};
    const auto options =
        read_struct(given, sparsemla_pack_options_default(), offsetof(sparsemla_pack_options, k_scale), "options");
    return {.k_scale = options.k_scale,
            .power_of_two_scales = to_flag(options.power_of_two_scales, "options.power_of_two_scales")};
}

ConvertArgs to_convert_args(const sparsemla_convert_args* given, const ArgumentName& argument, bool needs_cache) {
    const auto args =
        read_struct(given, sparsemla_convert_args_default(), offsetof(sparsemla_convert_args, lengths), argument);
    return {.token_ids = to_const_tensor(args.token_ids, "token_ids"),
            .block_table = to_const_tensor(args.block_table, "block_table"),
            .request_of_row = to_const_tensor(args.request_of_row, "request_of_row"),
            .lengths = to_const_tensor(args.lengths, "lengths"),
            .cache = needs_cache ? to_cache(args.cache, "cache") : MutableCacheView{},
            .sharding = {.world = args.world, .rank = args.rank, .interleave = args.interleave},
            .slots = to_tensor(args.slots, "slots"),
            .counts = to_tensor(args.counts, "counts")};
}

DecodeArgs to_decode_args(const sparsemla_decode_args* given, const Plan& plan, Mailbox& mailbox) {
    const auto args = read_struct(given, sparsemla_decode_args_default(), offsetof(sparsemla_decode_args, lse), "args");
    DecodeArgs result{.rows = args.rows,
                      .query = to_const_tensor(args.query, "query"),
                      .sources = {},
                      .sinks = to_const_tensor(args.sinks, "sinks"),
                      .softmax_scale = args.softmax_scale,
                      .q_scale = to_scale(args.q_scale),
                      .out_scale = args.out_scale,
                      .out = to_tensor(args.out, "out"),
                      .lse = to_tensor(args.lse, "lse"),
                      .workspace = to_memory(args.workspace, args.workspace_bytes),
                      .state = to_memory(args.state, args.state_bytes),
                      .validate = to_flag(args.validate, "args.validate")};
    if (args.num_sources != static_cast<std::int32_t>(plan.problem.sources.size()))
        throw Error(ErrorKind::invalid_argument, "args.num_sources",
                    "the plan's " + std::to_string(plan.problem.sources.size()), std::to_string(args.num_sources));
    const ArgumentName sources("args.sources");
    for (std::int32_t i = 0; i < args.num_sources; ++i) {
        const auto* source = struct_at(args.sources, i, offsetof(sparsemla_source_args, counts), sources);
        result.sources[static_cast<std::size_t>(i)] = to_source_args(source, sources[i]);
    }
    if (args.indices != nullptr) result.indices = to_convert_args(args.indices, "args.indices", false);
    if (args.mailbox != nullptr) {
        mailbox = to_mailbox(args.mailbox, "args.mailbox");
        result.mailbox = &mailbox;
    }
    return result;
}

MergeArgs to_merge_args(const sparsemla_merge_args* given, std::vector<Partial>& partials) {
    const auto args = read_struct(given, {}, offsetof(sparsemla_merge_args, lse), "args");
    check_reserved(args.reserved, "args.reserved");
    if (args.num_partials < 0)
        throw Error(ErrorKind::invalid_argument, "args.num_partials", "0 or more", std::to_string(args.num_partials));
    partials.clear();
    const ArgumentName names("args.partials");
    for (std::int64_t i = 0; i < args.num_partials; ++i) {
        const ArgumentName name = names[i];
        constexpr std::size_t min_size = offsetof(sparsemla_partial, counts);
        const auto partial = read_struct(struct_at(args.partials, i, min_size, names), {}, min_size, name);
        partials.push_back({.out = to_const_tensor(partial.out, name + ".out"),
                            .lse = to_const_tensor(partial.lse, name + ".lse"),
                            .counts = to_const_tensor(partial.counts, name + ".counts")});
    }
    return {.rows = args.rows,
            .heads = args.heads,
            .partials = partials,
            .partial_base = to_enum<LseBase>(args.partial_lse_base, 2, "args.partial_lse_base"),
            .plus_inf_is_empty = to_flag(args.plus_inf_is_empty, "args.plus_inf_is_empty"),
            .sinks = to_const_tensor(args.sinks, "sinks"),
            .out = to_tensor(args.out, "out"),
            .lse = to_tensor(args.lse, "lse"),
            .lse_base = to_enum<LseBase>(args.lse_base, 2, "args.lse_base")};
}

sparsemla_device_spec from_device_spec(const DeviceSpec& spec) {
    sparsemla_device_spec result{};
    result.device_kind = static_cast<std::int32_t>(spec.device.kind);
    result.device_index = spec.device.index;
    copy_text(result.name, spec.name);
    result.threads = spec.threads;
    result.capability = spec.capability;
    result.sms = spec.sms;
    std::copy(spec.resident_clusters.begin(), spec.resident_clusters.end(), result.resident_clusters);
    result.shared_memory_bytes = spec.shared_memory_bytes;
    result.l2_bytes = spec.l2_bytes;
    return result;
}

sparsemla_record_layout from_layout(const RecordLayout& layout) {
    sparsemla_record_layout result{};
    result.record = static_cast<std::int32_t>(layout.record);
    result.record_bytes = layout.record_bytes;
    result.data_bytes = layout.data_bytes;
    result.scale_bytes = layout.scale_bytes;
    result.d_qk = layout.d_qk();
    result.d_v = value_dims;
    result.has_contiguous = layout.has_contiguous;
    result.has_planar = layout.has_planar;
    result.takes_k_scale = layout.takes_k_scale;
    result.may_split = layout.may_split;
    copy_text(result.name, layout.name);
    return result;
}

}  // namespace sparsemla::detail
