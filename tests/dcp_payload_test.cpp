// Values that travel, among them those that look like an armed mailbox, and what must not travel: nothing of an empty
// source, of an earlier exchange, or of rows and heads beyond those of the exchange.
#include <cfloat>
#include <string>
#include <vector>

#include "tests/gathering.h"
#include "tests/pushing.h"

namespace sparsemla::test {
namespace {

constexpr std::uint16_t bf16_bits[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x7F80, 0xFF80,
                                       0x7FC0, 0xFFC0, 0x7F81, 0xFF81, 0x7FFF, 0xFFFF, 0x3F80, 0x00FF};
constexpr std::uint32_t f32_bits[] = {0x00000000, 0x80000000, 0x00010000, 0x80000001, 0x807FFFFF, 0x80010000,
                                      0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF, 0x7F800001,
                                      0xFF800001, 0xFFFF0000, 0x7F7FFFFF, 0xFF7FFFFF};
constexpr std::uint32_t lse_bits[] = {0x00000000, 0x80000000, 0xFF800000, 0x7F800000, 0x7FC00000, 0xFFFFFFFF,
                                      0x7FFFFFFF, 0xFF800001, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF,
                                      0x3F800000, 0xC2F70000, 0xFFFF0000, 0xFFFFFF00};
constexpr std::int64_t patterns = 16;

const std::vector<std::int64_t> three_ranks = {0, 5, 9, patterns};

/// Rank i's head is pattern head + i all over, and its lse pattern row + shift * i.
void fill_patterns(Pushing& pushing, std::size_t shift) {
    for (std::size_t i = 0; i < pushing.given.outs.size(); ++i)
        for (std::int64_t row = 0; row < pushing.rows; ++row)
            for (std::int64_t head = 0; head < patterns; ++head) {
                const std::size_t value = (static_cast<std::size_t>(head) + i) % patterns;
                pushing.given.lses[i].at<std::uint32_t>(row, head) =
                    lse_bits[(static_cast<std::size_t>(row) + shift * i) % patterns];
                for (int d = 0; d < value_dims; ++d)
                    if (pushing.given.options.partial_dtype == DType::bf16)
                        pushing.given.outs[i].at<std::uint16_t>(row, head, d) = bf16_bits[value];
                    else
                        pushing.given.outs[i].at<std::uint32_t>(row, head, d) = f32_bits[value];
            }
}

std::string not_failed(Mailboxes& boxes) {
    for (int rank = 0; rank < boxes.world(); ++rank)
        if (boxes.status(rank).failed) return boxes.status(rank).text();
    return "";
}

// Zeros of either sign, subnormals, infinities and NaN of any payload, in values and lse: all arrive, NaN as NaN
// (B067).
TEST(K26_MailboxProtocol, B067_ValuesThatLookLikeAnArmedMailbox) {
    for (DType partial : {DType::bf16, DType::f32})
        for (DType out : {DType::bf16, DType::f32})
            for (LseBase base : {LseBase::two, LseBase::natural}) {
                Pushing pushing(shape_of(three_ranks, patterns), patterns,
                                {.partial_dtype = partial, .out_dtype = out, .partial_base = base});
                for (std::size_t shift : {0U, 1U, 5U, 11U}) {
                    fill_patterns(pushing, shift);
                    pushing.run_and_expect_merge("B067, shift " + std::to_string(shift) + ", partials of " +
                                                 std::string(name(partial)));
                }
                EXPECT_EQ(not_failed(pushing.boxes), "");
            }
}

// What lies in the mailboxes between push and merge: no armed word in what has come, and none but armed words
// elsewhere.
TEST(K26_MailboxProtocol, B067_NoWordThatTravelsIsArmed) {
    for (DType partial : {DType::bf16, DType::f32}) {
        Pushing pushing(shape_of(three_ranks, patterns + 2), patterns,
                        {.partial_dtype = partial, .partial_base = LseBase::two});
        fill_patterns(pushing, 3);
        Mailboxes& boxes = pushing.boxes;
        pushing.push_all();
        const Merging expected = pushing.travelling();
        for (int rank = 0; rank < boxes.world(); ++rank) {
            Bytes rest = boxes.memory(rank).read();
            const auto take = [&](std::int64_t at, void* to, std::size_t bytes) {
                std::memcpy(to, rest.data() + at, bytes);
                std::fill_n(rest.begin() + at, bytes, std::uint8_t{0xFF});
            };
            for (std::size_t source = 0; source < 3; ++source)
                for (std::int64_t row = 0; row < patterns; ++row)
                    for (std::int64_t own = 0; own < boxes.layout().heads_of(rank); ++own) {
                        const std::int64_t head = boxes.first_head(rank) + own,
                                           from = static_cast<std::int64_t>(source);
                        float lse = 0;
                        take(boxes.lse_byte(0, from, row, own), &lse, 4);
                        ASSERT_NE(std::bit_cast<std::uint32_t>(lse), 0xFFFFFFFF);
                        ASSERT_TRUE(Pushing::same(lse, expected.lses[source].at<float>(row, head)));
                        if (lse == -infinity) continue;
                        std::uint16_t values[value_dims];
                        take(boxes.values_byte(0, from, row, own), values, sizeof values);
                        for (int d = 0; d < value_dims; ++d)
                            ASSERT_EQ(values[d], expected.outs[source].at<std::uint16_t>(row, head, d))
                                << "source " << source << ", row " << row << ", head " << head << ", dim " << d;
                    }
            EXPECT_EQ(rest, Bytes(rest.size(), 0xFF)) << "rank " << rank << ": something else was written";
        }
    }
}

/// One exchange of queries and of partial results, every result looked at.
void exchange(Gathering& gathering, Pushing& pushing, const std::string& what) {
    gathering.gather_all();
    gathering.expect_received(what);
    pushing.query_gathered = true;
    pushing.run_and_expect_merge(what);
    EXPECT_EQ(not_failed(pushing.boxes), "") << what;
}

// Every code, heads of nothing but NaN among them, as the mailbox holds them (B067).
TEST(K26_MailboxProtocol, B067_QueriesOfEveryCode) {
    struct Kind {
        DType from, to;
        std::int64_t d_qk;
        float q_scale;
    };
    for (const Kind& kind :
         {Kind{DType::f8_e4m3, DType::f8_e4m3, 576, 1}, Kind{DType::f8_e4m3, DType::f8_e4m3, 512, 1},
          Kind{DType::bf16, DType::bf16, 576, 1}, Kind{DType::bf16, DType::bf16, 512, 1},
          Kind{DType::bf16, DType::f8_e4m3, 576, 0.25F}, Kind{DType::bf16, DType::f8_e4m3, 512, 3e-38F}}) {
        Pushing pushing({.rows = 5, .head_offset = {0, 1, 3}, .query_dtype = kind.to, .d_qk = kind.d_qk}, 4, {});
        pushing.given.fill_random(1, 3, 0.2);
        Gathering gathering(pushing.boxes, 4, kind.from);
        gathering.q_scale = kind.q_scale;
        for (unsigned step = 0; step < 130; step += kind.from == DType::bf16 ? 1 : 33) {
            gathering.fill([&](std::int64_t row, std::int64_t head, std::int64_t d) {
                if (row == 3) return head == 0 ? 0xFFFFU : head == 1 ? 0x7FFFU : 0x7F7FU;
                const auto number = static_cast<unsigned>(d + 576 * (row + 3 * (head + 3 * step)));
                return number % 0x10000;
            });
            exchange(gathering, pushing, "codes of " + std::string(name(kind.from)) + ", step " + std::to_string(step));
            if (testing::Test::HasFailure()) return;
        }
    }
}

// A step of nothing but NaN leaves nothing to the ones after it, of either parity.
TEST(K03_ZeroTimesNonFinite, NaNOfAnEarlierExchangeStaysThere) {
    Pushing pushing({.rows = 3, .head_offset = {0, 2, 5}, .padded_heads = 8}, 3, {.partial_dtype = DType::bf16});
    Gathering gathering(pushing.boxes, 3, DType::f8_e4m3);
    for (int step = 0; step < 9; ++step) {
        const bool poisoned = step % 3 == 0;
        gathering.fill([&](auto row, auto head, auto d) {
            return poisoned ? 0xFFU : static_cast<unsigned>(row + head + d + step) % 0x7F;
        });
        pushing.given.fill_random(static_cast<std::uint32_t>(step), 4, 0.3);
        for (std::size_t i = 0; poisoned && i < 2; ++i)
            for (std::int64_t cell = 0; cell < 15; ++cell)
                pushing.given.set(i, not_a_number, not_a_number, cell / 5, cell % 5);
        exchange(gathering, pushing, "step " + std::to_string(step));
        for (std::int64_t cell = 0; cell < 15; ++cell)
            EXPECT_EQ(std::isnan(pushing.out(cell / 5, cell % 5)), poisoned) << "step " << step;
    }
}

// The payload of a source of lse -inf is neither read nor written nor armed: whatever lies there stays (B084).
TEST(K03_ZeroTimesNonFinite, B084_PayloadOfAnEmptySourceIsNeverTouched) {
    for (const std::uint8_t garbage : {0x7F, 0x00, 0x41}) {
        Pushing pushing(shape_of({0, 3, 5, 6}, 4), 4, {});
        Mailboxes& boxes = pushing.boxes;
        pushing.given.fill_random(84, 3, 0);
        std::vector<Bytes> planted;
        for (int rank = 0; rank < boxes.world(); ++rank) planted.emplace_back(boxes.memory(rank).read());
        for (std::int64_t source = 0; source < 3; ++source)
            for (std::int64_t row = 0; row < 4; ++row)
                for (std::int64_t head = 0; head < 6; ++head) {
                    if ((source + row + head) % 3 != 0 && row != 3) continue;
                    const auto owner = pushing.owner(head);
                    pushing.given.lses[static_cast<std::size_t>(source)].set(-infinity, row, head);
                    for (int parity : {0, 1})
                        std::fill_n(planted[static_cast<std::size_t>(owner)].begin() +
                                        boxes.values_byte(parity, source, row, head - boxes.first_head(owner)),
                                    value_dims * 2, garbage);
                }
        for (int rank = 0; rank < boxes.world(); ++rank)
            boxes.memory(rank).write(planted[static_cast<std::size_t>(rank)].data(),
                                     planted[static_cast<std::size_t>(rank)].size(), 0);
        for (int step = 0; step < 3; ++step) {
            pushing.push_all();
            pushing.merge_all("planted");
            pushing.expect_merge("planted");
            for (int rank = 0; rank < boxes.world(); ++rank)
                EXPECT_EQ(boxes.memory(rank).read(), planted[static_cast<std::size_t>(rank)]) << "step " << step;
        }
        EXPECT_EQ(not_failed(boxes), "");
    }
}

// Rows beyond those of the exchange, heads between the last and the padded ones, and places of heads that a rank does
// not own are neither written, nor waited for, nor armed: a mailbox full of garbage there works, and keeps it.
TEST(K26_MailboxProtocol, WhatTheExchangeDoesNotHaveStaysAsItIs) {
    Pushing pushing({.rows = 5, .head_offset = {0, 1, 5, 7}, .padded_heads = 9, .query_dtype = DType::bf16}, 3, {});
    Mailboxes& boxes = pushing.boxes;
    Gathering gathering(boxes, 3, DType::bf16);
    std::vector<Bytes> planted;
    for (int rank = 0; rank < 3; ++rank) {
        Bytes bytes(static_cast<std::size_t>(boxes.layout().bytes), 0x5B);
        const auto arm = [&](std::int64_t at, std::int64_t count) {
            std::fill_n(bytes.begin() + at, count, std::uint8_t{0xFF});
        };
        for (int parity : {0, 1})
            for (std::int64_t row = 0; row < 3; ++row) {
                for (std::int64_t head = 0; head < 7; ++head)
                    arm(boxes.query_byte(parity, row, head), boxes.head_bytes());
                for (std::int64_t source = 0; source < 3; ++source)
                    for (std::int64_t own = 0; own < boxes.layout().heads_of(rank); ++own) {
                        arm(boxes.values_byte(parity, source, row, own), value_dims * 2);
                        arm(boxes.lse_byte(parity, source, row, own), 4);
                    }
            }
        boxes.memory(rank).write(bytes.data(), bytes.size(), 0);
        planted.push_back(bytes);
    }
    pushing.query_gathered = true;
    for (std::uint32_t step = 0; step < 5; ++step) {
        gathering.fill([&](auto row, auto head, auto d) { return static_cast<unsigned>(row * 7 + head + d + step); });
        pushing.given.fill_random(step, 3, 0.2);
        gathering.gather_all();
        gathering.expect_received("planted");
        pushing.push_all();
        pushing.merge_all("planted");
        pushing.expect_merge("planted, step " + std::to_string(step));
        for (int rank = 0; rank < 3; ++rank)
            ASSERT_EQ(boxes.memory(rank).read() == planted[static_cast<std::size_t>(rank)], true)
                << "rank " << rank << ", step " << step;
    }
}

}  // namespace
}  // namespace sparsemla::test
