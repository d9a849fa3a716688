// Which columns of a row are active, and which slots they name: shared by the CPU kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace sparsemla::detail {

/// How many leading columns of the row's list are active: clamp(counts[row] - count_offset, 0, width) in 64 bits.
inline std::int64_t active_columns(const SourceParams& source, std::int64_t row) {
    if (source.counts == nullptr) return source.width;
    const std::int64_t count = source.counts[row * source.counts_stride];
    return std::clamp<std::int64_t>(count - source.count_offset, 0, source.width);
}

/// The slot that a column names, or -1 where it names none: negative, past the cache, or in a gap between pages.
inline std::int64_t slot_of(const SourceParams& source, std::int64_t row, std::int64_t column) {
    const std::int64_t slot = source.slots[row * source.slots_row_stride + column];
    return source.cache.holds(slot) ? slot : -1;
}

/// The factor's value: read through the pointer where there is one.
inline float value_of(const Scale& scale) { return scale.pointer != nullptr ? *scale.pointer : scale.value; }

}  // namespace sparsemla::detail
