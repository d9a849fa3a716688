// decode in CUDA graphs: inputs that change between replays, a first call inside the capture, many calls in one graph
// with programmatic edges, and calls that read what the call before them wrote.
#include <algorithm>
#include <memory>

#include "tests/cuda/gpu_calls.h"

namespace sparsemla::test {
namespace {

using harness::GpuBuffer;
using harness::GpuGraph;
using harness::GpuStream;

class GpuGraphs : public OnGpu {
   protected:
    Device gpu() const { return tested_device().device; }
};

/// Steps of different instantiations and cluster sizes.
std::vector<RandomSpec> specs() {
    return {{.rows = 5, .heads = 96, .widths = {700}},
            {.rows = 2, .heads = 12, .record = Record::fp8_512, .widths = {128, 512}},
            {.rows = 1, .heads = 128, .widths = {2048}, .query_dtype = DType::bf16, .sinks = false},
            {.rows = 7, .heads = 17, .record = Record::fp8_512, .widths = {64}, .out_dtype = DType::f32},
            {.rows = 3, .heads = 33, .widths = {65, 1}, .query_dtype = DType::bf16, .lse_base = LseBase::two}};
}

std::vector<PlanOptions> wishes() {
    return {{},
            {.splits = 1},
            {.splits = 3, .cluster_tiles = 2, .gather = Gather::bulk},
            {.splits = 5, .transport = Transport::bulk, .trigger = Trigger::start},
            {.p_format = PFormat::e4m3, .splits = 16, .trigger = Trigger::end}};
}

// This program runs this instantiation nowhere before: what a first call must load, prepare has loaded.
TEST_F(GpuGraphs, AFirstCallMayBeCaptured) {
    Step step = random_step({.rows = 2, .heads = 32, .record = Record::fp8_512, .widths = {200}}, 7);
    for (const int tile : {32, 16}) {
        const PlanOptions options{.splits = 4, .tile_heads = tile};
        if (!supports(step.problem, step.device, options)) continue;
        const Plan plan = step.plan(options);
        DeviceCall call = step.place(plan);
        const GpuStream stream(gpu());
        const GpuGraph graph(stream, [&](Stream on) { decode(plan, call.args, on); });
        const Result got = replay(step, plan, call, graph, stream);
        expect_same_bits(got, step.run(plan), text_of(plan));
        expect_oracle(step, got);
    }
}

TEST_F(GpuGraphs, ReplaysSeeChangedInputs) {
    std::uint64_t seed = 100;
    for (const RandomSpec& spec : specs()) {
        Step step = random_step(spec, ++seed);
        for (const PlanOptions& options : wishes()) {
            if (!supports(step.problem, step.device, options)) continue;
            const Plan plan = step.plan(options);
            DeviceCall call = step.place(plan);
            const GpuStream stream(gpu());
            const GpuGraph graph(stream, [&](Stream on) { decode(plan, call.args, on); });
            for (int round = 0; round < 6; ++round) {
                if (round > 0) shuffle(step, ++seed);
                refresh(changing_inputs(step, call.args));
                const Result got = replay(step, plan, call, graph, stream);
                const Result expected = step.run(plan);
                ASSERT_NO_FATAL_FAILURE(expect_same_bits(
                    got, expected, to_string(spec) + ", " + text_of(plan) + ", replay " + std::to_string(round)));
                if (round == 1) expect_oracle(step, got);
                if (HasFailure()) return;
            }
        }
    }
}

/// A step with its plan, its place on the GPU and what it gives when called alone.
struct Alone {
    Alone(const RandomSpec& spec, std::uint64_t seed, const PlanOptions& options = {})
        : step(random_step(spec, seed)), plan(step.plan(options)), call(step.place(plan)), expected(step.run(plan)) {}

    Step step;
    Plan plan;
    DeviceCall call;
    Result expected;
};

TEST_F(GpuGraphs, ManyCallsInOneGraph) {
    std::vector<std::unique_ptr<Alone>> calls;
    for (const RandomSpec& spec : specs()) calls.push_back(std::make_unique<Alone>(spec, 200 + calls.size()));
    const GpuStream stream(gpu());
    const GpuGraph graph(stream, [&](Stream on) {
        for (int repeat = 0; repeat < 5; ++repeat)
            for (const auto& alone : calls) decode(alone->plan, alone->call.args, on);
    });
    for (int round = 0; round < 20; ++round) {
        for (const auto& alone : calls) {
            alone->step.poison_outputs();
            alone->call.upload_outputs();
        }
        graph.replay(stream.stream());
        stream.synchronize();
        for (const auto& alone : calls) {
            alone->call.download_outputs();
            ASSERT_NO_FATAL_FAILURE(expect_same_bits(alone->step.collect(alone->plan), alone->expected,
                                                     text_of(alone->plan) + ", round " + std::to_string(round)));
        }
    }
}

// Each call's query is the output of the call before it. All outputs are NaN before a replay: a call that reads before
// the one before it has ended gives NaN.
TEST_F(GpuGraphs, AChainOfCallsThatReadEachOther) {
    constexpr int links = 24;
    constexpr std::int64_t rows = 3, heads = 32;
    const RandomSpec spec{.rows = rows,
                          .heads = heads,
                          .record = Record::fp8_512,
                          .widths = {256},
                          .query_dtype = DType::bf16,
                          .sinks = false,
                          .lse = false};
    Step steps[] = {random_step(spec, 300), random_step(spec, 301)};
    for (Step& step : steps)
        for (std::int64_t row = 0; row < rows; ++row) step.count(row, 200 + 20 * row);
    constexpr std::size_t bytes = rows * heads * value_dims * 2;
    for (const Trigger trigger : {Trigger::start, Trigger::loaded, Trigger::end}) {
        const Plan plan = steps[0].plan({.splits = 4, .trigger = trigger});
        DeviceCall calls[] = {steps[0].place(plan), steps[1].place(plan)};
        std::vector<GpuBuffer> values;
        for (int i = 0; i <= links; ++i) values.emplace_back(gpu(), bytes);
        std::vector<std::uint16_t> first(bytes / 2);
        for (std::size_t i = 0; i < first.size(); ++i)
            first[i] = float_to_bf16(static_cast<float>(i * 37 % 101) / 50 - 1);
        values[0].upload(first.data(), bytes);
        const auto poison = [&] {
            for (int i = 1; i <= links; ++i) values[static_cast<std::size_t>(i)].fill(0xFF);
        };
        const auto last = [&] {
            std::vector<std::uint16_t> held(bytes / 2);
            values.back().download(held.data(), bytes);
            return held;
        };
        const auto link = [&](int i, Stream on) {
            DecodeArgs args = calls[i % 2].args;
            const auto at = [&](int k) { return values[static_cast<std::size_t>(k)].data(); };
            args.query = dense(static_cast<const std::byte*>(at(i)), DType::bf16, {rows, heads, value_dims}, gpu());
            args.out = dense(at(i + 1), DType::bf16, {rows, heads, value_dims}, gpu());
            decode(plan, args, on);
        };
        const GpuStream stream(gpu());
        poison();
        for (int i = 0; i < links; ++i) {
            link(i, stream.stream());
            stream.synchronize();
        }
        const std::vector<std::uint16_t> expected = last();
        EXPECT_TRUE(std::ranges::none_of(expected, [](std::uint16_t bits) { return std::isnan(bf16_to_float(bits)); }));
        const GpuGraph graph(stream, [&](Stream on) {
            for (int i = 0; i < links; ++i) link(i, on);
        });
        for (int round = 0; round < 20; ++round) {
            poison();
            if (round % 2 == 0)
                graph.replay(stream.stream());
            else
                for (int i = 0; i < links; ++i) link(i, stream.stream());
            stream.synchronize();
            ASSERT_EQ(last(), expected) << text_of(plan) << ", round " << round;
        }
    }
}

}  // namespace
}  // namespace sparsemla::test
