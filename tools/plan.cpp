// plan: what would run for a case or a described problem, and why every other kernel does not.
#include <fmt/format.h>

#include <memory>
#include <string>

#include "tools/output.h"
#include "tools/problem_flags.h"
#include "tools/run.h"
#include "tools/subcommands.h"

namespace sparsemla::tool {
namespace {

struct PlanFlags {
    std::string path;
    RunFlags run;
    ProblemFlags problem;
    bool json = false;
};

Json to_json(const Problem& problem) {
    Json json;
    json["rows"] = problem.rows;
    json["heads"] = problem.heads;
    json["query"] = name(problem.query_dtype);
    json["sources"] = Json::array();
    for (const SourceProblem& source : problem.sources)
        json["sources"].push_back({{"record", layout_of(source.record).name},
                                   {"record_bytes", layout_of(source.record).record_bytes},
                                   {"layout", source.form == RecordForm::planar ? "planar" : "contiguous"},
                                   {"split_rope", source.split_rope},
                                   {"width", source.width},
                                   {"count_offset", source.count_offset}});
    json["from_ids"] = problem.from_ids;
    json["sinks"] = problem.sinks;
    json["lse"] = name(problem.lse_base);
    return json;
}

Json to_json(const Plan& plan) {
    const Schedule& schedule = plan.schedule;
    Json json;
    json["problem"] = to_json(plan.problem);
    json["device"] = {{"device", to_string(plan.device.device)}, {"name", plan.device.name}};
    if (plan.device.device.kind == Device::Kind::cpu) json["device"]["threads"] = plan.device.threads;
    json["kernel"] = schedule.kernel;
    json["reason"] = plan.reason;
    json["schedule"] = {{"text", to_string(schedule)},          {"kernel", schedule.kernel},
                        {"p_format", name(schedule.p_format)},  {"p_scale", json_number(schedule.p_scale)},
                        {"anchor", name(schedule.anchor)},      {"splits", schedule.splits},
                        {"columns", name(schedule.columns)},    {"chunk", schedule.chunk},
                        {"row_capacity", schedule.row_capacity}};
    json["tiling"] = plan.tiling ? Json({{"heads", plan.tiling->heads},
                                         {"stages", plan.tiling->stages},
                                         {"cluster_tiles", plan.tiling->cluster_tiles},
                                         {"gather", name(plan.tiling->gather)},
                                         {"transport", name(plan.tiling->transport)},
                                         {"trigger", name(plan.tiling->trigger)}})
                                 : Json();
    json["workspace_bytes"] = plan.workspace_bytes;
    json["state_bytes"] = plan.state_bytes;
    json["declined"] = Json::array();
    for (const Refusal& refusal : plan.declined)
        json["declined"].push_back({{"kernel", refusal.kernel}, {"reason", refusal.reason}});
    return json;
}

Problem problem_for(const PlanFlags& flags) {
    if (!flags.path.empty()) return problem_of(load_step(flags.path), flags.run.from_ids);
    if (flags.problem.first.record.empty())
        throw Error(ErrorKind::invalid_argument, "CASE",
                    "a case file, or a problem by --record, --rows, --heads, --width", "neither");
    Problem problem = problem_of(recipe_of(flags.problem));
    problem.from_ids = flags.run.from_ids;
    return problem;
}

Status run_plan(const PlanFlags& flags) {
    const Plan plan = plan_on_first(problem_for(flags), devices_of(flags.run), plan_options(flags.run));
    flags.json ? print_json(to_json(plan)) : print(plan.describe());
    return Status::ok;
}

}  // namespace

Subcommand add_plan(CLI::App& parent) {
    CLI::App* app = parent.add_subcommand("plan", "What would run for a problem, and why each other kernel declined");
    auto flags = std::make_shared<PlanFlags>();
    CLI::Option* path =
        app->add_option("CASE", flags->path, "a case file; or describe the problem with the options below");
    path->type_name("FILE");
    add_problem_flags(*app, flags->problem)->excludes(path);
    for (const char* option : {"--rows", "--heads", "--width", "--extra-record", "--query", "--sinks", "--lse"})
        app->get_option(option)->needs("--record");
    add_run_flags(*app, flags->run, false);
    add_from_ids_flag(*app, flags->run);
    app->add_flag(
        "--json", flags->json,
        "one JSON document: problem, device, kernel, reason, schedule, tiling (of a GPU kernel), workspace_bytes, "
        "state_bytes, declined");
    app->footer(
        "Examples:\n"
        "  sparsemla plan step.safetensors\n"
        "  sparsemla plan --record fp8 --rows 8 --heads 16 --width 2048 --p-format e4m3");
    return {app, [flags] { return run_plan(*flags); }};
}

}  // namespace sparsemla::tool
