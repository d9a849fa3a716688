#include "balanced_plan.h"

#include <algorithm>
#include <array>
#include <limits>

#include "gpu.h"
#include "gpu_plan.h"
#include "kernels.h"
#include "wide_layout.h"

namespace sparsemla::detail {

namespace {

using namespace balanced;
using latency::head_tiles;
using latency::max_splits;
using latency::max_stages;

/// Of a batch: their numbers stay in 32 bits.
constexpr std::int64_t max_chunks = std::int64_t{1} << 30;

constexpr std::string_view measured_gpu = "NVIDIA H200";  ///< DeviceSpec::name

struct Layout {
    int splits = 1;
    int heads = head_tiles[0];
    int stages = max_stages;
    Gather gather = Gather::bulk;
};

bool fits_shared_memory(const Problem& problem, const DeviceSpec& device, const Layout& layout) {
    return shared_layout(layout.heads, form_of(problem), layout.stages).bytes <=
           static_cast<std::size_t>(device.shared_memory_bytes);
}

std::optional<std::string> refuse_layout(const Problem& problem, const DeviceSpec& device, const Layout& layout) {
    if (!fits_shared_memory(problem, device, layout))
        return must_be(
            "tile_heads and stages",
            "such that a CTA needs at most " + std::to_string(device.shared_memory_bytes) + " bytes of shared memory",
            std::to_string(layout.heads) + " and " + std::to_string(layout.stages));
    if (layout.splits > max_splits_of(layout.stages))
        return must_be("splits",
                       "1 .. " + std::to_string(max_splits_of(layout.stages)) + " with " +
                           std::to_string(layout.stages) + " stages",
                       std::to_string(layout.splits));
    return refuse_chunks(problem, layout.heads);
}

/// Microseconds that a layout is expected to take for full rows of so many chunks: fitted to what an H200 took
/// (docs/performance.md, "decode_balanced").
double expected_us(const Problem& problem, const DeviceSpec& device, const Layout& layout, std::int64_t chunks) {
    struct Cost {
        int heads;
        double ends_us;       ///< all that is not counted below
        double chunk_us;      ///< of a CTA alone
        double busy_us;       ///< more, times the share of SMs that have a CTA
        double one_merge_us;  ///< where a CTA has one of several splits, and
        double merge_us;      ///< of each where it may have more
    };
    constexpr std::array<Cost, 2> costs = {{{16, 3.6, 1.38, 0.35, 3.0, 4.9}, {32, 4.2, 1.8, 0.0, 4.2, 6.7}}};
    constexpr double share_us = 0.9, cut_us = 3.0;  // to find the CTA's chunks; to hand sums over
    constexpr double piece_us = 3.3;                // to go on to another split
    constexpr double merge_of_split_us = 0.12;
    const Cost& cost = *std::ranges::find(costs, layout.heads, &Cost::heads);
    const std::int64_t ctas = balanced_ctas(problem, device, layout.heads, layout.splits);
    const std::int64_t tiles = tiles_of_rows(problem, layout.heads);
    const std::int64_t longest = (chunks + layout.splits - 1) / layout.splits;
    const bool one_each = tiles * layout.splits == ctas;
    const std::int64_t of_cta = one_each ? longest : std::max((tiles * chunks + ctas - 1) / ctas, longest);
    const double busy = static_cast<double>(ctas) / std::max(device.sms, 1);
    double us =
        cost.ends_us + static_cast<double>(of_cta) * (cost.chunk_us + busy * cost.busy_us) * chunk_factor(problem);
    if (!one_each) us += share_us + piece_us * static_cast<double>(std::max<std::int64_t>(of_cta / longest - 1, 0));
    if (layout.splits == 1) return one_each || of_cta % longest == 0 ? us : us + cut_us;
    if (one_each) return us + cost.one_merge_us + merge_of_split_us * layout.splits;
    return us + cost.merge_us * static_cast<double>((tiles * layout.splits + ctas - 1) / ctas);
}

struct Choice {
    std::optional<Layout> layout;
    double us = std::numeric_limits<double>::infinity();
    std::string refusal;  ///< of the first layout, if none can be launched
};

Choice choose_layout(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    Choice choice;
    const std::int64_t chunks = usual_chunks(problem, options);
    const auto most_splits = static_cast<int>(std::min<std::int64_t>(chunks, max_splits));
    for (const int heads : head_tiles) {
        if (options.tile_heads.value_or(heads) != heads) continue;
        for (int splits = options.splits.value_or(1); splits <= options.splits.value_or(most_splits); ++splits) {
            Layout layout = {.splits = splits, .heads = heads, .gather = options.gather.value_or(Gather::bulk)};
            layout.stages = options.stages.value_or(max_stages);
            while (!options.stages && layout.stages > 1 && !fits_shared_memory(problem, device, layout))
                --layout.stages;
            if (const auto refusal = refuse_layout(problem, device, layout)) {
                if (choice.refusal.empty()) choice.refusal = *refusal;
                continue;
            }
            const double us = expected_us(problem, device, layout, chunks);
            if (us >= choice.us) continue;
            choice.us = us;
            choice.layout = layout;
        }
    }
    return choice;
}

std::optional<std::string> refuse(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    if (auto reason = refuse_on_gpu(problem, device, options, p_formats_of(problem), head_tiles, max_stages))
        return reason;
    if (auto reason = refuse_token_ids(problem)) return reason;
    if (options.cluster_tiles.value_or(1) != 1)
        return must_be("cluster_tiles", "1: it has no clusters", std::to_string(*options.cluster_tiles));
    if (options.transport.value_or(Transport::stores) != Transport::stores)
        return must_be("transport", name(Transport::stores), name(*options.transport));
    const Choice choice = choose_layout(problem, device, options);
    return choice.layout ? std::nullopt : std::optional(choice.refusal);
}

KernelPlan plan(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    const Choice choice = choose_layout(problem, device, options);
    const Layout& layout = *choice.layout;
    const int ctas = balanced_ctas(problem, device, layout.heads, layout.splits);
    const auto tiles = static_cast<std::size_t>(tiles_of_rows(problem, layout.heads));
    KernelPlan result;
    result.schedule = gpu_schedule(balanced_kernel, problem, options, p_formats_of(problem), layout.splits);
    result.tiling = Tiling{.heads = layout.heads,
                           .stages = layout.stages,
                           .gather = layout.gather,
                           .transport = Transport::stores,
                           .trigger = options.trigger.value_or(Trigger::loaded)};
    result.workspace_bytes = workspace_layout(layout.heads, layout.splits, tiles, ctas).bytes;
    result.state_bytes = state_bytes(tiles, ctas);
    result.expected_us = choice.us;
    if (device.name != measured_gpu)
        result.note = "expected as on " + std::string(measured_gpu) + ": not measured on this GPU";
    return result;
}

void prepare(const Plan& plan, Memory state, Stream stream) { prepare_balanced(plan, state, stream); }

}  // namespace

bool shares_chunks_out(const Plan& plan) { return plan.kernel == &balanced_kernel || plan.kernel == &wide_kernel; }

std::int64_t tiles_of_rows(const Problem& problem, int heads) { return problem.rows * tiles_of(problem, heads); }

int balanced_ctas(const Problem& problem, const DeviceSpec& device, int heads, int splits) {
    return static_cast<int>(
        std::clamp<std::int64_t>(tiles_of_rows(problem, heads) * splits, 1, std::max(device.sms, 1)));
}

std::optional<std::string> refuse_token_ids(const Problem& problem) {
    if (!problem.from_ids) return std::nullopt;
    return must_be("from_ids", "false: it takes slots, which convert_indices makes of token ids", "true");
}

std::optional<std::string> refuse_chunks(const Problem& problem, int heads) {
    const std::int64_t chunks = std::max<std::int64_t>(1, chunks_of(problem)) * tiles_of(problem, heads);
    if (problem.rows <= max_chunks / chunks) return std::nullopt;
    return must_be("rows", "0 .. " + std::to_string(max_chunks / chunks) + " with these widths and heads",
                   std::to_string(problem.rows));
}

BalancedShape balanced_shape(const Plan& plan) {
    const int heads = plan.tiling->heads;
    const int ctas = balanced_ctas(plan.problem, plan.device, heads, plan.schedule.splits);
    return {.ctas = ctas,
            .tiles = tiles_of(plan.problem, heads),
            .one_split_each = tiles_of_rows(plan.problem, heads) * plan.schedule.splits == ctas,
            .shared_bytes = plan.kernel == &wide_kernel
                                ? wide::shared_layout(form_of(plan.problem), plan.tiling->stages).bytes
                                : shared_layout(heads, form_of(plan.problem), plan.tiling->stages).bytes};
}

WorkspaceLayout balanced_workspace(const Plan& plan) {
    const int heads = plan.tiling->heads;
    return workspace_layout(heads, plan.schedule.splits, static_cast<std::size_t>(tiles_of_rows(plan.problem, heads)),
                            balanced_shape(plan).ctas);
}

std::size_t balanced_state_bytes(const Plan& plan) {
    const int heads = plan.tiling->heads;
    return state_bytes(static_cast<std::size_t>(tiles_of_rows(plan.problem, heads)), balanced_shape(plan).ctas);
}

const Kernel balanced_kernel = {.name = "decode_balanced",
                                .device = Device::Kind::cuda,
                                .summary = "one launch for many rows, whose chunks all SMs share out evenly",
                                .on_request_only = false,
                                .refuse = refuse,
                                .plan = plan,
                                .prepare = prepare,
                                .decode = launch_balanced};

}  // namespace sparsemla::detail
