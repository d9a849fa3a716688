// bench: times the shared list of problems and relates them to the limits of this machine, measured in the same run.
// Suite latency and the sweep, which need a GPU, have files of their own.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "harness/problems.h"
#include "harness/spread.h"
#include "sparsemla/device.h"
#include "tools/bench.h"
#include "tools/conditions.h"
#include "tools/output.h"
#include "tools/probes.h"
#include "tools/run.h"
#include "tools/subcommands.h"
#include "tools/svg_plot.h"
#include "tools/table.h"

namespace sparsemla::tool {
namespace {

constexpr std::int64_t default_repeat = 15;

std::int64_t repeat_of(const BenchFlags& flags) { return flags.repeat == 0 ? default_repeat : flags.repeat; }

/// One kernel with one P format on one problem.
struct Timing {
    std::string problem;
    std::string device;
    std::string kernel;
    std::string p_format;
    std::string schedule;
    double median_s = 0, p10_s = 0, p90_s = 0;
    double bytes = 0;       ///< records read: active columns of all rows times record bytes
    double operations = 0;  ///< multiplications and additions of Q*K and P*V

    double bytes_per_s() const { return bytes / median_s; }
    double flops_per_s() const { return operations / median_s; }
};

/// The least time that the limits allow, and which of the two sets it. Unknown (0, "") for a GPU: the limits measured
/// here are the CPU's.
struct Limit {
    double seconds = 0;
    std::string by;
};

Limit limit_of(const Timing& timing, const MachineLimits& machine) {
    if (timing.device != to_string(Device{})) return {};
    const double fma = machine.fma_flops_per_s > 0 ? timing.operations / machine.fma_flops_per_s : 0;
    const double memory = machine.read_bytes_per_s > 0 ? timing.bytes / machine.read_bytes_per_s : 0;
    return fma >= memory ? Limit{fma, "fma"} : Limit{memory, "memory"};
}

/// At least the clock's step, as rates and logarithms are taken of it.
double quantile(const std::vector<double>& sorted, double share) {
    return std::max(harness::quantile(sorted, share), 1e-9);
}

std::vector<harness::NamedRecipe> chosen_problems(const BenchFlags& flags) {
    std::vector<harness::NamedRecipe> chosen = harness::problems(flags.suite);
    if (chosen.empty()) {
        std::set<std::string> suites = {latency_suite, records_suite, dcp_suite};
        for (const harness::NamedRecipe& problem : harness::problems()) suites.insert(problem.suite);
        throw Error(ErrorKind::invalid_argument, "--suite", fmt::format("one of {}", fmt::join(suites, ", ")),
                    in_quotes(flags.suite));
    }
    const std::size_t all = chosen.size();
    std::erase_if(chosen, [&](const auto& problem) { return problem.name.find(flags.filter) == std::string::npos; });
    if (chosen.empty())
        throw Error(
            ErrorKind::invalid_argument, "--filter",
            fmt::format("a part of one of {} names such as {}", all, harness::problems(flags.suite).front().name),
            in_quotes(flags.filter));
    return chosen;
}

/// The plans to time: the library's choice, or every kernel and P format that was asked for and is offered.
std::vector<Plan> chosen_plans(Problem problem, const std::vector<DeviceSpec>& devices, const RunFlags& flags) {
    std::vector<PlanOptions> wishes;
    const std::vector<std::string> kernels =
        flags.kernel == "all" ? kernel_names() : std::vector<std::string>{plan_options(flags).kernel};
    for (const std::string& kernel : kernels) {
        PlanOptions wish = plan_options(flags);
        wish.kernel = kernel;
        if (flags.p_format != "all") wishes.push_back(wish);
        for (const PFormat format : {PFormat::e4m3, PFormat::f16, PFormat::bf16, PFormat::f64}) {
            wish.p_format = format;
            if (flags.p_format == "all") wishes.push_back(wish);
        }
    }
    if (wishes.size() == 1) return {plan_on_first(problem, devices, wishes.front())};
    std::vector<Plan> plans;
    for (const DeviceSpec& device : devices) {
        problem.device = device.device;
        for (const PlanOptions& wish : wishes)
            if (supports(problem, device, wish)) plans.push_back(make_plan(problem, device, wish));
    }
    return plans;
}

Timing timing_of(const std::string& problem, const LoadedStep& loaded, const Runner& runner,
                 std::vector<double> sample) {
    std::sort(sample.begin(), sample.end());
    const Schedule& schedule = runner.plan().schedule;
    const std::vector<std::int64_t> active = active_columns(loaded.step);
    const auto columns = static_cast<double>(std::accumulate(active.begin(), active.end(), std::int64_t{0}));
    const auto dims = static_cast<double>(d_qk(runner.plan().problem) + value_dims);
    return {.problem = problem,
            .device = to_string(runner.plan().device.device),
            .kernel = schedule.kernel,
            .p_format = std::string(name(schedule.p_format)),
            .schedule = to_string(schedule),
            .median_s = quantile(sample, 0.5),
            .p10_s = quantile(sample, 0.1),
            .p90_s = quantile(sample, 0.9),
            .bytes = static_cast<double>(record_bytes_read(loaded.step)),
            .operations = 2 * columns * static_cast<double>(loaded.step.heads) * dims};
}

/// All plans of one problem. They take turns, so that a drift of the machine falls on all of them alike.
std::vector<Timing> time_problem(const harness::NamedRecipe& problem, const BenchFlags& flags, Progress& progress) {
    progress.show(problem.name + ": generating");
    harness::Recipe recipe = problem.recipe;
    recipe.expected = false;
    const LoadedStep loaded = step_of(harness::generate(recipe));
    std::vector<std::unique_ptr<Runner>> runners;
    for (const Plan& plan : chosen_plans(loaded.step.problem(), devices_of(flags.run), flags.run))
        runners.push_back(std::make_unique<Runner>(loaded, plan));
    std::vector<std::vector<double>> samples(runners.size());
    constexpr int warm_up_turns = 2;
    const std::int64_t turns = repeat_of(flags);
    for (std::int64_t turn = -warm_up_turns; turn < turns; ++turn) {
        progress.show(fmt::format("{}: turn {} of {}", problem.name, std::max<std::int64_t>(turn + 1, 0), turns));
        for (std::size_t i = 0; i < runners.size(); ++i) {
            const double seconds = runners[i]->run();
            if (turn >= 0) samples[i].push_back(seconds);
        }
    }
    progress.clear();
    std::vector<Timing> timings;
    for (std::size_t i = 0; i < runners.size(); ++i)
        timings.push_back(timing_of(problem.name, loaded, *runners[i], std::move(samples[i])));
    return timings;
}

std::string limits_text(const MachineLimits& machine, const DeviceSpec& cpu) {
    return fmt::format("{} ({}): {} FP32 GFLOP/s, {} GB/s read", plural(machine.threads, "thread"), cpu.name,
                       format_number(machine.fma_flops_per_s / 1e9), format_number(machine.read_bytes_per_s / 1e9));
}

double limit_percent(const Timing& timing, const Limit& limit) { return 100 * limit.seconds / timing.median_s; }

void print_table(const std::vector<Timing>& timings, const MachineLimits& machine) {
    Table table({{"problem", Align::left},
                 {"kernel", Align::left},
                 {"weights", Align::left},
                 {"median"},
                 {"p10"},
                 {"p90"},
                 {"GB/s"},
                 {"GFLOP/s"},
                 {"of limit"},
                 {"limit", Align::left}});
    for (const Timing& timing : timings) {
        const Limit limit = limit_of(timing, machine);
        table.add_row({timing.problem, timing.kernel, timing.p_format, format_seconds(timing.median_s),
                       format_seconds(timing.p10_s), format_seconds(timing.p90_s),
                       fmt::format("{:.2f}", timing.bytes_per_s() / 1e9),
                       fmt::format("{:.1f}", timing.flops_per_s() / 1e9),
                       limit.by.empty() ? "" : fmt::format("{:.0f} %", limit_percent(timing, limit)), limit.by});
    }
    print(table.text());
}

void print_csv(const std::vector<Timing>& timings, const MachineLimits& machine) {
    print_line(
        "problem,device,kernel,p_format,median_us,p10_us,p90_us,record_bytes,flop,gb_per_s,gflop_per_s,limit_percent,"
        "limit,"
        "schedule");
    for (const Timing& timing : timings) {
        const Limit limit = limit_of(timing, machine);
        print_line(fmt::format("{},{},{},{},{:.3f},{:.3f},{:.3f},{:.0f},{:.0f},{:.3f},{:.3f},{:.2f},{},\"{}\"",
                               timing.problem, timing.device, timing.kernel, timing.p_format, timing.median_s * 1e6,
                               timing.p10_s * 1e6, timing.p90_s * 1e6, timing.bytes, timing.operations,
                               timing.bytes_per_s() / 1e9, timing.flops_per_s() / 1e9, limit_percent(timing, limit),
                               limit.by, timing.schedule));
    }
}

Json to_json(const std::vector<Timing>& timings, const MachineLimits& machine, const BenchFlags& flags) {
    Json json;
    json["version"] = build_info().version;
    json["suite"] = flags.suite;
    json["repeat"] = repeat_of(flags);
    json["limits"] = {{"threads", machine.threads},
                      {"fma_flop_per_s", json_number(machine.fma_flops_per_s)},
                      {"read_bytes_per_s", json_number(machine.read_bytes_per_s)}};
    json["timings"] = Json::array();
    for (const Timing& timing : timings) {
        const Limit limit = limit_of(timing, machine);
        json["timings"].push_back({{"problem", timing.problem},
                                   {"device", timing.device},
                                   {"kernel", timing.kernel},
                                   {"p_format", timing.p_format},
                                   {"schedule", timing.schedule},
                                   {"median_s", timing.median_s},
                                   {"p10_s", timing.p10_s},
                                   {"p90_s", timing.p90_s},
                                   {"record_bytes", timing.bytes},
                                   {"flop", timing.operations},
                                   {"bytes_per_s", json_number(timing.bytes_per_s())},
                                   {"flop_per_s", json_number(timing.flops_per_s())},
                                   {"limit_percent", json_number(limit_percent(timing, limit))},
                                   {"limit", limit.by}});
    }
    return json;
}

Plot plot_of(const std::vector<Timing>& timings, const MachineLimits& machine, const DeviceSpec& cpu,
             const BenchFlags& flags) {
    Plot plot{
        .title = "sparsemla: time per decode, suite " + flags.suite,
        .subtitle = fmt::format("median of {}, line from p10 to p90; {}", repeat_of(flags), limits_text(machine, cpu)),
        .points = {}};
    for (const Timing& timing : timings)
        plot.points.push_back({.label = timing.problem,
                               .series = timing.kernel + " " + timing.p_format,
                               .low_s = timing.p10_s,
                               .median_s = timing.median_s,
                               .high_s = timing.p90_s,
                               .limit_s = limit_of(timing, machine).seconds});
    return plot;
}

void write_timings(const std::vector<Timing>& timings, const MachineLimits& machine, const DeviceSpec& cpu,
                   const BenchFlags& flags) {
    if (!flags.plot.empty()) write_file(flags.plot, to_svg(plot_of(timings, machine, cpu, flags)));
    if (flags.json && flags.json_path.empty()) {
        print_json(to_json(timings, machine, flags));
        return;
    }
    if (flags.json) write_file(flags.json_path, json_text(to_json(timings, machine, flags)));
    if (flags.csv) {
        print_csv(timings, machine);
        return;
    }
    print_line(fmt::format("limits measured now, {}", limits_text(machine, cpu)));
    print_table(timings, machine);
    for (const std::string& path : {flags.plot, flags.json_path})
        if (!path.empty()) print_line("wrote " + printable(path));
}

bool is_of_gpu(const std::string& suite) {
    return suite == latency_suite || suite == records_suite || suite == dcp_suite;
}

/// Options that belong to one of the suites only.
void check_combination(const BenchFlags& flags) {
    const bool latency = is_of_gpu(flags.suite);
    const auto refuse = [](const char* option, const char* required, const std::string& received) {
        throw Error(ErrorKind::invalid_argument, option, required, received);
    };
    if ((!latency || flags.suite == dcp_suite) && !flags.baseline.empty())
        refuse("--baseline", "--suite latency or records beside it", "another suite");
    if (latency && flags.csv)
        refuse("--csv", "another suite than latency, records and dcp, which have --json", "--suite " + flags.suite);
    if (flags.suite == dcp_suite && !flags.plot.empty())
        refuse("--plot", "another suite than dcp, which has --json", "--suite " + flags.suite);
}

Status run_bench(const BenchFlags& flags) {
    check_combination(flags);
    if (flags.sweep) return run_sweep(flags, gpu_of(flags.run, "--sweep"));
    if (flags.suite == dcp_suite) return run_dcp_suite(flags, gpu_of(flags.run, "--suite " + flags.suite));
    if (is_of_gpu(flags.suite)) return run_latency_suite(flags, gpu_of(flags.run, "--suite " + flags.suite));
    for (const std::string& path : {flags.plot, flags.json_path})
        if (!path.empty()) check_output_path(path);
    const std::vector<harness::NamedRecipe> problems = chosen_problems(flags);
    RunFlags on_cpu = flags.run;
    on_cpu.device = "cpu";
    const DeviceSpec cpu = devices_of(on_cpu).front();
    Progress progress;
    progress.show("measuring the machine's limits");
    const MachineLimits machine = measure_limits(cpu.threads);
    std::vector<Timing> timings;
    for (const harness::NamedRecipe& problem : problems)
        for (Timing& timing : time_problem(problem, flags, progress)) timings.push_back(std::move(timing));
    progress.clear();
    if (timings.empty())
        throw Error(ErrorKind::unsupported, "--kernel, --p-format", "a kernel that takes at least one of the problems",
                    "refusals only; `sparsemla plan` gives the reasons");
    write_timings(timings, machine, cpu, flags);
    return Status::ok;
}

}  // namespace

namespace {

/// Returns --json, whose file may be left out.
CLI::Option* add_output_flags(CLI::App& app, BenchFlags& flags) {
    CLI::Option* json = app.add_option("--json", flags.json_path,
                                       "one JSON document: version, suite, repeat, limits, timings (of a GPU: the "
                                       "GPU, timings, cliffs); to FILE, beside the table, or instead of it");
    json->expected(0, 1)->type_name("[FILE]");
    app.add_flag("--csv", flags.csv, "one line per timing, after a line of column names")->excludes(json);
    output_option(app, "--plot", flags.plot, "also write a plot: a dot per timing, or (latency) lines over rows")
        ->type_name("FILE.svg");
    return json;
}

void add_latency_flags(CLI::App& app, BenchFlags& flags) {
    const std::string group = "Suites latency and records";
    integer_option(app, "--calls", flags.calls, 1, 1000, "decodes in a graph; 50 or more in figures to report")
        ->capture_default_str()
        ->group(group);
    app.add_option("--baseline", flags.baseline, "compare with the times in this file (docs/performance.md)")
        ->type_name("FILE.tsv")
        ->group(group);
}

void add_sweep_flags(CLI::App& app, BenchFlags& flags) {
    const std::string group = "Sweep over the layouts of a GPU kernel, for the plan's table";
    CLI::Option* sweep =
        app.add_flag("--sweep", flags.sweep, "time the layouts of a grid of problems, warm")->group(group);
    number_option(app, "--minutes", flags.minutes, 0, 1e6, "stop after this time")
        ->capture_default_str()
        ->needs(sweep)
        ->group(group);
    integer_option(app, "--layouts", flags.layouts, 1, 1000, "of each point, those of which the planner expects most")
        ->capture_default_str()
        ->needs(sweep)
        ->group(group);
    output_option(app, "--resume", flags.resume, "keep results here, a JSON object in each line, and go on from them")
        ->needs(sweep)
        ->group(group);
    output_option(app, "--write-table", flags.table, "write the fastest layouts, as src/tuning_table.inc")
        ->needs(sweep)
        ->group(group);
}

}  // namespace

Subcommand add_bench(CLI::App& parent) {
    CLI::App* app = parent.add_subcommand("bench", "Time the shared list of problems");
    auto flags = std::make_shared<BenchFlags>();
    app->add_option("--suite", flags->suite,
                    "the list: speed, latency, records or dcp (a GPU's), or another suite of the tests")
        ->type_name("NAME")
        ->capture_default_str();
    app->add_option("--filter,--shape", flags->filter, "only problems whose name contains this")->type_name("TEXT");
    add_run_flags(*app, flags->run, true);
    integer_option(
        *app, "--repeat,--repeats", flags->repeat, 1, 1'000'000,
        "timed calls per problem and kernel (default 15), or replays of a graph (latency and records 30, sweep 5)");
    const CLI::Option* json = add_output_flags(*app, *flags);
    add_latency_flags(*app, *flags);
    add_sweep_flags(*app, *flags);
    app->footer(
        "Kernels of one problem take turns after two untimed turns; p10 and p90 are the spread.\n"
        "GB/s counts the records of all active columns, GFLOP/s the products and sums of Q*K and P*V.\n"
        "of limit: the least time that the FP32 multiply-add peak (fma) and the memory bandwidth (memory), both "
        "measured\n"
        "in this run on as many threads, allow; over the median. Records that a CPU cache holds can exceed `memory`.\n"
        "On a GPU: the time between two events around the call, and no limit. Suites latency and records time graphs "
        "of\n"
        "dependent decodes instead, cold and warm, against the floor of copy rate, arithmetic and empty launches.\n"
        "Examples:\n"
        "  sparsemla bench --filter fp8\n"
        "  sparsemla bench --kernel cpu --p-format all --repeat 31 --plot bench.svg\n"
        "  sparsemla bench --suite latency --device cuda:0 --shape goal/ --baseline flashmla.tsv --json latency.json\n"
        "  sparsemla bench --suite records --device cuda:0 --baseline flashmla.tsv\n"
        "  sparsemla bench --sweep --minutes 6 --resume sweep.jsonl --write-table src/tuning_table.inc");
    return {app, [flags, json] {
                flags->json = json->count() > 0;
                return run_bench(*flags);
            }};
}

}  // namespace sparsemla::tool
