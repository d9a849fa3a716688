// K19, K20: what is refused is what would not run, and the other way round; sizes at their limits, and of zero.
#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

/// The error of planning, or nothing.
std::optional<Error> planning_error(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    try {
        make_plan(problem, device, options);
    } catch (const Error& error) {
        return error;
    }
    return std::nullopt;
}

// ---------------------------------------------------------------------------------------------------------------------
class K19_DispatchGap : public EveryRecord {};

// B101: heads 0..256 x rows x query dtypes x devices: refusal(), supports() and make_plan() say the same.
TEST_P(K19_DispatchGap, B101_RefusalEqualsPlanning) {
    for (const Device::Kind kind : {Device::Kind::cpu, Device::Kind::cuda})
        for (const DType query_dtype : {DType::f8_e4m3, DType::bf16, DType::f16})
            for (const std::int64_t rows : {-1, 0, 80})
                for (std::int64_t heads = -1; heads <= 256; heads += sanitized ? 5 : heads < 130 ? 1 : 2) {
                    Problem problem{.rows = rows,
                                    .heads = heads,
                                    .query_dtype = query_dtype,
                                    .sources = {{layout().record, layout().form, layout().split_rope, 64, 0}}};
                    const bool tested = kind == tested_device().device.kind;
                    DeviceSpec device = tested ? tested_device() : cpu_spec();
                    if (!tested) device.device = {kind, 0};
                    problem.device = device.device;
                    const PlanOptions options{.kernel = kernel()};
                    const auto refused = refusal(problem, device, options);
                    const auto error = planning_error(problem, device, options);
                    ASSERT_EQ(refused.has_value(), error.has_value()) << "heads " << heads << ", rows " << rows;
                    ASSERT_EQ(supports(problem, device, options), !refused.has_value());
                    const bool in_range = heads >= 0 && heads <= max_heads && rows >= 0;
                    const bool known_query = query_dtype == DType::f8_e4m3 || query_dtype == DType::bf16;
                    const bool may_run = in_range && known_query && tested;
                    // A GPU kernel may refuse more.
                    ASSERT_TRUE(may_run ? !refused || on_gpu() : refused.has_value())
                        << "heads " << heads << ", rows " << rows;
                    if (!refused) continue;
                    ASSERT_EQ(*refused, error->what());
                    if (in_range && known_query)
                        ASSERT_EQ(error->kind(), ErrorKind::unsupported) << *refused;
                    else
                        ASSERT_TRUE(error->argument() == "heads" || error->argument() == "rows" ||
                                    error->argument() == "query_dtype")
                            << *refused;
                    const bool only_heads = heads > max_heads && rows >= 0 && known_query;
                    const std::string allowed = "heads: need 0 .. " + std::to_string(max_heads);
                    ASSERT_TRUE(!only_heads || refused->find(allowed) != std::string::npos) << *refused;
                }
}

// B023, B101: head counts around every tile run and is right, its padding heads full of NaN.
TEST_P(K19_DispatchGap, B023_EveryHeadCountRuns) {
    for (const DType query_dtype : {DType::f8_e4m3, DType::bf16})
        for (std::int64_t heads = 1; heads <= max_heads; heads += heads < 34 || heads > 62 ? 1 : 7) {
            if (heads > 66 && heads < 125 && heads != 96 && heads != 112) continue;
            Step step({.rows = 2,
                       .heads = heads,
                       .query_dtype = query_dtype,
                       .sources = {{.layout = layout(), .width = 3, .pages = 1, .page_size = 4}}});
            if (!step.taken_by(kernel())) continue;
            step.histogram();
            step.list(0, {3, 1});
            step.list(1, {0, 2, 0});
            const Result result = step.run({.kernel = kernel()});
            ASSERT_NO_FATAL_FAILURE(expect_histogram(result, 0, {3, 1})) << "heads " << heads;
            ASSERT_NO_FATAL_FAILURE(expect_histogram(result, 1, {0, 2, 0})) << "heads " << heads;
        }
}

// B108: rows around round numbers and around the capacity; past it decode refuses before anything is written.
TEST_P(K19_DispatchGap, B108_RowsAroundTheCapacity) {
    Step step({.rows = 65, .heads = 1, .sources = {{.layout = layout(), .width = 2, .pages = 3, .page_size = 64}}});
    step.histogram();
    for (std::int32_t row = 0; row < 65; ++row) step.list(row, {row, 191 - row});
    for (const std::int64_t rows : {63, 64, 65}) {
        step.args.rows = rows;
        const Result result = step.run({.kernel = kernel()});
        for (std::int32_t row = 0; row < rows; ++row)
            ASSERT_NO_FATAL_FAILURE(expect_histogram(result, row, {row, 191 - row}));
    }
    for (const std::int64_t capacity : {0, 1, 63, 64}) {
        step.problem.rows = capacity;
        step.args.rows = capacity + 1;
        step.poison_outputs();
        try {
            step.run({.kernel = kernel()});
            FAIL() << "rows " << capacity + 1 << " ran on a plan of " << capacity;
        } catch (const Error& error) {
            EXPECT_EQ(error.argument(), "rows") << error.what();
            EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
        }
        EXPECT_TRUE(step.outputs_untouched());
    }
}

// Options that a kernel does not take are refused by name; those it takes are what the schedule says.
TEST_P(K19_DispatchGap, OptionsAreTakenOrRefused) {
    Step step({.rows = 1, .heads = 2, .sources = {{.layout = layout()}}});
    step.histogram();
    step.list(0, slot_range(0, 64));
    int taken = 0;
    for (const PFormat format : {PFormat::e4m3, PFormat::f16, PFormat::bf16, PFormat::f64})
        for (const Anchor anchor : {Anchor::split_running_max, Anchor::chunk_max, Anchor::row_max})
            for (const ColumnRule rule : {ColumnRule::blocks, ColumnRule::interleaved, ColumnRule::round_robin})
                for (const int splits : {-1, 0, 1, 2, 1 << 20})
                    for (const int chunk : {-8, 0, 1, 16, 1 << 20}) {
                        const PlanOptions options{.kernel = kernel(),
                                                  .p_format = format,
                                                  .anchor = anchor,
                                                  .splits = splits,
                                                  .columns = rule,
                                                  .chunk = chunk};
                        const auto error = planning_error(step.problem, step.device, options);
                        ASSERT_EQ(supports(step.problem, step.device, options), !error.has_value());
                        if (error) {
                            ASSERT_EQ(error->kind(), ErrorKind::unsupported);
                            ASSERT_NE(std::string(error->what()).find(kernel() + ": "), std::string::npos);
                            continue;
                        }
                        ++taken;
                        const Result result = step.run(options);
                        const Schedule& schedule = result.schedule;
                        ASSERT_TRUE(schedule.kernel == kernel() && schedule.p_format == format &&
                                    schedule.anchor == anchor && schedule.splits == splits &&
                                    schedule.columns == rule && schedule.chunk == chunk)
                            << to_string(schedule);
                        ASSERT_NO_FATAL_FAILURE(expect_histogram(result, 0, slot_range(0, 64)));
                    }
    // The definition has no schedule to choose; what else a GPU kernel takes is its own affair.
    EXPECT_TRUE(on_gpu() || (taken > 0) == (kernel() != "reference"));
}

INSTANTIATE_TEST_SUITE_P(All, K19_DispatchGap, testing::ValuesIn(kernels_and_layouts()), test_name);

// ---------------------------------------------------------------------------------------------------------------------
class K20_LaunchLimitOrZeroSize : public EveryKernel {};

// B024: more rows than a grid dimension of 16 bits counts.
TEST_P(K20_LaunchLimitOrZeroSize, B024_VeryManyRows) {
    constexpr std::int64_t capacity = 70000;
    Step step({.rows = capacity, .heads = 1, .sources = {{.width = 1}}});
    step.histogram();
    for (std::int64_t row = 0; row < capacity; ++row) step.slot(row, 0) = static_cast<std::int32_t>(row % 509);
    for (const std::int64_t rows : {std::int64_t{65535}, std::int64_t{65536}, capacity}) {
        if (sanitized && rows != 65536) continue;  // 36 million instrumented reads each
        step.args.rows = rows;
        const Result result = step.run({.kernel = kernel()});
        for (std::int64_t row = 0; row < rows; row += row < 65000 ? 997 : 1) {
            const auto slot = static_cast<int>(row % 509);
            ASSERT_EQ(result.out(row, 0, slot), Step::mark) << "row " << row << " of " << rows;
            ASSERT_EQ(result.out(row, 0, slot + 1), 0.0F);
            ASSERT_EQ(result.lse(row, 0), 0.0F);
        }
    }
}

// B060: nothing to do is done: no rows, no heads; outputs stay as they are, whatever else is missing.
TEST_P(K20_LaunchLimitOrZeroSize, B060_NoRowsOrNoHeads) {
    for (const auto& [rows, heads, args_rows] : {std::tuple{0, 4, 0}, {3, 0, 3}, {0, 0, 0}, {3, 4, 0}}) {
        Step step({.rows = rows, .heads = heads, .sources = {{}}, .sinks = true});
        step.args.rows = args_rows;
        const Result result = step.run({.kernel = kernel()});
        EXPECT_TRUE(result.out_bits.empty());
        decode(step.plan({.kernel = kernel()}), {.rows = args_rows});
        EXPECT_TRUE(step.outputs_untouched());
    }
}

// B060: after an idle step the next one is right.
TEST_P(K20_LaunchLimitOrZeroSize, B060_IdleStepThenWork) {
    Step step({.rows = 5, .heads = 4, .sources = {{}}});
    step.histogram();
    for (std::int32_t row = 0; row < 5; ++row) step.list(row, {row});
    const Plan plan = step.plan({.kernel = kernel()});
    for (const std::int64_t rows : {0, 5, 0, 3}) {
        step.args.rows = rows;
        const Result result = step.run(plan);
        for (std::int32_t row = 0; row < rows; ++row) ASSERT_NO_FATAL_FAILURE(expect_histogram(result, row, {row}));
    }
}

INSTANTIATE_TEST_SUITE_P(All, K20_LaunchLimitOrZeroSize, testing::ValuesIn(tested_kernels()), kernel_test_name);

class K20_ZeroSizeShape : public EveryRecord {};

// Width 0, in one source or both; a cache of 0 pages, with lists that name what it does not hold.
TEST_P(K20_ZeroSizeShape, B060_NoColumnsOrNoPages) {
    for (const std::int64_t first : {0, 3})
        for (const std::int64_t second : {0, 5})
            for (const std::int64_t pages : {0, 2}) {
                Step step({.rows = 3,
                           .heads = 2,
                           .sources = {{.layout = layout(), .width = first, .pages = pages},
                                       {.layout = layout(), .width = second, .count_offset = first}},
                           .sinks = true});
                step.histogram(0);
                step.histogram(1, 50);
                const bool reads_first = first > 0 && pages > 0;
                std::vector<std::int32_t> read;
                for (std::int64_t row = 0; row < 3; ++row) {
                    step.list(row, slot_range(1, static_cast<std::int32_t>(first)), 0);
                    step.list(row, slot_range(1, static_cast<std::int32_t>(second)), 1);
                }
                for (std::int32_t c = 0; reads_first && c < first; ++c) read.push_back(1 + c);
                for (std::int32_t c = 0; c < second; ++c) read.push_back(51 + c);
                for (std::int64_t head : {0, 1}) step.sink(head) = -infinity;
                for_each_schedule(kernel(), step, [&](const Result& result) {
                    for (std::int64_t row = 0; row < 3; ++row)
                        if (read.empty())
                            expect_empty_row(result, row);
                        else
                            expect_histogram(result, row, read);
                });
            }
}

INSTANTIATE_TEST_SUITE_P(All, K20_ZeroSizeShape, testing::ValuesIn(kernels_and_layouts()), test_name);

}  // namespace
}  // namespace sparsemla::test
