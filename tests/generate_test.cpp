// Generated steps: the same bytes everywhere, realistic numbers, and traps wherever nothing may be read.
#include "harness/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "harness/oracle.h"
#include "sparsemla/formats.h"
#include "tests/generated.h"

namespace sparsemla::harness {
namespace {

/// Every record in every form.
std::vector<SourceRecipe> all_sources() {
    std::vector<SourceRecipe> sources;
    for (const RecordLayout& layout : record_layouts)
        for (const RecordForm form : {RecordForm::contiguous, RecordForm::planar}) {
            if (form == RecordForm::planar ? !layout.has_planar : !layout.has_contiguous) continue;
            sources.push_back({.record = layout.record, .form = form, .width = 40, .page_size = 16});
            if (!layout.may_split) continue;
            sources.push_back(sources.back());
            sources.back().split_rope = true;
        }
    return sources;
}

std::string describe(const SourceRecipe& source) {
    return to_string(source.record) + (source.form == RecordForm::planar ? " planar" : "") +
           (source.split_rope ? " split" : "");
}

/// FNV-1a over names, metadata and bytes, but for the expected values.
std::uint64_t hash_of(const Case& c) {
    std::uint64_t hash = 0xCBF29CE484222325U;
    const auto add = [&](const void* data, std::size_t bytes) {
        for (std::size_t i = 0; i < bytes; ++i)
            hash = (hash ^ static_cast<const std::uint8_t*>(data)[i]) * 0x100000001B3U;
    };
    for (const auto& [name, tensor] : c.tensors) {
        if (name.rfind("expected.", 0) == 0) continue;
        add(name.data(), name.size());
        add(tensor.bytes.get(), tensor.size_bytes);
    }
    for (const auto& [key, value] : c.metadata) {
        add(key.data(), key.size());
        add(value.data(), value.size());
    }
    return hash;
}

TEST(Generate, SameBytesEveryTimeAndOnEveryMachine) {
    Recipe recipe;
    recipe.rows = 4;
    recipe.heads = 3;
    recipe.sources = {{.record = Record::fp8_576, .width = 100}, {.record = Record::nvfp4_ds_mla, .width = 50}};
    recipe.counts = CountsRecipe::ragged;
    recipe.sinks = true;
    recipe.expected = false;
    EXPECT_EQ(hash_of(generate(recipe)), hash_of(generate(recipe)));
    EXPECT_EQ(hash_of(generate(recipe)), 7198033790017073963U);
    recipe.query_dtype = DType::bf16;
    recipe.sources = {{.record = Record::fp8_v4, .form = RecordForm::planar, .width = 100},
                      {.record = Record::fp8_ds_mla_norope, .width = 20}};
    EXPECT_EQ(hash_of(generate(recipe)), 13486160016932535619U);
    std::set<std::uint64_t> hashes;
    for (recipe.seed = 1; recipe.seed <= 8; ++recipe.seed) hashes.insert(hash_of(generate(recipe)));
    EXPECT_EQ(hashes.size(), 8U);
}

TEST(Generate, EveryRecordGivesAValidCaseThatSurvivesSaving) {
    const std::string path = testing::TempDir() + "sparsemla_generate_test.safetensors";
    for (const SourceRecipe& source : all_sources()) {
        SCOPED_TRACE(describe(source));
        Recipe recipe = recipe_of(source);
        recipe.rows = 2;
        recipe.expected = true;
        const Case c = generate(recipe);
        save_case(c, path);
        const Case loaded = load_case(path);
        EXPECT_EQ(hash_of(loaded), hash_of(c));
        EXPECT_TRUE(loaded.notes.empty()) << loaded.notes[0];
        const CaseStep step = case_step(loaded);
        EXPECT_EQ(step.sources[0].cache.record, source.record);
        EXPECT_EQ(step.sources[0].cache.form, source.form);
        EXPECT_EQ(step.sources[0].cache.rope != nullptr, source.split_rope);
        EXPECT_EQ(step.rows, recipe.rows);
        EXPECT_EQ(step.heads, recipe.heads);
    }
    std::filesystem::remove(path);
}

TEST(Generate, NamedRecordsAreFiniteAndAllOthersAreNaN) {
    for (SourceRecipe source : all_sources()) {
        SCOPED_TRACE(describe(source));
        if (source.form == RecordForm::contiguous)
            source.slots_per_page = 21;
        else
            source.page_stride_bytes = 16 * 1024;
        Recipe recipe = recipe_of(source);
        recipe.rows = 3;
        recipe.counts = CountsRecipe::list;
        recipe.counts_list = {40, 7, 0};
        const Case c = generate(recipe);
        const CaseStep step = case_step(c);
        const CacheView& cache = step.sources[0].cache;
        const std::set<std::int32_t> named = named_slots(step, step.sources[0]);
        ASSERT_FALSE(named.empty());
        const int d_qk = cache.layout().d_qk();
        std::vector<double> values(static_cast<std::size_t>(d_qk));
        std::int64_t others = 0;
        for (std::int32_t slot = 0; slot < cache.num_slots(); ++slot) {
            if (!cache.holds(slot)) continue;
            unpack(cache, dense(&slot, DType::i32, {1}), dense(values.data(), DType::f64, {1, d_qk}));
            const auto nans = std::count_if(values.begin(), values.end(), [](double v) { return std::isnan(v); });
            EXPECT_EQ(nans, named.count(slot) != 0 ? 0 : d_qk) << "slot " << slot;
            others += named.count(slot) == 0;
        }
        EXPECT_GT(others, 0);
        // Gaps and padding: no byte of them is anything but 0xFF.
        const auto bytes = values_of<std::uint8_t>(c, "cache");
        const auto filled = std::count(bytes.begin(), bytes.end(), 0xFF);
        EXPECT_GE(filled, static_cast<std::int64_t>(bytes.size()) -
                              static_cast<std::int64_t>(named.size()) * cache.layout().record_bytes);
    }
}

TEST(Generate, ExpectedValuesAreTheOracles) {
    for (const LseBase base : {LseBase::natural, LseBase::two}) {
        Recipe recipe = recipe_of({.width = 50});
        recipe.rows = 2;
        recipe.lse_base = base;
        recipe.expected = true;
        const Case c = generate(recipe);
        const CaseStep step = case_step(c);
        EXPECT_EQ(step.lse_base, base);
        const Oracle oracle = compute_oracle(step);
        const auto out = values_of<float>(c, "expected.out");
        const auto lse = values_of<float>(c, "expected.lse");
        ASSERT_EQ(out.size(), oracle.out.size());
        ASSERT_EQ(lse.size(), oracle.lse.size());
        for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], static_cast<float>(oracle.out[i]));
        for (std::size_t i = 0; i < lse.size(); ++i)
            EXPECT_NEAR(lse[i], oracle.lse[i] * (base == LseBase::two ? 1 / std::log(2.0) : 1), 1e-5);
    }
}

double quantile(std::vector<double> values, double share) {
    std::sort(values.begin(), values.end());
    return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

TEST(Generate, AttentionIsPeakedAndSharedByAHandful) {
    for (const std::int64_t width : {64, 1024})
        for (const Record record : {Record::fp8_576, Record::bf16, Record::nvfp4_ds_mla}) {
            SCOPED_TRACE(to_string(record) + ", width " + std::to_string(width));
            Recipe recipe = recipe_of({.record = record, .width = width});
            recipe.rows = 2;
            recipe.heads = 12;
            const Oracle oracle = compute_oracle(case_step(generate(recipe)));
            const std::vector<double>& top_weight = oracle.anchor_weight;
            EXPECT_GT(quantile(top_weight, 0.5), 0.03);
            EXPECT_LT(quantile(top_weight, 0.5), 0.7);
            EXPECT_LT(quantile(top_weight, 0.9), 0.98);
            // Scores of other keys lie around 0, a few below -4.
            std::vector<double> top_score;
            for (std::size_t i = 0; i < top_weight.size(); ++i)
                top_score.push_back(oracle.lse[i] + std::log(top_weight[i]));
            EXPECT_GT(quantile(top_score, 0.1), 3.5);
            EXPECT_LT(quantile(top_score, 0.9), 20);
        }
}

TEST(Generate, AFewChannelsAreMuchLargerThanTheRest) {
    const Case c = generate(recipe_of({.record = Record::bf16, .width = 400}));
    const CaseStep step = case_step(c);
    const std::set<std::int32_t> named = named_slots(step, step.sources[0]);
    const std::vector<std::int32_t> slots(named.begin(), named.end());
    const auto n = static_cast<std::int64_t>(slots.size());
    std::vector<double> values(slots.size() * 576);
    unpack(step.sources[0].cache, dense(slots.data(), DType::i32, {n}), dense(values.data(), DType::f64, {n, 576}));
    std::vector<double> rms(576, 0.0);
    for (std::size_t i = 0; i < values.size(); ++i) rms[i % 576] += values[i] * values[i] / static_cast<double>(n);
    for (double& value : rms) value = std::sqrt(value);
    const double median = quantile(rms, 0.5);
    const auto large = std::count_if(rms.begin(), rms.end(), [&](double value) { return value > 8 * median; });
    EXPECT_GE(large, 4);
    EXPECT_LE(large, 12);
    EXPECT_LT(*std::max_element(rms.begin() + 512, rms.end()), 3 * median) << "the rope part is moderate";
}

TEST(Generate, EightBitValuesUseTheirWholeRange) {
    const Case c = generate(recipe_of({.record = Record::fp8_576, .width = 300}));
    for (const char* tensor : {"cache", "query"}) {
        float largest = 0;
        for (const std::uint8_t code : values_of<std::uint8_t>(c, tensor))
            if ((code & 0x7F) != 0x7F) largest = std::max(largest, std::fabs(e4m3_to_float(code)));
        EXPECT_EQ(largest, e4m3_max) << tensor;
    }
}

TEST(Generate, FloatScalesArePowersOfTwoOnlyOnRequest) {
    for (const Record record : {Record::fp8_ds_mla, Record::fp8_ds_mla_norope})
        for (const bool power_of_two : {false, true}) {
            Recipe recipe = recipe_of({.record = record, .width = 100});
            recipe.query_dtype = DType::bf16;
            recipe.power_of_two_scales = power_of_two;
            const Case c = generate(recipe);
            const CaseStep step = case_step(c);
            std::int64_t powers = 0, scales = 0;
            for (const std::int32_t slot : named_slots(step, step.sources[0])) {
                float group_scales[4];
                std::memcpy(group_scales, locate(step.sources[0].cache, slot).scales, sizeof(group_scales));
                for (const float scale : group_scales) {
                    int exponent = 0;
                    powers += std::frexp(scale, &exponent) == 0.5F;
                    ++scales;
                }
            }
            EXPECT_EQ(powers == scales, power_of_two) << powers << " of " << scales;
            EXPECT_LE(power_of_two ? 0 : powers, scales / 20);
            EXPECT_GT(scales, 100);
        }
}

TEST(Generate, RefusesWhatNoCallCouldTake) {
    const auto refused = [](const char* argument, auto change) {
        Recipe recipe = recipe_of({.width = 10});
        change(recipe);
        try {
            generate(recipe);
            ADD_FAILURE() << argument << ": accepted";
        } catch (const Error& error) {
            EXPECT_NE(error.argument().find(argument), std::string::npos) << error.what();
        }
    };
    refused("rows", [](Recipe& r) { r.rows = -1; });
    refused("heads", [](Recipe& r) { r.heads = max_heads + 1; });
    refused("query_dtype", [](Recipe& r) { r.query_dtype = DType::f32; });
    refused("sources", [](Recipe& r) { r.sources.clear(); });
    refused("sources", [](Recipe& r) { r.sources.resize(3); });
    refused("width", [](Recipe& r) { r.sources[0].width = -1; });
    refused("page_size", [](Recipe& r) { r.sources[0].page_size = 0; });
    refused("slots_per_page", [](Recipe& r) { r.sources[0].slots_per_page = 63; });
    refused("form", [](Recipe& r) { r.sources[0].form = RecordForm::planar; });
    refused("split_rope", [](Recipe& r) { r.sources[0].split_rope = true; });
    refused("record", [](Recipe& r) { r.sources.push_back({.record = Record::fp8_512}); });
    refused("one_list", [](Recipe& r) { r.one_list = true; });
    refused("counts_list", [](Recipe& r) { r.counts = CountsRecipe::list; });
    refused("absent", [](Recipe& r) { r.absent = 1.5; });
    refused("absent", [](Recipe& r) { r.absent = std::nan(""); });
    refused("pages", [](Recipe& r) { r.sources[0].pages = 1 << 30; });
    refused("page_stride_bytes", [](Recipe& r) {
        r.sources = {{.record = Record::fp8_v41, .form = RecordForm::planar, .width = 10, .page_stride_bytes = 64}};
    });
}

TEST(Generate, NothingToDoIsACaseToo) {
    for (const auto& [rows, heads, width] : std::vector<std::array<std::int64_t, 3>>{{0, 4, 9}, {3, 0, 9}, {3, 4, 0}}) {
        Recipe recipe = recipe_of({.width = width});
        recipe.rows = rows;
        recipe.heads = heads;
        recipe.counts = CountsRecipe::ragged;
        recipe.sinks = true;
        recipe.expected = true;
        const Case c = generate(recipe);
        const CaseStep step = case_step(c);
        EXPECT_EQ(step.rows, rows);
        EXPECT_EQ(step.heads, heads);
    }
}

TEST(Generate, CommandSaysEverythingOfARecipe) {
    Recipe recipe;
    recipe.rows = 2;
    recipe.heads = 6;
    recipe.sources = {{.record = Record::fp8_512, .width = 5, .page_size = 61, .slots_per_page = 70},
                      {.record = Record::fp8_v41,
                       .form = RecordForm::planar,
                       .width = 7,
                       .page_size = 2,
                       .page_stride_bytes = 8192,
                       .pages = 9}};
    recipe.counts = CountsRecipe::list;
    recipe.counts_list = {-1, 12};
    recipe.one_list = true;
    recipe.absent = 0.25;
    recipe.sinks = true;
    recipe.power_of_two_scales = true;
    recipe.lse_base = LseBase::two;
    recipe.seed = 77;
    EXPECT_EQ(
        gen_command(recipe, "a.safetensors"),
        "sparsemla gen a.safetensors --rows 2 --heads 6 --record fp8 --record-bytes " +
            std::to_string(layout_of(Record::fp8_512).record_bytes) +
            " --width 5 --page-size 61 "
            "--slots-per-page 70 --extra-record fp8_v41 --extra-layout planar --extra-width 7 --extra-page-size 2 "
            "--extra-page-stride-bytes 8192 --extra-pages 9 --one-list --counts=-1,12 --query e4m3 --absent 0.25 "
            "--sinks --power-of-two-scales --lse log2 --seed 77");
}

}  // namespace
}  // namespace sparsemla::harness
