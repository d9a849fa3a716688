// The device that the tests run on, and a call placed there. SPARSEMLA_TEST_DEVICE names it, "cpu" unless it is set;
// with "cuda:0" every test that builds its steps with step.h runs on that GPU.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "harness/devices.h"
#include "harness/gpu_step.h"
#include "sparsemla/decode.h"
#include "tests/fenced.h"

namespace sparsemla::test {

#ifdef SPARSEMLA_TEST_MIRROR
inline constexpr bool always_mirrored = true;  // a build with fake_gpu.cpp: mirrors without a GPU
#else
inline constexpr bool always_mirrored = false;
#endif

inline std::string environment(const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    return value == nullptr ? otherwise : value;
}

inline DeviceSpec find_tested_device() {
    const std::string wanted = always_mirrored ? "cpu" : environment("SPARSEMLA_TEST_DEVICE", "cpu");
    for (const DeviceReport& report : list_devices())
        if (to_string(report.spec.device) == wanted) return report.spec;
    throw Error(ErrorKind::unsupported, "SPARSEMLA_TEST_DEVICE", "a device of this machine", wanted);
}

inline const DeviceSpec& tested_device() {
    static const DeviceSpec spec = find_tested_device();
    return spec;
}
inline bool on_gpu() { return tested_device().device.kind != Device::Kind::cpu; }

/// The kernels of the tested device, in order of preference.
inline std::vector<std::string> tested_kernels() { return harness::kernels_on(tested_device().device.kind); }
/// The one that a plan of the tested device chooses first.
inline std::string fast_kernel() { return tested_kernels().front(); }

/// Ends a test as skipped from anywhere, not only from its body: googletest takes this exception for reported.
[[noreturn]] inline void skip_test(const std::string& reason) {
    [&] { GTEST_SKIP() << reason; }();
    throw testing::AssertionException(
        testing::TestPartResult(testing::TestPartResult::kSkip, __FILE__, __LINE__, reason.c_str()));
}

/// A plan on the tested device. What a GPU kernel does not take ends the test as skipped, with the refusal.
inline Plan plan_or_skip(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    try {
        return make_plan(problem, device, options);
    } catch (const Error& error) {
        if (on_gpu() && error.kind() == ErrorKind::unsupported) skip_test(error.what());
        throw;
    }
}

/// Throws what decode would: a CPU plan of the same problem refuses the arguments, or else the workspace that it is not
/// given. What is mirrored is then sound.
inline void throw_if_refused(Problem problem, DecodeArgs args) {
    problem.device = {};
    args.workspace = {};
    try {
        decode(make_plan(problem, query_device({})), args);
    } catch (const Error& error) {
        if (error.argument() != "workspace") throw;
    }
}

/// Guarded, unless SPARSEMLA_TEST_PLACEMENT=plain.
inline harness::GpuPlacement placement(Against against = Against::end) {
    using enum harness::GpuPlacement;
    if (environment("SPARSEMLA_TEST_PLACEMENT", "guarded") == "plain") return plain;
    return against == Against::end ? against_end : against_begin;
}

/// The arguments of a call where the plan's device takes them: in host memory, or mirrored to the GPU. Workspace and
/// state are its own and prepared, unless the options say otherwise.
class DeviceCall {
   public:
    DeviceCall(const Plan& plan, const DecodeArgs& host, harness::GpuStepOptions options = {}) : args(host) {
        if (plan.problem.device.kind != Device::Kind::cpu || always_mirrored) {
            throw_if_refused(plan.problem, host);
            options.others = placement();
            gpu_.emplace(plan, host, options);
            args = gpu_->args();
        } else if (options.own_memory) {
            workspace_ = Fenced(plan.workspace_bytes, 64);
            state_ = Fenced(plan.state_bytes, 64);
            workspace_.fill(options.workspace_byte);
            args.workspace = workspace_.memory();
            args.state = state_.memory();
        }
        if (options.own_memory) prepare(plan, args.state, stream());
    }

    DecodeArgs args;  ///< on the device; free to change

    Stream stream() const { return gpu_ ? gpu_->stream().stream() : Stream{}; }

    /// call(args, stream): the host's outputs are poison before, and hold what was written after; inputs must not
    /// change.
    template <class Call>
    void run(const Call& call) {
        if (!gpu_) {
            call(args, Stream{});
            EXPECT_TRUE(beside_memory_intact()) << "written beside workspace or state";
            return;
        }
        gpu_->upload_outputs();
        call(args, stream());
        gpu_->download_outputs();
        EXPECT_EQ(gpu_->changed_input(), "") << "an input was written";
        EXPECT_TRUE(beside_memory_intact()) << "written beside workspace or state";
    }
    void decode(const Plan& plan) {
        run([&](const DecodeArgs& placed, Stream stream) { sparsemla::decode(plan, placed, stream); });
    }

    /// Outputs to the device and back, for a call that must not reach them.
    void upload_outputs() {
        if (gpu_) gpu_->upload_outputs();
    }
    void download_outputs() {
        if (gpu_) gpu_->download_outputs();
    }
    void fill_workspace(int byte) { gpu_ ? gpu_->fill_workspace(byte) : workspace_.fill(byte); }
    bool workspace_is(int byte) const {
        if (gpu_) return gpu_->workspace_is(byte);
        return std::all_of(workspace_.data(), workspace_.data() + workspace_.size(),
                           [=](std::byte b) { return b == static_cast<std::byte>(byte); });
    }

   private:
    bool beside_memory_intact() const {
        return gpu_ ? gpu_->beside_memory_intact() : workspace_.slack_intact() && state_.slack_intact();
    }

    std::optional<harness::GpuStep> gpu_;
    Fenced workspace_, state_;
};

/// A factor that a call reads by pointer, on the tested device.
class DeviceFloat {
   public:
    explicit DeviceFloat(float value) : value_(std::make_unique<float>(value)) {
        if (!on_gpu()) return;
        buffer_ = harness::GpuBuffer(tested_device().device, sizeof value);
        buffer_.upload(&value, sizeof value);
    }
    const float* pointer() const { return on_gpu() ? reinterpret_cast<const float*>(buffer_.data()) : value_.get(); }

   private:
    std::unique_ptr<float> value_;
    harness::GpuBuffer buffer_;
};

}  // namespace sparsemla::test
