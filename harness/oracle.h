// The definition in float64, written apart from the library's kernels: only unpack is shared with them.
#pragma once

#include <cstdint>
#include <vector>

#include "sparsemla/case_file.h"

namespace sparsemla::harness {

/// Exact results of a step, and the sums that docs/numerics.md builds its bounds from. Arrays are dense.
/// w_c = k_scale * out_scale * exp(s_c - m) / (l + exp(sink - m)) is the weight of column c. Sums of squares take
/// columns that repeat a record as one, of the sum of their weights: their roundings are equal, not independent.
struct Oracle {
    std::int64_t rows = 0;
    std::int64_t heads = 0;
    std::int64_t width = 0;                 ///< columns of all sources together
    double value_factor = 1;                ///< largest k_scale * |out_scale| of the sources
    std::vector<double> out;                ///< [rows, heads, 512]
    std::vector<double> lse;                ///< [rows, heads], natural, sink excluded; -inf for an empty row
    std::vector<double> weighted_abs;       ///< A [rows, heads, 512]: sum of |w_c v_c|
    std::vector<double> weighted_square;    ///< [rows, heads, 512]: sum of (w_c v_c)^2
    std::vector<double> anchor_weight;      ///< [rows, heads]: 1 / (l + exp(sink - m)), the weight of the largest score
    std::vector<double> value_abs;          ///< [rows, 512]: sum of k_scale * |out_scale v_c|; V = anchor_weight * this
    std::vector<double> value_square;       ///< [rows, 512]: sum of (k_scale * out_scale v_c)^2
    std::vector<double> score_scale;        ///< [rows, heads]: max over c of scale * sum |q k|
    std::vector<double> largest_magnitude;  ///< [rows, heads]: of sum |q k|, score_scale, sum |v| and value_abs
    std::vector<std::int64_t> active;       ///< [rows]: active columns
    /// [rows, heads, 512], or empty: sum over ranks of |w_r o_r|, where their results o_r travel as BF16.
    std::vector<double> pushed_abs;
};

/// Takes seconds for large steps: rows * heads * width * 1088 multiplications, on all cores. Memory: the result, and
/// one row at a time of (d_qk + cores) * width doubles.
Oracle compute_oracle(const CaseStep& step);

}  // namespace sparsemla::harness
