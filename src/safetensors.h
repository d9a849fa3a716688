// The safetensors format: an 8-byte little-endian header length, a JSON header, then the tensors' bytes without holes.
// Knows nothing of what a case means.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sparsemla/case_file.h"

namespace sparsemla::detail {

/// Bits of one element; 0 for a name that is not a dtype of the format.
int bits_per_element(std::string_view dtype_name);

/// Between the library's dtypes and the format's names.
std::string_view dtype_name(DType dtype);
std::optional<DType> find_dtype(std::string_view text);

/// Bytes of a dense tensor. Nothing for an unknown dtype, a negative extent, elements that do not fill whole bytes, or
/// a product that overflows (extents of 0 counted as 1, so that no stride overflows either).
std::optional<std::int64_t> dense_bytes(std::string_view dtype_name, std::span<const std::int64_t> shape);

/// 64-byte aligned, uninitialised, never null. Throws Error (io) naming `argument` when there is no such memory.
std::shared_ptr<std::byte[]> allocate_bytes(std::int64_t bytes, const std::string& argument);

/// The header's line about one tensor. Offsets count from the end of the header.
struct TensorEntry {
    std::string name;
    std::string dtype_name;
    std::vector<std::int64_t> shape;
    std::int64_t begin_bytes = 0;
    std::int64_t end_bytes = 0;
};

struct SafetensorsHeader {
    std::vector<TensorEntry> entries;
    std::map<std::string, std::string> metadata;
};

/// The name that a tensor cannot have.
inline constexpr std::string_view metadata_key = "__metadata__";

/// Longest header that the format allows.
inline constexpr std::int64_t max_header_bytes = 100'000'000;

/// Reads the header's JSON: strict, without recursion, memory linear in the text. Offsets are not yet checked against
/// each other. Throws Error (malformed_file) naming `file`.
SafetensorsHeader parse_header(std::string_view json, const std::string& file);

/// The JSON text that parse_header reads back, padded with spaces to a multiple of 8 bytes.
std::string format_header(const SafetensorsHeader& header);

/// Tensors, metadata and path of a case; nothing of their meaning is checked. Throws Error (malformed_file, io).
Case parse_safetensors(std::span<const std::byte> file, const std::string& path);
Case read_safetensors(const std::string& path);

/// Writes the tensors by falling element size, then by name. All or nothing, see save_case.
void write_safetensors(const Case& c, const std::string& path);

bool is_utf8(std::string_view text);

/// In single quotes, control characters escaped, cut to a length that suits a message.
std::string in_quotes(std::string_view text);

/// "F32 [3, 512]".
std::string describe(std::string_view dtype_name, std::span<const std::int64_t> shape);

}  // namespace sparsemla::detail
