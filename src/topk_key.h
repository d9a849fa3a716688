// The order of merge_topk as the order of one integer, on either device.
#pragma once

#include <cstdint>

namespace sparsemla::detail {

/// Behind every candidate.
inline constexpr std::uint64_t absent_key = ~std::uint64_t{0};

/// Of an id >= 0 and the bits of its score: ascending keys are scores descending, then ids ascending. All NaN are one
/// score, the last; -0 is +0.
constexpr std::uint64_t topk_key(std::uint32_t score_bits, std::int32_t id) {
    constexpr std::uint32_t sign = 0x80000000U, infinity = 0x7F800000U;
    std::uint32_t falling = ~std::uint32_t{0};
    if ((score_bits & ~sign) <= infinity) {
        if (score_bits == sign) score_bits = 0;
        falling = (score_bits & sign) != 0 ? score_bits : ~(score_bits | sign);
    }
    return std::uint64_t{falling} << 32 | static_cast<std::uint32_t>(id);
}

constexpr std::int32_t id_of_key(std::uint64_t key) { return static_cast<std::int32_t>(key & 0xFFFFFFFFU); }

}  // namespace sparsemla::detail
