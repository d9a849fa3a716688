// What the host hands to conversion on a GPU, alone or within decode_latency: plain data, passed by value.
#pragma once

#include <cstdint>

#include "cuda/divider.h"
#include "kernels.h"

namespace sparsemla::detail {

/// Where token ids come from and what this rank's slots are; ConvertParams without its outputs.
struct ConvertView {
    const std::int32_t* ids;  ///< [rows][ids_row_stride]; null: nothing is to be converted
    const std::int32_t* table;
    const std::int32_t* request_of_row;
    const std::int32_t* lengths;  ///< null: no limit
    std::int64_t ids_row_stride, table_row_stride, request_stride, lengths_stride;
    std::int32_t width, requests, max_pages, pages;  ///< those of the table at most 2^31 - 1
    std::int32_t world, rank, interleave, page_size, slots_per_page;
    Divider by_world, by_interleave, by_page_size;
};

ConvertView convert_view(const ConvertParams& call);

}  // namespace sparsemla::detail
