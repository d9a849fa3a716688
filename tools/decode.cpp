// decode: runs a case once, shows the result row by row, and writes it.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <system_error>

#include "sparsemla/formats.h"
#include "tools/output.h"
#include "tools/run.h"
#include "tools/subcommands.h"
#include "tools/table.h"

namespace sparsemla::tool {
namespace {

struct DecodeFlags {
    std::string path;
    std::string output;
    RunFlags run;
    bool json = false;
};

/// What a person wants to know of a row's [heads, 512] output and [heads] LSE.
struct RowSummary {
    std::int64_t row = 0;
    std::int64_t active = 0;
    double lse_low = 0, lse_high = 0;
    double rms = 0, largest = 0;
    std::int64_t not_finite = 0;  ///< elements of out
};

RowSummary summarise(const Runner& runner, std::int64_t row, std::int64_t active) {
    const std::int64_t heads = runner.out().shape[1];
    const auto* out = reinterpret_cast<const std::uint16_t*>(runner.out().bytes.get()) + row * heads * value_dims;
    const auto* lse = reinterpret_cast<const float*>(runner.lse().bytes.get()) + row * heads;
    RowSummary summary{.row = row, .active = active};
    double squares = 0;
    for (std::int64_t i = 0; i < heads * value_dims; ++i) {
        const double value = bf16_to_float(out[i]);
        if (!std::isfinite(value)) {
            ++summary.not_finite;
            continue;
        }
        squares += value * value;
        summary.largest = std::max(summary.largest, std::fabs(value));
    }
    const std::int64_t finite = heads * value_dims - summary.not_finite;
    if (finite > 0) summary.rms = std::sqrt(squares / static_cast<double>(finite));
    if (heads > 0) {
        summary.lse_low = *std::min_element(lse, lse + heads);
        summary.lse_high = *std::max_element(lse, lse + heads);
    }
    return summary;
}

std::string lse_range(const RowSummary& row) {
    if (row.lse_low == row.lse_high) return fmt::format("{:.4f}", row.lse_low);
    return fmt::format("{:.4f} .. {:.4f}", row.lse_low, row.lse_high);
}

void print_rows(const std::vector<RowSummary>& rows) {
    if (rows.empty()) return;
    constexpr std::size_t shown = 32;
    Table table({{"row"}, {"active columns"}, {"lse over heads"}, {"out rms"}, {"out max"}, {"not finite"}});
    for (std::size_t i = 0; i < std::min(shown, rows.size()); ++i)
        table.add_row({std::to_string(rows[i].row), format_count(rows[i].active), lse_range(rows[i]),
                       format_number(rows[i].rms), format_number(rows[i].largest),
                       rows[i].not_finite == 0 ? "" : format_count(rows[i].not_finite)});
    print("\n" + table.text());
    if (rows.size() > shown)
        print_line(fmt::format("  ... and {}", plural(static_cast<std::int64_t>(rows.size() - shown), "more row")));
}

Json to_json(const DecodeFlags& flags, const Runner& runner, double seconds, const std::vector<RowSummary>& rows) {
    Json json;
    json["path"] = flags.path;
    json["device"] = to_string(runner.plan().device.device);
    json["kernel"] = runner.plan().schedule.kernel;
    json["schedule"] = to_string(runner.plan().schedule);
    json["lse_base"] = name(runner.plan().problem.lse_base);
    json["seconds"] = seconds;
    json["rows"] = Json::array();
    for (const RowSummary& row : rows)
        json["rows"].push_back({{"row", row.row},
                                {"active_columns", row.active},
                                {"lse_min", json_number(row.lse_low)},
                                {"lse_max", json_number(row.lse_high)},
                                {"out_rms", json_number(row.rms)},
                                {"out_max", json_number(row.largest)},
                                {"not_finite", row.not_finite}});
    json["output"] = flags.output.empty() ? Json() : Json(flags.output);
    return json;
}

/// `out` and `lse`, with how they came about.
Case result_file(const Runner& runner) {
    Case file;
    file.tensors["out"] = runner.out();
    file.tensors["lse"] = runner.lse();
    file.metadata["schedule"] = to_string(runner.plan().schedule);
    file.metadata["device"] = to_string(runner.plan().device.device);
    file.metadata["lse"] = name(runner.plan().problem.lse_base);
    return file;
}

/// The result holds no step: written over the case, it would destroy it.
void check_output(const DecodeFlags& flags) {
    if (flags.output.empty()) return;
    check_output_path(flags.output);
    std::error_code unknown;  // of a file that is not there
    if (std::filesystem::equivalent(flags.path, flags.output, unknown))
        throw Error(ErrorKind::invalid_argument, "--output", "another file than the case", flags.output);
}

Status run_decode(const DecodeFlags& flags) {
    check_output(flags);
    const LoadedStep loaded = load_step(flags.path);
    Runner runner(
        loaded, plan_on_first(problem_of(loaded, flags.run.from_ids), devices_of(flags.run), plan_options(flags.run)));
    Progress progress;
    progress.show("decoding on " + to_string(runner.plan().device.device));
    const double seconds = runner.run();
    progress.clear();
    if (!flags.output.empty()) save_case(result_file(runner), flags.output);

    std::vector<RowSummary> rows;
    const std::vector<std::int64_t> active = active_columns(loaded.step);
    for (std::int64_t row = 0; row < loaded.step.rows; ++row)
        rows.push_back(summarise(runner, row, active[static_cast<std::size_t>(row)]));
    if (flags.json) {
        print_json(to_json(flags, runner, seconds, rows));
        return Status::ok;
    }
    Facts facts;
    facts.add("step", describe(runner.plan().problem));
    facts.add("device", fmt::format("{} ({})", to_string(runner.plan().device.device), runner.plan().device.name));
    facts.add("schedule", to_string(runner.plan().schedule));
    facts.add("time", format_seconds(seconds) + ", first call");
    facts.add("lse", std::string(name(runner.plan().problem.lse_base)));
    for (const std::string& note : loaded.file.notes) facts.add("note", printable(note));
    print_line(printable(flags.path));
    print(facts.text());
    print_rows(rows);
    if (!flags.output.empty())
        print_line(fmt::format("\nwrote {}: out BF16 [{}, {}, {}], lse F32 [{}, {}]", printable(flags.output),
                               loaded.step.rows, loaded.step.heads, value_dims, loaded.step.rows, loaded.step.heads));
    return Status::ok;
}

}  // namespace

Subcommand add_decode(CLI::App& parent) {
    CLI::App* app = parent.add_subcommand("decode", "Run a case once and show the result");
    auto flags = std::make_shared<DecodeFlags>();
    app->add_option("CASE", flags->path, "a case file")->required()->type_name("FILE");
    output_option(*app, "-o,--output", flags->output, "write tensors `out` (BF16) and `lse` (F32), safetensors");
    add_run_flags(*app, flags->run, false);
    add_from_ids_flag(*app, flags->run);
    app->add_flag("--json", flags->json,
                  "one JSON document: path, device, kernel, schedule, lse_base, seconds, rows, output; numbers that "
                  "are not finite are \"nan\", \"inf\", \"-inf\"");
    app->footer(
        "Examples:\n"
        "  sparsemla decode step.safetensors\n"
        "  sparsemla decode step.safetensors --kernel cpu --p-format e4m3 --splits 4 -o result.safetensors");
    return {app, [flags] { return run_decode(*flags); }};
}

}  // namespace sparsemla::tool
