// bench --suite latency and --sweep without a GPU: host memory plays it, the cpu kernel decodes, and plans are made for
// a Hopper that is not there.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/hopper.h"
#include "tools/baseline.h"
#include "tools/bench.h"
#include "tools/latency_report.h"
#include "tools/sweep.h"

namespace sparsemla::tool {
namespace {

constexpr harness::TimerSizes small{.records = 4096, .evict_bytes = 4096, .copy_bytes = 1 << 20};

/// A file of its own for the test, removed at the end.
class TemporaryFile {
   public:
    explicit TemporaryFile(const std::string& content = "") {
        path_ = testing::TempDir() + fmt::format("latency_bench_{}_{}", getpid(), ++made_);
        std::ofstream(path_) << content;
    }
    ~TemporaryFile() { std::remove(path_.c_str()); }
    TemporaryFile(const TemporaryFile&) = delete;
    TemporaryFile& operator=(const TemporaryFile&) = delete;

    const std::string& path() const { return path_; }
    std::string content() const {
        std::stringstream text;
        text << std::ifstream(path_).rdbuf();
        return text.str();
    }

   private:
    static inline int made_ = 0;
    std::string path_;
};

std::string printed(const std::function<void()>& work) {
    testing::internal::CaptureStdout();
    work();
    return testing::internal::GetCapturedStdout();
}

BenchFlags quick(const std::string& filter) {
    BenchFlags flags;
    flags.suite = "latency";
    flags.filter = filter;
    flags.repeat = 2;
    flags.calls = 3;
    return flags;
}

std::string error_of(const std::function<void()>& work) {
    try {
        work();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

const char* const baseline_text =
    "# another library\n"
    "fmt\theads\trows\tslots\textra\tcold_us\twarm_us\n"
    "v32\t16\t1\t1\t0\t12.5\t11\n"
    "v32\t16\t8\t1\t0\t14.5\t13\n"
    "model1\t16\t6\t128\t512\t14.0\t12\n";

TEST(Latency, TableHasEveryFigure) {
    const TemporaryFile baseline(baseline_text);
    BenchFlags flags = quick("goal/fp8_576/h16/r1/1of2048");
    flags.baseline = baseline.path();
    const std::string text = printed([&] { run_latency_suite(flags, query_device({}), small); });
    for (const char* word :
         {"sparsemla ", "clocks", "device copy", "graphs of 3 dependent decodes, 2 replays", "cold us", "warm us",
          "of floor", "goal/fp8_576/h16/r1/1of2048", "12.5", "2.2", "cpu p_f16", "baseline"})
        EXPECT_NE(text.find(word), std::string::npos) << word << "\n" << text;
    EXPECT_EQ(text.find("no cliff"), std::string::npos) << text;
}

TEST(Latency, CliffsAreJudged) {
    const std::string text =
        printed([&] { run_latency_suite(quick("cliff_slots/fp8_576/h16/r1/6"), query_device({}), small); });
    EXPECT_NE(text.find("no cliff, cold: t(n) <= 1.05 t(n+1) and t(n+1) <= 1.25 t(n): "), std::string::npos) << text;
    const std::regex pair(R"(slots, 16 heads x 1 rows +(63|64) .*(PASS|FAIL)\n)");
    const auto begin = std::sregex_iterator(text.begin(), text.end(), pair);
    EXPECT_EQ(std::distance(begin, std::sregex_iterator()), 2) << text;
}

TEST(Latency, JsonAndPlot) {
    const TemporaryFile json, plot, baseline(baseline_text);
    BenchFlags flags = quick("goal/fp8_5");
    flags.filter = "goal/fp8_512+fp8_512/h16/r";
    flags.json = true;
    flags.json_path = json.path();
    flags.plot = plot.path();
    flags.baseline = baseline.path();
    const std::string text = printed([&] { run_latency_suite(flags, query_device({}), small); });
    EXPECT_NE(text.find("wrote " + json.path()), std::string::npos) << text;
    const Json document = Json::parse(json.content());
    ASSERT_EQ(document.at("timings").size(), 2U);
    const Json& timing = document.at("timings").at(0);
    EXPECT_EQ(timing.at("step"), "goal/fp8_512+fp8_512/h16/r6/128+512/sinks");
    EXPECT_EQ(timing.at("baseline_cold_us"), 14.0);
    EXPECT_TRUE(document.at("timings").at(1).at("baseline_cold_us").is_null());
    EXPECT_EQ(timing.at("record_bytes"), 6.0 * 640 * 512);
    EXPECT_LE(timing.at("cold").at("p10_us"), timing.at("cold").at("p90_us"));
    EXPECT_TRUE(document.at("cliffs").empty());
    for (const char* word : {"<svg", "16 heads, fp8_512+fp8_512 x 128+512/sinks", "baseline", "</svg>"})
        EXPECT_NE(plot.content().find(word), std::string::npos) << word;
    flags.json_path = "";
    const Json alone = Json::parse(printed([&] { run_latency_suite(flags, query_device({}), small); }));
    EXPECT_EQ(alone.at("suite"), "latency");
}

TEST(Latency, RefusalsAreShown) {
    BenchFlags flags = quick("goal/fp8_576/h16/r1/1of2048");
    flags.run.stages = 2;  // which no CPU kernel has
    const std::string message = error_of([&] { run_latency_suite(flags, query_device({}), small); });
    EXPECT_NE(message.find("stages must not be given"), std::string::npos) << message;
    EXPECT_NE(error_of([&] { run_latency_suite(quick("no such step"), query_device({}), small); }).find("--filter"),
              std::string::npos);
}

TEST(Latency, FloorIsTheLargestOfThree) {
    const harness::GpuLimits limits{.copy_bytes_per_s = 1e12, .empty_launch_us = 1};
    const auto floor = [&](std::int64_t heads, std::int64_t rows) {
        return floor_of({.rows = rows, .heads = heads, .sources = {{}}}, limits);
    };
    EXPECT_EQ(floor(1, 0).by, "launch");
    EXPECT_EQ(floor(1, 10).by, "memory");
    EXPECT_DOUBLE_EQ(floor(1, 10).us, 1e-6 * 10 * 2048 * 576);
    const harness::GpuLimits fast{.copy_bytes_per_s = 1e15, .empty_launch_us = 0};
    const Floor arithmetic = floor_of({.rows = 10, .heads = 128, .sources = {{}}}, fast);
    EXPECT_EQ(arithmetic.by, "arithmetic");
    EXPECT_DOUBLE_EQ(arithmetic.us, 1e6 * 2 * 10 * 128 * 2048.0 * (576 + 512) / f16_flops_per_s);
}

TEST(Baseline, ExactOrNothing) {
    const TemporaryFile file(baseline_text);
    const std::vector<BaselineRow> rows = read_baseline(file.path());
    ASSERT_EQ(rows.size(), 3U);
    harness::ChainShape shape{.rows = 1, .heads = 16, .sources = {{.width = 2048, .active = 1}}};
    ASSERT_TRUE(find_baseline(rows, shape));
    EXPECT_EQ(find_baseline(rows, shape)->cold_us, 12.5);
    for (const auto& change : std::vector<std::function<void(harness::ChainShape&)>>{
             [](auto& s) { s.rows = 2; }, [](auto& s) { s.heads = 12; }, [](auto& s) { s.sources[0].active = 2; },
             [](auto& s) { s.sources[0].record = Record::fp8_512; }, [](auto& s) { s.sources.push_back({}); }}) {
        harness::ChainShape other = shape;
        change(other);
        EXPECT_FALSE(find_baseline(rows, other));
    }
}

TEST(Baseline, BadFilesAreRefusedByLine) {
    const auto message = [](const std::string& content) {
        const TemporaryFile file(content);
        return error_of([&] { read_baseline(file.path()); });
    };
    EXPECT_NE(message("").find("column names"), std::string::npos);
    EXPECT_NE(message("fmt\theads\n").find("none named rows"), std::string::npos);
    const std::string header = "fmt\theads\trows\tslots\textra\tcold_us\twarm_us\n";
    EXPECT_NE(message("# text\n" + header + "v32\t16\tmany\t1\t0\t1\t1\n").find("line 3"), std::string::npos);
    EXPECT_NE(message(header + "v32\t16\t1\n").find("slots"), std::string::npos);
    EXPECT_FALSE(error_of([] { read_baseline("/no/such/file"); }).empty());
}

// Every point's layouts can be launched, differ, and come in order of what the planner expects of them.
TEST(Sweep, LayoutsOfEveryPoint) {
    if (!build_info().cuda) GTEST_SKIP() << "plans of a GPU need the CUDA part";
    const std::vector<SweepPoint> points = sweep_points();
    EXPECT_EQ(points.size(), 19U * 7 * 9 + 10 * 5 * 5 + 10 * 5 * 3 + 6 * 8 * 4 * 5);
    for (const SweepPoint& point : points) {
        const std::vector<Plan> plans = sweep_plans(point, test::hopper(), {}, 8);
        ASSERT_FALSE(plans.empty()) << point.text();
        ASSERT_LE(plans.size(), 8U);
        std::set<std::string> layouts;
        for (const Plan& plan : plans) {
            EXPECT_TRUE(layouts.insert(result_of(point, plan, 1).layout_key()).second) << point.text();
            EXPECT_LE(plan.schedule.splits, point.chunks) << point.text();
            EXPECT_GE(plan.expected_us, plans.front().expected_us) << point.text();
        }
        std::int64_t columns = 0;
        for (const harness::ChainSource& source : point.shape().sources) columns += source.width;
        EXPECT_EQ(columns, 64 * point.chunks);
        EXPECT_EQ(static_cast<std::int64_t>(point.shape().sources.size()), point.sources);
    }
    // Two numbers of stages, and copies that two tiles share.
    const SweepPoint last{.record = Record::fp8_576, .rows = 128, .heads = 128, .chunks = 32};
    EXPECT_EQ(sweep_plans(last, test::hopper(), {.splits = 1, .tile_heads = 16}, 8).size(), 3U);
    EXPECT_EQ(sweep_plans(last, test::hopper(), {.splits = 1, .tile_heads = 16, .cluster_tiles = 1}, 8).size(), 2U);
}

SweepResult result(std::int64_t rows, std::int64_t splits, double us) {
    return {.gpu = "NVIDIA H200",
            .record = "fp8_576",
            .sources = 1,
            .rows = rows,
            .heads = 16,
            .chunks = 8,
            .splits = splits,
            .tile_heads = 16,
            .stages = 2,
            .gather = "copies",
            .us = us};
}

TEST(Sweep, LogIsResumed) {
    const TemporaryFile file;
    {
        SweepLog log(file.path());
        log.add(result(1, 4, 5.5));
        log.add(result(2, 4, 6.5));
    }
    std::ofstream(file.path(), std::ios::app) << R"({"gpu": "NVIDIA H2)";  // killed while writing
    SweepLog log(file.path());
    ASSERT_EQ(log.results().size(), 2U);
    EXPECT_EQ(log.results()[1].us, 6.5);
    EXPECT_TRUE(log.holds(result(1, 4, 0)));
    EXPECT_FALSE(log.holds(result(1, 8, 0)));
    log.add(result(1, 8, 4));
    EXPECT_EQ(SweepLog(file.path()).results().size(), 3U);
    std::ofstream(file.path(), std::ios::app) << "{}\n";
    EXPECT_NE(error_of([&] { SweepLog broken(file.path()); }).find("line 4"), std::string::npos);
    EXPECT_TRUE(SweepLog("").results().empty());
}

TEST(Sweep, TableHoldsTheFastest) {
    const std::string text =
        tuning_table_text({result(2, 4, 6.5), result(1, 4, 5.5), result(1, 8, 4.251), result(1, 2, 9)});
    EXPECT_EQ(text.substr(text.find("\n{") + 1),
              "{\"NVIDIA H200\", Record::fp8_576, 1, 1, 16, 8, 8, 16, 2, 1, Gather::copies, 4.25},\n"
              "{\"NVIDIA H200\", Record::fp8_576, 1, 2, 16, 8, 4, 16, 2, 1, Gather::copies, 6.50},\n");
}

// On a CPU no layout can be swept; the table still holds what the log does.
TEST(Sweep, RunsOverAllPoints) {
    const TemporaryFile log, table;
    SweepLog(log.path()).add(result(1, 4, 5.5));
    BenchFlags flags;
    flags.sweep = true;
    flags.resume = log.path();
    flags.table = table.path();
    const std::string text = printed([&] { run_sweep(flags, query_device({}), small); });
    EXPECT_NE(
        text.find(fmt::format("0 layouts measured, 1 known before; {0} of {0} points done\n", sweep_points().size())),
        std::string::npos)
        << text;
    EXPECT_NE(table.content().find("\"NVIDIA H200\", Record::fp8_576, 1, 1, 16, 8, 4, 16, 2, 1, Gather::copies, 5.50"),
              std::string::npos);
    flags.minutes = 0;
    const std::string none = printed([&] { run_sweep(flags, query_device({}), small); });
    EXPECT_NE(none.find("again with --resume"), std::string::npos) << none;
}

}  // namespace
}  // namespace sparsemla::tool
