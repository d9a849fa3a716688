#include "latency_plan.h"

#include <algorithm>
#include <array>
#include <limits>

#include "check.h"
#include "gpu.h"
#include "gpu_plan.h"
#include "kernels.h"
#include "latency_layout.h"
#include "tuning_table.h"

namespace sparsemla::detail {

namespace {

using namespace latency;

constexpr std::int64_t max_grid_x = std::numeric_limits<std::int32_t>::max();
/// Splits and tiling of one plan.
struct Layout {
    int splits = 1;
    int heads = head_tiles[0];
    int stages = 1;
    int cluster_tiles = 1;
    Transport transport = Transport::stores;
};

SharedLayout shared_of(const Problem& problem, const Layout& layout) {
    return shared_layout({.heads = layout.heads,
                          .form = form_of(problem),
                          .splits = layout.splits,
                          .stages = layout.stages,
                          .exchanges_weights = layout.transport == Transport::weights,
                          .converted_columns = problem.from_ids ? problem.sources[0].width : 0});
}

bool fits_shared_memory(const Problem& problem, const DeviceSpec& device, const Layout& layout) {
    return shared_of(problem, layout).bytes <= static_cast<std::size_t>(device.shared_memory_bytes);
}

/// Transport::bulk: the partial sums, staged where the records were.
bool fits_stages(const Problem& problem, const Layout& layout) {
    const auto room = static_cast<std::size_t>(stage_bytes(form_of(problem)) * layout.stages);
    return std::size_t{units} * layout.heads / 8 * quad_bytes <= room;
}

/// A kernel for each number of splits that exchanges P; two sources from token ids, or of a rank of dcp, have none,
/// being few (decode_latency_from_ids.cu, decode_latency_dcp.cu).
bool may_exchange_weights(const Problem& problem, int splits) {
    return can_exchange_weights(splits) && !((problem.from_ids || problem.dcp) && problem.sources.size() > 1);
}

/// Weights where a usual row can exchange them.
Layout with_transport(Layout layout, const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    if (options.transport) {
        layout.transport = *options.transport;
        return layout;
    }
    layout.transport = Transport::weights;
    if (!stage_layout(form_of(problem)).is_plain() || !may_exchange_weights(problem, layout.splits) ||
        usual_chunks(problem, options) > layout.splits || !fits_shared_memory(problem, device, layout))
        layout.transport = Transport::stores;
    return layout;
}

/// 0 where the device has no cluster of that size.
std::int64_t resident_clusters(const DeviceSpec& device, const Layout& layout) {
    const auto ctas = static_cast<std::size_t>(layout.splits * layout.cluster_tiles);
    return ctas > device.resident_clusters.size() ? 0 : device.resident_clusters[ctas - 1];
}

int clusters_of_row(const Problem& problem, const Layout& layout) {
    return (tiles_of(problem, layout.heads) + layout.cluster_tiles - 1) / layout.cluster_tiles;
}

std::int64_t waves_of(const Problem& problem, const DeviceSpec& device, const Layout& layout) {
    const std::int64_t clusters = problem.rows * clusters_of_row(problem, layout);
    const std::int64_t resident = resident_clusters(device, layout);
    return std::max<std::int64_t>(1, (clusters + resident - 1) / resident);
}

/// The kernels of a rank of dcp (decode_latency_dcp.cu).
bool may_have_32_heads(const Problem& problem) {
    if (!problem.dcp || problem.from_ids) return true;
    return stage_layout(form_of(problem)).is_plain() && problem.query_dtype == DType::f8_e4m3;
}

/// Why a layout cannot be launched, or nothing.
std::optional<std::string> refuse_layout(const Problem& problem, const DeviceSpec& device, const Layout& layout) {
    if (resident_clusters(device, layout) < 1)
        return must_be("splits * cluster_tiles", "a cluster size that the device can hold",
                       std::to_string(layout.splits * layout.cluster_tiles));
    if (layout.heads > head_tiles[0] && !may_have_32_heads(problem))
        return must_be("tile_heads", "16 of dcp, but with flat fp8 records and an E4M3 query",
                       std::to_string(layout.heads));
    if (!stage_layout(form_of(problem)).is_plain() && layout.transport == Transport::weights)
        return must_be("transport", "stores or bulk with records of scales or BF16 values", "weights");
    if (!stage_layout(form_of(problem)).is_plain() && layout.cluster_tiles > 1)
        return must_be("cluster_tiles", "1 with records of scales or BF16 values",
                       std::to_string(layout.cluster_tiles));
    if (layout.transport == Transport::weights && !can_exchange_weights(layout.splits))
        return must_be("splits", "2, 4 or 8 with transport weights", std::to_string(layout.splits));
    if (layout.transport == Transport::weights && !may_exchange_weights(problem, layout.splits))
        return must_be("transport", "stores or bulk with two sources from token ids or of dcp", "weights");
    if (layout.transport == Transport::bulk && !fits_stages(problem, layout))
        return must_be("transport", "stores where the partial sums do not fit the stages (tile_heads / 16 <= stages)",
                       "bulk");
    if (!fits_shared_memory(problem, device, layout))
        return must_be(
            problem.from_ids ? "tile_heads, stages and the width of token ids" : "tile_heads and stages",
            "such that a CTA needs at most " + std::to_string(device.shared_memory_bytes) + " bytes of shared memory",
            std::to_string(layout.heads) + " and " + std::to_string(layout.stages) +
                (problem.from_ids ? " and " + std::to_string(problem.sources[0].width) : "") + ", which need " +
                std::to_string(shared_of(problem, layout).bytes));
    if (problem.rows > max_grid_x / layout.splits)
        return must_be(
            "rows",
            "0 .. " + std::to_string(max_grid_x / layout.splits) + " with " + std::to_string(layout.splits) + " splits",
            std::to_string(problem.rows));
    return std::nullopt;
}

/// Microseconds that a layout is expected to take for rows of so many chunks: rounded from what an H200 took
/// (docs/performance.md). Compared with what decode_balanced expects, too.
double expected_us(const Problem& problem, const DeviceSpec& device, const Layout& layout, std::int64_t chunks) {
    struct Cost {
        int heads;
        double first_chunk_us, next_chunk_us, outputs_us, weights_us;
    };
    constexpr std::array<Cost, 2> costs = {{{16, 3.4, 1.5, 1.9, 0.6}, {32, 4.3, 1.75, 2.7, 1.0}}};
    const Cost& cost = *std::ranges::find(costs, layout.heads, &Cost::heads);
    const double factor = chunk_factor(problem);
    double us = (cost.first_chunk_us + static_cast<double>((chunks - 1) / layout.splits) * cost.next_chunk_us) * factor;
    if (layout.splits > 1 && chunks > 1)
        us += layout.transport == Transport::weights && chunks <= layout.splits ? cost.weights_us : cost.outputs_us;
    // Where SMs are left over, the next kernel begins on them while this one runs.
    constexpr double set_up_us = 0.6;
    const std::int64_t ctas = problem.rows * clusters_of_row(problem, layout) * layout.cluster_tiles * layout.splits;
    if (2 * ctas > device.sms) us += set_up_us;
    return us * static_cast<double>(waves_of(problem, device, layout));
}

/// The layouts that fit the wishes, smallest tile first; visit(layout).
template <class Visit>
void for_each_layout(const Problem& problem, const PlanOptions& options, const Visit& visit) {
    const auto most_splits = static_cast<int>(std::min<std::int64_t>(usual_chunks(problem, options), max_splits));
    for (const int heads : head_tiles) {
        if (options.tile_heads.value_or(heads) != heads) continue;
        for (int splits = options.splits.value_or(1); splits <= options.splits.value_or(most_splits); ++splits) {
            const int stages = options.stages.value_or(chunks_of(problem) > splits ? 2 : 1);
            for (int fewer = stages; fewer >= (options.stages ? stages : 1); --fewer)
                visit(Layout{.splits = splits,
                             .heads = heads,
                             .stages = fewer,
                             .cluster_tiles = options.cluster_tiles.value_or(1)});
        }
    }
}

struct Choice {
    std::optional<Layout> layout;
    double us = 0;                        ///< expected or measured
    const TuningRow* measured = nullptr;  ///< where the layout comes from, if not from the expectation
    std::string refusal;                  ///< of the first layout, if none can be launched

    std::optional<std::string> refused() const { return layout ? std::nullopt : std::optional(refusal); }
};

/// A measured layout for a problem that may be smaller: no CTA of a cluster without a chunk, no stage without one.
Layout fitted(const TuningRow& row, const Problem& problem) {
    const std::int64_t chunks = std::max<std::int64_t>(1, chunks_of(problem));
    const auto splits = static_cast<int>(std::min<std::int64_t>(row.splits, chunks));
    const std::int64_t chunks_of_cta = (chunks + splits - 1) / splits;
    // Rows may have more columns than usual, and than were measured.
    const int stages = chunks > row.chunks ? std::max(row.stages, 2) : row.stages;
    return {.splits = splits,
            .heads = row.tile_heads,
            .stages = static_cast<int>(std::min<std::int64_t>(stages, chunks_of_cta)),
            .cluster_tiles = stage_layout(form_of(problem)).is_plain()
                                 ? std::min(row.cluster_tiles, tiles_of(problem, row.tile_heads))
                                 : 1};
}

/// The layout of a row of the table for this problem, where it can be launched.
std::optional<Choice> choice_of(const TuningRow& row, const Problem& problem, const DeviceSpec& device,
                                const PlanOptions& options) {
    // Rows may have been measured by a kernel of other tiles.
    if (std::ranges::find(head_tiles, row.tile_heads) == std::end(head_tiles)) return std::nullopt;
    const Layout layout = with_transport(fitted(row, problem), problem, device, options);
    if (layout.splits > max_splits || layout.stages > max_stages || refuse_layout(problem, device, layout))
        return std::nullopt;
    // What another GPU ran at once may be more than this one can.
    if (row.gpu != device.name && waves_of(problem, device, layout) > 1) return std::nullopt;
    // Records without scales are swept with E4M3 queries.
    const double factor = stage_layout(form_of(problem)).is_plain() ? chunk_factor(problem) : 1.0;
    return Choice{.layout = layout, .us = row.us * factor, .measured = &row, .refusal = {}};
}

/// The same for a row of fewer rows than the problem has, where as many clusters at a time are enough for all of them:
/// then it takes hardly longer.
std::optional<Choice> choice_of_fewer(const TuningRow& row, const Problem& problem, const DeviceSpec& device,
                                      const PlanOptions& options) {
    auto choice = choice_of(row, problem, device, options);
    if (!choice) return std::nullopt;
    Problem measured = problem;
    measured.rows = row.rows;
    if (waves_of(problem, device, *choice->layout) > waves_of(measured, device, *choice->layout)) return std::nullopt;
    choice->us *= 0.5 + 0.5 * static_cast<double>(problem.rows) / static_cast<double>(row.rows);
    return choice;
}

/// The measured layout of the problem's size, where the caller leaves all of it to the plan and it can be launched.
std::optional<Choice> measured_layout(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    if (options.splits || options.tile_heads || options.stages || options.cluster_tiles || options.gather)
        return std::nullopt;
    const TuningRow* covering = find_tuning(tuning_table(), {.gpu = device.name,
                                                             .record = problem.sources[0].record,
                                                             .sources = static_cast<int>(problem.sources.size()),
                                                             .rows = problem.rows,
                                                             .heads = problem.heads,
                                                             .chunks = usual_chunks(problem, options)});
    if (covering == nullptr) return std::nullopt;
    std::optional<Choice> best = choice_of(*covering, problem, device, options);
    if (covering->rows == problem.rows) return best;
    for (const TuningRow& row : tuning_table()) {
        if (row.rows >= problem.rows || !differ_in_rows(row, *covering)) continue;
        const auto choice = choice_of_fewer(row, problem, device, options);
        if (choice && (!best || choice->us < best->us)) best = choice;
    }
    return best;
}

std::string measured_note(const TuningRow& row, const DeviceSpec& device) {
    if (row.gpu == device.name) return "measured on " + std::string(row.gpu);
    return "nearest rows are of " + std::string(row.gpu) + ": not measured on this GPU";
}

Choice choose_layout(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    if (auto measured = measured_layout(problem, device, options)) return *measured;
    Choice choice;
    double best_us = std::numeric_limits<double>::infinity();
    for_each_layout(problem, options, [&](const Layout& shape) {
        const Layout layout = with_transport(shape, problem, device, options);
        if (const auto refusal = refuse_layout(problem, device, layout)) {
            if (choice.refusal.empty()) choice.refusal = *refusal;
            return;
        }
        const double us = expected_us(problem, device, layout, usual_chunks(problem, options));
        if (us >= best_us) return;
        best_us = us;
        choice.us = us;
        choice.layout = layout;
    });
    return choice;
}

std::optional<std::string> refuse(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    if (auto reason = refuse_on_gpu(problem, device, options, p_formats_of(problem), head_tiles, max_stages))
        return reason;
    if (auto reason = refuse_range("cluster_tiles", options.cluster_tiles, 1, max_heads / head_tiles[0])) return reason;
    if (options.cluster_tiles.value_or(1) > 1 && options.gather.value_or(Gather::bulk) != Gather::bulk)
        return must_be("gather", "bulk with cluster_tiles above 1", name(*options.gather));
    return choose_layout(problem, device, options).refused();
}

KernelPlan plan(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    const Choice choice = choose_layout(problem, device, options);
    const Layout layout = *choice.layout;
    KernelPlan result;
    result.schedule = gpu_schedule(latency_kernel, problem, options, p_formats_of(problem), layout.splits);
    result.tiling =
        Tiling{.heads = layout.heads,
               .stages = layout.stages,
               .cluster_tiles = layout.cluster_tiles,
               .gather = choice.measured != nullptr
                             ? choice.measured->gather
                             : options.gather.value_or(layout.cluster_tiles > 1 ? Gather::bulk : Gather::copies),
               .transport = layout.transport,
               .trigger = options.trigger.value_or(Trigger::loaded)};
    result.expected_us = choice.us;
    result.fuses_exchange = problem.dcp && !problem.from_ids;
    if (choice.measured != nullptr) result.note = measured_note(*choice.measured, device);
    const std::int64_t waves = waves_of(problem, device, layout);
    if (waves > 1)
        result.note += (result.note.empty() ? "" : "; ") +
                       std::string("more clusters than the device holds at once: ") + "they run in " +
                       std::to_string(waves) + " waves";
    return result;
}

Layout layout_of(const Plan& plan) {
    return {.splits = plan.schedule.splits,
            .heads = plan.tiling->heads,
            .stages = plan.tiling->stages,
            .cluster_tiles = plan.tiling->cluster_tiles,
            .transport = plan.tiling->transport};
}

void prepare(const Plan& plan, Memory, Stream) { prepare_latency(plan); }

}  // namespace

bool has_one_chunk(const Plan& plan) { return chunks_of(plan.problem) <= plan.schedule.splits; }

SharedLayout latency_memory(const Plan& plan) { return shared_of(plan.problem, layout_of(plan)); }

LaunchShape latency_launch(const Plan& plan, std::int64_t rows) {
    const Layout layout = layout_of(plan);
    return {.grid_x = rows * layout.splits,
            .grid_y = clusters_of_row(plan.problem, layout) * layout.cluster_tiles,
            .cluster = layout.splits,
            .cluster_tiles = layout.cluster_tiles,
            .threads = threads,
            .shared_bytes = shared_of(plan.problem, layout).bytes};
}

const Kernel latency_kernel = {.name = "decode_latency",
                               .device = Device::Kind::cuda,
                               .summary = "one launch for small batches, a cluster for each row and tile of heads",
                               .on_request_only = false,
                               .refuse = refuse,
                               .plan = plan,
                               .prepare = prepare,
                               .decode = launch_latency};

}  // namespace sparsemla::detail
