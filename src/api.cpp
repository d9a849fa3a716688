// decode and prepare: every argument checked on the host, then one call of the planned kernel.
#include <algorithm>

#include "check.h"
#include "dcp_decode.h"
#include "indices_check.h"
#include "kernels.h"

namespace sparsemla {

namespace {

using detail::check_tensor;
using detail::DecodeParams;
using detail::Extent;
using detail::Region;
using detail::SourceParams;

constexpr std::int64_t vector_alignment_bytes = 16;
constexpr std::int64_t workspace_alignment_bytes = 64;

[[noreturn]] void refuse(std::string_view argument, const std::string& required, const std::string& received) {
    throw Error(ErrorKind::invalid_argument, std::string(argument), required, received);
}

/// "slots" of source 0 is argument "slots", of source 1 "extra_slots", as case files call them.
std::string source_argument(std::size_t i, std::string_view argument) {
    return (i == 0 ? "" : "extra_") + std::string(argument);
}

void check_presence(std::string_view argument, bool planned, bool present) {
    if (planned == present) return;
    refuse(argument, planned ? "a tensor, as the problem says" : "no tensor, as the problem says",
           present ? "one" : "nothing");
}

void check_scale(const Scale& scale, std::string_view argument) {
    if (scale.pointer == nullptr) detail::check_positive_finite(scale.value, argument);
}

void check_cache(const CacheView& cache, const SourceProblem& planned, const Device& device,
                 const std::string& argument) {
    validate(cache, argument);
    auto form_text = [](Record record, RecordForm form, bool split) {
        return to_string(record) + (form == RecordForm::planar ? " planar" : "") + (split ? " split" : "");
    };
    const bool split = cache.rope != nullptr;
    const bool same = cache.record == planned.record && cache.form == planned.form;
    if (!same || (cache.pages > 0 && split != planned.split_rope))
        refuse(argument, "the planned record " + form_text(planned.record, planned.form, planned.split_rope),
               form_text(cache.record, cache.form, split));
    if (!(cache.device == device)) refuse(argument, "memory on " + to_string(device), to_string(cache.device));
}

SourceParams check_source(const Plan& plan, const DecodeArgs& args, std::size_t i) {
    const SourceProblem& planned = plan.problem.sources[i];
    const SourceArgs& source = args.sources[i];
    const Device device = plan.problem.device;
    const std::string slots = source_argument(i, "slots");
    const std::string counts = source_argument(i, "counts");
    const std::string k_scale = source_argument(i, "k_scale");
    check_cache(source.cache, planned, device, source_argument(i, "cache"));
    const bool from_ids = i == 0 && plan.problem.from_ids;
    check_presence(slots, !from_ids, source.slots.present());
    if (from_ids) check_presence(counts, false, source.counts.present());
    if (!from_ids)
        check_tensor(source.slots,
                     {.argument = slots,
                      .dtypes = {DType::i32},
                      .shape = {Extent::at_least(args.rows, "rows"), Extent::exactly(planned.width, "width")},
                      .device = device});
    if (source.counts.present())
        check_tensor(source.counts, {.argument = counts,
                                     .dtypes = {DType::i32},
                                     .shape = {Extent::at_least(args.rows, "rows")},
                                     .device = device,
                                     .dense_last = false});
    check_scale(source.k_scale, k_scale);
    const bool scaled = source.k_scale.pointer != nullptr || source.k_scale.value != 1.0F;
    if (scaled && !layout_of(planned.record).takes_k_scale)
        refuse(k_scale, "1 for record " + to_string(planned.record) + " (it carries its own scales)",
               source.k_scale.pointer != nullptr ? "a pointer" : detail::to_text(source.k_scale.value));
    return {.cache = source.cache,
            .slots = static_cast<const std::int32_t*>(source.slots.data),
            .slots_row_stride = source.slots.strides[0],
            .counts = source.counts.present() ? static_cast<const std::int32_t*>(source.counts.data) : nullptr,
            .counts_stride = source.counts.strides[0],
            .width = planned.width,
            .count_offset = planned.count_offset,
            .k_scale = source.k_scale};
}

void check_memory(const Memory& memory, std::size_t bytes, std::string_view argument) {
    if (bytes == 0) return;
    if (memory.data == nullptr || memory.bytes < bytes)
        refuse(argument, std::to_string(bytes) + " bytes",
               memory.data == nullptr ? "nothing" : std::to_string(memory.bytes) + " bytes");
    if (reinterpret_cast<std::uintptr_t>(memory.data) % workspace_alignment_bytes != 0)
        refuse(argument, std::to_string(workspace_alignment_bytes) + "-byte alignment", "an unaligned address");
}

/// What a dcp problem reads from a mailbox and writes to others.
void check_no_tensors(const DecodeArgs& args) {
    check_presence("query", false, args.query.present());
    check_presence("out", false, args.out.present());
    check_presence("lse", false, args.lse.present());
    check_presence("sinks", false, args.sinks.present());
}

void check_tensors(const Plan& plan, const DecodeArgs& args) {
    const Problem& problem = plan.problem;
    if (problem.dcp) return check_no_tensors(args);
    if (args.mailbox != nullptr) refuse("mailbox", "nothing, as the problem is not one of dcp", "a mailbox");
    const Extent rows = Extent::at_least(args.rows, "rows");
    const Extent heads = Extent::at_least(problem.heads, "heads");
    check_tensor(args.query, {.argument = "query",
                              .dtypes = {problem.query_dtype},
                              .shape = {rows, heads, Extent::exactly(d_qk(problem))},
                              .device = problem.device,
                              .alignment_bytes = vector_alignment_bytes});
    check_tensor(args.out, {.argument = "out",
                            .dtypes = {problem.out_dtype},
                            .shape = {rows, heads, Extent::exactly(value_dims)},
                            .device = problem.device});
    check_presence("lse", problem.lse, args.lse.present());
    if (problem.lse)
        check_tensor(args.lse, {.argument = "lse",
                                .dtypes = {DType::f32},
                                .shape = {rows, heads},
                                .device = problem.device,
                                .dense_last = false});
    check_presence("sinks", problem.sinks, args.sinks.present());
    if (problem.sinks)
        check_tensor(args.sinks, {.argument = "sinks",
                                  .dtypes = {DType::f32},
                                  .shape = {heads},
                                  .device = problem.device,
                                  .dense_last = false});
}

void check_memory_apart(const Plan& plan, const DecodeArgs& args) {
    const std::int64_t heads = plan.problem.heads;
    const detail::Regions outputs = {detail::region_of(args.out, "out", {args.rows, heads}),
                                     detail::region_of(args.lse, "lse", {args.rows, heads}),
                                     detail::region_of(args.workspace.data, plan.workspace_bytes, "workspace"),
                                     detail::region_of(args.state.data, plan.state_bytes, "state")};
    detail::Regions inputs = {detail::region_of(args.query, "query", {args.rows, heads}),
                              detail::region_of(args.sinks, "sinks", {heads})};
    constexpr std::string_view caches[] = {"cache", "extra_cache"};
    constexpr std::string_view slots[] = {"slots", "extra_slots"};
    constexpr std::string_view counts[] = {"counts", "extra_counts"};
    for (std::size_t i = 0; i < plan.problem.sources.size(); ++i) {
        const SourceArgs& source = args.sources[i];
        for (const Region& region : detail::regions_of(source.cache, caches[i])) inputs.push_back(region);
        if (i == 0 && plan.problem.from_ids) {
            for (const Region& region : detail::regions_of(args.indices, args.rows)) inputs.push_back(region);
            continue;
        }
        inputs.push_back(detail::region_of(source.slots, slots[i], {args.rows}));
        inputs.push_back(detail::region_of(source.counts, counts[i], {args.rows}));
    }
    detail::check_no_overlap(outputs, inputs);
}

/// The largest count of source i that is not an error: one count may run over the columns of both sources.
std::int64_t largest_count(const DecodeParams& params, std::size_t i) {
    std::int64_t largest = 0;
    for (const SourceParams& source : std::span(params.sources, static_cast<std::size_t>(params.num_sources)))
        if (source.counts == params.sources[i].counts) largest = std::max(largest, source.count_offset + source.width);
    return largest;
}

/// The `validate` option: what decode would treat as absent or clamp is an error instead.
void check_lists(const DecodeParams& params, std::size_t i) {
    const SourceParams& source = params.sources[i];
    const std::int64_t largest = largest_count(params, i);
    for (std::int64_t row = 0; row < params.rows; ++row) {
        std::int64_t active = source.width;
        if (source.counts != nullptr) {
            const std::int64_t count = source.counts[row * source.counts_stride];
            if (count < 0 || count > largest)
                refuse(source_argument(i, "counts"), "0 .. " + std::to_string(largest),
                       std::to_string(count) + " at row " + std::to_string(row));
            active = std::clamp<std::int64_t>(count - source.count_offset, 0, source.width);
        }
        for (std::int64_t column = 0; column < active; ++column) {
            const std::int64_t slot = source.slots[row * source.slots_row_stride + column];
            if (slot >= 0 && !source.cache.holds(slot))
                refuse(source_argument(i, "slots"),
                       "slots of 0 .. " + std::to_string(source.cache.num_slots() - 1) + " outside gaps, or negative",
                       std::to_string(slot) + " at row " + std::to_string(row) + ", column " + std::to_string(column));
        }
    }
}

void check_no_indices(const ConvertArgs& indices) {
    check_presence("token_ids", false, indices.token_ids.present());
    check_presence("block_table", false, indices.block_table.present());
    check_presence("request_of_row", false, indices.request_of_row.present());
    check_presence("lengths", false, indices.lengths.present());
}

DecodeParams check_call(const Plan& plan, const DecodeArgs& args) {
    const Problem& problem = plan.problem;
    check_tensors(plan, args);
    detail::check_positive_finite(args.softmax_scale, "softmax_scale");
    check_scale(args.q_scale, "q_scale");
    detail::check_finite(args.out_scale, "out_scale");
    DecodeParams params{.rows = args.rows,
                        .heads = problem.heads,
                        .d_qk = d_qk(problem),
                        .query = args.query.data,
                        .query_dtype = problem.query_dtype,
                        .query_row_stride = args.query.strides[0],
                        .query_head_stride = args.query.strides[1],
                        .sources = {},
                        .num_sources = static_cast<int>(problem.sources.size()),
                        .indices = {},
                        .sinks = problem.sinks ? static_cast<const float*>(args.sinks.data) : nullptr,
                        .sinks_stride = args.sinks.strides[0],
                        .softmax_scale = args.softmax_scale,
                        .q_scale = args.q_scale,
                        .out_scale = args.out_scale,
                        .out = args.out.data,
                        .out_dtype = problem.out_dtype,
                        .out_row_stride = args.out.strides[0],
                        .out_head_stride = args.out.strides[1],
                        .lse = problem.lse && !problem.dcp ? static_cast<float*>(args.lse.data) : nullptr,
                        .lse_row_stride = args.lse.strides[0],
                        .lse_head_stride = args.lse.strides[1],
                        .lse_base = problem.lse_base,
                        .mailbox = nullptr,
                        .plan = &plan,
                        .workspace = static_cast<std::byte*>(args.workspace.data),
                        .state = static_cast<std::byte*>(args.state.data)};
    for (std::size_t i = 0; i < problem.sources.size(); ++i) params.sources[i] = check_source(plan, args, i);
    if (problem.from_ids)
        params.indices =
            detail::check_indices(args.indices, params.sources[0].cache, args.rows, params.sources[0].width);
    else
        check_no_indices(args.indices);
    check_memory(args.workspace, plan.workspace_bytes, "workspace");
    check_memory(args.state, plan.state_bytes, "state");
    check_memory_apart(plan, args);
    if (args.validate && problem.device.kind != Device::Kind::cpu)
        refuse("validate", "false on a GPU: it reads the lists on the host", "true");
    if (args.validate)
        for (std::size_t i = problem.from_ids ? 1 : 0; i < problem.sources.size(); ++i) check_lists(params, i);
    return params;
}

const detail::Kernel& kernel_of(const Plan& plan) {
    if (plan.kernel == nullptr) refuse("plan", "a plan made by make_plan", "an empty plan");
    return *plan.kernel;
}

}  // namespace

void prepare(const Plan& plan, Memory state, Stream stream) {
    const detail::Kernel& kernel = kernel_of(plan);
    check_memory(state, plan.state_bytes, "state");
    kernel.prepare(plan, state, stream);
}

void decode(const Plan& plan, const DecodeArgs& args, Stream stream) {
    const detail::Kernel& kernel = kernel_of(plan);
    if (args.rows < 0 || args.rows > plan.problem.rows)
        refuse("rows", "0 .. " + std::to_string(plan.problem.rows) + ", the plan's capacity",
               std::to_string(args.rows));
    if (args.rows == 0 || plan.problem.heads == 0) return;
    DecodeParams params = check_call(plan, args);
    const bool converts = plan.problem.from_ids && kernel.device == Device::Kind::cpu;
    if (!plan.problem.dcp) {
        if (converts) detail::convert_to_workspace(params);
        return kernel.decode(params, stream);
    }
    const detail::MailboxView mailbox = detail::check_mailbox(plan, args);
    params.mailbox = &mailbox;
    if (converts) detail::convert_to_workspace(params);
    plan.fuses_exchange ? kernel.decode(params, stream) : detail::decode_between_calls(kernel, params, stream);
}

}  // namespace sparsemla
