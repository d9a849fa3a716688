// What the GPU kernels have in common when they plan: what they refuse, and what they read from a problem.
#include "gpu_plan.h"

#include <algorithm>
#include <limits>

#include "check.h"
#include "gpu.h"
#include "latency_layout.h"

namespace sparsemla::detail {

namespace {

using namespace latency;

/// Columns and chunk numbers stay in 32 bits, a few clusters past the end of the lists too.
constexpr std::int64_t max_width = std::numeric_limits<std::int32_t>::max() - 2 * max_splits * chunk_keys;
constexpr float smallest_p_scale = 0x1p-16F;

constexpr float largest_p_scale(PFormat format) { return format == PFormat::e4m3 ? 448.0F : 32768.0F; }

float p_scale_of(PFormat format, const PlanOptions& options) {
    return options.p_scale.value_or(format == PFormat::bf16 ? 1.0F : largest_p_scale(format));
}

std::optional<std::string> refuse_device(const DeviceSpec& device) {
    if (!gpu_built()) return "this build has no CUDA part";
    if (device.capability != 90)
        return must_be("compute capability", "9.0: it is built of wgmma, which no other has",
                       std::to_string(device.capability / 10) + "." + std::to_string(device.capability % 10));
    return std::nullopt;
}

std::optional<std::string> refuse_sources(const Problem& problem) {
    for (std::size_t i = 0; i < problem.sources.size(); ++i) {
        const SourceProblem& source = problem.sources[i];
        const std::string argument = "sources[" + std::to_string(i) + "].";
        if (stage_form(source.record) != form_of(problem))
            return must_be(argument + "record",
                           "the record of source 0 (fp8_v41 and nvfp4_v41 may stand beside each other)",
                           to_string(source.record));
        if (source.width > max_width)
            return must_be(argument + "width", "0 .. " + std::to_string(max_width), std::to_string(source.width));
    }
    return std::nullopt;
}

std::optional<std::string> refuse_schedule(const Problem& problem, const PlanOptions& options,
                                           const PFormats& formats) {
    const PFormat format = options.p_format.value_or(formats.front());
    if (std::ranges::find(formats, format) == formats.end()) {
        std::string allowed(name(formats.front()));
        for (std::size_t i = 1; i < formats.size(); ++i) allowed += " or " + std::string(name(formats[i]));
        return must_be("p_format", allowed + " with " + to_string(problem.sources[0].record), name(format));
    }
    const float p_scale = p_scale_of(format, options);
    if (!(p_scale >= smallest_p_scale && p_scale <= largest_p_scale(format)))
        return must_be("p_scale",
                       "2^-16 .. " + std::to_string(static_cast<int>(largest_p_scale(format))) + " with " +
                           std::string(name(format)),
                       to_text(p_scale));
    if (options.anchor.value_or(Anchor::split_running_max) != Anchor::split_running_max)
        return must_be("anchor", name(Anchor::split_running_max), name(*options.anchor));
    if (options.columns.value_or(ColumnRule::round_robin) != ColumnRule::round_robin)
        return must_be("columns", name(ColumnRule::round_robin), name(*options.columns));
    if (options.chunk.value_or(chunk_keys) != chunk_keys)
        return must_be("chunk", std::to_string(chunk_keys), std::to_string(*options.chunk));
    return std::nullopt;
}

}  // namespace

std::string must_be(std::string_view what, std::string_view allowed, std::string_view received) {
    return std::string(what) + " must be " + std::string(allowed) + ", got " + std::string(received);
}

std::optional<std::string> refuse_range(std::string_view what, std::optional<int> value, int low, int high) {
    if (!value || (*value >= low && *value <= high)) return std::nullopt;
    return must_be(what, std::to_string(low) + " .. " + std::to_string(high), std::to_string(*value));
}

StageForm form_of(const Problem& problem) { return stage_form(problem.sources[0].record); }

double chunk_factor(const Problem& problem) {
    switch (form_of(problem)) {
        case StageForm::codes_576:
        case StageForm::codes_512: return problem.query_dtype == DType::bf16 ? 1.1 : 1;
        case StageForm::groups_576:
        case StageForm::groups_512: return 1.55;
        case StageForm::blocks_rope: return 1.95;
        case StageForm::blocks_512:
        case StageForm::wide_576: return 1.7;
        case StageForm::blocks_576: return 2.3;
    }
    return 1;
}

int tiles_of(const Problem& problem, int heads) {
    return static_cast<int>(std::max<std::int64_t>(1, (problem.heads + heads - 1) / heads));
}

std::int64_t chunks_of(std::int64_t columns) { return (columns + chunk_keys - 1) / chunk_keys; }

std::int64_t chunks_of(const Problem& problem) {
    std::int64_t sum = 0;
    for (const SourceProblem& source : problem.sources) sum += chunks_of(source.width);
    return sum;
}

std::int64_t usual_chunks(const Problem& problem, const PlanOptions& options) {
    const std::int64_t all = std::max<std::int64_t>(1, chunks_of(problem));
    if (!options.usual_columns || *options.usual_columns >= all * chunk_keys) return all;
    return std::max<std::int64_t>(1, chunks_of(*options.usual_columns));
}

PFormats p_formats_of(const Problem& problem) {
    const StageLayout stage = stage_layout(form_of(problem));
    if (stage.codes == 0) return {PFormat::bf16};
    // Scales of groups are multiplied into P: E4M3 would be rounded twice.
    if (stage.has_groups()) return {PFormat::f16};
    return {PFormat::f16, PFormat::e4m3};
}

std::optional<std::string> refuse_on_gpu(const Problem& problem, const DeviceSpec& device, const PlanOptions& options,
                                         const PFormats& formats, std::span<const int> tiles_of_heads,
                                         int most_stages) {
    if (auto reason = refuse_device(device)) return reason;
    if (auto reason = refuse_sources(problem)) return reason;
    if (auto reason = refuse_schedule(problem, options, formats)) return reason;
    if (auto reason = refuse_range("splits", options.splits, 1, max_splits)) return reason;
    if (auto reason = refuse_range("stages", options.stages, 1, most_stages)) return reason;
    if (options.usual_columns && *options.usual_columns < 1)
        return must_be("usual_columns", "at least 1", std::to_string(*options.usual_columns));
    if (options.tile_heads && std::ranges::find(tiles_of_heads, *options.tile_heads) == tiles_of_heads.end()) {
        std::string allowed = std::to_string(tiles_of_heads.front());
        for (const int heads : tiles_of_heads.subspan(1)) allowed += " or " + std::to_string(heads);
        return must_be("tile_heads", allowed, std::to_string(*options.tile_heads));
    }
    return std::nullopt;
}

Schedule gpu_schedule(const Kernel& kernel, const Problem& problem, const PlanOptions& options, const PFormats& formats,
                      int splits) {
    const PFormat format = options.p_format.value_or(formats.front());
    return {.kernel = std::string(kernel.name),
            .p_format = format,
            .p_scale = p_scale_of(format, options),
            .anchor = Anchor::split_running_max,
            .splits = splits,
            .columns = ColumnRule::round_robin,
            .chunk = chunk_keys,
            .row_capacity = problem.rows};
}

}  // namespace sparsemla::detail
