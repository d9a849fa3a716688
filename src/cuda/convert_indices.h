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
    std::int32_t page_size, slots_per_page;
    /// Of every `turn` tokens the rank holds `interleave` from number `first` on. Where a turn has more tokens than an
    /// id can name, the quotient is 0; where the rank holds none of those, so is `interleave`.
    std::uint32_t turn, first, interleave;
    Divider by_turn, by_page_size;
};

ConvertView convert_view(const ConvertParams& call);

}  // namespace sparsemla::detail
