// The parameters that decode_latency's tiles need, whichever kernel they run in.
#pragma once

#include <bit>

#include "cuda/decode_latency.h"
#include "kernels.h"

namespace sparsemla::detail::latency {

/// n / divisor = (n * multiplier >> 32) >> shift for n below 2^31 and a divisor of at least 2 (Granlund and Montgomery:
/// 2^(31 + s) / d rounded up, s = log2 d rounded up).
struct Divider {
    explicit Divider(std::int64_t divisor) {
        const int log2 = std::bit_width(static_cast<std::uint64_t>(divisor - 1));
        multiplier = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + log2)) + divisor - 1) / divisor);
        shift = log2 - 1;
    }
    std::uint32_t multiplier;
    int shift;
};

/// Everything but stages_offset.
Params params_of(const DecodeParams& call);

}  // namespace sparsemla::detail::latency
