#include "harness/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "harness/parallel.h"
#include "sparsemla/formats.h"

namespace sparsemla::harness {

namespace {

constexpr std::int64_t block_records = 64;  // dequantised at a time
constexpr int lanes = 8;  // independent sums, so that the compiler can use vectors; every d_qk is a multiple

/// The records that a row's active columns name, of all sources together, each once: columns that repeat a record have
/// the same score, and round alike.
struct Columns {
    std::vector<double> keys;     ///< [n, d_qk] records without k_scale
    std::vector<double> k_scale;  ///< [n]
    std::vector<double> times;    ///< [n]: how many columns name the record

    std::int64_t count() const { return static_cast<std::int64_t>(k_scale.size()); }
};

template <class T>
T element(const ConstTensor& tensor, std::int64_t i, std::int64_t j = 0, std::int64_t k = 0) {
    const std::int64_t index[] = {i, j, k};
    std::int64_t offset = 0;
    for (int d = 0; d < tensor.rank; ++d)
        if (tensor.shape[d] != 1) offset += index[d] * tensor.strides[d];
    return static_cast<const T*>(tensor.data)[offset];
}

/// The slots of the row's active columns that the source holds.
std::vector<std::int32_t> active_slots(const CaseSource& source, std::int64_t row) {
    const std::int64_t width = source.slots.shape[1];
    std::int64_t columns = width;
    if (source.counts.present())
        columns = std::clamp<std::int64_t>(element<std::int32_t>(source.counts, row) - source.count_offset, 0, width);
    std::vector<std::int32_t> slots;
    for (std::int64_t column = 0; column < columns; ++column) {
        const auto slot = element<std::int32_t>(source.slots, row, column);
        if (source.cache.holds(slot)) slots.push_back(slot);
    }
    return slots;
}

void append_records(const CaseSource& source, std::vector<std::int32_t> slots, Columns& columns) {
    std::sort(slots.begin(), slots.end());
    std::vector<std::int32_t> distinct;
    for (const std::int32_t slot : slots) {
        if (distinct.empty() || distinct.back() != slot) {
            distinct.push_back(slot);
            columns.times.push_back(0);
        }
        ++columns.times.back();
    }
    const int d_qk = source.cache.layout().d_qk();
    const std::int64_t before = columns.count();
    const auto n = static_cast<std::int64_t>(distinct.size());
    columns.k_scale.insert(columns.k_scale.end(), distinct.size(), source.k_scale);
    columns.keys.resize(static_cast<std::size_t>((before + n) * d_qk));
    for_each_index((n + block_records - 1) / block_records, [&](std::int64_t block) {
        const std::int64_t first = block * block_records;
        const std::int64_t size = std::min(block_records, n - first);
        unpack(source.cache, dense(std::as_const(distinct).data() + first, DType::i32, {size}),
               dense(columns.keys.data() + (before + first) * d_qk, DType::f64, {size, d_qk}));
    });
}

/// Fills `columns`; returns the number of active columns.
std::int64_t gather(const CaseStep& step, std::int64_t row, Columns& columns) {
    std::int64_t active = 0;
    for (const CaseSource& source : step.sources) {
        std::vector<std::int32_t> slots = active_slots(source, row);
        active += static_cast<std::int64_t>(slots.size());
        if (!slots.empty()) append_records(source, std::move(slots), columns);
    }
    return active;
}

std::vector<double> load_query(const CaseStep& step, std::int64_t row, std::int64_t head) {
    const std::int64_t d_qk = step.query.shape[2];
    std::vector<double> query(static_cast<std::size_t>(d_qk));
    for (std::int64_t d = 0; d < d_qk; ++d)
        query[static_cast<std::size_t>(d)] = step.query.dtype == DType::bf16
                                                 ? bf16_to_float(element<std::uint16_t>(step.query, row, head, d))
                                                 : e4m3_to_float(element<std::uint8_t>(step.query, row, head, d));
    return query;
}

struct Dot {
    double sum = 0;
    double abs = 0;  ///< sum |q k|
};

Dot dot(const double* q, const double* k, std::int64_t d_qk) {
    double sum[lanes] = {};
    double abs[lanes] = {};
    for (std::int64_t d = 0; d < d_qk; d += lanes)
        for (int i = 0; i < lanes; ++i) {
            const double product = q[d + i] * k[d + i];
            sum[i] += product;
            abs[i] += std::fabs(product);
        }
    Dot total;
    for (int i = 0; i < lanes; ++i) {
        total.sum += sum[i];
        total.abs += abs[i];
    }
    return total;
}

/// std::max that keeps NaN.
double max_or_nan(double a, double b) { return a > b || a != a ? a : b; }

/// Per row: sums over the values that no head's weights enter.
void sum_values(const Columns& columns, std::int64_t d_qk, double out_scale, std::int64_t row, Oracle& oracle) {
    double* abs = oracle.value_abs.data() + row * value_dims;
    double* square = oracle.value_square.data() + row * value_dims;
    for (std::int64_t c = 0; c < columns.count(); ++c) {
        const double* value = columns.keys.data() + c * d_qk;
        const auto at = static_cast<std::size_t>(c);
        const double scale = columns.times[at] * columns.k_scale[at] * out_scale;
        for (int d = 0; d < value_dims; ++d) {
            const double v = scale * value[d];
            abs[d] += std::fabs(v);
            square[d] += v * v;
        }
    }
}

/// out, A and the sum of squares of one row and head, from the weights w [n].
void sum_weighted(const Columns& columns, std::int64_t d_qk, const std::vector<double>& weights, std::int64_t cell,
                  Oracle& oracle) {
    for (std::int64_t first = 0; first < value_dims; first += lanes) {
        double sum[lanes] = {};
        double abs[lanes] = {};
        double square[lanes] = {};
        const double* value = columns.keys.data() + first;
        for (std::size_t c = 0; c < weights.size(); ++c, value += d_qk)
            for (int i = 0; i < lanes; ++i) {
                const double product = weights[c] * value[i];
                sum[i] += product;
                abs[i] += std::fabs(product);
                square[i] += product * product;
            }
        const std::int64_t at = cell * value_dims + first;
        std::copy_n(sum, lanes, oracle.out.begin() + at);
        std::copy_n(abs, lanes, oracle.weighted_abs.begin() + at);
        std::copy_n(square, lanes, oracle.weighted_square.begin() + at);
    }
}

void decode_head(const CaseStep& step, const Columns& columns, std::int64_t row, std::int64_t head, Oracle& oracle) {
    const std::int64_t d_qk = step.query.shape[2];
    const std::int64_t cell_idx = row * step.heads + head;
    const auto cell = static_cast<std::size_t>(cell_idx);
    const std::vector<double> query = load_query(step, row, head);
    std::vector<double> weights(columns.k_scale.size());
    double max = -std::numeric_limits<double>::infinity();
    double largest = 0;
    for (std::size_t c = 0; c < weights.size(); ++c) {
        const Dot product = dot(query.data(), columns.keys.data() + static_cast<std::int64_t>(c) * d_qk, d_qk);
        const double scale = double{step.softmax_scale} * step.q_scale * columns.k_scale[c];
        weights[c] = scale * product.sum;
        max = max_or_nan(max, weights[c]);
        oracle.score_scale[cell] = max_or_nan(oracle.score_scale[cell], scale * product.abs);
        largest = max_or_nan(largest, product.abs);
    }
    double sum = 0;
    for (std::size_t c = 0; c < weights.size(); ++c) sum += weights[c] = columns.times[c] * std::exp(weights[c] - max);
    const double total = step.sinks.present() ? sum + std::exp(element<float>(step.sinks, head) - max) : sum;
    for (std::size_t c = 0; c < weights.size(); ++c) weights[c] *= columns.k_scale[c] * step.out_scale / total;
    oracle.lse[cell] = max + std::log(sum);
    oracle.anchor_weight[cell] = 1 / total;
    oracle.largest_magnitude[cell] = max_or_nan(largest, oracle.score_scale[cell]);
    sum_weighted(columns, d_qk, weights, cell_idx, oracle);
}

Oracle empty_oracle(const CaseStep& step) {
    Oracle oracle;
    oracle.rows = step.rows;
    oracle.heads = step.heads;
    const auto rows = static_cast<std::size_t>(step.rows);
    const std::size_t cells = rows * static_cast<std::size_t>(step.heads);
    oracle.value_factor = 0;
    for (const CaseSource& source : step.sources) {
        oracle.width += source.slots.shape[1];
        oracle.value_factor = std::max(oracle.value_factor, std::fabs(double{source.k_scale} * step.out_scale));
    }
    for (std::vector<double>* array : {&oracle.out, &oracle.weighted_abs, &oracle.weighted_square})
        array->assign(cells * value_dims, 0.0);
    for (std::vector<double>* array : {&oracle.value_abs, &oracle.value_square}) array->assign(rows * value_dims, 0.0);
    for (std::vector<double>* array : {&oracle.anchor_weight, &oracle.score_scale, &oracle.largest_magnitude})
        array->assign(cells, 0.0);
    oracle.lse.assign(cells, -std::numeric_limits<double>::infinity());
    oracle.active.assign(rows, 0);
    return oracle;
}

/// The largest of sum |v| and its scaled form over the dimensions of a row.
double largest_value(const Oracle& oracle, std::int64_t row) {
    const double* abs = oracle.value_abs.data() + row * value_dims;
    double largest = 0;
    for (int d = 0; d < value_dims; ++d) largest = max_or_nan(largest, abs[d]);
    return oracle.value_factor > 0 && oracle.value_factor < 1 ? largest / oracle.value_factor : largest;
}

}  // namespace

Oracle compute_oracle(const CaseStep& step) {
    Oracle oracle = empty_oracle(step);
    for (std::int64_t row = 0; row < step.rows; ++row) {
        Columns columns;
        oracle.active[static_cast<std::size_t>(row)] = gather(step, row, columns);
        if (columns.count() == 0) continue;
        sum_values(columns, step.query.shape[2], step.out_scale, row, oracle);
        const double largest = largest_value(oracle, row);
        for_each_index(step.heads, [&](std::int64_t head) {
            decode_head(step, columns, row, head, oracle);
            double& magnitude = oracle.largest_magnitude[static_cast<std::size_t>(row * step.heads + head)];
            magnitude = max_or_nan(magnitude, largest);
        });
    }
    return oracle;
}

}  // namespace sparsemla::harness
