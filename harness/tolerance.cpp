#include "harness/tolerance.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "sparsemla/formats.h"

namespace sparsemla::harness {

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double u_sum = 0x1p-24;             // of one FP32 addition
constexpr double smallest_normal = 0x1p-126;  // of FP32 and BF16
constexpr double largest_bounded = 0x1p110;   // sums of magnitudes above may overflow in FP32
constexpr double rms_margin = 1.5;
constexpr std::int64_t lse_base_additions = 160;  // in sequence: what lse_base holds
constexpr double ln_2 = 0.693147180559945309417;

constexpr double sqrt_3 = 1.7320508075688772;
constexpr double largest_u_s = 1e300;  // times A = 0 it must still be 0

std::string text(double value) {
    std::array<char, 32> buffer{};
    std::snprintf(buffer.data(), buffer.size(), "%.7g", value);
    return buffer.data();
}

std::string place(std::int64_t row, std::int64_t head) {
    return "row " + std::to_string(row) + ", head " + std::to_string(head);
}

template <class Bits>
Bits bits_at(const ConstTensor& tensor, std::int64_t row, std::int64_t head, std::int64_t dim) {
    const std::int64_t index[] = {row, head, dim};
    std::int64_t offset = 0;
    for (int i = 0; i < tensor.rank; ++i)
        if (tensor.shape[i] != 1) offset += index[i] * tensor.strides[i];
    return static_cast<const Bits*>(tensor.data)[offset];
}

double value_at(const ConstTensor& tensor, std::int64_t row, std::int64_t head, std::int64_t dim = 0) {
    return tensor.dtype == DType::bf16 ? bf16_to_float(bits_at<std::uint16_t>(tensor, row, head, dim))
                                       : bits_at<float>(tensor, row, head, dim);
}

/// The terms of one (row, head) that do not depend on the dimension.
struct Cell {
    std::size_t index = 0;  ///< in arrays [rows, heads]
    std::int64_t row = 0, head = 0;
    std::int64_t active = 0;
    double u_s = 0;
    double u_out = 0;
    bool bounded = true;
};

/// The comparison while it runs: the oracle's sums, and the worst found so far under each rule.
class Comparison {
   public:
    Comparison(const Oracle& oracle, const Accuracy& accuracy, const ConstTensor& out, const ConstTensor& lse,
               LseBase base)
        : oracle_(oracle), accuracy_(accuracy), out_(out), lse_(lse), base_(base) {}

    Verdict run(bool uncorrelated);

   private:
    Cell cell(std::int64_t row, std::int64_t head) const;
    void check_elements(const Cell& cell);
    void check_rms(const Cell& cell);
    void check_lse(const Cell& cell);
    double element_bound(const Cell& cell, std::size_t element, std::size_t value) const;
    double rms_unit(const Cell& cell, std::size_t element, std::size_t value) const;
    double lse_bound(const Cell& cell) const;
    double distance_ratio(double got, double expected, double bound, bool bounded) const;
    std::string explain_element() const;

    const Oracle& oracle_;
    const Accuracy& accuracy_;
    const ConstTensor& out_;
    const ConstTensor& lse_;
    LseBase base_;
    Verdict verdict_;
    double square_sum_ = 0;
    std::string rms_problem_, lse_problem_;
};

Cell Comparison::cell(std::int64_t row, std::int64_t head) const {
    Cell result{.index = static_cast<std::size_t>(row * oracle_.heads + head), .row = row, .head = head};
    result.active = oracle_.active[static_cast<std::size_t>(row)];
    result.u_s = std::min(std::expm1(accuracy_.u_score * oracle_.score_scale[result.index]), largest_u_s);
    result.u_out = out_.dtype == DType::bf16 ? 0x1p-8 : u_sum;
    result.bounded = !(oracle_.largest_magnitude[result.index] > largest_bounded);
    return result;
}

double Comparison::element_bound(const Cell& cell, std::size_t element, std::size_t value) const {
    const double relative =
        accuracy_.u_p + accuracy_.u_acc + cell.u_s + static_cast<double>(cell.active) * accuracy_.u_sum;
    const double v = oracle_.anchor_weight[cell.index] * oracle_.value_abs[value];
    const double pushed = oracle_.pushed_abs.empty() ? 0 : 0x1p-8 * oracle_.pushed_abs[element];
    return (1 + cell.u_out) * (relative * oracle_.weighted_abs[element] + accuracy_.u_sub * v + pushed) +
           cell.u_out * std::fabs(oracle_.out[element]) + smallest_normal * std::max(1.0, oracle_.value_factor);
}

double Comparison::rms_unit(const Cell& cell, std::size_t element, std::size_t value) const {
    const double squares = oracle_.anchor_weight[cell.index] * std::sqrt(oracle_.value_square[value]);
    return rms_margin *
               ((accuracy_.u_p / sqrt_3 + accuracy_.u_acc + cell.u_s) * std::sqrt(oracle_.weighted_square[element]) +
                accuracy_.u_sub / sqrt_3 * squares + cell.u_out / sqrt_3 * std::fabs(oracle_.out[element])) +
           smallest_normal * std::max(1.0, oracle_.value_factor);
}

double Comparison::lse_bound(const Cell& cell) const {
    const std::int64_t chunk = std::max<std::int64_t>(accuracy_.chunk, 1);
    const std::int64_t splits = std::max<std::int64_t>(accuracy_.splits, 1);
    const std::int64_t longest = std::min(cell.active, chunk) + 3 * (cell.active / chunk / splits + 1) + splits;
    return accuracy_.lse_base + accuracy_.lse_score * oracle_.score_scale[cell.index] +
           static_cast<double>(std::max<std::int64_t>(0, longest - lse_base_additions)) * accuracy_.u_sum;
}

/// |got - expected| / bound; infinite where a rule without a bound is broken.
double Comparison::distance_ratio(double got, double expected, double bound, bool bounded) const {
    if (std::isnan(expected)) return std::isnan(got) ? 0 : infinity;
    if (std::isinf(expected)) return got == expected || std::isnan(got) ? 0 : infinity;
    if (!bounded) return 0;
    const double distance = std::fabs(got - expected);
    return std::isnan(distance) ? infinity : distance / bound;
}

void Comparison::check_elements(const Cell& cell) {
    for (std::int64_t dim = 0; dim < value_dims; ++dim) {
        const std::size_t element = cell.index * value_dims + static_cast<std::size_t>(dim);
        const double expected = oracle_.out[element];
        const double got = value_at(out_, cell.row, cell.head, dim);
        double bound = 0;
        double ratio = 0;
        if (cell.active == 0) {
            ratio = got == 0 && !std::signbit(got) ? 0 : infinity;
        } else {
            bound = element_bound(cell, element, static_cast<std::size_t>(cell.row * value_dims + dim));
            ratio = distance_ratio(got, expected, bound, cell.bounded);
            if (std::isfinite(expected) && cell.bounded) square_sum_ += (got - expected) * (got - expected);
        }
        const bool first = cell.index == 0 && dim == 0;
        if (!first && ratio <= verdict_.worst_ratio) continue;
        verdict_.worst_ratio = ratio;
        verdict_.row = cell.row;
        verdict_.head = cell.head;
        verdict_.dim = dim;
        verdict_.got = got;
        verdict_.expected = expected;
        verdict_.bound = bound;
    }
}

void Comparison::check_rms(const Cell& cell) {
    if (cell.active == 0 || !cell.bounded) return;
    double squares = 0;
    for (std::int64_t dim = 0; dim < value_dims; ++dim) {
        const std::size_t element = cell.index * value_dims + static_cast<std::size_t>(dim);
        const double unit = rms_unit(cell, element, static_cast<std::size_t>(cell.row * value_dims + dim));
        const double error = (value_at(out_, cell.row, cell.head, dim) - oracle_.out[element]) / unit;
        if (std::isfinite(oracle_.out[element])) squares += error * error;
    }
    const double ratio = std::sqrt(squares / value_dims);
    if (!(ratio > verdict_.worst_rms_ratio)) return;
    verdict_.worst_rms_ratio = ratio;
    rms_problem_ = "out, " + place(cell.row, cell.head) + ": the RMS error of the 512 dimensions is " + text(ratio) +
                   " times its bound, from u_p " + text(accuracy_.u_p) + ", u_acc " + text(accuracy_.u_acc) + ", u_s " +
                   text(cell.u_s);
}

void Comparison::check_lse(const Cell& cell) {
    const double expected = oracle_.lse[cell.index];
    const double stored = value_at(lse_, cell.row, cell.head);
    const double got = base_ == LseBase::two ? stored * ln_2 : stored;
    const double bound = lse_bound(cell);
    const double ratio =
        cell.active == 0 ? (stored == -infinity ? 0 : infinity) : distance_ratio(got, expected, bound, cell.bounded);
    if (std::isfinite(expected) && std::isfinite(got) && cell.bounded)
        verdict_.lse_error = std::max(verdict_.lse_error, std::fabs(got - expected));
    if (ratio <= verdict_.lse_ratio) return;
    verdict_.lse_ratio = ratio;
    lse_problem_ = "lse, " + place(cell.row, cell.head) + ": got " + text(got) + ", expected " + text(expected);
    if (cell.active == 0)
        lse_problem_ += ": a row without active columns has lse -inf";
    else if (ratio == infinity)
        lse_problem_ += ": NaN and infinity are exact";
    else
        lse_problem_ += ", error " + text(std::fabs(got - expected)) + " > bound " + text(bound) + " = " +
                        text(accuracy_.lse_base) + " + " + text(accuracy_.lse_score) + " * score_scale " +
                        text(oracle_.score_scale[cell.index]) + " + additions";
}

std::string Comparison::explain_element() const {
    const Cell at = cell(verdict_.row, verdict_.head);
    std::string sentence = "out, " + place(at.row, at.head) + ", dim " + std::to_string(verdict_.dim) + ": got " +
                           text(verdict_.got) + ", expected " + text(verdict_.expected);
    if (at.active == 0) return sentence + ": a row without active columns is +0";
    if (verdict_.worst_ratio == infinity) return sentence + ": NaN and infinity are exact";
    const std::size_t element = at.index * value_dims + static_cast<std::size_t>(verdict_.dim);
    const double v = oracle_.anchor_weight[at.index] *
                     oracle_.value_abs[static_cast<std::size_t>(at.row * value_dims + verdict_.dim)];
    return sentence + ", error " + text(std::fabs(verdict_.got - verdict_.expected)) + " > bound " +
           text(verdict_.bound) + " = (u_p " + text(accuracy_.u_p) + " + u_acc " + text(accuracy_.u_acc) + " + u_s " +
           text(at.u_s) + " + " + std::to_string(at.active) + " * 2^-24) * A " + text(oracle_.weighted_abs[element]) +
           " + u_sub " + text(accuracy_.u_sub) + " * V " + text(v) +
           (oracle_.pushed_abs.empty() ? "" : " + 2^-8 * " + text(oracle_.pushed_abs[element])) + " + " +
           text(at.u_out) + " * |expected|";
}

Verdict Comparison::run(bool uncorrelated) {
    for (std::int64_t row = 0; row < oracle_.rows; ++row)
        for (std::int64_t head = 0; head < oracle_.heads; ++head) {
            const Cell at = cell(row, head);
            if (out_.present()) check_elements(at);
            if (out_.present() && uncorrelated) check_rms(at);
            if (lse_.present()) check_lse(at);
        }
    const auto elements = static_cast<double>(oracle_.rows * oracle_.heads * value_dims);
    verdict_.rms = elements == 0 ? 0 : std::sqrt(square_sum_ / elements);
    if (verdict_.worst_ratio > 1)
        verdict_.problem = explain_element();
    else if (verdict_.worst_rms_ratio > 1)
        verdict_.problem = rms_problem_;
    else if (verdict_.lse_ratio > 1)
        verdict_.problem = lse_problem_;
    verdict_.pass = verdict_.problem.empty();
    return verdict_;
}

}  // namespace

Accuracy accuracy_of(const Schedule& schedule) {
    Accuracy accuracy;
    accuracy.chunk = schedule.chunk;
    accuracy.splits = schedule.splits;
    const double p_scale = schedule.p_scale;
    switch (schedule.p_format) {
        case PFormat::e4m3:
            accuracy.u_p = 0x1p-4;
            accuracy.u_sub = 0x1p-10 / p_scale;
            break;
        case PFormat::f16:
            accuracy.u_p = 0x1p-11;
            accuracy.u_sub = 0x1p-25 / p_scale;
            break;
        case PFormat::bf16:
            accuracy.u_p = 0x1p-8;
            accuracy.u_sub = smallest_normal;
            break;
        case PFormat::f64:
            accuracy.u_sum = 0x1p-53;
            accuracy.u_score = 0x1p-40;  // 576 additions of 2^-53, twice, with room for the scales
            accuracy.lse_base = 0x1p-20;
            accuracy.lse_score = 0x1p-23;
            break;
    }
    if (schedule.p_format != PFormat::f64) accuracy.u_sub = std::max(accuracy.u_sub, smallest_normal);
    return accuracy;
}

Verdict compare(const Oracle& oracle, ConstTensor out, ConstTensor lse, LseBase lse_base, const Accuracy& accuracy,
                bool uncorrelated) {
    return Comparison(oracle, accuracy, out, lse, lse_base).run(uncorrelated);
}

}  // namespace sparsemla::harness
