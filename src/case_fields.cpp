// Fields of a case by name: presence, dtype, shape, and strict numbers.
#include "case_fields.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <system_error>
#include <vector>

#include "safetensors.h"

namespace sparsemla::detail {

namespace {

constexpr std::array<std::string_view, 17> known_tensors = {
    "query",       "cache",       "cache_rope",     "slots",        "counts",           "sinks",
    "extra_cache", "extra_slots", "extra_counts",   "expected.out", "expected.lse",     "expected.dequantised",
    "token_ids",   "block_table", "request_of_row", "peer.out",     "extra_cache_rope",
};

constexpr std::array<std::string_view, 8> known_source_metadata = {
    "record", "record_bytes", "page_size", "slots_per_page", "page_stride_bytes", "layout", "count_offset", "k_scale",
};

constexpr std::array<std::string_view, 8> known_step_metadata = {
    "softmax_scale", "q_scale", "out_scale", "lse", "interleave", "world", "rank", "first_width",
};

template <std::size_t n>
bool contains(const std::array<std::string_view, n>& names, std::string_view name) {
    return std::find(names.begin(), names.end(), name) != names.end();
}

/// "F8_E4M3 or BF16 [rows = 3, heads, d_qk = 576]".
std::string describe_rule(std::span<const DType> dtypes, std::span<const Extent> shape) {
    std::string out;
    for (const DType dtype : dtypes) {
        if (!out.empty()) out += " or ";
        out += dtype_name(dtype);
    }
    out += " [";
    for (const Extent& extent : shape) {
        if (&extent != shape.data()) out += ", ";
        out += extent.what;
        if (extent.kind == Extent::Kind::exactly) {
            if (!extent.what.empty()) out += " = ";
            out += std::to_string(extent.value);
        }
    }
    return out + "]";
}

}  // namespace

bool is_known_tensor(std::string_view name) { return contains(known_tensors, name); }

bool is_known_metadata(std::string_view key) {
    if (contains(known_source_metadata, key) || contains(known_step_metadata, key)) return true;
    constexpr std::string_view prefix = "extra_";
    return key.substr(0, prefix.size()) == prefix && contains(known_source_metadata, key.substr(prefix.size()));
}

void CaseFields::fail(std::string_view field, std::string_view required, std::string_view received) const {
    std::string argument = case_.path;
    if (!argument.empty()) argument += ": ";
    argument += field;
    throw Error(ErrorKind::malformed_file, std::move(argument), required, received);
}

void CaseFields::forbid(std::string_view field, std::string_view why) const {
    if (has_tensor(field)) fail(field, "no such tensor " + std::string(why), "one");
    if (const std::string* given = text(field)) fail(field, "no such metadata " + std::string(why), in_quotes(*given));
}

ConstTensor CaseFields::any_tensor(std::string_view name, std::string_view required) const {
    const OwnedTensor* tensor = case_.find(name);
    if (tensor == nullptr) fail(name, required, "no such tensor");
    const std::optional<std::int64_t> size_bytes = dense_bytes(tensor->dtype_name, tensor->shape);
    const std::string received = describe(tensor->dtype_name, tensor->shape);
    if (!find_dtype(tensor->dtype_name) || !size_bytes || tensor->shape.empty() ||
        tensor->shape.size() > ConstTensor::max_rank)
        fail(name, required, received);
    if (static_cast<std::uint64_t>(*size_bytes) != tensor->size_bytes || tensor->bytes == nullptr)
        fail(name, std::to_string(*size_bytes) + " bytes for " + received, std::to_string(tensor->size_bytes));
    return tensor->view();
}

ConstTensor CaseFields::tensor(std::string_view name, std::initializer_list<DType> dtypes,
                               std::initializer_list<Extent> shape) const {
    const std::string required = describe_rule({dtypes.begin(), dtypes.size()}, {shape.begin(), shape.size()});
    const ConstTensor view = any_tensor(name, required);
    bool matches = std::find(dtypes.begin(), dtypes.end(), view.dtype) != dtypes.end() &&
                   static_cast<std::size_t>(view.rank) == shape.size();
    for (int i = 0; matches && i < view.rank; ++i) matches = shape.begin()[i].accepts(view.shape[i]);
    if (!matches)
        fail(name, required,
             describe(dtype_name(view.dtype), {view.shape.data(), static_cast<std::size_t>(view.rank)}));
    return view;
}

ConstTensor CaseFields::optional_tensor(std::string_view name, std::initializer_list<DType> dtypes,
                                        std::initializer_list<Extent> shape) const {
    return has_tensor(name) ? tensor(name, dtypes, shape) : ConstTensor{};
}

const std::string* CaseFields::text(std::string_view key) const {
    const auto found = case_.metadata.find(std::string(key));
    return found == case_.metadata.end() ? nullptr : &found->second;
}

std::optional<std::int64_t> CaseFields::integer(std::string_view key, std::int64_t min, std::int64_t max) const {
    const std::string* given = text(key);
    if (given == nullptr) return std::nullopt;
    std::int64_t value = 0;
    const char* end = given->data() + given->size();
    const auto [stop, error] = std::from_chars(given->data(), end, value);
    if (error != std::errc{} || stop != end || value < min || value > max)
        fail(key, "an integer in [" + std::to_string(min) + ", " + std::to_string(max) + "]", in_quotes(*given));
    return value;
}

std::optional<float> CaseFields::scale(std::string_view key) const {
    const std::string* given = text(key);
    if (given == nullptr) return std::nullopt;
    float value = 0;
    const char* end = given->data() + given->size();
    const auto [stop, error] = std::from_chars(given->data(), end, value);
    if (error != std::errc{} || stop != end || !std::isfinite(value) || value <= 0)
        fail(key, "a positive finite number in float32's range", in_quotes(*given));
    return value;
}

}  // namespace sparsemla::detail
