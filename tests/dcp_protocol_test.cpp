// The protocol of mailboxes: every exchange's results are its own, however late ranks are, whatever the number of
// rows, with and without queries, with counters at their end, and with two exchanges under way in two mailboxes.
#include <string>
#include <vector>

#include "tests/gathering.h"
#include "tests/pushing.h"
#include "tests/stepping.h"

namespace sparsemla::test {
namespace {

std::uint64_t wanted(std::uint64_t few) {
    return std::strtoull(environment("SPARSEMLA_DCP_STEPS", std::to_string(few).c_str()).c_str(), nullptr, 10);
}

/// Pauses of a rank: now and then a short one, and each rank in turn comes 1 to 3 ms late.
class Pauses {
   public:
    Pauses(std::uint64_t seed, int rank, int world) : random_(seed, {rank}), rank_(rank), world_(world) {}

    void at_begin_of(const Exchange& exchange) {
        const auto turn = static_cast<int>(exchange.number / 16);
        if (exchange.number % 16 == 0 && turn % world_ == rank_) sleep_us(random_.uniform(1000, 3000));
    }
    void between_calls() {
        if (random_.chance(1.0 / 24)) sleep_us(random_.uniform(0, 300));
    }

   private:
    harness::Random random_;
    int rank_, world_;
};

/// Exchanges first .. first + count of all ranks, none of which waits for another but in the exchange itself.
std::string run_exchanges(Mailboxes& boxes, std::vector<SteppingRank>& ranks, std::uint64_t first, std::uint64_t count,
                          std::uint64_t seed) {
    return on_threads(boxes.world(), [&](int number) {
        SteppingRank& rank = ranks[static_cast<std::size_t>(number)];
        Pauses pauses(seed + first, number, boxes.world());
        std::string fault;
        for (std::uint64_t i = first; i < first + count && fault.empty(); ++i) {
            const Exchange exchange = Exchange::of(i, boxes.layout().rows, seed);
            pauses.at_begin_of(exchange);
            rank.gather(exchange);
            pauses.between_calls();
            fault = rank.decode(exchange);
            pauses.between_calls();
            if (const std::string merged = rank.merge(exchange); fault.empty()) fault = merged;
        }
        return fault;
    });
}

std::vector<SteppingRank> ranks_of(Mailboxes& boxes) {
    std::vector<SteppingRank> ranks;
    ranks.reserve(static_cast<std::size_t>(boxes.world()));
    for (int rank = 0; rank < boxes.world(); ++rank) ranks.emplace_back(boxes[rank]);
    return ranks;
}

// Ranks late in rotation (B063), delayed between the arrival of what they wait for and their read (B065), odd numbers
// of exchanges between two looks at the mailboxes (B066), rows that change, exchanges without a query.
TEST(K26_MailboxProtocol, B063_B065_B066_EveryExchangeHasItsOwnPayload) {
    if (on_gpu()) GTEST_SKIP() << "ranks are threads";
    const std::vector<std::vector<std::int64_t>> shares = {
        {0, 1}, {0, 2, 3}, {0, 1, 3, 4}, equal_shares(8, 1, 1).head_offset};
    std::uint64_t seed = 63;
    for (const std::vector<std::int64_t>& offset : shares) {
        Mailboxes boxes({.rows = 4, .head_offset = offset, .padded_heads = 9, .d_qk = 512});
        std::vector<SteppingRank> ranks = ranks_of(boxes);
        const std::uint64_t exchanges = wanted(400);
        std::uint64_t done = 0;
        ++seed;
        for (std::uint64_t count = 1; done < exchanges; count += 2) {
            ASSERT_EQ(run_exchanges(boxes, ranks, done, count, seed), "") << "seed " << seed;
            done += count;
            ASSERT_EQ(boxes.not_armed(), "") << "after " << done << " exchanges, seed " << seed;
        }
        for (int rank = 0; rank < boxes.world(); ++rank)
            EXPECT_EQ(boxes.status(rank).text(), MailboxStatus{.exchanges = static_cast<std::uint32_t>(done)}.text());
    }
}

// Counters pass their end: parity goes on (B066).
TEST(K26_MailboxProtocol, B066_CountersPassTheirEnd) {
    if (on_gpu()) GTEST_SKIP() << "ranks are threads";
    for (std::uint32_t begin : {0xFFFFFFFEU, 0xFFFFFFFFU}) {
        Mailboxes boxes({.rows = 3, .head_offset = {0, 1, 3, 4}, .d_qk = 512});
        std::vector<SteppingRank> ranks = ranks_of(boxes);
        boxes.start_at(begin);
        ASSERT_EQ(run_exchanges(boxes, ranks, 7, 5, 1), "") << begin;
        EXPECT_EQ(boxes.not_armed(), "");
        for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(boxes.status(rank).exchanges, begin + 5U);
    }
}

// Two micro-batches, each with a mailbox, are under way at once, and their calls in any order.
TEST(K26_MailboxProtocol, TwoMailboxesDoNotDisturbEachOther) {
    if (on_gpu()) GTEST_SKIP() << "ranks are threads";
    Mailboxes first({.rows = 4, .head_offset = {0, 2, 3, 5}, .d_qk = 512}), second(shape_of({0, 1, 2, 6}, 3));
    std::vector<SteppingRank> a = ranks_of(first), b = ranks_of(second);
    const std::string fault = on_threads(3, [&](int number) {
        SteppingRank &one = a[static_cast<std::size_t>(number)], &other = b[static_cast<std::size_t>(number)];
        Pauses pauses(9, number, 3);
        std::string wrong;
        for (std::uint64_t i = 0; i < wanted(200) && wrong.empty(); ++i) {
            const Exchange of_one = Exchange::of(i, 4, 11), of_other = Exchange::of(3 * i, 3, 12);
            pauses.at_begin_of(of_one);
            one.gather(of_one);
            other.gather(of_other);
            pauses.between_calls();
            wrong =
                i % 3 == 0 ? other.decode(of_other) + one.decode(of_one) : one.decode(of_one) + other.decode(of_other);
            pauses.between_calls();
            wrong += i % 2 == 0 ? other.merge(of_other) + one.merge(of_one) : one.merge(of_one) + other.merge(of_other);
        }
        return wrong;
    });
    EXPECT_EQ(fault, "");
    EXPECT_EQ(first.not_armed(), "");
    EXPECT_EQ(second.not_armed(), "");
}

// Ranks that begin up to 150 ms apart, again and again after resets (B071, B072).
TEST(K27_RankLiveness, B071_B072_RanksThatStartApart) {
    if (on_gpu()) GTEST_SKIP() << "ranks are threads";
    Mailboxes boxes({.rows = 2, .head_offset = {0, 1, 2, 3, 4}, .d_qk = 512});
    std::vector<SteppingRank> ranks = ranks_of(boxes);
    harness::Random random(71);
    for (std::uint64_t cycle = 0; cycle < 8; ++cycle) {
        double skew_us[4];
        for (double& each : skew_us) each = random.below(2) * random.uniform(0, 150e3);
        ASSERT_EQ(on_threads(4,
                             [&](int number) {
                                 sleep_us(skew_us[number]);
                                 SteppingRank& rank = ranks[static_cast<std::size_t>(number)];
                                 const Exchange exchange = Exchange::of(cycle, 2);
                                 rank.gather(exchange);
                                 const std::string fault = rank.decode(exchange);
                                 return fault + rank.merge(exchange);
                             }),
                  "")
            << "cycle " << cycle;
        if (cycle % 2 == 0) boxes.reset();
    }
}

/// Exchanges in lockstep, with looks into the mailboxes between the stages: everything of an exchange is in one parity.
class Lockstep {
   public:
    explicit Lockstep(std::int64_t rows = 20)
        : rows_(rows),
          pushing_({.rows = rows + 1, .head_offset = {0, 3, 5, 6}, .padded_heads = 7}, rows,
                   {.partial_dtype = DType::bf16}),
          gathering_(pushing_.boxes, rows, DType::f8_e4m3) {}

    Mailboxes& boxes() { return pushing_.boxes; }
    void run(std::uint32_t exchange) {
        const std::string what = "exchange " + std::to_string(exchange);
        gathering_.fill(
            [&](auto row, auto head, auto d) { return static_cast<unsigned>(row * 3 + head * 5 + d + exchange); });
        pushing_.given.fill_random(exchange, 4, 0.2);
        gathering_.gather_all();
        gathering_.expect_received(what);
        EXPECT_EQ(bytes_in(1 - exchange % 2), 0) << what;
        gathering_.expect_received(what + ", read again");  // read by several, freed once, by the merge (B062)
        pushing_.push_all();
        EXPECT_EQ(bytes_in(1 - exchange % 2), 0) << what;
        EXPECT_GT(bytes_in(exchange % 2), 0) << what;
        pushing_.query_gathered = true;
        pushing_.merge_all(what);
        pushing_.expect_merge(what);
        EXPECT_EQ(boxes().not_armed(), "") << what;
    }

   private:
    /// Bytes of all mailboxes that are not armed in the planes of a parity.
    std::int64_t bytes_in(std::int64_t parity) {
        const MailboxLayout& layout = boxes().layout();
        std::int64_t count = 0;
        for (int rank = 0; rank < layout.world; ++rank) {
            const Bytes bytes = boxes().memory(rank).read();
            const auto add = [&](std::int64_t begin, std::int64_t plane) {
                for (std::int64_t i = begin + parity * plane; i < begin + (parity + 1) * plane; ++i)
                    count += bytes[static_cast<std::size_t>(i)] != 0xFF ? 1 : 0;
            };
            add(layout.query, layout.query_parity_bytes);
            add(layout.values, layout.values_parity_bytes);
            add(layout.lses, layout.lses_parity_bytes);
        }
        return count;
    }

    std::int64_t rows_;
    Pushing pushing_;
    Gathering gathering_;
};

// The first, a middle or the last block of each stage's kernel late by 300 us (on a CPU: the call): every piece of an
// exchange is in its parity (B064), and queries stay until the merge has them all (B062).
TEST(K26_MailboxProtocol, B062_B064_LateBlocks) {
    Lockstep lockstep;
    std::uint32_t exchange = 0;
    for (DcpStage stage : {DcpStage::gather, DcpStage::decode, DcpStage::push, DcpStage::merge})
        for (std::int32_t cta : {0, 1, 19, 11}) {
            for (int rank = 0; rank < 3; ++rank) lockstep.boxes()[rank].delay = {.stage = stage, .cta = cta, .us = 300};
            lockstep.run(exchange++);
        }
}

TEST(K26_MailboxProtocol, B066_CountersPassTheirEndInLockstep) {
    Lockstep lockstep(4);
    lockstep.boxes().start_at(0xFFFFFFFE);
    for (std::uint32_t exchange = 0xFFFFFFFE; exchange != 3; ++exchange) lockstep.run(exchange);
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(lockstep.boxes().status(rank).exchanges, 3U);
}

// A batch as large as the mailbox, one row, and everything between, one after another.
TEST(K26_MailboxProtocol, RowsUpToTheCapacity) {
    Pushing small(shape_of({0, 1, 2}, 4), 4, {.partial_dtype = DType::bf16});
    for (std::int64_t rows : {4, 1, 4, 3, 2, 1, 1, 4, 2, 4}) {
        small.given.fill_random(static_cast<std::uint32_t>(rows), 3, 0.1);
        small.rows = rows;
        small.run_and_expect_merge(std::to_string(rows) + " rows");
    }
    EXPECT_EQ(small.boxes.status(0).exchanges, 10U);
}

}  // namespace
}  // namespace sparsemla::test
