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
struct SplitColumns {
    std::int64_t first = 0;
    std::int64_t step = 1;
    std::int64_t count = 0;
};

inline SplitColumns split_columns(const Schedule& schedule, std::int64_t total, int split) {
    const std::int64_t splits = schedule.splits;
    if (schedule.columns == ColumnRule::interleaved)
        return {split, splits, std::max<std::int64_t>(0, (total - split + splits - 1) / splits)};
    const std::int64_t chunks = ((total + splits - 1) / splits + schedule.chunk - 1) / schedule.chunk;
    const std::int64_t block = chunks * schedule.chunk;
    const std::int64_t first = std::min(split * block, total);
    return {first, 1, std::min(block, total - first)};
}

/// The slots that a chunk's columns name, absent ones left out: what is left out contributes nothing to any sum.
struct ChunkSlots {
    int num_keys = 0;
    int first_source_keys = 0;  ///< the leading slots, which are of source 0
    std::array<std::int64_t, max_chunk> slots;
};

inline ChunkSlots chunk_slots(const DecodeParams& params, std::int64_t row, const RowColumns& columns,
                              const SplitColumns& split, std::int64_t begin) {
    ChunkSlots chunk;
    const std::int64_t end = std::min<std::int64_t>(begin + params.plan->schedule.chunk, split.count);
    for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t position = split.first + i * split.step;
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
