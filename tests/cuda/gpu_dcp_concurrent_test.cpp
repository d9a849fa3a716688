// Ranks that run on one GPU at the same time, on a stream each, and really wait for one another: many exchanges without
// a wait by the host, late ranks, graphs of each rank's own, a soak. Where not all CTAs of all ranks fit the GPU at
// once the group refuses, and these tests are skipped on GPUs smaller than those that they were made for.
#include <memory>
#include <thread>

#include "tests/cuda/gpu_dcp.h"

namespace sparsemla::test {
namespace {

using harness::DcpConcurrency;
using harness::DcpGroup;
using harness::DcpResults;
using harness::DcpWindow;
using harness::GpuGraph;
using harness::GpuStream;

constexpr std::int64_t most_rows = 3;  // of an exchange

class GpuDcpConcurrent : public GpuDcp {
   protected:
    static void skip_unless_resident(const DcpGroup& group) {
        try {
            group.check_all_resident(most_rows);
        } catch (const Error& error) {
            constexpr int sms_of_an_h200 = 132;
            if (tested_device().sms >= sms_of_an_h200) throw;
            skip_test(error.what());
        }
    }
    /// Exchanges of few rows each, of a step of many.
    static void expect_concurrent(DcpStep& step, int exchanges, const DcpConcurrency& how) {
        skip_unless_resident(step.group());
        const std::uint32_t before = exchanges_of(step.group());
        const std::vector<DcpWindow> windows = small_windows(step, exchanges, most_rows, how.seed);
        ASSERT_EQ(step.group().run_concurrent(windows, how), "") << step.text();
        EXPECT_EQ(exchanges_of(step.group()), before + static_cast<std::uint32_t>(exchanges)) << step.text();
    }
};

/// Few CTAs of two, three and four ranks, in all forms.
std::vector<DcpSpec> small_groups() {
    const auto by = [](int splits) { return PlanOptions{.kernel = "decode_latency", .splits = splits}; };
    return {{.rows = 20, .head_offset = {0, 3, 5}, .width = 60, .sinks = true, .plan = by(1)},
            {.rows = 20, .head_offset = {0, 2, 4, 6}, .width = 130, .plan = by(2)},
            {.rows = 20,
             .head_offset = {0, 1, 2},
             .width = 300,
             .record = Record::fp8_512,
             .bf16_query = true,
             .plan = by(4)},
            {.rows = 20, .head_offset = {0, 2, 5}, .width = 100, .query_dtype = DType::bf16, .plan = by(2)},
            {.rows = 20, .head_offset = {0, 3, 5}, .width = 60, .by_calls = true, .plan = by(1)},
            {.rows = 20, .head_offset = {0, 2, 3}, .width = 120, .sinks = true, .second_source = true, .plan = by(2)},
            {.rows = 20,
             .head_offset = {0, 2, 4},
             .width = 60,
             .record = Record::fp8_ds_mla,
             .query_dtype = DType::bf16,
             .plan = by(1)},
            {.rows = 20, .head_offset = {0, 1, 2, 3, 4}, .width = 60, .plan = by(1)}};
}

// Any rank may be some exchanges ahead of the others, and none is waited for by the host (B065).
TEST_F(GpuDcpConcurrent, ManyExchangesWithoutAWaitByTheHost) {
    std::uint64_t seed = 100;
    for (DcpSpec spec : small_groups()) {
        spec.seed = ++seed;
        LimitedStep step(spec);
        for (const int most_ahead : {1, 4, 16})
            ASSERT_NO_FATAL_FAILURE(
                expect_concurrent(step, 200, {.seed = ++seed, .at_once = 64, .most_ahead = most_ahead}));
    }
}

// The host waits after every exchange, or submits ranks in an order of its own: a rank's kernels wait longer then.
TEST_F(GpuDcpConcurrent, RanksThatStartLater) {
    std::uint64_t seed = 120;
    for (DcpSpec spec : small_groups()) {
        spec.seed = ++seed;
        LimitedStep step(spec);
        harness::Random random(seed);
        const auto before = [&](int, std::size_t) {
            if (random.chance(1.0 / 20)) std::this_thread::sleep_for(std::chrono::microseconds(random.below(5000)));
        };
        ASSERT_NO_FATAL_FAILURE(expect_concurrent(step, 40, {.seed = seed, .at_once = 1, .before = before}));
        ASSERT_NO_FATAL_FAILURE(
            expect_concurrent(step, 80, {.seed = seed + 50, .at_once = 40, .most_ahead = 16, .before = before}));
    }
}

// One rank at a time is late, at every stage in turn: its first, a middle or its last CTA (B062, B064, B065).
TEST_F(GpuDcpConcurrent, DelayedCtasOfEveryStage) {
    constexpr DcpStage stages[] = {DcpStage::gather, DcpStage::decode, DcpStage::push, DcpStage::merge};
    std::uint64_t seed = 140;
    for (DcpSpec spec : small_groups()) {
        spec.seed = ++seed;
        LimitedStep step(spec);
        DcpGroup& group = step.group();
        skip_unless_resident(group);
        const int world = group.world();
        const auto before = [&](int rank, std::size_t exchange) {
            const auto turn = static_cast<int>(exchange / 2);
            Mailbox& mailbox = group.mailbox(rank);
            mailbox.delay = {};
            if (exchange % 2 != 0 || turn % world != rank) return;
            const DcpStage stage = stages[turn / world % 4];
            // Of one row; exchanges of more have more CTAs, of which this is one in the middle.
            const std::int64_t ctas = std::max<std::int64_t>(1, group.grids(rank, 1).of(stage));
            const int place = turn / world / 4 % 3;
            const std::int64_t cta = place == 0 ? 0 : place == 1 ? ctas / 2 : ctas - 1;
            mailbox.delay = {.stage = stage, .cta = static_cast<std::int32_t>(cta), .us = 500};
        };
        ASSERT_NO_FATAL_FAILURE(
            expect_concurrent(step, 2 * world * 4 * 3, {.seed = seed, .at_once = 48, .before = before}));
    }
}

// A whole rank is 1 to 3 ms late in every exchange, another one in every stretch of ten (B063).
TEST_F(GpuDcpConcurrent, OneRankIsSlow) {
    std::uint64_t seed = 160;
    for (const bool by_calls : {false, true}) {
        LimitedStep step({.rows = 20,
                          .head_offset = {0, 2, 4},
                          .width = 60,
                          .by_calls = by_calls,
                          .plan = {.kernel = "decode_latency", .splits = 1},
                          .seed = ++seed});
        const auto before = [&](int rank, std::size_t exchange) {
            const bool slow = static_cast<int>(exchange / 10) % step.group().world() == rank;
            step.group().mailbox(rank).delay = {.stage = slow ? DcpStage::gather : DcpStage::none,
                                                .cta = 0,
                                                .us = 1000.0F + 200 * static_cast<float>(exchange % 11)};
        };
        ASSERT_NO_FATAL_FAILURE(
            expect_concurrent(step, 200, {.seed = seed, .at_once = 100, .most_ahead = 16, .before = before}));
    }
}

/// Graphs of one, two and three exchanges of every rank, each captured on the rank's own stream.
class RankGraphs {
   public:
    RankGraphs(DcpGroup& group, const std::vector<GpuStream>& streams, std::vector<DcpWindow> windows)
        : group_(group), windows_(std::move(windows)) {
        while (results_.size() < windows_.size()) results_.push_back(group.make_results());
        for (int rank = 0; rank < group.world(); ++rank)
            graphs_.emplace_back(streams[static_cast<std::size_t>(rank)], [this, rank](Stream on) {
                harness::DcpRank& each = group_.rank(rank);
                for (std::size_t i = 0; i < windows_.size(); ++i) {
                    each.gather(windows_[i], on);
                    each.decode(windows_[i], on);
                    each.merge_to(results_[i][static_cast<std::size_t>(rank)], windows_[i], on);
                }
            });
    }
    const std::vector<DcpWindow>& windows() const { return windows_; }
    void poison() {
        for (DcpResults& each : results_) fill(each, 0xFF);
    }
    void replay(int rank, Stream stream) const { graphs_[static_cast<std::size_t>(rank)].replay(stream); }
    std::string difference() {
        for (std::size_t i = 0; i < windows_.size(); ++i)
            if (std::string text = test::difference(group_, windows_[i], results_[i]); !text.empty()) return text;
        return "";
    }

   private:
    DcpGroup& group_;
    std::vector<DcpWindow> windows_;
    std::vector<DcpResults> results_;
    std::vector<GpuGraph> graphs_;
};

// As engines do it: every rank replays graphs of its own, here in the same random order, and the ranks drift apart.
TEST_F(GpuDcpConcurrent, GraphsOfEachRankItsOwn) {
    for (const bool by_calls : {false, true}) {
        LimitedStep step({.rows = 6,
                          .head_offset = {0, 3, 5},
                          .width = 60,
                          .sinks = true,
                          .by_calls = by_calls,
                          .plan = {.kernel = "decode_latency", .splits = 1},
                          .seed = 180});
        DcpGroup& group = step.group();
        skip_unless_resident(group);
        std::vector<GpuStream> streams;
        for (int rank = 0; rank < group.world(); ++rank) streams.emplace_back(gpu());
        std::vector<std::unique_ptr<RankGraphs>> sets;
        const std::vector<std::vector<DcpWindow>> windows = {
            {{0, 3}}, {{1, 2}, {3, 3}}, {{2, 1}, {5, 1}, {4, 2}}, {{3, 1}}, {{1, 3}, {0, 2}, {2, 2}}};
        for (const auto& of_graph : windows) sets.push_back(std::make_unique<RankGraphs>(group, streams, of_graph));
        harness::Random random(181);
        std::vector<DcpWindow> before;
        std::uint32_t exchanges = 0;
        for (int round = 0; round < 100; ++round) {
            std::vector<std::size_t> order;
            while (order.size() < 6) {
                const auto set = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(sets.size())));
                if (repeats_rows(before, sets[set]->windows())) continue;
                before.insert(before.end(), sets[set]->windows().begin(), sets[set]->windows().end());
                exchanges += static_cast<std::uint32_t>(sets[set]->windows().size());
                order.push_back(set);
            }
            for (const auto& set : sets) set->poison();
            const int first = static_cast<int>(random.below(group.world()));
            for (int i = 0; i < group.world(); ++i) {
                const int rank = (first + i) % group.world();
                for (const std::size_t set : order)
                    sets[set]->replay(rank, streams[static_cast<std::size_t>(rank)].stream());
                if (random.chance(0.2)) std::this_thread::sleep_for(std::chrono::microseconds(random.below(2000)));
            }
            for (const GpuStream& stream : streams) stream.synchronize();
            for (const std::size_t set : order)
                ASSERT_EQ(sets[set]->difference(), "") << "round " << round << ", " << step.text();
        }
        EXPECT_EQ(exchanges_of(group), exchanges);
    }
}

// What cannot all be there at once is refused, with the numbers; nothing has run, and the group still works.
TEST_F(GpuDcpConcurrent, RefusedWhereNotAllFit) {
    LimitedStep step({.rows = 40,
                      .head_offset = {0, 30, 60},
                      .width = 130,
                      .plan = {.kernel = "decode_latency", .splits = 2},
                      .seed = 190});
    const std::vector<DcpWindow> windows = {{0, 40}};
    try {
        step.group().run_concurrent(windows);
        ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::unsupported) << error.what();
        const std::string text = error.what();
        EXPECT_NE(text.find(std::to_string(tested_device().sms) + " SMs"), std::string::npos) << text;
        EXPECT_NE(text.find("40 rows"), std::string::npos) << text;
    }
    EXPECT_EQ(exchanges_of(step.group()), 0U);
    step.expect_run(3);
    LimitedStep early({.plan = {.kernel = "decode_latency", .trigger = Trigger::start}, .seed = 191});
    EXPECT_THROW(early.group().check_all_resident(1), Error);
}

// As many as SPARSEMLA_DCP_STEPS says (scripts/soak.sh: 10^5), now and then with a CTA that is late.
TEST_F(GpuDcpConcurrent, Soak) {
    std::uint64_t seed = 200;
    for (DcpSpec spec : {small_groups()[0], small_groups()[1]}) {
        spec.seed = ++seed;
        LimitedStep step(spec);
        harness::Random random(seed);
        const auto before = [&](int rank, std::size_t) {
            constexpr DcpStage stages[] = {DcpStage::gather, DcpStage::decode, DcpStage::merge};
            step.group().mailbox(rank).delay = {
                .stage = random.chance(1.0 / 64) ? stages[random.below(3)] : DcpStage::none,
                .cta = static_cast<std::int32_t>(random.below(4)),
                .us = static_cast<float>(random.below(100))};
        };
        ASSERT_NO_FATAL_FAILURE(expect_concurrent(step, wanted_exchanges(2000),
                                                  {.seed = seed, .at_once = 128, .most_ahead = 12, .before = before}));
    }
}

}  // namespace
}  // namespace sparsemla::test
