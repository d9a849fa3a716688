// The definition of decode in float64: plain loops, no SIMD, no threads. Every other kernel is measured against it.
//
//   scores      s_c = softmax_scale * q_scale * k_scale * (q . k_c) for the active columns c of all sources
//   weights     w_c = out_scale * k_scale * exp(s_c - m) / (l + exp(sink - m)), and lse = m + ln(l)
//   sum         out = sum_c w_c * v_c, rounded once
//
// An absent column is never loaded. A row without active columns is out = +0, lse = -inf, whatever the sink.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/codec.h"
#include "cpu/gather.h"
#include "kernels.h"

namespace sparsemla::detail {

namespace {

constexpr double minus_infinity = -std::numeric_limits<double>::infinity();

/// The scratch of one row. [heads, columns] arrays are indexed by the rank of a column among the active ones.
struct Workspace {
    double* record;  ///< [d_qk] one dequantised record
    double* query;   ///< [heads, d_qk]
    double* out;     ///< [heads, 512]
    double* scores;  ///< [heads, columns of all sources], then the weights

    static std::size_t bytes(std::int64_t heads, std::int64_t d_qk, std::int64_t columns) {
        return static_cast<std::size_t>(d_qk + heads * (d_qk + value_dims + columns)) * sizeof(double);
    }
    explicit Workspace(const DecodeParams& params) {
        record = reinterpret_cast<double*>(params.workspace);
        query = record + params.d_qk;
        out = query + params.heads * params.d_qk;
        scores = out + params.heads * value_dims;
    }
};

/// Calls visit(source, slot, index) for every active column of the row, source 0 first; index counts from 0.
template <class Visit>
std::int64_t for_each_column(const DecodeParams& params, std::int64_t row, Visit visit) {
    std::int64_t index = 0;
    for (int i = 0; i < params.num_sources; ++i) {
        const SourceParams& source = params.sources[i];
        const std::int64_t columns = active_columns(source, row);
        for (std::int64_t column = 0; column < columns; ++column)
            if (const std::int64_t slot = slot_of(source, row, column); slot >= 0) visit(source, slot, index++);
    }
    return index;
}

double dot(const double* a, const double* b, std::int64_t n) {
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

void load_query(const DecodeParams& params, std::int64_t row, double* query) {
    for (std::int64_t head = 0; head < params.heads; ++head) {
        const std::int64_t first = row * params.query_row_stride + head * params.query_head_stride;
        for (std::int64_t d = 0; d < params.d_qk; ++d)
            *query++ = params.query_dtype == DType::bf16
                           ? bf16_to_float(static_cast<const std::uint16_t*>(params.query)[first + d])
                           : e4m3_to_float(static_cast<const std::uint8_t*>(params.query)[first + d]);
    }
}

/// Fills scores [heads, stride] and returns the number of active columns.
std::int64_t score(const DecodeParams& params, std::int64_t row, std::int64_t stride, const Workspace& work) {
    const double scale = double{params.softmax_scale} * value_of(params.q_scale);
    return for_each_column(params, row, [&](const SourceParams& source, std::int64_t slot, std::int64_t index) {
        dequantise(source.cache, slot, work.record);
        for (std::int64_t head = 0; head < params.heads; ++head)
            work.scores[head * stride + index] =
                scale * value_of(source.k_scale) * dot(work.query + head * params.d_qk, work.record, params.d_qk);
    });
}

/// Turns a head's n > 0 scores into exp(s - m) / (l + exp(sink - m)) and returns lse. NaN anywhere makes them all NaN.
double softmax(double* scores, std::int64_t n, const float* sink) {
    const double max = *std::max_element(scores, scores + n);
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i) sum += scores[i] = std::exp(scores[i] - max);
    const double total = sink != nullptr ? sum + std::exp(double{*sink} - max) : sum;
    for (std::int64_t i = 0; i < n; ++i) scores[i] /= total;
    return max + std::log(sum);
}

void accumulate(const DecodeParams& params, std::int64_t row, std::int64_t stride, const Workspace& work) {
    for_each_column(params, row, [&](const SourceParams& source, std::int64_t slot, std::int64_t index) {
        dequantise(source.cache, slot, work.record);
        for (std::int64_t head = 0; head < params.heads; ++head) {
            const double weight = work.scores[head * stride + index] * value_of(source.k_scale) * params.out_scale;
            for (int d = 0; d < value_dims; ++d) work.out[head * value_dims + d] += weight * work.record[d];
        }
    });
}

void store_out(const DecodeParams& params, std::int64_t row, const double* out) {
    for (std::int64_t head = 0; head < params.heads; ++head) {
        const std::int64_t first = row * params.out_row_stride + head * params.out_head_stride;
        for (std::int64_t d = first; d < first + value_dims; ++d, ++out)
            if (params.out_dtype == DType::bf16)
                static_cast<std::uint16_t*>(params.out)[d] = double_to_bf16(*out);
            else
                static_cast<float*>(params.out)[d] = static_cast<float>(*out);
    }
}

void store_lse(const DecodeParams& params, std::int64_t row, std::int64_t head, double lse) {
    if (params.lse == nullptr) return;
    constexpr double log2_e = 1.4426950408889634;
    params.lse[row * params.lse_row_stride + head * params.lse_head_stride] =
        static_cast<float>(params.lse_base == LseBase::two ? lse * log2_e : lse);
}

void decode_row(const DecodeParams& params, std::int64_t row, std::int64_t stride, const Workspace& work) {
    load_query(params, row, work.query);
    const std::int64_t columns = score(params, row, stride, work);
    for (std::int64_t head = 0; head < params.heads; ++head) {
        const float* sink = params.sinks != nullptr ? params.sinks + head * params.sinks_stride : nullptr;
        store_lse(params, row, head,
                  columns == 0 ? minus_infinity : softmax(work.scores + head * stride, columns, sink));
    }
    std::fill_n(work.out, params.heads * value_dims, 0.0);
    accumulate(params, row, stride, work);
    store_out(params, row, work.out);
}

void decode_rows(const DecodeParams& params, Stream) {
    std::int64_t stride = 0;
    for (int i = 0; i < params.num_sources; ++i) stride += params.sources[i].width;
    const Workspace work(params);
    for (std::int64_t row = 0; row < params.rows; ++row) decode_row(params, row, stride, work);
}

std::optional<std::string> refuse(const Problem&, const DeviceSpec&, const PlanOptions& options) {
    if (options.p_format && *options.p_format != PFormat::f64)
        return "p_format is f64 only: the definition does not round P";
    if (options.p_scale && *options.p_scale != 1.0F) return "p_scale is 1 only: the definition does not scale P";
    if (options.anchor && *options.anchor != Anchor::row_max)
        return "anchor is row_max only: the definition knows no other maximum";
    if (options.splits && *options.splits != 1) return "splits is 1 only: the definition sums a row in one piece";
    if (options.columns) return "columns must not be given: an undivided row has no rule for dividing it";
    if (options.chunk) return "chunk must not be given: the definition takes columns one by one";
    return std::nullopt;
}

KernelPlan make_kernel_plan(const Problem& problem, const DeviceSpec&, const PlanOptions&) {
    std::int64_t columns = 0;
    for (const SourceProblem& source : problem.sources) columns += source.width;
    return {.schedule = {.kernel = std::string(reference_kernel.name),
                         .p_format = PFormat::f64,
                         .p_scale = 1.0F,
                         .anchor = Anchor::row_max,
                         .splits = 1,
                         .columns = ColumnRule::blocks,
                         .chunk = 1,
                         .row_capacity = problem.rows},
            .workspace_bytes = Workspace::bytes(problem.heads, d_qk(problem), columns),
            .state_bytes = 0};
}

void prepare(const Plan&, Memory, Stream) {}

}  // namespace

const Kernel reference_kernel = {
    .name = "reference",
    .device = Device::Kind::cpu,
    .summary = "float64, the definition, plain loops",
    .on_request_only = true,
    .refuse = refuse,
    .plan = make_kernel_plan,
    .prepare = prepare,
    .decode = decode_rows,
};

}  // namespace sparsemla::detail
