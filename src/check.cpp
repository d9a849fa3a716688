#include "check.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace sparsemla::detail {

namespace {

std::string required_text(const TensorRule& rule) {
    std::vector<std::string> dtypes;
    for (DType dtype : rule.dtypes) dtypes.emplace_back(name(dtype));
    std::string text = join(dtypes, ", ", " or ") + " [";
    for (std::size_t i = 0; i < rule.shape.size(); ++i) {
        const Extent& extent = rule.shape[i];
        if (i != 0) text += ", ";
        if (extent.kind == Extent::Kind::at_least) text += ">= ";
        if (extent.kind != Extent::Kind::any) text += std::to_string(extent.value);
        if (extent.kind != Extent::Kind::any && !extent.what.empty()) text += ' ';
        text += extent.what;
    }
    return text + "] on " + to_string(rule.device);
}

std::string strides_text(const ConstTensor& tensor) {
    std::string text = "strides [";
    for (int i = 0; i < tensor.rank; ++i) text += (i != 0 ? ", " : "") + std::to_string(tensor.strides[i]);
    return text + "]";
}

[[noreturn]] void refuse(std::string_view argument, std::string_view required, std::string_view received) {
    throw Error(ErrorKind::invalid_argument, std::string(argument), required, received);
}

void check_strides(const ConstTensor& tensor, const TensorRule& rule) {
    const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.data));
    std::int64_t last_byte = 0;
    std::int64_t end = 0;
    for (int i = 0; i < tensor.rank; ++i) {
        if (tensor.shape[i] <= 1) continue;
        if (tensor.strides[i] < 0) refuse(rule.argument, "strides >= 0", strides_text(tensor));
        std::int64_t reach = 0;
        if (__builtin_mul_overflow(tensor.shape[i] - 1, tensor.strides[i], &reach) ||
            __builtin_mul_overflow(reach, size_bytes(tensor.dtype), &reach) ||
            __builtin_add_overflow(last_byte, reach, &last_byte) ||
            __builtin_add_overflow(address + size_bytes(tensor.dtype), last_byte, &end))
            refuse(rule.argument, "strides whose bytes are addressable in 64 bits", strides_text(tensor));
    }
    const int last = tensor.rank - 1;
    if (rule.dense_last && tensor.rank > 0 && tensor.shape[last] > 1 && tensor.strides[last] != 1)
        refuse(rule.argument, "a dense last dimension (stride 1)", strides_text(tensor));
}

void check_alignment(const ConstTensor& tensor, const TensorRule& rule) {
    const std::int64_t element = size_bytes(tensor.dtype);
    const std::int64_t alignment = std::max(rule.alignment_bytes, element);
    const auto required = [&] { return std::to_string(alignment) + "-byte alignment"; };
    const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(tensor.data) % static_cast<std::uintptr_t>(alignment);
    if (past != 0) refuse(rule.argument, required(), "an address " + std::to_string(past) + " bytes past it");
    const int outer = rule.dense_last ? tensor.rank - 1 : tensor.rank;
    for (int i = 0; i < outer; ++i)
        if (tensor.shape[i] > 1 && (tensor.strides[i] * element) % alignment != 0)
            refuse(rule.argument, required() + " of every stride",
                   "a stride of " + std::to_string(tensor.strides[i] * element) + " bytes in dimension " +
                       std::to_string(i));
}

}  // namespace

std::string to_text(float value) {
    std::ostringstream text;
    text << value;
    return text.str();
}

bool Extent::accepts(std::int64_t extent) const {
    switch (kind) {
        case Kind::any: return extent >= 0;
        case Kind::exactly: return extent == value;
        case Kind::at_least: return extent >= value;
    }
    return false;
}

std::string join(const std::vector<std::string>& parts, std::string_view separator, std::string_view last_separator) {
    std::string text;
    for (std::size_t i = 0; i < parts.size(); ++i) {
        if (i != 0) text += i + 1 == parts.size() ? last_separator : separator;
        text += parts[i];
    }
    return text;
}

std::string describe(const ConstTensor& tensor) {
    if (!tensor.present()) return "nothing";
    std::string text(name(tensor.dtype));
    text += " [";
    for (int i = 0; i < std::min(tensor.rank, ConstTensor::max_rank); ++i)
        text += (i != 0 ? ", " : "") + std::to_string(tensor.shape[i]);
    return text + "] on " + to_string(tensor.device);
}

void check_tensor(const ConstTensor& tensor, const TensorRule& rule) {
    const bool dtype_ok = std::find(rule.dtypes.begin(), rule.dtypes.end(), tensor.dtype) != rule.dtypes.end();
    bool ok = tensor.present() && dtype_ok && tensor.device == rule.device &&
              tensor.rank == static_cast<int>(rule.shape.size());
    for (int i = 0; ok && i < tensor.rank; ++i) ok = tensor.shape[i] >= 0 && rule.shape[i].accepts(tensor.shape[i]);
    if (!ok) refuse(rule.argument, required_text(rule), describe(tensor));

    const auto* end = tensor.shape.begin() + tensor.rank;
    if (std::find(tensor.shape.begin(), end, 0) != end) return;  // no bytes: nothing more can be wrong
    if (tensor.data == nullptr) refuse(rule.argument, required_text(rule), "a null pointer");
    check_strides(tensor, rule);
    check_alignment(tensor, rule);
}

void check_positive_finite(float value, std::string_view argument) {
    if (!(value > 0) || !std::isfinite(value)) refuse(argument, "a positive finite number", to_text(value));
}

void check_finite(float value, std::string_view argument) {
    if (!std::isfinite(value)) refuse(argument, "a finite number", to_text(value));
}

}  // namespace sparsemla::detail
