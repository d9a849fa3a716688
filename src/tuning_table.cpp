#include "tuning_table.h"

#include <algorithm>
#include <iterator>

#include "stage_layout.h"

namespace sparsemla::detail {

namespace {

constexpr TuningRow rows[] = {
#include "tuning_table.inc"
    {}  // none of them: an array has an element
};

bool covers(const TuningRow& row, const TuningKey& key) {
    return stage_form(row.record) == stage_form(key.record) && row.sources == key.sources && row.rows >= key.rows &&
           row.heads >= key.heads && row.chunks >= key.chunks;
}

/// What "smallest" means where the grid has holes: the least work.
std::int64_t size_of(const TuningRow& row) { return row.rows * row.heads * row.chunks; }

}  // namespace

std::span<const TuningRow> tuning_table() { return {rows, std::size(rows) - 1}; }

bool differ_in_rows(const TuningRow& a, const TuningRow& b) {
    return a.gpu == b.gpu && a.record == b.record && a.sources == b.sources && a.heads == b.heads &&
           a.chunks == b.chunks;
}

const TuningRow* find_tuning(std::span<const TuningRow> table, const TuningKey& key) {
    const bool known = std::ranges::find(table, key.gpu, &TuningRow::gpu) != table.end();
    const TuningRow* best = nullptr;
    for (const TuningRow& row : table)
        if ((!known || row.gpu == key.gpu) && covers(row, key) && (best == nullptr || size_of(row) < size_of(*best)))
            best = &row;
    return best;
}

}  // namespace sparsemla::detail
