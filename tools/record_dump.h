// One record as people read it: where it lies, its scales, its values, on request its bytes.
#pragma once

#include <cstdint>
#include <string>

#include "sparsemla/records.h"

namespace sparsemla::tool {

/// Several lines. `all`: every byte and every value, else a summary. The cache holds the slot.
std::string dump_record(const CacheView& cache, std::int64_t slot, bool all);

}  // namespace sparsemla::tool
