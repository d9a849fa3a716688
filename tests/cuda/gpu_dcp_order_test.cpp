// Exchanges behind kernels that write their inputs late: query, records, lists, counts and sinks, by a kernel that lets
// the next one start long before it writes; and new queries in every replay of a graph.
#include <memory>

#include "tests/cuda/gpu_dcp.h"

namespace sparsemla::test {
namespace {

using harness::DcpResults;
using harness::DcpWindow;
using harness::GpuBuffer;
using harness::GpuGraph;
using harness::GpuStream;

constexpr double late_us = 300;  // launching a kernel takes a few
constexpr DcpStage stages[] = {DcpStage::gather, DcpStage::decode, DcpStage::merge};

/// Ranks whose inputs change between two contents of the same shape, which lie on the GPU too.
class TwoContents {
   public:
    explicit TwoContents(DcpSpec spec) : live(spec), old_step(spec), new_step(with_other_seed(spec)) {
        window = {0, spec.rows};
        results = live.group().make_results();
    }

    LimitedStep live;
    DcpStep old_step, new_step;
    DcpWindow window;
    DcpResults results;

    /// What kernels must write for a stage of a rank to read the new contents, or the old ones.
    std::vector<LateWrite> writes(DcpStage stage, int rank, bool to_new) {
        const std::vector<Memory> to = of_stage(live, stage, rank);
        const std::vector<Memory> from = of_stage(to_new ? new_step : old_step, stage, rank);
        EXPECT_EQ(to.size(), from.size());
        std::vector<LateWrite> list;
        for (std::size_t i = 0; i < to.size(); ++i) {
            EXPECT_EQ(to[i].bytes, from[i].bytes);
            list.push_back({static_cast<std::byte*>(to[i].data), static_cast<const std::byte*>(from[i].data),
                            std::min(to[i].bytes, from[i].bytes)});
        }
        return list;
    }

    /// Before an exchange, and waited for.
    void write_now(DcpStage stage, bool to_new, const GpuStream& stream) {
        for (int rank = 0; rank < live.group().world(); ++rank)
            if (const auto list = writes(stage, rank, to_new); !list.empty()) plain_write(list, 0, stream.stream());
        stream.synchronize();
    }
    void write_all_now(bool to_new, const GpuStream& stream) {
        for (const DcpStage stage : stages) write_now(stage, to_new, stream);
    }

    /// What an exchange gives whose inputs are there.
    DcpResults run(const GpuStream& stream) {
        DcpResults given = live.group().make_results();
        live.group().lockstep(window, stream.stream(), &given);
        stream.synchronize();
        return given;
    }

    /// An exchange in which `stage` (none: every one) reads what a kernel right before it writes late.
    void submit(DcpStage stage, bool to_new, double us, Stream on) {
        for (const DcpStage now : stages)
            for (int rank = 0; rank < live.group().world(); ++rank) {
                if (stage == DcpStage::none || stage == now)
                    if (const auto list = writes(now, rank, to_new); !list.empty()) late_write(list, us, on);
                call(now, rank, on);
            }
    }

   private:
    static DcpSpec with_other_seed(DcpSpec spec) {
        spec.seed += 1000;
        return spec;
    }
    static std::vector<Memory> of_stage(DcpStep& step, DcpStage stage, int rank) {
        harness::DcpInputs inputs = step.group().rank(rank).inputs();
        return stage == DcpStage::gather ? inputs.gather : stage == DcpStage::decode ? inputs.decode : inputs.merge;
    }
    void call(DcpStage stage, int rank, Stream on) {
        harness::DcpRank& each = live.group().rank(rank);
        if (stage == DcpStage::gather) return each.gather(window, on);
        if (stage == DcpStage::decode) return each.decode(window, on);
        each.merge_to(results[static_cast<std::size_t>(rank)], window, on);
    }
};

/// All forms of exchange, and what moves a kernel's first reads.
std::vector<DcpSpec> specs() {
    std::vector<DcpSpec> list = {
        {.rows = 5,
         .head_offset = {0, 9, 20},
         .width = 300,
         .query_dtype = DType::bf16,
         .sinks = true,
         .by_calls = true},
        {.rows = 2, .head_offset = {0, 5, 8}, .width = 90, .record = Record::fp8_ds_mla, .sinks = true},
        {.rows = 2, .head_offset = {0, 5, 8}, .width = 90, .bf16_query = true}};
    for (const Trigger trigger : {Trigger::start, Trigger::loaded, Trigger::end})
        for (const Gather gather : {Gather::copies, Gather::bulk}) {
            const PlanOptions options{.kernel = "decode_latency", .splits = 2, .gather = gather, .trigger = trigger};
            list.push_back({.rows = 5, .head_offset = {0, 9, 20}, .width = 300, .sinks = true, .plan = options});
            list.push_back({.rows = 2,
                            .head_offset = {0, 2, 4},
                            .width = 100,
                            .record = Record::fp8_512,
                            .query_dtype = DType::bf16,
                            .sinks = true,
                            .second_source = true,
                            .plan = options});
        }
    return list;
}

// Old contents are there when the exchange is submitted, the new ones when the stage's kernel may read (K25, B037).
TEST_F(GpuDcp, ALateWriterIsSeenByEveryStage) {
    std::uint64_t seed = 60;
    for (DcpSpec spec : specs()) {
        spec.seed = ++seed;
        TwoContents contents(spec);
        const std::string& text = contents.live.text();
        const GpuStream stream(gpu());
        contents.write_all_now(true, stream);
        DcpResults expected = contents.run(stream);
        contents.write_all_now(false, stream);
        DcpResults of_old = contents.run(stream);
        ASSERT_EQ(difference(contents.live.group(), contents.window, of_old), "") << text;
        ASSERT_FALSE(same_bytes(expected, of_old)) << text;
        for (const DcpStage late : {DcpStage::gather, DcpStage::decode, DcpStage::merge, DcpStage::none}) {
            if (late == DcpStage::merge && !spec.sinks) continue;
            const GpuGraph graph(stream, [&](Stream on) { contents.submit(late, true, late_us, on); });
            for (int round = 0; round < 6; ++round) {
                for (const DcpStage stage : stages)
                    contents.write_now(stage, late != DcpStage::none && late != stage, stream);
                fill(contents.results, 0xFF);
                if (round % 2 == 0)
                    contents.submit(late, true, late_us, stream.stream());
                else
                    graph.replay(stream.stream());
                stream.synchronize();
                ASSERT_TRUE(same_bytes(contents.results, expected))
                    << text << ": inputs of " << (late == DcpStage::none ? "all stages" : name(late)) << " late"
                    << (round % 2 == 0 ? "" : ", in a graph") << ", round " << round;
            }
        }
    }
}

/// On the GPU: where results of an exchange lie, and what they must be.
class ExpectedThere {
   public:
    explicit ExpectedThere(DcpResults& expected) {
        for (harness::DcpOutputs& outputs : expected)
            for (harness::DeviceTensor* tensor : {&outputs.out, &outputs.lse}) {
                const OwnedTensor& host = tensor->fetch();
                copies_.emplace_back(tested_device().device, host.size_bytes);
                copies_.back().upload(host.bytes.get(), host.size_bytes);
            }
    }
    void count_differences_of(const DcpResults& results, std::uint32_t* count, Stream on) const {
        std::size_t i = 0;
        for (const harness::DcpOutputs& outputs : results)
            for (const harness::DeviceTensor* tensor : {&outputs.out, &outputs.lse}) {
                const Memory memory = tensor->memory();
                count_differences(static_cast<const std::byte*>(memory.data), copies_[i++].data(), memory.bytes, count,
                                  on);
            }
    }

   private:
    std::vector<GpuBuffer> copies_;
};

// One or two rows, where every kernel is short: a graph of fill, write the query, gather, decode, merge and compare,
// for each of two queries, ten thousand replays of them in random order without a wait (B061).
TEST_F(GpuDcp, ANewQueryInEveryReplay) {
    for (const std::int64_t rows : {1, 2})
        for (const bool by_calls : {false, true}) {
            auto contents = std::make_unique<TwoContents>(
                DcpSpec{.rows = rows, .head_offset = {0, 4, 8}, .width = 100, .by_calls = by_calls, .seed = 80});
            const GpuStream stream(gpu());
            contents->write_now(DcpStage::decode, true, stream);
            GpuBuffer count(gpu(), sizeof(std::uint32_t));
            count.fill(0);
            auto* differences = reinterpret_cast<std::uint32_t*>(count.data());
            std::vector<DcpResults> results;
            std::vector<std::unique_ptr<ExpectedThere>> expected;
            std::vector<std::unique_ptr<GpuGraph>> graphs;
            for (const bool to_new : {false, true}) {
                contents->write_now(DcpStage::gather, to_new, stream);
                results.push_back(contents->run(stream));
                expected.push_back(std::make_unique<ExpectedThere>(results.back()));
                const ExpectedThere& wanted = *expected.back();
                graphs.push_back(std::make_unique<GpuGraph>(stream, [&, to_new](Stream on) {
                    for (const harness::DcpOutputs& outputs : contents->results)
                        for (const Memory& memory : {outputs.out.memory(), outputs.lse.memory()})
                            late_fill(static_cast<std::byte*>(memory.data), 0xFF, memory.bytes, on);
                    contents->submit(DcpStage::gather, to_new, 1, on);
                    wanted.count_differences_of(contents->results, differences, on);
                }));
            }
            ASSERT_FALSE(same_bytes(results[0], results[1])) << contents->live.text() << ": the query changes nothing";
            harness::Random random(81);
            const int replays = wanted_exchanges(10000);
            for (int replay = 0; replay < replays; ++replay) {
                graphs[static_cast<std::size_t>(random.below(2))]->replay(stream.stream());
                if (replay % 500 != 499 && replay + 1 < replays) continue;
                stream.synchronize();
                std::uint32_t found = 1;
                count.download(&found, sizeof found);
                ASSERT_EQ(found, 0U) << contents->live.text() << ", by replay " << replay;
            }
            exchanges_of(contents->live.group());
        }
}

}  // namespace
}  // namespace sparsemla::test
