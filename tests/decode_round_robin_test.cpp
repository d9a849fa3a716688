// ColumnRule::round_robin: chunks are cut from the planned lists, whatever counts and absent columns leave of them, and
// dealt to the splits in turn. `blocks` over one source serves as the yardstick: a list that holds, block after block,
// the chunks of each split must give the same bits.
#include <random>

#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

constexpr int chunk = 16;
constexpr std::int64_t heads = 3;
constexpr std::int64_t pages = 2;  // of each source
constexpr std::int64_t num_slots = pages * 64;

using Lists = std::vector<std::vector<std::int32_t>>;  // per source, of the planned width; negative: absent

struct Widths {
    std::int64_t first, second;
};

constexpr Widths all_widths[] = {{100, 70}, {64, 32}, {5, 3}, {0, 70}, {100, 0}, {15, 33}, {16, 16}};

/// Records of source 1 differ from those of source 0 in the same slot.
std::function<float(int)> record_of(std::int64_t source, std::int64_t slot) {
    return [seed = static_cast<std::uint64_t>(source * 1000 + slot)](int d) mutable {
        seed = seed * 6364136223846793005U + static_cast<std::uint64_t>(d) * 1442695040888963407U + 1;
        return static_cast<float>(static_cast<int>(seed >> 33 & 0xFF) - 128) / 32;
    };
}

void set_queries(Step& step) {
    for (std::int64_t head = 0; head < heads; ++head) step.query(0, head, record_of(7, head));
    step.args.softmax_scale = 0.05F;
}

/// One row over two sources.
Step two_sources(const Widths& widths, const Lists& lists) {
    Step step({.heads = heads,
               .sources = {{.width = widths.first, .pages = pages}, {.width = widths.second, .pages = pages}},
               .out_dtype = DType::f32});
    for (std::size_t source = 0; source < 2; ++source) {
        for (std::int32_t slot = 0; slot < num_slots; ++slot)
            step.record(slot, record_of(static_cast<std::int64_t>(source), slot), source);
        step.list(0, lists[source], source);
    }
    set_queries(step);
    return step;
}

/// The same row over one source, whose list is cut into blocks; its cache holds the records of both sources.
Result run_blocks(const std::vector<std::int32_t>& list, PlanOptions options) {
    Step step({.heads = heads,
               .sources = {{.width = static_cast<std::int64_t>(list.size()), .pages = 2 * pages}},
               .out_dtype = DType::f32});
    for (std::int32_t slot = 0; slot < 2 * num_slots; ++slot)
        step.record(slot, record_of(slot / num_slots, slot % num_slots));
    step.list(0, list);
    set_queries(step);
    options.columns = ColumnRule::blocks;
    return step.run(options);
}

/// Slots for `count` of the columns, every eighth absent.
std::vector<std::int32_t> random_list(std::int64_t count, std::uint64_t seed) {
    std::mt19937_64 bits(seed);
    std::vector<std::int32_t> list;
    for (std::int64_t c = 0; c < count; ++c)
        list.push_back(bits() % 8 == 0 ? -1 : static_cast<std::int32_t>(bits() % num_slots));
    return list;
}

Lists random_lists(const Widths& counts, std::uint64_t seed) {
    return {random_list(counts.first, seed), random_list(counts.second, seed + 1)};
}

constexpr std::int64_t chunks_in(std::int64_t columns) { return (columns + chunk - 1) / chunk; }

/// Column by column: its chunk's number, the split that takes it, and its place in that split's block.
std::vector<std::int32_t> blocks_of(const Lists& lists, std::int64_t chunks_of_first, std::int64_t splits) {
    std::int64_t block = 0;  // columns of a split
    for (std::size_t source = 0; source < 2; ++source) {
        const std::int64_t first = source == 0 ? 0 : chunks_of_first;
        const std::int64_t end = first + chunks_in(static_cast<std::int64_t>(lists[source].size()));
        block = std::max(block, (end + splits - 1) / splits * chunk);
    }
    std::vector<std::int32_t> list(static_cast<std::size_t>(splits * block), -1);
    for (std::size_t source = 0; source < 2; ++source)
        for (std::size_t c = 0; c < lists[source].size(); ++c) {
            if (lists[source][c] < 0) continue;
            const std::int64_t number = (source == 0 ? 0 : chunks_of_first) + static_cast<std::int64_t>(c) / chunk;
            const std::int64_t place = number % splits * block + number / splits * chunk;
            list[static_cast<std::size_t>(place) + c % chunk] =
                lists[source][c] + static_cast<std::int32_t>(source == 0 ? 0 : num_slots);
        }
    return list;
}

PlanOptions round_robin(int splits, PFormat format = PFormat::e4m3, Anchor anchor = Anchor::split_running_max) {
    return {.kernel = "cpu",
            .p_format = format,
            .anchor = anchor,
            .splits = splits,
            .columns = ColumnRule::round_robin,
            .chunk = chunk};
}

/// Counts that end a list in the middle of a chunk, at its border, at once, or nowhere.
std::vector<Widths> counts_within(const Widths& widths) {
    const auto cut = [](std::int64_t count, std::int64_t width) { return std::min(count, width); };
    return {widths,
            {cut(41, widths.first), cut(23, widths.second)},
            {cut(32, widths.first), cut(1, widths.second)},
            {0, widths.second},
            {widths.first, 0},
            {cut(99, widths.first), cut(48, widths.second)}};
}

TEST(RoundRobin, EverySplitTakesItsChunks) {
    std::uint64_t seed = 1;
    for (const Widths& widths : all_widths)
        for (const Widths& counts : counts_within(widths)) {
            const Lists lists = random_lists(counts, seed += 2);
            Step step = two_sources(widths, lists);
            for (const int splits : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 64}) {
                const Result result = step.run(round_robin(splits));
                ASSERT_EQ(result.schedule.splits, splits);
                const std::vector<std::int32_t> list = blocks_of(lists, chunks_in(widths.first), splits);
                ASSERT_TRUE(same_bits(result, 0, run_blocks(list, round_robin(splits)), 0))
                    << to_string(result.schedule) << ", widths " << widths.first << " and " << widths.second
                    << ", counts " << counts.first << " and " << counts.second;
            }
        }
}

TEST(RoundRobin, WithEveryAnchorAndFormat) {
    const Widths widths = all_widths[0];
    const Lists lists = random_lists({91, 55}, 50);
    Step step = two_sources(widths, lists);
    for (const PFormat format : {PFormat::e4m3, PFormat::f16, PFormat::bf16})
        for (const Anchor anchor : {Anchor::split_running_max, Anchor::chunk_max, Anchor::row_max})
            for (const int splits : {1, 5, 6, 10, 16}) {
                const PlanOptions options = round_robin(splits, format, anchor);
                const Result result = step.run(options);
                const std::vector<std::int32_t> list = blocks_of(lists, chunks_in(widths.first), splits);
                EXPECT_TRUE(same_bits(result, 0, run_blocks(list, options), 0)) << to_string(result.schedule);
                expect_oracle(step, result);
            }
}

TEST(RoundRobin, OtherCutsGiveOtherBits) {
    // Otherwise the equalities here would prove little.
    const Widths widths = {100, 70};
    const Widths counts = {41, 55};
    const Lists lists = random_lists(counts, 60);
    Step step = two_sources(widths, lists);
    const PlanOptions options = round_robin(3);
    const Result result = step.run(options);
    for (const ColumnRule rule : {ColumnRule::blocks, ColumnRule::interleaved}) {
        PlanOptions other = options;
        other.columns = rule;
        EXPECT_FALSE(same_bits(result, 0, step.run(other), 0)) << name(rule);
    }
    const auto bits_equal_with = [&](const std::vector<std::int32_t>& list) {
        return same_bits(result, 0, run_blocks(list, options), 0);
    };
    EXPECT_TRUE(bits_equal_with(blocks_of(lists, chunks_in(widths.first), 3)));
    EXPECT_FALSE(bits_equal_with(blocks_of(lists, chunks_in(counts.first), 3))) << "chunks numbered by the count";
    Lists dense_lists = lists;
    for (std::vector<std::int32_t>& list : dense_lists) std::erase(list, -1);
    EXPECT_FALSE(bits_equal_with(blocks_of(dense_lists, chunks_in(widths.first), 3))) << "absent columns closed up";
}

// A count and absent columns in the place of what it leaves out are the same.
TEST(RoundRobin, CountsMoveNoColumn) {
    const Widths widths = {100, 70};
    for (const Widths& counts : counts_within(widths)) {
        Step step = two_sources(widths, random_lists(counts, 70));
        for (const int splits : {1, 3, 5, 16}) {
            const Result counted = step.run(round_robin(splits));
            step.count(0, widths.first, 0);
            step.count(0, widths.second, 1);
            EXPECT_TRUE(same_bits(counted, 0, step.run(round_robin(splits)), 0))
                << to_string(counted.schedule) << ", counts " << counts.first << " and " << counts.second;
            step.count(0, counts.first, 0);
            step.count(0, counts.second, 1);
        }
    }
}

TEST(RoundRobin, MoreSplitsThanChunksChangeNothing) {
    const Widths widths = {100, 70};
    Step step = two_sources(widths, random_lists(widths, 80));
    const auto chunks = static_cast<int>(chunks_in(widths.first) + chunks_in(widths.second));
    const Result each = step.run(round_robin(chunks));
    for (const int splits : {chunks + 1, 16, 64})
        EXPECT_TRUE(same_bits(each, 0, step.run(round_robin(splits)), 0)) << splits;
    EXPECT_FALSE(same_bits(each, 0, step.run(round_robin(chunks - 1)), 0));
}

TEST(RoundRobin, UndividedFullListsAreThoseOfBlocks) {
    for (const Widths& widths : {Widths{64, 32}, Widths{16, 160}, Widths{48, 0}}) {
        Lists lists = random_lists(widths, 90);
        for (std::vector<std::int32_t>& list : lists)
            for (std::int32_t& slot : list) slot = std::max(slot, 0);
        Step step = two_sources(widths, lists);
        PlanOptions blocks = round_robin(1);
        blocks.columns = ColumnRule::blocks;
        EXPECT_TRUE(same_bits(step.run(round_robin(1)), 0, step.run(blocks), 0)) << widths.first;
    }
}

TEST(RoundRobin, RowsWithoutAKeyAreEmpty) {
    for (const Widths& widths : all_widths)
        for (const int splits : {1, 5, 16}) {
            Step counted = two_sources(widths, {{}, {}});
            expect_empty_row(counted.run(round_robin(splits)), 0);
            counted.count(0, widths.first, 0);
            counted.count(0, widths.second, 1);
            expect_empty_row(counted.run(round_robin(splits)), 0);
        }
}

// Source 1's chunks follow a million that hold no key.
TEST(RoundRobin, FewColumnsOfAWideList) {
    constexpr std::int64_t wide = 1 << 20;
    Step step({.heads = heads, .sources = {{.width = wide, .pages = pages}, {.width = 40, .pages = pages}}});
    for (std::size_t source = 0; source < 2; ++source) step.histogram(source, source == 0 ? 0 : num_slots);
    step.list(0, {3, -1, 5}, 0);
    step.list(0, {}, 1);
    PlanOptions options = round_robin(5);
    options.chunk = 1;
    expect_histogram(step.run(options), 0, {3, 5});
    step.list(0, {}, 0);
    step.list(0, slot_range(0, 40), 1);
    expect_histogram(step.run(options), 0, slot_range(0, 40), num_slots);
}

}  // namespace
}  // namespace sparsemla::test
