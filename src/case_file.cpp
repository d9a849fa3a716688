// Case files as a whole: tensors that own their bytes, load, save.
#include "sparsemla/case_file.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "case_fields.h"
#include "safetensors.h"

namespace sparsemla {

namespace {

using detail::in_quotes;

/// What the case keeps without using it, and what it says that has no effect.
std::vector<std::string> take_notes(const Case& c) {
    std::vector<std::string> notes;
    const auto has = [&](const char* key) { return c.metadata.count(key) != 0; };
    for (const auto& [name, tensor] : c.tensors)
        if (!detail::is_known_tensor(name))
            notes.push_back("tensor " + in_quotes(name) + " (" + detail::describe(tensor.dtype_name, tensor.shape) +
                            ") is not part of a case: kept and ignored");
    for (const auto& [key, value] : c.metadata) {
        if (!detail::is_known_metadata(key))
            notes.push_back("metadata " + in_quotes(key) + " is not part of a case: kept and ignored");
        else if (key.rfind("extra_", 0) == 0 && c.find("extra_cache") == nullptr)
            notes.push_back("metadata " + in_quotes(key) + " has no effect without extra_cache");
    }
    const auto record = c.metadata.find("record");
    const bool flat_fp8 = record != c.metadata.end() && record->second == layout_of(Record::fp8_576).name;
    if (flat_fp8 && !has("k_scale")) notes.emplace_back("metadata 'k_scale' is not given: 1 is taken");
    if (has("count_offset") && c.find("counts") == nullptr)
        notes.emplace_back("metadata 'count_offset' has no effect without counts: every column is active");
    if (has("extra_count_offset") && c.find("extra_counts") == nullptr && c.find("extra_slots") != nullptr)
        notes.emplace_back("metadata 'extra_count_offset' has no effect without extra_counts: every column is active");
    return notes;
}

Case finish(Case c) {
    validate(c);
    c.notes = take_notes(c);
    return c;
}

}  // namespace

Tensor OwnedTensor::view() const {
    const std::optional<DType> dtype = detail::find_dtype(dtype_name);
    const std::optional<std::int64_t> dense_bytes = detail::dense_bytes(dtype_name, shape);
    if (!dtype || shape.empty() || shape.size() > Tensor::max_rank || !dense_bytes ||
        static_cast<std::uint64_t>(*dense_bytes) != size_bytes)
        throw Error(ErrorKind::invalid_argument, "tensor",
                    "U8, I32, I64, F8_E4M3, BF16, F16, F32 or F64 of rank 1 to 4 with the bytes of its shape",
                    detail::describe(dtype_name, shape) + " in " + std::to_string(size_bytes) + " bytes");
    Tensor view{bytes.get(), *dtype, {}, static_cast<int>(shape.size()), {}, {}};
    std::int64_t stride = 1;
    for (int i = view.rank; i-- > 0;) {
        view.shape[i] = shape[static_cast<std::size_t>(i)];
        view.strides[i] = stride;
        stride *= view.shape[i];
    }
    return view;
}

OwnedTensor make_owned(DType dtype, std::vector<std::int64_t> shape) {
    OwnedTensor tensor{std::string(detail::dtype_name(dtype)), std::move(shape), nullptr, 0};
    const std::optional<std::int64_t> size_bytes = detail::dense_bytes(tensor.dtype_name, tensor.shape);
    if (!size_bytes)
        throw Error(ErrorKind::invalid_argument, "shape", "extents >= 0 whose bytes number less than 2^60",
                    detail::describe(tensor.dtype_name, tensor.shape));
    tensor.bytes = detail::allocate_bytes(*size_bytes, "shape");
    tensor.size_bytes = static_cast<std::size_t>(*size_bytes);
    std::memset(tensor.bytes.get(), 0, tensor.size_bytes);
    return tensor;
}

const OwnedTensor* Case::find(std::string_view tensor) const {
    const auto found = tensors.find(std::string(tensor));
    return found == tensors.end() ? nullptr : &found->second;
}

Case load_case(const std::string& path) { return finish(detail::read_safetensors(path)); }

Case detail::parse_case(std::span<const std::byte> file, const std::string& path) {
    return finish(parse_safetensors(file, path));
}

void save_case(const Case& c, const std::string& path) { detail::write_safetensors(c, path); }

}  // namespace sparsemla
