// From a problem to the kernel that runs it: what each kernel takes, and which one is chosen.
#include "sparsemla/decode.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "check.h"
#include "dcp_decode.h"
#include "indices_check.h"
#include "kernels.h"

namespace sparsemla {

namespace {

using detail::Kernel;

[[noreturn]] void refuse(std::string_view argument, const std::string& required, const std::string& received) {
    throw Error(ErrorKind::invalid_argument, std::string(argument), required, received);
}

/// The largest rows, heads or width for which every product of extents stays far inside 64 bits.
constexpr std::int64_t max_extent = (std::int64_t{1} << 31) - 1;

void check_range(std::string_view argument, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value < low || value > high)
        refuse(argument, std::to_string(low) + " .. " + std::to_string(high), std::to_string(value));
}

void check_source(const SourceProblem& source, std::size_t i) {
    const std::string argument = "sources[" + std::to_string(i) + "].";
    if (static_cast<std::size_t>(source.record) >= record_layouts.size())
        refuse(argument + "record", "a record of record_layouts", std::to_string(static_cast<int>(source.record)));
    const RecordLayout& layout = layout_of(source.record);
    if (source.form != RecordForm::planar && source.form != RecordForm::contiguous)
        refuse(argument + "form", "contiguous or planar", "number " + std::to_string(static_cast<int>(source.form)));
    if (source.form == RecordForm::planar ? !layout.has_planar : !layout.has_contiguous)
        refuse(argument + "form",
               source.form == RecordForm::planar ? "contiguous, the only form of " + to_string(source.record)
                                                 : "planar, the only form of " + to_string(source.record),
               source.form == RecordForm::planar ? "planar" : "contiguous");
    if (source.split_rope && !layout.may_split)
        refuse(argument + "split_rope", "false for record " + to_string(source.record), "true");
    check_range(argument + "width", source.width, 0, max_extent);
    check_range(argument + "count_offset", source.count_offset, 0, max_extent);
}

void check_problem(const Problem& problem) {
    check_range("rows", problem.rows, 0, max_extent);
    check_range("heads", problem.heads, 0, max_heads);
    if (problem.query_dtype != DType::f8_e4m3 && problem.query_dtype != DType::bf16)
        refuse("query_dtype", "f8_e4m3 or bf16", std::string(name(problem.query_dtype)));
    if (problem.out_dtype != DType::bf16 && problem.out_dtype != DType::f32)
        refuse("out_dtype", "bf16 or f32", std::string(name(problem.out_dtype)));
    if (problem.lse_base != LseBase::natural && problem.lse_base != LseBase::two)
        refuse("lse_base", "natural or two", "number " + std::to_string(static_cast<int>(problem.lse_base)));
    if (problem.sources.empty() || problem.sources.size() > 2)
        refuse("sources", "one or two sources", std::to_string(problem.sources.size()));
    for (std::size_t i = 0; i < problem.sources.size(); ++i) check_source(problem.sources[i], i);
    if (problem.dcp && problem.heads == 0) refuse("heads", "1 .. 128 of a dcp problem: all ranks' heads", "0");
    if (problem.dcp && problem.sinks) refuse("sinks", "false of a dcp problem: merge_pushed applies them", "true");
    if (problem.dcp && problem.out_dtype != DType::bf16)
        refuse("out_dtype", "bf16 of a dcp problem", std::string(name(problem.out_dtype)));
    constexpr std::int64_t most_ids = std::int64_t{1} << 56;
    if (problem.from_ids && problem.rows * (1 + problem.sources[0].width) > most_ids)
        refuse("rows", "rows * (1 + width) of at most 2^56 from token ids", std::to_string(problem.rows));
    if (problem.from_ids && problem.sources[0].count_offset != 0)
        refuse("sources[0].count_offset", "0 with token ids, whose converted counts start at column 0",
               std::to_string(problem.sources[0].count_offset));
    for (const SourceProblem& source : problem.sources)
        if (layout_of(source.record).d_qk() != d_qk(problem))
            refuse("sources[1].record", "a record of d_qk " + std::to_string(d_qk(problem)) + " as that of sources[0]",
                   to_string(source.record) + " of d_qk " + std::to_string(layout_of(source.record).d_qk()));
}

template <class Enum>
void check_known(std::string_view argument, const std::optional<Enum>& value) {
    if (value && name(*value) == "unknown")
        refuse(argument, "a value of its enumeration", "number " + std::to_string(static_cast<int>(*value)));
}

void check_options(const PlanOptions& options) {
    check_known("p_format", options.p_format);
    check_known("anchor", options.anchor);
    check_known("columns", options.columns);
    check_known("gather", options.gather);
    check_known("transport", options.transport);
    check_known("trigger", options.trigger);
}

const Kernel* find_kernel(std::string_view kernel_name) {
    for (const Kernel* kernel : detail::kernels())
        if (kernel->name == kernel_name) return kernel;
    throw Error(ErrorKind::invalid_argument, "kernel", "one of " + detail::join(kernel_names(), ", ", " or "),
                kernel_name);
}

/// The first given option that only a GPU kernel has, or "".
std::string_view tiling_option(const PlanOptions& options) {
    if (options.tile_heads) return "tile_heads";
    if (options.stages) return "stages";
    if (options.cluster_tiles) return "cluster_tiles";
    if (options.gather) return "gather";
    if (options.transport) return "transport";
    return options.trigger ? "trigger" : "";
}

/// Why this kernel cannot run the problem, or nothing.
std::optional<std::string> cannot_run(const Kernel& kernel, const Problem& problem, const DeviceSpec& device,
                                      const PlanOptions& options) {
    if (kernel.device != problem.device.kind)
        return std::string("runs on device ") + (kernel.device == Device::Kind::cpu ? "cpu" : "cuda:N") + ", not on " +
               to_string(problem.device);
    if (const std::string_view option = tiling_option(options); kernel.device == Device::Kind::cpu && !option.empty())
        return std::string(option) + " must not be given: only GPU kernels have it";
    return kernel.refuse(problem, device, options);
}

struct Choice {
    const Kernel* kernel = nullptr;
    detail::KernelPlan plan;
    std::vector<Refusal> declined;
};

std::string microseconds(double us) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%.1f us", us);
    return text.data();
}

/// Why a kernel is left for another one.
std::string left_for(const Kernel& better, double better_us, double us) {
    if (us <= 0 || better_us <= 0) return "takes the problem, but comes after " + std::string(better.name);
    return "takes the problem, but is expected to take " + microseconds(us) + ", " + std::string(better.name) + " " +
           microseconds(better_us);
}

/// The first kernel that takes the problem, unless a later one expects less time; one that expects nothing (0) neither
/// replaces another nor is replaced.
Choice choose(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    const Kernel* forced = options.kernel.empty() ? nullptr : find_kernel(options.kernel);
    Choice choice;
    const auto decline = [&](const Kernel& kernel, const std::string& reason) {
        choice.declined.push_back({std::string(kernel.name), reason});
    };
    for (const Kernel* kernel : detail::kernels()) {
        std::optional<std::string> reason = cannot_run(*kernel, problem, device, options);
        if (!reason && forced != nullptr && kernel != forced)
            reason = "takes the problem, but another kernel was named";
        if (!reason && forced == nullptr && kernel->on_request_only)
            reason = "takes the problem, but runs only when named (" + std::string(kernel->summary) + ")";
        if (reason) {
            decline(*kernel, *reason);
            continue;
        }
        detail::KernelPlan plan = kernel->plan(problem, device, options);
        if (choice.kernel != nullptr) {
            const double us = plan.expected_us, best_us = choice.plan.expected_us;
            if (us <= 0 || us >= best_us) {
                decline(*kernel, left_for(*choice.kernel, best_us, us));
                continue;
            }
            decline(*choice.kernel, left_for(*kernel, us, best_us));
        }
        choice.kernel = kernel;
        choice.plan = std::move(plan);
    }
    return choice;
}

std::string reason_of(const Choice& choice, const PlanOptions& options) {
    std::string reason = !options.kernel.empty()       ? "named by the caller: "
                         : choice.plan.expected_us > 0 ? "expected to be the fastest that takes it: "
                                                       : "first in the order of preference that takes it: ";
    reason += choice.kernel->summary;
    return choice.plan.note.empty() ? reason : reason + "; " + choice.plan.note;
}

/// "no kernel takes it: cpu: ...; reference: ..." or, for a forced kernel, its own reason.
std::string refusal_text(const Choice& choice, const PlanOptions& options) {
    std::vector<std::string> reasons;
    for (const Refusal& refusal : choice.declined)
        if (options.kernel.empty() || refusal.kernel == options.kernel)
            reasons.push_back(refusal.kernel + ": " + refusal.reason);
    return detail::join(reasons, "; ", "; ");
}

void check_device(const Problem& problem, const DeviceSpec& device) {
    if (!(problem.device == device.device))
        refuse("device", "the spec of the problem's device " + to_string(problem.device),
               "that of " + to_string(device.device));
    if (device.device.kind == Device::Kind::cpu) check_range("device.threads", device.threads, 1, 4096);
}

}  // namespace

std::int64_t d_qk(const Problem& problem) {
    return problem.sources.empty() ? 0 : layout_of(problem.sources.front().record).d_qk();
}

std::vector<std::string> kernel_names() {
    std::vector<std::string> names;
    for (const Kernel* kernel : detail::kernels()) names.emplace_back(kernel->name);
    return names;
}

std::span<const Kernel* const> detail::kernels() {
    static const Kernel* const all[] = {&latency_kernel, &balanced_kernel, &wide_kernel, &cpu_kernel,
                                        &reference_kernel};
    return all;
}

Plan make_plan(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    check_problem(problem);
    check_device(problem, device);
    check_options(options);
    Choice choice = choose(problem, device, options);
    if (choice.kernel == nullptr)
        throw Error(ErrorKind::unsupported, "problem", "one that a kernel of this build takes",
                    refusal_text(choice, options));
    std::string reason = reason_of(choice, options);
    if (problem.device.kind == Device::Kind::cpu) choice.plan.workspace_bytes += detail::converted_bytes(problem);
    if (!choice.plan.fuses_exchange) choice.plan.workspace_bytes += detail::exchange_bytes(problem);
    return {.problem = problem,
            .device = device,
            .schedule = std::move(choice.plan.schedule),
            .tiling = choice.plan.tiling,
            .expected_us = choice.plan.expected_us,
            .workspace_bytes = choice.plan.workspace_bytes,
            .state_bytes = choice.plan.state_bytes,
            .fuses_exchange = choice.plan.fuses_exchange,
            .reason = std::move(reason),
            .declined = std::move(choice.declined),
            .kernel = choice.kernel};
}

std::optional<std::string> refusal(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    try {
        make_plan(problem, device, options);
    } catch (const Error& error) {
        return error.what();
    }
    return std::nullopt;
}

}  // namespace sparsemla
