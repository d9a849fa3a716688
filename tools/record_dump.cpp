#include "tools/record_dump.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "sparsemla/formats.h"
#include "tools/output.h"
#include "tools/table.h"

namespace sparsemla::tool {
namespace {

std::vector<float> decoded(const CacheView& cache, std::int64_t slot) {
    std::vector<float> values(static_cast<std::size_t>(cache.layout().d_qk()));
    unpack(cache, dense(&slot, DType::i64, {1}), dense(values.data(), DType::f32, {1, cache.layout().d_qk()}));
    return values;
}

float scale_value(const RecordLayout& layout, const std::byte* scales, int group) {
    const std::byte* at = scales + layout.scale_index(group) * layout.scale_size();
    if (layout.scale_encoding == ScaleEncoding::f32) {
        float value = 0;
        std::memcpy(&value, at, sizeof value);
        return value;
    }
    const auto code = static_cast<std::uint8_t>(*at);
    return layout.scale_encoding == ScaleEncoding::ue8m0 ? ue8m0_to_float(code) : e4m3_to_float(code);
}

std::vector<float> scale_values(const CacheView& cache, std::int64_t slot) {
    const std::byte* scales = locate(cache, slot).scales;
    std::vector<float> values;
    for (int group = 0; scales != nullptr && group < cache.layout().groups(); ++group)
        values.push_back(scale_value(cache.layout(), scales, group));
    return values;
}

std::string numbers(std::span<const float> values, std::size_t limit) {
    std::string text;
    for (std::size_t i = 0; i < std::min(limit, values.size()); ++i)
        text += fmt::format("{}{}", i == 0 ? "" : " ", format_number(values[i]));
    return values.size() > limit ? text + " ..." : text;
}

std::string summary(std::span<const float> values) {
    float low = INFINITY, high = -INFINITY;
    double squares = 0;
    std::int64_t nans = 0;
    for (const float value : values) {
        if (std::isnan(value)) {
            ++nans;
            continue;
        }
        low = std::min(low, value);
        high = std::max(high, value);
        squares += static_cast<double>(value) * value;
    }
    const std::int64_t finite = static_cast<std::int64_t>(values.size()) - nans;
    if (finite == 0) return fmt::format("all {} NaN", values.size());
    std::string text = fmt::format("{} .. {}, rms {}", format_number(low), format_number(high),
                                   format_number(std::sqrt(squares / static_cast<double>(finite))));
    return nans == 0 ? text : text + fmt::format(", {} NaN", nans);
}

std::string hex_lines(const std::string& title, const std::byte* bytes, int count) {
    std::string text;
    for (int begin = 0; begin < count; begin += 32) {
        text += fmt::format("    {:<7}{:>5} ", begin == 0 ? title : "", begin);
        for (int i = begin; i < std::min(begin + 32, count); ++i)
            text += fmt::format("{}{:02x}", i % 4 == 0 ? " " : "", static_cast<unsigned>(bytes[i]));
        text += '\n';
    }
    return text;
}

std::string value_lines(std::span<const float> values) {
    std::string text;
    for (std::size_t begin = 0; begin < values.size(); begin += 8) {
        text += fmt::format("    {:<7}{:>5} ", begin == 0 ? "values" : "", begin);
        for (std::size_t i = begin; i < begin + 8; ++i) text += fmt::format(" {:>11}", format_number(values[i]));
        text += '\n';
    }
    return text;
}

std::string byte_lines(const CacheView& cache, std::int64_t slot) {
    const RecordLayout& layout = cache.layout();
    const RecordPointers at = locate(cache, slot);
    std::string text = hex_lines("latent", at.data + layout.main.offset_bytes, layout.main.bytes());
    if (layout.rope.dims > 0) text += hex_lines("rope", at.rope, layout.rope.bytes());
    if (at.scales != nullptr) text += hex_lines("scales", at.scales, layout.groups() * layout.scale_size());
    return text;
}

}  // namespace

std::string dump_record(const CacheView& cache, std::int64_t slot, bool all) {
    const RecordLayout& layout = cache.layout();
    const std::vector<float> values = decoded(cache, slot);
    const std::vector<float> scales = scale_values(cache, slot);
    const auto main_dims = static_cast<std::size_t>(layout.main.dims);
    Facts facts;
    if (!scales.empty())
        facts.add("scales", fmt::format("{} of {} dimensions each: {}", scales.size(), layout.group_dims,
                                        numbers(scales, all ? scales.size() : 8)));
    facts.add("latent", summary(std::span(values).first(main_dims)));
    if (layout.rope.dims > 0) facts.add("rope", summary(std::span(values).subspan(main_dims)));
    if (!all) facts.add("first values", numbers(values, 8));
    std::string text =
        fmt::format("slot {}: page {}, offset {}\n", slot, slot / cache.slot_step(), slot % cache.slot_step());
    text += facts.text(4);
    if (all) text += byte_lines(cache, slot) + value_lines(values);
    return text;
}

}  // namespace sparsemla::tool
