// bench --suite latency: decode as it runs in a model, on a GPU.
#include <fmt/format.h>

#include <utility>

#include "tools/bench.h"
#include "tools/latency_report.h"

namespace sparsemla::tool {
namespace {

constexpr std::int64_t default_repeats = 30;

std::vector<harness::LatencyShape> chosen_shapes(const BenchFlags& flags, const DeviceSpec& gpu) {
    std::vector<harness::LatencyShape> shapes =
        flags.suite == records_suite ? harness::records_suite() : harness::latency_suite(gpu, plan_options(flags.run));
    const std::size_t all = shapes.size();
    const std::string example = shapes.front().name;
    std::erase_if(shapes, [&](const auto& shape) { return shape.name.find(flags.filter) == std::string::npos; });
    if (shapes.empty())
        throw Error(ErrorKind::invalid_argument, "--filter",
                    fmt::format("a part of one of {} names such as {}", all, example), in_quotes(flags.filter));
    return shapes;
}

LatencyTiming time_shape(const harness::LatencyShape& shape, const BenchFlags& flags, const DeviceSpec& gpu,
                         std::int64_t repeats, harness::DecodeTimer& timer) {
    LatencyTiming timing{.shape = shape, .plan = {}, .refusal = {}, .cold = {}, .warm = {}};
    const Problem problem = shape.shape.problem(gpu.device);
    PlanOptions options = plan_options(flags.run);
    if (!options.usual_columns) options.usual_columns = shape.shape.active_columns();
    if (const auto reason = refusal(problem, gpu, options)) {
        timing.refusal = *reason;
        return timing;
    }
    timing.plan = make_plan(problem, gpu, options);
    timer.load(shape.shape, static_cast<int>(flags.calls));
    timing.cold = timer.cold(*timing.plan, static_cast<int>(repeats));
    timing.warm = timer.warm(*timing.plan, static_cast<int>(flags.calls), static_cast<int>(repeats));
    return timing;
}

void write_outputs(const LatencyReport& report, const BenchFlags& flags) {
    if (!flags.plot.empty()) write_file(flags.plot, to_svg(plot_of(report)));
    if (flags.json && flags.json_path.empty()) {
        print_json(to_json(report));
        return;
    }
    if (flags.json) write_file(flags.json_path, json_text(to_json(report)));
    print(text_of(report));
    for (const std::string& path : {flags.plot, flags.json_path})
        if (!path.empty()) print_line("wrote " + printable(path));
}

}  // namespace

Status run_latency_suite(const BenchFlags& flags, const DeviceSpec& gpu, const harness::TimerSizes& sizes) {
    for (const std::string& path : {flags.plot, flags.json_path})
        if (!path.empty()) check_output_path(path);
    LatencyReport report;
    report.suite = flags.suite;
    report.calls = flags.calls;
    report.repeats = flags.repeat == 0 ? default_repeats : flags.repeat;
    report.baseline_path = flags.baseline;
    if (!flags.baseline.empty()) report.baseline = read_baseline(flags.baseline);
    const std::vector<harness::LatencyShape> shapes = chosen_shapes(flags, gpu);
    Progress progress;
    progress.show("measuring the GPU's limits");
    harness::DecodeTimer timer(gpu.device, sizes);
    report.conditions = measure_conditions(gpu, timer);
    for (const harness::LatencyShape& shape : shapes) {
        progress.show(shape.name);
        report.timings.push_back(time_shape(shape, flags, gpu, report.repeats, timer));
    }
    progress.clear();
    if (std::ranges::none_of(report.timings, [](const LatencyTiming& timing) { return timing.plan.has_value(); }))
        throw Error(ErrorKind::unsupported, "problem", "one that a kernel of this build takes",
                    report.timings.front().refusal);
    write_outputs(report, flags);
    return Status::ok;
}

}  // namespace sparsemla::tool
