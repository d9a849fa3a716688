#include "tools/latency_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "tools/table.h"

namespace sparsemla::tool {
namespace {

std::string us_text(double us) { return fmt::format("{:.2f}", us); }
/// Empty for a figure that nobody stated.
std::string stated(double us) { return us == 0 ? "" : fmt::format("{:g}", us); }

double bytes_per_s(const LatencyTiming& timing) { return 1e6 * timing.shape.shape.record_bytes() / timing.cold.median; }
double flops_per_s(const LatencyTiming& timing) { return 1e6 * timing.shape.shape.operations() / timing.cold.median; }

std::string layout_text(const Plan& plan) {
    std::string text = std::to_string(plan.schedule.splits);
    if (plan.tiling) {
        text += fmt::format("/{}/{}", plan.tiling->heads, plan.tiling->stages);
        if (plan.tiling->cluster_tiles > 1) text += fmt::format(", {} tiles share", plan.tiling->cluster_tiles);
        if (plan.tiling->gather != Gather::copies) text += fmt::format(", {}", name(plan.tiling->gather));
    }
    const std::int64_t waves = harness::waves(plan);
    return waves > 1 ? fmt::format("{}, {} waves", text, waves) : text;
}

std::string kernel_text(const Plan& plan) {
    return fmt::format("{} {}", plan.schedule.kernel, name(plan.schedule.p_format));
}

/// Baseline and how many times as long it takes: both "-" where it has no row of exactly this step.
std::pair<std::string, std::string> baseline_cells(const LatencyReport& report, const LatencyTiming& timing) {
    if (report.baseline_path.empty()) return {};
    const auto row = find_baseline(report.baseline, timing.shape.shape);
    if (!row || row->cold_us == 0) return {"-", "-"};
    return {fmt::format("{:.1f}", row->cold_us), fmt::format("{:.2f}", row->cold_us / timing.cold.median)};
}

std::string timings_text(const LatencyReport& report) {
    Table table({{"step", Align::left},
                 {"cold us"},
                 {"p10"},
                 {"p90"},
                 {"warm us"},
                 {"p10"},
                 {"p90"},
                 {"GB/s"},
                 {"TFLOP/s"},
                 {"of floor"},
                 {"floor", Align::left},
                 {"baseline"},
                 {"ratio"},
                 {"goal"},
                 {"GB300"},
                 {"splits/heads/stages", Align::left},
                 {"kernel", Align::left}});
    for (const LatencyTiming& timing : report.timings) {
        if (!timing.plan) {
            table.add_row({timing.shape.name});
            table.add_note("refused: " + printable(timing.refusal));
            continue;
        }
        const Floor floor = floor_of(timing.shape.shape, report.conditions.limits);
        const auto [baseline, ratio] = baseline_cells(report, timing);
        table.add_row({timing.shape.name, us_text(timing.cold.median), us_text(timing.cold.p10),
                       us_text(timing.cold.p90), us_text(timing.warm.median), us_text(timing.warm.p10),
                       us_text(timing.warm.p90), fmt::format("{:.0f}", 1e-9 * bytes_per_s(timing)),
                       fmt::format("{:.1f}", 1e-12 * flops_per_s(timing)),
                       fmt::format("{:.0f} %", 100 * floor.us / timing.cold.median), floor.by, baseline, ratio,
                       stated(timing.shape.goal_us), stated(timing.shape.gb300_us), layout_text(*timing.plan),
                       kernel_text(*timing.plan)});
    }
    return table.text();
}

struct Cliff {
    const LatencyTiming* before = nullptr;
    const LatencyTiming* after = nullptr;

    double fall() const { return before->cold.median / after->cold.median; }
    double rise() const { return after->cold.median / before->cold.median; }
    bool pass() const { return fall() <= harness::largest_fall && rise() <= harness::largest_rise; }
};

std::vector<Cliff> cliffs_of(const LatencyReport& report) {
    std::vector<harness::LatencyShape> shapes;
    for (const LatencyTiming& timing : report.timings) shapes.push_back(timing.shape);
    std::vector<Cliff> cliffs;
    for (const harness::CliffPair& pair : harness::cliff_pairs(shapes)) {
        const Cliff cliff{&report.timings[pair.before], &report.timings[pair.after]};
        if (cliff.before->plan && cliff.after->plan) cliffs.push_back(cliff);
    }
    return cliffs;
}

std::string cliffs_text(const LatencyReport& report) {
    Table table(
        {{"series", Align::left}, {"n"}, {"t(n)"}, {"t(n+1)"}, {"t(n)/t(n+1)"}, {"t(n+1)/t(n)"}, {"", Align::left}});
    std::int64_t failed = 0;
    for (const Cliff& cliff : cliffs_of(report)) {
        table.add_row({cliff.before->shape.series, std::to_string(cliff.before->shape.step),
                       us_text(cliff.before->cold.median), us_text(cliff.after->cold.median),
                       fmt::format("{:.3f}", cliff.fall()), fmt::format("{:.3f}", cliff.rise()),
                       cliff.pass() ? "PASS" : "FAIL"});
        failed += cliff.pass() ? 0 : 1;
    }
    if (table.empty()) return "";
    return fmt::format("\nno cliff, cold: t(n) <= {} t(n+1) and t(n+1) <= {} t(n): {}\n", harness::largest_fall,
                       harness::largest_rise, failed == 0 ? "all pass" : plural(failed, "pair") + " fail") +
           table.text();
}

Json to_json(const harness::Spread& spread) {
    return {{"median_us", spread.median}, {"p10_us", spread.p10}, {"p90_us", spread.p90}};
}

Json optional_us(double us) { return us == 0 ? Json() : Json(us); }

Json to_json(const LatencyReport& report, const LatencyTiming& timing) {
    Json json;
    json["step"] = timing.shape.name;
    json["refused"] = timing.plan ? Json() : Json(timing.refusal);
    if (!timing.plan) return json;
    const Floor floor = floor_of(timing.shape.shape, report.conditions.limits);
    const auto baseline = find_baseline(report.baseline, timing.shape.shape);
    json["schedule"] = to_string(timing.plan->schedule);
    json["tiling"] = timing.plan->tiling ? Json(to_string(*timing.plan->tiling)) : Json();
    json["waves"] = harness::waves(*timing.plan);
    json["reason"] = timing.plan->reason;
    json["cold"] = to_json(timing.cold);
    json["warm"] = to_json(timing.warm);
    json["record_bytes"] = timing.shape.shape.record_bytes();
    json["flop"] = timing.shape.shape.operations();
    json["bytes_per_s"] = json_number(bytes_per_s(timing));
    json["flop_per_s"] = json_number(flops_per_s(timing));
    json["floor_us"] = json_number(floor.us);
    json["floor"] = floor.by;
    json["baseline_cold_us"] = baseline ? Json(baseline->cold_us) : Json();
    json["baseline_warm_us"] = baseline ? Json(baseline->warm_us) : Json();
    json["goal_us"] = optional_us(timing.shape.goal_us);
    json["gb300_us"] = optional_us(timing.shape.gb300_us);
    return json;
}

/// What a line of the plot holds fixed: "96 heads, fp8_576 x 256of2048".
std::string line_name(const harness::ChainShape& shape) {
    const std::string label = harness::label(shape);  // records / heads / rows / lists
    const std::size_t heads = label.find("/h"), rows = label.find("/r"), lists = label.find('/', rows + 1);
    return fmt::format("{} heads, {} x {}", shape.heads, label.substr(0, heads), label.substr(lists + 1));
}

Line baseline_line(const LatencyReport& report, const harness::ChainShape& shape) {
    Line line{.name = "  baseline", .points = {}, .dashed = true};
    for (const BaselineRow& row : report.baseline)
        if (same_lists(row, shape) && row.cold_us > 0 && row.rows > 0)
            line.points.push_back({.x = static_cast<double>(row.rows),
                                   .low_s = 1e-6 * row.cold_us,
                                   .mid_s = 1e-6 * row.cold_us,
                                   .high_s = 1e-6 * row.cold_us});
    std::ranges::sort(line.points, {}, &LinePoint::x);
    return line;
}

}  // namespace

Floor floor_of(const harness::ChainShape& shape, const harness::GpuLimits& limits) {
    const double memory_us = 1e6 * shape.record_bytes() / limits.copy_bytes_per_s;
    const double arithmetic_us = 1e6 * shape.operations() / f16_flops_per_s;
    if (limits.empty_launch_us >= std::max(memory_us, arithmetic_us)) return {limits.empty_launch_us, "launch"};
    return memory_us >= arithmetic_us ? Floor{memory_us, "memory"} : Floor{arithmetic_us, "arithmetic"};
}

std::string text_of(const LatencyReport& report) {
    std::string text = text_of(report.conditions);
    text += fmt::format(
        "\nmicroseconds a decode, graphs of {} dependent decodes, {}: median, p10, p90\n"
        "cold: records, read once in more than 1 GB, from memory; L2 evicted before each replay, then lists, counts "
        "and "
        "query written anew\n"
        "warm: one call repeated. GB/s, TFLOP/s and the share of the floor are of cold\n",
        report.calls, plural(report.repeats, "replay"));
    if (!report.baseline_path.empty())
        text += fmt::format("baseline: cold, {}; ratio: how many times as long it takes; -: no row of this step\n",
                            printable(report.baseline_path));
    return text + "\n" + timings_text(report) + cliffs_text(report);
}

Json to_json(const LatencyReport& report) {
    Json json = to_json(report.conditions);
    json["suite"] = report.suite;
    json["calls"] = report.calls;
    json["repeats"] = report.repeats;
    json["baseline"] = report.baseline_path.empty() ? Json() : Json(report.baseline_path);
    json["timings"] = Json::array();
    for (const LatencyTiming& timing : report.timings) json["timings"].push_back(to_json(report, timing));
    json["cliffs"] = Json::array();
    for (const Cliff& cliff : cliffs_of(report))
        json["cliffs"].push_back({{"series", cliff.before->shape.series},
                                  {"n", cliff.before->shape.step},
                                  {"t_n_us", cliff.before->cold.median},
                                  {"t_next_us", cliff.after->cold.median},
                                  {"pass", cliff.pass()}});
    return json;
}

LinePlot plot_of(const LatencyReport& report) {
    std::map<std::string, std::vector<const LatencyTiming*>> groups;
    for (const LatencyTiming& timing : report.timings)
        if (timing.plan) groups[line_name(timing.shape.shape)].push_back(&timing);
    // Where something can be seen over rows at all, single steps only crowd.
    const bool lines = std::ranges::any_of(groups, [](const auto& group) { return group.second.size() > 1; });
    LinePlot plot{
        .title = "sparsemla: time per decode against rows, cold",
        .subtitle = fmt::format("{}, graphs of {} dependent decodes, median and p10 .. p90 of {}",
                                report.conditions.device.name, report.calls, plural(report.repeats, "replay")),
        .x_label = "rows",
        .lines = {}};
    for (auto& [name, timings] : groups) {
        if (lines && timings.size() == 1) continue;
        std::ranges::sort(timings, {}, [](const LatencyTiming* timing) { return timing->shape.shape.rows; });
        Line line{.name = name, .points = {}};
        for (const LatencyTiming* timing : timings)
            line.points.push_back({.x = static_cast<double>(timing->shape.shape.rows),
                                   .low_s = 1e-6 * timing->cold.p10,
                                   .mid_s = 1e-6 * timing->cold.median,
                                   .high_s = 1e-6 * timing->cold.p90});
        plot.lines.push_back(std::move(line));
        Line baseline = baseline_line(report, timings.front()->shape.shape);
        if (!baseline.points.empty()) plot.lines.push_back(std::move(baseline));
    }
    return plot;
}

}  // namespace sparsemla::tool
