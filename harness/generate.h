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
enum class CountsRecipe {
    all,     ///< no counts tensor
    ragged,  ///< awkward numbers: 0, 1, 63, 64, 65, all, random ones, and counts that are negative or above the width
    list,
};

struct Recipe {
    std::int64_t rows = 1;
    std::int64_t heads = 16;
    DType query_dtype = DType::f8_e4m3;
    std::vector<SourceRecipe> sources{SourceRecipe{}};
    CountsRecipe counts = CountsRecipe::all;
    std::vector<std::int32_t> counts_list;  ///< with CountsRecipe::list: per row, over all sources' columns in order
    bool one_list = false;                  ///< two sources: one slots list cut by first_width, one count for both
    double absent = 0.02;                   ///< share of active columns that are negative
    bool sinks = false;
    bool power_of_two_scales = false;  ///< of fp8_ds_mla and its norope form
    LseBase lse_base = LseBase::natural;
    std::uint64_t seed = 1;
    bool expected = true;  ///< add expected.out (f32) and expected.lse
};

/// The case of a recipe: the same bytes on every machine, but for the last bit of the expected values. Records that no
/// active column names, gaps and padding are filled with NaN codes, and columns past the count point at them: reading
/// one shows. Throws Error for a recipe that no library call could take.
Case generate(const Recipe& recipe);

/// The command of the tool that writes the same case to `path`.
std::string gen_command(const Recipe& recipe, const std::string& path);

}  // namespace sparsemla::harness
