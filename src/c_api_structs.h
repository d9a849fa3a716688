// Between the C structs of sparsemla.h and the library's own: sizes and values checked, defaults filled in.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "argument_name.h"
#include "sparsemla/decode.h"
#include "sparsemla/indices.h"
#include "sparsemla/sparsemla.h"

namespace sparsemla::detail {

template <class T>
T& not_null(T* pointer, const ArgumentName& argument) {
    if (pointer == nullptr) throw Error(ErrorKind::invalid_argument, argument.text(), "a pointer", "NULL");
    return *pointer;
}

/// No version's struct is longer: a larger size was never set.
inline constexpr std::size_t longest_struct_bytes = 4096;

/// The size that a C struct states, refused if it ends before the fields that every version has.
template <class T>
std::size_t stated_size(const T* given, std::size_t min_size, const ArgumentName& argument) {
    not_null(given, argument);
    std::size_t size = 0;
    std::memcpy(&size, given, sizeof size);
    if (size < min_size || size > longest_struct_bytes)
        throw Error(ErrorKind::invalid_argument, (argument + ".size").text(),
                    "sizeof the struct, " + std::to_string(min_size) + " .. " + std::to_string(longest_struct_bytes),
                    std::to_string(size));
    return size;
}

/// Copies an input struct over `defaults`: what a shorter one lacks keeps its default, and what a longer one adds must
/// be 0.
template <class T>
T read_struct(const T* given, T defaults, std::size_t min_size, const ArgumentName& argument) {
    const std::size_t size = stated_size(given, min_size, argument);
    const auto* bytes = reinterpret_cast<const unsigned char*>(given);
    for (std::size_t i = sizeof(T); i < size; ++i)
        if (bytes[i] != 0)
            throw Error(ErrorKind::invalid_argument, (argument + ".size").text(),
                        "at most " + std::to_string(sizeof(T)) + " bytes of known fields, 0 in all later ones",
                        std::to_string(size) + " bytes with byte " + std::to_string(i) + " set");
    std::memcpy(static_cast<void*>(&defaults), given, std::min(size, sizeof(T)));
    return defaults;
}

/// Element `i` of an array of C structs, which lie as far apart as the first one's size says.
template <class T>
const T* struct_at(const T* first, std::int64_t i, std::size_t min_size, const ArgumentName& argument) {
    const std::size_t step = stated_size(first, min_size, argument[0]);
    const auto* bytes = reinterpret_cast<const unsigned char*>(first) + static_cast<std::size_t>(i) * step;
    const T* element = reinterpret_cast<const T*>(bytes);
    const ArgumentName name = argument[i];
    if (stated_size(element, min_size, name) != step)
        throw Error(ErrorKind::invalid_argument, (name + ".size").text(),
                    "the size of element 0, " + std::to_string(step), std::to_string(element->size));
    return element;
}

/// Fills an output struct as far as it reaches; its own size stays, later fields become 0.
template <class T>
void write_struct(T value, T* given, std::size_t min_size, const ArgumentName& argument) {
    const std::size_t size = stated_size(given, min_size, argument);
    value.size = size;
    std::memcpy(static_cast<void*>(given), &value, std::min(size, sizeof(T)));
    if (size > sizeof(T)) std::memset(reinterpret_cast<unsigned char*>(given) + sizeof(T), 0, size - sizeof(T));
}

/// A flag or an enumeration's value: 0 .. count - 1.
std::int32_t check_value(std::int32_t value, std::int32_t count, const ArgumentName& argument);

/// `count`: how many values the enumeration has.
template <class Enum>
Enum to_enum(std::int32_t value, std::int32_t count, const ArgumentName& argument) {
    return static_cast<Enum>(check_value(value, count, argument));
}

/// The same for one whose values begin at 1; 0: not given.
template <class Enum>
std::optional<Enum> to_choice(std::int32_t value, std::int32_t count, const ArgumentName& argument) {
    if (check_value(value, count + 1, argument) == 0) return std::nullopt;
    return static_cast<Enum>(value - 1);
}

inline bool to_flag(std::int32_t value, const ArgumentName& argument) { return check_value(value, 2, argument) != 0; }

inline void check_reserved(std::int32_t value, const ArgumentName& argument) { check_value(value, 1, argument); }

inline DType to_dtype(std::int32_t value, const ArgumentName& argument) {
    return to_enum<DType>(value, SPARSEMLA_F64 + 1, argument);
}

inline Memory to_memory(void* data, std::uint64_t bytes) { return {data, static_cast<std::size_t>(bytes)}; }

template <std::size_t size>
void copy_text(char (&out)[size], std::string_view text) {
    const std::size_t length = std::min(text.size(), size - 1);
    std::copy_n(text.data(), length, out);
    out[length] = '\0';
}

Device to_device(std::int32_t kind, std::int32_t index, const ArgumentName& argument);
ConstTensor to_const_tensor(const sparsemla_tensor& given, const ArgumentName& argument);
Tensor to_tensor(const sparsemla_tensor& given, const ArgumentName& argument);
Scale to_scale(const sparsemla_scale& given);
MutableCacheView to_cache(const sparsemla_cache* given, const ArgumentName& argument);
Sharding to_sharding(std::int64_t world, std::int64_t rank, std::int64_t interleave);
DeviceSpec to_device_spec(const sparsemla_device_spec* given);
Problem to_problem(const sparsemla_problem* given);
PlanOptions to_plan_options(const sparsemla_plan_options* given);
PackOptions to_pack_options(const sparsemla_pack_options* given);
ConvertArgs to_convert_args(const sparsemla_convert_args* given, const ArgumentName& argument = "args",
                            bool needs_cache = true);
/// The returned args point to `mailbox` where the call has one.
DecodeArgs to_decode_args(const sparsemla_decode_args* given, const Plan& plan, Mailbox& mailbox);
/// The returned args point into `partials`.
MergeArgs to_merge_args(const sparsemla_merge_args* given, std::vector<Partial>& partials);

sparsemla_device_spec from_device_spec(const DeviceSpec& spec);
sparsemla_record_layout from_layout(const RecordLayout& layout);

}  // namespace sparsemla::detail
