// check: every kernel against float64 and against the answers in the file, one table per case.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "sparsemla/device.h"
#include "tools/check_run.h"
#include "tools/subcommands.h"
#include "tools/table.h"
#include "tools/verdict.h"

namespace sparsemla::tool {
namespace {

struct CheckOptions {
    std::vector<std::string> paths;
    CheckFlags check;
    bool json = false;
};

void add_run(Table& table, const CheckedCase& checked, const CheckedRun& run, const RunFlags& flags) {
    const harness::Verdict& verdict = run.oracle;
    table.add_row(
        {run.kernel, run.p_format, format_seconds(run.seconds), format_ratio(verdict.worst_ratio), place(verdict),
         format_small(verdict.rms), verdict.worst_rms_ratio == 0 ? "" : format_ratio(verdict.worst_rms_ratio),
         format_small(verdict.lse_error), format_ratio(verdict.lse_ratio),
         run.file ? format_ratio(std::max(run.file->worst_ratio, run.file->lse_ratio)) : "", verdict_word(run.pass())});
    if (!verdict.problem.empty()) table.add_note("against float64: " + verdict.problem);
    if (run.file && !run.file->problem.empty()) table.add_note("against expected.*: " + run.file->problem);
    if (!run.pass())
        table.add_note(fmt::format("again: sparsemla check --device {} --kernel {} --p-format {}{} {}", run.device,
                                   run.kernel, run.p_format, schedule_options(flags), printable(checked.path)));
}

/// What the file says, judged by float64. `lse`: the file says something about it.
void add_stored(Table& table, const std::string& title, const harness::Verdict& verdict, bool lse,
                const std::string& word) {
    table.add_row({title, "", "", format_ratio(verdict.worst_ratio), place(verdict), format_small(verdict.rms), "",
                   lse ? format_small(verdict.lse_error) : "", lse ? format_ratio(verdict.lse_ratio) : "", "", word});
    if (word == "FAIL") table.add_note("against float64: " + verdict.problem);
}

std::string case_text(const CheckedCase& checked, const RunFlags& flags) {
    std::string text = fmt::format("{}\n  {}, {}\n", printable(checked.path), checked.step,
                                   plural(checked.active_columns, "active column"));
    for (const std::string& note : checked.notes) text += "  note: " + printable(note) + "\n";
    Table table({{"kernel", Align::left},
                 {"weights", Align::left},
                 {"time"},
                 {"out/bound"},
                 {"at row,head,dim"},
                 {"rms"},
                 {"rms/bound"},
                 {"lse error"},
                 {"lse/bound"},
                 {"vs file"},
                 {"", Align::left}});
    for (const CheckedRun& run : checked.runs) add_run(table, checked, run, flags);
    if (checked.file) add_stored(table, "expected.*", *checked.file, true, verdict_word(checked.file->pass));
    if (checked.peer) add_stored(table, "peer.out", *checked.peer, false, "info");
    text += table.text();
    if (checked.dequantised)
        text += checked.dequantised->empty() ? "  expected.dequantised  PASS\n"
                                             : "  expected.dequantised  FAIL\n    " + *checked.dequantised + "\n";
    for (const Refusal& refusal : checked.declined)
        text += fmt::format("  {} declined: {}\n", refusal.kernel, printable(refusal.reason));
    return text;
}

std::string status_word(Status status) {
    return status == Status::ok ? "pass" : status == Status::check_failed ? "fail" : "error";
}

Json to_json(const CheckedCase& checked) {
    Json json;
    json["path"] = checked.path;
    json["status"] = status_word(checked.status);
    json["error"] = checked.error.empty() ? Json() : Json(checked.error);
    json["step"] = checked.step;
    json["active_columns"] = checked.active_columns;
    json["runs"] = Json::array();
    for (const CheckedRun& run : checked.runs)
        json["runs"].push_back({{"device", run.device},
                                {"kernel", run.kernel},
                                {"p_format", run.p_format},
                                {"schedule", run.schedule},
                                {"seconds", run.seconds},
                                {"pass", run.pass()},
                                {"float64", verdict_json(run.oracle)},
                                {"expected", verdict_json(run.file)}});
    json["declined"] = Json::array();
    for (const Refusal& refusal : checked.declined)
        json["declined"].push_back({{"kernel", refusal.kernel}, {"reason", refusal.reason}});
    json["expected"] = verdict_json(checked.file);
    json["dequantised"] = checked.dequantised
                              ? Json({{"pass", checked.dequantised->empty()}, {"problem", *checked.dequantised}})
                              : Json();
    json["peer"] = verdict_json(checked.peer);
    return json;
}

/// check_case, with whatever stops it turned into the case's error.
CheckedCase check_or_explain(const std::string& path, const CheckFlags& flags, Progress& progress) {
    CheckedCase failed;
    failed.path = path;
    try {
        return check_case(path, flags, progress);
    } catch (const Error& error) {
        failed.error = error.what();
    } catch (const std::bad_alloc&) {
        failed.error = path + ": need a case that fits in memory, got a larger one";
    }
    return failed;
}

std::string totals(const std::vector<CheckedCase>& cases) {
    std::int64_t runs = 0, failed_runs = 0, failed_cases = 0, bad = 0;
    for (const CheckedCase& checked : cases) {
        for (const CheckedRun& run : checked.runs) failed_runs += run.pass() ? 0 : 1;
        runs += static_cast<std::int64_t>(checked.runs.size());
        failed_cases += checked.status == Status::check_failed ? 1 : 0;
        bad += checked.status == Status::bad_input ? 1 : 0;
    }
    std::string text =
        fmt::format("{}, {}: ", plural(static_cast<std::int64_t>(cases.size()), "case"), plural(runs, "run"));
    if (failed_cases == 0 && bad == 0) return text + "all pass";
    if (failed_cases > 0) text += plural(failed_cases, "case") + " failed";
    if (failed_runs > 0) text += fmt::format(" ({})", plural(failed_runs, "run"));
    if (bad > 0) text += fmt::format("{}{} could not be checked", failed_cases > 0 ? ", " : "", plural(bad, "case"));
    return text;
}

Status run_check(const CheckOptions& options) {
    devices_of(options.check.run);  // a device that is not there is an error of the call, not of every case
    Progress progress;
    std::vector<CheckedCase> cases;
    Status worst = Status::ok;
    for (const std::string& path : options.paths) {
        cases.push_back(check_or_explain(path, options.check, progress));
        progress.clear();
        const CheckedCase& checked = cases.back();
        worst = std::max(worst, checked.status);
        if (!checked.error.empty()) {
            print_error(checked.error);
        } else if (!options.json) {
            print(case_text(checked, options.check.run) + "\n");
            flush_output();
        }
    }
    if (options.json) {
        Json json;
        json["version"] = build_info().version;
        json["status"] = status_word(worst);
        json["cases"] = Json::array();
        for (const CheckedCase& checked : cases) json["cases"].push_back(to_json(checked));
        print_json(json);
    } else {
        print_line(totals(cases));
    }
    return worst;
}

}  // namespace

Subcommand add_check(CLI::App& parent) {
    CLI::App* app = parent.add_subcommand("check", "Every kernel against float64 and against the answers in the file");
    auto options = std::make_shared<CheckOptions>();
    app->add_option("CASE", options->paths, "case files")->required()->type_name("FILE ...");
    add_run_flags(*app, options->check.run, true);
    add_from_ids_flag(*app, options->check.run);
    app->add_flag("--rms", options->check.rms,
                  "apply the RMS rule too, which holds for uncorrelated data such as gen's and not for tied scores");
    app->add_flag(
        "--json", options->json,
        "one JSON document: version, status, cases [path, status, error, step, active_columns, runs, declined, "
        "expected, dequantised, peer]; numbers that are not finite are \"nan\", \"inf\", \"-inf\"");
    app->footer(
        "Without --kernel, or with --kernel all: every kernel in each weight format (P) that it offers.\n"
        "out/bound, lse/bound: the largest error over the bound computed for that element; above 1 fails.\n"
        "vs file: the same against expected.*, whose own rounding is granted.\n"
        "Exit status: 0 all pass, 1 a check failed, 2 a case could not be checked; the worst of all cases.\n"
        "Examples:\n"
        "  sparsemla check *.safetensors\n"
        "  sparsemla check --device cpu --kernel cpu --p-format e4m3 step.safetensors --json");
    return {app, [options] { return run_check(*options); }};
}

}  // namespace sparsemla::tool
