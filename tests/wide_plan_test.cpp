// What decode_wide would launch, and when plans choose it, without a GPU.
#include <gtest/gtest.h>

#include "balanced_plan.h"
#include "gpu.h"
#include "sparsemla/decode.h"
#include "tests/hopper.h"

namespace sparsemla {
namespace {

using test::hopper;

class WidePlan : public testing::Test {
   protected:
    void SetUp() override {
        if (!detail::gpu_built()) GTEST_SKIP() << "this build has no CUDA part";
    }
};

Problem problem_of(std::int64_t rows, std::int64_t heads, std::vector<std::int64_t> widths = {2048},
                   Record record = Record::fp8_ds_mla) {
    Problem problem;
    problem.rows = rows;
    problem.heads = heads;
    problem.query_dtype = DType::bf16;
    problem.device = {Device::Kind::cuda, 0};
    for (const std::int64_t width : widths) {
        SourceProblem source;
        source.record = record;
        if (!layout_of(record).has_contiguous) source.form = RecordForm::planar;
        source.width = width;
        problem.sources.push_back(source);
    }
    return problem;
}

Plan wide(const Problem& problem, PlanOptions options = {}) {
    options.kernel = "decode_wide";
    return make_plan(problem, hopper(), options);
}

TEST_F(WidePlan, EveryRecordHasALayoutThatFits) {
    for (const RecordLayout& layout : record_layouts)
        for (const std::int64_t rows : {0, 1, 8, 131, 132, 133, 500}) {
            const Plan plan = wide(problem_of(rows, 128, {2048, 300}, layout.record));
            const detail::BalancedShape shape = detail::balanced_shape(plan);
            EXPECT_GE(shape.ctas, 1);
            EXPECT_LE(shape.ctas, hopper().sms);
            EXPECT_EQ(shape.tiles, 2);
            EXPECT_LE(shape.shared_bytes, static_cast<std::size_t>(hopper().shared_memory_bytes))
                << to_string(layout.record);
            EXPECT_EQ(plan.workspace_bytes, detail::balanced_workspace(plan).bytes);
            EXPECT_EQ(plan.state_bytes, detail::balanced_state_bytes(plan));
        }
}

// FP16 where scales allow; else P is one BF16 number or two.
TEST_F(WidePlan, FormatsOfP) {
    const auto formats = [](Record record) {
        std::vector<PFormat> taken;
        for (const PFormat format : {PFormat::e4m3, PFormat::f16, PFormat::bf16, PFormat::f64})
            if (supports(problem_of(4, 64, {512}, record), hopper(), {.kernel = "decode_wide", .p_format = format}))
                taken.push_back(format);
        return taken;
    };
    EXPECT_EQ(formats(Record::fp8_576), std::vector{PFormat::f16});
    EXPECT_EQ(formats(Record::fp8_ds_mla), std::vector{PFormat::f16});
    EXPECT_EQ(formats(Record::fp8_v4), (std::vector{PFormat::f16, PFormat::bf16}));
    EXPECT_EQ(formats(Record::bf16), (std::vector{PFormat::f16, PFormat::bf16}));
    EXPECT_EQ(wide(problem_of(4, 64, {512}, Record::fp8_v4)).schedule.p_format, PFormat::bf16);  // the faster one
    EXPECT_EQ(wide(problem_of(4, 64, {512}, Record::bf16)).schedule.p_format, PFormat::bf16);
}

TEST_F(WidePlan, RefusesByName) {
    const auto refused = [](PlanOptions options) {
        options.kernel = "decode_wide";
        return refusal(problem_of(4, 64), hopper(), options).value_or("");
    };
    const auto names = [&](const PlanOptions& options, const std::string& text) {
        EXPECT_NE(refused(options).find(text), std::string::npos) << refused(options);
    };
    names({.tile_heads = 32}, "tile_heads must be 64, got 32");
    names({.stages = 1}, "stages must be 2 .. 3, got 1");
    names({.stages = 4}, "stages must be 1 .. 3, got 4");
    names({.splits = 17}, "splits must be 1 .. 16, got 17");
    names({.cluster_tiles = 2}, "cluster_tiles must be 1");
    names({.gather = Gather::bulk}, "gather must be copies, got bulk");
    names({.transport = Transport::weights}, "transport must be stores, got weights");
    names({.p_format = PFormat::e4m3}, "p_format must be p_f16");
    Problem ids = problem_of(4, 64);
    ids.from_ids = true;
    const std::string reason = refusal(ids, hopper(), {.kernel = "decode_wide"}).value_or("");
    EXPECT_NE(reason.find("from_ids must be false"), std::string::npos) << reason;
}

// A device whose CTAs have less shared memory than a stage needs, or of which nothing is known.
TEST_F(WidePlan, NeedsSharedMemory) {
    DeviceSpec small = hopper();
    for (const int bytes : {0, 100'000}) {
        small.shared_memory_bytes = bytes;
        const std::string reason = refusal(problem_of(4, 64), small, {.kernel = "decode_wide"}).value_or("");
        EXPECT_NE(reason.find("shared memory of the device must be at least "), std::string::npos) << reason;
    }
}

// Many rows of many heads; few of either are the other kernels'.
TEST_F(WidePlan, IsChosenWhereItIsExpectedToBeFaster) {
    const auto kernel = [](std::int64_t rows, std::int64_t heads) {
        return make_plan(problem_of(rows, heads), hopper()).schedule.kernel;
    };
    EXPECT_EQ(kernel(1, 64), "decode_latency");
    EXPECT_NE(kernel(128, 16), "decode_wide");
    EXPECT_EQ(kernel(64, 64), "decode_wide");
    EXPECT_EQ(kernel(128, 128), "decode_wide");
}

// decode_latency's table of flat fp8 is swept with E4M3 queries, which it is faster with.
TEST_F(WidePlan, IsComparedWithTheTableOfAnotherQuery) {
    Problem problem = problem_of(32, 96, {2048}, Record::fp8_576);
    EXPECT_EQ(make_plan(problem, hopper()).schedule.kernel, "decode_wide");
    problem.query_dtype = DType::f8_e4m3;
    EXPECT_EQ(make_plan(problem, hopper()).schedule.kernel, "decode_latency");
}

}  // namespace
}  // namespace sparsemla
