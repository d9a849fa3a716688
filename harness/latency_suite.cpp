#include "harness/latency_suite.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

namespace sparsemla::harness {
namespace {

ChainShape flat(std::int64_t heads, std::int64_t rows, std::int64_t active) {
    return {.rows = rows,
            .heads = heads,
            .sources = {{.record = Record::fp8_576, .width = 2048, .active = active}},
            .sinks = false};
}

/// A sliding window of 128, and a compressed cache beside it if `extra` is not 0.
ChainShape window(std::int64_t heads, std::int64_t rows, std::int64_t extra) {
    ChainShape shape{.rows = rows,
                     .heads = heads,
                     .sources = {{.record = Record::fp8_512, .width = 128, .active = 128}},
                     .sinks = extra != 0};
    if (extra != 0) shape.sources.push_back({.record = Record::fp8_512, .width = extra, .active = extra});
    return shape;
}

void add_goals(std::vector<LatencyShape>& list) {
    const auto add = [&](const ChainShape& shape, double goal_us) {
        list.push_back({.name = "goal/" + label(shape), .shape = shape, .goal_us = goal_us, .series = {}});
    };
    add(flat(96, 5, 256), 4.0);
    add(flat(96, 10, 256), 5.5);
    add(flat(16, 1, 2048), 6);
    add(flat(12, 5, 2048), 6.5);
    add(flat(64, 1, 2048), 6);
    add(flat(64, 5, 2048), 8);
    add(flat(128, 8, 2048), 14);
    add(window(16, 6, 512), 4.5);
    add(window(16, 12, 512), 5);
    add(window(16, 6, 0), 3.2);
    add(flat(16, 1, 1), 2.2);
}

/// Flat fp8 records under a 128-head kernel, which 96 heads are padded to: the figure is the same for both.
void add_large(std::vector<LatencyShape>& list) {
    constexpr std::pair<std::int64_t, double> gb300[] = {{5, 17.7}, {20, 26.0}, {80, 51.0}, {160, 73.1}, {320, 113.6}};
    for (const std::int64_t heads : {96, 128})
        for (const auto& [rows, us] : gb300) {
            const ChainShape shape = flat(heads, rows, 2048);
            list.push_back({.name = "gb300/" + label(shape), .shape = shape, .gb300_us = us, .series = {}});
        }
}

/// Steps whose slots are there, come from a conversion before, or from token ids within decode: of 8 ranks, or of one.
void add_conversions(std::vector<LatencyShape>& list) {
    for (const auto& [heads, rows, active] : {std::tuple{96, 5, 256}, {96, 10, 256}, {16, 1, 256}, {16, 5, 2048}})
        for (const auto& [group, conversion] : {std::pair{"slots", Conversion::none},
                                                {"converted", Conversion::before},
                                                {"from_ids", Conversion::within}}) {
            ChainShape shape = flat(heads, rows, active);
            shape.conversion = conversion;
            shape.world = shape.sources[0].width / active;
            list.push_back({.name = std::string(group) + "/" + label(shape), .shape = shape, .series = {}});
        }
}

/// `series`: "rows, 16 heads"; its first word tells the names of steps apart that belong to two series.
void add_series(std::vector<LatencyShape>& list, const std::string& series, const ChainShape& shape,
                std::int64_t step) {
    const std::string group = "cliff_" + series.substr(0, series.find(','));
    list.push_back({.name = group + "/" + label(shape), .shape = shape, .series = series, .step = step});
}

bool same_layout(const Plan& a, const Plan& b) {
    return a.schedule.kernel == b.schedule.kernel && a.schedule.splits == b.schedule.splits && a.tiling == b.tiling;
}

/// The most rows of which each has a CTA of its own for every tile of heads.
std::int64_t one_wave(const DeviceSpec& device, std::int64_t heads) {
    constexpr std::int64_t smallest_tile = 16, largest_tile = 32;
    return device.sms / (heads <= smallest_tile ? 1 : (heads + largest_tile - 1) / largest_tile);
}

/// Both sides of every change of layout up to one wave of rows, and that number - 1, 0, + 1.
std::set<std::int64_t> rows_around_boundaries(const DeviceSpec& device, const PlanOptions& options,
                                              std::int64_t heads) {
    const auto problem_of = [&](std::int64_t rows) { return flat(heads, rows, 2048).problem(device.device); };
    const std::int64_t limit = one_wave(device, heads);
    if (limit < 1 || !supports(problem_of(1), device, options)) return {};
    std::set<std::int64_t> rows_to_time = {std::max<std::int64_t>(limit - 1, 1), limit, limit + 1};
    Plan before = make_plan(problem_of(1), device, options);
    for (std::int64_t rows = 1; rows < limit; ++rows) {
        Plan next = make_plan(problem_of(rows + 1), device, options);
        if (!same_layout(before, next)) rows_to_time.insert({rows, rows + 1});
        before = std::move(next);
    }
    return rows_to_time;
}

void add_cliffs(std::vector<LatencyShape>& list, const DeviceSpec& device, const PlanOptions& options) {
    for (const std::int64_t heads : {16, 64, 96})
        for (const std::int64_t rows : rows_around_boundaries(device, options, heads))
            add_series(list, "rows, " + std::to_string(heads) + " heads", flat(heads, rows, 2048), rows);
    for (const std::int64_t heads : {15, 16, 17, 31, 32, 33, 63, 64, 65})
        add_series(list, "heads, 5 rows", flat(heads, 5, 2048), heads);
    for (const auto& [heads, rows] : {std::pair{96, 5}, std::pair{16, 1}})
        for (const std::int64_t active : {63, 64, 65, 127, 128, 129, 1023, 1024, 1025})
            add_series(list, "slots, " + std::to_string(heads) + " heads x " + std::to_string(rows) + " rows",
                       flat(heads, rows, active), active);
}

/// "256", or of rows that differ "15*64,2048".
std::string text_of_counts(const ChainSource& source) {
    if (source.counts.empty()) return std::to_string(source.active);
    std::string text;
    for (std::size_t i = 0, end = 0; i < source.counts.size(); i = end) {
        while (end < source.counts.size() && source.counts[end] == source.counts[i]) ++end;
        if (i > 0) text += ",";
        if (end - i > 1) text += std::to_string(end - i) + "*";
        text += std::to_string(source.counts[i]);
    }
    return text;
}

}  // namespace

std::string label(const ChainShape& shape) {
    std::string records, lists;
    for (const ChainSource& source : shape.sources) {
        const RecordLayout& layout = layout_of(source.record);
        records += (records.empty() ? "" : "+") + std::string(layout.name) + "_" + std::to_string(layout.record_bytes);
        lists += (lists.empty() ? "" : "+") + text_of_counts(source);
        if (source.active != source.width || !source.counts.empty()) lists += "of" + std::to_string(source.width);
    }
    return records + "/h" + std::to_string(shape.heads) + "/r" + std::to_string(shape.rows) + "/" + lists +
           (shape.sinks ? "/sinks" : "");
}

std::int64_t waves(const Plan& plan) {
    if (!plan.tiling) return 0;
    if (plan.schedule.kernel != "decode_latency") return 1;  // a CTA an SM at most
    const auto up = [](std::int64_t whole, std::int64_t part) { return (whole + part - 1) / part; };
    const std::int64_t clusters =
        plan.problem.rows * up(up(plan.problem.heads, plan.tiling->heads), plan.tiling->cluster_tiles);
    const auto ctas = static_cast<std::size_t>(plan.schedule.splits * plan.tiling->cluster_tiles);
    const std::int64_t resident = plan.device.resident_clusters.at(ctas - 1);
    return resident == 0 ? 0 : up(clusters, resident);
}

std::vector<LatencyShape> latency_suite(const DeviceSpec& device, const PlanOptions& options) {
    std::vector<LatencyShape> list;
    add_goals(list);
    add_conversions(list);  // before large steps: after them the first of these took 0.3 us longer on an H200
    add_large(list);
    add_cliffs(list, device, options);
    return list;
}

std::vector<LatencyShape> records_suite() {
    std::vector<LatencyShape> list;
    const auto add = [&](const std::string& group, std::int64_t heads, std::int64_t rows,
                         std::vector<ChainSource> sources, double goal_us = 0) {
        ChainShape shape{
            .rows = rows, .heads = heads, .sources = std::move(sources), .sinks = false, .query_dtype = DType::bf16};
        shape.sinks = shape.sources.size() == 2;
        list.push_back({.name = group + "/" + label(shape), .shape = shape, .goal_us = goal_us, .series = {}});
    };
    const auto whole = [](Record record, std::int64_t width) {
        return ChainSource{.record = record, .width = width, .active = width};
    };
    constexpr std::int64_t rows_of[] = {1, 2, 5, 8, 16, 32, 64, 128};
    for (const Record record : {Record::fp8_ds_mla, Record::fp8_576})
        for (const std::int64_t heads : {16, 64, 128})
            for (const std::int64_t width : {256, 512, 1024, 2048})
                for (const std::int64_t rows : rows_of) add("same", heads, rows, {whole(record, width)});
    for (const Record record : {Record::fp8_ds_mla, Record::fp8_576})
        for (const std::int64_t rows : rows_of) add("heads", 96, rows, {whole(record, 2048)});
    for (const std::int64_t heads : {64, 128})
        for (const std::int64_t extra : {512, 1024})
            for (const std::int64_t rows : rows_of)
                add("same", heads, rows, {whole(Record::fp8_v4, 128), whole(Record::fp8_v4, extra)});
    add("goal", 16, 8, {whole(Record::fp8_ds_mla, 2048)}, 9.5);
    add("goal", 64, 1, {whole(Record::fp8_ds_mla, 2048)}, 7);
    add("goal", 128, 128, {whole(Record::fp8_ds_mla, 2048)}, 170);
    add("goal", 64, 6, {whole(Record::fp8_v4, 128), whole(Record::fp8_v4, 512)}, 6.5);
    add("goal", 64, 6, {whole(Record::fp8_v41, 128), whole(Record::nvfp4_v41, 512)}, 6.5);
    add("goal", 16, 8, {whole(Record::nvfp4_ds_mla, 2048)}, 9.5);
    add("goal", 16, 128, {whole(Record::fp8_576, 2048)}, 50);
    for (const Record record : {Record::fp8_ds_mla, Record::fp8_576})
        for (const std::int64_t heads : {16, 64, 128}) add("heads", heads, 64, {whole(record, 2048)});
    for (const RecordLayout& layout : record_layouts)
        for (const std::int64_t rows : {1, 8, 64}) add("record", 64, rows, {whole(layout.record, 2048)});
    // Rows of one batch that differ, and beside them as many rows of the same number of columns.
    std::vector<std::int64_t> one_long(16, 64);
    one_long.back() = 2048;
    const std::vector<std::int64_t> mixed = {63, 9, 2048, 212, 11, 25, 6, 50};
    for (const std::int64_t heads : {16, 64, 128})
        for (const std::vector<std::int64_t>& counts : {one_long, mixed}) {
            const auto rows = static_cast<std::int64_t>(counts.size());
            const std::int64_t mean = std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) / rows;
            ChainSource source = whole(Record::fp8_ds_mla, 2048);
            source.active = mean;
            add("ragged", heads, rows, {source});
            source.active = 2048;
            source.counts = counts;
            add("ragged", heads, rows, {source});
        }
    return list;
}

std::vector<CliffPair> cliff_pairs(const std::vector<LatencyShape>& shapes) {
    std::vector<CliffPair> pairs;
    for (std::size_t i = 0; i < shapes.size(); ++i)
        for (std::size_t j = 0; j < shapes.size(); ++j)
            if (!shapes[i].series.empty() && shapes[i].series == shapes[j].series &&
                shapes[j].step == shapes[i].step + 1)
                pairs.push_back({.before = i, .after = j});
    return pairs;
}

}  // namespace sparsemla::harness
