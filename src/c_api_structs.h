// Between the C structs of sparsemla.h and the library's own: sizes and values checked, defaults filled in.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "sparsemla/decode.h"
#include "sparsemla/indices.h"
#include "sparsemla/sparsemla.h"

namespace sparsemla::detail {

template <class T>
T& not_null(T* pointer, const std::string& argument) {
    if (pointer == nullptr) throw Error(ErrorKind::invalid_argument, argument, "a pointer", "NULL");
    return *pointer;
}

/// No version's struct is longer: a larger size was never set.
inline constexpr std::size_t longest_struct_bytes = 4096;

/// The size that a C struct states, refused if it ends before the fields that every version has.
template <class T>
std::size_t stated_size(const T* given, std::size_t min_size, const std::string& argument) {
    not_null(given, argument);
    std::size_t size = 0;
    std::memcpy(&size, given, sizeof size);
    if (size < min_size || size > longest_struct_bytes)
        throw Error(ErrorKind::invalid_argument, argument + ".size",
                    "sizeof the struct, " + std::to_string(min_size) + " .. " + std::to_string(longest_struct_bytes),
                    std::to_string(size));
    return size;
}

/// Copies an input struct over `defaults`: what a shorter one lacks keeps its default, and what a longer one adds must
/// be 0.
template <class T>
T read_struct(const T* given, T defaults, std::size_t min_size, const std::string& argument) {
    const std::size_t size = stated_size(given, min_size, argument);
    const auto* bytes = reinterpret_cast<const unsigned char*>(given);
    for (std::size_t i = sizeof(T); i < size; ++i)
        if (bytes[i] != 0)
            throw Error(ErrorKind::invalid_argument, argument + ".size",
                        "at most " + std::to_string(sizeof(T)) + " bytes of known fields, 0 in all later ones",
                        std::to_string(size) + " bytes with byte " + std::to_string(i) + " set");
    std::memcpy(static_cast<void*>(&defaults), given, std::min(size, sizeof(T)));
    return defaults;
}

/// Element `i` of an array of C structs, which lie as far apart as the first one's size says.
template <class T>
const T* struct_at(const T* first, std::int64_t i, std::size_t min_size, const std::string& argument) {
    const std::size_t step = stated_size(first, min_size, argument + "[0]");
    const auto* bytes = reinterpret_cast<const unsigned char*>(first) + static_cast<std::size_t>(i) * step;
    const T* element = reinterpret_cast<const T*>(bytes);
    const std::string name = argument + "[" + std::to_string(i) + "]";
    if (stated_size(element, min_size, name) != step)
        throw Error(ErrorKind::invalid_argument, name + ".size", "the size of element 0, " + std::to_string(step),
                    std::to_string(element->size));
    return element;
}

/// Fills an output struct as far as it reaches; its own size stays, later fields become 0.
template <class T>
void write_struct(T value, T* given, std::size_t min_size, const std::string& argument) {
    const std::size_t size = stated_size(given, min_size, argument);
    value.size = size;
    std::memcpy(static_cast<void*>(given), &value, std::min(size, sizeof(T)));
    if (size > sizeof(T)) std::memset(reinterpret_cast<unsigned char*>(given) + sizeof(T), 0, size - sizeof(T));
}

/// A flag or an enumeration's value: 0 .. count - 1.
std::int32_t check_value(std::int32_t value, std::int32_t count, const std::string& argument);

Device to_device(std::int32_t kind, std::int32_t index, const std::string& argument);
ConstTensor to_const_tensor(const sparsemla_tensor& given, const std::string& argument);
Tensor to_tensor(const sparsemla_tensor& given, const std::string& argument);
Scale to_scale(const sparsemla_scale& given);
MutableCacheView to_cache(const sparsemla_cache* given, const std::string& argument);
Sharding to_sharding(std::int64_t world, std::int64_t rank, std::int64_t interleave);
DeviceSpec to_device_spec(const sparsemla_device_spec* given);
Problem to_problem(const sparsemla_problem* given);
PlanOptions to_plan_options(const sparsemla_plan_options* given);
PackOptions to_pack_options(const sparsemla_pack_options* given);
ConvertArgs to_convert_args(const sparsemla_convert_args* given, const std::string& argument = "args",
                            bool needs_cache = true);
DecodeArgs to_decode_args(const sparsemla_decode_args* given, const Plan& plan);
/// The returned args point into `partials`.
MergeArgs to_merge_args(const sparsemla_merge_args* given, std::vector<Partial>& partials);

sparsemla_device_spec from_device_spec(const DeviceSpec& spec);
sparsemla_record_layout from_layout(const RecordLayout& layout);

}  // namespace sparsemla::detail
