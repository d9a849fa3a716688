// Ranks that never come, at every stage: the others end within the limit, say who was missing, give NaN, do not wait
// again, leave everything else alone, and work again after a reset.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <csignal>
#include <string>
#include <vector>

#include "sparsemla/formats.h"
#include "tests/dcp.h"
#include "tests/stepping.h"

namespace sparsemla::test {
namespace {

using harness::DcpWindow;

constexpr double limit_s = 0.06;
constexpr double slack_s = 1.5;  // of a busy machine

/// Seconds that work takes, with what it puts on the group's stream.
template <class Work>
double seconds(harness::DcpGroup& group, const Work& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    if (on_gpu()) group.stream().synchronize();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Stream stream_of(harness::DcpGroup& group) { return on_gpu() ? group.stream().stream() : Stream{}; }

/// Whether rows first .. of a rank's last results are NaN.
bool is_nan(harness::DcpGroup& group, int rank, std::int64_t first_row, std::int64_t rows) {
    const std::int64_t own = group.mailbox(rank).layout.heads_of(rank);
    const auto* out = reinterpret_cast<const std::uint16_t*>(group.rank(rank).out().bytes.get());
    const auto* lse = reinterpret_cast<const float*>(group.rank(rank).lse().bytes.get());
    for (std::int64_t cell = first_row * own; cell < (first_row + rows) * own; ++cell) {
        if (!std::isnan(lse[cell])) return false;
        for (std::int64_t d = 0; d < value_dims; ++d)
            if (!std::isnan(bf16_to_float(out[cell * value_dims + d]))) return false;
    }
    return true;
}

/// Three ranks, of which one leaves out what is to be tested.
class K27_RankLiveness : public testing::TestWithParam<bool> {
   protected:
    static constexpr std::int64_t rows = 4;
    static constexpr DcpWindow all{0, rows};

    DcpStep step{{.rows = rows, .head_offset = {0, 2, 3, 5}, .width = 20, .by_calls = GetParam(), .seed = 27}};
    harness::DcpGroup& group = step.group();
    Stream stream = stream_of(group);

    void set_limit(double limit) {
        for (int rank = 0; rank < group.world(); ++rank) group.mailbox(rank).wait_limit_s = limit;
    }
    MailboxStatus status_of(int rank) { return status(group.mailbox(rank), stream); }
    void poison() {
        for (int rank = 0; rank < group.world(); ++rank) group.rank(rank).poison();
    }
    /// Decode and merge of a rank that waits in vain.
    double wait_in_vain(int rank) {
        return seconds(group, [&] {
            group.rank(rank).decode(all, stream);
            group.rank(rank).merge(all, stream);
        });
    }
    /// Of several missing ranks a CPU finds the first.
    void expect_failed(int rank, DcpStage stage, const std::vector<int>& missing, std::uint32_t exchange,
                       const std::string& what) {
        const MailboxStatus found = status_of(rank);
        EXPECT_TRUE(found.failed) << what << ", rank " << rank;
        EXPECT_EQ(name(found.stage), name(stage)) << what << ", rank " << rank;
        EXPECT_TRUE(found.missing_rank == missing.front() || (on_gpu() && found.missing_rank == missing.back()))
            << what << ", rank " << rank << ": " << found.text();
        EXPECT_EQ(found.exchange, exchange) << what << ", rank " << rank;
        EXPECT_EQ(found.exchanges, exchange) << what << ", rank " << rank << ": those before it";
        if (on_gpu())  // rows are waited for at once
            EXPECT_LT(found.row, rows) << what;
        else
            EXPECT_EQ(found.row, 0) << what << ", rank " << rank;
        for (const std::string& part : {"rank " + std::to_string(found.missing_rank), std::string(name(stage))})
            EXPECT_NE(found.text().find(part), std::string::npos) << found.text();
    }
    void expect_recovery(const std::string& what) {
        set_limit(20);
        group.reset();
        for (int rank = 0; rank < group.world(); ++rank) EXPECT_EQ(status_of(rank).text(), "0 exchanges complete");
        EXPECT_EQ(group.run(step.windows(3, 5)), "") << what;
    }
};

// A rank that does not gather, or does not push (B069, B072).
TEST_P(K27_RankLiveness, B069_B072_ARankThatNeverComes) {
    for (const bool gathers : {false, true})
        for (int missing = 0; missing < 3; ++missing) {
            const std::string what =
                "rank " + std::to_string(missing) + (gathers ? " does not push" : " does not gather");
            ASSERT_EQ(group.run(step.windows(3)), "") << what;
            set_limit(limit_s);
            poison();
            for (int rank = 0; rank < 3; ++rank)
                if (gathers || rank != missing) group.rank(rank).gather(all, stream);
            for (int rank = 0; rank < 3 && gathers; ++rank)
                if (rank != missing) group.rank(rank).decode(all, stream);
            for (int rank = 0; rank < 3; ++rank) {
                if (rank == missing) continue;
                const double waited =
                    gathers ? seconds(group, [&] { group.rank(rank).merge(all, stream); }) : wait_in_vain(rank);
                EXPECT_GT(waited, 0.5 * limit_s) << what;
                EXPECT_LT(waited, 2 * limit_s + slack_s) << what;
                expect_failed(rank, gathers ? DcpStage::merge : DcpStage::decode, {missing}, 3, what);
                EXPECT_TRUE(is_nan(group, rank, 0, rows)) << what << ", rank " << rank;
            }

            // Nothing waits again, everything is NaN; nobody else notices.
            poison();
            const double later = seconds(group, [&] {
                for (int i = 0; i < 40; ++i)
                    for (int rank = 0; rank < 3; ++rank) {
                        if (rank == missing) continue;
                        group.rank(rank).gather(all, stream);
                        group.rank(rank).decode(all, stream);
                        group.rank(rank).merge(all, stream);
                    }
            });
            EXPECT_LT(later, 0.5 * 80 * limit_s) << what << ": 80 exchanges after the failure";
            for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(rank == missing || is_nan(group, rank, 0, rows)) << what;
            DcpStep other({.rows = 3, .head_offset = {0, 2, 3}, .by_calls = GetParam(), .seed = 28});
            EXPECT_EQ(other.group().run(other.windows(3)), "") << what << ": another group";
            expect_recovery(what);
            group.reset();
        }
}

// A rank later than the limit finds that the others gave up, and says so itself.
TEST_P(K27_RankLiveness, ALateRankFindsThatTheOthersGaveUp) {
    for (const bool gathers : {false, true}) {
        set_limit(limit_s);
        poison();
        for (int rank = 0; rank < 3; ++rank)
            if (gathers || rank != 1) group.rank(rank).gather(all, stream);
        for (int rank : {0, 2}) wait_in_vain(rank);
        if (!gathers) {  // the others never pushed what is right
            group.rank(1).gather(all, stream);
            EXPECT_LT(wait_in_vain(1), 2 * limit_s + slack_s);
            // A kernel that waits and pushes has pushed NaN.
            const bool fused = on_gpu() && !GetParam();
            if (!fused) expect_failed(1, DcpStage::merge, {0, 2}, 0, "late at gather");
            EXPECT_TRUE(is_nan(group, 1, 0, rows));
        } else {  // they have pushed: its results are right, and only the next exchange fails
            wait_in_vain(1);
            EXPECT_EQ(group.difference(1, all), "");
            EXPECT_EQ(status_of(1).text(), "1 exchange complete");
            group.rank(1).gather(all, stream);
            EXPECT_LT(wait_in_vain(1), 2 * limit_s + slack_s);
            expect_failed(1, DcpStage::decode, {0, 2}, 1, "late at push");
            EXPECT_TRUE(is_nan(group, 1, 0, rows));
        }
        expect_recovery("a late rank");
        group.reset();
    }
}

// A rank ends in the middle of a push: rows that came are right, the others NaN.
TEST_P(K27_RankLiveness, RowsThatCameAreRight) {
    set_limit(limit_s);
    poison();
    for (int rank = 0; rank < 3; ++rank) group.rank(rank).gather(all, stream);
    group.rank(2).decode({0, 2}, stream);
    for (int rank : {0, 1}) group.rank(rank).decode(all, stream);
    for (int rank : {0, 1}) {
        group.rank(rank).merge(all, stream);
        if (on_gpu()) group.stream().synchronize();
        EXPECT_EQ(group.difference(rank, {0, 2}), "");
        EXPECT_TRUE(is_nan(group, rank, 2, rows - 2));
        EXPECT_EQ(status_of(rank).missing_rank, 2);
        EXPECT_GE(status_of(rank).row, 2);
    }
    expect_recovery("half a push");
}

// Calls out of order end by the limit, too (B068), and a call made twice before anyone merges changes nothing.
TEST_P(K27_RankLiveness, B068_CallsOutOfOrderEnd) {
    struct Sequence {
        const char* what;
        bool complete_before;
        std::vector<DcpStage> calls;
        bool fails;
    };
    using enum DcpStage;
    const Sequence sequences[] = {{"merge without push", false, {gather, merge}, true},
                                  {"merge without push, later", true, {gather, merge}, true},
                                  {"merge alone", true, {merge}, true},
                                  {"decode without gather", true, {decode, merge}, true},
                                  {"merge twice", false, {gather, decode, merge, merge}, true},
                                  {"gather and decode twice", true, {gather, gather, decode, decode, merge}, false}};
    for (const Sequence& sequence : sequences) {
        ASSERT_EQ(group.run(step.windows(sequence.complete_before ? 1 : 0)), "");
        set_limit(limit_s);
        for (DcpStage stage : sequence.calls)
            for (int rank = 0; rank < 3; ++rank) {
                const double waited = seconds(group, [&] {
                    if (stage == gather) group.rank(rank).gather(all, stream);
                    if (stage == decode) group.rank(rank).decode(all, stream);
                    if (stage == merge) group.rank(rank).merge(all, stream);
                });
                EXPECT_LT(waited, 2 * limit_s + slack_s) << sequence.what;
            }
        for (int rank = 0; rank < 3; ++rank) {
            EXPECT_EQ(status_of(rank).failed, sequence.fails) << sequence.what << ": " << status_of(rank).text();
            EXPECT_EQ(sequence.fails ? "" : group.difference(rank, all), "") << sequence.what;
        }
        expect_recovery(sequence.what);
        group.reset();
    }
}

std::string ways(const testing::TestParamInfo<bool>& info) { return info.param ? "Calls" : "Decode"; }

INSTANTIATE_TEST_SUITE_P(Ways, K27_RankLiveness, testing::Bool(), ways);

/// Four processes with mailboxes in shared memory; one of them ends, or stops calling, after 100 exchanges.
class Processes {
   public:
    explicit Processes(double wait_limit_s) : layout_(mailbox_layout(shape_of({0, 1, 2, 3, 4}, 2))) {
        bytes_ = static_cast<std::size_t>(4 * (layout_.bytes + control_bytes));
        void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) throw std::runtime_error("mmap failed");
        memory_ = static_cast<std::byte*>(mapped);
        for (int rank = 0; rank < 4; ++rank) {
            Mailbox& box = boxes_.emplace_back(
                Mailbox{.layout = layout_,
                        .peers = {.rank = rank},
                        .control = {memory_ + 4 * layout_.bytes + rank * control_bytes, mailbox_control_bytes},
                        .wait_limit_s = wait_limit_s});
            for (int peer = 0; peer < 4; ++peer) box.peers.base[peer] = memory_ + peer * layout_.bytes;
        }
        for (const Mailbox& box : boxes_) reset(box);
    }
    ~Processes() { munmap(memory_, bytes_); }
    Processes(const Processes&) = delete;
    Processes& operator=(const Processes&) = delete;

    const Mailbox& mailbox(int rank) const { return boxes_[static_cast<std::size_t>(rank)]; }

    /// 0 of a process that found one of the others missing in time; a process that is to be missing ends itself.
    int exchanges_of(int rank, int missing, bool killed) {
        SteppingRank stepping(mailbox(rank));
        for (std::uint64_t i = 0; i < 400; ++i) {
            const Exchange exchange = Exchange::of(i, 2);
            if (rank == missing && i == 100) {
                if (killed) kill(getpid(), SIGKILL);
                return 0;
            }
            const auto begin = std::chrono::steady_clock::now();
            stepping.gather(exchange);
            const std::string decoded = stepping.decode(exchange), merged = stepping.merge(exchange);
            const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
            if (status(mailbox(rank)).failed)
                return i < 100 ? 1 : took > 2 * mailbox(rank).wait_limit_s + slack_s ? 2 : 0;
            if (!decoded.empty() || !merged.empty()) return 3;
        }
        return 4;
    }

   private:
    static constexpr std::int64_t control_bytes = 128;

    MailboxLayout layout_;
    std::size_t bytes_ = 0;
    std::byte* memory_ = nullptr;
    std::vector<Mailbox> boxes_;
};

// One process of four is killed, or stops calling: the others name it (B070).
TEST(K27_RankLiveness_Processes, B070_AProcessThatEnds) {
    if (on_gpu()) GTEST_SKIP() << "processes share host memory";
    for (const bool killed : {true, false}) {
        constexpr int missing = 2;
        Processes processes(1.0);
        std::vector<pid_t> children;
        for (int rank = 0; rank < 4; ++rank) {
            const pid_t child = fork();
            ASSERT_GE(child, 0);
            if (child == 0) _exit(processes.exchanges_of(rank, missing, killed));
            children.push_back(child);
        }
        for (int rank = 0; rank < 4; ++rank) {
            int ended = 0;
            ASSERT_EQ(waitpid(children[static_cast<std::size_t>(rank)], &ended, 0),
                      children[static_cast<std::size_t>(rank)]);
            if (rank == missing) {
                EXPECT_EQ(WIFSIGNALED(ended), killed);
                continue;
            }
            ASSERT_TRUE(WIFEXITED(ended)) << "rank " << rank;
            EXPECT_EQ(WEXITSTATUS(ended), 0) << "rank " << rank << ": 1 failed too early, 2 too late, 3 wrong, 4 never";
            const MailboxStatus found = status(processes.mailbox(rank));
            EXPECT_EQ(found.missing_rank, missing) << found.text();
            EXPECT_EQ(found.exchange, 100U) << found.text();
        }
    }
}

// receive_query by itself: the heads of a rank that never came are NaN, in the first call and in every later one.
TEST(K27_RankLiveness_Receive, QueriesThatNeverCameAreNaN) {
    Mailboxes boxes({.rows = 2, .head_offset = {0, 2, 3}, .d_qk = 512}, limit_s);
    const Padded query(DType::f8_e4m3, {2, 2, 512}, 0);
    const Placed query_at(query);
    gather_query(boxes[0], {.rows = 2, .query = query_at.view()}, boxes.stream());
    for (int call = 0; call < 2; ++call) {
        const Padded received(DType::f8_e4m3, {2, 3, 512}, 16);
        const Placed received_at(received);
        receive_query(boxes[0], 2, received_at.view(), boxes.stream());
        boxes.synchronize();
        received_at.fetch();
        for (std::int64_t row = 0; row < 2; ++row)
            for (std::int64_t d = 0; d < 512; ++d)
                ASSERT_EQ(received.at<std::uint8_t>(row, 2, d) & 0x7F, 0x7F) << "call " << call << ", row " << row;
        EXPECT_TRUE(received.rest_intact(2, 3));
    }
    EXPECT_EQ(boxes.status(0).missing_rank, 1);
    EXPECT_EQ(name(boxes.status(0).stage), "decode");
}

// With a short limit, ranks that start too far apart fail with the name of the one that is missing (B072).
TEST(K27_RankLiveness_Threads, B072_TooFarApart) {
    if (on_gpu()) GTEST_SKIP() << "ranks are threads";
    Mailboxes boxes({.rows = 2, .head_offset = {0, 1, 2}, .d_qk = 512}, 0.05);
    on_threads(2, [&](int rank) {
        if (rank == 1) sleep_us(600e3);
        SteppingRank stepping(boxes[rank]);
        stepping.gather({.rows = 2});
        stepping.decode({.rows = 2});
        stepping.merge({.rows = 2});
        EXPECT_TRUE(stepping.is_nan(0, 2));
        return std::string();
    });
    EXPECT_EQ(boxes.status(0).missing_rank, 1);
    EXPECT_EQ(name(boxes.status(0).stage), "decode");
    EXPECT_EQ(boxes.status(1).missing_rank, 0);
    EXPECT_EQ(name(boxes.status(1).stage), "merge");
}

// A rank whose rows come one after another, each within the limit, is slow, not missing. Each row says that it is
// empty.
TEST(K27_RankLiveness_Threads, ASlowRankIsNotMissing) {
    if (on_gpu()) GTEST_SKIP() << "ranks are threads";
    constexpr std::int64_t rows = 5;
    Mailboxes boxes(shape_of({0, 1, 2}, rows), 0.4);
    SteppingRank first(boxes[0]);
    std::thread second([&] {
        for (std::int64_t row = 0; row < rows; ++row) {
            sleep_us(150e3);
            auto* word = reinterpret_cast<std::uint32_t*>(boxes.memory(0).data() + boxes.lse_byte(0, 1, row, 0));
            std::atomic_ref<std::uint32_t>(*word).store(std::bit_cast<std::uint32_t>(-infinity));
        }
    });
    const Exchange exchange{.rows = rows, .query = false};
    first.push_results(exchange);
    first.merge(exchange);
    second.join();
    EXPECT_EQ(boxes.status(0).text(), "1 exchange complete");
}

}  // namespace
}  // namespace sparsemla::test
