#include "tools/problem_flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "tools/flags.h"

namespace sparsemla::tool {
namespace {

constexpr std::int64_t max_int32 = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t max_stride_bytes = std::int64_t{1} << 40;

/// `prefix` is "" or "extra-"; the second source's options need its record.
void finish_group(CLI::App& app, const std::string& prefix, std::initializer_list<const char*> options) {
    for (const char* option : options) {
        CLI::Option* added = app.get_option("--" + prefix + option);
        added->group(prefix.empty() ? "First source" : "Second source, with --extra-record");
        if (!prefix.empty()) added->needs("--extra-record");
    }
}

void add_source_shape(CLI::App& app, SourceFlags& source, const std::string& prefix) {
    integer_option(app, "--" + prefix + "record-bytes", source.record_bytes, 1, max_int32,
                   "bytes of a record, which tell the two fp8 records apart (default: the longer)");
    integer_option(app, "--" + prefix + "width", source.width, 0, max_int32, "columns of the slots list")
        ->capture_default_str();
    word_option(app, "--" + prefix + "layout", source.layout, {"planar", "contiguous"},
                "where scales lie, for a record that has both forms");
    app.add_flag("--" + prefix + "split-rope", source.split_rope, "bf16 records: latent and rope are two tensors");
    finish_group(app, prefix, {"record-bytes", "width", "layout", "split-rope"});
}

void add_source_geometry(CLI::App& app, SourceFlags& source, const std::string& prefix) {
    integer_option(app, "--" + prefix + "page-size", source.page_size, 1, max_int32, "tokens of a page")
        ->capture_default_str();
    integer_option(app, "--" + prefix + "slots-per-page", source.slots_per_page, 1, max_int32,
                   "slots from page to page, contiguous records (default: the page size)");
    integer_option(app, "--" + prefix + "page-stride-bytes", source.page_stride_bytes, 1, max_stride_bytes,
                   "bytes from page to page (default: dense)");
    integer_option(app, "--" + prefix + "pages", source.pages, 1, max_int32,
                   "pages (default: enough for twice the widest row)");
    finish_group(app, prefix, {"page-size", "slots-per-page", "page-stride-bytes", "pages"});
}

harness::SourceRecipe source_recipe(const SourceFlags& flags, const std::string& prefix) {
    // Flat fp8 has two sizes; without a wish it is the one with a rope part, which most models store.
    const std::int64_t default_bytes =
        flags.record == layout_of(Record::fp8_576).name ? layout_of(Record::fp8_576).record_bytes : 0;
    const RecordLayout& layout =
        find_layout(flags.record, flags.record_bytes != 0 ? flags.record_bytes : default_bytes);
    harness::SourceRecipe recipe{.record = layout.record,
                                 .form = layout.default_form(),
                                 .split_rope = flags.split_rope,
                                 .width = flags.width,
                                 .page_size = flags.page_size,
                                 .slots_per_page = flags.slots_per_page,
                                 .page_stride_bytes = flags.page_stride_bytes,
                                 .pages = flags.pages};
    if (!flags.layout.empty()) {
        recipe.form = flags.layout == "planar" ? RecordForm::planar : RecordForm::contiguous;
        if (recipe.form == RecordForm::planar ? !layout.has_planar : !layout.has_contiguous)
            throw Error(ErrorKind::invalid_argument, "--" + prefix + "layout",
                        layout.has_planar ? "planar" : "contiguous",
                        in_quotes(flags.layout) + " for " + to_string(layout.record));
    }
    if (flags.split_rope && !layout.may_split)
        throw Error(ErrorKind::invalid_argument, "--" + prefix + "split-rope", "a bf16 record",
                    to_string(layout.record));
    return recipe;
}

bool is_flat_fp8(Record record) { return layout_of(record).takes_k_scale; }

}  // namespace

std::vector<std::string> record_names() {
    std::vector<std::string> names;
    for (const RecordLayout& layout : record_layouts)
        if (names.empty() || names.back() != layout.name) names.emplace_back(layout.name);
    return names;
}

CLI::Option* add_problem_flags(CLI::App& app, ProblemFlags& flags) {
    CLI::Option* record = word_option(app, "--record", flags.first.record, record_names(), "cache record");
    integer_option(app, "--rows", flags.rows, 0, max_int32, "query tokens of the step")->capture_default_str();
    integer_option(app, "--heads", flags.heads, 1, max_heads, "query heads, 1 to 128")->capture_default_str();
    word_option(app, "--query", flags.query, {"e4m3", "bf16"}, "query (default: e4m3 for record fp8, else bf16)");
    app.add_flag("--sinks", flags.sinks, "one attention sink per head");
    word_option(app, "--lse", flags.lse, {"natural", "log2"}, "base of the LSE")->capture_default_str();
    add_source_shape(app, flags.first, "");
    word_option(app, "--extra-record", flags.extra.record, record_names(), "record of a second source")
        ->group("Second source, with --extra-record");
    add_source_shape(app, flags.extra, "extra-");
    app.add_flag("--one-list", flags.one_list,
                 "one slots list for both sources, source 0's columns first, and one count over both")
        ->group("Second source, with --extra-record")
        ->needs("--extra-record");
    return record;
}

void add_geometry_flags(CLI::App& app, ProblemFlags& flags) {
    add_source_geometry(app, flags.first, "");
    add_source_geometry(app, flags.extra, "extra-");
}

harness::Recipe recipe_of(const ProblemFlags& flags) {
    harness::Recipe recipe;
    recipe.rows = flags.rows;
    recipe.heads = flags.heads;
    recipe.sources = {source_recipe(flags.first, "")};
    if (!flags.extra.record.empty()) recipe.sources.push_back(source_recipe(flags.extra, "extra-"));
    if (recipe.sources.size() == 2) {
        const RecordLayout& first = layout_of(recipe.sources[0].record);
        const RecordLayout& second = layout_of(recipe.sources[1].record);
        if (first.d_qk() != second.d_qk())
            throw Error(ErrorKind::invalid_argument, "--extra-record",
                        fmt::format("a record of d_qk {}, as {}", first.d_qk(), to_string(first.record)),
                        fmt::format("{} of d_qk {}", to_string(second.record), second.d_qk()));
    }
    const bool e4m3 = flags.query.empty() ? is_flat_fp8(recipe.sources[0].record) : flags.query == "e4m3";
    recipe.query_dtype = e4m3 ? DType::f8_e4m3 : DType::bf16;
    recipe.one_list = flags.one_list;
    recipe.sinks = flags.sinks;
    recipe.lse_base = flags.lse == "log2" ? LseBase::two : LseBase::natural;
    return recipe;
}

Problem problem_of(const harness::Recipe& recipe) {
    Problem problem;
    problem.rows = recipe.rows;
    problem.heads = recipe.heads;
    problem.query_dtype = recipe.query_dtype;
    for (const harness::SourceRecipe& source : recipe.sources) {
        // One count over both sources' columns: the second source's begin behind the first's.
        const std::int64_t offset = recipe.one_list && !problem.sources.empty() ? recipe.sources[0].width : 0;
        problem.sources.push_back({.record = source.record,
                                   .form = source.form,
                                   .split_rope = source.split_rope,
                                   .width = source.width,
                                   .count_offset = offset});
    }
    problem.sinks = recipe.sinks;
    problem.lse_base = recipe.lse_base;
    return problem;
}

}  // namespace sparsemla::tool
