// The options that describe a problem to generate or to plan.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "harness/generate.h"
#include "sparsemla/decode.h"

namespace sparsemla::tool {

struct SourceFlags {
    std::string record;             ///< "" for the extra source: there is none
    std::int64_t record_bytes = 0;  ///< 0: the name decides, flat fp8 is then the longer one
    std::int64_t width = 2048;
    std::int64_t page_size = 64;
    std::int64_t slots_per_page = 0;
    std::int64_t page_stride_bytes = 0;
    std::int64_t pages = 0;
    std::string layout;  ///< "": the record's default
    bool split_rope = false;
};

struct ProblemFlags {
    std::int64_t rows = 1;
    std::int64_t heads = 16;
    SourceFlags first{};
    SourceFlags extra{};
    bool one_list = false;
    std::string query;  ///< "": e4m3 for flat fp8 records, else bf16
    bool sinks = false;
    std::string lse = "natural";
};

/// Offers --record, --rows, --heads, --width, --extra-record, --query, --sinks, --lse, ... Returns --record's option.
CLI::Option* add_problem_flags(CLI::App& app, ProblemFlags& flags);
/// Offers what only stored data has: page sizes, strides, numbers of pages, for both sources.
void add_geometry_flags(CLI::App& app, ProblemFlags& flags);

/// Throws Error for options that contradict each other.
harness::Recipe recipe_of(const ProblemFlags& flags);
/// The problem that the recipe's case poses, with its LSE.
Problem problem_of(const harness::Recipe& recipe);

/// Record names as case files write them, without repetition.
std::vector<std::string> record_names();

}  // namespace sparsemla::tool
