// convert_indices and the arithmetic of ownership, against a model that hands tokens out one by one.
#include "sparsemla/indices.h"

#include <gtest/gtest.h>

#include <climits>
#include <random>
#include <string>
#include <vector>

#include "tests/conversion.h"
#include "tests/fenced.h"

namespace sparsemla::test {
namespace {

TEST(K13_InvalidIndex, AbsentIdsAreDroppedAndNeverBecomeSlotZero) {
    const CacheView cache{.pages = 10, .page_size = 64};
    single({-1, 5, -1, 7}, {9}, cache).expect({{9 * 64 + 5, 9 * 64 + 7}}, "two of four");
    single({-1, -1, INT_MIN}, {9}, cache).expect({{}}, "none");
    single({0, 0, -1}, {0}, cache).expect({{0, 0}}, "slot 0 is a slot");
}

TEST(K13_InvalidIndex, IdsPastTheTableAreDroppedWithoutReadingPastIt) {
    const CacheView cache{.pages = 4, .page_size = 64};
    Conversion c = single({255, 256, 257, INT_MAX, 254}, {0, 1, 2, 3}, cache);
    ConvertArgs args = c.args();
    const Fenced table(4 * sizeof(std::int32_t), alignof(std::int32_t));
    std::copy(c.table.begin(), c.table.end(), table.as<std::int32_t>());
    args.block_table.data = table.as<std::int32_t>();
    convert_indices(args);
    EXPECT_EQ(c.counts_memory[list_guard], 2);
    EXPECT_EQ(Ints(c.slots_memory.begin() + list_guard, c.slots_memory.begin() + list_guard + 5),
              (Ints{255, 254, -1, -1, -1}));
}

TEST(K13_InvalidIndex, BlockIdsOutsideTheCacheAreAbsent) {
    const CacheView cache{.pages = 3, .page_size = 4};
    single(iota(0, 24), {2, -1, 3, INT_MAX, INT_MIN, 0}, cache).expect({{8, 9, 10, 11, 0, 1, 2, 3}}, "pages 0..2");
}

TEST(K13_InvalidIndex, RowsWithoutARequestAreEmpty) {
    Conversion c = single({}, {5}, {.pages = 6, .page_size = 16});
    c.rows = 6;
    c.width = 2;
    c.ids = {1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2};
    c.request_of_row = {-1, 0, 1, INT_MAX, INT_MIN, 0};
    c.expect({{}, {81, 82}, {}, {}, {}, {81, 82}}, "requests -1, 0, 1, INT_MAX, INT_MIN, 0");
}

TEST(K13_InvalidIndex, LengthsBelowOneKeepNothing) {
    for (std::int32_t length : {INT_MIN, -5, -1, 0, 1, 17, 1 << 30, INT_MAX}) {
        Conversion c = single(iota(0, 16), {1, 0}, {.pages = 2, .page_size = 8});
        c.lengths = Ints{length};
        c.expect(model(c), "length " + std::to_string(length));
    }
}

TEST(K14_DuplicateIndex, OrderAndRepeatsAreKept) {
    std::mt19937 random(46);
    Conversion c = single({}, iota(0, 40), {.pages = 40, .page_size = 64});
    for (int i = 0; i < 2048; ++i) {
        const std::uint32_t choice = random();
        c.ids.push_back(i == 700 ? INT_MAX : i == 701 ? INT_MIN : choice % 9 < 4 ? -1 : choice / 16 % 97);
    }
    c.width = 2048;
    const std::vector<Ints> kept = model(c);
    ASSERT_GT(kept[0].size(), 900U);
    c.expect(kept, "repeats of 97 ids among -1");
}

TEST(K11_PageLayout, SlotsStepOverTheGapsBetweenPages) {
    const CacheView cache{.pages = 10, .page_size = 64, .slots_per_page = 192};
    single({0, 63, 64, 130}, {5, 0, 9}, cache).expect({{960, 1023, 0, 1730}}, "step 192");
}

TEST(K15_AddressOverflow, BlockIdsUpToTheLastSlotOfInt32) {
    const CacheView dense_pages{.pages = 33554431, .page_size = 64};
    single({0, 63, 64, 127, 128, 255}, {58254, 116509, 33554430, 33554431}, dense_pages)
        .expect({{58254 * 64, 58254 * 64 + 63, 116509 * 64, 116509 * 64 + 63, 33554430 * 64}}, "pages of 64");
    const CacheView gaps{.pages = 33554432, .page_size = 63, .slots_per_page = 64};
    single({0, 62, 63}, {33554431, 0}, gaps).expect({{2147483584, 2147483646, 0}}, "the largest slot, 2^31 - 2");
}

TEST(K15_AddressOverflow, LargestIdsAndShardings) {
    for (const auto& [world, interleave] : {std::pair{1, 1}, {2, 1}, {8, 1 << 20}, {INT_MAX, 1 << 20}}) {
        Ints table(2048);
        for (int i = 0; i < 2048; ++i) table[i] = i % 2047;
        for (std::int32_t id : {INT_MAX, INT_MAX - 1, 1 << 30}) {
            const std::int64_t rank = id / interleave % world;
            const std::int64_t local = id / interleave / world * interleave + id % interleave;
            Conversion c = single({id}, table, {.pages = 2047, .page_size = 1 << 20}, {world, rank, interleave});
            const std::int64_t block = table[local >> 20];
            c.expect({{static_cast<std::int32_t>((block << 20) + local % (1 << 20))}}, std::to_string(id));
        }
    }
}

TEST(K16_IndexDomain, RankTwoOfFourHoldsEveryFourthToken) {
    const CacheView cache{.pages = 1, .page_size = 16};
    single(iota(0, 64), {0}, cache, {4, 2, 1}).expect({iota(0, 16)}, "ids 2, 6, ..., 62");
    single(iota(0, 64), {0}, cache, {4, 2, 4}).expect({iota(0, 16)}, "ids 8..11, 24..27, ...");
}

TEST(K16_IndexDomain, EveryTokenIsOnExactlyOneRank) {
    std::mt19937 random(16);
    for (std::int64_t world = 1; world <= 8; ++world)
        for (std::int64_t page_size : {1, 4, 48, 64})
            for (std::int64_t interleave = 1; interleave <= page_size; ++interleave) {
                if (page_size % interleave != 0) continue;
                const std::int64_t pages = 3;
                Conversion c = single({}, {4, 0, 2}, {.pages = 5, .page_size = page_size, .slots_per_page = 70});
                c.ids = iota(0, static_cast<std::int32_t>(world * page_size * pages));
                std::shuffle(c.ids.begin(), c.ids.end(), random);
                c.width = static_cast<std::int64_t>(c.ids.size());
                std::size_t total = 0;
                for (std::int64_t rank = 0; rank < world; ++rank) {
                    c.sharding = {world, rank, interleave};
                    const std::vector<Ints> kept = model(c);
                    total += kept[0].size();
                    c.expect(kept, "world " + std::to_string(world) + " rank " + std::to_string(rank) + " interleave " +
                                       std::to_string(interleave) + " page_size " + std::to_string(page_size));
                }
                EXPECT_EQ(total, c.ids.size()) << "world " << world;
            }
}

TEST(K16_IndexDomain, LocalLengthsEqualCountingAndAddUp) {
    for (std::int64_t world = 1; world <= 8; ++world)
        for (std::int64_t interleave : {1, 2, 3, 4, 16, 64}) {
            const std::int64_t longest = 3 * world * interleave + 2;
            const std::vector<Ints> local = deal(longest, world, interleave);
            Ints held(static_cast<std::size_t>(world), 0);
            for (std::int64_t length = 0; length <= longest; ++length) {
                for (std::int64_t rank = 0; rank < world; ++rank)
                    ASSERT_EQ(local_length(length, {world, rank, interleave}), held[rank])
                        << "world " << world << " rank " << rank << " interleave " << interleave << " length "
                        << length;
                if (length == longest) break;
                for (std::int64_t rank = 0; rank < world; ++rank) held[rank] += local[rank][length] >= 0 ? 1 : 0;
            }
        }
    for (std::int64_t length : {std::int64_t{-1}, std::int64_t{INT_MIN}, std::int64_t{LLONG_MIN}})
        EXPECT_EQ(local_length(length, {3, 1, 4}), 0) << length;
    EXPECT_EQ(local_length(LLONG_MAX, {1, 0, 64}), LLONG_MAX);
}

TEST(K16_IndexDomain, OwnerLocalAndInverseAgreeWithDealing) {
    for (std::int64_t world = 1; world <= 8; ++world)
        for (std::int64_t interleave : {1, 2, 3, 16, 64}) {
            const std::int64_t tokens = 3 * world * interleave + 1;
            const std::vector<Ints> local = deal(tokens, world, interleave);
            for (std::int64_t token = 0; token < tokens; ++token) {
                const std::int64_t owner = owner_of(token, world, interleave);
                for (std::int64_t rank = 0; rank < world; ++rank)
                    ASSERT_EQ(local[rank][token] >= 0, rank == owner) << token << " of world " << world;
                ASSERT_EQ(local_of(token, world, interleave), local[owner][token]) << token;
                ASSERT_EQ(global_of(local[owner][token], {world, owner, interleave}), token);
            }
        }
    for (std::int64_t token : {std::int64_t{INT_MAX}, std::int64_t{1} << 40})
        EXPECT_EQ(global_of(local_of(token, 7, 48), {7, owner_of(token, 7, 48), 48}), token);
}

TEST(K16_IndexDomain, VerifyRowsSeeTheirOwnLength) {
    // Rows of one request end at 97, 98, 99, 100 tokens: the newest is on one rank only.
    for (std::int64_t interleave : {1, 4, 16}) {
        std::vector<std::size_t> sums(4, 0);
        for (std::int64_t rank = 0; rank < 4; ++rank) {
            Conversion c;
            c.rows = 4;
            c.width = 100;
            c.requests = 4;  // one table row and one length per verify row
            c.max_pages = 2;
            c.cache = {.pages = 8, .page_size = 16};
            c.sharding = {4, rank, interleave};
            c.table = {3, 1, 3, 1, 3, 1, 3, 1};
            c.request_of_row = {0, 1, 2, 3};
            c.lengths = Ints{97, 98, 99, 100};
            for (int row = 0; row < 4; ++row)
                for (std::int32_t id = 0; id < 100; ++id) c.ids.push_back(id);
            const std::vector<Ints> kept = model(c);
            c.expect(kept, "rank " + std::to_string(rank));
            for (std::size_t row = 0; row < 4; ++row) {
                EXPECT_EQ(static_cast<std::int64_t>(kept[row].size()),
                          local_length(97 + static_cast<std::int64_t>(row), c.sharding));
                sums[row] += kept[row].size();
            }
        }
        EXPECT_EQ(sums, (std::vector<std::size_t>{97, 98, 99, 100})) << "interleave " << interleave;
    }
}

TEST(K17_TableWidth, LastPartialBlockIsPresent) {
    for (std::int64_t world : {1, 2, 4})
        for (std::int64_t blocks : {1, 2, 5})
            for (std::int64_t delta : {-1, 0, 1}) {
                const std::int64_t length = blocks * 16 * world + delta;
                const std::int64_t owner = owner_of(length - 1, world, 1);
                const std::int64_t held = local_length(length, {world, owner, 1});
                Conversion c = single({static_cast<std::int32_t>(length - 1)},
                                      iota(0, static_cast<std::int32_t>((held + 15) / 16)),
                                      {.pages = 8, .page_size = 16}, {world, owner, 1});
                c.expect({{static_cast<std::int32_t>(held - 1)}}, "length " + std::to_string(length));
            }
}

TEST(K17_TableWidth, ATableWiderThanNeededChangesNothing) {
    const CacheView cache{.pages = 8, .page_size = 16};
    Ints local_width{7, 3, 1};
    Ints global_width{7, 3, 1, -1, list_poison, INT_MAX};
    single(iota(0, 96), local_width, cache, {2, 1, 4})
        .expect(model(single(iota(0, 96), local_width, cache, {2, 1, 4})), "local width");
    single(iota(0, 96), global_width, cache, {2, 1, 4})
        .expect(model(single(iota(0, 96), local_width, cache, {2, 1, 4})), "global width");
}

TEST(Convert, RandomStepsEqualTheModel) {
    for (std::uint32_t seed = 1; seed <= 300; ++seed) {
        std::mt19937 random(seed);
        auto pick = [&](std::int64_t low, std::int64_t high) {
            return std::uniform_int_distribution<std::int64_t>(low, high)(random);
        };
        Conversion c;
        c.rows = pick(0, 6);
        c.width = pick(0, 70);
        c.requests = pick(0, 4);
        c.max_pages = pick(0, 6);
        c.padding = pick(0, 5);
        c.list_stride = pick(1, 3);
        c.sharding.interleave = pick(1, 9);
        c.sharding.world = pick(1, 8);
        c.sharding.rank = pick(0, c.sharding.world - 1);
        const std::int64_t page_size = c.sharding.interleave * pick(1, 5);
        c.cache = {
            .pages = pick(0, 12), .page_size = page_size, .slots_per_page = pick(0, 1) * (page_size + pick(0, 9))};
        const std::int64_t reach = c.sharding.world * page_size * c.max_pages;
        auto fill = [&](Ints& values, std::int64_t n, std::int64_t low, std::int64_t high) {
            for (std::int64_t i = 0; i < n; ++i) values.push_back(static_cast<std::int32_t>(pick(low, high)));
        };
        fill(c.ids, c.rows * c.width, -2, reach + 2);
        fill(c.table, c.requests * c.max_pages, -1, c.cache.pages);
        fill(c.request_of_row, c.rows, -1, c.requests);
        if (pick(0, 1) == 1) {
            c.lengths.emplace();
            fill(*c.lengths, c.requests, -1, reach + 1);
        }
        c.expect(model(c), "seed " + std::to_string(seed));
    }
}

}  // namespace
}  // namespace sparsemla::test
