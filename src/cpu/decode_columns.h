// The active columns of a row in the order of its sources, and the share of a split in them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "cpu/gather.h"
#include "kernels.h"

namespace sparsemla::detail {

inline constexpr int max_chunk = 256;

/// The n active columns of a row are numbered 0 .. n - 1: those of source 0, then those of source 1.
struct RowColumns {
    std::array<std::int64_t, 2> active{};
    std::int64_t total() const { return active[0] + active[1]; }
};

inline RowColumns row_columns(const DecodeParams& params, std::int64_t row) {
    RowColumns columns;
    for (int i = 0; i < params.num_sources; ++i) columns.active[i] = active_columns(params.sources[i], row);
    return columns;
}

/// Active columns first, first + step, ... of a row: `count` of them.
struct ColumnRange {
    std::int64_t first = 0;
    std::int64_t step = 1;
    std::int64_t count = 0;
};

/// The split's columns by a rule that divides the active ones.
inline ColumnRange split_columns(const Schedule& schedule, std::int64_t total, int split) {
    const std::int64_t splits = schedule.splits;
    if (schedule.columns == ColumnRule::interleaved)
        return {split, splits, std::max<std::int64_t>(0, (total - split + splits - 1) / splits)};
    const std::int64_t chunks = ((total + splits - 1) / splits + schedule.chunk - 1) / schedule.chunk;
    const std::int64_t block = chunks * schedule.chunk;
    const std::int64_t first = std::min(split * block, total);
    return {first, 1, std::min(block, total - first)};
}

/// visit(range) for every chunk of a split that ColumnRule::round_robin gives an active column. Within a source, active
/// columns are the leading ones, so that list columns keep their distance; the numbers of chunks come from the widths.
template <class Visit>
void for_each_round_robin_chunk(const DecodeParams& params, const RowColumns& columns, int split, const Visit& visit) {
    const std::int64_t chunk = params.plan->schedule.chunk;
    const std::int64_t splits = params.plan->schedule.splits;
    std::int64_t earlier_chunks = 0;
    std::int64_t earlier_columns = 0;
    for (int i = 0; i < params.num_sources; ++i) {
        const std::int64_t active = columns.active[i];
        const std::int64_t first_chunk = (split + splits - earlier_chunks % splits) % splits;
        for (std::int64_t begin = first_chunk * chunk; begin < active; begin += splits * chunk)
            visit(ColumnRange{earlier_columns + begin, 1, std::min(chunk, active - begin)});
        earlier_chunks += (params.sources[i].width + chunk - 1) / chunk;
        earlier_columns += active;
    }
}

/// visit(range) for every chunk of a split that has an active column, in the schedule's order.
template <class Visit>
void for_each_chunk_of(const DecodeParams& params, const RowColumns& columns, int split, const Visit& visit) {
    const Schedule& schedule = params.plan->schedule;
    if (schedule.columns == ColumnRule::round_robin) {
        for_each_round_robin_chunk(params, columns, split, visit);
        return;
    }
    const ColumnRange range = split_columns(schedule, columns.total(), split);
    for (std::int64_t i = 0; i < range.count; i += schedule.chunk)
        visit(ColumnRange{range.first + i * range.step, range.step,
                          std::min<std::int64_t>(schedule.chunk, range.count - i)});
}

/// The slots that a chunk's columns name, absent ones left out: what is left out contributes nothing to any sum.
struct ChunkSlots {
    int num_keys = 0;
    int first_source_keys = 0;  ///< the leading slots, which are of source 0
    std::array<std::int64_t, max_chunk> slots;
};

inline ChunkSlots chunk_slots(const DecodeParams& params, std::int64_t row, const RowColumns& columns,
                              const ColumnRange& range) {
    ChunkSlots chunk;
    for (std::int64_t i = 0; i < range.count; ++i) {
        const std::int64_t position = range.first + i * range.step;
        const int source = position < columns.active[0] ? 0 : 1;
        const std::int64_t column = source == 0 ? position : position - columns.active[0];
        const std::int64_t slot = slot_of(params.sources[source], row, column);
        if (slot < 0) continue;
        chunk.slots[static_cast<std::size_t>(chunk.num_keys++)] = slot;
        if (source == 0) chunk.first_source_keys = chunk.num_keys;
    }
    return chunk;
}

}  // namespace sparsemla::detail
