// What decode_latency would launch, without a GPU: grid, clusters and shared memory of every problem.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "gpu.h"
#include "harness/problems.h"
#include "latency_layout.h"
#include "latency_plan.h"
#include "tests/latency_plans.h"

namespace sparsemla::test {
namespace {

namespace latency = detail::latency;
using detail::LaunchShape;

constexpr std::int64_t max_grid_x = std::numeric_limits<std::int32_t>::max();
constexpr int max_grid_y = 65535;

bool is_tile(int heads) {
    return std::find(std::begin(latency::head_tiles), std::end(latency::head_tiles), heads) !=
           std::end(latency::head_tiles);
}

std::int64_t resident_clusters(const DeviceSpec& device, const LaunchShape& shape) {
    return device.resident_clusters.at(static_cast<std::size_t>(shape.cluster * shape.cluster_tiles - 1));
}

/// Of a plan, whatever the number of rows.
void expect_shape(const Plan& plan, const LaunchShape& shape, std::int64_t rows) {
    const DeviceSpec& device = plan.device;
    EXPECT_EQ(shape.cluster, plan.schedule.splits);
    EXPECT_GE(shape.cluster, 1);
    EXPECT_EQ(shape.cluster_tiles, plan.tiling->cluster_tiles);
    ASSERT_LE(shape.cluster * shape.cluster_tiles, 16);
    EXPECT_GE(resident_clusters(device, shape), 1);

    EXPECT_EQ(shape.grid_x, rows * shape.cluster);
    EXPECT_LE(shape.grid_x, max_grid_x);
    EXPECT_GE(shape.grid_y, 1);
    EXPECT_LE(shape.grid_y, max_grid_y);
    const std::int64_t tile = plan.tiling->heads;
    EXPECT_GE(shape.grid_y * tile, plan.problem.heads) << "heads without a CTA";
    EXPECT_EQ(shape.grid_y % shape.cluster_tiles, 0);
    EXPECT_LT((shape.grid_y - shape.cluster_tiles) * tile, std::max<std::int64_t>(plan.problem.heads, 1))
        << "a cluster without heads";

    EXPECT_EQ(shape.threads, latency::threads);
    EXPECT_EQ(shape.threads % 128, 0) << "whole warpgroups";
    EXPECT_LE(shape.threads, 1024);
    EXPECT_LE(shape.shared_bytes, static_cast<std::size_t>(device.shared_memory_bytes));
    const std::size_t records = std::size_t{latency::chunk_keys} * static_cast<std::size_t>(d_qk(plan.problem));
    EXPECT_GE(shape.shared_bytes, static_cast<std::size_t>(plan.tiling->stages) * records);
}

/// More clusters than fit at once are named, and only they.
void expect_waves(const Plan& plan, const LaunchShape& shape) {
    const std::int64_t clusters = plan.problem.rows * shape.grid_y / shape.cluster_tiles;
    const std::int64_t resident = resident_clusters(plan.device, shape);
    const std::int64_t waves = (clusters + resident - 1) / resident;
    const bool named = plan.reason.find("waves") != std::string::npos;
    EXPECT_EQ(named, waves > 1) << plan.reason;
    if (waves <= 1) return;
    EXPECT_NE(plan.reason.find("in " + std::to_string(waves) + " waves"), std::string::npos) << plan.reason;
}

void expect_launchable(const Plan& plan) {
    SCOPED_TRACE(plan.describe());
    ASSERT_EQ(plan.schedule.kernel, "decode_latency");
    ASSERT_TRUE(plan.tiling.has_value());
    EXPECT_TRUE(is_tile(plan.tiling->heads)) << plan.tiling->heads;
    EXPECT_GE(plan.tiling->stages, 1);
    EXPECT_LE(plan.tiling->stages, latency::max_stages);
    EXPECT_EQ(plan.schedule.chunk, latency::chunk_keys);
    EXPECT_EQ(plan.schedule.columns, ColumnRule::round_robin);
    EXPECT_EQ(plan.schedule.row_capacity, plan.problem.rows);
    const std::int64_t capacity = plan.problem.rows;
    for (const std::int64_t rows : {std::int64_t{0}, std::min<std::int64_t>(1, capacity), capacity / 2, capacity})
        ASSERT_NO_FATAL_FAILURE(expect_shape(plan, detail::latency_launch(plan, rows), rows));
    expect_waves(plan, detail::latency_launch(plan, capacity));
}

/// The problem of a recipe on a GPU.
Problem problem_of_recipe(const harness::Recipe& recipe) {
    Problem problem{.rows = recipe.rows, .heads = recipe.heads, .query_dtype = recipe.query_dtype, .sources = {}};
    for (const harness::SourceRecipe& source : recipe.sources)
        problem.sources.push_back({source.record, source.form, source.split_rope, source.width, 0});
    problem.sinks = recipe.sinks;
    problem.lse_base = recipe.lse_base;
    problem.device = {Device::Kind::cuda, 0};
    return problem;
}

TEST_F(LatencyLaunch, EveryProblemOfTheList) {
    for (const DeviceSpec& device : devices())
        for (const harness::NamedRecipe& named : harness::problems()) {
            SCOPED_TRACE(named.name + " on " + device.name);
            const Problem problem = problem_of_recipe(named.recipe);
            const bool taken = std::ranges::all_of(problem.sources, [&](const SourceProblem& source) {
                return detail::stage_form(source.record) == detail::stage_form(problem.sources[0].record);
            });
            EXPECT_EQ(latency_refusal(problem, device).has_value(), !taken);
            if (taken) expect_launchable(latency_plan(problem, device));
            if (HasFailure()) return;
        }
}

TEST_F(LatencyLaunch, EveryNumberOfHeadsWithManyRowsAndWidths) {
    for (const DeviceSpec& device : devices())
        for (std::int64_t heads = 0; heads <= max_heads; ++heads)
            for (const std::int64_t rows : {0, 1, 2, 3, 5, 8, 16, 33, 131, 132, 133, 660, 1000, 5000})
                for (const std::int64_t width : {0, 1, 64, 65, 128, 640, 2048, 2049, 100'000}) {
                    const Record record = (heads + rows) % 2 == 0 ? Record::fp8_576 : Record::fp8_512;
                    expect_launchable(latency_plan(problem_of(rows, heads, {width}, record), device));
                    if (HasFailure()) return;
                }
}

TEST_F(LatencyLaunch, EveryNumberOfRows) {
    for (const DeviceSpec& device : devices())
        for (std::int64_t rows = 0; rows <= 5000; ++rows) {
            expect_launchable(latency_plan(problem_of(rows, 1 + rows * 7 % 128, {128, 512}, Record::fp8_512), device));
            if (HasFailure()) return;
        }
}

TEST_F(LatencyLaunch, APlanIsAFunctionOfItsInput) {
    for (const DeviceSpec& device : devices())
        for (const std::int64_t rows : {1, 5, 17, 1000})
            for (const std::int64_t heads : {1, 16, 96, 128}) {
                const Problem problem = problem_of(rows, heads, {2048});
                const Plan first = latency_plan(problem, device);
                const LaunchShape shape = detail::latency_launch(first, rows);
                for (int repeat = 0; repeat < 3; ++repeat) {
                    const Plan again = latency_plan(problem, device);
                    EXPECT_EQ(again.describe(), first.describe());
                    EXPECT_EQ(again.schedule, first.schedule);
                    EXPECT_EQ(*again.tiling, *first.tiling);
                    EXPECT_EQ(detail::latency_launch(again, rows).shared_bytes, shape.shared_bytes);
                }
            }
}

bool bulk_fits(int heads, int stages, int of_d_qk) {
    return latency::units * heads / 8 * latency::quad_bytes <=
           stages * detail::stage_bytes(of_d_qk == 576 ? detail::StageForm::codes_576 : detail::StageForm::codes_512);
}

std::string text_of(const PlanOptions& options) {
    return "splits " + std::to_string(*options.splits) + ", tile_heads " + std::to_string(*options.tile_heads) +
           ", stages " + std::to_string(*options.stages) + ", cluster_tiles " + std::to_string(*options.cluster_tiles) +
           ", " + std::string(name(*options.gather)) + ", " + std::string(name(*options.transport));
}

/// Honoured to the letter, or refused with the option's name.
void expect_honoured(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    SCOPED_TRACE(text_of(options));
    const auto ctas = static_cast<std::size_t>(*options.splits * *options.cluster_tiles);
    const bool resident = ctas <= 16 && device.resident_clusters[ctas - 1] > 0;
    const bool shared_copies = *options.cluster_tiles > 1 && *options.gather != Gather::bulk;
    const bool bulk_refused = *options.transport == Transport::bulk &&
                              !bulk_fits(*options.tile_heads, *options.stages, static_cast<int>(d_qk(problem)));
    const bool weights_refused =
        *options.transport == Transport::weights && !latency::can_exchange_weights(*options.splits);
    if (const auto refused = latency_refusal(problem, device, options)) {
        const auto says = [&](const char* what) { return refused->find(what) != std::string::npos; };
        if (shared_copies)
            EXPECT_TRUE(says("gather must be bulk with cluster_tiles above 1")) << *refused;
        else if (!resident)
            EXPECT_TRUE(says("splits * cluster_tiles must be a cluster size")) << *refused;
        else if (says("with transport weights"))
            EXPECT_TRUE(weights_refused) << *refused;
        else if (says("transport must be"))
            EXPECT_TRUE(bulk_refused) << *refused;
        else
            EXPECT_TRUE(says("tile_heads and stages must be") && says("shared memory")) << *refused;
        return;
    }
    EXPECT_TRUE(resident);
    EXPECT_FALSE(bulk_refused);
    EXPECT_FALSE(weights_refused);
    EXPECT_FALSE(shared_copies);
    const Plan plan = latency_plan(problem, device, options);
    expect_launchable(plan);
    EXPECT_EQ(plan.schedule.splits, *options.splits);
    EXPECT_EQ(*plan.tiling, (Tiling{.heads = *options.tile_heads,
                                    .stages = *options.stages,
                                    .cluster_tiles = *options.cluster_tiles,
                                    .gather = *options.gather,
                                    .transport = *options.transport,
                                    .trigger = *options.trigger}));
}

/// The tilings of some splits: every tile, depth, cluster of tiles, gather and transport; triggers take turns.
std::vector<PlanOptions> tilings(int splits) {
    std::vector<PlanOptions> list;
    for (const int tile : latency::head_tiles)
        for (int stages = 1; stages <= latency::max_stages; ++stages)
            for (const int cluster_tiles : {1, 2, 3, 8})
                for (const Gather gather : {Gather::copies, Gather::bulk})
                    for (const Transport transport : {Transport::stores, Transport::bulk, Transport::weights})
                        list.push_back({.splits = splits,
                                        .tile_heads = tile,
                                        .stages = stages,
                                        .cluster_tiles = cluster_tiles,
                                        .gather = gather,
                                        .transport = transport,
                                        .trigger = static_cast<Trigger>(list.size() % 3)});
    return list;
}

// The row's slots of token ids need room in shared memory, as a layout or in place of stages; P of two sources is not
// exchanged.
TEST_F(LatencyLaunch, TokenIds) {
    Problem problem = problem_of(5, 96, {2048});
    const Plan slots = latency_plan(problem, h200(), {});
    problem.from_ids = true;
    const Plan ids = latency_plan(problem, h200(), {});
    EXPECT_EQ(ids.schedule, slots.schedule);
    EXPECT_EQ(ids.workspace_bytes, slots.workspace_bytes);
    const std::size_t bytes = detail::latency_memory(ids).bytes - detail::latency_memory(ids).converted;
    EXPECT_GE(bytes, 2048U * 4 + 2 * 12 * 4);
    EXPECT_EQ(detail::latency_memory(slots).bytes, detail::latency_memory(slots).converted);
    for (const std::int64_t width : {1, 2048, 16384, 30000}) {
        problem.sources[0].width = width;
        expect_launchable(latency_plan(problem, h200(), {}));
    }
    problem.sources[0].width = 60000;
    const std::string wide = latency_refusal(problem, h200(), {}).value_or("");
    EXPECT_NE(wide.find("the width of token ids must be such that"), std::string::npos) << wide;
    EXPECT_NE(wide.find("60000"), std::string::npos) << wide;

    Problem two = problem_of(5, 96, {256, 256});
    const PlanOptions weights{.splits = 8, .transport = Transport::weights};
    EXPECT_FALSE(latency_refusal(two, h200(), weights));
    two.from_ids = true;
    const std::string reason = latency_refusal(two, h200(), weights).value_or("");
    EXPECT_NE(reason.find("transport must be stores or bulk with two sources from token ids"), std::string::npos)
        << reason;
    EXPECT_NE(latency_plan(two, h200(), {.splits = 8}).tiling->transport, Transport::weights);
}

TEST_F(LatencyLaunch, ForcedTilingsAreHonouredOrRefusedByName) {
    int number = 0;
    for (const DeviceSpec& device : devices())
        for (const Record record : {Record::fp8_576, Record::fp8_512})
            for (int splits = 1; splits <= latency::max_splits; ++splits)
                for (const PlanOptions& options : tilings(splits)) {
                    ++number;
                    expect_honoured(problem_of(1 + number % 40, 1 + number % 128, {2048}, record), device, options);
                    if (HasFailure()) return;
                }
}

// One of each at least: the test above would pass if everything were refused.
TEST_F(LatencyLaunch, EveryTileTransportAndTriggerIsTakenSomewhere) {
    const Problem problem = problem_of(2, 64, {2048});
    for (const int tile : latency::head_tiles)
        EXPECT_EQ(latency_refusal(problem, h200(), {.tile_heads = tile}), std::nullopt);
    for (int splits = 1; splits <= latency::max_splits; ++splits)
        EXPECT_EQ(latency_refusal(problem, h200(), {.splits = splits}), std::nullopt);
    for (int stages = 1; stages <= latency::max_stages; ++stages)
        EXPECT_EQ(latency_refusal(problem, h200(), {.tile_heads = 16, .stages = stages}), std::nullopt);
    for (const Transport transport : {Transport::stores, Transport::bulk, Transport::weights})
        EXPECT_EQ(latency_refusal(problem, h200(), {.splits = 4, .tile_heads = 16, .transport = transport}),
                  std::nullopt);
    EXPECT_EQ(latency_refusal(problem, h200(), {.transport = Transport::weights}), std::nullopt);
    for (const Gather gather : {Gather::copies, Gather::bulk})
        EXPECT_EQ(latency_refusal(problem, h200(), {.gather = gather}), std::nullopt);
    for (const int tiles : {1, 2, 4})
        EXPECT_EQ(latency_refusal(problem, h200(), {.splits = 4, .tile_heads = 16, .cluster_tiles = tiles}),
                  std::nullopt);
    for (const Trigger trigger : {Trigger::start, Trigger::loaded, Trigger::end})
        EXPECT_EQ(latency_refusal(problem, h200(), {.trigger = trigger}), std::nullopt);
}

// Long lists of which little is active: no CTA without a chunk of a usual row, and stages for the other rows.
TEST_F(LatencyLaunch, PlansForTheUsualColumns) {
    const Problem problem = problem_of(5, 96, {2048});
    const Plan plan = latency_plan(problem, h200(), {.usual_columns = 256});
    EXPECT_LE(plan.schedule.splits, 4);
    EXPECT_EQ(plan.tiling->stages, 2);
    EXPECT_LT(plan.expected_us, latency_plan(problem, h200()).expected_us);
    expect_launchable(plan);
    EXPECT_EQ(latency_plan(problem, h200(), {.usual_columns = 1}).schedule.splits, 1);
    for (const std::int64_t all : {std::int64_t{2048}, std::int64_t{1} << 40})
        EXPECT_EQ(latency_plan(problem, h200(), {.usual_columns = all}).schedule,
                  latency_plan(problem, h200()).schedule);
    expect_refused(problem, h200(), {.usual_columns = 0}, "usual_columns must be at least 1, got 0");
}

// What travels is P where a usual row can exchange it, and partial outputs elsewhere.
TEST_F(LatencyLaunch, TransportOfASplitCount) {
    for (const int usual : {64, 128, 192, 257, 512, 513, 2048})
        for (int splits = 1; splits <= latency::max_splits; ++splits) {
            const Plan plan =
                latency_plan(problem_of(2, 16, {2048}), h200(), {.splits = splits, .usual_columns = usual});
            const bool weights = (splits == 2 || splits == 4 || splits == 8) && usual <= 64 * splits;
            EXPECT_EQ(plan.tiling->transport, weights ? Transport::weights : Transport::stores)
                << splits << " splits, " << usual << " columns";
        }
    expect_refused(problem_of(2, 16, {2048}), h200(), {.splits = 3, .transport = Transport::weights},
                   "splits must be 2, 4 or 8 with transport weights, got 3");
}

TEST_F(LatencyLaunch, ClustersOfOneCtaAreEnough) {
    DeviceSpec device = h200();
    device.resident_clusters = {};
    device.resident_clusters[0] = 132;
    expect_launchable(latency_plan(problem_of(5, 96, {2048}), device));
}

// Without room for the chosen layout, a smaller one.
TEST_F(LatencyLaunch, ShrinksToTheSharedMemory) {
    for (std::int64_t kib = 227; kib >= 64; --kib) {
        DeviceSpec device = h200();
        device.shared_memory_bytes = kib << 10;
        for (const std::int64_t heads : {16, 64, 128}) {
            const Problem problem = problem_of(4, heads, {2048});
            if (latency_supports(problem, device)) expect_launchable(latency_plan(problem, device));
        }
    }
    DeviceSpec device = h200();
    device.shared_memory_bytes = 100 << 10;
    EXPECT_TRUE(latency_supports(problem_of(4, 128, {2048}), device));
}

}  // namespace
}  // namespace sparsemla::test
