// Plans of decode_latency for GPUs that only a DeviceSpec describes, for tests that need none.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "gpu.h"
#include "sparsemla/decode.h"
#include "tests/hopper.h"

namespace sparsemla::test {

inline DeviceSpec h200() {
    DeviceSpec spec = hopper();
    spec.resident_clusters = {132, 66, 43, 30, 24, 21, 16, 15, 14, 12, 8, 8, 8, 8, 7, 7};
    return spec;
}

/// Fewer SMs, and no cluster of more than 12 CTAs.
inline DeviceSpec h20() {
    DeviceSpec spec = hopper("NVIDIA H20");
    spec.sms = 78;
    spec.resident_clusters = {78, 39, 24, 18, 14, 12, 9, 8, 8, 7, 6, 5, 0, 0, 0, 0};
    return spec;
}

/// decode_latency, also where another kernel is expected to be faster.
inline PlanOptions latency_options(PlanOptions options) {
    options.kernel = "decode_latency";
    return options;
}
inline Plan latency_plan(const Problem& problem, const DeviceSpec& device, const PlanOptions& options = {}) {
    return make_plan(problem, device, latency_options(options));
}
inline std::optional<std::string> latency_refusal(const Problem& problem, const DeviceSpec& device,
                                                  const PlanOptions& options = {}) {
    return refusal(problem, device, latency_options(options));
}
inline bool latency_supports(const Problem& problem, const DeviceSpec& device, const PlanOptions& options = {}) {
    return supports(problem, device, latency_options(options));
}

inline std::vector<DeviceSpec> devices() { return {h200(), h20()}; }

inline Problem problem_of(std::int64_t rows, std::int64_t heads, const std::vector<std::int64_t>& widths,
                          Record record = Record::fp8_576) {
    Problem problem{.rows = rows, .heads = heads, .sources = {}, .device = {Device::Kind::cuda, 0}};
    for (const std::int64_t width : widths) problem.sources.push_back({.record = record, .width = width});
    return problem;
}

class LatencyLaunch : public testing::Test {
   protected:
    void SetUp() override {
        if (!detail::gpu_built()) GTEST_SKIP() << "this build has no CUDA part";
    }
};

/// `text` is part of the reason.
inline void expect_refused(const Problem& problem, const DeviceSpec& device, const PlanOptions& options,
                           const std::string& text) {
    const auto refused = latency_refusal(problem, device, options);
    ASSERT_TRUE(refused.has_value()) << text;
    EXPECT_NE(refused->find(text), std::string::npos) << *refused << "\n  instead of: " << text;
}

}  // namespace sparsemla::test
