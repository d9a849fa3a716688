#include "kernels.h"

namespace sparsemla::detail {

namespace {

constexpr std::int64_t unlimited = std::int64_t{1} << 31;  // above every id

/// The length of a row's request over all ranks; 0 where the row names none.
std::int64_t length_of(const ConvertParams& params, std::int64_t request) {
    if (request < 0 || request >= params.requests) return 0;
    return params.lengths == nullptr ? unlimited : params.lengths[request * params.lengths_stride];
}

/// The slot of a token of the request, or -1 where this rank holds none.
std::int64_t slot_of(const ConvertParams& params, std::int64_t request, std::int64_t token) {
    const auto& [world, rank, interleave] = params.sharding;
    if (owner_of(token, world, interleave) != rank) return -1;
    const std::int64_t local = local_of(token, world, interleave);
    const std::int64_t page = local / params.page_size;
    if (page >= params.max_pages) return -1;
    const std::int64_t block = params.block_table[request * params.table_row_stride + page];
    if (block < 0 || block >= params.pages) return -1;
    return block * params.slots_per_page + local % params.page_size;
}

/// Compacts the slots of one row to its front; returns how many there are. Addresses are formed only where an element
/// exists: tensors without any may have a null pointer and meaningless strides.
std::int64_t convert_row(const ConvertParams& params, std::int64_t row) {
    const std::int64_t request = params.request_of_row[row * params.request_stride];
    const std::int64_t length = length_of(params, request);
    std::int64_t kept = 0;
    for (std::int64_t column = 0; column < params.width; ++column) {
        const std::int64_t token = params.token_ids[row * params.ids_row_stride + column];
        if (token < 0 || token >= length) continue;
        const std::int64_t slot = slot_of(params, request, token);
        if (slot >= 0) params.slots[row * params.slots_row_stride + kept++] = static_cast<std::int32_t>(slot);
    }
    for (std::int64_t column = kept; column < params.width; ++column)
        params.slots[row * params.slots_row_stride + column] = -1;
    return kept;
}

}  // namespace

void convert_indices_cpu(const ConvertParams& params) {
    for (std::int64_t row = 0; row < params.rows; ++row)
        params.counts[row * params.counts_stride] = static_cast<std::int32_t>(convert_row(params, row));
}

}  // namespace sparsemla::detail
