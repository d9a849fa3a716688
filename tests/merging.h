// A merge with memory of its own, and a model of it in float64.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numbers>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "sparsemla/decode.h"
#include "sparsemla/formats.h"

namespace sparsemla::test {

inline constexpr float infinity = std::numeric_limits<float>::infinity();
inline constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

/// A tensor with memory of its own: guard bytes around it, gaps between its heads and rows, all poisoned.
class Padded {
   public:
    /// `transposed`: a rank-2 tensor whose rows lie side by side, as a view [heads, rows].t() has them.
    Padded(DType dtype, std::vector<std::int64_t> shape, std::int64_t padding, bool transposed = false) {
        view_.dtype = dtype;
        view_.rank = static_cast<int>(shape.size());
        std::int64_t stride = transposed ? 1 + padding : 1;
        for (int n = 0; n < view_.rank; ++n) {
            const int i = transposed ? n : view_.rank - 1 - n;
            view_.shape[i] = shape[i];
            view_.strides[i] = stride;
            stride = stride * shape[i] + padding;
        }
        memory_.assign(static_cast<std::size_t>(2 * guard_bytes + stride * size_bytes(dtype)), poison);
        view_.data = memory_.data() + guard_bytes;
    }
    Padded(const Padded&) = delete;
    Padded(Padded&&) = default;  // a vector's memory moves with it

    const Tensor& view() const { return view_; }
    template <class T>
    T& at(std::int64_t i, std::int64_t j = 0, std::int64_t k = 0) const {
        return static_cast<T*>(view_.data)[i * view_.strides[0] + j * view_.strides[1] + k * view_.strides[2]];
    }
    float value(std::int64_t i, std::int64_t j, std::int64_t k = 0) const {
        return view_.dtype == DType::bf16 ? bf16_to_float(at<std::uint16_t>(i, j, k)) : at<float>(i, j, k);
    }
    void set(float value, std::int64_t i, std::int64_t j, std::int64_t k = 0) const {
        if (view_.dtype == DType::bf16)
            at<std::uint16_t>(i, j, k) = float_to_bf16(value);
        else
            at<float>(i, j, k) = value;
    }
    /// Whether every byte outside [rows, heads] is still poison.
    bool rest_intact(std::int64_t rows, std::int64_t heads) const {
        std::vector<std::uint8_t> rest = memory_;
        const auto bytes = static_cast<std::size_t>(size_bytes(view_.dtype));
        const std::int64_t depth = view_.rank == 3 ? view_.shape[2] : 1;
        for (std::int64_t i = 0; i < rows; ++i)
            for (std::int64_t j = 0; j < heads; ++j)
                for (std::int64_t k = 0; k < depth; ++k)
                    std::memset(rest.data() + (reinterpret_cast<std::uint8_t*>(&at<char>(0)) - memory_.data()) +
                                    (i * view_.strides[0] + j * view_.strides[1] + k * view_.strides[2]) *
                                        static_cast<std::int64_t>(bytes),
                                poison, bytes);
        return rest == std::vector<std::uint8_t>(rest.size(), poison);
    }
    const std::vector<std::uint8_t>& memory() const { return memory_; }

   private:
    static constexpr std::int64_t guard_bytes = 64;
    static constexpr std::uint8_t poison = 0x5A;
    std::vector<std::uint8_t> memory_;
    Tensor view_;
};

/// A merge of `partials` partials [rows, heads, 512]; every buffer holds one row and one head more than it must.
struct Merging {
    struct Options {
        DType partial_dtype = DType::f32;
        DType out_dtype = DType::f32;
        LseBase partial_base = LseBase::natural;
        LseBase lse_base = LseBase::natural;
        std::int64_t padding = 3;
        bool transposed_lse = false;
    };

    std::int64_t rows, heads;
    Options options;
    std::vector<Padded> outs, lses, counts;
    std::optional<Padded> sinks;
    bool plus_inf_is_empty = false;
    Padded out, lse;
    std::vector<Partial> partials;

    Merging(std::size_t n, std::int64_t rows_, std::int64_t heads_, Options o)
        : rows(rows_),
          heads(heads_),
          options(o),
          out(o.out_dtype, {rows_ + 1, heads_ + 1, value_dims}, o.padding),
          lse(DType::f32, {rows_ + 1, heads_ + 1}, o.padding, o.transposed_lse) {
        for (std::size_t i = 0; i < n; ++i) {
            outs.emplace_back(o.partial_dtype, std::vector<std::int64_t>{rows + 1, heads + 1, value_dims}, o.padding);
            lses.emplace_back(DType::f32, std::vector<std::int64_t>{rows + 1, heads + 1}, o.padding, o.transposed_lse);
            partials.push_back({.out = outs[i].view(), .lse = lses[i].view(), .counts = {}});
        }
    }

    /// Outputs of normal variates, lse uniform in [-spread, spread], some of them -inf.
    void fill_random(std::uint32_t seed, float spread, double empty) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        std::uniform_real_distribution<float> uniform(-1, 1);
        for (std::size_t i = 0; i < outs.size(); ++i)
            for (std::int64_t row = 0; row < rows; ++row)
                for (std::int64_t head = 0; head < heads; ++head) {
                    const bool absent = uniform(random) * 0.5 + 0.5 < empty;
                    lses[i].set(absent ? -infinity : spread * uniform(random), row, head);
                    for (int d = 0; d < value_dims; ++d) outs[i].set(normal(random), row, head, d);
                }
    }
    /// Every element of partial i's row and head.
    void set(std::size_t i, float lse_value, float value, std::int64_t row = 0, std::int64_t head = 0) {
        lses[i].set(lse_value, row, head);
        for (int d = 0; d < value_dims; ++d) outs[i].set(value, row, head, d);
    }
    void set_counts(std::size_t i, const std::vector<std::int32_t>& values) {
        counts.emplace_back(DType::i32, std::vector<std::int64_t>{rows + 1, 1}, options.padding);
        for (std::size_t row = 0; row < values.size(); ++row) counts.back().at<std::int32_t>(row) = values[row];
        partials[i].counts = counts.back().view();
        partials[i].counts.rank = 1;
    }
    void set_sinks(const std::vector<float>& values) {
        sinks.emplace(DType::f32, std::vector<std::int64_t>{heads + 1, 1}, options.padding);
        for (std::size_t head = 0; head < values.size(); ++head) sinks->at<float>(head) = values[head];
    }

    MergeArgs args() const {
        MergeArgs result{.rows = rows,
                         .heads = heads,
                         .partials = partials,
                         .partial_base = options.partial_base,
                         .plus_inf_is_empty = plus_inf_is_empty,
                         .sinks = {},
                         .out = out.view(),
                         .lse = lse.view(),
                         .lse_base = options.lse_base};
        if (sinks) {
            result.sinks = sinks->view();
            result.sinks.rank = 1;
        }
        return result;
    }
    void run(const std::string& what) {
        merge(args());
        EXPECT_TRUE(out.rest_intact(rows, heads)) << what << ": a byte beside out was written";
        EXPECT_TRUE(lse.rest_intact(rows, heads)) << what << ": a byte beside lse was written";
    }
};

/// The merge of one (row, head) in float64.
struct MergeModel {
    double lse = 0;
    std::vector<double> out = std::vector<double>(value_dims, 0.0);
    std::vector<double> weighted_abs = std::vector<double>(value_dims, 0.0);  ///< sum of weight * |value|

    MergeModel(const Merging& m, std::int64_t row, std::int64_t head) {
        const double unit = m.options.partial_base == LseBase::two ? std::numbers::ln2 : 1.0;
        double exponentials = 0;
        std::vector<double> weights;
        for (std::size_t i = 0; i < m.outs.size(); ++i) {
            const float value = m.lses[i].value(row, head);
            const bool counted =
                !m.partials[i].counts.present() ||
                static_cast<const std::int32_t*>(m.partials[i].counts.data)[row * m.partials[i].counts.strides[0]] > 0;
            const bool foreign_empty = m.plus_inf_is_empty && value == infinity;
            weights.push_back(counted && !foreign_empty ? std::exp(static_cast<double>(value) * unit) : 0.0);
            exponentials += weights.back();
        }
        lse = std::log(exponentials) / (m.options.lse_base == LseBase::two ? std::numbers::ln2 : 1.0);
        const double sink = m.sinks ? std::exp(static_cast<double>(m.sinks->at<float>(head))) : 0.0;
        for (std::size_t i = 0; i < m.outs.size(); ++i)
            for (int d = 0; d < value_dims && weights[i] != 0; ++d) {
                const double term = weights[i] / (exponentials + sink) * m.outs[i].value(row, head, d);
                out[d] += term;
                weighted_abs[d] += std::fabs(term);
            }
    }
};

/// The merge equals the model: FP32 rounding of weights and sums, and of the stored value; of subnormal weights, a few
/// smallest steps of FP32 for values of order one. For lse up to about 700.
inline void expect_model(const Merging& m, const std::string& what) {
    const double stored = m.options.out_dtype == DType::bf16 ? 0x1p-8 : 0x1p-24;
    for (std::int64_t row = 0; row < m.rows; ++row)
        for (std::int64_t head = 0; head < m.heads; ++head) {
            const MergeModel model(m, row, head);
            const float lse = m.lse.value(row, head);
            const std::string where = what + ", row " + std::to_string(row) + ", head " + std::to_string(head);
            if (std::isinf(model.lse))
                ASSERT_EQ(lse, -infinity) << where;
            else
                ASSERT_NEAR(lse, model.lse, 1e-6 * (1 + std::fabs(model.lse))) << where;
            for (int d = 0; d < value_dims; ++d)
                ASSERT_NEAR(m.out.value(row, head, d), model.out[d],
                            0x1p-18 * model.weighted_abs[d] + stored * std::fabs(model.out[d]) + 0x1p-145)
                    << where << ", dim " << d;
        }
}

}  // namespace sparsemla::test
