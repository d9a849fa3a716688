#include "sparsemla/device.h"

#include <tbb/info.h>

#include "gpu.h"
#include "kernels.h"

namespace sparsemla {

namespace {

DeviceSpec cpu_spec() {
    DeviceSpec spec;
    spec.device = {Device::Kind::cpu, 0};
    spec.name = detail::cpu_instruction_set();
    spec.threads = tbb::info::default_concurrency();
    return spec;
}

std::string compiler() {
#if defined(__clang__)
    return std::string("clang ") + __clang_version__;
#else
    return std::string("gcc ") + __VERSION__;
#endif
}

}  // namespace

DeviceSpec query_device(Device device) {
    if (device.kind == Device::Kind::cpu) return cpu_spec();
    const detail::GpuStatus gpus = detail::query_gpus();
    for (const DeviceSpec& spec : gpus.devices)
        if (spec.device == device) return spec;
    const std::string received =
        gpus.devices.empty() ? gpus.problem : "a machine with " + std::to_string(gpus.devices.size()) + " GPUs";
    throw Error(ErrorKind::unsupported, "device", "a GPU " + to_string(device), received);
}

std::vector<DeviceReport> list_devices() {
    std::vector<DeviceReport> reports;
    reports.push_back({.spec = cpu_spec(), .usable = true, .reason = ""});
    for (const DeviceSpec& spec : detail::query_gpus().devices) {
        DeviceReport report{.spec = spec, .usable = true, .reason = ""};
        try {
            detail::check_gpu(spec.device.index);
        } catch (const Error& error) {
            report.usable = false;
            report.reason = error.what();
        }
        reports.push_back(report);
    }
    return reports;
}

BuildInfo build_info() {
    const detail::GpuStatus gpus = detail::query_gpus();
    return {.version = SPARSEMLA_VERSION,
            .compiler = compiler(),
            .cuda = gpus.built,
            .cuda_toolkit = gpus.toolkit,
            .cuda_architectures = gpus.architectures,
            .cuda_driver = gpus.driver,
            .cuda_problem = gpus.problem};
}

}  // namespace sparsemla
