// env: what this machine and this build offer. Never fails for a missing device, driver or file.
#include <fmt/format.h>

#include <array>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "harness/devices.h"
#include "sparsemla/decode.h"
#include "sparsemla/device.h"
#include "tools/output.h"
#include "tools/subcommands.h"
#include "tools/table.h"

namespace sparsemla::tool {
namespace {

struct CpuFacts {
    std::string model;
    std::vector<std::string> features;
};

/// The features that a kernel of this kind could care for, in the kernel's spelling on x86 and ARM.
constexpr std::array<std::string_view, 22> interesting_features = {
    "sse4_2",      "avx",         "f16c",        "fma",         "avx2",     "avx512f",  "avx512bw", "avx512vl",
    "avx512_bf16", "avx512_vnni", "avx512_fp16", "avx512_vbmi", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8",
    "asimd",       "asimdhp",     "sve",         "sve2",        "bf16",     "i8mm"};

CpuFacts read_cpu_facts() {
    CpuFacts facts;
    std::ifstream file("/proc/cpuinfo");
    std::string present;
    for (std::string line; std::getline(file, line);) {
        const std::size_t colon = line.find(':');
        if (colon == std::string::npos) continue;
        const std::string value = line.substr(std::min(colon + 2, line.size()));
        if (facts.model.empty() && line.rfind("model name", 0) == 0) facts.model = value;
        if (present.empty() && (line.rfind("flags", 0) == 0 || line.rfind("Features", 0) == 0))
            present = " " + value + " ";
    }
    for (const std::string_view feature : interesting_features)
        if (present.find(fmt::format(" {} ", feature)) != std::string::npos) facts.features.emplace_back(feature);
    if (facts.model.empty()) facts.model = "unknown";
    return facts;
}

/// A device, and for each kernel of its kind whether it can run there at all.
struct DeviceKernels {
    DeviceReport report;
    std::vector<std::pair<std::string, std::string>> kernels;  ///< name, "" or why not
};

std::vector<DeviceKernels> survey() {
    std::vector<DeviceKernels> devices;
    for (const DeviceReport& report : list_devices()) {
        DeviceKernels device{.report = report, .kernels = {}};
        for (const std::string& kernel : harness::kernels_on(report.spec.device.kind)) {
            PlanOptions options;
            options.kernel = kernel;
            std::string reason = report.usable ? "" : "the device cannot be used";
            if (report.usable)
                reason = refusal(harness::smallest_problem(report.spec.device), report.spec, options).value_or("");
            device.kernels.emplace_back(kernel, reason);
        }
        devices.push_back(std::move(device));
    }
    return devices;
}

std::string joined(const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
    return text.empty() ? "unknown" : text;
}

Json to_json(const DeviceKernels& device) {
    const DeviceSpec& spec = device.report.spec;
    Json json;
    json["device"] = to_string(spec.device);
    json["name"] = spec.name;
    json["usable"] = device.report.usable;
    json["reason"] = device.report.reason;
    if (spec.device.kind == Device::Kind::cpu) {
        json["threads"] = spec.threads;
    } else {
        json["capability"] = spec.capability;
        json["sms"] = spec.sms;
        json["shared_memory_bytes"] = spec.shared_memory_bytes;
        json["l2_bytes"] = spec.l2_bytes;
    }
    json["kernels"] = Json::array();
    for (const auto& [kernel, reason] : device.kernels)
        json["kernels"].push_back({{"name", kernel}, {"usable", reason.empty()}, {"reason", reason}});
    return json;
}

void print_env_json(const BuildInfo& build, const CpuFacts& cpu, const std::vector<DeviceKernels>& devices) {
    Json json;
    json["version"] = build.version;
    json["compiler"] = build.compiler;
    json["cuda"] = {{"built_in", build.cuda},
                    {"toolkit", build.cuda_toolkit},
                    {"architectures", build.cuda_architectures},
                    {"driver", build.cuda_driver},
                    {"problem", build.cuda_problem}};
    json["cpu"] = {{"model", cpu.model}, {"features", cpu.features}};
    json["kernels"] = kernel_names();
    json["devices"] = Json::array();
    for (const DeviceKernels& device : devices) json["devices"].push_back(to_json(device));
    print_json(json);
}

std::string device_text(const DeviceSpec& spec) {
    if (spec.device.kind == Device::Kind::cpu)
        return fmt::format("instruction set in use {}, {}", spec.name, plural(spec.threads, "thread"));
    return fmt::format("{}, compute capability {}.{}, {}, {} shared memory, {} L2", spec.name, spec.capability / 10,
                       spec.capability % 10, plural(spec.sms, "SM"), format_bytes(spec.shared_memory_bytes),
                       format_bytes(spec.l2_bytes));
}

void print_env_text(const BuildInfo& build, const CpuFacts& cpu, const std::vector<DeviceKernels>& devices) {
    Facts facts;
    facts.add("version", build.version);
    facts.add("compiler", build.compiler);
    facts.add("CUDA part", build.cuda ? fmt::format("built in, toolkit {}, architectures {}", build.cuda_toolkit,
                                                    build.cuda_architectures)
                                      : "not built in");
    facts.add("CUDA driver", build.cuda_driver.empty() ? "none" : build.cuda_driver);
    if (!build.cuda_problem.empty()) facts.add("GPUs", "none usable: " + build.cuda_problem);
    facts.add("CPU", cpu.model);
    facts.add("CPU features", joined(cpu.features));
    print_line("sparsemla");
    print(facts.text());
    for (const DeviceKernels& device : devices) {
        print_line(fmt::format("\n{}: {}", to_string(device.report.spec.device), device_text(device.report.spec)));
        if (!device.report.usable) print_line("  cannot be used: " + printable(device.report.reason));
        Facts kernels;
        for (const auto& [kernel, reason] : device.kernels)
            kernels.add("kernel " + kernel, reason.empty() ? "usable" : "no: " + printable(reason));
        print(kernels.text());
    }
}

Status run_env(bool json) {
    const BuildInfo build = build_info();
    const CpuFacts cpu = read_cpu_facts();
    const std::vector<DeviceKernels> devices = survey();
    json ? print_env_json(build, cpu, devices) : print_env_text(build, cpu, devices);
    return Status::ok;
}

}  // namespace

Subcommand add_env(CLI::App& parent) {
    CLI::App* app =
        parent.add_subcommand("env", "What this build and this machine offer, and what is not usable and why");
    auto json = std::make_shared<bool>(false);
    app->add_flag("--json", *json, "one JSON document: version, compiler, cuda, cpu, kernels, devices");
    app->footer("Never fails for a missing GPU or driver.\nExample:\n  sparsemla env --json");
    return {app, [json] { return run_env(*json); }};
}

}  // namespace sparsemla::tool
