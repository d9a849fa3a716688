#include "tools/expectation.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <numbers>
#include <numeric>
#include <vector>

#include "sparsemla/formats.h"

namespace sparsemla::tool {
namespace {

double element(const OwnedTensor& tensor, std::size_t i) {
    if (tensor.dtype_name == "BF16")
        return bf16_to_float(reinterpret_cast<const std::uint16_t*>(tensor.bytes.get())[i]);
    return reinterpret_cast<const float*>(tensor.bytes.get())[i];
}

}  // namespace

std::optional<harness::Oracle> expectation_of(const harness::Oracle& oracle, const Case& file) {
    const OwnedTensor* out = file.find("expected.out");
    const OwnedTensor* lse = file.find("expected.lse");
    if (out == nullptr && lse == nullptr) return std::nullopt;
    harness::Oracle expected = oracle;
    if (out != nullptr)
        for (std::size_t i = 0; i < expected.out.size(); ++i) expected.out[i] = element(*out, i);
    if (lse != nullptr) {
        const auto base = file.metadata.find("lse");
        const double to_natural = base != file.metadata.end() && base->second == "log2" ? std::numbers::ln2 : 1.0;
        for (std::size_t i = 0; i < expected.lse.size(); ++i) expected.lse[i] = element(*lse, i) * to_natural;
    }
    return expected;
}

harness::Accuracy against_file(harness::Accuracy accuracy, const harness::Oracle& oracle, const Case& file) {
    const harness::Accuracy fp32;
    const OwnedTensor* out = file.find("expected.out");
    const double rounding = out != nullptr && out->dtype_name == "BF16" ? 0x1p-8 : 0x1p-23;
    accuracy.u_acc += rounding + static_cast<double>(oracle.width) * 0x1p-24;
    accuracy.u_score += fp32.u_score;
    accuracy.lse_base += fp32.lse_base;
    accuracy.lse_score += fp32.lse_score;
    return accuracy;
}

std::optional<std::string> check_dequantised(const Case& file, const CaseStep& step) {
    const OwnedTensor* expected = file.find("expected.dequantised");
    if (expected == nullptr) return std::nullopt;
    const std::int64_t records = expected->shape[0];
    const std::int64_t dims = expected->shape[1];
    std::vector<std::int64_t> slots(static_cast<std::size_t>(records));
    std::iota(slots.begin(), slots.end(), 0);
    std::vector<float> values(static_cast<std::size_t>(records * dims));
    unpack(step.sources[0].cache, dense(slots.data(), DType::i64, {records}),
           dense(values.data(), DType::f32, {records, dims}));
    for (std::size_t i = 0; i < values.size(); ++i) {
        const double want = element(*expected, i);
        const double got = values[i];
        if (got == want || (std::isnan(got) && std::isnan(want))) continue;
        if (std::fabs(got - want) <= 0x1p-23 * std::fabs(want)) continue;
        const auto at = static_cast<std::int64_t>(i);
        return fmt::format("expected.dequantised differs at slot {}, dimension {}: got {}, expected {}", at / dims,
                           at % dims, got, want);
    }
    return std::string();
}

}  // namespace sparsemla::tool
