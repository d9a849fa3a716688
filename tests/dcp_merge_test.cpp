// Merging in a mailbox: bases, empty rows, sinks, order of ranks. Every result is the bits of `merge` over what
// travels.
#include <algorithm>
#include <cfloat>
#include <string>
#include <vector>

#include "tests/pushing.h"

namespace sparsemla::test {
namespace {

constexpr LseBase bases[] = {LseBase::natural, LseBase::two};
constexpr DType dtypes[] = {DType::bf16, DType::f32};

std::vector<std::int64_t> equal(int world, std::int64_t heads) { return equal_shares(world, heads, 1).head_offset; }

float log_of(double z, LseBase base) { return static_cast<float>(base == LseBase::two ? std::log2(z) : std::log(z)); }

std::string text(LseBase from, LseBase to) { return std::string(name(from)) + " to " + std::string(name(to)); }

// One rank to 16, equal shares and unequal ones, one head each and all 128; a batch as large as the mailbox and
// smaller.
TEST(DcpMerge, RandomPartialsGiveTheBitsOfMerge) {
    const std::vector<std::vector<std::int64_t>> shares = {{0, 3},       {0, 5, 16},   equal(7, 3),  equal(12, 8),
                                                           equal(8, 12), equal(2, 48), equal(16, 1), equal(16, 8)};
    std::uint32_t seed = 0;
    for (const std::vector<std::int64_t>& offset : shares)
        for (DType partial : dtypes)
            for (LseBase from : bases) {
                ++seed;
                const std::int64_t rows = 1 + seed % 3;
                Pushing pushing({.rows = rows + seed % 2, .head_offset = offset, .padded_heads = 128}, rows,
                                {.partial_dtype = partial,
                                 .out_dtype = dtypes[seed / 2 % 2],
                                 .partial_base = from,
                                 .lse_base = bases[seed / 3 % 2],
                                 .padding = seed % 4,
                                 .transposed_lse = seed % 5 == 0});
                for (int step = 0; step < 3; ++step) {
                    pushing.given.fill_random(seed + 100 * static_cast<std::uint32_t>(step), 20, 0.3);
                    if (step == 1)
                        pushing.given.set_sinks(std::vector<float>(static_cast<std::size_t>(offset.back()), -1.5F));
                    pushing.run_and_expect_merge("seed " + std::to_string(seed) + ", step " + std::to_string(step) +
                                                 ", " + std::to_string(offset.size() - 1) + " ranks");
                }
                for (int rank = 0; rank < pushing.boxes.world(); ++rank)
                    EXPECT_EQ(pushing.boxes.status(rank).text(), "3 exchanges complete");
            }
}

// Two ranks of 2 and 8 keys (B078): mixed-up bases would give 0.277 or 0.119. Four ranks, each in turn with the one
// (B080).
TEST(K06_LogBase, B078_B080_WeightsFollowTheStatedBase) {
    for (LseBase from : bases)
        for (LseBase to : bases) {
            Pushing two(shape_of({0, 1, 2}, 1), 1, {.partial_base = from, .lse_base = to});
            Pushing four(shape_of({0, 1, 2, 3, 4}, 1), 1, {.partial_base = from, .lse_base = to});
            for (std::int64_t head = 0; head < 2; ++head) {
                two.given.set(0, log_of(2, from), 1, 0, head);
                two.given.set(1, log_of(8, from), 0, 0, head);
            }
            for (std::size_t i = 0; i < 4; ++i)
                for (std::int64_t head = 0; head < 4; ++head)
                    four.given.set(i, log_of(std::pow(10, i), from), static_cast<std::int64_t>(i) == head ? 1 : 0, 0,
                                   head);
            two.run_and_expect_merge(text(from, to));
            four.run_and_expect_merge(text(from, to));
            for (std::int64_t head = 0; head < 2; ++head) {
                EXPECT_NEAR(two.out(0, head, 17), 0.2, 2e-6) << text(from, to);
                EXPECT_NEAR(two.lse(0, head), log_of(10, to), 2e-6) << text(from, to);
            }
            for (std::int64_t head = 0; head < 4; ++head) {
                EXPECT_NEAR(four.out(0, head, 511), std::pow(10, head) / 1111, 2e-6) << text(from, to);
                EXPECT_NEAR(four.lse(0, head), log_of(1111, to), 2e-6) << text(from, to);
            }
        }
}

// Ranks in another order: the same to a unit of BF16 (B080).
TEST(K05_Order, B080_RankOrderChangesAtMostOneUlpOfBf16) {
    Pushing pushing(shape_of({0, 1, 2, 3, 4}, 2), 2, {.partial_dtype = DType::bf16, .out_dtype = DType::bf16});
    pushing.given.fill_random(80, 5, 0.2);
    pushing.run_and_expect_merge("first order");
    std::vector<float> first, lses;
    std::vector<std::uint16_t> values;
    for (std::int64_t cell = 0; cell < 8; ++cell)
        for (int d = 0; d < value_dims; ++d) first.push_back(pushing.out(cell / 4, cell % 4, d));
    for (std::size_t i = 0; i < 4; ++i)
        for (std::int64_t cell = 0; cell < 8; ++cell) {
            lses.push_back(pushing.given.lses[i].value(cell / 4, cell % 4));
            for (int d = 0; d < value_dims; ++d) values.push_back(pushing.bf16(i, cell / 4, cell % 4, d));
        }
    std::vector<std::size_t> order{0, 1, 2, 3};
    while (std::next_permutation(order.begin(), order.end())) {
        for (std::size_t i = 0; i < 4; ++i)
            for (std::int64_t cell = 0; cell < 8; ++cell) {
                const std::size_t from = 8 * order[i] + static_cast<std::size_t>(cell);
                pushing.given.lses[i].set(lses[from], cell / 4, cell % 4);
                for (std::size_t d = 0; d < value_dims; ++d)
                    pushing.given.outs[i].at<std::uint16_t>(cell / 4, cell % 4, static_cast<std::int64_t>(d)) =
                        values[from * value_dims + d];
            }
        pushing.run_and_expect_merge("permuted");
        for (std::int64_t cell = 0; cell < 8; ++cell)
            for (int d = 0; d < value_dims; ++d) {
                const float expected = first[static_cast<std::size_t>(cell * value_dims + d)];
                ASSERT_NEAR(pushing.out(cell / 4, cell % 4, d), expected, 0x1p-7F * std::fabs(expected) + 1e-6F);
            }
    }
}

bool is_plus_zero(const Pushing& pushing, std::int64_t row, std::int64_t head) {
    for (int d = 0; d < value_dims; ++d)
        if (pushing.out(row, head, d) != 0 || std::signbit(pushing.out(row, head, d))) return false;
    return true;
}

// Nobody holds a key, whatever the payload and the sink; then exactly one rank does, each in turn: its bits (B082).
TEST(K07_EmptyRow, B082_NobodyOrOneHoldsKeys) {
    for (DType out : dtypes)
        for (float sink : {-infinity, 0.0F, infinity, not_a_number}) {
            Pushing pushing(shape_of({0, 2, 3}, 2), 2, {.out_dtype = out, .lse_base = LseBase::two});
            for (std::size_t i = 0; i < 2; ++i)
                for (std::int64_t cell = 0; cell < 6; ++cell)
                    pushing.given.set(i, -infinity, not_a_number, cell / 3, cell % 3);
            pushing.given.set_sinks({sink, sink, sink});
            pushing.run_and_expect_merge("nobody");
            for (std::int64_t cell = 0; cell < 6; ++cell) {
                EXPECT_TRUE(is_plus_zero(pushing, cell / 3, cell % 3)) << "sink " << sink;
                EXPECT_EQ(pushing.lse(cell / 3, cell % 3), -infinity) << "sink " << sink;
            }
        }
    for (std::size_t only = 0; only < 4; ++only) {
        Pushing pushing(shape_of({0, 1, 2, 3, 4}, 3), 3,
                        {.partial_dtype = DType::bf16, .out_dtype = DType::bf16, .lse_base = LseBase::two});
        for (std::size_t i = 0; i < 4; ++i)
            for (std::int64_t cell = 0; cell < 12; ++cell) {
                pushing.given.set(i, i == only ? -80.5F : -infinity, not_a_number, cell / 4, cell % 4);
                for (int d = 0; d < value_dims && i == only; ++d)  // every BF16 but NaN, subnormals among them
                    pushing.given.outs[i].at<std::uint16_t>(cell / 4, cell % 4, d) =
                        static_cast<std::uint16_t>((cell * value_dims + d) * 5 % 0x7F80 + (d % 2 == 0 ? 0x8000 : 0));
            }
        pushing.given.options.partial_base = LseBase::two;
        pushing.run_and_expect_merge("one of four");
        for (std::int64_t cell = 0; cell < 12; ++cell) {
            EXPECT_EQ(pushing.lse(cell / 4, cell % 4), -80.5F);
            for (int d = 0; d < value_dims; ++d)
                ASSERT_EQ(pushing.outs[static_cast<std::size_t>(cell % 4)].at<std::uint16_t>(cell / 4, 0, d),
                          pushing.given.outs[only].at<std::uint16_t>(cell / 4, cell % 4, d))
                    << "rank " << only << ", dim " << d;
        }
    }
}

// One request of five verify rows: rank 1 owns keys of rows 3 and 4 only, whatever its lse says elsewhere (B083).
TEST(K07_EmptyRow, B083_CountsDropRowsOfOneRankOnly) {
    for (float junk : {0.0F, 80.0F, infinity, not_a_number, -infinity})
        for (LseBase base : bases) {
            Pushing pushing(shape_of({0, 1, 3}, 5), 5, {.partial_base = base, .lse_base = base});
            pushing.given.fill_random(83, 4, 0);
            for (std::int64_t row = 0; row < 3; ++row)
                for (std::int64_t head = 0; head < 3; ++head) pushing.given.set(1, junk, not_a_number, row, head);
            pushing.set_counts(1, {0, -1, std::numeric_limits<std::int32_t>::min(), 1, 2048});
            pushing.run_and_expect_merge("lse of dropped rows " + std::to_string(junk));
            for (std::int64_t row = 0; row < 5; ++row)
                for (std::int64_t head = 0; head < 3; ++head) {
                    const float alone = bf16_to_float(pushing.bf16(0, row, head, 7));
                    EXPECT_EQ(pushing.out(row, head, 7) == alone, row < 3) << "row " << row;
                }
        }
}

// Another library's +inf for "no keys": NaN unless a count of 0 says what it is. Its payload, of anything, has no part
// where it is dropped (B081, B084).
TEST(K07_EmptyRow, B081_B084_ForeignEmptyRows) {
    for (float junk : {not_a_number, infinity, -infinity, 448.0F, FLT_MAX}) {
        Pushing with(shape_of(equal(8, 1), 2), 2, {}), without(shape_of(equal(8, 1), 2), 2, {});
        for (Pushing* each : {&with, &without}) each->given.fill_random(84, 3, 0);
        for (std::size_t i = 0; i < 8; ++i) {
            if (i % 3 == 1) continue;
            for (std::int64_t cell = 0; cell < 16; ++cell) {
                with.given.set(i, infinity, junk, cell / 8, cell % 8);
                without.given.set(i, -infinity, 0, cell / 8, cell % 8);
            }
            with.set_counts(i, {0, 0});
        }
        with.run_and_expect_merge("marked");
        without.run_and_expect_merge("-inf");
        for (std::int64_t cell = 0; cell < 16; ++cell) {
            EXPECT_EQ(with.lse(cell / 8, cell % 8), without.lse(cell / 8, cell % 8));
            for (int d = 0; d < value_dims; ++d)
                ASSERT_EQ(with.out(cell / 8, cell % 8, d), without.out(cell / 8, cell % 8, d)) << "payload " << junk;
        }
        with.set_counts(3, {0, 1});
        with.run_and_expect_merge("row 1 of rank 3 is not marked");
        for (std::int64_t head = 0; head < 8; ++head) {
            EXPECT_FALSE(std::isnan(with.out(0, head)));
            EXPECT_TRUE(std::isnan(with.out(1, head)));
            EXPECT_TRUE(std::isnan(with.lse(1, head)));
        }
    }
}

// Sinks take part once, after the merge, and are not in the lse (B081). NaN ones reach the output only.
TEST(K08_Sinks, OnceAndNotInTheLse) {
    const std::vector<float> sinks = {-infinity, -1e30F, -5, 0, 5, 95, 3e38F, infinity, not_a_number};
    for (LseBase base : bases) {
        Pushing with(shape_of({0, 4, 9}, 2), 2, {.partial_base = base}),
            plain(shape_of({0, 4, 9}, 2), 2, {.partial_base = base});
        for (Pushing* each : {&with, &plain}) each->given.fill_random(8, 6, 0.2);
        with.given.set_sinks(sinks);
        with.run_and_expect_merge("sinks");
        plain.run_and_expect_merge("no sinks");
        for (std::int64_t cell = 0; cell < 18; ++cell)
            EXPECT_TRUE(Pushing::same(with.lse(cell / 9, cell % 9), plain.lse(cell / 9, cell % 9)));
    }
    // (3 * 1 + 1 * 5) / (3 + 1 + 4): a sink for each rank would give 8 / 12.
    Pushing once(shape_of({0, 1, 2}, 1), 1, {});
    for (std::int64_t head = 0; head < 2; ++head) {
        once.given.set(0, std::log(3.0F), 1, 0, head);
        once.given.set(1, std::log(1.0F), 5, 0, head);
    }
    once.given.set_sinks({std::log(4.0F), std::log(4.0F)});
    once.run_and_expect_merge("once");
    for (std::int64_t head = 0; head < 2; ++head) {
        EXPECT_NEAR(once.out(0, head), 1.0, 2e-6);
        EXPECT_NEAR(once.lse(0, head), std::log(4.0), 2e-6) << "without the sink";
    }
}

// Values 2 bytes past 16, heads and rows at odd distances, an lse for all heads in one place, no lse wanted.
TEST(K12_Strides, OddViewsOfPartials) {
    for (std::int64_t shift : {1, 3, 7, 8}) {
        Pushing pushing(shape_of({0, 3, 5}, 3), 3, {.partial_dtype = DType::bf16});
        pushing.given.fill_random(12, 4, 0);
        Mailboxes& boxes = pushing.boxes;
        std::vector<Padded> shifted, one_lse;
        for (std::size_t i = 0; i < 2; ++i) {
            shifted.emplace_back(DType::bf16, std::vector<std::int64_t>{3, 5, value_dims + shift}, shift);
            one_lse.emplace_back(DType::f32, std::vector<std::int64_t>{3, 1}, 5);
            for (std::int64_t row = 0; row < 3; ++row) {
                one_lse[i].set(static_cast<float>(row) - static_cast<float>(i), row, 0);
                for (std::int64_t head = 0; head < 5; ++head) {
                    pushing.given.lses[i].set(one_lse[i].value(row, 0), row, head);
                    for (int d = 0; d < value_dims; ++d)
                        shifted[i].at<std::uint16_t>(row, head, d + shift) =
                            pushing.given.outs[i].at<std::uint16_t>(row, head, d);
                }
            }
        }
        for (std::size_t i = 0; i < 2; ++i) {
            const Placed values(shifted[i]), lse(one_lse[i]);
            PushArgs args{
                .rows = 3, .out = values.view(), .lse = lse.view(), .counts = {}, .lse_base = LseBase::natural};
            args.out.data = static_cast<const std::uint16_t*>(args.out.data) + shift;
            args.out.shape[2] = value_dims;
            args.lse.shape[1] = 5;
            args.lse.strides[1] = 0;
            push(boxes[static_cast<int>(i)], args, boxes.stream());
            boxes.synchronize();
        }
        pushing.merge_all("odd views");
        pushing.expect_merge("odd views, shift " + std::to_string(shift));
        EXPECT_EQ(boxes.not_armed(), "");

        pushing.push_all();
        for (int rank = 0; rank < 2; ++rank) {
            const Padded out(DType::f32, {3, boxes.layout().heads_of(rank), value_dims}, shift);
            const Placed placed(out);
            merge_pushed(boxes[rank],
                         {.rows = 3, .sinks = {}, .out = placed.view(), .lse = {}, .query_gathered = false},
                         boxes.stream());
            boxes.synchronize();
            placed.fetch();
            for (std::int64_t row = 0; row < 3; ++row)
                EXPECT_EQ(out.value(row, 0, 100), pushing.outs[static_cast<std::size_t>(rank)].value(row, 0, 100));
        }
        EXPECT_EQ(boxes.not_armed(), "");
    }
}

// Groups may list ranks in another order than the devices': whoever stands at place p of the given order has the heads
// of place p, and every rank's keys count once (B077).
TEST(K18_RankMapping, B077_HeadsBelongToPlacesOfTheGivenOrder) {
    for (const std::vector<int>& order : {std::vector<int>{0, 1, 2, 3}, {0, 2, 1, 3}, {3, 2, 1, 0}, {1, 2, 3, 0}}) {
        Pushing pushing(shape_of({0, 2, 3, 6, 8}, 2), 2, {});
        Mailboxes& boxes = pushing.boxes;
        for (int place = 0; place < 4; ++place)
            for (int other = 0; other < 4; ++other)
                boxes[place].peers.base[other] = boxes.memory(order[static_cast<std::size_t>(other)]).data();
        for (std::size_t place = 0; place < 4; ++place)
            for (std::int64_t cell = 0; cell < 16; ++cell)
                pushing.given.set(place, 0, static_cast<float>(16 * (cell % 8) + (1 << place)), cell / 8, cell % 8);
        pushing.push_all();
        for (int place = 0; place < 4; ++place) {
            const Bytes bytes = boxes.memory(order[static_cast<std::size_t>(place)]).read();
            for (int source = 0; source < 4; ++source)
                for (std::int64_t own = 0; own < boxes.layout().heads_of(place); ++own) {
                    std::uint16_t value = 0;
                    std::memcpy(&value, bytes.data() + boxes.values_byte(0, source, 1, own), 2);
                    EXPECT_EQ(bf16_to_float(value),
                              static_cast<float>(16 * (boxes.first_head(place) + own) + (1 << source)));
                }
        }
        pushing.merge_all("places");
        pushing.expect_merge("places");
        for (std::int64_t head = 0; head < 8; ++head)
            EXPECT_EQ(pushing.out(1, head), static_cast<float>(16 * head) + 15.0F / 4) << "head " << head;
        EXPECT_EQ(boxes.not_armed(), "");
    }
}

// Two ranks that take the same place leave another empty: the wait for it names it (B077).
TEST(K18_RankMapping, B077_TwoRanksInOnePlace) {
    Pushing pushing(shape_of({0, 2, 4, 6}, 2), 2, {});
    pushing.given.fill_random(77, 3, 0);
    for (int rank = 0; rank < 3; ++rank) pushing.boxes[rank].wait_limit_s = 0.05;
    pushing.boxes[1].peers.rank = 2;
    pushing.push_all();
    pushing.merge_all("places");
    for (int rank = 0; rank < 3; ++rank) {
        EXPECT_TRUE(pushing.boxes.status(rank).failed) << "rank " << rank;
        EXPECT_EQ(pushing.boxes.status(rank).missing_rank, 1) << pushing.boxes.status(rank).text();
        EXPECT_TRUE(std::isnan(pushing.outs[static_cast<std::size_t>(rank)].value(0, 0, 0)));
    }
}

}  // namespace
}  // namespace sparsemla::test
