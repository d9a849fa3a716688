// What a GPU refuses is an Error, and the next call works: no error is kept, no context is lost. Each test has an
// instantiation of its own, as what one of them was allowed stays allowed for the program's life.
#include "tests/cuda/gpu_calls.h"

namespace sparsemla::test {
namespace {

using harness::GpuGraph;
using harness::GpuStream;

class GpuErrors : public OnGpu {
   protected:
    /// The arguments on the GPU; nothing is prepared.
    static DeviceCall unprepared(const Step& step, const Plan& plan) {
        return {plan,
                step.args,
                {.surroundings = {step.out_memory().surroundings(), step.lse_memory().surroundings()},
                 .own_memory = false}};
    }

    /// Calls, and says how that failed: "" where it did not.
    template <class Call>
    static std::string error_of(const Call& call) {
        try {
            call();
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::device) << error.what();
            EXPECT_NE(std::string(error.what()).find("decode_latency"), std::string::npos) << error.what();
            return error.what();
        }
        return "";
    }

    /// After whatever failed: the GPU works, and a prepared plan gives the right answer.
    static void expect_works(Step& step, const Plan& plan, DeviceCall& call) {
        EXPECT_STREQ(kept_error(), "");
        prepare(plan, call.args.state, call.stream());
        step.poison_outputs();
        call.decode(plan);
        const Result result = step.collect(plan);
        expect_oracle(step, result);
        expect_same_bits(result, step.run(plan), text_of(plan));
        EXPECT_STREQ(kept_error(), "");
    }
};

TEST_F(GpuErrors, APlanThatNobodyPrepared) {
    Step step = random_step({.rows = 2, .heads = 16, .widths = {300}}, 1);
    const Plan plan = step.plan({.splits = 2, .tile_heads = 16});
    DeviceCall call = unprepared(step, plan);
    step.poison_outputs();
    call.upload_outputs();
    const std::string error = error_of([&] { decode(plan, call.args, call.stream()); });
    EXPECT_STREQ(kept_error(), "");
    call.download_outputs();
    if (!error.empty()) {
        EXPECT_TRUE(step.outputs_untouched()) << error;
    }
    expect_works(step, plan, call);
}

TEST_F(GpuErrors, APlanThatNobodyPreparedInACapture) {
    Step step = random_step({.rows = 2, .heads = 16, .record = Record::fp8_512, .widths = {300}}, 2);
    const Plan plan = step.plan({.splits = 2, .tile_heads = 16});
    DeviceCall call = unprepared(step, plan);
    const GpuStream stream(tested_device().device);
    const std::string error = error_of([&] { GpuGraph(stream, [&](Stream on) { decode(plan, call.args, on); }); });
    EXPECT_NO_THROW(stream.synchronize()) << error;
    expect_works(step, plan, call);
    const GpuGraph graph(stream, [&](Stream on) { decode(plan, call.args, on); });
    expect_same_bits(replay(step, plan, call, graph, stream), step.run(plan), "captured later");
}

// Prepared for little shared memory, called with much: the larger plan was not prepared.
TEST_F(GpuErrors, ALargerPlanThanWasPrepared) {
    Step step = random_step({.rows = 2, .heads = 16, .widths = {600}, .query_dtype = DType::bf16}, 3);
    const Plan small = step.plan({.splits = 2, .tile_heads = 16, .stages = 1});
    const Plan large = step.plan({.splits = 2, .tile_heads = 16, .stages = 4});
    DeviceCall call = step.place(small);
    error_of([&] { decode(large, call.args, call.stream()); });
    EXPECT_STREQ(kept_error(), "");
    EXPECT_NO_THROW(call.download_outputs());
    expect_works(step, large, call);
    expect_works(step, small, call);
}

// What one plan's prepare allows must not be taken away by another's.
TEST_F(GpuErrors, PreparedPlansStayUsable) {
    Step step = random_step(
        {.rows = 2, .heads = 16, .record = Record::fp8_512, .widths = {600}, .query_dtype = DType::bf16}, 4);
    const Plan large = step.plan({.splits = 2, .tile_heads = 16, .stages = 4});
    const Plan small = step.plan({.splits = 2, .tile_heads = 16, .stages = 1});
    DeviceCall call = step.place(large);
    const auto run = [&](const Plan& plan) {
        step.poison_outputs();
        call.decode(plan);
        return step.collect(plan);
    };
    const Result expected = run(large);
    prepare(small, call.args.state, call.stream());
    expect_same_bits(run(small), expected, text_of(small));
    expect_same_bits(run(large), expected, text_of(large) + ", after a smaller plan was prepared");
    expect_oracle(step, expected);
}

// Refused before anything runs, and nothing is left behind.
TEST_F(GpuErrors, RefusedArguments) {
    Step step = random_step({.rows = 2, .heads = 16, .widths = {100, 100}}, 5);
    const Plan plan = step.plan();
    DeviceCall call = step.place(plan);
    DecodeArgs args = call.args;
    args.rows = 3;
    EXPECT_THROW(decode(plan, args, call.stream()), Error);
    args = call.args;
    args.query.device = {};
    EXPECT_THROW(decode(plan, args, call.stream()), Error);
    args = call.args;
    args.validate = true;
    EXPECT_THROW(decode(plan, args, call.stream()), Error);
    expect_works(step, plan, call);
}

// The self-test of `prepare` is not about the caller's scale of P: neither 300 nor half of it is an E4M3.
TEST_F(GpuErrors, AnyScaleOfPIsPrepared) {
    Step step = random_step({.rows = 1, .heads = 16, .record = Record::fp8_512, .widths = {100}}, 6);
    const Plan plan = step.plan({.p_format = PFormat::e4m3, .p_scale = 300.0F});
    DeviceCall call = step.place(plan);
    expect_works(step, plan, call);
}

}  // namespace
}  // namespace sparsemla::test
