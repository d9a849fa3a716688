#include "tools/sweep.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <tuple>
#include <utility>

#include "tools/flags.h"
#include "tools/output.h"

namespace sparsemla::tool {
namespace {

constexpr std::int64_t chunk = 64;         // columns
constexpr std::int64_t window_chunks = 2;  // of a sliding window of 128, the first of two sources
constexpr const char* swept_kernel = "decode_latency";
constexpr int most_splits = 16;  // CTAs of a cluster

struct Grid {
    Record record;
    std::int64_t sources;
    std::vector<std::int64_t> rows, heads, chunks;
};

/// Of a record with scales or wide values.
Grid of_record(Record record, std::int64_t sources) {
    const std::int64_t before = sources == 2 ? window_chunks : 0;
    return {record,
            sources,
            {1, 2, 4, 8, 16, 32, 64, 128},
            {16, 32, 64, 128},
            {before + 2, before + 4, before + 8, before + 16, before + 32}};
}

std::vector<Grid> grids() {
    return {{Record::fp8_576,
             1,
             {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 72, 96, 128},
             {8, 16, 32, 48, 64, 96, 128},
             {1, 2, 3, 4, 5, 8, 10, 16, 32}},
            {Record::fp8_512, 2, {1, 2, 4, 6, 8, 12, 16, 32, 64, 128}, {8, 16, 32, 64, 128}, {3, 6, 10, 18, 34}},
            {Record::fp8_512, 1, {1, 2, 4, 6, 8, 12, 16, 32, 64, 128}, {8, 16, 32, 64, 128}, {1, 2, 4}},
            of_record(Record::fp8_ds_mla, 1),
            of_record(Record::fp8_ds_mla_norope, 1),
            of_record(Record::fp8_v4, 2),
            of_record(Record::fp8_v41, 2),
            of_record(Record::nvfp4_ds_mla, 1),
            of_record(Record::bf16, 1)};
}

/// Stages in the order in which they are worth a measurement: two, all in flight, then what is between.
std::vector<int> stages_for(std::int64_t chunks_of_cta) {
    if (chunks_of_cta <= 1) return {1};
    if (chunks_of_cta == 2) return {2, 1};
    if (chunks_of_cta == 3) return {2, 3, 1};
    return {2, 4, 3, 1};
}

/// Adds the first `most` of the options that can be launched.
void add_plans(std::vector<Plan>& plans, const Problem& problem, const DeviceSpec& device,
               const std::vector<PlanOptions>& layouts, std::size_t most) {
    const std::size_t before = plans.size();
    for (const PlanOptions& options : layouts)
        if (plans.size() < before + most && supports(problem, device, options))
            plans.push_back(make_plan(problem, device, options));
}

/// How many tiles of heads share the records that each gathers: as few as leave no CTA of a cluster without heads, and
/// two where that takes more than four.
int sharing_tiles(std::int64_t tiles) {
    for (const int few : {2, 3, 4})
        if (tiles % few == 0) return few;
    return 2;
}

/// The layouts of given splits and heads of a CTA; what `options` fixes besides stays.
void add_variants(std::vector<Plan>& plans, const SweepPoint& point, const DeviceSpec& device,
                  const PlanOptions& options) {
    const Problem problem = point.shape().problem(device.device);
    const std::int64_t tiles = (point.heads + *options.tile_heads - 1) / *options.tile_heads;
    std::vector<PlanOptions> alone, shared;
    for (const int stages : stages_for((point.chunks + *options.splits - 1) / *options.splits)) {
        if (options.stages.value_or(stages) != stages) continue;
        alone.push_back(options);
        alone.back().stages = stages;
        if (options.cluster_tiles || options.gather || tiles < 2) continue;
        shared.push_back(alone.back());
        shared.back().cluster_tiles = sharing_tiles(tiles);
        shared.back().gather = Gather::bulk;
    }
    add_plans(plans, problem, device, alone, 2);
    add_plans(plans, problem, device, shared, 1);
}

std::string enumerator(Record record) {
    const RecordLayout& layout = layout_of(record);
    return layout.takes_k_scale ? fmt::format("{}_{}", layout.name, layout.record_bytes) : std::string(layout.name);
}

auto point_key(const SweepResult& result) {
    return std::tuple(result.gpu, result.record, result.sources, result.rows, result.heads, result.chunks);
}

Json to_json(const SweepResult& result) {
    return {{"gpu", result.gpu},         {"record", result.record},
            {"sources", result.sources}, {"rows", result.rows},
            {"heads", result.heads},     {"chunks", result.chunks},
            {"splits", result.splits},   {"tile_heads", result.tile_heads},
            {"stages", result.stages},   {"cluster_tiles", result.cluster_tiles},
            {"gather", result.gather},   {"us", result.us}};
}

/// Throws what the JSON library throws.
SweepResult from_json(const Json& json) {
    const auto integer = [&](const char* name) { return json.at(name).get<std::int64_t>(); };
    return {.gpu = json.at("gpu").get<std::string>(),
            .record = json.at("record").get<std::string>(),
            .sources = integer("sources"),
            .rows = integer("rows"),
            .heads = integer("heads"),
            .chunks = integer("chunks"),
            .splits = integer("splits"),
            .tile_heads = integer("tile_heads"),
            .stages = integer("stages"),
            .cluster_tiles = integer("cluster_tiles"),
            .gather = json.at("gather").get<std::string>(),
            .us = json.at("us").get<double>()};
}

std::string read_text(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file && errno == ENOENT) return "";
    std::ostringstream text;
    if (file) text << file.rdbuf();
    if (!file || file.bad()) throw Error(ErrorKind::io, path, "a file that can be read", std::strerror(errno));
    return text.str();
}

}  // namespace

harness::ChainShape SweepPoint::shape() const {
    harness::ChainShape shape{.rows = rows,
                              .heads = heads,
                              .sources = {},
                              .sinks = sources == 2,
                              .query_dtype = layout_of(record).takes_k_scale ? DType::f8_e4m3 : DType::bf16};
    const auto add = [&](std::int64_t width) {
        shape.sources.push_back({.record = record, .width = width, .active = width});
    };
    if (sources == 2) add(window_chunks * chunk);
    add((sources == 2 ? chunks - window_chunks : chunks) * chunk);
    return shape;
}

std::string SweepPoint::text() const {
    return fmt::format("{} x {}, {}, {}, {}", to_string(record), sources, plural(rows, "row"), plural(heads, "head"),
                       plural(chunks, "chunk"));
}

std::vector<SweepPoint> sweep_points() {
    std::vector<SweepPoint> points;
    for (const Grid& grid : grids())
        for (const std::int64_t rows : grid.rows)
            for (const std::int64_t heads : grid.heads)
                for (const std::int64_t chunks : grid.chunks)
                    points.push_back({.record = grid.record,
                                      .sources = grid.sources,
                                      .rows = rows,
                                      .heads = heads,
                                      .chunks = chunks});
    std::ranges::stable_sort(points, {}, &SweepPoint::rows);
    return points;
}

std::vector<Plan> sweep_plans(const SweepPoint& point, const DeviceSpec& device, const PlanOptions& options,
                              std::size_t limit) {
    std::vector<Plan> plans;
    for (const int tile_heads : {16, 32}) {
        if (options.tile_heads.value_or(tile_heads) != tile_heads) continue;
        for (int splits = 1; splits <= std::min<std::int64_t>(most_splits, point.chunks); ++splits) {
            if (options.splits.value_or(splits) != splits) continue;
            PlanOptions layout = options;
            layout.kernel = swept_kernel;
            layout.tile_heads = tile_heads;
            layout.splits = splits;
            add_variants(plans, point, device, layout);
        }
    }
    std::ranges::stable_sort(plans, {}, &Plan::expected_us);
    if (plans.size() > limit) plans.erase(plans.begin() + static_cast<std::ptrdiff_t>(limit), plans.end());
    return plans;
}

std::string SweepResult::layout_key() const {
    return fmt::format("{} {} {} {} {} {}: {} {} {} {} {}", gpu, record, sources, rows, heads, chunks, splits,
                       tile_heads, stages, cluster_tiles, gather);
}

SweepResult result_of(const SweepPoint& point, const Plan& plan, double us) {
    const Tiling tiling = plan.tiling.value_or(Tiling{});
    return {.gpu = plan.device.name,
            .record = enumerator(plan.problem.sources[0].record),
            .sources = point.sources,
            .rows = point.rows,
            .heads = point.heads,
            .chunks = point.chunks,
            .splits = plan.schedule.splits,
            .tile_heads = tiling.heads,
            .stages = tiling.stages,
            .cluster_tiles = tiling.cluster_tiles,
            .gather = std::string(name(tiling.gather)),
            .us = us};
}

SweepLog::SweepLog(std::string path) : path_(std::move(path)) {
    if (path_.empty()) return;
    check_output_path(path_);
    const std::string text = read_text(path_);
    std::size_t begin = 0;
    for (std::size_t number = 1;; ++number) {
        const std::size_t end = text.find('\n', begin);
        if (end == std::string::npos) break;
        try {
            keep(from_json(Json::parse(text.substr(begin, end - begin))));
        } catch (const Json::exception& error) {
            throw Error(ErrorKind::malformed_file, fmt::format("{}, line {}", path_, number), "a result of a sweep",
                        error.what());
        }
        begin = end + 1;
    }
    if (begin != text.size()) write_file(path_, text.substr(0, begin));
}

void SweepLog::keep(const SweepResult& result) {
    results_.push_back(result);
    keys_.insert(result.layout_key());
}

void SweepLog::add(const SweepResult& result) {
    keep(result);
    if (path_.empty()) return;
    std::ofstream file(path_, std::ios::app | std::ios::binary);
    file << to_json(result).dump() << '\n' << std::flush;
    if (!file) throw Error(ErrorKind::io, path_, "a file that can be written", std::strerror(errno));
}

std::string tuning_table_text(const std::vector<SweepResult>& results) {
    std::map<decltype(point_key({})), SweepResult> best;
    for (const SweepResult& result : results) {
        const auto [found, added] = best.try_emplace(point_key(result), result);
        if (!added && result.us < found->second.us) found->second = result;
    }
    std::string text =
        "// Written by `sparsemla bench --sweep --write-table`; a line is a row of TuningRow (tuning_table.h):\n"
        "// {gpu, record, sources, rows, heads, chunks, splits, tile_heads, stages, cluster_tiles, gather, us},\n";
    for (const auto& [key, row] : best)
        text += fmt::format("{{\"{}\", Record::{}, {}, {}, {}, {}, {}, {}, {}, {}, Gather::{}, {:.2f}}},\n", row.gpu,
                            row.record, row.sources, row.rows, row.heads, row.chunks, row.splits, row.tile_heads,
                            row.stages, row.cluster_tiles, row.gather, row.us);
    return text;
}

}  // namespace sparsemla::tool
