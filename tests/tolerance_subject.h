// A generated step, its oracle, and results of made-up kernels to be judged by the tolerance.
#pragma once

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "harness/generate.h"
#include "harness/tolerance.h"
#include "sparsemla/formats.h"

namespace sparsemla::harness {

inline constexpr float infinity = std::numeric_limits<float>::infinity();

/// A result of a made-up kernel: float64 values, to be stored as bf16 or f32.
struct Result {
    std::int64_t rows, heads;
    std::vector<double> out;
    std::vector<double> lse;  ///< natural

    explicit Result(const Oracle& oracle) : rows(oracle.rows), heads(oracle.heads), out(oracle.out), lse(oracle.lse) {}

    double& at(std::int64_t row, std::int64_t head, std::int64_t dim) {
        return out[static_cast<std::size_t>((row * heads + head) * value_dims + dim)];
    }
};

inline Verdict judge(const Oracle& oracle, const Result& result, const Accuracy& accuracy, DType dtype = DType::bf16,
                     LseBase base = LseBase::natural) {
    std::vector<std::uint16_t> bf16;
    for (const double value : result.out) bf16.push_back(double_to_bf16(value));
    const std::vector<float> f32(result.out.begin(), result.out.end());
    std::vector<float> lse;
    for (const double value : result.lse)
        lse.push_back(static_cast<float>(base == LseBase::two ? value * 1.4426950408889634 : value));
    const std::int64_t rows = result.rows, heads = result.heads;
    const ConstTensor out = dtype == DType::bf16 ? dense(std::as_const(bf16).data(), dtype, {rows, heads, value_dims})
                                                 : dense(f32.data(), dtype, {rows, heads, value_dims});
    return compare(oracle, out, dense(std::as_const(lse).data(), DType::f32, {rows, heads}), base, accuracy, true);
}

inline Accuracy accuracy_with(PFormat format, float p_scale) {
    return accuracy_of({.kernel = "test", .p_format = format, .p_scale = p_scale});
}

inline Accuracy accuracy_for(PFormat format) { return accuracy_with(format, format == PFormat::e4m3 ? 448.0F : 1.0F); }

inline constexpr PFormat all_formats[] = {PFormat::e4m3, PFormat::f16, PFormat::bf16, PFormat::f64};

inline Recipe plain_recipe() {
    Recipe recipe;
    recipe.rows = 2;
    recipe.heads = 6;
    recipe.sources = {{.record = Record::fp8_ds_mla, .width = 300}};
    recipe.query_dtype = DType::bf16;
    recipe.absent = 0;
    recipe.expected = false;
    recipe.seed = 21;
    return recipe;
}

/// A generated case that a test may damage.
struct Subject {
    Case file;
    Oracle oracle;

    explicit Subject(const Recipe& recipe) : file(generate(recipe)), oracle(compute_oracle(case_step(file))) {}

    CaseStep step() const { return case_step(file); }
    template <class T>
    T* data(const std::string& tensor) {
        return reinterpret_cast<T*>(file.tensors.at(tensor).bytes.get());
    }
    /// What a kernel that computes another step exactly would be told.
    Verdict judge_as(const CaseStep& faulty, PFormat format) const {
        return judge(oracle, Result(compute_oracle(faulty)), accuracy_for(format));
    }
};

}  // namespace sparsemla::harness
