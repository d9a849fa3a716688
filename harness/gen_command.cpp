#include <array>
#include <cstdio>

#include "harness/generate.h"

namespace sparsemla::harness {

namespace {

/// The options of one source; `prefix` is "" or "extra-".
std::string source_options(const SourceRecipe& source, const std::string& prefix) {
    const RecordLayout& layout = layout_of(source.record);
    std::string text;
    const auto add = [&](const std::string& option, const std::string& value) {
        text += " --" + prefix + option + " " + value;
    };
    add("record", std::string(layout.name));
    if (layout.takes_k_scale) add("record-bytes", std::to_string(layout.record_bytes));
    if (layout.has_planar && layout.has_contiguous)
        add("layout", source.form == RecordForm::planar ? "planar" : "contiguous");
    if (source.split_rope) text += " --" + prefix + "split-rope";
    add("width", std::to_string(source.width));
    add("page-size", std::to_string(source.page_size));
    if (source.slots_per_page != 0) add("slots-per-page", std::to_string(source.slots_per_page));
    if (source.page_stride_bytes != 0) add("page-stride-bytes", std::to_string(source.page_stride_bytes));
    if (source.pages != 0) add("pages", std::to_string(source.pages));
    return text;
}

std::string counts_option(const Recipe& recipe) {
    if (recipe.counts == CountsRecipe::all) return "";
    if (recipe.counts == CountsRecipe::ragged) return " --counts ragged";
    std::string list;
    for (const std::int32_t count : recipe.counts_list) {
        list += list.empty() ? " --counts=" : ",";
        list += std::to_string(count);
    }
    return list;
}

std::string text(double value) {
    std::array<char, 32> buffer{};
    std::snprintf(buffer.data(), buffer.size(), "%.17g", value);
    return buffer.data();
}

}  // namespace

std::string gen_command(const Recipe& recipe, const std::string& path) {
    std::string command = "sparsemla gen " + path + " --rows " + std::to_string(recipe.rows) + " --heads " +
                          std::to_string(recipe.heads) + source_options(recipe.sources[0], "");
    if (recipe.sources.size() == 2) command += source_options(recipe.sources[1], "extra-");
    if (recipe.one_list) command += " --one-list";
    command += counts_option(recipe);
    command += recipe.query_dtype == DType::f8_e4m3 ? " --query e4m3" : " --query bf16";
    if (recipe.absent != Recipe{}.absent) command += " --absent " + text(recipe.absent);
    if (recipe.sinks) command += " --sinks";
    if (recipe.power_of_two_scales) command += " --power-of-two-scales";
    if (recipe.lse_base == LseBase::two) command += " --lse log2";
    command += " --seed " + std::to_string(recipe.seed);
    if (!recipe.expected) command += " --no-expected";
    return command;
}

}  // namespace sparsemla::harness
