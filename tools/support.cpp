// support: the matrix of record x device x kernel, asked from supports(), as a Markdown table.
#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "harness/devices.h"
#include "sparsemla/decode.h"
#include "tools/output.h"
#include "tools/subcommands.h"

namespace sparsemla::tool {
namespace {

/// A record in one of its forms.
struct RecordCase {
    std::string name;
    SourceProblem source;
};

std::vector<RecordCase> record_cases() {
    std::vector<RecordCase> cases;
    const auto add = [&](const RecordLayout& layout, std::string_view form_name, RecordForm form, bool split_rope) {
        cases.push_back(
            {fmt::format("`{}` | {} | {}", layout.name, layout.record_bytes, form_name),
             {.record = layout.record, .form = form, .split_rope = split_rope, .width = 2048, .count_offset = 0}});
    };
    for (const RecordLayout& layout : record_layouts) {
        if (layout.has_contiguous) add(layout, "contiguous", RecordForm::contiguous, false);
        if (layout.may_split) add(layout, "latent and rope apart", RecordForm::contiguous, true);
        if (layout.has_planar) add(layout, "planar", RecordForm::planar, false);
    }
    return cases;
}

/// A column of the matrix: a device and a kernel of its kind.
struct Column {
    DeviceSpec device;
    std::string kernel;
};

/// A plan is a pure function of the spec, so none of the devices has to be in this machine. The GPU is as an H100 or
/// H200 says of itself.
std::vector<Column> columns() {
    DeviceSpec hopper;
    hopper.device = {Device::Kind::cuda, 0};
    hopper.name = "GPU of compute capability 9.0";
    hopper.capability = 90;
    hopper.sms = 132;
    hopper.shared_memory_bytes = 227 * 1024;
    hopper.l2_bytes = std::int64_t{50} << 20;
    int ctas = 0;
    for (int& clusters : hopper.resident_clusters) clusters = hopper.sms / ++ctas;
    std::vector<Column> all;
    for (const DeviceSpec& device : {query_device({}), hopper})
        for (const std::string& kernel : harness::kernels_on(device.device.kind)) all.push_back({device, kernel});
    return all;
}

std::string device_title(const DeviceSpec& device) {
    return device.device.kind == Device::Kind::cpu ? "cpu" : "cuda (9.0)";
}

struct Cell {
    std::string record, device, kernel, query;
    std::string refusal;  ///< empty: runs
};

Cell ask(const RecordCase& record, const Column& column, DType query) {
    Problem problem;
    problem.rows = 8;
    problem.heads = 16;
    problem.query_dtype = query;
    problem.sources = {record.source};
    problem.device = column.device.device;
    PlanOptions options;
    options.kernel = column.kernel;
    return {record.name, device_title(column.device), column.kernel, std::string(name(query)),
            refusal(problem, column.device, options).value_or("")};
}

/// "runs", "refused", or the queries that run where only some do.
std::string cell_text(const std::vector<Cell>& queries) {
    std::string running;
    std::size_t count = 0;
    for (const Cell& cell : queries) {
        if (!cell.refusal.empty()) continue;
        running += (running.empty() ? "" : ", ") + cell.query;
        ++count;
    }
    if (count == 0) return "refused";
    return count == queries.size() ? "runs" : "runs: " + running;
}

Json to_json(const std::vector<Cell>& cells) {
    Json json = Json::array();
    for (const Cell& cell : cells)
        json.push_back({{"record", cell.record},
                        {"device", cell.device},
                        {"kernel", cell.kernel},
                        {"query", cell.query},
                        {"runs", cell.refusal.empty()},
                        {"refusal", cell.refusal}});
    return json;
}

Status run_support(bool json) {
    std::string table = "| record | bytes | form |";
    std::string rule = "|---|---|---|";
    const std::vector<Column> asked = columns();
    for (const Column& column : asked) {
        table += fmt::format(" `{}` on {} |", column.kernel, device_title(column.device));
        rule += "---|";
    }
    table += "\n" + rule + "\n";
    std::vector<Cell> all;
    for (const RecordCase& record : record_cases()) {
        table += "| " + record.name + " |";
        for (const Column& column : asked) {
            std::vector<Cell> queries;
            for (const DType query : {DType::f8_e4m3, DType::bf16}) queries.push_back(ask(record, column, query));
            table += " " + cell_text(queries) + " |";
            all.insert(all.end(), queries.begin(), queries.end());
        }
        table += "\n";
    }
    json ? print_json(to_json(all)) : print(table);
    return Status::ok;
}

}  // namespace

Subcommand add_support(CLI::App& parent) {
    CLI::App* app = parent.add_subcommand("support", "Which kernel takes which record on which device");
    auto json = std::make_shared<bool>(false);
    app->add_flag("--json", *json, "one JSON document: a list of record, device, kernel, query, runs, refusal");
    app->footer("Example:\n  sparsemla support");
    return {app, [json] { return run_support(*json); }};
}

}  // namespace sparsemla::tool
