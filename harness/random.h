// Random numbers that are the same on every machine: integers from a hash of a seed and a position, and only exact
// arithmetic on top. The distributions of the standard library differ between implementations.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace sparsemla::harness {

/// SplitMix64. Streams of different positions under one seed are independent, so data can be made in any order.
class Random {
   public:
    explicit Random(std::uint64_t seed, std::initializer_list<std::int64_t> position = {}) : state_(mix(seed)) {
        for (const std::int64_t part : position) state_ = mix(state_ ^ mix(static_cast<std::uint64_t>(part) + 1));
    }

    std::uint64_t next() { return mix(state_ += 0x9E3779B97F4A7C15U); }

    /// In [0, 1), multiples of 2^-53.
    double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
    double uniform(double low, double high) { return low + (high - low) * uniform(); }
    bool chance(double probability) { return uniform() < probability; }

    /// In [0, n), 1 <= n <= 2^31. A bias below n / 2^32 does not matter here.
    std::int64_t below(std::int64_t n) {
        return static_cast<std::int64_t>(((next() >> 32) * static_cast<std::uint64_t>(n)) >> 32);
    }

    /// Nearly normal, mean 0, variance 1, at most 3.5: the sum of four 16-bit numbers of one draw.
    double normal() {
        std::uint64_t bits = next();
        double sum = 0;
        for (int i = 0; i < 4; ++i, bits >>= 16) sum += static_cast<double>(bits & 0xFFFF);
        constexpr double mean = 2 * 65535.0;
        constexpr double deviation = 37837.2;  // sqrt(4 * (2^32 - 1) / 12)
        return (sum - mean) / deviation;
    }

    /// Nearly log-normal around 1: 2^(spread * normal), with a straight line between powers of two.
    double log_normal(double spread) {
        const double x = spread * normal();
        const double whole = std::floor(x);
        return std::ldexp(1 + (x - whole), static_cast<int>(whole));
    }

   private:
    static std::uint64_t mix(std::uint64_t x) {
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
        return x ^ (x >> 31);
    }

    std::uint64_t state_;
};

}  // namespace sparsemla::harness
