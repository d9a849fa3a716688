// Layouts of decode_latency that were measured to be the fastest of their problem. `sparsemla bench --sweep
// --write-table src/tuning_table.inc` writes the rows; a plan looks its problem up.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "sparsemla/decode.h"

namespace sparsemla::detail {

struct TuningRow {
    std::string_view gpu;             ///< DeviceSpec::name
    Record record = Record::fp8_576;  ///< of the first source
    int sources = 0;
    std::int64_t rows = 0;
    std::int64_t heads = 0;
    std::int64_t chunks = 0;  ///< of 64 columns, of the lists, over all sources
    int splits = 0;
    int tile_heads = 0;
    int stages = 0;
    int cluster_tiles = 1;
    Gather gather = Gather::copies;
    double us = 0;  ///< of a decode in a graph of dependent ones, lists full, records in the L2 where they fit
};

/// All rows of this build.
std::span<const TuningRow> tuning_table();

struct TuningKey {
    std::string_view gpu;
    Record record = Record::fp8_576;
    int sources = 0;
    std::int64_t rows = 0;
    std::int64_t heads = 0;
    std::int64_t chunks = 0;
};

/// The row of the smallest problem that is at least as large in rows, heads and chunks, of a record that has the same
/// form in a stage (stage_layout.h) and the same number of sources; null if there is none. Of this GPU, or, where the
/// table has none of its name at all, of another one.
const TuningRow* find_tuning(std::span<const TuningRow> table, const TuningKey& key);

/// Whether two rows are of problems that differ in their numbers of rows alone.
bool differ_in_rows(const TuningRow& a, const TuningRow& b);

}  // namespace sparsemla::detail
