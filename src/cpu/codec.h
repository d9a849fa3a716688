// Bytes of one record to numbers: what pack, unpack and the kernels share.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "sparsemla/formats.h"
#include "sparsemla/records.h"

namespace sparsemla::detail {

static_assert(std::endian::native == std::endian::little, "records are little-endian and are read in place");

template <class T>
T load(const std::byte* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof(T));
    return value;
}

template <class T>
void store(std::byte* bytes, T value) {
    std::memcpy(bytes, &value, sizeof(T));
}

/// The scale of a group as a float32, exact: NaN codes, signs and subnormals included.
inline float scale_of_group(const RecordLayout& layout, const std::byte* scales, int group) {
    const std::byte* at = scales + layout.scale_index(group) * layout.scale_size();
    switch (layout.scale_encoding) {
        case ScaleEncoding::none: break;
        case ScaleEncoding::f32: return load<float>(at);
        case ScaleEncoding::ue8m0: return ue8m0_to_float(load<std::uint8_t>(at));
        case ScaleEncoding::e4m3: return e4m3_to_float(load<std::uint8_t>(at));
    }
    return 1.0F;
}

/// The record of a slot that the cache holds, as [d_qk] float64 without k_scale. Exact.
void dequantise(const CacheView& cache, std::int64_t slot, double* values);

}  // namespace sparsemla::detail
