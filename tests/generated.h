// What tests read from generated cases.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "harness/generate.h"

namespace sparsemla::harness {

inline Recipe recipe_of(SourceRecipe source) {
    Recipe recipe;
    recipe.sources = {source};
    recipe.expected = false;
    return recipe;
}

template <class T>
std::vector<T> values_of(const Case& c, const std::string& tensor) {
    const OwnedTensor* owned = c.find(tensor);
    if (owned == nullptr) return {};
    const auto* first = reinterpret_cast<const T*>(owned->bytes.get());
    return {first, first + owned->size_bytes / sizeof(T)};
}

/// The slots that active columns of a source name.
inline std::set<std::int32_t> named_slots(const CaseStep& step, const CaseSource& source) {
    std::set<std::int32_t> named;
    const std::int64_t width = source.slots.shape[1];
    for (std::int64_t row = 0; row < step.rows; ++row) {
        std::int64_t count = width;
        if (source.counts.present())
            count = static_cast<const std::int32_t*>(source.counts.data)[row] - source.count_offset;
        const auto* slots = static_cast<const std::int32_t*>(source.slots.data) + row * source.slots.strides[0];
        for (std::int64_t c = 0; c < std::clamp<std::int64_t>(count, 0, width); ++c)
            if (slots[c] >= 0) named.insert(slots[c]);
    }
    return named;
}

}  // namespace sparsemla::harness
