// bench --suite dcp: the stages of an exchange of decode context parallelism on one GPU, ranks in lockstep.
#include <fmt/format.h>

#include <utility>

#include "harness/dcp_timer.h"
#include "tools/bench.h"
#include "tools/conditions.h"
#include "tools/table.h"

namespace sparsemla::tool {
namespace {

constexpr std::int64_t default_repeats = 20;
constexpr int exchanges_of_graph = 16;

struct DcpTiming {
    harness::DcpTimerShape shape;
    harness::DcpTimes times;
};

std::vector<harness::DcpTimerShape> chosen_shapes(const BenchFlags& flags) {
    std::vector<harness::DcpTimerShape> shapes = harness::dcp_suite();
    const std::size_t all = shapes.size();
    const std::string example = shapes.front().name;
    std::erase_if(shapes, [&](const auto& shape) { return shape.name.find(flags.filter) == std::string::npos; });
    if (shapes.empty())
        throw Error(ErrorKind::invalid_argument, "--filter",
                    fmt::format("a part of one of {} names such as {}", all, example), in_quotes(flags.filter));
    return shapes;
}

std::string us_text(const harness::Spread& spread) { return fmt::format("{:.2f}", spread.median); }

std::string text_of(const std::vector<DcpTiming>& timings) {
    Table table({{"exchange", Align::left},
                 {"gather us"},
                 {"decode"},
                 {"+ push"},
                 {"merge"},
                 {"step"},
                 {"by calls"},
                 {"tiling", Align::left}});
    for (const auto& [shape, times] : timings)
        table.add_row({shape.name, us_text(times.gather), us_text(times.decode),
                       fmt::format("{:+.2f}", times.decode_push.median - times.decode.median), us_text(times.merge),
                       us_text(times.step), us_text(times.by_calls), times.tiling});
    return table.text();
}

Json to_json(const harness::Spread& spread) {
    return {{"median_us", spread.median}, {"p10_us", spread.p10}, {"p90_us", spread.p90}};
}

Json to_json(const DcpTiming& timing) {
    const auto& [shape, times] = timing;
    return {{"exchange", shape.name},
            {"world", shape.world},
            {"own_heads", shape.own_heads},
            {"rows", shape.rows},
            {"active", shape.active},
            {"width", shape.width},
            {"schedule", times.schedule},
            {"tiling", times.tiling},
            {"gather", to_json(times.gather)},
            {"decode", to_json(times.decode)},
            {"decode_push", to_json(times.decode_push)},
            {"merge", to_json(times.merge)},
            {"step", to_json(times.step)},
            {"by_calls", to_json(times.by_calls)}};
}

}  // namespace

Status run_dcp_suite(const BenchFlags& flags, const DeviceSpec& gpu, const harness::TimerSizes& sizes) {
    if (!flags.json_path.empty()) check_output_path(flags.json_path);
    const std::int64_t repeats = flags.repeat == 0 ? default_repeats : flags.repeat;
    Progress progress;
    progress.show("measuring the GPU's limits");
    const Conditions conditions = measure_conditions(gpu, harness::DecodeTimer(gpu.device, sizes));
    harness::DcpTimer timer(gpu.device, sizes);
    std::vector<DcpTiming> timings;
    for (const harness::DcpTimerShape& shape : chosen_shapes(flags)) {
        progress.show(shape.name);
        timings.push_back(
            {shape, timer.measure(shape, gpu, plan_options(flags.run), exchanges_of_graph, static_cast<int>(repeats))});
    }
    progress.clear();
    if (flags.json) {
        Json json = to_json(conditions);
        json["suite"] = flags.suite;
        json["repeats"] = repeats;
        for (const DcpTiming& timing : timings) json["timings"].push_back(to_json(timing));
        if (flags.json_path.empty()) {
            print_json(json);
            return Status::ok;
        }
        write_file(flags.json_path, json_text(json));
    }
    print(text_of(conditions));
    print("ranks of one GPU in lockstep: microseconds of one rank's call, without links and waiting\n");
    print(text_of(timings));
    if (!flags.json_path.empty()) print_line("wrote " + printable(flags.json_path));
    return Status::ok;
}

}  // namespace sparsemla::tool
