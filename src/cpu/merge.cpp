// Merge of partial results, one (row, head) at a time: which partials contribute, their weights, the weighted sum.
#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels.h"
#include "merge_math.h"
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

using Math = MergeMath<PlainOperations>;

/// The partial's lse, or -inf where it contributes nothing.
float lse_of(const MergeArgs& args, const Partial& partial, std::int64_t row, std::int64_t head) {
    if (partial.counts.present() && at<std::int32_t>(partial.counts, row) <= 0) return -infinity;
    const float lse = at<float>(partial.lse, row, head);
    return args.plus_inf_is_empty && lse == infinity ? -infinity : lse;
}

MergeSummary summarise(const MergeArgs& args, std::int64_t row, std::int64_t head) {
    return Math::summarise(static_cast<int>(args.partials.size()), args.partial_base,
                           [&](int i) { return lse_of(args, args.partials[static_cast<std::size_t>(i)], row, head); });
}

MergeSoftmax softmax_of(const MergeArgs& args, const MergeSummary& summary, std::int64_t head) {
    if (!args.sinks.present()) return Math::softmax(summary);
    return Math::softmax(summary, args.partial_base, at<float>(args.sinks, head));
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

void merge_values(const MergeArgs& args, const MergeSummary& summary, std::int64_t row, std::int64_t head) {
    Values sum = {};
    if (!summary.defined) std::fill_n(sum, value_dims, not_a_number);
    if (summary.defined && summary.contributors != 0) {
        const MergeSoftmax softmax = softmax_of(args, summary, head);
        if (Math::passes_through(summary, softmax))
            return pass_through(args.out, args.partials[static_cast<std::size_t>(summary.last)], row, head);
        for (const Partial& partial : args.partials) {
            const float lse = lse_of(args, partial, row, head);
            if (lse == -infinity) continue;
            const float weight = Math::weight(args.partial_base, lse, softmax);
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
            const MergeSummary summary = summarise(args, row, head);
            merge_values(args, summary, row, head);
            if (args.lse.present())
                static_cast<float*>(args.lse.data)[row * args.lse.strides[0] + head * args.lse.strides[1]] =
                    Math::lse(summary, args.partial_base, args.lse_base);
        }
}

}  // namespace sparsemla::detail
