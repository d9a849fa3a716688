// The one list of problems that tests and benchmarks share.
#pragma once

#include <string>
#include <vector>

#include "harness/generate.h"

namespace sparsemla::harness {

struct NamedRecipe {
    std::string name;   ///< "fp8_576/h16/r8/w2048": records / heads / rows / widths, then options; unique
    std::string suite;  ///< "speed" (what users run), "shapes" (a pairwise cover of records, heads, widths, options)
    Recipe recipe;
};

/// All of them, or one suite's.
std::vector<NamedRecipe> problems(const std::string& suite = "");

}  // namespace sparsemla::harness
