// The argument that pack and unpack have in common: a list of slots.
#pragma once

#include <algorithm>
#include <cstdint>

#include "check.h"
#include "kernels.h"
#include "sparsemla/records.h"

namespace sparsemla::detail {

/// The widest record's d_qk.
inline constexpr int max_d_qk = [] {
    int widest = 0;
    for (const RecordLayout& layout : record_layouts) widest = std::max(widest, layout.d_qk());
    return widest;
}();

inline SlotList checked_slots(const ConstTensor& slots, Device device) {
    check_tensor(slots, {.argument = "slots",
                         .dtypes = {DType::i32, DType::i64},
                         .shape = {Extent::any("n")},
                         .device = device,
                         .dense_last = false});
    return {slots.data, slots.dtype == DType::i64, slots.strides[0]};
}

inline std::int64_t slot_at(const SlotList& slots, std::int64_t i) {
    const std::int64_t element = i == 0 ? 0 : i * slots.stride;  // the stride of a single slot means nothing
    return slots.is_64_bit ? static_cast<const std::int64_t*>(slots.data)[element]
                           : static_cast<const std::int32_t*>(slots.data)[element];
}

}  // namespace sparsemla::detail
