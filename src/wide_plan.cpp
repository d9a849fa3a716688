// decode_wide's plans: layouts, what they are expected to take, refusals.
#include "wide_layout.h"

#include <algorithm>
#include <array>
#include <limits>

#include "balanced_plan.h"
#include "gpu.h"
#include "gpu_plan.h"
#include "kernels.h"

namespace sparsemla::detail {

namespace {

using latency::max_splits;

constexpr std::array<int, 1> head_tiles = {wide::heads};
constexpr std::string_view measured_gpu = "NVIDIA H200";  ///< DeviceSpec::name

/// The first one is the default: where all is BF16, P as one number, as that is faster.
PFormats formats_of(const Problem& problem) {
    if (wide::is_f16(form_of(problem))) return {PFormat::f16};
    return {PFormat::bf16, PFormat::f16};
}

struct Layout {
    int splits = 1;
    int stages = 1;
};

int most_stages(const Problem& problem, const DeviceSpec& device) {
    int stages = wide::max_stages;
    while (stages >= wide::min_stages &&
           wide::shared_layout(form_of(problem), stages).bytes > static_cast<std::size_t>(device.shared_memory_bytes))
        --stages;
    return stages;
}

/// Of a CTA for a chunk.
double chunk_us(const Problem& problem, const PlanOptions& options) {
    const PFormat format = options.p_format.value_or(formats_of(problem).front());
    const double second_part = format == PFormat::f16 && !wide::is_f16(form_of(problem)) ? 0.33 : 0.0;
    switch (form_of(problem)) {
        case StageForm::codes_576: return 2.75;
        case StageForm::codes_512: return 2.5;
        case StageForm::groups_576: return 3.12;
        case StageForm::groups_512: return 2.8;
        case StageForm::blocks_rope: return 3.38 + second_part;
        case StageForm::blocks_512: return 3.85 + second_part;
        case StageForm::blocks_576: return 4.6 + second_part;
        case StageForm::wide_576: return 3.6 + second_part;
    }
    return 0;
}

/// Microseconds that a layout is expected to take for full rows of so many chunks: fitted to what an H200 took
/// (docs/performance.md, "decode_wide").
double expected_us(const Problem& problem, const DeviceSpec& device, const PlanOptions& options, int splits,
                   std::int64_t chunks) {
    const double ends_us = stage_layout(form_of(problem)).is_plain() ? 7.5 : 8.0;
    constexpr double share_us = 8.4, cut_us = 4.8;         // CTAs that have several pieces; to hand sums over
    constexpr double merge_us = 4.4, busy_merge_us = 3.6;  // more, times the square of the share of busy SMs
    const std::int64_t ctas = balanced_ctas(problem, device, wide::heads, splits);
    const std::int64_t tiles = tiles_of_rows(problem, wide::heads);
    const std::int64_t longest = (chunks + splits - 1) / splits;
    const bool one_each = tiles * splits == ctas;
    const std::int64_t of_cta = one_each ? longest : std::max((tiles * chunks + ctas - 1) / ctas, longest);
    const double busy = static_cast<double>(ctas) / std::max(device.sms, 1);
    double us = ends_us + static_cast<double>(of_cta) * chunk_us(problem, options);
    if (!one_each) us += share_us + (of_cta % longest == 0 ? 0 : cut_us);
    if (splits > 1)
        us += (merge_us + busy * busy * busy_merge_us) * static_cast<double>((tiles * splits + ctas - 1) / ctas);
    return us;
}

struct Choice {
    Layout layout;
    double us = std::numeric_limits<double>::infinity();
};

Choice choose_layout(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    Choice choice;
    const std::int64_t chunks = usual_chunks(problem, options);
    const auto most_splits = static_cast<int>(std::min<std::int64_t>(chunks, max_splits));
    choice.layout.stages = options.stages.value_or(most_stages(problem, device));
    for (int splits = options.splits.value_or(1); splits <= options.splits.value_or(most_splits); ++splits) {
        const double us = expected_us(problem, device, options, splits, chunks);
        if (us >= choice.us) continue;
        choice.us = us;
        choice.layout.splits = splits;
    }
    return choice;
}

std::optional<std::string> refuse(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    if (auto reason = refuse_on_gpu(problem, device, options, formats_of(problem), head_tiles, wide::max_stages))
        return reason;
    if (auto reason = refuse_token_ids(problem)) return reason;
    const int stages = most_stages(problem, device);
    if (stages < wide::min_stages)
        return must_be(
            "shared memory of the device",
            "at least " + std::to_string(wide::shared_layout(form_of(problem), wide::min_stages).bytes) + " bytes",
            std::to_string(device.shared_memory_bytes));
    if (auto reason = refuse_range("stages", options.stages, wide::min_stages, stages)) return reason;
    if (options.cluster_tiles.value_or(1) != 1)
        return must_be("cluster_tiles", "1: it has no clusters", std::to_string(*options.cluster_tiles));
    if (options.transport.value_or(Transport::stores) != Transport::stores)
        return must_be("transport", name(Transport::stores), name(*options.transport));
    if (options.gather.value_or(Gather::copies) != Gather::copies)
        return must_be("gather", name(Gather::copies), name(*options.gather));
    return refuse_chunks(problem, wide::heads);
}

KernelPlan plan(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    const Choice choice = choose_layout(problem, device, options);
    const int splits = choice.layout.splits;
    const int ctas = balanced_ctas(problem, device, wide::heads, splits);
    const auto tiles = static_cast<std::size_t>(tiles_of_rows(problem, wide::heads));
    KernelPlan result;
    result.schedule = gpu_schedule(wide_kernel, problem, options, formats_of(problem), splits);
    result.tiling = Tiling{.heads = wide::heads,
                           .stages = choice.layout.stages,
                           .gather = Gather::copies,
                           .transport = Transport::stores,
                           .trigger = options.trigger.value_or(Trigger::loaded)};
    result.workspace_bytes = balanced::workspace_layout(wide::heads, splits, tiles, ctas).bytes;
    result.state_bytes = balanced::state_bytes(tiles, ctas);
    result.expected_us = choice.us;
    if (device.name != measured_gpu)
        result.note = "expected as on " + std::string(measured_gpu) + ": not measured on this GPU";
    return result;
}

void prepare(const Plan& plan, Memory state, Stream stream) { prepare_wide(plan, state, stream); }

}  // namespace

const Kernel wide_kernel = {.name = "decode_wide",
                            .device = Device::Kind::cuda,
                            .summary = "one launch for many heads, 64 at a time over the same records",
                            .on_request_only = false,
                            .refuse = refuse,
                            .plan = plan,
                            .prepare = prepare,
                            .decode = launch_wide};

}  // namespace sparsemla::detail
