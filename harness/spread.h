// The middle and the ends of a sample.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace sparsemla::harness {

/// Linear between the order statistics around `share` of the sorted sample, which is not empty.
inline double quantile(const std::vector<double>& sorted, double share) {
    const double position = share * static_cast<double>(sorted.size() - 1);
    const auto below = static_cast<std::size_t>(position);
    const std::size_t above = std::min(below + 1, sorted.size() - 1);
    return sorted[below] + (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

struct Spread {
    double p10 = 0;
    double median = 0;
    double p90 = 0;
};

inline Spread spread_of(std::vector<double> sample) {
    std::sort(sample.begin(), sample.end());
    return {.p10 = quantile(sample, 0.1), .median = quantile(sample, 0.5), .p90 = quantile(sample, 0.9)};
}

}  // namespace sparsemla::harness
