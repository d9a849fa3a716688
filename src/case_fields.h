// What the parts of the case reader share: fields of a case read and checked by name, and its caches.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "check.h"
#include "sparsemla/case_file.h"

namespace sparsemla::detail {

/// Reads a case's tensors and metadata, or throws the one Error (malformed_file) that names file, field and fault.
class CaseFields {
   public:
    explicit CaseFields(const Case& c) : case_(c) {}

    [[noreturn]] void fail(std::string_view field, std::string_view required, std::string_view received) const;
    /// Refuses a field that is given although another excludes it. `why` completes "no ".
    void forbid(std::string_view field, std::string_view why) const;

    bool has_tensor(std::string_view name) const { return case_.find(name) != nullptr; }
    bool has_text(std::string_view key) const { return text(key) != nullptr; }

    /// The tensor, checked against its dtypes and shape; a view of rank 0 if it is not there.
    ConstTensor optional_tensor(std::string_view name, std::initializer_list<DType> dtypes,
                                std::initializer_list<Extent> shape) const;
    ConstTensor tensor(std::string_view name, std::initializer_list<DType> dtypes,
                       std::initializer_list<Extent> shape) const;
    /// The tensor as it is, of a dtype and rank that the library knows. `required` completes the message if it is
    /// missing or not so.
    ConstTensor any_tensor(std::string_view name, std::string_view required) const;

    /// The text of a metadata key, or null.
    const std::string* text(std::string_view key) const;
    /// A decimal integer in [min, max]; nothing where the key is not given.
    std::optional<std::int64_t> integer(std::string_view key, std::int64_t min, std::int64_t max) const;
    /// A positive finite float32.
    std::optional<float> scale(std::string_view key) const;

   private:
    const Case& case_;
};

/// The cache of one source.
struct CaseCache {
    CacheView view;
    bool split_rope = false;
    /// As the engine that made the slots pages it. Differs from view.page_size for a flat cache whose last page is
    /// partial: there the view takes every slot as a page, which is the same for slots and no use for block ids.
    std::int64_t page_size = 0;  ///< 0: the case does not say
};

/// Source 0 (`prefix` empty, `first` null) or source 1 (prefix "extra_", its defaults from `first`).
CaseCache case_cache(const CaseFields& fields, std::string_view prefix, const CaseCache* first);

/// Whether the format of case files knows the tensor, or the metadata key.
bool is_known_tensor(std::string_view name);
bool is_known_metadata(std::string_view key);

/// A case from the bytes of a file: parsed, notes taken, validated. `path` is for messages only.
Case parse_case(std::span<const std::byte> file, const std::string& path);

/// Metadata integers stay below this: slots are 32-bit, so nothing larger can mean anything.
inline constexpr std::int64_t max_extent = (std::int64_t{1} << 31) - 1;

}  // namespace sparsemla::detail
