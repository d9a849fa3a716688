// convert: the token ids of a case to the slots of its rank.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>

#include "tools/output.h"
#include "tools/run.h"
#include "tools/subcommands.h"
#include "tools/table.h"

namespace sparsemla::tool {
namespace {

struct ConvertFlags {
    std::string path;
    std::string output;
    bool json = false;
};

/// One row's token ids and what became of them.
struct ConvertedRow {
    std::int64_t row = 0;
    std::int64_t request = 0;
    std::int64_t ids = 0;    ///< token ids >= 0
    std::int64_t owned = 0;  ///< of those, this rank's
    std::int64_t kept = 0;
    std::int64_t lowest = -1, highest = -1;  ///< slots; -1 in a row without any
};

ConvertedRow summarise(const ConvertArgs& args, const Case& converted, std::int64_t row) {
    ConvertedRow result{.row = row};
    const auto* request = static_cast<const std::int32_t*>(args.request_of_row.data);
    result.request = request[row];
    const std::int64_t width = args.token_ids.shape[1];
    const auto* ids = static_cast<const std::int32_t*>(args.token_ids.data) + row * width;
    for (std::int64_t c = 0; c < width; ++c) {
        if (ids[c] < 0) continue;
        ++result.ids;
        if (owner_of(ids[c], args.sharding.world, args.sharding.interleave) == args.sharding.rank) ++result.owned;
    }
    const auto* slots = reinterpret_cast<const std::int32_t*>(converted.find("slots")->bytes.get()) + row * width;
    result.kept = reinterpret_cast<const std::int32_t*>(converted.find("counts")->bytes.get())[row];
    if (result.kept > 0) {
        const auto [low, high] = std::minmax_element(slots, slots + result.kept);
        result.lowest = *low;
        result.highest = *high;
    }
    return result;
}

void print_rows(const std::vector<ConvertedRow>& rows) {
    Table table({{"row"}, {"request"}, {"token ids"}, {"of this rank"}, {"kept"}, {"slots", Align::left}});
    ConvertedRow total;
    constexpr std::size_t shown = 32;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const ConvertedRow& row = rows[i];
        total.ids += row.ids;
        total.owned += row.owned;
        total.kept += row.kept;
        if (i == shown) table.add_row({"..."});
        if (i >= shown) continue;
        table.add_row({std::to_string(row.row), std::to_string(row.request), format_count(row.ids),
                       format_count(row.owned), format_count(row.kept),
                       row.kept == 0 ? "none" : fmt::format("{} .. {}", row.lowest, row.highest)});
    }
    table.add_row({"all", "", format_count(total.ids), format_count(total.owned), format_count(total.kept), ""});
    print(table.text());
}

Json to_json(const ConvertArgs& args, const std::vector<ConvertedRow>& rows, const ConvertFlags& flags) {
    Json json;
    json["path"] = flags.path;
    json["world"] = args.sharding.world;
    json["rank"] = args.sharding.rank;
    json["interleave"] = args.sharding.interleave;
    json["rows"] = Json::array();
    for (const ConvertedRow& row : rows)
        json["rows"].push_back({{"row", row.row},
                                {"request", row.request},
                                {"token_ids", row.ids},
                                {"owned", row.owned},
                                {"kept", row.kept}});
    json["output"] = flags.output.empty() ? Json() : Json(flags.output);
    return json;
}

Status run_convert(const ConvertFlags& flags) {
    Case file = load_case(flags.path);
    const std::optional<ConvertArgs> args = case_indices(file);
    if (!args || file.find("slots") != nullptr)
        throw Error(ErrorKind::invalid_argument, flags.path, "a case with token_ids, block_table and request_of_row",
                    "one that has slots already");
    const Case original = file;  // keeps the tensors that args looks at, whatever conversion does with them
    convert_case(file);
    if (!flags.output.empty()) save_case(file, flags.output);
    std::vector<ConvertedRow> rows;
    for (std::int64_t row = 0; row < args->token_ids.shape[0]; ++row) rows.push_back(summarise(*args, file, row));
    if (flags.json) {
        print_json(to_json(*args, rows, flags));
        return Status::ok;
    }
    print_line(fmt::format("{}: rank {} of {}, interleave {}, pages of {} slots", printable(flags.path),
                           args->sharding.rank, args->sharding.world, args->sharding.interleave,
                           args->cache.page_size));
    print_rows(rows);
    if (!flags.output.empty()) print_line("wrote " + printable(flags.output));
    return Status::ok;
}

}  // namespace

Subcommand add_convert(CLI::App& parent) {
    CLI::App* app = parent.add_subcommand("convert", "Token ids of a case to slots of its rank, with counts");
    auto flags = std::make_shared<ConvertFlags>();
    app->add_option("CASE", flags->path, "a case file with token_ids")->required()->type_name("FILE");
    output_option(*app, "-o,--output", flags->output, "write the case with its slots and counts");
    app->add_flag("--json", flags->json, "one JSON document: path, world, rank, interleave, rows, output");
    app->footer(
        "Example:\n"
        "  sparsemla gen ids.safetensors --record fp8 --rows 4 --heads 16 --width 512 --token-ids --world 4 --rank 1\n"
        "  sparsemla convert ids.safetensors -o slots.safetensors");
    return {app, [flags] { return run_convert(*flags); }};
}

}  // namespace sparsemla::tool
