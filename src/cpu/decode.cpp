// The fast CPU kernel. Phases of a wave of rows, each a parallel loop:
//   transpose   query of a row -> tiles of 16 heads, one head a lane
//   maxima      (anchor row_max only) scores of a (row, split, head tile) -> maximum
//   splits      (row, split, head tile): chunk by chunk gather, dequantise, dots, weights, values -> partial
//   merge       partials of a (row, head group) -> out, lse
// A head's arithmetic and its order come from the schedule alone: not from threads, tiles, waves or batchmates.
#include <algorithm>
#include <cmath>
#include <string>

#include "check.h"
#include "cpu/decode_columns.h"
#include "cpu/decode_layout.h"
#include "cpu/decode_steps.h"
#include "cpu/dequantise.h"
#include "cpu/parallel.h"
#include "kernels.h"

namespace sparsemla::detail {

namespace {

constexpr float default_p_scale(PFormat format) {
    switch (format) {
        case PFormat::e4m3: return 448.0F;
        case PFormat::f16: return 32768.0F;  // the largest power of two: small weights stay normal
        case PFormat::bf16:
        case PFormat::f64: break;
    }
    return 1.0F;
}

constexpr float largest_p_scale(PFormat format) { return format == PFormat::e4m3 ? 448.0F : 32768.0F; }
constexpr float smallest_p_scale = 0x1p-16F;

/// One split for each 256 columns: short rows are not cut to pieces, long ones keep eight cores busy.
int default_splits(const Problem& problem) {
    std::int64_t width = 0;
    for (const SourceProblem& source : problem.sources) width += source.width;
    return static_cast<int>(std::clamp<std::int64_t>((width + 255) / 256, 1, 8));
}

std::optional<std::string> refuse(const Problem&, const DeviceSpec&, const PlanOptions& options) {
    const PFormat format = options.p_format.value_or(PFormat::f16);
    if (format == PFormat::f64) return "p_format must be e4m3, f16 or bf16, got f64";
    const float p_scale = options.p_scale.value_or(default_p_scale(format));
    if (!(p_scale >= smallest_p_scale && p_scale <= largest_p_scale(format)))
        return "p_scale must be 2^-16 .. " + std::to_string(static_cast<int>(largest_p_scale(format))) + " with " +
               std::string(name(format)) + ", got " + to_text(p_scale);
    const int splits = options.splits.value_or(1);
    if (splits < 1 || splits > max_splits)
        return "splits must be 1 .. " + std::to_string(max_splits) + ", got " + std::to_string(splits);
    const int chunk = options.chunk.value_or(1);
    if (chunk < 1 || chunk > max_chunk)
        return "chunk must be 1 .. " + std::to_string(max_chunk) + ", got " + std::to_string(chunk);
    return std::nullopt;
}

KernelPlan plan(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    const PFormat format = options.p_format.value_or(PFormat::f16);
    KernelPlan result;
    result.schedule = {.kernel = std::string(cpu_kernel.name),
                       .p_format = format,
                       .p_scale = options.p_scale.value_or(default_p_scale(format)),
                       .anchor = options.anchor.value_or(Anchor::split_running_max),
                       .splits = options.splits.value_or(default_splits(problem)),
                       .columns = options.columns.value_or(ColumnRule::blocks),
                       .chunk = options.chunk.value_or(64),
                       .row_capacity = problem.rows};
    result.workspace_bytes = decode_layout(problem, result.schedule, device.threads).workspace_bytes;
    return result;
}

/// The call's scales as the steps use them. The larger k_scale stays out of the weights, so that they keep the range of
/// P however small or large it is, and joins the output's factor.
struct Factors {
    std::array<float, 2> score{};
    std::array<float, 2> weight{};
    double value_scale = 1.0;
};

Factors factors_of(const DecodeParams& params) {
    constexpr double log2_e = 1.4426950408889634;
    Factors factors;
    double k_scale[2] = {};
    for (int i = 0; i < params.num_sources; ++i) k_scale[i] = value_of(params.sources[i].k_scale);
    const double largest = params.num_sources == 2 ? std::max(k_scale[0], k_scale[1]) : k_scale[0];
    // A scale read through a pointer may be anything; what it does to the result is the formula's business.
    if (largest > 0 && std::isfinite(largest)) factors.value_scale = largest;
    for (std::size_t i = 0; i < 2; ++i) {
        factors.score[i] = static_cast<float>(params.softmax_scale * log2_e * value_of(params.q_scale) * k_scale[i]);
        factors.weight[i] = static_cast<float>(k_scale[i] / factors.value_scale / params.plan->schedule.p_scale);
    }
    return factors;
}

/// One call: what all tasks share.
class Call {
   public:
    explicit Call(const DecodeParams& params)
        : params_(params),
          schedule_(params.plan->schedule),
          layout_(decode_layout(params.plan->problem, schedule_, params.plan->device.threads)),
          factors_(factors_of(params)),
          floats_(reinterpret_cast<float*>(params.workspace)),
          team_(layout_.threads) {}

    void run() {
        team_.run([&] {
            for (std::int64_t row = 0; row < params_.rows; row += layout_.wave_rows)
                run_wave(row, std::min(layout_.wave_rows, params_.rows - row));
        });
    }

   private:
    struct Task {
        std::int64_t row;       ///< of the call
        std::int64_t wave_row;  ///< the row's place in the wave
        int split;
        int head_tile;
        int thread;
    };

    void run_wave(std::int64_t first_row, std::int64_t rows) {
        team_.for_each(rows * layout_.groups, [&](std::int64_t i, int) {
            const auto group = static_cast<int>(i % layout_.groups);
            const std::int64_t wave_row = i / layout_.groups;
            transpose_query(params_, first_row + wave_row, group, 1, query(wave_row, group));
        });
        const std::int64_t tasks_of_row = std::int64_t{schedule_.splits} * layout_.head_tiles;
        const auto task_of = [&](std::int64_t i, int thread) {
            return Task{first_row + i / tasks_of_row, i / tasks_of_row,
                        static_cast<int>(i % tasks_of_row / layout_.head_tiles),
                        static_cast<int>(i % layout_.head_tiles), thread};
        };
        if (schedule_.anchor == Anchor::row_max)
            team_.for_each(rows * tasks_of_row, [&](std::int64_t i, int thread) { find_maxima(task_of(i, thread)); });
        team_.for_each(rows * tasks_of_row, [&](std::int64_t i, int thread) { run_split(task_of(i, thread)); });
        team_.for_each(rows * layout_.groups, [&](std::int64_t i, int) {
            merge(first_row + i / layout_.groups, i / layout_.groups, static_cast<int>(i % layout_.groups));
        });
    }

    /// visit(chunk, dots in place as WeightsArgs) for every chunk of the task that has a key; returns the keys.
    template <class Visit>
    std::int64_t for_each_chunk(const Task& task, float* max, float* sum, const Visit& visit) {
        const RowColumns columns = row_columns(params_, task.row);
        float* scratch = floats_ + task.thread * layout_.thread.size;
        std::int64_t keys = 0;
        for_each_chunk_of(params_, columns, task.split, [&](const ColumnRange& range) {
            const ChunkSlots chunk = chunk_slots(params_, task.row, columns, range);
            if (chunk.num_keys == 0) return;
            dequantise_chunk(chunk, scratch + layout_.thread.keys);
            dot_products({.query = query(task.wave_row, first_group(task)),
                          .keys = scratch + layout_.thread.keys,
                          .dots = scratch + layout_.thread.dots,
                          .heads = heads_of(task),
                          .num_keys = chunk.num_keys,
                          .key_capacity = layout_.key_capacity,
                          .d_qk = static_cast<int>(params_.d_qk)});
            visit(WeightsArgs{.dots = scratch + layout_.thread.dots,
                              .heads = heads_of(task),
                              .num_keys = chunk.num_keys,
                              .key_capacity = layout_.key_capacity,
                              .first_source_keys = chunk.first_source_keys,
                              .score_factor = factors_.score,
                              .weight_factor = factors_.weight,
                              .schedule = &schedule_,
                              .first_chunk = keys == 0,
                              .row_max = scratch + layout_.thread.row_max,
                              .max = max,
                              .sum = sum,
                              .keep_factor = scratch + layout_.thread.keep_factor,
                              .chunk_factor = scratch + layout_.thread.chunk_factor});
            keys += chunk.num_keys;
        });
        return keys;
    }

    void dequantise_chunk(const ChunkSlots& chunk, float* tile) const {
        const int first = chunk.first_source_keys;
        const std::int64_t* slots = chunk.slots.data();
        dequantise_records(params_.sources[0].cache, slots, first, tile, tile_stride);
        dequantise_records(params_.sources[1].cache, slots + first, chunk.num_keys - first,
                           tile + std::int64_t{first} * tile_stride, tile_stride);
    }

    void find_maxima(const Task& task) {
        float* split = split_at(task.wave_row, task.split);
        float* max = split + layout_.split.row_max + first_group(task) * head_group;
        const std::int64_t keys =
            for_each_chunk(task, max, nullptr, [](const WeightsArgs& args) { score_maxima(args); });
        if (task.head_tile == 0) num_keys(task.wave_row, task.split) = keys;
    }

    void run_split(const Task& task) {
        float* split = split_at(task.wave_row, task.split);
        const std::int64_t first_head = std::int64_t{first_group(task)} * head_group;
        const float* scratch = floats_ + task.thread * layout_.thread.size;
        if (schedule_.anchor == Anchor::row_max) join_maxima(task);
        const auto visit = [&](const WeightsArgs& args) {
            softmax_weights(args);
            weighted_values({.weights = args.dots,
                             .values = scratch + layout_.thread.keys,
                             .sums = split + layout_.split.sums + first_head * value_dims,
                             .heads = args.heads,
                             .num_keys = args.num_keys,
                             .key_capacity = args.key_capacity,
                             .first_chunk = args.first_chunk,
                             .keep_factor = args.keep_factor,
                             .chunk_factor = schedule_.anchor == Anchor::chunk_max ? args.chunk_factor : nullptr});
        };
        const std::int64_t keys =
            for_each_chunk(task, split + layout_.split.max + first_head, split + layout_.split.sum + first_head, visit);
        if (task.head_tile == 0 && schedule_.anchor != Anchor::row_max) num_keys(task.wave_row, task.split) = keys;
    }

    /// The row's maximum of the task's heads, into the thread's scratch.
    void join_maxima(const Task& task) {
        float* joined = floats_ + task.thread * layout_.thread.size + layout_.thread.row_max;
        bool first = true;
        for (int split = 0; split < schedule_.splits; ++split) {
            if (num_keys(task.wave_row, split) == 0) continue;
            const float* max = split_at(task.wave_row, split) + layout_.split.row_max + first_group(task) * head_group;
            for (int head = 0; head < heads_of(task); ++head)
                joined[head] = first ? max[head] : std::max(joined[head], max[head]);
            first = false;
        }
    }

    void merge(std::int64_t row, std::int64_t wave_row, int group) {
        std::array<SplitPartial, max_splits> splits;
        for (int i = 0; i < schedule_.splits; ++i) {
            const float* split = split_at(wave_row, i);
            splits[static_cast<std::size_t>(i)] = {.num_keys = num_keys(wave_row, i),
                                                   .sums = split + layout_.split.sums,
                                                   .max = split + layout_.split.max,
                                                   .sum = split + layout_.split.sum};
        }
        const std::int64_t first_head = std::int64_t{group} * head_group;
        merge_row({.params = &params_,
                   .row = row,
                   .first_head = first_head,
                   .end_head = std::min(first_head + head_group, params_.heads),
                   .splits = splits.data(),
                   .num_splits = schedule_.splits,
                   .value_scale = factors_.value_scale});
    }

    int first_group(const Task& task) const { return task.head_tile * layout_.tile_groups; }
    int heads_of(const Task& task) const {
        const std::int64_t first = std::int64_t{first_group(task)} * head_group;
        return static_cast<int>(std::min<std::int64_t>(params_.heads - first, layout_.tile_groups * head_group));
    }
    float* row_at(std::int64_t wave_row) const { return floats_ + layout_.rows_offset + wave_row * layout_.row.size; }
    float* query(std::int64_t wave_row, int group) const {
        return row_at(wave_row) + layout_.row.query + group * params_.d_qk * head_group;
    }
    float* split_at(std::int64_t wave_row, int split) const {
        return row_at(wave_row) + layout_.row.splits + split * layout_.split.size;
    }
    std::int64_t& num_keys(std::int64_t wave_row, int split) const {
        return *reinterpret_cast<std::int64_t*>(split_at(wave_row, split) + layout_.split.num_keys);
    }

    const DecodeParams& params_;
    const Schedule& schedule_;
    const DecodeLayout layout_;
    const Factors factors_;
    float* const floats_;
    ThreadTeam team_;
};

void prepare(const Plan&, Memory, Stream) {}

void run(const DecodeParams& params, Stream) {
    if (params.rows == 0 || params.heads == 0) return;
    Call(params).run();
}

}  // namespace

const Kernel cpu_kernel = {.name = "cpu",
                           .device = Device::Kind::cpu,
                           .summary = "fast, SIMD and threads",
                           .on_request_only = false,
                           .refuse = refuse,
                           .plan = plan,
                           .prepare = prepare,
                           .decode = run};

}  // namespace sparsemla::detail
