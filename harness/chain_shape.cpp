// The size of a decode step: its problem, bytes and operations.
#include "harness/decode_timer.h"

namespace sparsemla::harness {

Problem ChainShape::problem(Device device) const {
    Problem problem;
    problem.rows = rows;
    problem.heads = heads;
    for (const ChainSource& source : sources)
        problem.sources.push_back({.record = source.record,
                                   .form = layout_of(source.record).default_form(),
                                   .split_rope = false,
                                   .width = source.width});
    problem.query_dtype = query_dtype;
    problem.from_ids = conversion == Conversion::within;
    problem.sinks = sinks;
    problem.device = device;
    return problem;
}

std::int64_t ChainShape::active_columns() const {
    std::int64_t columns = 0;
    for (const ChainSource& source : sources) columns += source.active;
    return columns;
}

std::int64_t ChainShape::total_columns(const ChainSource& source) const {
    std::int64_t columns = 0;
    for (std::int64_t row = 0; row < rows; ++row) columns += source.count(row);
    return columns;
}

double ChainShape::record_bytes() const {
    std::int64_t bytes = 0;
    for (const ChainSource& source : sources) bytes += total_columns(source) * layout_of(source.record).record_bytes;
    return static_cast<double>(bytes);
}

double ChainShape::operations() const {
    std::int64_t products = 0;
    for (const ChainSource& source : sources)
        products += heads * total_columns(source) * (layout_of(source.record).d_qk() + value_dims);
    return 2 * static_cast<double>(products);
}

}  // namespace sparsemla::harness
