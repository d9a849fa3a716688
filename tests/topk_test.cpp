// merge_topk against sorting all candidates, on the tested device.
#include "sparsemla/topk.h"

#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/fenced.h"
#include "tests/topk_merge.h"

namespace sparsemla::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// As one rank of one, against a list written out.
void expect_selected(TopkMerge m, const Ints& wanted, const std::string& what) {
    ASSERT_EQ(m.selection()[0], wanted) << what;
    m.expect_right(what);
    EXPECT_EQ(m.written(0), wanted) << what;
}

TEST(MergeTopk, ScoresFallAndTiesGoToTheLowestId) {
    const std::vector<std::vector<std::pair<float, std::int32_t>>> lists = {{{1.0F, 7}, {3.0F, 9}},
                                                                            {{3.0F, 4}, {-2.0F, 0}, {1.0F, 5}}};
    expect_selected(one_row(lists, 4), {4, 9, 5, 7}, "the lowest of two is not the last");
    expect_selected(one_row(lists, 3), {4, 9, 5}, "a tie at the boundary");
    expect_selected(one_row(lists, 1), {4}, "one");
    expect_selected(one_row(lists, 9), {4, 9, 5, 7, 0}, "more than there are");
}

TEST(MergeTopk, SpecialScores) {
    const float negative_nan = -std::numeric_limits<float>::quiet_NaN();
    const float signalling = std::bit_cast<float>(0x7F800001U), last_nan = std::bit_cast<float>(0xFFFFFFFFU);
    const float least = std::numeric_limits<float>::denorm_min(), most = std::numeric_limits<float>::max();
    ASSERT_TRUE(std::signbit(negative_nan));
    TopkMerge m = one_row({{{nan, 8}, {-0.0F, 3}, {-infinity, 1}, {signalling, 6}},
                           {{0.0F, 2}, {infinity, 9}, {negative_nan, 5}, {-least, 0}},
                           {{last_nan, 7}, {least, 4}, {-0.0F, 1}, {-most, 11}},
                           {{most, 12}, {infinity, 10}}},
                          20);
    const Ints all = {9, 10, 12, 4, 1, 2, 3, 0, 11, 1, 5, 6, 7, 8};
    for (m.k = 0; m.k <= 16; ++m.k)
        expect_selected(m, Ints(all.begin(), all.begin() + std::min<std::int64_t>(m.k, 14)), std::to_string(m.k));
}

TEST(MergeTopk, AbsentColumns) {
    TopkMerge m =
        one_row({{{9.0F, -1}, {1.0F, 3}}, {{8.0F, INT_MIN}, {7.0F, INT_MAX}}, {}, {{5.0F, 0}, {6.0F, -7}}}, 3);
    expect_selected(m, {INT_MAX, 0, 3}, "ids below 0 do not count");
    m.source_counts = Ints{1, -5, INT_MAX, INT_MIN};
    m.ids[4] = 6;  // of the third list, whose scores are +inf
    m.ids[5] = 2;
    expect_selected(m, {2, 6}, "counts of any sign");
    m.source_counts = Ints{0, 0, 0, 0};
    expect_selected(m, {}, "no candidate");
    m.source_counts.reset();
    expect_selected(m, {2, 6, INT_MAX}, "without counts");
}

TEST(MergeTopk, DuplicatesCountOnceForEachOccurrence) {
    const std::vector<std::vector<std::pair<float, std::int32_t>>> lists = {
        {{2.0F, 5}, {2.0F, 5}}, {{2.0F, 5}, {3.0F, 5}}, {{2.0F, 4}, {1.0F, 5}}};
    for (std::int64_t k = 0; k <= 7; ++k) {
        const Ints all = {5, 4, 5, 5, 5, 5};
        expect_selected(one_row(lists, k), Ints(all.begin(), all.begin() + std::min<std::int64_t>(k, 6)),
                        std::to_string(k));
    }
}

TEST(MergeTopk, TheRanksPartitionTheSelection) {
    std::mt19937_64 bits(61);
    for (const Scores scores : {Scores::normal, Scores::few, Scores::equal})
        for (const std::int64_t world : {1, 2, 3, 4, 8})
            for (const std::int64_t interleave : {1, 16, 64}) {
                TopkMerge m = random_topk({.sources = world, .scores = scores, .tokens = 3000}, {}, bits);
                const std::vector<Ints> selected = m.selection();
                std::vector<Ints> merged(selected.size());
                std::vector<std::vector<std::size_t>> next(selected.size(), std::vector<std::size_t>(world, 0));
                std::vector<std::vector<Ints>> of_rank(selected.size());
                for (std::int64_t rank = 0; rank < world; ++rank) {
                    m.sharding = {world, rank, interleave};
                    m.expect_right("rank " + std::to_string(rank) + " of " + std::to_string(world) + ", interleave " +
                                   std::to_string(interleave));
                    for (std::size_t row = 0; row < selected.size(); ++row)
                        of_rank[row].push_back(m.written(static_cast<std::int64_t>(row)));
                }
                // Each selected id is the next one of exactly the rank that owns it.
                for (std::size_t row = 0; row < selected.size(); ++row) {
                    std::size_t total = 0;
                    for (const Ints& ids : of_rank[row]) total += ids.size();
                    EXPECT_EQ(total, selected[row].size());
                    for (const std::int32_t id : selected[row]) {
                        const std::int64_t rank = owner_of(id, world, interleave);
                        std::size_t& at = next[row][rank];
                        ASSERT_LT(at, of_rank[row][rank].size());
                        ASSERT_EQ(of_rank[row][rank][at++], id);
                    }
                }
            }
}

TEST(MergeTopk, LargestIdsAndShardings) {
    std::mt19937_64 bits(66);
    for (const auto& [world, interleave] :
         {std::pair{1, INT_MAX}, {2, INT_MAX}, {INT_MAX, 1}, {INT_MAX, INT_MAX}, {3, 1 << 30}, {2048, 1 << 20}})
        for (const std::int32_t near : {0, INT_MAX / 2, INT_MAX}) {
            TopkMerge m = random_topk({.tokens = std::int64_t{INT_MAX} + 1}, {}, bits);
            m.ids[5] = near;
            const std::int64_t rank = owner_of(near, world, interleave);
            for (const std::int64_t other : {rank - 1, rank, rank + 1}) {
                if (other < 0 || other >= world) continue;
                m.sharding = {world, other, interleave};
                m.expect_right("rank " + std::to_string(other) + " of " + std::to_string(world) + ", interleave " +
                               std::to_string(interleave));
            }
        }
}

TEST(MergeTopk, RandomSizes) {
    std::mt19937_64 bits(62);
    const auto pick = [&](std::int64_t low, std::int64_t high) {
        return std::uniform_int_distribution<std::int64_t>(low, high)(bits);
    };
    for (int number = 0; number < 300; ++number) {
        const TopkSpec spec{.sources = pick(1, 17),
                            .rows = pick(0, 4),
                            .width = pick(0, 3) == 0 ? pick(0, 3) : pick(0, 200),
                            .k = pick(0, 3) == 0 ? pick(0, 4) : pick(0, 700),
                            .scores = static_cast<Scores>(pick(0, 4)),
                            .tokens = pick(1, 2000),
                            .counts = pick(0, 1) == 1,
                            .holes = pick(0, 1) == 1};
        const std::int64_t world = pick(1, 9);
        TopkMerge m = random_topk(spec, {world, pick(0, world - 1), pick(1, 70)}, bits);
        m.padding = pick(0, 5);
        m.source_padding = pick(0, 5);
        m.list_stride = pick(1, 3);
        m.expect_right("number " + std::to_string(number));
    }
}

// What a GPU looks at several times: more candidates than one CTA's shared memory holds, at every depth of ties.
TEST(MergeTopk, ManyCandidates) {
    std::mt19937_64 bits(63);
    for (const Scores scores : {Scores::normal, Scores::close, Scores::few, Scores::equal, Scores::any_bits})
        for (const std::int64_t tokens : {std::int64_t{3}, std::int64_t{5000}, std::int64_t{INT_MAX}})
            for (const std::int64_t k : {1, 512, 2047, 2048, 4095, 4096})
                for (const std::int64_t world : {1, 8}) {
                    TopkMerge m = random_topk({.sources = 16,
                                               .rows = 1,
                                               .width = k % 2 == 0 ? 2048 : 1999,
                                               .k = k,
                                               .scores = scores,
                                               .tokens = tokens,
                                               .counts = k == 2047,
                                               .holes = k == 2048},
                                              {world, world / 2, 16}, bits);
                    m.expect_right("scores " + std::to_string(static_cast<int>(scores)) + ", tokens " +
                                   std::to_string(tokens) + ", k " + std::to_string(k) + ", world " +
                                   std::to_string(world));
                }
}

TEST(MergeTopk, AsManyCandidatesAsAreWanted) {
    std::mt19937_64 bits(64);
    for (const std::int64_t n : {1, 2, 31, 32, 33, 64, 65, 1023, 1024, 1025, 2048, 4095, 4096})
        for (const std::int64_t k : {n - 1, n, n + 1}) {
            if (k > max_gpu_topk) continue;
            TopkMerge m =
                random_topk({.sources = 1, .rows = 1, .width = n, .k = k, .counts = false, .holes = false}, {}, bits);
            m.expect_right(std::to_string(n) + " candidates, k " + std::to_string(k));
        }
}

/// With tokens of up to a few requests.
TopkMerge random_fused(std::mt19937_64& bits, std::int64_t k) {
    const auto below = [&](std::int64_t n) {
        return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(n));
    };
    Conversion to = random_conversion(bits, 0);
    const std::int64_t tokens = std::min(to.max_pages * to.cache.page_size * to.sharding.world, std::int64_t{INT_MAX});
    TopkMerge m = random_topk({.sources = 1 + below(9),
                               .rows = to.rows,
                               .width = below(400),
                               .k = k,
                               .scores = static_cast<Scores>(below(5)),
                               .tokens = tokens + std::min(tokens / 8 + 1, INT_MAX - tokens),
                               .counts = below(2) == 0},
                              to.sharding, bits);
    const std::int64_t first = to.sharding.rank * to.sharding.interleave;  // that the rank holds
    for (std::int32_t& id : m.ids)
        if (id >= 0 && below(3) == 0)
            id = static_cast<std::int32_t>(std::min<std::int64_t>(first + below(2 * to.sharding.interleave), INT_MAX));
    m.to = std::move(to);
    return m;
}

TEST(MergeTopkToSlots, IsTheSelectionAndThenConversion) {
    std::mt19937_64 bits(65);
    std::size_t kept = 0;
    for (int number = 0; number < 150; ++number) {
        constexpr std::int64_t ks[] = {0, 1, 33, 256, 2048, 2500};
        TopkMerge m = random_fused(bits, ks[number % 6]);
        if (m.sharding.world < 100)
            m.expect_right("number " + std::to_string(number));
        else  // more ranks than the model deals tokens to
            m.run(m.args());
        const std::pair<Ints, Ints> fused = {m.list_memory, m.counts_memory};
        for (std::int64_t row = 0; row < m.rows; ++row) kept += m.written(row).size();

        // The same in two calls.
        TopkMerge ids = m;
        ids.to.reset();
        ids.run(ids.args());
        Conversion conversion = *m.to;
        conversion.width = m.k;
        conversion.sharding = m.sharding;
        conversion.padding = m.padding;
        conversion.list_stride = m.list_stride;
        for (std::int64_t row = 0; row < m.rows; ++row)
            for (std::int64_t column = 0; column < m.k; ++column)
                conversion.ids.push_back(ids.list_memory[list_guard + row * (m.k + m.padding) + column]);
        convert_indices(conversion.args());
        EXPECT_EQ(fused.first, conversion.slots_memory) << number;
        EXPECT_EQ(fused.second, conversion.counts_memory) << number;
    }
    EXPECT_GT(kept, 1000U);
}

TEST(MergeTopkToSlots, TokensThatConversionDropsTakeTheirPlaceInTheSelection) {
    TopkMerge m = one_row({{{9.0F, 40}, {8.0F, 3}, {7.0F, 17}, {6.0F, 5}}}, 3);
    m.to = single({}, {2, 9}, {.pages = 4, .page_size = 16});
    m.to->lengths = Ints{32};
    ASSERT_EQ(m.selection()[0], (Ints{40, 3, 17}));  // past the length, here, on a page that the cache does not have
    m.expect_right("one of three");
    EXPECT_EQ(m.written(0), (Ints{2 * 16 + 3}));
}

TEST(MergeTopk, FarStrides) {
    if (sanitized || on_gpu()) GTEST_SKIP() << "maps 16 GiB; gpu_topk_test has this test for a GPU";
    const std::int64_t far = (std::int64_t{1} << 31) + 5;
    const Fenced scores(static_cast<std::size_t>(far + 2) * 4), ids(static_cast<std::size_t>(far + 2) * 4);
    Ints list(2, list_poison), counts(1, list_poison);
    std::int32_t id = 10;
    for (const std::int64_t at : {std::int64_t{0}, std::int64_t{1}, far, far + 1}) {
        scores.as<float>()[at] = static_cast<float>(id);
        ids.as<std::int32_t>()[at] = id++;
    }
    MergeTopkArgs args{.rows = 1, .k = 2};
    args.scores = {scores.data(), DType::f32, {}, 3, {2, 1, 2}, {far, LLONG_MAX, 1}};
    args.ids = {ids.data(), DType::i32, {}, 3, {2, 1, 2}, {far, LLONG_MAX, 1}};
    args.token_ids = dense(list.data(), DType::i32, {1, 2});
    args.counts = dense(counts.data(), DType::i32, {1});
    merge_topk(args);
    EXPECT_EQ(list, (Ints{13, 12}));
    EXPECT_EQ(counts, Ints{2});
}

}  // namespace
}  // namespace sparsemla::test
