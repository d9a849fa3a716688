#include "harness/problems.h"

#include <algorithm>
#include <array>

#include "harness/pairwise.h"

namespace sparsemla::harness {

namespace {

/// "fp8_576", "bf16_split", "fp8_v41_contiguous": what tells a source's bytes apart.
std::string label(const SourceRecipe& source) {
    const RecordLayout& layout = layout_of(source.record);
    std::string text(layout.name);
    if (layout.takes_k_scale) text.append("_").append(std::to_string(layout.record_bytes));
    if (source.split_rope) text += "_split";
    if (source.form != layout.default_form()) text += "_contiguous";
    return text;
}

std::string name_of(const Recipe& recipe) {
    std::string records, widths;
    for (const SourceRecipe& source : recipe.sources) {
        records += records.empty() ? "" : "+";
        records += label(source);
        widths += widths.empty() ? "w" : "+";
        widths += std::to_string(source.width);
    }
    return records + "/h" + std::to_string(recipe.heads) + "/r" + std::to_string(recipe.rows) + "/" + widths;
}

SourceRecipe source_of(Record record, std::int64_t width, std::int64_t page_size) {
    return {.record = record,
            .form = layout_of(record).default_form(),
            .split_rope = false,
            .width = width,
            .page_size = page_size};
}

// What users run: whole lists, and caches of many times the records that one step reads.

struct SpeedShape {
    std::vector<SourceRecipe> sources;
    DType query_dtype;
    bool sinks;
    std::vector<std::int64_t> heads;
    std::vector<std::int64_t> rows;
};

std::vector<SpeedShape> speed_shapes() {
    const auto one = [](Record record) { return std::vector{source_of(record, 2048, 64)}; };
    // A sliding window and a compressed cache.
    const auto two = [](Record window, Record compressed) {
        return std::vector{source_of(window, 128, 256), source_of(compressed, 512, 64)};
    };
    const DType e4m3 = DType::f8_e4m3;
    const DType bf16 = DType::bf16;
    return {
        {one(Record::fp8_576), e4m3, false, {16, 96, 128}, {1, 8}},
        {one(Record::fp8_ds_mla), bf16, false, {64, 128}, {1, 8}},
        {one(Record::nvfp4_ds_mla), bf16, false, {64, 128}, {1, 8}},
        {one(Record::bf16), bf16, false, {16, 128}, {1, 8}},
        {two(Record::fp8_v4, Record::fp8_v4), bf16, true, {64, 128}, {1, 6}},
        {two(Record::fp8_v41, Record::nvfp4_v41), bf16, true, {64, 128}, {1, 6}},
        {two(Record::fp8_512, Record::fp8_512), e4m3, true, {16}, {1, 6}},
    };
}

void add_speed(std::vector<NamedRecipe>& list) {
    for (const SpeedShape& shape : speed_shapes())
        for (const std::int64_t heads : shape.heads)
            for (const std::int64_t rows : shape.rows) {
                Recipe recipe;
                recipe.rows = rows;
                recipe.heads = heads;
                recipe.query_dtype = shape.query_dtype;
                recipe.sources = shape.sources;
                recipe.absent = 0;
                recipe.sinks = shape.sinks;
                for (SourceRecipe& source : recipe.sources) source.pages = 2 * rows * source.width / source.page_size;
                list.push_back({name_of(recipe), "speed", recipe});
            }
}

// Every two values of these parameters meet.

constexpr std::array<std::int64_t, 11> cover_heads = {1, 2, 6, 8, 12, 16, 24, 48, 64, 96, 128};
constexpr std::array<std::int64_t, 11> cover_widths = {0, 1, 63, 64, 65, 127, 128, 129, 640, 2048, 2049};
constexpr std::array<std::int64_t, 5> second_widths = {64, 129, 1, 512, 0};
constexpr std::array<std::int64_t, 6> cover_page_sizes = {1, 2, 61, 64, 256, 576};

enum Parameter : std::size_t {
    first_source,
    heads,
    width,
    page_size,
    lists,  // one source, two with a list each, two with one list
    counts,
    spacing,  // dense pages, pages with gaps between them
    query,
    sinks,
    lse_base,
    parameters
};

/// Every record in every form.
std::vector<SourceRecipe> all_sources() {
    std::vector<SourceRecipe> sources;
    for (const RecordLayout& layout : record_layouts) {
        SourceRecipe source = source_of(layout.record, 0, 64);
        sources.push_back(source);
        if (layout.has_planar && layout.has_contiguous) {
            source.form = RecordForm::contiguous;
            sources.push_back(source);
        }
        if (layout.may_split) {
            source.split_rope = true;
            sources.push_back(source);
        }
    }
    return sources;
}

/// Leaves a gap, or padding, of the size that engines leave: room for another layer, or up to a whole record.
void space_pages(SourceRecipe& source) {
    const RecordLayout& layout = layout_of(source.record);
    if (source.form == RecordForm::contiguous) {
        source.slots_per_page = 2 * source.page_size + 1;
        return;
    }
    const std::int64_t step_bytes = 16 * layout.data_bytes;  // keeps every alignment
    source.page_stride_bytes = (source.page_size * layout.record_bytes / step_bytes + 1) * step_bytes;
}

/// A record of the same d_qk, another one in every problem.
SourceRecipe second_source(const SourceRecipe& first, std::size_t turn) {
    std::vector<SourceRecipe> fitting;
    for (const SourceRecipe& source : all_sources())
        if (layout_of(source.record).d_qk() == layout_of(first.record).d_qk() && !source.split_rope)
            fitting.push_back(source);
    SourceRecipe second = fitting[turn % fitting.size()];
    second.width = second_widths[turn % second_widths.size()];
    second.page_size = cover_page_sizes[turn / 2 % cover_page_sizes.size()];
    return second;
}

/// Few rows: the oracle's time is what limits how many problems a test can have.
std::int64_t rows_of(const Recipe& recipe) {
    std::int64_t columns = 0;
    for (const SourceRecipe& source : recipe.sources) columns += source.width;
    const std::int64_t cost = recipe.heads * columns;
    return cost <= 10'000 ? 3 : cost <= 40'000 ? 2 : 1;
}

NamedRecipe cover_problem(const std::vector<int>& values, std::size_t number) {
    const auto value = [&](Parameter parameter) { return static_cast<std::size_t>(values[parameter]); };
    Recipe recipe;
    SourceRecipe first = all_sources()[value(first_source)];
    first.width = cover_widths[value(width)];
    first.page_size = cover_page_sizes[value(page_size)];
    if (value(spacing) == 1) space_pages(first);
    recipe.sources = {first};
    if (value(lists) > 0) recipe.sources.push_back(second_source(first, number));
    recipe.one_list = value(lists) == 2;
    recipe.heads = cover_heads[value(heads)];
    recipe.rows = rows_of(recipe);
    recipe.counts = value(counts) == 0 ? CountsRecipe::all : CountsRecipe::ragged;
    recipe.query_dtype = value(query) == 0 ? DType::f8_e4m3 : DType::bf16;
    recipe.sinks = value(sinks) == 1;
    recipe.lse_base = value(lse_base) == 0 ? LseBase::natural : LseBase::two;
    recipe.power_of_two_scales = number % 2 == 1;
    recipe.seed = 1 + number;
    std::string name = name_of(recipe) + "/p" + std::to_string(first.page_size);
    if (value(spacing) == 1) name += "/spaced";
    if (recipe.one_list) name += "/one_list";
    if (value(counts) == 1) name += "/ragged";
    name += value(query) == 0 ? "/q_e4m3" : "/q_bf16";
    if (recipe.sinks) name += "/sinks";
    if (value(lse_base) == 1) name += "/log2";
    return {name, "shapes", recipe};
}

void add_cover(std::vector<NamedRecipe>& list) {
    const auto size = [](const auto& values) { return static_cast<int>(values.size()); };
    std::vector<int> sizes(parameters, 2);
    sizes[first_source] = size(all_sources());
    sizes[heads] = size(cover_heads);
    sizes[width] = size(cover_widths);
    sizes[page_size] = size(cover_page_sizes);
    sizes[lists] = 3;
    std::size_t number = 0;
    for (const std::vector<int>& values : pairwise_cover(sizes)) list.push_back(cover_problem(values, number++));
}

}  // namespace

std::vector<NamedRecipe> problems(const std::string& suite) {
    std::vector<NamedRecipe> list;
    if (suite.empty() || suite == "speed") add_speed(list);
    if (suite.empty() || suite == "shapes") add_cover(list);
    return list;
}

}  // namespace sparsemla::harness
