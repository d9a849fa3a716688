// The oracle against the definition written a second time, and against answers known in closed form.
#include "harness/oracle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "harness/generate.h"
#include "sparsemla/formats.h"

namespace sparsemla::harness {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr int bf16_d_qk = layout_of(Record::bf16).d_qk();

/// A step over bf16 records, one source, written by hand. All zero until a test says otherwise.
struct SmallStep {
    std::int64_t rows, heads, width;
    MutableCacheView view{.record = Record::bf16, .pages = 8, .page_size = 64};
    std::vector<std::byte> cache;
    std::vector<std::uint16_t> query;
    std::vector<std::int32_t> slots, counts;
    std::vector<float> sinks;
    std::int64_t count_offset = 0;
    float softmax_scale = 1, out_scale = 1;

    SmallStep(std::int64_t rows_, std::int64_t heads_, std::int64_t width_)
        : rows(rows_), heads(heads_), width(width_) {
        query.assign(static_cast<std::size_t>(rows * heads * bf16_d_qk), 0);
        slots.assign(static_cast<std::size_t>(rows * width), -1);
    }

    void set_pages(std::int64_t pages, std::int64_t page_size, std::int64_t slots_per_page) {
        view.pages = pages;
        view.page_size = page_size;
        view.slots_per_page = slots_per_page;
    }

    /// Writes value(slot, d) into every slot, gaps too.
    template <class Value>
    void fill(Value value) {
        const std::int64_t num_slots = view.num_slots();
        cache.assign(static_cast<std::size_t>(num_slots * view.layout().record_bytes), std::byte{0});
        auto* bits = reinterpret_cast<std::uint16_t*>(cache.data());
        for (std::int64_t slot = 0; slot < num_slots; ++slot)
            for (int d = 0; d < bf16_d_qk; ++d) *bits++ = float_to_bf16(value(slot, d));
    }

    CaseStep step() {
        view.data = cache.data();
        CaseSource source{.cache = view,
                          .slots = dense(std::as_const(slots).data(), DType::i32, {rows, width}),
                          .counts = {},
                          .count_offset = count_offset};
        if (!counts.empty()) source.counts = dense(std::as_const(counts).data(), DType::i32, {rows});
        CaseStep step;
        step.sources = {source};
        step.query = dense(std::as_const(query).data(), DType::bf16, {rows, heads, bf16_d_qk});
        if (!sinks.empty()) step.sinks = dense(std::as_const(sinks).data(), DType::f32, {heads});
        step.softmax_scale = softmax_scale;
        step.out_scale = out_scale;
        step.rows = rows;
        step.heads = heads;
        return step;
    }
};

/// The record of slot r has 1 at r mod 512: with q = 0 the output times the active columns counts the records read.
float histogram(std::int64_t slot, int d) { return d == slot % value_dims ? 1.0F : 0.0F; }

std::vector<double> histogram_of(const Oracle& oracle, std::int64_t row) {
    std::vector<double> counts;
    for (int d = 0; d < value_dims; ++d)
        counts.push_back(oracle.out[static_cast<std::size_t>(row * oracle.heads * value_dims + d)] *
                         static_cast<double>(oracle.active[static_cast<std::size_t>(row)]));
    return counts;
}

TEST(Oracle, TwoKeysWithWeightsThreeToOne) {
    SmallStep small(1, 1, 2);
    small.slots = {0, 1};
    small.fill([](std::int64_t slot, int d) {
        return d == 575 && slot == 0 ? 1.0F : d < 512 && slot < 2 ? (slot == 0 ? 1.0F : -1.0F) : 0.0F;
    });
    small.query[575] = float_to_bf16(1.0F);
    small.softmax_scale = std::log(3.0F);
    const Oracle oracle = compute_oracle(small.step());
    EXPECT_NEAR(oracle.out[0], 0.5, 1e-7);
    EXPECT_NEAR(oracle.lse[0], std::log(4.0), 1e-7);
    EXPECT_NEAR(oracle.weighted_abs[0], 1.0, 1e-12);
    EXPECT_NEAR(oracle.weighted_square[0], 0.75 * 0.75 + 0.25 * 0.25, 1e-7);
    EXPECT_NEAR(oracle.anchor_weight[0], 0.75, 1e-7);
    EXPECT_EQ(oracle.value_abs[0], 2.0);
    EXPECT_EQ(oracle.value_square[0], 2.0);
    EXPECT_NEAR(oracle.score_scale[0], std::log(3.0), 1e-7);
}

TEST(Oracle, ReadsExactlyTheActiveColumns) {
    SmallStep small(5, 2, 8);
    small.set_pages(3, 4, 6);  // slots 4, 5, 10, 11 lie in gaps; num_slots is 16
    small.slots = {
        0, 1,  2,  3,  6,  7,  8,          9,                                         // row 0: all
        0, 0,  -1, 4,  16, 12, 1000000000, std::numeric_limits<std::int32_t>::min(),  // row 1: absent ones, a repeat
        3, 3,  3,  15, 0,  0,  0,          0,                                         // row 2: count cuts
        0, 1,  2,  3,  6,  7,  8,          9,                                         // row 3: count below 0
        7, -5, 8,  -1, 9,  5,  13,         14,                                        // row 4: count above the width
    };
    small.counts = {8, 8, 4, -7, 2'000'000'000};
    small.fill(histogram);
    const Oracle oracle = compute_oracle(small.step());
    EXPECT_EQ(oracle.active, (std::vector<std::int64_t>{8, 3, 4, 0, 5}));
    const std::vector<std::vector<std::pair<int, int>>> expected = {
        {{0, 1}, {1, 1}, {2, 1}, {3, 1}, {6, 1}, {7, 1}, {8, 1}, {9, 1}},
        {{0, 2}, {12, 1}},
        {{3, 3}, {15, 1}},
        {},
        {{7, 1}, {8, 1}, {9, 1}, {13, 1}, {14, 1}}};
    for (std::int64_t row = 0; row < small.rows; ++row) {
        std::vector<double> want(value_dims, 0.0);
        for (const auto& [dim, times] : expected[static_cast<std::size_t>(row)])
            want[static_cast<std::size_t>(dim)] = times;
        const std::vector<double> got = histogram_of(oracle, row);
        for (std::size_t d = 0; d < want.size(); ++d)
            EXPECT_NEAR(got[d], want[d], 1e-12) << "row " << row << " dim " << d;
        const auto n = static_cast<double>(oracle.active[static_cast<std::size_t>(row)]);
        EXPECT_EQ(oracle.lse[static_cast<std::size_t>(2 * row)], n == 0 ? -infinity : std::log(n)) << "row " << row;
    }
}

TEST(Oracle, CountOffsetShiftsTheCount) {
    SmallStep small(4, 1, 4);
    small.slots = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
    small.counts = {127, 128, 130, 1 << 30};
    small.count_offset = 128;
    small.fill(histogram);
    EXPECT_EQ(compute_oracle(small.step()).active, (std::vector<std::int64_t>{0, 0, 2, 4}));
}

TEST(Oracle, EmptyRowIsZeroAndMinusInfinityWhateverTheSink) {
    SmallStep small(1, 4, 3);
    small.sinks = {0, 1e38F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()};
    small.fill(histogram);
    const Oracle oracle = compute_oracle(small.step());
    for (const double value : oracle.out) EXPECT_TRUE(value == 0 && !std::signbit(value));
    for (const double value : oracle.lse) EXPECT_EQ(value, -infinity);
}

TEST(Oracle, SinkJoinsTheSumAndNotTheLse) {
    const float inf = std::numeric_limits<float>::infinity();
    const std::vector<float> sinks = {-inf, -1e30F, -80, -1, 0, 1, 20, 80, 1e4F, 3.4e38F, inf};
    SmallStep small(1, static_cast<std::int64_t>(sinks.size()), 4);
    small.slots = {0, 1, 2, 3};
    small.sinks = sinks;
    small.fill([](std::int64_t, int) { return 2.0F; });
    const Oracle oracle = compute_oracle(small.step());
    for (std::size_t head = 0; head < sinks.size(); ++head) {
        const double want = 8 / (4 + std::exp(double{sinks[head]}));
        EXPECT_NEAR(oracle.out[head * value_dims + 17], want, 1e-12 * want) << "sink " << sinks[head];
        EXPECT_NEAR(oracle.lse[head], std::log(4.0), 1e-15) << "sink " << sinks[head];
    }
}

TEST(Oracle, NaNStaysInTheRowsAndHeadsThatAttendToIt) {
    SmallStep small(3, 2, 2);
    small.slots = {0, 1, 1, 2, 0, 3};
    small.fill([](std::int64_t slot, int d) {
        return slot == 2 && d == 40 ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(slot + d % 3);
    });
    small.query[(2 * 2 + 1) * bf16_d_qk + 9] = 0x7FC0;  // row 2, head 1
    const Oracle oracle = compute_oracle(small.step());
    for (std::int64_t row = 0; row < 3; ++row)
        for (std::int64_t head = 0; head < 2; ++head) {
            const bool want = row == 1 || (row == 2 && head == 1);
            const auto cell = static_cast<std::size_t>(row * 2 + head);
            EXPECT_EQ(std::isnan(oracle.lse[cell]), want) << "row " << row << " head " << head;
            for (std::size_t d = 0; d < value_dims; ++d)
                EXPECT_EQ(std::isnan(oracle.out[cell * value_dims + d]), want) << "row " << row << " head " << head;
        }
}

TEST(Oracle, InfiniteScores) {
    SmallStep small(2, 1, 2);
    small.slots = {0, 1, 0, 1};
    small.fill([](std::int64_t slot, int d) {
        if (slot == 1 && d == 550) return std::numeric_limits<float>::infinity();
        return d < value_dims ? static_cast<float>(slot + 1) : 0.0F;
    });
    small.query[550] = float_to_bf16(-1.0F);             // row 0: score -inf, weight 0
    small.query[bf16_d_qk + 550] = float_to_bf16(1.0F);  // row 1: score +inf, inf - inf
    const Oracle oracle = compute_oracle(small.step());
    EXPECT_EQ(oracle.out[3], 1.0);
    EXPECT_EQ(oracle.lse[0], 0.0);
    EXPECT_TRUE(std::isnan(oracle.out[value_dims + 3])) << oracle.out[value_dims + 3];
    EXPECT_TRUE(std::isnan(oracle.lse[1])) << oracle.lse[1];
}

/// The definition, literally, in long double, for one row and head of a step.
struct Literal {
    std::vector<long double> out = std::vector<long double>(value_dims, 0);
    std::vector<long double> weighted_abs = out, weighted_square = out, value_abs = out;
    long double lse = -std::numeric_limits<long double>::infinity();
    long double score_scale = 0;
};

Literal literal(const CaseStep& step, std::int64_t row, std::int64_t head) {
    struct Key {
        std::vector<double> values;
        long double score, k_scale;
        std::pair<const void*, std::int32_t> record;  ///< of which cache, in which slot
    };
    std::vector<Key> keys;
    Literal result;
    const std::int64_t d_qk = step.query.shape[2];
    for (const CaseSource& source : step.sources) {
        const std::int64_t width = source.slots.shape[1];
        const std::int64_t count = source.counts.present()
                                       ? static_cast<const std::int32_t*>(source.counts.data)[row] - source.count_offset
                                       : width;
        for (std::int64_t c = 0; c < std::min(count, width); ++c) {
            const std::int32_t slot =
                static_cast<const std::int32_t*>(source.slots.data)[row * source.slots.strides[0] + c];
            if (!source.cache.holds(slot)) continue;
            Key key{std::vector<double>(static_cast<std::size_t>(d_qk)), 0, source.k_scale, {source.cache.data, slot}};
            unpack(source.cache, dense(&slot, DType::i32, {1}), dense(key.values.data(), DType::f64, {1, d_qk}));
            const long double scale = static_cast<long double>(step.softmax_scale) * step.q_scale * source.k_scale;
            long double magnitude = 0;
            for (std::int64_t d = 0; d < d_qk; ++d) {
                const std::int64_t at = (row * step.heads + head) * d_qk + d;
                const float q = step.query.dtype == DType::bf16
                                    ? bf16_to_float(static_cast<const std::uint16_t*>(step.query.data)[at])
                                    : e4m3_to_float(static_cast<const std::uint8_t*>(step.query.data)[at]);
                key.score += scale * q * key.values[static_cast<std::size_t>(d)];
                magnitude += scale * std::fabs(q * key.values[static_cast<std::size_t>(d)]);
            }
            result.score_scale = std::max(result.score_scale, magnitude);
            keys.push_back(key);
        }
    }
    if (keys.empty()) return result;
    long double max = keys[0].score, sum = 0;
    for (const Key& key : keys) max = std::max(max, key.score);
    for (const Key& key : keys) sum += std::exp(key.score - max);
    result.lse = max + std::log(sum);
    if (step.sinks.present()) sum += std::exp(static_cast<const float*>(step.sinks.data)[head] - max);
    for (std::size_t d = 0; d < value_dims; ++d) {
        std::map<std::pair<const void*, std::int32_t>, long double> record_parts;
        for (const Key& key : keys) {
            const long double factor = key.k_scale * step.out_scale * key.values[d];
            const long double part = std::exp(key.score - max) / sum * factor;
            result.out[d] += part;
            result.weighted_abs[d] += std::fabs(part);
            result.value_abs[d] += std::fabs(factor);
            record_parts[key.record] += part;
        }
        for (const auto& [record, part] : record_parts) result.weighted_square[d] += part * part;
    }
    return result;
}

void expect_near(double got, long double want, long double scale, const char* what) {
    EXPECT_LE(std::fabs(got - want), 1e-12L * scale) << what << ": got " << got << ", expected " << want;
}

void expect_literal(const CaseStep& step, const Oracle& oracle) {
    for (std::int64_t row = 0; row < step.rows; ++row)
        for (std::int64_t head = 0; head < step.heads; ++head) {
            SCOPED_TRACE("row " + std::to_string(row) + ", head " + std::to_string(head));
            const Literal want = literal(step, row, head);
            const auto cell = static_cast<std::size_t>(row * step.heads + head);
            if (std::isinf(want.lse)) {
                EXPECT_EQ(oracle.lse[cell], -infinity);
                continue;
            }
            expect_near(oracle.lse[cell], want.lse, 1 + want.score_scale, "lse");
            expect_near(oracle.score_scale[cell], want.score_scale, want.score_scale, "score_scale");
            for (std::size_t d = 0; d < value_dims; ++d) {
                const std::size_t element = cell * value_dims + d;
                const auto value = static_cast<std::size_t>(row) * value_dims + d;
                const long double scale = (1 + want.score_scale) * want.weighted_abs[d];
                expect_near(oracle.out[element], want.out[d], scale, "out");
                expect_near(oracle.weighted_abs[element], want.weighted_abs[d], scale, "weighted_abs");
                expect_near(oracle.weighted_square[element], want.weighted_square[d], scale * want.weighted_abs[d],
                            "weighted_square");
                expect_near(oracle.value_abs[value], want.value_abs[d], want.value_abs[d], "value_abs");
            }
        }
}

class OracleOnGenerated : public testing::TestWithParam<Recipe> {};

TEST_P(OracleOnGenerated, EqualsTheDefinition) {
    Recipe recipe = GetParam();
    recipe.expected = false;
    const Case c = generate(recipe);
    CaseStep step = case_step(c);
    for (const float out_scale : {1.0F, -0.37F}) {
        step.out_scale = out_scale;
        expect_literal(step, compute_oracle(step));
    }
}

Recipe recipe_of(std::vector<SourceRecipe> sources, DType query, bool sinks, bool one_list, std::uint64_t seed) {
    Recipe recipe;
    recipe.rows = 5;
    recipe.heads = 3;
    recipe.query_dtype = query;
    recipe.sources = std::move(sources);
    recipe.counts = CountsRecipe::ragged;
    recipe.one_list = one_list;
    recipe.sinks = sinks;
    recipe.seed = seed;
    return recipe;
}

INSTANTIATE_TEST_SUITE_P(
    Recipes, OracleOnGenerated,
    testing::Values(recipe_of({{.record = Record::fp8_576, .width = 70, .slots_per_page = 81}}, DType::f8_e4m3, false,
                              false, 11),
                    recipe_of({{.record = Record::fp8_512, .width = 33, .page_size = 16},
                               {.record = Record::fp8_512, .width = 65, .page_size = 61}},
                              DType::f8_e4m3, true, true, 12),
                    recipe_of({{.record = Record::fp8_v4, .form = RecordForm::planar, .width = 40},
                               {.record = Record::nvfp4_v41, .form = RecordForm::planar, .width = 40}},
                              DType::bf16, true, false, 13),
                    recipe_of({{.record = Record::bf16, .split_rope = true, .width = 50},
                               {.record = Record::nvfp4_ds_mla, .width = 20}},
                              DType::bf16, false, true, 14)),
    [](const auto& test) { return "seed" + std::to_string(test.param.seed); });

TEST(Oracle, NoRowsOrHeadsOrColumns) {
    for (const auto& [rows, heads, width] :
         std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>{{0, 3, 4}, {3, 0, 4}, {3, 2, 0}}) {
        SmallStep small(rows, heads, width);
        small.fill(histogram);
        const Oracle oracle = compute_oracle(small.step());
        EXPECT_EQ(static_cast<std::int64_t>(oracle.out.size()), rows * heads * value_dims);
        for (const double lse : oracle.lse) EXPECT_EQ(lse, -infinity);
    }
}

}  // namespace
}  // namespace sparsemla::harness
