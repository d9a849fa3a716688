// Few combinations in which every two values of different parameters meet.
#pragma once

#include <vector>

namespace sparsemla::harness {

/// `sizes` are the numbers of values of each parameter, at least two parameters. Every combination holds one value
/// index per parameter; every pair of values of two parameters occurs in at least one. Deterministic.
std::vector<std::vector<int>> pairwise_cover(const std::vector<int>& sizes);

}  // namespace sparsemla::harness
