// The definition against answers worked out by hand, and against the oracle that is written apart from it.
#include <random>

#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

const PlanOptions reference{.kernel = "reference"};
constexpr double one_f32_rounding = 0x1p-23;

/// A step whose outputs are f32, so that nothing but the last rounding stands between a result and its formula.
StepSpec exact(StepSpec spec) {
    spec.out_dtype = DType::f32;
    return spec;
}

void expect_exact(const Result& result, std::int64_t row, std::int64_t head, double out, double lse) {
    expect_values(result, row, head, constant(out), one_f32_rounding);
    EXPECT_NEAR(result.lse(row, head), lse, 1e-6 * (1 + std::fabs(lse))) << "lse of row " << row << ", head " << head;
}

TEST(Reference, NaturalScaleInTheExponent) {
    // B012: exp(ln 3) against exp(0), values +1 and -1.
    Step step(exact({}));
    const int rope_dim = 512 + 5;
    step.record(3, [&](int d) { return d == rope_dim || d < 512 ? 1.0F : 0.0F; });
    step.record(9, [&](int d) { return d < 512 ? -1.0F : 0.0F; });
    step.query([&](int d) { return d == rope_dim ? 1.0F : 0.0F; });
    step.args.softmax_scale = std::log(3.0F);
    step.list(0, {3, 9});
    expect_exact(step.run(reference), 0, 0, 0.5, std::log(4.0));
}

TEST(Reference, EveryScaleActsWhereTheDefinitionSays) {
    // s = softmax_scale * q_scale * k_scale * q.k = 0.5 * 0.25 * 3 * (2 * 4) = 3 against 0; v = k_scale * 1 and * -2.
    Step step(exact({}));
    step.record(0, [](int d) { return d == 512 ? 4.0F : d < 512 ? 1.0F : 0.0F; });
    step.record(1, [](int d) { return d < 512 ? -2.0F : 0.0F; });
    step.query([](int d) { return d == 512 ? 2.0F : 0.0F; });
    step.list(0, {0, 1});
    step.args.softmax_scale = 0.5F;
    step.args.q_scale.value = 0.25F;
    step.args.sources[0].k_scale.value = 3.0F;
    step.args.out_scale = -7.0F;
    const double e = std::exp(3.0);
    const double out = -7 * 3 * (e - 2) / (e + 1);
    expect_exact(step.run(reference), 0, 0, out, std::log(e + 1));

    const float q_scale = 0.25F, k_scale = 3.0F;
    step.args.q_scale = {.value = 99.0F, .pointer = &q_scale};
    step.args.sources[0].k_scale = {.value = 99.0F, .pointer = &k_scale};
    expect_exact(step.run(reference), 0, 0, out, std::log(e + 1));
}

TEST(Reference, Bf16QueryAndLseOfBaseTwo) {
    Step step(exact({.query_dtype = DType::bf16, .lse_base = LseBase::two}));
    step.record(0, [](int d) { return d == 513 ? 1.0F : d < 512 ? 1.0F : 0.0F; });
    step.record(1, [](int) { return 0.0F; });
    step.query([](int d) { return d == 513 ? 1.0078125F : 0.0F; });  // no e4m3 value
    step.list(0, {0, 1});
    const double e = std::exp(1.0078125);
    expect_exact(step.run(reference), 0, 0, e / (e + 1), std::log2(e + 1));
}

TEST(Reference, SinksTakeWeightFromTheOutputOnly) {
    // B013: four keys of equal score 0 and value 2 give 8 / (4 + exp(sink)).
    const std::vector<float> sinks = {-infinity, -3.4e38F, -1e30F,  -80,   -1,      0,        1,           20,
                                      80,        1e4F,     2.4e38F, 3e38F, 3.4e38F, infinity, not_a_number};
    Step step(exact({.heads = std::ssize(sinks), .sources = {{.layout = {Record::fp8_512}}}, .sinks = true}));
    for (std::int32_t slot : {1, 2, 3, 4}) step.record(slot, [](int) { return 2.0F; });
    step.query([](int) { return 0.0F; });
    step.list(0, {1, 2, 3, 4});
    for (std::size_t head = 0; head < sinks.size(); ++head) step.sink(static_cast<std::int64_t>(head)) = sinks[head];
    const Result result = step.run(reference);
    for (std::size_t head = 0; head < sinks.size(); ++head) {
        SCOPED_TRACE("sink " + std::to_string(sinks[head]));
        expect_exact(result, 0, static_cast<std::int64_t>(head), 8 / (4 + std::exp(double{sinks[head]})),
                     std::log(4.0));
    }
}

TEST(Reference, EmptyRowsAreTheIdentityWhateverTheSink) {
    const std::vector<float> sinks = {-infinity, 0, 3e38F, infinity, not_a_number};
    Step step({.rows = 6, .heads = std::ssize(sinks), .sources = {{.layout = {Record::nvfp4_ds_mla}}}, .sinks = true});
    for (std::size_t head = 0; head < sinks.size(); ++head) step.sink(static_cast<std::int64_t>(head)) = sinks[head];
    step.query([](int) { return 1.0F; });
    step.list(0, {});
    step.list(1, {-1, -7, std::numeric_limits<std::int32_t>::min()});
    const auto past = static_cast<std::int32_t>(step.cache().num_slots());
    step.list(2, {past, past + 1, std::numeric_limits<std::int32_t>::max()});
    for (std::int64_t row : {3, 4, 5}) step.list(row, {0, 1, 2});
    step.count(3, 0);
    step.count(4, -5);
    step.count(5, std::numeric_limits<std::int32_t>::min());
    const Result result = step.run(reference);
    for (std::int64_t row = 0; row < 6; ++row) expect_empty_row(result, row);
}

TEST(Reference, DuplicatesCountOncePerOccurrence) {
    Step step({.rows = 2, .heads = 2, .sources = {{.width = 256}}});  // B018
    step.histogram();
    step.query([](int) { return 0.0F; });
    step.list(0, {7, 7, 7, 9});
    step.list(1, std::vector<std::int32_t>(256, 11));
    const Result result = step.run(reference);
    expect_histogram(result, 0, {7, 7, 7, 9});
    expect_row(result, 1, histogram_of({11}));
    expect_lse(result, 1, std::log(256.0));
}

TEST(Reference, AbsentColumnsAreNotRead) {
    // All records but those of slots 2 and 8 are NaN; slots 4 and 5 lie in a gap.
    Step step({.rows = 1, .heads = 3, .sources = {{.pages = 3, .page_size = 4, .slots_per_page = 6}}});
    step.histogram_record(2);
    step.histogram_record(8);
    step.query([](int) { return 0.0F; });
    step.list(0, {-1, 2, 4, 5, 1000, 8, -3, 0, 1});
    step.count(0, 7);  // 0 and 1 lie past the count
    expect_histogram(step.run(reference), 0, {2, 8});
}

TEST(Reference, TwoSourcesShareOneSoftmaxAndOneCount) {
    // Columns 0 .. 2 address a flat cache, the rest a planar one of another page size. A count runs over both.
    Step step({.rows = 7,
               .heads = 2,
               .sources = {{.layout = {Record::fp8_512}, .width = 3},
                           {.layout = {Record::nvfp4_v41, RecordForm::planar},
                            .width = 4,
                            .count_offset = 3,
                            .pages = 3,
                            .page_size = 16}}});
    const std::vector<std::int32_t> first = {5, 6, 7}, second = {40, 41, 42, 43};
    for (std::int32_t slot : first) step.histogram_record(slot);
    for (std::int32_t slot : second) step.histogram_record(slot, 1);
    step.query([](int) { return 0.0F; });
    step.args.sources[0].k_scale.value = 2.0F;
    const std::vector<std::int32_t> counts = {0, 2, 3, 4, 6, 7, 2000000000};
    for (std::int64_t row = 0; row < 7; ++row)
        for (std::size_t source : {0U, 1U}) {
            step.list(row, source == 0 ? first : second, source);
            step.count(row, counts[static_cast<std::size_t>(row)], source);
        }
    const Result result = step.run(reference);
    expect_empty_row(result, 0);
    for (std::int64_t row = 1; row < 7; ++row) {
        const int n = std::min(counts[static_cast<std::size_t>(row)], 7);
        Values expected(value_dims, 0.0);
        for (int c = 0; c < n; ++c)
            expected[static_cast<std::size_t>(c < 3 ? first[c] : second[c - 3])] = (c < 3 ? 2.0 : 1.0) * Step::mark / n;
        expect_row(result, row, expected);
        expect_lse(result, row, std::log(n));
    }
}

TEST(Reference, RoundsTheOutputToBf16Once) {
    // The mean is 1 + 2^-8 + 2^-30: above a BF16 tie by less than FP32 resolves.
    Step step({.sources = {{.layout = {Record::bf16}}}});
    const float values[] = {2.0F, 2.015625F, 0x1p-28F, 0.0F};
    for (std::int32_t slot = 0; slot < 4; ++slot)
        step.record(slot, [&](int d) { return d < 512 ? values[slot] : 0.0F; });
    step.query([](int) { return 0.0F; });
    step.list(0, {0, 1, 2, 3});
    expect_row(step.run(reference), 0, constant(1 + 0x1p-7), 0);
}

TEST(Reference, ScoresFarApartNeitherOverflowNorLoseTheirLse) {
    Step step(exact({}));
    step.record(0, [](int d) { return d >= 512 ? 448.0F : 1.0F; });
    step.record(1, [](int d) { return d >= 512 ? -448.0F : 3.0F; });
    step.query([](int d) { return d >= 512 ? 448.0F : 0.0F; });
    step.list(0, {1, 0});
    step.args.softmax_scale = 1.0F;
    expect_exact(step.run(reference), 0, 0, 1.0, 64 * 448.0 * 448.0);
}

TEST(Reference, NanStaysInTheRowThatAttendsToIt) {
    Step step({.rows = 3, .heads = 2});
    step.histogram();
    step.poison(17, 0, 0x7F);
    step.query([](int) { return 0.0F; });
    step.list(0, {1, 2});
    step.list(1, {1, 17, 2});
    step.list(2, {3});
    const Result result = step.run(reference);
    expect_histogram(result, 0, {1, 2});
    expect_nan_row(result, 1);
    expect_histogram(result, 2, {3});
}

TEST(Reference, MeetsTheOracleOnEveryRecord) {
    for (const Layout& layout : layouts())
        for (DType query_dtype : {DType::f8_e4m3, DType::bf16}) {
            SCOPED_TRACE(name(layout) + ", query " + std::string(sparsemla::name(query_dtype)) + ", seed 7");
            std::mt19937 random(7);
            std::normal_distribution<float> normal;
            Step step({.rows = 2,
                       .heads = 3,
                       .query_dtype = query_dtype,
                       .sources = {{.layout = layout, .width = 20, .pages = 2, .page_size = 10}},
                       .sinks = true});
            for (std::int32_t slot = 0; slot < 20; ++slot) step.record(slot, [&](int) { return normal(random); });
            for (std::int64_t row = 0; row < 2; ++row)
                for (std::int64_t head = 0; head < 3; ++head) {
                    step.query(row, head, [&](int) { return normal(random); });
                    step.sink(head) = normal(random);
                }
            step.list(0, slot_range(0, 20));
            step.list(1, {3, -1, 3, 17, 5});
            step.args.softmax_scale = 0.05F;
            if (layout.bytes().takes_k_scale) step.args.sources[0].k_scale.value = 1.3F;
            expect_oracle(step, step.run(reference));
        }
}

TEST(Reference, SaysWhichOptionsMeanNothingToIt) {
    const Step step({.rows = 4});
    const std::vector<std::pair<std::string, PlanOptions>> refused = {
        {"p_format", {.p_format = PFormat::f16}},
        {"p_format", {.p_format = PFormat::e4m3}},
        {"p_scale", {.p_scale = 2.0F}},
        {"anchor", {.anchor = Anchor::chunk_max}},
        {"splits", {.splits = 2}},
        {"splits", {.splits = 0}},
        {"columns", {.columns = ColumnRule::interleaved}},
        {"chunk", {.chunk = 64}},
    };
    step.plan(reference);
    for (auto [argument, options] : refused) {
        options.kernel = "reference";
        const auto reason = refusal(step.problem, step.device, options);
        ASSERT_TRUE(reason.has_value()) << argument;
        EXPECT_NE(reason->find(argument), std::string::npos) << *reason;
        EXPECT_THROW(step.plan(options), Error) << argument;
    }
    const PlanOptions own{
        .kernel = "reference", .p_format = PFormat::f64, .p_scale = 1.0F, .anchor = Anchor::row_max, .splits = 1};
    EXPECT_TRUE(supports(step.problem, step.device, own));
    const Schedule& schedule = step.plan(own).schedule;
    EXPECT_EQ(schedule, (Schedule{.kernel = "reference",
                                  .p_format = PFormat::f64,
                                  .p_scale = 1.0F,
                                  .anchor = Anchor::row_max,
                                  .splits = 1,
                                  .columns = ColumnRule::blocks,
                                  .chunk = 1,
                                  .row_capacity = 4}));
}

TEST(Reference, RunsOnlyWhenNamed) {
    const Step step({});
    EXPECT_NE(step.plan().schedule.kernel, "reference");
    EXPECT_EQ(step.plan(reference).schedule.kernel, "reference");
}

}  // namespace
}  // namespace sparsemla::test
