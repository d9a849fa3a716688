// The definition in float64, written apart from the library's kernels: only unpack is shared with them.
#pragma once

#include <cstdint>
#include <vector>

#include "sparsemla/case_file.h"

namespace sparsemla::harness {

/// Exact results of a step, and the sums that docs/numerics.md builds its bounds from. Arrays are dense.
struct Oracle {
    std::int64_t rows = 0;
    std::int64_t heads = 0;
    std::int64_t width = 0;              ///< columns of all sources together
    std::vector<double> out;             ///< [rows, heads, 512]
    std::vector<double> lse;             ///< [rows, heads], natural, sink excluded; -inf for an empty row
    std::vector<double> weighted_abs;    ///< A [rows, heads, 512]: sum of w_c |v_c|
    std::vector<double> unweighted_abs;  ///< V [rows, heads, 512]: sum of |v_c| in units of the anchor's weight
    std::vector<double> weighted_rms;    ///< [rows, heads]: sqrt(sum over c and d of (w_c v_cd)^2) / sqrt(512)
    std::vector<double> score_scale;     ///< [rows, heads]: max over c of scale * sum |q k|
    std::vector<std::int64_t> active;    ///< [rows]: active columns
};

/// Takes seconds for large steps: rows * heads * width * 1088 multiplications, on all cores.
Oracle compute_oracle(const CaseStep& step);

}  // namespace sparsemla::harness
