// Records and query heads as float32, with SIMD: what the decode kernel reads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparsemla/records.h"

namespace sparsemla::detail {

/// Dequantises the records of `n` slots, all held by the cache, into rows of `tile`, `tile_stride` floats apart: values
/// without k_scale, each one rounding of the exact product of code and group scale.
void dequantise_records(const CacheView& cache, const std::int64_t* slots, int n, float* tile,
                        std::int64_t tile_stride);

/// `count` (a multiple of 16) unscaled values. Exact.
void dequantise_values(ValueEncoding encoding, const std::byte* bytes, int count, float* values);

}  // namespace sparsemla::detail
