#include "harness/latents.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "harness/random.h"

namespace sparsemla::harness {

namespace {

enum Stream : std::int64_t { channel_stream = 200, key_stream, query_stream };

constexpr int rope_dims = 64;
constexpr int large_channels = 8;
constexpr double tail_nats = 1.5;  // deviation of the scores that no key was favoured for

}  // namespace

Latents::Latents(std::uint64_t seed, int d_qk) : seed_(seed), deviation_(static_cast<std::size_t>(d_qk)) {
    Random random(seed, {channel_stream});
    const int latent_dims = d_qk - rope_dims;
    for (int d = 0; d < d_qk; ++d)
        deviation_[static_cast<std::size_t>(d)] = random.log_normal(d < latent_dims ? 0.6 : 0.25);
    for (int i = 0; i < large_channels; ++i)
        deviation_[static_cast<std::size_t>(random.below(latent_dims))] = random.uniform(10, 50);
}

void Latents::key(Token token, float* values) const {
    Random random(seed_, {key_stream, token.source, token.slot});
    const double norm = random.log_normal(0.3);
    for (const double deviation : deviation_) *values++ = static_cast<float>(norm * deviation * random.normal());
}

void Latents::query(std::int64_t row, std::int64_t head, std::span<const Token> tokens, double softmax_scale,
                    float* values) const {
    Random random(seed_, {query_stream, row, head});
    // Divided by the channel's deviation, every channel of the keys matters alike.
    std::vector<double> query(deviation_.size());
    const double noise = tail_nats / (softmax_scale * std::sqrt(static_cast<double>(query.size())));
    for (std::size_t d = 0; d < query.size(); ++d) query[d] = noise * random.normal() / deviation_[d];

    const auto count = static_cast<std::int64_t>(tokens.size());
    const std::int64_t favoured = std::min(4 + random.below(5), count);
    // About ln of the tail's sum, exp(tail_nats^2 / 2) per token, and between a little less and a lot more than that.
    const double peak_nats = 0.7 * static_cast<double>(std::bit_width(tokens.size())) + random.uniform(0, 4);
    std::vector<float> key(deviation_.size());
    for (std::int64_t i = 0; i < favoured; ++i) {
        const std::int64_t share = count / favoured;  // one of every share of the row: never the same twice
        this->key(tokens[static_cast<std::size_t>(i * share + random.below(share))], key.data());
        double norm = 0;  // of the key in units of the deviations
        for (std::size_t d = 0; d < key.size(); ++d) norm += key[d] * key[d] / (deviation_[d] * deviation_[d]);
        const double nats = peak_nats * random.uniform(0.8, 1);
        for (std::size_t d = 0; d < key.size(); ++d)
            query[d] += nats / softmax_scale * key[d] / (deviation_[d] * deviation_[d] * norm);
    }
    for (const double value : query) *values++ = static_cast<float>(value);
}

}  // namespace sparsemla::harness
