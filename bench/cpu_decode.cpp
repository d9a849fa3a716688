// Decodes a case on request, for a script that times it against something else:
//     bench_cpu_decode CASE OUT [KERNEL [THREADS]]
// prints the plan, then one line "wall_us cpu_us" for each line read; at the end of input writes `out` (bf16) and `lse`
// (f32, natural) one after the other to OUT and prints by how many bytes outputs, workspace and decoding raised the
// resident set at its peak.
#include <sys/resource.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>

#include "sparsemla/case_file.h"
#include "sparsemla/device.h"

namespace {

using namespace sparsemla;

double microseconds(const timeval& time) {
    return 1e6 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec);
}

double cpu_us() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return microseconds(usage.ru_utime) + microseconds(usage.ru_stime);
}

/// A line of /proc/self/status, in bytes: "VmRSS:" now, "VmHWM:" the peak.
long resident_bytes(const std::string& line) {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
        long kilobytes = 0;
        if (word == line && status >> kilobytes) return kilobytes * 1024;
    }
    return 0;
}

void forget_peak() { std::ofstream("/proc/self/clear_refs") << 5; }

void write(std::ofstream& file, const OwnedTensor& tensor) {
    file.write(reinterpret_cast<const char*>(tensor.bytes.get()), static_cast<std::streamsize>(tensor.size_bytes));
}

int serve(const std::string& case_path, const std::string& out_path, const PlanOptions& options, int threads) {
    const Case file = load_case(case_path);
    const CaseStep step = case_step(file);
    DeviceSpec device = query_device({});
    if (threads > 0) device.threads = threads;
    const Plan plan = make_plan(step.problem(), device, options);
    std::cout << device.name << " x " << device.threads << ": " << to_string(plan.schedule) << std::endl;

    forget_peak();
    const long before = resident_bytes("VmRSS:");
    const OwnedTensor out = make_owned(DType::bf16, {step.rows, step.heads, value_dims});
    const OwnedTensor lse = make_owned(DType::f32, {step.rows, step.heads});
    const OwnedTensor workspace = make_owned(DType::u8, {static_cast<std::int64_t>(plan.workspace_bytes)});
    DecodeArgs args = step.args();
    args.out = out.view();
    args.lse = lse.view();
    args.workspace = {workspace.bytes.get(), workspace.size_bytes};

    for (std::string line; std::getline(std::cin, line);) {
        const double cpu_start = cpu_us();
        const auto start = std::chrono::steady_clock::now();
        decode(plan, args);
        const std::chrono::duration<double, std::micro> wall = std::chrono::steady_clock::now() - start;
        std::cout << wall.count() << ' ' << cpu_us() - cpu_start << std::endl;
    }
    std::ofstream result(out_path, std::ios::binary);
    write(result, out);
    write(result, lse);
    std::cout << resident_bytes("VmHWM:") - before << std::endl;
    return result.flush() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) {
        std::cerr << "usage: bench_cpu_decode CASE OUT [KERNEL [THREADS]]\n";
        return 2;
    }
    try {
        PlanOptions options;
        if (argc > 3) options.kernel = argv[3];
        return serve(argv[1], argv[2], options, argc > 4 ? std::atoi(argv[4]) : 0);
    } catch (const std::exception& error) {
        std::cerr << error.what() << '\n';
        return 2;
    }
}
