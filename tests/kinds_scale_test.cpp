// K06, K07: bases and scales of scores and LSE, and the convention for an empty row.
#include <algorithm>
#include <numbers>

#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

/// Partials of one row and a few heads in FP32, every value of a partial the same or set one by one.
struct Partials {
    explicit Partials(std::int64_t rows, std::int64_t heads) : rows_(rows), heads_(heads) {}

    std::vector<float>& add(float value, float lse) {
        outs_.emplace_back(static_cast<std::size_t>(rows_ * heads_ * value_dims), value);
        lses_.emplace_back(static_cast<std::size_t>(rows_ * heads_), lse);
        return outs_.back();
    }
    MergeArgs args() {
        views_.clear();
        for (std::size_t i = 0; i < outs_.size(); ++i)
            views_.push_back({.out = dense(outs_[i].data(), DType::f32, {rows_, heads_, value_dims}),
                              .lse = dense(lses_[i].data(), DType::f32, {rows_, heads_})});
        merged_out.assign(static_cast<std::size_t>(rows_ * heads_ * value_dims), 12345.0F);
        merged_lse.assign(static_cast<std::size_t>(rows_ * heads_), 12345.0F);
        return {.rows = rows_,
                .heads = heads_,
                .partials = views_,
                .out = dense(merged_out.data(), DType::f32, {rows_, heads_, value_dims}),
                .lse = dense(merged_lse.data(), DType::f32, {rows_, heads_})};
    }
    std::vector<std::vector<float>>& outs() { return outs_; }
    std::vector<std::vector<float>>& lses() { return lses_; }

    std::vector<float> merged_out, merged_lse;

   private:
    std::int64_t rows_, heads_;
    std::vector<std::vector<float>> outs_, lses_;
    std::vector<Partial> views_;
};

float lse_of(double sum, LseBase base) {
    return static_cast<float>(base == LseBase::two ? std::log2(sum) : std::log(sum));
}

// ---------------------------------------------------------------------------------------------------------------------
class K06_LogBaseOrScaleDomain : public EveryRecord {
   protected:
    /// Two keys whose scores are ln 3 and 0 where softmax_scale is natural; V = +mark and -mark, and mark and 0 in the
    /// last dimension, the only one that the query looks at.
    Step two_keys(float softmax_scale) const {
        Step step({.rows = 2, .heads = 3, .sources = {{.layout = layout()}}});
        const int last = d_qk(step.problem) - 1;
        step.record(0, [&](int) { return Step::mark; });
        step.record(1, [&](int d) { return d == last ? 0.0F : -Step::mark; });
        step.query([&](int d) { return d == last ? 1.0F : 0.0F; });
        step.list(0, {0, 1});
        step.list(1, {1, 0});
        step.args.softmax_scale = softmax_scale / Step::mark;
        return step;
    }
};

// B012: with the factor log2(e) lost the output would be 0.36 of the mark; with it twice, 0.66.
TEST_P(K06_LogBaseOrScaleDomain, B012_ScoreOfLnThree) {
    Step step = two_keys(std::log(3.0F));
    for_each_schedule(kernel(), step, [](const Result& result) {
        for (std::int64_t row : {0, 1})
            for (std::int64_t head = 0; head < result.heads; ++head) {
                for (int d = 0; d < value_dims - 1; ++d)
                    ASSERT_NEAR(result.out(row, head, d), 0.5 * Step::mark, 0.02 * Step::mark);
                ASSERT_NEAR(result.lse(row, head), std::log(4.0), 1e-5) << to_string(result.schedule);
            }
    });
}

// B104: a caller who passes the base-2 scale as the natural one gets an answer that B012's bounds reject.
TEST_P(K06_LogBaseOrScaleDomain, B104_Log2ScaleIsToldApart) {
    Step step = two_keys(std::log(3.0F) * std::numbers::log2e_v<float>);
    for_each_schedule(kernel(), step, [](const Result& result) {
        ASSERT_GT(std::fabs(result.out(0, 0, 0) - 0.5 * Step::mark), 0.1 * Step::mark);
        ASSERT_GT(std::fabs(result.lse(0, 0) - std::log(4.0)), 0.1);
    });
}

// B078, B079: the LSE of eight equal scores is ln 8 or 3, as the problem's base says, for every rows and heads.
TEST_P(K06_LogBaseOrScaleDomain, B079_LseBaseIsTheProblems) {
    for (const LseBase base : {LseBase::natural, LseBase::two})
        for (const std::int64_t rows : {1, 5, 20})
            for (const std::int64_t heads : {1, 16, 96}) {
                Step step({.rows = rows, .heads = heads, .sources = {{.layout = layout()}}, .lse_base = base});
                for (std::int32_t s = 0; s < 8; ++s) step.histogram_record(s);
                for (std::int64_t row = 0; row < rows; ++row) step.list(row, slot_range(0, 8));
                const Result result = step.run({.kernel = kernel()});
                for (std::int64_t row = 0; row < rows; ++row)
                    ASSERT_NO_FATAL_FAILURE(expect_lse(result, row, base == LseBase::two ? 3.0 : std::log(8.0)));
            }
}

// The base of the LSE changes nothing else, for scores that are not tied, and for the empty row.
TEST_P(K06_LogBaseOrScaleDomain, LseBaseLeavesTheOutputAlone) {
    Step step = two_keys(1.25F);
    step.count(1, 0);
    for (const PlanOptions& options : schedules(kernel(), step)) {
        step.problem.lse_base = LseBase::natural;
        const Result natural = step.run(options);
        step.problem.lse_base = LseBase::two;
        const Result two = step.run(options);
        ASSERT_EQ(natural.out_bits, two.out_bits) << to_string(two.schedule);
        expect_lse(natural, 0, std::log(std::exp(1.25) + 1));
        expect_lse(two, 0, std::log2(std::exp(1.25) + 1));
        expect_empty_row(natural, 1);
        expect_empty_row(two, 1);
        if (HasFailure()) return;
    }
}

INSTANTIATE_TEST_SUITE_P(All, K06_LogBaseOrScaleDomain, testing::ValuesIn(kernels_and_layouts()), test_name);

// B078: partials of 2 and 8 keys. Mixed-up bases would give 0.277 or 0.119.
TEST(K06_LogBaseOrScaleDomain_Merge, B078_TwoPartials) {
    for (const LseBase in : {LseBase::natural, LseBase::two})
        for (const LseBase out : {LseBase::natural, LseBase::two}) {
            Partials partials(1, 3);
            partials.add(1.0F, lse_of(2, in));
            partials.add(0.0F, lse_of(8, in));
            MergeArgs args = partials.args();
            args.partial_base = in;
            args.lse_base = out;
            merge(args);
            for (const float value : partials.merged_out) ASSERT_NEAR(value, 0.2, 1e-6);
            for (const float lse : partials.merged_lse) ASSERT_NEAR(lse, lse_of(10, out), 1e-5);
        }
}

// B080: four partials with one-hot outputs, in every order.
TEST(K06_LogBaseOrScaleDomain_Merge, B080_FourPartialsInAnyOrder) {
    const double sums[] = {1, 10, 100, 1000};
    for (const LseBase base : {LseBase::natural, LseBase::two}) {
        std::vector<int> order = {0, 1, 2, 3};
        do {
            Partials partials(1, 1);
            for (const int i : order) partials.add(0.0F, lse_of(sums[i], base))[static_cast<std::size_t>(i)] = 1.0F;
            MergeArgs args = partials.args();
            args.partial_base = base;
            merge(args);
            for (std::size_t i = 0; i < 4; ++i)
                ASSERT_NEAR(partials.merged_out[i], sums[i] / 1111, 1e-6 * sums[i] / 1111 + 1e-7);
            ASSERT_NEAR(partials.merged_lse[0], std::log(1111.0), 1e-5);
        } while (std::next_permutation(order.begin(), order.end()));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
class K07_ConventionForAnEmptyRow : public EveryRecord {};

// Every way for a row to be empty gives +0 and -inf, with and without sinks, in either base.
TEST_P(K07_ConventionForAnEmptyRow, EveryWayToBeEmpty) {
    for (const bool sinks : {false, true})
        for (const LseBase base : {LseBase::natural, LseBase::two}) {
            Step step({.rows = 8,
                       .heads = 6,
                       .sources = {{.layout = layout(), .width = 130}},
                       .sinks = sinks,
                       .lse_base = base});
            for (std::int64_t head = 0; sinks && head < 6; ++head)
                step.sink(head) =
                    std::vector{-infinity, -1e30F, 0.0F, 3e38F, infinity, 1.0F}[static_cast<std::size_t>(head)];
            step.list(0, {});                                         // count 0
            step.count(1, INT32_MIN);                                 // all -1, negative count
            step.list(2, slot_range(0, 130)), step.count(2, -1);      // names, but a negative count
            step.list(3, std::vector<std::int32_t>(130, -1));         // full count, nothing named
            step.list(4, std::vector<std::int32_t>(130, INT32_MAX));  // past the cache
            step.list(5, slot_range(0, 130)), step.count(5, 0);       // names, but no count
            step.list(6, std::vector<std::int32_t>(130, INT32_MIN));  // negative
            step.list(7, {-1, -1, static_cast<std::int32_t>(step.cache().num_slots())});
            for_each_schedule(kernel(), step, [](const Result& result) {
                for (std::int64_t row = 0; row < result.rows; ++row) expect_empty_row(result, row);
            });
            if (layout().record != Record::fp8_576 && layout().record != Record::fp8_512) continue;
            // No value is multiplied by a k_scale, whatever it is: one behind a pointer is not checked.
            for (const float scale : {-2.0F, infinity, std::numeric_limits<float>::quiet_NaN()}) {
                step.args.sources[0].k_scale.pointer = &scale;
                for_each_schedule(kernel(), step, [](const Result& result) {
                    for (std::int64_t row = 0; row < result.rows; ++row) expect_empty_row(result, row);
                });
            }
            step.args.sources[0].k_scale.pointer = nullptr;
        }
}

// B083: the rows of one request differ; each is empty or not by its own count.
TEST_P(K07_ConventionForAnEmptyRow, B083_EmptinessIsPerRow) {
    Step step({.rows = 5, .heads = 4, .sources = {{.layout = layout()}}});
    step.histogram();
    for (std::int64_t row : {0, 1, 2}) step.list(row, {});
    step.list(3, {9});
    step.list(4, {9, 10});
    for_each_schedule(kernel(), step, [](const Result& result) {
        for (std::int64_t row : {0, 1, 2}) expect_empty_row(result, row);
        expect_histogram(result, 3, {9});
        expect_histogram(result, 4, {9, 10});
    });
}

// B081, B083: ranks that hold parts of the context, or nothing, then the merge with sinks: the same as one rank.
TEST_P(K07_ConventionForAnEmptyRow, B081_ShardsMergeToTheWhole) {
    constexpr std::int64_t heads = 2;
    const std::vector<float> sink_values = {1.0F, 0.25F};
    const std::vector<std::vector<std::vector<std::int32_t>>> rank_lists = {
        {{0, 1, 2}, {}, {}, {3}}, {{}, {}, {5, 6}, {}}, {{7}, {}, {}, {8, 9}}};
    Step whole({.rows = 4, .heads = heads, .sources = {{.layout = layout()}}, .sinks = true});
    whole.histogram();
    for (std::size_t head = 0; head < heads; ++head) whole.sink(static_cast<std::int64_t>(head)) = sink_values[head];
    Step part({.rows = 4, .heads = heads, .sources = {{.layout = layout()}}, .out_dtype = DType::f32});
    part.histogram();

    Partials partials(4, heads);
    for (const auto& lists : rank_lists) {
        for (std::int64_t row = 0; row < 4; ++row) part.list(row, lists[static_cast<std::size_t>(row)]);
        const Result result = part.run({.kernel = kernel()});
        std::vector<float>& out = partials.add(0, 0);
        for (std::size_t i = 0; i < out.size(); ++i) out[i] = std::bit_cast<float>(result.out_bits[i]);
        for (std::size_t i = 0; i < result.lse_bits.size(); ++i)
            partials.lses().back()[i] = std::bit_cast<float>(result.lse_bits[i]);
    }
    MergeArgs args = partials.args();
    args.sinks = dense(sink_values.data(), DType::f32, {heads});
    merge(args);
    for (std::int64_t row = 0; row < 4; ++row) {
        std::vector<std::int32_t> all;
        for (const auto& lists : rank_lists)
            all.insert(all.end(), lists[static_cast<std::size_t>(row)].begin(),
                       lists[static_cast<std::size_t>(row)].end());
        const double n = static_cast<double>(all.size());
        for (std::int64_t head = 0; head < heads; ++head) {
            const auto at = static_cast<std::size_t>(row * heads + head);
            const double kept = n / (n + std::exp(double{sink_values[static_cast<std::size_t>(head)]}));
            const Values expected = all.empty() ? constant(0) : histogram_of(all);
            for (std::size_t d = 0; d < value_dims; ++d)
                ASSERT_NEAR(partials.merged_out[at * value_dims + d], expected[d] * kept,
                            1e-5 + weight_rounding() * expected[d])
                    << "row " << row;
            ASSERT_FLOAT_EQ(partials.merged_lse[at], all.empty() ? -infinity : static_cast<float>(std::log(n)));
        }
    }
}

INSTANTIATE_TEST_SUITE_P(All, K07_ConventionForAnEmptyRow, testing::ValuesIn(kernels_and_layouts()), test_name);

// B081: another library's +inf for "no keys" weighs nothing when announced, and is never taken for a large weight.
TEST(K07_ConventionForAnEmptyRow_Merge, B081_ForeignPlusInfinity) {
    for (const bool announced : {true, false}) {
        Partials partials(1, 2);
        partials.add(0.0F, infinity);
        partials.add(3.0F, 1.0F);
        MergeArgs args = partials.args();
        args.plus_inf_is_empty = announced;
        merge(args);
        for (const float value : partials.merged_out) {
            if (announced)
                ASSERT_EQ(value, 3.0F);
            else
                ASSERT_TRUE(std::isnan(value));
        }
        for (const float lse : partials.merged_lse) {
            if (announced)
                ASSERT_EQ(lse, 1.0F);
            else
                ASSERT_TRUE(std::isnan(lse));
        }
    }
}

// B082: nobody holds a key; then exactly one rank does, each in turn.
TEST(K07_ConventionForAnEmptyRow_Merge, B082_NobodyOrOneHoldsKeys) {
    constexpr std::size_t ranks = 4;
    for (const DType dtype : {DType::f32, DType::bf16})
        for (std::size_t holder = 0; holder <= ranks; ++holder) {
            Partials partials(1, 2);
            for (std::size_t i = 0; i < ranks; ++i) partials.add(not_a_number, -infinity);
            if (holder < ranks) {
                for (std::size_t i = 0; i < partials.outs()[holder].size(); ++i)
                    partials.outs()[holder][i] = bf16_to_float(float_to_bf16(0.1F * static_cast<float>(i) - 40.0F));
                partials.lses()[holder] = {-123.4567F, 0.0F};
            }
            MergeArgs args = partials.args();
            std::vector<std::uint16_t> halves(partials.merged_out.size(), 0x1234);
            if (dtype == DType::bf16) args.out = dense(halves.data(), DType::bf16, {1, 2, value_dims});
            merge(args);
            for (std::size_t i = 0; i < partials.merged_out.size(); ++i) {
                const float want = holder < ranks ? partials.outs()[holder][i] : 0.0F;
                if (dtype == DType::bf16)
                    ASSERT_EQ(halves[i], float_to_bf16(want)) << "holder " << holder << ", element " << i;
                else
                    ASSERT_EQ(std::bit_cast<std::uint32_t>(partials.merged_out[i]), std::bit_cast<std::uint32_t>(want));
            }
            for (std::size_t h = 0; h < 2; ++h)
                ASSERT_EQ(partials.merged_lse[h], holder < ranks ? partials.lses()[holder][h] : -infinity);
        }
}

TEST(K07_ConventionForAnEmptyRow_Merge, NoPartialsAtAll) {
    Partials partials(2, 2);
    MergeArgs args = partials.args();
    const std::vector<float> sinks = {1.0F, infinity};
    args.sinks = dense(sinks.data(), DType::f32, {2});
    merge(args);
    for (const float value : partials.merged_out) ASSERT_EQ(std::bit_cast<std::uint32_t>(value), 0U);
    for (const float lse : partials.merged_lse) ASSERT_EQ(lse, -infinity);
}

}  // namespace
}  // namespace sparsemla::test
