// Ranks that never come, on a GPU: the others' exchange ends after the wait limit with a status that names who was
// missing, NaN in the outputs, and everything else goes on; after a reset so does the group.
#include <chrono>
#include <cmath>
#include <thread>

#include "tests/cuda/gpu_dcp.h"

namespace sparsemla::test {
namespace {

using harness::DcpGroup;
using harness::DcpOutputs;
using harness::DcpWindow;
using harness::GpuStream;

double seconds_since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Every element of the first rows is NaN, and not what it was filled with.
void expect_nan(DcpOutputs& outputs, std::int64_t rows, const std::string& what) {
    const OwnedTensor &out = outputs.out.fetch(), &lse = outputs.lse.fetch();
    const std::int64_t heads = out.shape[1];
    const auto* values = reinterpret_cast<const std::uint16_t*>(out.bytes.get());
    const auto* lses = reinterpret_cast<const float*>(lse.bytes.get());
    for (std::int64_t i = 0; i < rows * heads; ++i) {
        ASSERT_TRUE(std::isnan(lses[i])) << what << ": lse of row " << i / heads << ", head " << i % heads;
        for (int d = 0; d < value_dims; ++d)
            ASSERT_TRUE(std::isnan(bf16_to_float(values[i * value_dims + d])))
                << what << ": out of row " << i / heads << ", head " << i % heads << ", dim " << d;
    }
}

struct Missing {
    DcpStage stage = DcpStage::decode;
    std::uint32_t exchange = 0;
};

void expect_status(const MailboxStatus& status, const Missing& missing, std::int64_t rows, const std::string& what) {
    EXPECT_TRUE(status.failed) << what;
    EXPECT_EQ(status.stage, missing.stage) << what << ": " << status.text();
    EXPECT_EQ(status.missing_rank, 1) << what << ": " << status.text();
    EXPECT_GE(status.row, 0) << what << ": " << status.text();
    EXPECT_LT(status.row, rows) << what << ": " << status.text();
    EXPECT_EQ(status.exchange, missing.exchange) << what << ": " << status.text();
    EXPECT_EQ(status.exchanges, missing.exchange) << what << ": those before it are complete";
    EXPECT_NE(status.text().find("rank 1"), std::string::npos) << status.text();
    EXPECT_NE(status.text().find(std::string(name(missing.stage))), std::string::npos) << status.text();
}

class GpuDcpLiveness : public GpuDcp {
   protected:
    static constexpr double limit_s = 0.15;
    static constexpr double slack_s = 0.1;  // of the host, and of kernels that wait for nothing

    /// An exchange that rank 0 takes part in alone, to `outputs`. Waits, and returns the seconds.
    static double alone(DcpGroup& group, const DcpWindow& window, const GpuStream& stream, DcpOutputs& outputs) {
        outputs.fill(0);
        const auto begin = std::chrono::steady_clock::now();
        group.rank(0).gather(window, stream.stream());
        group.rank(0).decode(window, stream.stream());
        group.rank(0).merge_to(outputs, window, stream.stream());
        stream.synchronize();
        return seconds_since(begin);
    }

    /// Rank 0's exchange ends in time with NaN and this status; the next ones end at once; after a reset all is well.
    static void expect_failure(DcpStep& step, const DcpWindow& window, const Missing& missing) {
        DcpGroup& group = step.group();
        const GpuStream stream(gpu());
        DcpOutputs outputs = group.rank(0).make_outputs();
        const std::string what = std::string(name(missing.stage)) + " waits, " + step.text();
        const double seconds = alone(group, window, stream, outputs);
        EXPECT_GE(seconds, 0.98 * limit_s) << what;
        EXPECT_LE(seconds, 2 * limit_s + slack_s) << what;
        ASSERT_NO_FATAL_FAILURE(expect_nan(outputs, window.rows, what));
        expect_status(status(group.mailbox(0)), missing, window.rows, what);
        for (int later = 0; later < 3; ++later) {
            const double at_once = alone(group, window, stream, outputs);
            EXPECT_LE(at_once, limit_s / 2) << what << ", later exchange " << later;
            ASSERT_NO_FATAL_FAILURE(expect_nan(outputs, window.rows, what));
            expect_status(status(group.mailbox(0)), missing, window.rows, what);
        }
        expect_recovery(step, what);
    }

    /// Nothing is in flight. No error is kept, a reset makes the group as new.
    static void expect_recovery(DcpStep& step, const std::string& what) {
        EXPECT_STREQ(kept_error(), "") << what;
        step.group().reset();
        EXPECT_EQ(exchanges_of(step.group()), 0U) << what;
        step.expect_run(10);
        EXPECT_EQ(exchanges_of(step.group()), 10U) << what;
    }
};

DcpSpec spec_of(bool by_calls, DType query = DType::f8_e4m3) {
    return {.rows = 8,
            .head_offset = {0, 3, 5},
            .width = 130,
            .query_dtype = query,
            .sinks = true,
            .by_calls = by_calls,
            .seed = 61};
}

// Where a rank has records, its decode misses the query's heads; the first exchange, and one after others (B069, B070).
TEST_F(GpuDcpLiveness, ARankThatNeverGathers) {
    for (const bool by_calls : {false, true})
        for (const DType query : {DType::f8_e4m3, DType::bf16})
            for (const int before : {0, 3}) {
                LimitedStep step(spec_of(by_calls, query), limit_s);
                if (before > 0) step.expect_run(before);
                const DcpWindow window{row_of_all_ranks(step), 1};
                ASSERT_NO_FATAL_FAILURE(expect_failure(
                    step, window, {.stage = DcpStage::decode, .exchange = static_cast<std::uint32_t>(before)}));
            }
}

// It has gathered, and pushes nothing: merge misses its results.
TEST_F(GpuDcpLiveness, ARankThatNeverDecodes) {
    for (const bool by_calls : {false, true})
        for (const int before : {0, 3}) {
            LimitedStep step(spec_of(by_calls), limit_s);
            if (before > 0) step.expect_run(before);
            const DcpWindow window{0, 8};
            const GpuStream stream(gpu());
            step.group().rank(1).gather(window, stream.stream());
            stream.synchronize();
            ASSERT_NO_FATAL_FAILURE(expect_failure(
                step, window, {.stage = DcpStage::merge, .exchange = static_cast<std::uint32_t>(before)}));
        }
}

// It takes part with fewer rows: the first row too many is named, by whichever stage misses it.
TEST_F(GpuDcpLiveness, ARankOfFewerRows) {
    LimitedStep step(spec_of(false), limit_s);
    DcpGroup& group = step.group();
    std::vector<GpuStream> streams;
    for (int rank = 0; rank < 2; ++rank) streams.emplace_back(gpu());
    const DcpWindow more{0, 3}, fewer{0, 2};
    DcpOutputs outputs[] = {group.rank(0).make_outputs(), group.rank(1).make_outputs()};
    for (DcpOutputs& each : outputs) each.fill(0);
    for (int rank = 0; rank < 2; ++rank) group.rank(rank).gather(rank == 0 ? more : fewer, streams[0].stream());
    for (int rank = 0; rank < 2; ++rank) group.rank(rank).decode(rank == 0 ? more : fewer, streams[0].stream());
    for (int rank = 0; rank < 2; ++rank)
        group.rank(rank).merge_to(outputs[rank], rank == 0 ? more : fewer, streams[0].stream());
    streams[0].synchronize();
    const MailboxStatus status_of_more = status(group.mailbox(0));
    EXPECT_TRUE(status_of_more.failed);
    EXPECT_EQ(status_of_more.missing_rank, 1) << status_of_more.text();
    EXPECT_EQ(status_of_more.row, 2) << status_of_more.text();
    // Rank 0 gathers no more, which rank 1 finds out.
    for (int rank = 0; rank < 2; ++rank) {
        group.rank(rank).gather(fewer, streams[static_cast<std::size_t>(rank)].stream());
        group.rank(rank).decode(fewer, streams[static_cast<std::size_t>(rank)].stream());
        group.rank(rank).merge_to(outputs[rank], fewer, streams[static_cast<std::size_t>(rank)].stream());
    }
    for (const GpuStream& stream : streams) stream.synchronize();
    for (int rank = 0; rank < 2; ++rank) {
        EXPECT_TRUE(status(group.mailbox(rank)).failed) << "rank " << rank;
        ASSERT_NO_FATAL_FAILURE(expect_nan(outputs[rank], fewer.rows, "rank " + std::to_string(rank)));
    }
    EXPECT_EQ(status(group.mailbox(1)).missing_rank, 0);
    expect_recovery(step, step.text());
}

// It comes after rank 0 has given up: its exchange ends too, and nothing of it is left after a reset (B071).
TEST_F(GpuDcpLiveness, ARankThatComesTooLate) {
    for (const bool by_calls : {false, true}) {
        LimitedStep step(spec_of(by_calls), limit_s);
        DcpGroup& group = step.group();
        const GpuStream stream(gpu());
        const DcpWindow window{row_of_all_ranks(step), 1};
        DcpOutputs outputs = group.rank(0).make_outputs(), of_late = group.rank(1).make_outputs();
        alone(group, window, stream, outputs);
        EXPECT_TRUE(status(group.mailbox(0)).failed);
        for (int exchange = 0; exchange < 2; ++exchange) {
            of_late.fill(0);
            const auto begin = std::chrono::steady_clock::now();
            group.rank(1).gather(window, stream.stream());
            group.rank(1).decode(window, stream.stream());
            group.rank(1).merge_to(of_late, window, stream.stream());
            stream.synchronize();
            EXPECT_LE(seconds_since(begin), 2 * limit_s + slack_s) << step.text();
            // Either rank 0 pushed what it had, NaN for the heads that it missed, or rank 1 missed that.
            ASSERT_NO_FATAL_FAILURE(expect_nan(of_late, 1, "rank 1, exchange " + std::to_string(exchange)));
        }
        const MailboxStatus late = status(group.mailbox(1));
        EXPECT_TRUE(late.failed);
        EXPECT_EQ(late.missing_rank, 0) << late.text();
        expect_recovery(step, step.text());
    }
}

// While rank 0 waits, a plain decode on another stream runs and ends.
TEST_F(GpuDcpLiveness, OtherStreamsGoOn) {
    Step other = random_step({.rows = 2, .heads = 16}, 71);
    const Plan plan = other.plan();
    DeviceCall call = other.place(plan);
    const Result expected = other.run(plan);
    constexpr double long_limit_s = 0.5;
    LimitedStep step(spec_of(false), long_limit_s);
    DcpGroup& group = step.group();
    const DcpWindow window{row_of_all_ranks(step), 1};
    DcpOutputs outputs = group.rank(0).make_outputs();
    outputs.fill(0);
    const GpuStream waiting(gpu()), beside(gpu());
    other.poison_outputs();
    call.upload_outputs();
    const auto begin = std::chrono::steady_clock::now();
    group.rank(0).gather(window, waiting.stream());
    group.rank(0).decode(window, waiting.stream());
    group.rank(0).merge_to(outputs, window, waiting.stream());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    decode(plan, call.args, beside.stream());
    while (!is_done(beside.stream()) && seconds_since(begin) < long_limit_s)
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    EXPECT_TRUE(is_done(beside.stream())) << "a plain decode waits for the rank that waits";
    EXPECT_FALSE(is_done(waiting.stream())) << "rank 0 was to wait " << long_limit_s << " s";
    waiting.synchronize();
    call.download_outputs();
    expect_same_bits(other.collect(plan), expected, "beside a rank that waits");
    expect_status(status(group.mailbox(0)), {.stage = DcpStage::decode, .exchange = 0}, 1, step.text());
    expect_recovery(step, step.text());
}

// More CTAs than the GPU holds at once, each of which would wait: once the limit has passed, those that start later do
// not wait again (B069: twice the limit at most).
TEST_F(GpuDcpLiveness, TheLimitIsOfTheExchangeNotOfEachWave) {
    for (const bool gathers : {false, true}) {
        // One CTA an SM of decode, or warps of merge, for some times what is there.
        LimitedStep step(
            {.rows = 700,
             .head_offset = gathers ? std::vector<std::int64_t>{0, 30, 60} : std::vector<std::int64_t>{0, 1, 2},
             .width = 8,
             .plan = {.kernel = "decode_latency", .splits = 1},
             .seed = 62},
            limit_s);
        DcpGroup& group = step.group();
        const DcpWindow window{0, step.step().rows};
        const GpuStream stream(gpu());
        if (gathers) group.rank(1).gather(window, stream.stream());
        stream.synchronize();
        DcpOutputs outputs = group.rank(0).make_outputs();
        const double seconds = alone(group, window, stream, outputs);
        const MailboxStatus failed = status(group.mailbox(0));
        EXPECT_TRUE(failed.failed);
        EXPECT_EQ(failed.stage, gathers ? DcpStage::merge : DcpStage::decode) << failed.text();
        EXPECT_LE(seconds, 2 * limit_s + slack_s) << failed.text();
        ASSERT_NO_FATAL_FAILURE(expect_nan(outputs, window.rows, failed.text()));
        expect_recovery(step, step.text());
    }
}

}  // namespace
}  // namespace sparsemla::test
