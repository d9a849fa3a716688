#include "harness/columns.h"

#include <algorithm>
#include <array>
#include <limits>

#include "harness/random.h"

namespace sparsemla::harness {

namespace {

enum Stream : std::int64_t { counts_stream = 100, columns_stream, tail_stream };

constexpr double repeat_share = 0.01;
constexpr std::int64_t shortest_leading_run = 16;  // columns; a whole tile of scores without a maximum

/// Every slot that a cache holds, drawn without repetition until all are out.
class Deck {
   public:
    explicit Deck(const CacheView& cache) {
        slots_.reserve(static_cast<std::size_t>(cache.pages * cache.page_size));
        for (std::int64_t page = 0; page < cache.pages; ++page)
            for (std::int64_t offset = 0; offset < cache.page_size; ++offset)
                slots_.push_back(static_cast<std::int32_t>(page * cache.slot_step() + offset));
    }

    void restart() { drawn_ = 0; }
    std::int32_t draw(Random& random) {
        if (drawn_ == slots_.size()) restart();
        const auto rest = static_cast<std::int64_t>(slots_.size() - drawn_);
        std::swap(slots_[drawn_], slots_[drawn_ + static_cast<std::size_t>(random.below(rest))]);
        return slots_[drawn_++];
    }

   private:
    std::vector<std::int32_t> slots_;
    std::size_t drawn_ = 0;
};

/// One row's count where the recipe says ragged: the awkward numbers in turn, from a random one on.
std::int32_t ragged_count(const Recipe& recipe, std::int64_t width, std::int64_t list, std::int64_t row) {
    const std::int64_t first = Random(recipe.seed, {counts_stream, list}).below(1 << 20);
    Random random(recipe.seed, {counts_stream, list, row});
    const std::int64_t any = random.below(width + 1);
    const std::int64_t above = width + 1 + random.below(100);
    const std::int64_t negative = -1 - random.below(1 << 30);
    const std::array<std::int64_t, 14> counts = {width, any,       65, 0,  any,   64,  negative,
                                                 127,   width - 1, 1,  63, above, any, 128};
    const std::int64_t count = counts[static_cast<std::size_t>((first + row) % 14)];
    return static_cast<std::int32_t>(count == above ? count : std::min(count, width));
}

/// Counts over `width` columns, of the slots list number `list`.
std::vector<std::int32_t> make_counts(const Recipe& recipe, std::int64_t width, std::int64_t list) {
    if (recipe.counts == CountsRecipe::list) return recipe.counts_list;
    std::vector<std::int32_t> counts;
    for (std::int64_t row = 0; row < recipe.rows; ++row) counts.push_back(ragged_count(recipe, width, list, row));
    return counts;
}

/// Two lists share a count over the columns of both.
void cut_counts(std::vector<std::vector<std::int32_t>>& counts, std::int64_t first_width) {
    for (std::size_t row = 0; row < counts[0].size(); ++row) {
        const std::int64_t total = counts[0][row];
        counts[0][row] = static_cast<std::int32_t>(std::min(total, first_width));
        counts[1][row] = static_cast<std::int32_t>(std::max<std::int64_t>(total - first_width, 0));
    }
}

std::vector<std::vector<std::int32_t>> make_all_counts(const Recipe& recipe) {
    std::vector<std::vector<std::int32_t>> counts;
    if (recipe.counts == CountsRecipe::all) return counts;
    if (recipe.one_list) return {make_counts(recipe, recipe.sources[0].width + recipe.sources[1].width, 0)};
    for (std::size_t i = 0; i < recipe.sources.size(); ++i)
        counts.push_back(make_counts(recipe, recipe.sources[i].width, static_cast<std::int64_t>(i)));
    if (recipe.counts == CountsRecipe::list && counts.size() == 2) cut_counts(counts, recipe.sources[0].width);
    return counts;
}

std::vector<std::int64_t> active_columns(const Recipe& recipe, const ColumnLists& lists, std::size_t source) {
    const std::int64_t width = recipe.sources[source].width;
    if (lists.counts.empty()) return std::vector<std::int64_t>(static_cast<std::size_t>(recipe.rows), width);
    const std::int64_t offset = recipe.one_list && source == 1 ? recipe.sources[0].width : 0;
    std::vector<std::int64_t> active;
    for (const std::int32_t count : lists.counts[recipe.one_list ? 0 : source])
        active.push_back(std::clamp<std::int64_t>(count - offset, 0, width));
    return active;
}

std::int32_t negative_slot(Random& random) {
    if (random.chance(0.8)) return -1;
    return random.chance(0.5) ? std::numeric_limits<std::int32_t>::min()
                              : static_cast<std::int32_t>(-1 - random.below(1 << 30));
}

/// How many leading columns of a row are absent: a run in every third row that is long enough for one.
std::int64_t leading_run(const Recipe& recipe, std::int64_t row, std::int64_t active, Random& random) {
    const bool chosen = (static_cast<std::uint64_t>(row) + recipe.seed) % 3 == 0;
    if (recipe.absent == 0 || !chosen || active < 2 * shortest_leading_run) return 0;
    return shortest_leading_run + random.below(std::clamp<std::int64_t>(active / 4, 1, 112));
}

void fill_active(const Recipe& recipe, std::size_t source, std::int64_t row, Deck& deck, SourceColumns& columns) {
    const auto index = static_cast<std::int64_t>(source);
    Random random(recipe.seed, {columns_stream, index, row});
    const std::int64_t active = columns.active[static_cast<std::size_t>(row)];
    std::int32_t* slots = columns.slots.data() + row * columns.width;
    const std::int64_t first = leading_run(recipe, row, active, random);
    std::vector<std::int32_t> present;
    deck.restart();
    for (std::int64_t column = 0; column < active; ++column) {
        if (column < first || random.chance(recipe.absent)) {
            slots[column] = negative_slot(random);
            continue;
        }
        const bool repeat = !present.empty() && random.chance(repeat_share);
        slots[column] = repeat
                            ? present[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(present.size())))]
                            : deck.draw(random);
        present.push_back(slots[column]);
    }
}

void find_named(SourceColumns& columns) {
    for (std::size_t row = 0; row < columns.active.size(); ++row) {
        const std::int32_t* slots = columns.slots.data() + static_cast<std::int64_t>(row) * columns.width;
        std::copy_if(slots, slots + columns.active[row], std::back_inserter(columns.named),
                     [](std::int32_t slot) { return slot >= 0; });
    }
    std::sort(columns.named.begin(), columns.named.end());
    columns.named.erase(std::unique(columns.named.begin(), columns.named.end()), columns.named.end());
}

/// A slot that no kernel may read, for columns past the count.
std::int32_t forbidden_slot(const CacheView& cache, const std::vector<std::int32_t>& named, Random& random) {
    constexpr std::int64_t max_slot = std::numeric_limits<std::int32_t>::max();
    const std::int64_t gap = cache.slot_step() - cache.page_size;
    const std::int64_t kind = random.below(8);
    if (kind == 0) return negative_slot(random);
    if (kind == 1) return static_cast<std::int32_t>(std::min(cache.num_slots() + random.below(1000), max_slot));
    if (kind == 2) return static_cast<std::int32_t>(max_slot);
    if (kind == 3 && gap > 0 && cache.pages > 1)
        return static_cast<std::int32_t>(random.below(cache.pages - 1) * cache.slot_step() + cache.page_size +
                                         random.below(gap));
    for (int tries = 0; tries < 16; ++tries) {
        const std::int64_t page = random.below(cache.pages);
        const auto slot = static_cast<std::int32_t>(page * cache.slot_step() + random.below(cache.page_size));
        if (!std::binary_search(named.begin(), named.end(), slot)) return slot;
    }
    return -1;
}

SourceColumns make_source(const Recipe& recipe, const ColumnLists& lists, std::size_t source, const CacheView& cache) {
    SourceColumns columns;
    columns.width = recipe.sources[source].width;
    columns.slots.assign(static_cast<std::size_t>(recipe.rows * columns.width), -1);
    columns.active = active_columns(recipe, lists, source);
    Deck deck(cache);
    for (std::int64_t row = 0; row < recipe.rows; ++row) fill_active(recipe, source, row, deck, columns);
    find_named(columns);
    for (std::int64_t row = 0; row < recipe.rows; ++row) {
        Random random(recipe.seed, {tail_stream, static_cast<std::int64_t>(source), row});
        for (std::int64_t column = columns.active[static_cast<std::size_t>(row)]; column < columns.width; ++column)
            columns.slots[static_cast<std::size_t>(row * columns.width + column)] =
                forbidden_slot(cache, columns.named, random);
    }
    return columns;
}

}  // namespace

ColumnLists make_columns(const Recipe& recipe, const std::vector<CacheView>& caches) {
    ColumnLists lists;
    lists.counts = make_all_counts(recipe);
    for (std::size_t i = 0; i < recipe.sources.size(); ++i)
        lists.sources.push_back(make_source(recipe, lists, i, caches[i]));
    return lists;
}

}  // namespace sparsemla::harness
