// Realistic decode steps from a seed: heavy-tailed channels, peaked attention, any record, ragged counts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sparsemla/case_file.h"

namespace sparsemla::harness {

struct SourceRecipe {
    Record record = Record::fp8_576;
    RecordForm form = RecordForm::contiguous;
    bool split_rope = false;
    std::int64_t width = 2048;
    std::int64_t page_size = 64;
    std::int64_t slots_per_page = 0;     ///< 0: page_size
    std::int64_t page_stride_bytes = 0;  ///< 0: dense
    std::int64_t pages = 0;              ///< 0: enough for twice the widest row
};

/// How many columns of each row are active.
enum class CountsRecipe { all, ragged, list };

struct Recipe {
    std::int64_t rows = 1;
    std::int64_t heads = 16;
    DType query_dtype = DType::f8_e4m3;
    std::vector<SourceRecipe> sources{SourceRecipe{}};
    CountsRecipe counts = CountsRecipe::all;
    std::vector<std::int32_t> counts_list;  ///< with CountsRecipe::list: per row, over all sources' columns in order
    double absent = 0.02;                   ///< share of active columns that are -1
    bool sinks = false;
    bool power_of_two_scales = false;
    LseBase lse_base = LseBase::natural;
    std::uint64_t seed = 1;
    bool expected = true;  ///< add expected.out (f32) and expected.lse
};

/// Deterministic in the recipe. Records that no column names are filled with NaN codes: reading one shows.
/// Throws Error for a recipe that no library call could take.
Case generate(const Recipe& recipe);

}  // namespace sparsemla::harness
