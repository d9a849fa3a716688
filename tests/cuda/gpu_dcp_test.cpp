// Exchanges of ranks on a GPU, stage by stage on one stream: what a plan says, how many kernels there are, graphs of
// any number of exchanges.
#include <memory>

#include "tests/cuda/gpu_dcp.h"

namespace sparsemla::test {
namespace {

using harness::DcpResults;
using harness::DcpWindow;
using harness::GpuGraph;
using harness::GpuStream;

DcpWindow all_rows(const DcpStep& step) { return {0, step.step().rows}; }

// The first exchange of this program, whose kernels only prepare can have loaded (K29): it is captured before any runs.
TEST_F(GpuDcp, TheFirstExchangeMayBeCaptured) {
    LimitedStep step({.rows = 4, .head_offset = {0, 3, 5}, .width = 100, .sinks = true, .seed = 1});
    ASSERT_TRUE(step.group().plan().fuses_exchange) << step.text();
    const GpuStream stream(gpu());
    CapturedExchanges captured(step.group(), stream, {all_rows(step)});
    for (int replay = 0; replay < 3; ++replay) ASSERT_EQ(captured.replay(stream), "") << step.text();
    EXPECT_EQ(exchanges_of(step.group()), 3U);
    step.expect_oracle();
}

/// Shapes of small batches: every form of record and instantiation of the kernel.
std::vector<DcpSpec> small_batches() {
    constexpr DType bf16 = DType::bf16;
    return {{.rows = 5, .head_offset = equal_heads(8, 12), .width = 256},
            {.rows = 1, .head_offset = {0, 4, 8, 16}, .width = 640},
            {.rows = 2, .head_offset = {0, 1}, .width = 60, .record = Record::fp8_512, .bf16_query = true},
            {.rows = 3, .head_offset = {0, 5, 8}, .width = 130, .record = Record::fp8_512, .query_dtype = bf16},
            {.rows = 3, .head_offset = {0, 16, 32}, .width = 300, .sinks = true, .second_source = true},
            {.rows = 2, .head_offset = {0, 9, 24}, .width = 200, .query_dtype = bf16, .second_source = true},
            {.rows = 1, .head_offset = {0, 4, 8, 16}, .width = 512, .record = Record::fp8_ds_mla, .query_dtype = bf16},
            {.rows = 2, .head_offset = {0, 7, 9}, .width = 70, .record = Record::fp8_ds_mla_norope},
            {.rows = 2, .head_offset = {0, 7, 9}, .width = 150, .record = Record::bf16, .query_dtype = bf16},
            {.rows = 3, .head_offset = {0, 2, 4}, .width = 90, .record = Record::fp8_v4, .sinks = true},
            {.rows = 2, .head_offset = {0, 2, 4, 5}, .width = 90, .record = Record::fp8_v41},
            {.rows = 2, .head_offset = {0, 8, 16}, .width = 140, .record = Record::nvfp4_v41, .query_dtype = bf16},
            {.rows = 1, .head_offset = {0, 8, 16}, .width = 260, .record = Record::nvfp4_ds_mla, .query_dtype = bf16}};
}

// Gather, decode, merge: three launches a rank, whatever the shape, and nothing else in the graph (B113). Each capture
// is the first use of its instantiation, and its replays are exact.
TEST_F(GpuDcp, AnExchangeIsThreeKernels) {
    std::uint64_t seed = 10;
    for (DcpSpec spec : small_batches()) {
        spec.seed = ++seed;
        LimitedStep step(spec);
        const Plan& plan = step.group().plan();
        EXPECT_EQ(plan.schedule.kernel, "decode_latency") << step.text() << '\n' << plan.describe();
        EXPECT_TRUE(plan.fuses_exchange) << step.text();
        const GpuStream stream(gpu());
        CapturedExchanges captured(step.group(), stream, {all_rows(step)});
        EXPECT_EQ(captured.graph().kernels(), 3 * step.group().world()) << step.text();
        EXPECT_EQ(captured.graph().nodes(), 3 * step.group().world()) << step.text();
        for (int replay = 0; replay < 3; ++replay) ASSERT_EQ(captured.replay(stream), "") << step.text();
        step.expect_oracle();
    }
}

// By separate calls there are two more.
TEST_F(GpuDcp, SeparateCallsAreFiveKernels) {
    LimitedStep step({.rows = 4, .head_offset = {0, 3, 5}, .width = 100, .by_calls = true, .seed = 30});
    const GpuStream stream(gpu());
    CapturedExchanges captured(step.group(), stream, {all_rows(step), {1, 2}});
    EXPECT_EQ(captured.graph().nodes(), 2 * 5 * step.group().world()) << step.text();
    for (int replay = 0; replay < 3; ++replay) ASSERT_EQ(captured.replay(stream), "") << step.text();
}

/// Graphs of one, two and three exchanges, and single calls between them.
class MixedExchanges {
   public:
    explicit MixedExchanges(const DcpSpec& spec) : step_(spec), stream_(tested_device().device) {
        const std::vector<std::vector<DcpWindow>> windows = {
            {{0, 6}}, {{1, 2}, {3, 3}}, {{2, 1}, {5, 1}, {4, 2}}, {{3, 1}}, {{5, 1}, {0, 2}, {1, 5}}};
        for (const auto& of_graph : windows)
            graphs_.push_back(std::make_unique<CapturedExchanges>(step_.group(), stream_, of_graph));
    }

    LimitedStep& step() { return step_; }
    std::uint32_t exchanges() const { return exchanges_; }

    /// Some graphs and calls in a row, without a wait between them; then what each gave last.
    std::string play(int pieces, harness::Random& random) {
        for (const auto& graph : graphs_) graph->poison();
        std::vector<bool> played(graphs_.size());
        std::vector<std::pair<DcpWindow, DcpResults>> eager;
        eager.reserve(static_cast<std::size_t>(pieces));
        for (int i = 0; i < pieces;) {
            const auto which = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(graphs_.size()) + 2));
            const std::int64_t first = random.below(6);
            const DcpWindow window{first, 1 + random.below(6 - first)};
            const bool is_graph = which < graphs_.size();
            const std::vector<DcpWindow> next = is_graph ? graphs_[which]->windows() : std::vector{window};
            if (repeats_rows(before_, next)) continue;
            before_.insert(before_.end(), next.begin(), next.end());
            exchanges_ += static_cast<std::uint32_t>(next.size());
            ++i;
            if (is_graph) {
                graphs_[which]->graph().replay(stream_.stream());
                played[which] = true;
            } else {
                DcpResults& results = eager.emplace_back(window, step_.group().make_results()).second;
                step_.group().lockstep(window, stream_.stream(), &results);
            }
        }
        stream_.synchronize();
        for (std::size_t i = 0; i < graphs_.size(); ++i)
            if (std::string text = played[i] ? graphs_[i]->difference() : ""; !text.empty()) return text;
        for (auto& [window, results] : eager)
            if (std::string text = difference(step_.group(), window, results); !text.empty())
                return "by calls: " + text;
        return "";
    }

   private:
    LimitedStep step_;
    GpuStream stream_;
    std::vector<std::unique_ptr<CapturedExchanges>> graphs_;
    std::vector<DcpWindow> before_;
    std::uint32_t exchanges_ = 0;
};

// Odd numbers of exchanges in a graph, other rows in every graph, replayed in any order with calls between them: parity
// and epoch go on (B066). Every piece of the first half is compared, of the second half those that end a run of eight.
TEST_F(GpuDcp, GraphsOfAnyNumberOfExchanges) {
    for (const bool by_calls : {false, true}) {
        MixedExchanges mixed({.rows = 6,
                              .head_offset = {0, 2, 3, 5},
                              .width = 90,
                              .sinks = true,
                              .by_calls = by_calls,
                              .seed = by_calls ? 41U : 40U});
        harness::Random random(42);
        for (int round = 0; round < 320; ++round)
            ASSERT_EQ(mixed.play(1, random), "") << "round " << round << ", " << mixed.step().text();
        for (int round = 0; round < 40; ++round)
            ASSERT_EQ(mixed.play(8, random), "") << "round " << round << " of eight, " << mixed.step().text();
        EXPECT_EQ(exchanges_of(mixed.step().group()), mixed.exchanges());
    }
}

// Ranks own different numbers of heads, of a mailbox for more rows than any exchange has; windows of every size.
TEST_F(GpuDcp, ManyWindowsOfOneGroup) {
    for (const int world : {1, 2, 5, 16}) {
        std::vector<std::int64_t> offset{0};
        for (int rank = 0; rank < world; ++rank) offset.push_back(offset.back() + 1 + rank % 3);
        LimitedStep step({.rows = 12, .head_offset = offset, .interleave = 4, .width = 150, .seed = 50});
        step.expect_run(60);
        step.expect_oracle();
    }
}

}  // namespace
}  // namespace sparsemla::test
