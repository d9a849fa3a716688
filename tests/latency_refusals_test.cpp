// What decode_latency refuses, by name, without a GPU.
#include <limits>

#include "latency_layout.h"
#include "tests/latency_plans.h"

namespace sparsemla::test {
namespace {

namespace latency = detail::latency;

constexpr std::int64_t max_grid_x = std::numeric_limits<std::int32_t>::max();

using LatencyRefusals = LatencyLaunch;

TEST_F(LatencyRefusals, NameTheirReason) {
    const Problem good = problem_of(5, 96, {2048});
    const DeviceSpec gpu = h200();
    const auto of_records = [&](Record first, std::optional<Record> second = std::nullopt) {
        Problem problem = good;
        problem.sources = {{.record = first, .form = layout_of(first).default_form(), .width = 2048}};
        if (second)
            problem.sources.push_back({.record = *second, .form = layout_of(*second).default_form(), .width = 64});
        return problem;
    };
    for (const auto& [first, second] :
         {std::pair{Record::fp8_576, Record::fp8_ds_mla}, std::pair{Record::fp8_v4, Record::fp8_v41},
          std::pair{Record::fp8_512, Record::nvfp4_v41}, std::pair{Record::bf16, Record::nvfp4_ds_mla}})
        expect_refused(of_records(first, second), gpu, {}, "sources[1].record must be the record of source 0");
    EXPECT_EQ(latency_refusal(of_records(Record::fp8_v41, Record::nvfp4_v41), gpu), std::nullopt);
    EXPECT_EQ(latency_refusal(of_records(Record::nvfp4_v41, Record::fp8_v41), gpu), std::nullopt);
    expect_refused(of_records(Record::bf16), gpu, {.p_format = PFormat::f16}, "p_format must be p_bf16 with bf16");
    expect_refused(of_records(Record::fp8_ds_mla), gpu, {.p_format = PFormat::e4m3},
                   "p_format must be p_f16 with fp8_");
    for (const Record record : {Record::fp8_ds_mla, Record::fp8_v4, Record::nvfp4_v41, Record::bf16}) {
        expect_refused(of_records(record), gpu, {.splits = 4, .transport = Transport::weights}, "transport must be");
        expect_refused(of_records(record), gpu, {.splits = 4, .cluster_tiles = 2}, "cluster_tiles must be 1 with");
    }
    expect_refused(problem_of(1, 1, {max_grid_x}), gpu, {}, "sources[0].width must be 0 .. ");
    expect_refused(problem_of(1, 1, {64, max_grid_x}), gpu, {}, "sources[1].width must be 0 .. ");
    expect_refused(problem_of(max_grid_x, 1, {2048}), gpu, {.splits = 2}, "rows must be 0 .. 1073741823 with 2 splits");
    expect_refused(problem_of(max_grid_x, 1, {2048}), gpu, {.splits = 16}, "rows must be 0 .. 134217727 with 16");
    expect_refused(good, gpu, {.p_format = PFormat::bf16},
                   "p_format must be p_f16 or p_e4m3 with fp8 (576 bytes), got p_bf16");
    expect_refused(good, gpu, {.p_scale = 65536.0F}, "p_scale must be 2^-16 .. 32768 with");
    expect_refused(good, gpu, {.p_format = PFormat::e4m3, .p_scale = 449.0F}, "p_scale must be 2^-16 .. 448 with");
    expect_refused(good, gpu, {.anchor = Anchor::row_max}, "anchor must be split_running_max, got row_max");
    expect_refused(good, gpu, {.columns = ColumnRule::blocks}, "columns must be round_robin, got blocks");
    for (const int chunk : {32, 96, 128}) expect_refused(good, gpu, {.chunk = chunk}, "chunk must be 64, got");
    for (const int splits : {-1, 0, 17}) expect_refused(good, gpu, {.splits = splits}, "splits must be 1 .. 16, got");
    for (const int stages : {-1, 0, latency::max_stages + 1})
        expect_refused(good, gpu, {.stages = stages}, "stages must be 1 .. ");
    for (const int tiles : {-1, 0, 17})
        expect_refused(good, gpu, {.cluster_tiles = tiles}, "cluster_tiles must be 1 .. ");
    expect_refused(good, gpu, {.cluster_tiles = 2, .gather = Gather::copies}, "gather must be bulk with cluster_tiles");
    for (const int tile : {-16, 0, 8, 17, 128})
        expect_refused(good, gpu, {.tile_heads = tile}, "tile_heads must be 16");
}

TEST_F(LatencyRefusals, OfDevices) {
    const Problem good = problem_of(5, 96, {2048});
    for (const int capability : {0, 80, 89, 100, 120}) {
        DeviceSpec other = h200();
        other.capability = capability;
        expect_refused(good, other, {}, "compute capability must be 9.0");
    }
    expect_refused(good, h20(), {.splits = 13},
                   "splits * cluster_tiles must be a cluster size that the device can hold, got 13");
    DeviceSpec small = h200();
    small.shared_memory_bytes = 48 << 10;
    expect_refused(good, small, {}, "a CTA needs at most 49152 bytes of shared memory");
    DeviceSpec none = h200();
    none.resident_clusters = {};
    expect_refused(good, none, {}, "splits * cluster_tiles must be a cluster size that the device can hold");
}

}  // namespace
}  // namespace sparsemla::test
