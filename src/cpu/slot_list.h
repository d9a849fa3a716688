// The arguments that pack and unpack have in common: a cache in CPU memory and a list of its slots.
#pragma once

#include <algorithm>
#include <cstdint>

#include "check.h"
#include "sparsemla/records.h"

namespace sparsemla::detail {

/// The widest record's d_qk.
inline constexpr int max_d_qk = [] {
    int widest = 0;
    for (const RecordLayout& layout : record_layouts) widest = std::max(widest, layout.d_qk());
    return widest;
}();

inline void check_cpu_cache(const CacheView& cache, std::string_view argument) {
    validate(cache, argument);
    if (cache.device.kind != Device::Kind::cpu)
        throw Error(ErrorKind::unsupported, std::string(argument) + ".device", "cpu", to_string(cache.device));
}

inline void check_slot_list(const ConstTensor& slots) {
    check_tensor(
        slots,
        {.argument = "slots", .dtypes = {DType::i32, DType::i64}, .shape = {Extent::any("n")}, .dense_last = false});
}

inline std::int64_t slot_at(const ConstTensor& slots, std::int64_t i) {
    const std::int64_t element = i == 0 ? 0 : i * slots.strides[0];  // the stride of a single slot means nothing
    return slots.dtype == DType::i32 ? static_cast<const std::int32_t*>(slots.data)[element]
                                     : static_cast<const std::int64_t*>(slots.data)[element];
}

}  // namespace sparsemla::detail
