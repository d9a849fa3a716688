// bench --sweep: the fastest layout of every point of a grid of problems, for the plan's table.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "tools/bench.h"
#include "tools/output.h"
#include "tools/sweep.h"

namespace sparsemla::tool {
namespace {

constexpr int default_repeats = 5;

/// Decodes of a graph: enough that its launch, some 2 us, does not matter, and no more.
int calls_of(const Plan& plan) {
    return static_cast<int>(std::clamp(600 / std::max(plan.expected_us, 1.0), 10.0, 50.0));
}

struct Progressed {
    std::size_t done = 0;      ///< points whose layouts are all measured
    std::size_t measured = 0;  ///< layouts, now
};

/// Measures what the log lacks of a point. The inputs are made once for all of its layouts.
std::size_t measure_point(const SweepPoint& point, const std::vector<Plan>& plans, int repeats, SweepLog& log,
                          harness::DecodeTimer& timer) {
    std::size_t measured = 0;
    for (const Plan& plan : plans) {
        SweepResult result = result_of(point, plan, 0);
        if (log.holds(result)) continue;
        if (measured == 0) timer.load(point.shape(), 0);
        result.us = timer.warm(plan, calls_of(plan), repeats).median;
        log.add(result);
        ++measured;
    }
    return measured;
}

std::vector<SweepPoint> chosen_points(const BenchFlags& flags) {
    std::vector<SweepPoint> points = sweep_points();
    const std::string example = points.front().text();
    std::erase_if(points,
                  [&](const SweepPoint& point) { return point.text().find(flags.filter) == std::string::npos; });
    if (points.empty())
        throw Error(ErrorKind::invalid_argument, "--filter", fmt::format("a part of a point such as '{}'", example),
                    in_quotes(flags.filter));
    return points;
}

Progressed sweep(const BenchFlags& flags, const DeviceSpec& gpu, SweepLog& log, harness::DecodeTimer& timer) {
    const auto start = std::chrono::steady_clock::now();
    const auto minutes = [&] {
        return std::chrono::duration<double, std::ratio<60>>(std::chrono::steady_clock::now() - start).count();
    };
    const int repeats = flags.repeat == 0 ? default_repeats : static_cast<int>(flags.repeat);
    const std::vector<SweepPoint> points = chosen_points(flags);
    Progress progress;
    Progressed progressed;
    for (const SweepPoint& point : points) {
        if (minutes() >= flags.minutes) break;
        progress.show(fmt::format("{} of {}: {}", progressed.done + 1, points.size(), point.text()));
        const std::vector<Plan> plans =
            sweep_plans(point, gpu, plan_options(flags.run), static_cast<std::size_t>(flags.layouts));
        progressed.measured += measure_point(point, plans, repeats, log, timer);
        ++progressed.done;
    }
    return progressed;
}

}  // namespace

Status run_sweep(const BenchFlags& flags, const DeviceSpec& gpu, const harness::TimerSizes& sizes) {
    if (!flags.table.empty()) check_output_path(flags.table);
    SweepLog log(flags.resume);
    harness::DecodeTimer timer(gpu.device, sizes);
    const std::size_t held = log.results().size();
    const Progressed progressed = sweep(flags, gpu, log, timer);
    if (!flags.table.empty()) write_file(flags.table, tuning_table_text(log.results()));
    const std::size_t points = chosen_points(flags).size();
    print_line(fmt::format("{}: {} layouts measured, {} known before; {} of {} points done{}", gpu.name,
                           progressed.measured, held, progressed.done, points,
                           progressed.done == points ? "" : ", again with --resume for the rest"));
    if (!flags.table.empty()) print_line("wrote " + printable(flags.table));
    return Status::ok;
}

}  // namespace sparsemla::tool
