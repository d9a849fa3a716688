#include "harness/devices.h"

#include <algorithm>

namespace sparsemla::harness {

Problem smallest_problem(Device device) {
    Problem problem;
    problem.rows = 1;
    problem.heads = 16;
    problem.sources = {{.record = Record::fp8_576, .form = RecordForm::contiguous, .split_rope = false, .width = 64}};
    problem.device = device;
    return problem;
}

std::vector<std::string> kernels_on(Device::Kind kind) {
    // Every machine has a CPU, whose kernels take everything; what does not run there is another device's.
    const DeviceSpec cpu = query_device({});
    const Problem problem = smallest_problem({});
    std::vector<std::string> names;
    for (const std::string& kernel : kernel_names()) {
        PlanOptions options;
        options.kernel = kernel;
        const bool on_cpu = supports(problem, cpu, options);
        if (on_cpu == (kind == Device::Kind::cpu)) names.push_back(kernel);
    }
    return names;
}

}  // namespace sparsemla::harness
