#include "cpu/decode_layout.h"

#include <algorithm>

#include "cpu/decode_steps.h"

namespace sparsemla::detail {

namespace {

// A call stays below 64 MiB whatever the problem and the machine: fewer threads or fewer rows at a time.
constexpr std::int64_t thread_budget_bytes = std::int64_t{20} << 20;
constexpr std::int64_t row_budget_bytes = std::int64_t{32} << 20;

/// Tasks for each thread, so that an uneven share costs little.
constexpr std::int64_t tasks_per_thread = 4;

constexpr std::int64_t line_floats = 16;

constexpr std::int64_t max_head_groups = head_groups(max_heads);

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Gives out consecutive arrays, each on a line of its own.
class Arrays {
   public:
    std::int64_t add(std::int64_t floats) {
        const std::int64_t offset = size_;
        size_ += ceil_div(floats, line_floats) * line_floats;
        return offset;
    }
    std::int64_t size() const { return size_; }

   private:
    std::int64_t size_ = 0;
};

void lay_out_thread(DecodeLayout& layout) {
    const std::int64_t lanes = std::int64_t{layout.tile_groups} * head_group;
    Arrays arrays;
    layout.thread.keys = arrays.add(std::int64_t{layout.key_capacity} * tile_stride);
    layout.thread.dots = arrays.add(lanes * layout.key_capacity);
    layout.thread.keep_factor = arrays.add(lanes);
    layout.thread.chunk_factor = arrays.add(lanes);
    layout.thread.row_max = arrays.add(lanes);
    layout.thread.size = arrays.size();
}

void lay_out_row(DecodeLayout& layout, const Problem& problem, const Schedule& schedule) {
    const std::int64_t lanes = std::int64_t{layout.groups} * head_group;
    Arrays split;
    layout.split.num_keys = split.add(line_floats);
    layout.split.row_max = split.add(lanes);
    layout.split.max = split.add(lanes);
    layout.split.sum = split.add(lanes);
    layout.split.sums = split.add(problem.heads * value_dims);
    layout.split.size = split.size();
    Arrays row;
    layout.row.query = row.add(lanes * d_qk(problem));
    layout.row.splits = row.add(schedule.splits * layout.split.size);
    layout.row.size = row.size();
}

}  // namespace

DecodeLayout decode_layout(const Problem& problem, const Schedule& schedule, int threads) {
    DecodeLayout layout;
    layout.groups = head_groups(problem.heads);
    // Every head tile dequantises the records anew: cut heads only where rows and splits leave threads idle.
    const std::int64_t splits = std::max<std::int64_t>(1, problem.rows) * schedule.splits;
    const std::int64_t wanted = ceil_div(tasks_per_thread * threads, splits);
    layout.tile_groups =
        static_cast<int>(ceil_div(layout.groups, std::clamp<std::int64_t>(wanted, 1, max_head_groups)));
    layout.head_tiles = layout.groups == 0 ? 0 : static_cast<int>(ceil_div(layout.groups, layout.tile_groups));
    layout.key_capacity = schedule.chunk + key_padding;
    lay_out_thread(layout);
    lay_out_row(layout, problem, schedule);

    const auto fitting = [](std::int64_t budget_bytes, std::int64_t floats) {
        return std::max<std::int64_t>(1, budget_bytes / (floats * static_cast<std::int64_t>(sizeof(float))));
    };
    layout.threads =
        static_cast<int>(std::min<std::int64_t>(threads, fitting(thread_budget_bytes, layout.thread.size)));
    layout.wave_rows = std::clamp<std::int64_t>(problem.rows, 1, fitting(row_budget_bytes, layout.row.size));
    layout.rows_offset = layout.threads * layout.thread.size;
    const std::int64_t floats = layout.rows_offset + layout.wave_rows * layout.row.size;
    layout.workspace_bytes = static_cast<std::size_t>(floats) * sizeof(float);
    return layout;
}

}  // namespace sparsemla::detail
