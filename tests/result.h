// What a decode wrote.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "sparsemla/decode.h"
#include "sparsemla/formats.h"

namespace sparsemla::test {

/// What a call wrote, as bits and as numbers; dense.
struct Result {
    std::int64_t rows = 0;
    std::int64_t heads = 0;
    DType out_dtype = DType::bf16;
    std::vector<std::uint32_t> out_bits;  ///< [rows, heads, 512]
    std::vector<std::uint32_t> lse_bits;  ///< [rows, heads]
    Schedule schedule;

    std::span<const std::uint32_t> out_bits_of(std::int64_t row) const {
        return std::span(out_bits).subspan(static_cast<std::size_t>(row * heads * value_dims),
                                           static_cast<std::size_t>(heads * value_dims));
    }
    std::span<const std::uint32_t> lse_bits_of(std::int64_t row) const {
        return std::span(lse_bits).subspan(static_cast<std::size_t>(row * heads), static_cast<std::size_t>(heads));
    }
    float out(std::int64_t row, std::int64_t head, int dim) const {
        const std::uint32_t bits = out_bits[static_cast<std::size_t>((row * heads + head) * value_dims + dim)];
        return out_dtype == DType::bf16 ? bf16_to_float(static_cast<std::uint16_t>(bits)) : std::bit_cast<float>(bits);
    }
    float lse(std::int64_t row, std::int64_t head) const {
        return std::bit_cast<float>(lse_bits[static_cast<std::size_t>(row * heads + head)]);
    }
};

/// Bit equality of a row of one result with a row of another.
inline bool same_bits(const Result& a, std::int64_t row_a, const Result& b, std::int64_t row_b) {
    return a.heads == b.heads && std::ranges::equal(a.out_bits_of(row_a), b.out_bits_of(row_b)) &&
           (a.lse_bits.empty() || std::ranges::equal(a.lse_bits_of(row_a), b.lse_bits_of(row_b)));
}

}  // namespace sparsemla::test
