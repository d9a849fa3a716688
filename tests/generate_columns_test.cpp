// The lists of generated steps: which slots are named, how often, and what lies past the count.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <vector>

#include "harness/generate.h"
#include "tests/generated.h"

namespace sparsemla::harness {
namespace {

TEST(GenerateColumns, ActiveColumnsAreDistinctWithFewRepeatsAndSomeAbsent) {
    Recipe recipe = recipe_of({.width = 2000});
    recipe.rows = 6;
    const Case c = generate(recipe);
    const auto slots = values_of<std::int32_t>(c, "slots");
    const std::int64_t num_slots = case_step(c).sources[0].cache.num_slots();
    int leading_runs = 0;
    for (std::size_t row = 0; row < 6; ++row) {
        const auto first = slots.begin() + static_cast<std::ptrdiff_t>(row * 2000);
        const auto absent = std::count_if(first, first + 2000, [](std::int32_t slot) { return slot < 0; });
        std::set<std::int32_t> present;
        std::copy_if(first, first + 2000, std::inserter(present, present.end()),
                     [](std::int32_t slot) { return slot >= 0; });
        EXPECT_GT(absent, 10) << "row " << row;
        EXPECT_LT(absent, 300) << "row " << row;
        const auto repeats = 2000 - absent - static_cast<std::ptrdiff_t>(present.size());
        EXPECT_GT(repeats, 2) << "row " << row;
        EXPECT_LT(repeats, 60) << "row " << row;
        EXPECT_LT(*present.rbegin(), num_slots);
        leading_runs += std::all_of(first, first + 16, [](std::int32_t slot) { return slot < 0; });
    }
    EXPECT_EQ(leading_runs, 2);
    EXPECT_LT(*std::min_element(slots.begin(), slots.end()), -1) << "negative numbers other than -1";
}

TEST(GenerateColumns, ColumnsPastTheCountAreTraps) {
    Recipe recipe = recipe_of({.width = 500, .slots_per_page = 80});
    recipe.rows = 2;
    recipe.counts = CountsRecipe::list;
    recipe.counts_list = {100, 100};
    const Case c = generate(recipe);
    const CaseStep step = case_step(c);
    const CacheView& cache = step.sources[0].cache;
    const std::set<std::int32_t> named = named_slots(step, step.sources[0]);
    const auto slots = values_of<std::int32_t>(c, "slots");
    int negative = 0, beyond = 0, gap = 0, unnamed = 0;
    for (std::size_t row = 0; row < 2; ++row)
        for (std::size_t column = 100; column < 500; ++column) {
            const std::int32_t slot = slots[row * 500 + column];
            if (slot < 0)
                ++negative;
            else if (slot >= cache.num_slots())
                ++beyond;
            else if (!cache.holds(slot))
                ++gap;
            else
                ++unnamed;
            EXPECT_EQ(named.count(slot), 0U) << "column " << column << " of row " << row << " names an active slot";
        }
    for (const int kind : {negative, beyond, gap, unnamed}) EXPECT_GT(kind, 20);
}

TEST(GenerateColumns, CountsAsAsked) {
    Recipe recipe = recipe_of({.width = 300});
    recipe.rows = 14;
    EXPECT_EQ(generate(recipe).find("counts"), nullptr);
    recipe.counts = CountsRecipe::ragged;
    const auto counts = values_of<std::int32_t>(generate(recipe), "counts");
    for (const std::int32_t awkward : {0, 1, 63, 64, 65, 127, 128, 299, 300})
        EXPECT_NE(std::find(counts.begin(), counts.end(), awkward), counts.end()) << awkward;
    EXPECT_LT(*std::min_element(counts.begin(), counts.end()), 0);
    EXPECT_GT(*std::max_element(counts.begin(), counts.end()), 300);
    recipe.rows = 3;
    recipe.counts = CountsRecipe::list;
    recipe.counts_list = {-5, 17, 1'000'000'000};
    EXPECT_EQ(values_of<std::int32_t>(generate(recipe), "counts"), recipe.counts_list);
}

TEST(GenerateColumns, TwoSourcesWithOneListOrTwo) {
    Recipe recipe = recipe_of({.record = Record::fp8_512, .width = 20});
    recipe.sources.push_back({.record = Record::fp8_ds_mla_norope, .width = 30, .page_size = 16});
    recipe.rows = 4;
    recipe.counts = CountsRecipe::list;
    recipe.counts_list = {50, 20, 23, 5};
    for (const bool one_list : {false, true}) {
        recipe.one_list = one_list;
        const Case c = generate(recipe);
        EXPECT_EQ(c.find("extra_slots") == nullptr, one_list);
        EXPECT_EQ(c.metadata.count("first_width"), one_list ? 1U : 0U);
        const CaseStep step = case_step(c);
        ASSERT_EQ(step.sources.size(), 2U);
        EXPECT_EQ(step.sources[0].slots.shape[1], 20);
        EXPECT_EQ(step.sources[1].slots.shape[1], 30);
        EXPECT_EQ(step.sources[1].cache.page_size, 16);
        EXPECT_EQ(step.sources[1].k_scale, 1.0F) << "source 1 has scales of its own";
        std::vector<std::int64_t> active;
        for (const CaseSource& source : step.sources)
            for (std::int64_t row = 0; row < step.rows; ++row)
                active.push_back(std::clamp<std::int64_t>(
                    static_cast<const std::int32_t*>(source.counts.data)[row] - source.count_offset, 0,
                    source.slots.shape[1]));
        EXPECT_EQ(active, (std::vector<std::int64_t>{20, 20, 20, 5, 30, 0, 3, 0}));
    }
}

}  // namespace
}  // namespace sparsemla::harness
