#include "tools/problem_flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "tools/flags.h"

namespace sparsemla::tool {
namespace {

constexpr std::int64_t max_int32 = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t max_stride_bytes = std::int64_t{1} << 40;

void add_source_shape(CLI::App& app, SourceFlags& source, const std::string& prefix, const std::string& which) {
    integer_option(app, "--" + prefix + "record-bytes", source.record_bytes, 1, max_int32,
                   which + ": bytes of a record, which tell the two fp8 records apart");
    app.add_flag("--" + prefix + "split-rope", source.split_rope,
                 which + ": latent and rope are two tensors, bf16 records");
    integer_option(app, "--" + prefix + "width", source.width, 0, max_int32, which + ": columns of the slots list")
        ->capture_default_str();
    word_option(app, "--" + prefix + "layout", source.layout, {"planar", "contiguous"},
                which + ": where scales lie, for a record that has both forms");
}

void add_source_geometry(CLI::App& app, SourceFlags& source, const std::string& prefix, const std::string& which) {
    integer_option(app, "--" + prefix + "page-size", source.page_size, 1, max_int32, which + ": tokens of a page")
        ->capture_default_str();
    integer_option(app, "--" + prefix + "slots-per-page", source.slots_per_page, 1, max_int32,
                   which + ": slots from page to page, contiguous records (default: the page size)");
    integer_option(app, "--" + prefix + "page-stride-bytes", source.page_stride_bytes, 1, max_stride_bytes,
                   which + ": bytes from page to page (default: dense)");
    integer_option(app, "--" + prefix + "pages", source.pages, 1, max_int32,
                   which + ": pages (default: enough for twice the widest row)");
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
    add_source_shape(app, flags.first, "", "source 0");
    CLI::Option* extra =
        word_option(app, "--extra-record", flags.extra.record, record_names(), "record of a second source");
    add_source_shape(app, flags.extra, "extra-", "source 1");
    app.add_flag("--one-list", flags.one_list,
                 "two sources: one slots list, source 0's columns first, and one count for both");
    for (const char* option :
         {"--extra-record-bytes", "--extra-width", "--extra-layout", "--extra-split-rope", "--one-list"})
        app.get_option(option)->needs(extra);
    word_option(app, "--query", flags.query, {"e4m3", "bf16"}, "query (default: e4m3 for record fp8, else bf16)");
    app.add_flag("--sinks", flags.sinks, "one attention sink per head");
    word_option(app, "--lse", flags.lse, {"natural", "log2"}, "base of the LSE")->capture_default_str();
    return record;
}

void add_geometry_flags(CLI::App& app, ProblemFlags& flags) {
    add_source_geometry(app, flags.first, "", "source 0");
    add_source_geometry(app, flags.extra, "extra-", "source 1");
    for (const char* option :
         {"--extra-page-size", "--extra-slots-per-page", "--extra-page-stride-bytes", "--extra-pages"})
        app.get_option(option)->needs("--extra-record");
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
