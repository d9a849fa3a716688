// make_plan: a pure function from a problem to a schedule, with every refusal in words.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "harness/devices.h"
#include "kernels.h"
#include "sparsemla/decode.h"

namespace sparsemla {
namespace {

Problem small_problem() { return {.rows = 8, .heads = 16, .sources = {{.record = Record::fp8_576, .width = 2048}}}; }

DeviceSpec cpu(int threads = 4) { return {.device = {}, .name = "test", .threads = threads}; }

std::vector<std::string> cpu_kernels() { return harness::kernels_on(Device::Kind::cpu); }

std::string error_of(const Problem& problem, const PlanOptions& options) {
    try {
        make_plan(problem, cpu(), options);
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

bool equal(const Plan& a, const Plan& b) {
    return a.schedule == b.schedule && a.workspace_bytes == b.workspace_bytes && a.state_bytes == b.state_bytes &&
           a.kernel == b.kernel && a.describe() == b.describe();
}

TEST(MakePlan, SameInputSamePlan) {
    for (const std::string& kernel : cpu_kernels())
        for (const int threads : {1, 4, 64}) {
            const Plan first = make_plan(small_problem(), cpu(threads), {.kernel = kernel});
            for (int repeat = 0; repeat < 3; ++repeat)
                ASSERT_TRUE(equal(make_plan(small_problem(), cpu(threads), {.kernel = kernel}), first));
        }
}

TEST(MakePlan, KeepsWhatItWasAskedFor) {
    Problem problem = small_problem();
    problem.sinks = true;
    problem.lse_base = LseBase::two;
    const Plan plan = make_plan(problem, cpu(3));
    EXPECT_EQ(plan.problem.rows, 8);
    EXPECT_EQ(plan.problem.heads, 16);
    EXPECT_TRUE(plan.problem.sinks);
    EXPECT_EQ(plan.problem.lse_base, LseBase::two);
    EXPECT_EQ(plan.problem.sources[0].width, 2048);
    EXPECT_EQ(plan.device.threads, 3);
    EXPECT_EQ(plan.schedule.row_capacity, 8);
}

TEST(MakePlan, ThreadsAreNoPartOfTheSchedule) {
    for (const std::string& kernel : cpu_kernels())
        for (const std::int64_t width : {0, 1, 64, 2048, 100000}) {
            Problem problem = small_problem();
            problem.sources[0].width = width;
            const Schedule one = make_plan(problem, cpu(1), {.kernel = kernel}).schedule;
            for (const int threads : {2, 3, 64, 4096})
                ASSERT_EQ(make_plan(problem, cpu(threads), {.kernel = kernel}).schedule, one)
                    << kernel << ", width " << width << ", threads " << threads;
        }
}

TEST(MakePlan, TheFastKernelComesFirstAndTheDefinitionOnRequest) {
    const std::vector<std::string> names = kernel_names();
    ASSERT_GE(names.size(), 2U);
    EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size());
    const Plan plan = make_plan(small_problem(), cpu());
    EXPECT_EQ(plan.schedule.kernel, "cpu");
    EXPECT_EQ(make_plan(small_problem(), cpu(), {.kernel = "reference"}).schedule.kernel, "reference");
}

// The chosen kernel and the declined ones are all there are, each with a reason.
TEST(MakePlan, EveryOtherKernelSaysWhyNot) {
    for (const std::string& forced : {std::string(), std::string("cpu"), std::string("reference")}) {
        const Plan plan = make_plan(small_problem(), cpu(), {.kernel = forced});
        EXPECT_FALSE(plan.reason.empty());
        std::vector<std::string> names = {plan.schedule.kernel};
        for (const Refusal& refusal : plan.declined) {
            EXPECT_FALSE(refusal.reason.empty()) << refusal.kernel;
            names.push_back(refusal.kernel);
        }
        std::vector<std::string> all = kernel_names();
        std::sort(names.begin(), names.end());
        std::sort(all.begin(), all.end());
        EXPECT_EQ(names, all) << "forced: " << forced;
    }
}

TEST(MakePlan, UnknownKernelNamesTheKnown) {
    for (const std::string name : {"Cpu", "cpu ", "gpu", "-", "reference\n"}) {
        const std::string message = error_of(small_problem(), {.kernel = name});
        EXPECT_NE(message.find("kernel: need one of"), std::string::npos) << message;
        for (const std::string& known : kernel_names()) EXPECT_NE(message.find(known), std::string::npos) << message;
        EXPECT_NE(message.find(name), std::string::npos) << message;
    }
}

TEST(MakePlan, OptionsShowInTheSchedule) {
    const PlanOptions options{.kernel = "cpu",
                              .p_format = PFormat::e4m3,
                              .p_scale = 256.0F,
                              .anchor = Anchor::chunk_max,
                              .splits = 3,
                              .columns = ColumnRule::interleaved,
                              .chunk = 32};
    EXPECT_EQ(make_plan(small_problem(), cpu(), options).schedule, (Schedule{.kernel = "cpu",
                                                                             .p_format = PFormat::e4m3,
                                                                             .p_scale = 256.0F,
                                                                             .anchor = Anchor::chunk_max,
                                                                             .splits = 3,
                                                                             .columns = ColumnRule::interleaved,
                                                                             .chunk = 32,
                                                                             .row_capacity = 8}));
}

TEST(MakePlan, OptionsThatAKernelDoesNotTakeAreRefusedByName) {
    const std::vector<std::pair<std::string, PlanOptions>> wrong = {
        {"p_format", {.kernel = "cpu", .p_format = PFormat::f64}},
        {"p_format", {.kernel = "reference", .p_format = PFormat::f16}},
        {"p_scale", {.kernel = "cpu", .p_scale = 0.0F}},
        {"p_scale", {.kernel = "cpu", .p_scale = -1.0F}},
        {"p_scale", {.kernel = "cpu", .p_scale = std::numeric_limits<float>::quiet_NaN()}},
        {"p_scale", {.kernel = "cpu", .p_scale = std::numeric_limits<float>::infinity()}},
        {"p_scale", {.kernel = "cpu", .p_format = PFormat::e4m3, .p_scale = 449.0F}},
        {"p_scale", {.kernel = "cpu", .p_format = PFormat::f16, .p_scale = 65536.0F}},
        {"splits", {.kernel = "cpu", .splits = 0}},
        {"splits", {.kernel = "cpu", .splits = -1}},
        {"splits", {.kernel = "cpu", .splits = INT32_MAX}},
        {"splits", {.kernel = "reference", .splits = 2}},
        {"chunk", {.kernel = "cpu", .chunk = 0}},
        {"chunk", {.kernel = "cpu", .chunk = INT32_MIN}},
        {"chunk", {.kernel = "cpu", .chunk = INT32_MAX}},
        {"p_format", {.p_format = static_cast<PFormat>(77)}},
        {"anchor", {.anchor = static_cast<Anchor>(77)}},
        {"columns", {.columns = static_cast<ColumnRule>(77)}},
    };
    for (const auto& [option, options] : wrong) {
        const std::string message = error_of(small_problem(), options);
        EXPECT_NE(message.find(option), std::string::npos) << option << ": '" << message << "'";
        EXPECT_EQ(refusal(small_problem(), cpu(), options).value_or(""), message);
        EXPECT_FALSE(supports(small_problem(), cpu(), options));
    }
}

TEST(MakePlan, CpuKernelsHaveNoTiling) {
    const std::vector<std::pair<std::string, PlanOptions>> wrong = {{"tile_heads", {.tile_heads = 16}},
                                                                    {"stages", {.stages = 1}},
                                                                    {"cluster_tiles", {.cluster_tiles = 1}},
                                                                    {"gather", {.gather = Gather::bulk}},
                                                                    {"transport", {.transport = Transport::stores}},
                                                                    {"trigger", {.trigger = Trigger::end}}};
    for (const auto& [option, options] : wrong)
        for (const std::string& kernel : cpu_kernels()) {
            PlanOptions forced = options;
            forced.kernel = kernel;
            const std::string message = error_of(small_problem(), forced);
            EXPECT_NE(message.find(option + " must not be given"), std::string::npos) << kernel << ": " << message;
        }
    EXPECT_FALSE(make_plan(small_problem(), cpu()).tiling);
}

TEST(MakePlan, OtherDevicesAreRefused) {
    Problem problem = small_problem();
    problem.device = {Device::Kind::cuda, 0};
    DeviceSpec spec{.device = problem.device, .name = "a GPU older than every kernel", .capability = 50, .sms = 24};
    const auto reason = refusal(problem, spec);
    ASSERT_TRUE(reason);
    for (const std::string& kernel : kernel_names())
        EXPECT_NE(reason->find(kernel + ": "), std::string::npos) << *reason;
    EXPECT_NE(reason->find("cuda:0"), std::string::npos) << *reason;
}

// Memory grows with what it is for, and is the same for every number of rows up to the capacity.
TEST(MakePlan, WorkspaceGrowsWithTheProblem) {
    for (const std::string& kernel : cpu_kernels()) {
        const auto bytes = [&](std::int64_t rows, std::int64_t heads, std::int64_t width) {
            Problem problem = small_problem();
            problem.rows = rows;
            problem.heads = heads;
            problem.sources[0].width = width;
            return make_plan(problem, cpu(2), {.kernel = kernel}).workspace_bytes;
        };
        EXPECT_LE(bytes(8, 1, 2048), bytes(8, 16, 2048)) << kernel;
        EXPECT_LE(bytes(8, 16, 64), bytes(8, 16, 2048)) << kernel;
        EXPECT_LE(bytes(1, 16, 2048), bytes(64, 16, 2048)) << kernel;
        EXPECT_LE(bytes(128, 128, 2048), std::size_t{64} << 20) << kernel << ": inputs, outputs and 64 MiB";
        EXPECT_NO_THROW(bytes(INT32_MAX, 128, INT32_MAX)) << kernel;
    }
}

TEST(Schedule, PrintsOnOneLine) {
    const Schedule schedule{.kernel = "cpu",
                            .p_format = PFormat::f16,
                            .p_scale = 32768.0F,
                            .anchor = Anchor::row_max,
                            .splits = 8,
                            .columns = ColumnRule::interleaved,
                            .chunk = 64,
                            .row_capacity = 8};
    EXPECT_EQ(to_string(schedule),
              "cpu p_f16*32768 anchor=row_max splits=8 columns=interleaved chunk=64 order=ascending rows<=8");
}

// Every field of a schedule shows in its text: two schedules that differ print differently.
TEST(Schedule, EveryFieldShows) {
    const Schedule base = make_plan(small_problem(), cpu()).schedule;
    std::vector<Schedule> others(8, base);
    others[0].kernel = "other";
    others[1].p_format = base.p_format == PFormat::bf16 ? PFormat::f16 : PFormat::bf16;
    others[2].p_scale *= 2;
    others[3].anchor = base.anchor == Anchor::row_max ? Anchor::chunk_max : Anchor::row_max;
    others[4].splits += 1;
    others[5].columns = base.columns == ColumnRule::blocks ? ColumnRule::interleaved : ColumnRule::blocks;
    others[6].chunk += 1;
    others[7].row_capacity += 1;
    std::set<std::string> texts = {to_string(base)};
    for (const Schedule& other : others) {
        EXPECT_FALSE(other == base);
        EXPECT_TRUE(texts.insert(to_string(other)).second) << to_string(other);
    }
}

TEST(Describe, SaysWhatRunsAndWhy) {
    Problem problem = small_problem();
    problem.sources = {{.record = Record::fp8_v4, .form = RecordForm::planar, .width = 128},
                       {.record = Record::nvfp4_v41, .form = RecordForm::planar, .width = 512, .count_offset = 128}};
    problem.sinks = true;
    problem.lse_base = LseBase::two;
    const Plan plan = make_plan(problem, cpu());
    const std::string text = plan.describe();
    std::vector<std::string> parts = {"rows <= 8",
                                      "heads 16",
                                      "f8_e4m3",
                                      "bf16",
                                      "sinks",
                                      "log2",
                                      "width 128",
                                      "width 512",
                                      "count_offset 128",
                                      to_string(Record::fp8_v4),
                                      to_string(Record::nvfp4_v41),
                                      "planar",
                                      to_string(plan.schedule),
                                      plan.reason,
                                      std::to_string(plan.workspace_bytes),
                                      "threads 4"};
    for (const Refusal& refusal : plan.declined) parts.push_back(refusal.kernel + ": " + refusal.reason);
    for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
}

TEST(Names, RoundTrip) {
    for (const PFormat format : {PFormat::e4m3, PFormat::f16, PFormat::bf16, PFormat::f64}) {
        const std::string text(name(format));
        EXPECT_EQ(find_p_format(text), format);
        EXPECT_EQ(find_p_format(text.substr(2)), format) << "without p_";
    }
    for (const Anchor anchor : {Anchor::split_running_max, Anchor::chunk_max, Anchor::row_max})
        EXPECT_EQ(find_anchor(name(anchor)), anchor);
    for (const ColumnRule rule : {ColumnRule::blocks, ColumnRule::interleaved, ColumnRule::round_robin})
        EXPECT_EQ(find_column_rule(name(rule)), rule);
    for (const Transport transport : {Transport::stores, Transport::bulk, Transport::weights})
        EXPECT_EQ(find_transport(name(transport)), transport);
    for (const Gather gather : {Gather::copies, Gather::bulk}) EXPECT_EQ(find_gather(name(gather)), gather);
    for (const Trigger trigger : {Trigger::start, Trigger::loaded, Trigger::end})
        EXPECT_EQ(find_trigger(name(trigger)), trigger);
    for (const std::string_view text : {"", "p_", "p_p_f16", "e5m2", "unknown", "F16"}) {
        EXPECT_EQ(find_p_format(text), std::nullopt) << text;
        EXPECT_EQ(find_anchor(text), std::nullopt) << text;
        EXPECT_EQ(find_column_rule(text), std::nullopt) << text;
        EXPECT_EQ(find_transport(text), std::nullopt) << text;
        EXPECT_EQ(find_trigger(text), std::nullopt) << text;
    }
}

}  // namespace
}  // namespace sparsemla
