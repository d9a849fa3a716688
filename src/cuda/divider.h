// Division of numbers below 2^31 by one that is known before the launch.
#pragma once

#include <bit>
#include <cstdint>

namespace sparsemla::detail {

/// n / divisor = (n * multiplier) >> (32 + shift), a product of 64 bits; from a divisor of 2 on also
/// umulhi(n, multiplier) >> shift. The divisor is 1 .. 2^31 - 1.
struct Divider {
    Divider() = default;
    explicit Divider(std::int64_t divisor) {
        const int log2 = std::bit_width(static_cast<std::uint64_t>(divisor - 1));
        multiplier = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + log2)) + divisor - 1) / divisor);
        shift = log2 - 1;
    }
    std::uint32_t multiplier = 0;
    std::int32_t shift = 0;
};

}  // namespace sparsemla::detail
