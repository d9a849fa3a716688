#include "tools/conditions.h"

#include <fmt/format.h>

#include <fstream>
#include <regex>

#include "sparsemla/device.h"

namespace sparsemla::tool {
namespace {

/// "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build ..."
std::string kernel_driver() {
    std::ifstream file("/proc/driver/nvidia/version");
    std::string line;
    std::smatch match;
    if (std::getline(file, line) && std::regex_search(line, match, std::regex(R"(\b\d{3,}\.\d+(\.\d+)?\b)")))
        return match.str();
    return "";
}

}  // namespace

DeviceSpec gpu_of(const RunFlags& flags, const std::string& what) {
    for (const DeviceSpec& device : devices_of(flags))
        if (device.device.kind == Device::Kind::cuda) return device;
    throw Error(ErrorKind::unsupported, "--device", "a GPU for " + what,
                flags.device == "auto" ? "a machine without one that can be used" : in_quotes(flags.device));
}

Conditions measure_conditions(const DeviceSpec& device, const harness::DecodeTimer& timer) {
    return {.device = device,
            .driver = kernel_driver(),
            .clocks = harness::measure_clocks(device.device),
            .limits = timer.measure_limits()};
}

std::string text_of(const Conditions& conditions) {
    const DeviceSpec& device = conditions.device;
    const harness::GpuClocks& clocks = conditions.clocks;
    const BuildInfo build = build_info();
    return fmt::format("sparsemla {}, built by {}{}\n", build.version, build.compiler,
                       build.cuda_toolkit.empty() ? "" : ", CUDA " + build.cuda_toolkit) +
           fmt::format("{} ({}, compute capability {}.{}, {}, L2 {}), driver {}, CUDA {}\n", device.name,
                       to_string(device.device), device.capability / 10, device.capability % 10,
                       plural(device.sms, "SM"), format_bytes(device.l2_bytes),
                       conditions.driver.empty() ? "unknown" : conditions.driver,
                       build.cuda_driver.empty() ? "unknown" : build.cuda_driver) +
           fmt::format("clocks: SM {:.0f} MHz while one CTA spins, at most {:.0f} MHz; memory at most {:.0f} MHz\n",
                       clocks.sm_mhz, clocks.largest_sm_mhz, clocks.largest_memory_mhz) +
           fmt::format(
               "measured now: device copy {:.2f} TB/s (bytes read + written), empty launch {:.2f} us (graph, "
               "programmatic edges)\n",
               1e-12 * conditions.limits.copy_bytes_per_s, conditions.limits.empty_launch_us) +
           fmt::format("not measured now: {:.0f} TFLOP/s (f16 mma.sync of an H200)\n", 1e-12 * f16_flops_per_s);
}

Json to_json(const Conditions& conditions) {
    const DeviceSpec& device = conditions.device;
    const BuildInfo build = build_info();
    return {{"version", build.version},
            {"compiler", build.compiler},
            {"cuda_toolkit", build.cuda_toolkit},
            {"device", to_string(device.device)},
            {"name", device.name},
            {"capability", device.capability},
            {"sms", device.sms},
            {"l2_bytes", device.l2_bytes},
            {"driver", conditions.driver},
            {"cuda_driver", build.cuda_driver},
            {"clocks",
             {{"sm_mhz", json_number(conditions.clocks.sm_mhz)},
              {"largest_sm_mhz", json_number(conditions.clocks.largest_sm_mhz)},
              {"largest_memory_mhz", json_number(conditions.clocks.largest_memory_mhz)}}},
            {"copy_bytes_per_s", json_number(conditions.limits.copy_bytes_per_s)},
            {"empty_launch_us", json_number(conditions.limits.empty_launch_us)},
            {"f16_flop_per_s", json_number(f16_flops_per_s)}};
}

}  // namespace sparsemla::tool
