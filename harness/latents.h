// Keys and queries as trained models have them: a few channels far larger than the rest, tokens of varying norm, and
// attention that a handful of keys share with a long tail.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sparsemla::harness {

/// Names a record of a generated step.
struct Token {
    int source = 0;
    std::int32_t slot = 0;
};

/// Every value is a function of the seed and its position alone.
class Latents {
   public:
    Latents(std::uint64_t seed, int d_qk);

    int d_qk() const { return static_cast<int>(deviation_.size()); }

    /// The key [d_qk] of a token, before quantisation. The last 64 channels are the rope part: moderate in all of them.
    void key(Token token, float* values) const;

    /// A query [d_qk] whose natural scores over the row's `tokens` spread over 10 to 20: four to eight keys stand out
    /// by about the logarithm of the number of tokens, so that neither they nor the tail always dominate.
    void query(std::int64_t row, std::int64_t head, std::span<const Token> tokens, double softmax_scale,
               float* values) const;

   private:
    std::uint64_t seed_;
    std::vector<double> deviation_;  ///< [d_qk] of the channels
};

}  // namespace sparsemla::harness
