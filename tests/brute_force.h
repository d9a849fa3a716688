// Small number formats by their definition, and rounding by looking at every code.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace sparsemla::test {

/// A code's magnitude by the definition of a binary float: exponent bits, mantissa bits, bias, no special codes.
inline double defined_value(int code, int exponent_bits, int mantissa_bits, int bias) {
    const int mantissa = code & ((1 << mantissa_bits) - 1);
    const int exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const double fraction = mantissa / std::pow(2.0, mantissa_bits);
    return exponent == 0 ? fraction * std::pow(2.0, 1 - bias) : (1 + fraction) * std::pow(2.0, exponent - bias);
}

/// The magnitudes of codes 0 .. codes - 1.
inline std::vector<double> magnitudes(int codes, int exponent_bits, int mantissa_bits, int bias) {
    std::vector<double> values;
    for (int code = 0; code < codes; ++code) values.push_back(defined_value(code, exponent_bits, mantissa_bits, bias));
    return values;
}

inline const std::vector<double> e4m3_magnitudes = magnitudes(127, 4, 3, 7);
inline const std::vector<double> e2m1_magnitudes = magnitudes(8, 2, 1, 1);

/// The code nearest to |x|; a tie goes to the even code; the last code saturates.
inline int nearest_code(const std::vector<double>& values, double x) {
    const double magnitude = std::min(std::fabs(x), values.back());
    int best = 0;
    for (int code = 1; code < static_cast<int>(values.size()); ++code) {
        const double distance = std::fabs(values[code] - magnitude);
        const double best_distance = std::fabs(values[best] - magnitude);
        if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
    }
    return best;
}

}  // namespace sparsemla::test
