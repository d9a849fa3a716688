// Where decode stands among other work: behind kernels that write its inputs late, before kernels that read its
// outputs, on its own stream and no other, with the current device as it was.
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "tests/cuda/gpu_calls.h"

namespace sparsemla::test {
namespace {

using harness::GpuBuffer;
using harness::GpuGraph;
using harness::GpuStream;

constexpr double late_us = 300;  // launching a kernel takes a few

class GpuOrder : public OnGpu {
   protected:
    Device gpu() const { return tested_device().device; }
};

std::vector<RandomSpec> specs() {
    return {{.rows = 5, .heads = 96, .widths = {300}},
            {.rows = 2, .heads = 16, .record = Record::fp8_512, .widths = {128, 512}, .query_dtype = DType::bf16}};
}

std::vector<PlanOptions> wishes() {
    std::vector<PlanOptions> list;
    for (const Trigger trigger : {Trigger::start, Trigger::loaded, Trigger::end})
        for (const int splits : {1, 4})
            for (const Gather gather : {Gather::copies, Gather::bulk})
                list.push_back({.splits = splits, .gather = gather, .trigger = trigger});
    return list;
}

/// Two contents of a step's inputs, records included: what the GPU holds, and what a kernel will write.
struct Late {
    Late(const RandomSpec& spec, const PlanOptions& options)
        : step(random_step(spec, 41)), plan(step.plan(options)), call(step.place(plan)) {
        const std::vector<InputBytes> inputs = all_inputs(step, call.args);
        old_contents = std::make_unique<Staged>(inputs);
        randomise(step, 43);
        shuffle(step, 44);
        new_contents = std::make_unique<Staged>(inputs);
        expected = step.run(plan);
    }

    /// The new contents while the GPU still holds the old ones.
    Result run(const std::function<void()>& submit) {
        const GpuStream stream(tested_device().device);
        plain_write(old_contents->writes(), 0, stream.stream());
        stream.synchronize();
        return run_by(step, plan, call, submit);
    }

    Step step;
    Plan plan;
    DeviceCall call;
    std::unique_ptr<Staged> old_contents, new_contents;
    Result expected;
};

// Lists, counts, queries, sinks and records by a kernel that lets decode start long before it writes.
TEST_F(GpuOrder, ALateWriterIsSeen) {
    for (const RandomSpec& spec : specs())
        for (const PlanOptions& options : wishes()) {
            Late late(spec, options);
            const GpuStream stream(gpu());
            const auto submit = [&](Stream on) {
                late_write(late.new_contents->writes(), late_us, on);
                decode(late.plan, late.call.args, on);
            };
            const std::string what = to_string(spec) + ", " + text_of(late.plan);
            for (int round = 0; round < 3; ++round) {
                const Result got = late.run([&] {
                    submit(stream.stream());
                    stream.synchronize();
                });
                ASSERT_NO_FATAL_FAILURE(expect_same_bits(got, late.expected, what));
            }
            const GpuGraph graph(stream, submit);
            for (int round = 0; round < 3; ++round) {
                const Result got = late.run([&] {
                    graph.replay(stream.stream());
                    stream.synchronize();
                });
                ASSERT_NO_FATAL_FAILURE(expect_same_bits(got, late.expected, what + ", in a graph"));
            }
        }
}

// Behind a writer that knows nothing of dependent launches, and before a reader like that.
TEST_F(GpuOrder, OrdinaryKernelsBeforeAndBehind) {
    for (const RandomSpec& spec : specs())
        for (const PlanOptions& options : wishes()) {
            Late late(spec, options);
            const GpuStream stream(gpu());
            const auto [out, bytes] = output_bytes(late.call.args)[0];
            const GpuBuffer copy(gpu(), bytes);
            const Result got = late.run([&] {
                plain_write(late.new_contents->writes(), late_us, stream.stream());
                decode(late.plan, late.call.args, stream.stream());
                plain_write({{copy.data(), out, bytes}}, 0, stream.stream());
                late_fill(out, 0x77, bytes, stream.stream());
                plain_write({{out, copy.data(), bytes}}, 0, stream.stream());
                stream.synchronize();
            });
            ASSERT_NO_FATAL_FAILURE(expect_same_bits(got, late.expected, to_string(spec) + ", " + text_of(late.plan)));
        }
}

// Inputs and outputs change hands many times without a wait by the host.
TEST_F(GpuOrder, AlternatingWritersAndCalls) {
    for (const Trigger trigger : {Trigger::start, Trigger::loaded, Trigger::end}) {
        Step step = random_step({.rows = 4, .heads = 48, .widths = {500}}, 51);
        const Plan plan = step.plan({.splits = 4, .trigger = trigger});
        DeviceCall call = step.place(plan);
        const GpuStream stream(gpu());
        const auto outputs = output_bytes(call.args);
        std::vector<Staged> contents;
        std::vector<std::vector<GpuBuffer>> expected(2);
        for (std::size_t i = 0; i < 2; ++i) {
            shuffle(step, 60 + i);
            contents.emplace_back(changing_inputs(step, call.args));
            refresh(changing_inputs(step, call.args));
            for (const auto& [at, bytes] : outputs) late_fill(at, 0x77, bytes, stream.stream());
            decode(plan, call.args, stream.stream());
            for (const auto& [at, bytes] : outputs) {
                expected[i].emplace_back(gpu(), bytes);
                plain_write({{expected[i].back().data(), at, bytes}}, 0, stream.stream());
            }
            stream.synchronize();
        }
        GpuBuffer differences(gpu(), 4);
        differences.fill(0);
        for (int round = 0; round < 200; ++round) {
            const std::size_t i = static_cast<std::size_t>(round) % 2;
            for (const auto& [at, bytes] : outputs) late_fill(at, 0x77, bytes, stream.stream());
            late_write(contents[i].writes(), round % 7, stream.stream());
            decode(plan, call.args, stream.stream());
            for (std::size_t k = 0; k < outputs.size(); ++k)
                count_differences(outputs[k].first, expected[i][k].data(), outputs[k].second,
                                  reinterpret_cast<std::uint32_t*>(differences.data()), stream.stream());
        }
        stream.synchronize();
        std::uint32_t count = 1;
        differences.download(&count, 4);
        EXPECT_EQ(count, 0U) << text_of(plan);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
TEST_F(GpuOrder, NoOtherStreamIsWaitedFor) {
    Step step = random_step({.rows = 2, .heads = 16}, 71);
    const Plan plan = step.plan();
    DeviceCall call = step.place(plan);
    const Result expected = step.run(plan);
    const GpuStream stream(gpu());
    step.poison_outputs();
    call.upload_outputs();
    {
        Holder held{Stream{}};  // the legacy default stream is busy
        decode(plan, call.args, stream.stream());
        const auto start = std::chrono::steady_clock::now();
        while (!is_done(stream.stream()) && std::chrono::steady_clock::now() - start < std::chrono::seconds(5))
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_TRUE(is_done(stream.stream())) << "decode waits for the default stream";
        EXPECT_FALSE(held.ended());
        held.release();
    }
    call.download_outputs();
    expect_same_bits(step.collect(plan), expected, "beside a busy default stream");
}

TEST_F(GpuOrder, ANullStreamIsTheDefaultStream) {
    Step step = random_step({.rows = 2, .heads = 16}, 72);
    const Plan plan = step.plan();
    DeviceCall call = step.place(plan);
    const Result expected = step.run(plan);
    const GpuStream stream(gpu());
    step.poison_outputs();
    call.upload_outputs();
    bool waited = false;
    {
        Holder held{Stream{}};
        decode(plan, call.args, Stream{});
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        waited = !is_done(Stream{});
        held.release();
    }
    EXPECT_TRUE(waited);
    call.download_outputs();
    expect_same_bits(step.collect(plan), expected, "on the default stream");
}

TEST_F(GpuOrder, TheCurrentDeviceStays) {
    Step step = random_step({.rows = 2, .heads = 16}, 73);
    const int before = current_device();
    for (int index = 0; index < harness::gpu_count(); ++index) {
        set_current_device(index);
        const Plan plan = step.plan();
        EXPECT_EQ(current_device(), index) << "after make_plan";
        DeviceCall call = step.place(plan);
        prepare(plan, call.args.state, call.stream());
        EXPECT_EQ(current_device(), index) << "after prepare";
        decode(plan, call.args, call.stream());
        EXPECT_EQ(current_device(), index) << "after decode";
        set_current_device(index);
        expect_oracle(step, step.run(plan));
        EXPECT_EQ(current_device(), index);
    }
    set_current_device(before);
}

}  // namespace
}  // namespace sparsemla::test
