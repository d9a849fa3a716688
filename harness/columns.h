// Which slots the rows of a generated step read: lists, counts, and everything a list may hold besides.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/generate.h"

namespace sparsemla::harness {

/// The slots list of one source.
struct SourceColumns {
    std::int64_t width = 0;
    std::vector<std::int32_t> slots;   ///< [rows, width]
    std::vector<std::int64_t> active;  ///< [rows]: how many leading columns count
    std::vector<std::int32_t> named;   ///< the slots of active columns, ascending, each once
};

struct ColumnLists {
    std::vector<SourceColumns> sources;
    /// Tensors of counts [rows]: none, one per source, or one for both sources of one list.
    std::vector<std::vector<std::int32_t>> counts;
};

/// Active columns name distinct random slots, with a few repeats; some are negative, in every third row a whole run of
/// leading ones. Columns past the count hold what must not be read: records that no active column names, slots in gaps
/// or out of range, negative numbers.
ColumnLists make_columns(const Recipe& recipe, const std::vector<CacheView>& caches);

}  // namespace sparsemla::harness
