// Merge of partial results, one (row, head) at a time: which partials contribute, their weights, the weighted sum.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "kernels.h"
#include "sparsemla/formats.h"

namespace sparsemla::detail {

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

template <class T>
T at(const ConstTensor& tensor, std::int64_t row, std::int64_t head = 0) {
    return static_cast<const T*>(tensor.data)[row * tensor.strides[0] + head * tensor.strides[1]];
}

/// The 512 values of one (row, head), in the tensor's dtype.
template <class Byte, class Void>
Byte* values_of(const BasicTensor<Void>& tensor, std::int64_t row, std::int64_t head) {
    const std::int64_t element = row * tensor.strides[0] + head * tensor.strides[1];
    return static_cast<Byte*>(tensor.data) + element * size_bytes(tensor.dtype);
}

float power(LseBase base, float exponent) { return base == LseBase::two ? std::exp2(exponent) : std::exp(exponent); }

/// The partial's lse, or -inf where it contributes nothing.
float lse_of(const MergeArgs& args, const Partial& partial, std::int64_t row, std::int64_t head) {
    if (partial.counts.present() && at<std::int32_t>(partial.counts, row) <= 0) return -infinity;
    const float lse = at<float>(partial.lse, row, head);
    return args.plus_inf_is_empty && lse == infinity ? -infinity : lse;
}

/// What the lse of all partials say of one (row, head), in the partials' base.
struct Summary {
    float peak = -infinity;         ///< the largest lse
    float sum = 0;                  ///< of power(lse - peak)
    bool defined = true;            ///< no lse is NaN or +inf
    std::int64_t contributors = 0;  ///< partials whose lse is not -inf
    const Partial* last = nullptr;  ///< the last of them
};

Summary summarise(const MergeArgs& args, std::int64_t row, std::int64_t head) {
    Summary summary;
    for (const Partial& partial : args.partials) {
        const float lse = lse_of(args, partial, row, head);
        if (lse == -infinity) continue;
        summary.defined = summary.defined && lse < infinity;  // false for NaN
        summary.peak = std::max(summary.peak, lse);
        ++summary.contributors;
        summary.last = &partial;
    }
    if (!summary.defined) return summary;
    for (const Partial& partial : args.partials) {
        const float lse = lse_of(args, partial, row, head);
        if (lse != -infinity) summary.sum += power(args.partial_base, lse - summary.peak);
    }
    return summary;
}

/// The softmax over all partials and the sink: a partial's weight is power(lse - top) / total.
struct Softmax {
    float top = 0;  ///< of the peak and the sink, so that no power overflows
    float total = 1;
};

Softmax softmax_of(const MergeArgs& args, const Summary& summary, std::int64_t head) {
    if (!args.sinks.present()) return {.top = summary.peak, .total = summary.sum};
    float sink = at<float>(args.sinks, head);
    if (args.partial_base == LseBase::two) sink *= std::numbers::log2e_v<float>;
    const float top = std::max(summary.peak, sink);  // a NaN sink stays out of it, and reaches the total below
    const float sink_term = sink == top ? 1.0F : power(args.partial_base, sink - top);
    return {.top = top, .total = summary.sum * power(args.partial_base, summary.peak - top) + sink_term};
}

float merged_lse(const MergeArgs& args, const Summary& summary) {
    if (!summary.defined) return not_a_number;
    if (summary.contributors == 0) return -infinity;
    if (summary.contributors == 1 && args.partial_base == args.lse_base) return summary.peak;
    const bool two = args.partial_base == LseBase::two;
    const double sum = summary.sum;
    double lse = summary.peak + (two ? std::log2(sum) : std::log(sum));
    if (args.partial_base != args.lse_base) lse *= two ? std::numbers::ln2 : std::numbers::log2e;
    return static_cast<float>(lse);
}

using Values = float[value_dims];

void load(const ConstTensor& tensor, std::int64_t row, std::int64_t head, Values& values) {
    const auto* stored = values_of<const std::byte>(tensor, row, head);
    if (tensor.dtype == DType::f32)
        std::copy_n(reinterpret_cast<const float*>(stored), value_dims, values);
    else
        std::transform(reinterpret_cast<const std::uint16_t*>(stored),
                       reinterpret_cast<const std::uint16_t*>(stored) + value_dims, values, bf16_to_float);
}

void store(const Values& values, const Tensor& tensor, std::int64_t row, std::int64_t head) {
    auto* stored = values_of<std::byte>(tensor, row, head);
    if (tensor.dtype == DType::f32)
        std::copy_n(values, value_dims, reinterpret_cast<float*>(stored));
    else
        std::transform(values, values + value_dims, reinterpret_cast<std::uint16_t*>(stored), float_to_bf16);
}

/// The partial's values as they are: equal dtypes keep every bit, NaN payloads included.
void pass_through(const Tensor& out, const Partial& partial, std::int64_t row, std::int64_t head) {
    if (partial.out.dtype == out.dtype) {
        std::memcpy(values_of<std::byte>(out, row, head), values_of<const std::byte>(partial.out, row, head),
                    static_cast<std::size_t>(value_dims * size_bytes(out.dtype)));
        return;
    }
    Values values;
    load(partial.out, row, head, values);
    store(values, out, row, head);
}

void merge_values(const MergeArgs& args, const Summary& summary, std::int64_t row, std::int64_t head) {
    Values sum = {};
    if (!summary.defined) std::fill_n(sum, value_dims, not_a_number);
    if (summary.defined && summary.contributors != 0) {
        const Softmax softmax = softmax_of(args, summary, head);
        // One partial of weight 1: there is no sink, or one too small to matter.
        if (summary.contributors == 1 && softmax.total == 1.0F && softmax.top == summary.peak)
            return pass_through(args.out, *summary.last, row, head);
        for (const Partial& partial : args.partials) {
            const float lse = lse_of(args, partial, row, head);
            if (lse == -infinity) continue;
            const float weight = power(args.partial_base, lse - softmax.top) / softmax.total;
            Values values;
            load(partial.out, row, head, values);
            for (int d = 0; d < value_dims; ++d) sum[d] += weight * values[d];
        }
    }
    store(sum, args.out, row, head);
}

}  // namespace

void merge_cpu(const MergeArgs& args) {
    for (std::int64_t row = 0; row < args.rows; ++row)
        for (std::int64_t head = 0; head < args.heads; ++head) {
            const Summary summary = summarise(args, row, head);
            merge_values(args, summary, row, head);
            if (args.lse.present())
                static_cast<float*>(args.lse.data)[row * args.lse.strides[0] + head * args.lse.strides[1]] =
                    merged_lse(args, summary);
        }
}

}  // namespace sparsemla::detail
