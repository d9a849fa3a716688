// info: what is inside a case file, with sizes, and records of chosen slots.
#include <fmt/format.h>

#include <memory>
#include <string>

#include "tools/output.h"
#include "tools/record_dump.h"
#include "tools/run.h"
#include "tools/subcommands.h"
#include "tools/table.h"

namespace sparsemla::tool {
namespace {

constexpr std::size_t max_dumped_slots = 4096;

struct InfoFlags {
    std::string path;
    std::string slots;
    std::int64_t source = 0;
    bool dump = false;
    bool json = false;
};

std::string shape_text(const std::vector<std::int64_t>& shape) {
    std::string text;
    for (const std::int64_t extent : shape) text += (text.empty() ? "" : ", ") + std::to_string(extent);
    return "[" + text + "]";
}

void print_content(const Case& file) {
    std::int64_t bytes = 0;
    Table tensors({{"tensor", Align::left}, {"dtype", Align::left}, {"shape", Align::left}, {"size"}});
    for (const auto& [tensor, value] : file.tensors) {
        tensors.add_row({printable(tensor), value.dtype_name, shape_text(value.shape),
                         format_bytes(static_cast<std::int64_t>(value.size_bytes))});
        bytes += static_cast<std::int64_t>(value.size_bytes);
    }
    tensors.add_row({"total", "", "", format_bytes(bytes)});
    print(tensors.text() + "\n");
    Facts metadata;
    for (const auto& [key, value] : file.metadata) metadata.add(printable(key), printable(value));
    print_line("metadata");
    print(metadata.text());
    for (const std::string& note : file.notes) print_line("  note: " + printable(note));
}

std::string geometry_text(const CacheView& cache) {
    std::string text = fmt::format("{} of {} slots", plural(cache.pages, "page"), format_count(cache.page_size));
    if (cache.slot_step() != cache.page_size) text += fmt::format(", {} slots from page to page", cache.slot_step());
    if (cache.form == RecordForm::planar) text += fmt::format(", {} bytes from page to page", cache.stride_bytes());
    return text + fmt::format(", slots 0 .. {}", cache.num_slots() - 1);
}

std::string layout_text(const CacheView& cache) {
    std::string text = to_string(cache.record);
    if (cache.layout().has_planar && cache.layout().has_contiguous)
        text += cache.form == RecordForm::planar ? " planar" : " contiguous";
    if (cache.rope != nullptr) text += ", latent and rope in two tensors";
    return text + fmt::format(", d_qk {}", cache.layout().d_qk());
}

std::int64_t active_columns_of(const CaseStep& step, std::size_t source) {
    CaseStep one = step;
    one.sources = {step.sources[source]};
    std::int64_t sum = 0;
    for (const std::int64_t active : active_columns(one)) sum += active;
    return sum;
}

void print_step(const LoadedStep& loaded, bool converted) {
    const CaseStep& step = loaded.step;
    Facts facts;
    facts.add("step", describe(step.problem()));
    for (std::size_t i = 0; i < step.sources.size(); ++i) {
        const CaseSource& source = step.sources[i];
        facts.add(fmt::format("source {}", i), layout_text(source.cache));
        facts.add("", geometry_text(source.cache));
        std::string lists = fmt::format("{} per row", plural(source.slots.shape[1], "column"));
        if (source.count_offset != 0) lists += fmt::format(", count offset {}", source.count_offset);
        lists += fmt::format(", {} active", format_count(active_columns_of(step, i)));
        facts.add("", lists);
        if (source.cache.layout().takes_k_scale) facts.add("", fmt::format("k_scale {}", source.k_scale));
    }
    facts.add("scales",
              fmt::format("softmax {}, query {}, output {}", step.softmax_scale, step.q_scale, step.out_scale));
    facts.add("lse", std::string(name(step.lse_base)));
    print_line("\nas a step" + std::string(converted ? ", token ids converted" : ""));
    print(facts.text());
}

Json to_json(const LoadedStep& loaded, const Case& original) {
    Json json;
    json["path"] = original.path;
    json["tensors"] = Json::object();
    for (const auto& [tensor, value] : original.tensors)
        json["tensors"][tensor] = {{"dtype", value.dtype_name}, {"shape", value.shape}, {"bytes", value.size_bytes}};
    json["metadata"] = original.metadata;
    json["notes"] = original.notes;
    json["rows"] = loaded.step.rows;
    json["heads"] = loaded.step.heads;
    json["sources"] = Json::array();
    for (std::size_t i = 0; i < loaded.step.sources.size(); ++i) {
        const CaseSource& source = loaded.step.sources[i];
        json["sources"].push_back({{"record", source.cache.layout().name},
                                   {"record_bytes", source.cache.layout().record_bytes},
                                   {"layout", source.cache.form == RecordForm::planar ? "planar" : "contiguous"},
                                   {"pages", source.cache.pages},
                                   {"page_size", source.cache.page_size},
                                   {"slots_per_page", source.cache.slot_step()},
                                   {"page_stride_bytes", source.cache.stride_bytes()},
                                   {"num_slots", source.cache.num_slots()},
                                   {"width", source.slots.shape[1]},
                                   {"count_offset", source.count_offset},
                                   {"active_columns", active_columns_of(loaded.step, i)},
                                   {"k_scale", json_number(source.k_scale)}});
    }
    return json;
}

const CacheView& chosen_cache(const InfoFlags& flags, const CaseStep& step) {
    if (flags.source >= static_cast<std::int64_t>(step.sources.size()))
        throw Error(ErrorKind::invalid_argument, "--source", "a source of the case: 0", std::to_string(flags.source));
    return step.sources[static_cast<std::size_t>(flags.source)].cache;
}

std::vector<std::int64_t> chosen_slots(const InfoFlags& flags, const CacheView& cache) {
    if (flags.slots.empty()) return {};
    const std::vector<std::int64_t> slots = parse_list(flags.slots, "--slots", max_dumped_slots);
    for (const std::int64_t slot : slots)
        if (!cache.holds(slot))
            throw Error(ErrorKind::invalid_argument, "--slots",
                        fmt::format("slots that the cache holds: {}", geometry_text(cache)), std::to_string(slot));
    return slots;
}

Status run_info(const InfoFlags& flags) {
    const Case original = load_case(flags.path);
    const LoadedStep loaded = step_of(original);
    const CacheView& cache = chosen_cache(flags, loaded.step);
    const std::vector<std::int64_t> slots = chosen_slots(flags, cache);
    if (flags.json) {
        print_json(to_json(loaded, original));
        return Status::ok;
    }
    print_line(printable(flags.path));
    print_content(original);
    print_step(loaded, original.find("slots") == nullptr);
    if (!slots.empty()) print_line(fmt::format("\nrecords of source {}, {}", flags.source, layout_text(cache)));
    for (const std::int64_t slot : slots) {
        print(dump_record(cache, slot, flags.dump));
    }
    return Status::ok;
}

}  // namespace

Subcommand add_info(CLI::App& parent) {
    CLI::App* app = parent.add_subcommand("info", "What is inside a case, and records of chosen slots");
    auto flags = std::make_shared<InfoFlags>();
    app->add_option("CASE", flags->path, "a case file")->required()->type_name("FILE");
    CLI::Option* slots =
        app->add_option("--slots", flags->slots, "records to show, such as 0,5,8-11")->type_name("LIST");
    integer_option(*app, "--source", flags->source, 0, 1, "the source whose records are shown")->capture_default_str();
    app->add_flag("--dump", flags->dump, "every byte and every value of the records")->needs(slots);
    app->add_flag("--json", flags->json, "one JSON document: path, tensors, metadata, notes, rows, heads, sources")
        ->excludes(slots);
    app->footer(
        "Examples:\n"
        "  sparsemla info step.safetensors\n"
        "  sparsemla info step.safetensors --slots 0-3 --dump");
    return {app, [flags] { return run_info(*flags); }};
}

}  // namespace sparsemla::tool
