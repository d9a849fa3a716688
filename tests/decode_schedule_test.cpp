// The fast kernel executes the schedule its plan prints: outputs agree with the same schedule worked out in float64
// (but for the rounding of P) far more closely than with the exact result, so that another anchor, split, chunk or
// column rule would show.
#include <random>

#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

constexpr std::int64_t width = 100;
constexpr std::int64_t heads = 3;
constexpr float k_scale = 1.25F;
constexpr int score_dim = 512;  // of the rope: scores are exact, and values do not enter them
constexpr float query_of_head[heads] = {2.25F, 1.125F, 4.5F};

/// One column: its score in base 2 for a query of 1 (exact), and its record's values times k_scale; absent without.
struct Column {
    double score = 0;
    std::vector<double> values;
};

struct Fixture {
    Step step{StepSpec{.rows = 1, .heads = heads, .sources = {{.width = width, .pages = 2}}, .out_dtype = DType::f32}};
    std::vector<Column> columns;

    explicit Fixture(std::uint64_t seed) {
        std::mt19937_64 bits(seed);
        std::vector<std::vector<float>> records;
        for (std::int32_t slot = 0; slot < step.cache().num_slots(); ++slot) {
            std::vector<float> record(static_cast<std::size_t>(d_qk(step.problem)), 0.0F);
            for (int d = 0; d < value_dims; ++d) record[d] = static_cast<float>(static_cast<int>(bits() % 15) - 7) / 4;
            record[score_dim] = static_cast<float>(bits() % 16) / 4;
            step.record(slot, [&](int d) { return record[static_cast<std::size_t>(d)]; });
            records.push_back(record);
        }
        for (std::int64_t head = 0; head < heads; ++head)
            step.query(0, head, [&](int d) { return d == score_dim ? query_of_head[head] : 0.0F; });
        // ln 2 in float32 times log2(e) rounds to 1.
        step.args.softmax_scale = static_cast<float>(std::log(2.0));
        step.args.sources[0].k_scale.value = k_scale;
        std::vector<std::int32_t> list;
        for (std::int64_t c = 0; c < width; ++c) {
            list.push_back(bits() % 8 == 0 || (c >= 32 && c < 48) ? -1
                                                                  : static_cast<std::int32_t>(bits() % records.size()));
            columns.emplace_back();
            if (list.back() < 0) continue;
            const std::vector<float>& record = records[static_cast<std::size_t>(list.back())];
            columns.back().score = double{k_scale} * record[score_dim];
            for (int d = 0; d < value_dims; ++d) columns.back().values.push_back(double{k_scale} * record[d]);
        }
        step.list(0, list);
    }
};

double rounded(PFormat format, double p) {
    const auto x = static_cast<float>(p);
    switch (format) {
        case PFormat::f16: return round_to_f16(x);
        case PFormat::bf16: return bf16_to_float(float_to_bf16(x));
        case PFormat::e4m3: return e4m3_to_float(float_to_e4m3(x));
        case PFormat::f64: break;
    }
    return p;
}

using Columns = std::vector<const Column*>;

struct Place {
    int split, position;  ///< position: of the column within its split
};

/// As decode.h states the rules, for a single source without counts.
Place place_of(const Schedule& schedule, int column, int n) {
    const int share = (n + schedule.splits - 1) / schedule.splits;
    const int block = (share + schedule.chunk - 1) / schedule.chunk * schedule.chunk;
    const int chunk = column / schedule.chunk;
    switch (schedule.columns) {
        case ColumnRule::blocks: return {column / block, column % block};
        case ColumnRule::interleaved: return {column % schedule.splits, column / schedule.splits};
        case ColumnRule::round_robin: break;
    }
    return {chunk % schedule.splits, chunk / schedule.splits * schedule.chunk + column % schedule.chunk};
}

/// The chunks of every split, absent columns left out.
std::vector<std::vector<Columns>> chunks_of(const Schedule& schedule, const std::vector<Column>& columns) {
    const auto n = static_cast<int>(columns.size());
    std::vector<std::vector<Columns>> splits(static_cast<std::size_t>(schedule.splits));
    for (int c = 0; c < n; ++c) {
        const Place place = place_of(schedule, c, n);
        std::vector<Columns>& chunks = splits[static_cast<std::size_t>(place.split)];
        const auto chunk = static_cast<std::size_t>(place.position / schedule.chunk);
        chunks.resize(std::max(chunks.size(), chunk + 1));
        if (!columns[static_cast<std::size_t>(c)].values.empty())
            chunks[chunk].push_back(&columns[static_cast<std::size_t>(c)]);
    }
    return splits;
}

/// A running sum of weights and weighted values relative to 2^max.
struct Sums {
    double max = -std::numeric_limits<double>::infinity();
    double weight = 0;
    std::vector<double> values = std::vector<double>(value_dims, 0.0);

    void add(const Sums& other) {
        if (other.weight == 0) return;
        const double joined = std::max(max, other.max);
        const double keep = weight == 0 ? 0.0 : std::exp2(max - joined), take = std::exp2(other.max - joined);
        weight = weight * keep + other.weight * take;
        for (std::size_t d = 0; d < values.size(); ++d) values[d] = values[d] * keep + other.values[d] * take;
        max = joined;
    }
};

double largest_score(const Columns& chunk, double query) {
    double largest = -std::numeric_limits<double>::infinity();
    for (const Column* column : chunk) largest = std::max(largest, column->score * query);
    return largest;
}

std::vector<double> expected(const Schedule& schedule, const std::vector<Column>& columns, double query) {
    double row_max = -std::numeric_limits<double>::infinity();
    for (const Column& column : columns)
        if (!column.values.empty()) row_max = std::max(row_max, column.score * query);
    Sums row;
    for (const std::vector<Columns>& chunks : chunks_of(schedule, columns)) {
        Sums split;
        for (const Columns& chunk : chunks) {
            const double chunk_max = largest_score(chunk, query);
            Sums sums;
            sums.max = schedule.anchor == Anchor::row_max     ? row_max
                       : schedule.anchor == Anchor::chunk_max ? chunk_max
                                                              : std::max(split.max, chunk_max);
            for (const Column* column : chunk) {
                const double power = std::exp2(column->score * query - sums.max);
                const double p = rounded(schedule.p_format, schedule.p_scale * power) / schedule.p_scale;
                sums.weight += power;
                for (std::size_t d = 0; d < sums.values.size(); ++d) sums.values[d] += p * column->values[d];
            }
            split.add(sums);
        }
        row.add(split);
    }
    for (double& value : row.values) value /= row.weight;
    return row.values;
}

/// Every combination; of a GPU kernel, what it takes.
std::vector<PlanOptions> every_schedule(const Step& step) {
    if (on_gpu()) return schedules(fast_kernel(), step);
    std::vector<PlanOptions> all;
    for (const PFormat format : {PFormat::f16, PFormat::bf16, PFormat::e4m3})
        for (const Anchor anchor : {Anchor::split_running_max, Anchor::chunk_max, Anchor::row_max})
            for (const ColumnRule rule : {ColumnRule::blocks, ColumnRule::interleaved, ColumnRule::round_robin})
                for (const auto& [splits, chunk] :
                     {std::pair{1, 64}, {1, 1}, {2, 16}, {3, 7}, {5, 8}, {6, 4}, {8, 4}, {10, 3}, {16, 2}, {64, 16}})
                    all.push_back({.kernel = fast_kernel(),
                                   .p_format = format,
                                   .anchor = anchor,
                                   .splits = splits,
                                   .columns = rule,
                                   .chunk = chunk});
    return all;
}

TEST(Schedule, ExecutedAsPrinted) {
    Fixture fixture(3);
    for (const PlanOptions& options : every_schedule(fixture.step)) {
        const Result result = fixture.step.run(options);
        ASSERT_EQ(result.schedule.splits, options.splits.value_or(result.schedule.splits));
        for (std::int64_t head = 0; head < heads; ++head)
            // FP32 sums of 100 values up to 2.2; the rounding of P alone moves outputs by 1e-4 and more.
            ASSERT_NO_FATAL_FAILURE(expect_values(
                result, 0, head, expected(result.schedule, fixture.columns, query_of_head[head]), 0, 3e-6));
    }
}

TEST(Schedule, AnchorsAndColumnRulesDiffer) {
    // Otherwise the test above would prove little.
    Fixture fixture(3);
    const PlanOptions base{.kernel = "cpu", .p_format = PFormat::e4m3, .splits = 3, .chunk = 8};
    const Result running = fixture.step.run(base);
    for (const Anchor anchor : {Anchor::chunk_max, Anchor::row_max}) {
        PlanOptions other = base;
        other.anchor = anchor;
        EXPECT_FALSE(same_bits(running, 0, fixture.step.run(other), 0)) << name(anchor);
    }
    PlanOptions other = base;
    other.columns = ColumnRule::interleaved;
    const Result interleaved = fixture.step.run(other);
    other.columns = ColumnRule::round_robin;
    const Result round_robin = fixture.step.run(other);
    EXPECT_FALSE(same_bits(running, 0, interleaved, 0));
    EXPECT_FALSE(same_bits(running, 0, round_robin, 0));
    EXPECT_FALSE(same_bits(interleaved, 0, round_robin, 0));
}

}  // namespace
}  // namespace sparsemla::test
