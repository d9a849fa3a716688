// PlanCache and Engine: plans for every capacity and width, shared memory, and run = convert + decode.
#include "sparsemla/engine.h"

#include <numeric>

#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

EngineConfig config_of(std::vector<std::int64_t> capacities, std::vector<std::int64_t> widths = {}) {
    return {.problem = {.heads = 4, .sources = {{.record = Record::fp8_576, .width = 64}}},
            .row_capacities = std::move(capacities),
            .widths = std::move(widths)};
}

template <class Call>
void expect_error(const std::string& argument, Call call) {
    try {
        call();
        ADD_FAILURE() << argument << ": accepted";
    } catch (const Error& error) {
        EXPECT_EQ(error.argument(), argument) << error.what();
        EXPECT_EQ(error.kind(), ErrorKind::invalid_argument) << error.what();
    }
}

/// A GPU's cache of plans gets its memory from the caller.
struct GpuMemory {
    explicit GpuMemory(PlanCache& plans)
        : workspace(tested_device().device, plans.workspace_bytes()),
          state(tested_device().device, plans.state_bytes()) {
        plans.set_memory({workspace.data(), workspace.bytes()}, {state.data(), state.bytes()});
    }
    harness::GpuBuffer workspace, state;
};

/// A step whose slots come from token ids: two requests of one block table, pages in any order.
struct ConvertedStep {
    explicit ConvertedStep(std::int64_t rows)
        : step({.rows = rows, .heads = 4, .sources = {{.pages = 6, .slots_per_page = 80}}}),
          ids(static_cast<std::size_t>(rows * 64)),
          slots(ids.size(), -99),
          request(static_cast<std::size_t>(rows)),
          counts(request.size(), -99) {
        randomise(step, 71);
        for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * 37 % 200) - 5;
        for (std::size_t i = 0; i < request.size(); ++i) request[i] = static_cast<std::int32_t>(i % 2);
        indices = {.token_ids = dense(std::as_const(ids).data(), DType::i32, {rows, 64}),
                   .block_table = dense(table.data(), DType::i32, {2, 3}),
                   .request_of_row = dense(std::as_const(request).data(), DType::i32, {rows}),
                   .cache = step.cache(),
                   .slots = dense(slots.data(), DType::i32, {rows, 64}),
                   .counts = dense(counts.data(), DType::i32, {rows})};
    }
    /// What the outputs hold, as collected elements.
    std::vector<std::uint16_t> out() const {
        const std::span words(step.out_memory().as<std::uint16_t>(), step.out_memory().size() / 2);
        return {words.begin(), words.end()};
    }
    std::vector<std::uint32_t> lse() const {
        const std::span words(step.lse_memory().as<std::uint32_t>(), step.lse_memory().size() / 4);
        return {words.begin(), words.end()};
    }

    const std::vector<std::int32_t> table = {4, 0, 2, 1, 5, 3};
    Step step;
    std::vector<std::int32_t> ids, slots, request, counts;
    ConvertArgs indices;
};

TEST(PlanCache, EqualProblemsShareAPlan) {
    PlanCache cache;
    const Problem problem{.rows = 4, .heads = 16, .sources = {{.width = 128}}};
    const DeviceSpec device = cpu_spec();
    const Plan& first = cache.plan(problem, device);
    EXPECT_EQ(&cache.plan(problem, device), &first);
    EXPECT_EQ(cache.plans(), 1U);

    // Whatever differs makes another plan; references to earlier ones stay valid.
    std::vector<Problem> others(10, problem);
    others[0].rows = 5;
    others[1].heads = 17;
    others[2].query_dtype = DType::bf16;
    others[3].sources[0].width = 129;
    others[4].sources[0].count_offset = 1;
    others[5].sources[0].record = Record::bf16;
    others[6].sinks = true;
    others[7].lse = false;
    others[8].lse_base = LseBase::two;
    others[9].out_dtype = DType::f32;
    for (const Problem& other : others) EXPECT_NE(&cache.plan(other, device), &first);
    Problem split = others[5];
    split.sources[0].split_rope = true;
    Problem two = problem;
    two.sources.push_back(two.sources[0]);
    Problem planar = problem;
    planar.sources[0] = {.record = Record::fp8_v41, .form = RecordForm::planar, .width = 128};
    Problem contiguous = planar;
    contiguous.sources[0].form = RecordForm::contiguous;
    for (const Problem& other : {split, two, planar, contiguous}) cache.plan(other, device);
    DeviceSpec threads = device;
    threads.threads += 1;
    EXPECT_NE(&cache.plan(problem, threads), &first);
    EXPECT_NE(&cache.plan(problem, device, {.kernel = "reference"}), &first);
    EXPECT_NE(&cache.plan(problem, device, {.splits = 3}), &cache.plan(problem, device, {.splits = 4}));
    EXPECT_NE(&cache.plan(problem, device, {.usual_columns = 64}), &first);
    EXPECT_EQ(cache.plans(), 1 + others.size() + 4 + 5);
    EXPECT_EQ(&cache.plan(problem, device), &first);
    EXPECT_EQ(first.problem.rows, 4);
}

TEST(PlanCache, MemoryIsThatOfTheLargestPlan) {
    PlanCache cache;
    std::size_t workspace = 0;
    std::size_t state = 0;
    for (const std::int64_t heads : {1, 64, 16})
        for (const std::string& kernel : harness::kernels_on(Device::Kind::cpu)) {
            const Plan& plan =
                cache.plan({.rows = 4, .heads = heads, .sources = {{.width = 256}}}, cpu_spec(), {.kernel = kernel});
            workspace = std::max(workspace, plan.workspace_bytes);
            state = std::max(state, plan.state_bytes);
            EXPECT_EQ(cache.workspace_bytes(), workspace);
            EXPECT_EQ(cache.state_bytes(), state);
        }
    EXPECT_FALSE(cache.prepared());
    cache.prepare();
    EXPECT_TRUE(cache.prepared());
    EXPECT_GE(cache.workspace().bytes, workspace);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(cache.workspace().data) % 64, 0U);
}

TEST(PlanCache, MemoryOfTheCaller) {
    PlanCache cache;
    cache.plan({.rows = 4, .heads = 16, .sources = {{.width = 256}}}, cpu_spec());
    Fenced workspace(cache.workspace_bytes(), 64);
    Fenced state(cache.state_bytes(), 64);
    expect_error("workspace", [&] { cache.set_memory({}, state.memory()); });
    expect_error("workspace", [&] { cache.set_memory({workspace.data(), workspace.size() - 1}, state.memory()); });
    cache.set_memory(workspace.memory(), state.memory());
    cache.prepare();
    EXPECT_EQ(cache.workspace().data, workspace.data());

    // A larger plan afterwards needs larger memory, said at prepare: the caller's is never replaced.
    cache.plan({.rows = 400, .heads = 128, .sources = {{.width = 4096}}}, cpu_spec(), {.splits = 16});
    ASSERT_GT(cache.workspace_bytes(), workspace.size());
    EXPECT_FALSE(cache.prepared());
    expect_error("workspace", [&] { cache.prepare(); });
    EXPECT_FALSE(cache.prepared());
}

TEST(Engine, PlansEveryCapacityAndWidth) {
    PlanCache plans;
    const Engine engine(config_of({16, 1, 4, 4}, {128, 64}), cpu_spec(), plans);
    EXPECT_EQ(plans.plans(), 6U);
    for (const std::int64_t width : {64, 128})
        for (const auto& [rows, capacity] : {std::pair{0, 1}, {1, 1}, {2, 4}, {4, 4}, {5, 16}, {16, 16}}) {
            const Plan& plan = engine.plan_for(rows, width);
            EXPECT_EQ(plan.problem.rows, capacity) << "rows " << rows;
            EXPECT_EQ(plan.problem.sources[0].width, width);
            EXPECT_EQ(plan.problem.heads, 4);
        }
    for (const std::int64_t rows : {std::int64_t{-1}, std::int64_t{17}, std::int64_t{1} << 40})
        expect_error("rows", [&] { engine.plan_for(rows, 64); });
    for (const std::int64_t width : {0, 63, 65, 256}) expect_error("width", [&] { engine.plan_for(1, width); });
    const std::string text = engine.explain();
    for (const std::string part : {"rows <= 1,", "rows <= 16", "width 64", "width 128", "declined"})
        EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
}

TEST(Engine, RefusesWhatCannotBePlanned) {
    PlanCache plans;
    const auto build = [&](auto change) {
        EngineConfig config = config_of({1, 4});
        change(config);
        const Engine engine(config, cpu_spec(), plans);
    };
    expect_error("row_capacities", [&] { build([](EngineConfig& c) { c.row_capacities.clear(); }); });
    expect_error("row_capacities", [&] { build([](EngineConfig& c) { c.row_capacities = {4, 0}; }); });
    expect_error("row_capacities", [&] { build([](EngineConfig& c) { c.row_capacities = {4, -3}; }); });
    expect_error("widths", [&] { build([](EngineConfig& c) { c.widths = {64, -1}; }); });
    expect_error("sources", [&] { build([](EngineConfig& c) { c.problem.sources.clear(); }); });
    expect_error("heads", [&] { build([](EngineConfig& c) { c.problem.heads = 129; }); });
    expect_error("rows", [&] { build([](EngineConfig& c) { c.row_capacities = {std::int64_t{1} << 40}; }); });
    expect_error("kernel", [&] { build([](EngineConfig& c) { c.options.kernel = "none"; }); });
}

// Two layers of equal shape share plans; all layers share one workspace, sized for the largest.
TEST(Engine, LayersShareAPlanCache) {
    PlanCache plans;
    const Engine first(config_of({1, 4}), cpu_spec(), plans);
    const Engine second(config_of({4, 1}), cpu_spec(), plans);
    EXPECT_EQ(plans.plans(), 2U);
    EXPECT_EQ(&first.plan_for(3, 64), &second.plan_for(3, 64));
    EngineConfig other = config_of({4});
    other.problem.heads = 128;
    const Engine third(other, cpu_spec(), plans);
    EXPECT_EQ(plans.plans(), 3U);
    EXPECT_GE(plans.workspace_bytes(), third.plan_for(4, 64).workspace_bytes);
}

TEST(Engine, DecodeNeedsPrepare) {
    PlanCache plans;
    const Engine engine(config_of({4}), cpu_spec(), plans);
    Step step({.rows = 3, .heads = 4, .sources = {{}}});
    step.poison_outputs();
    expect_error("plans", [&] { engine.decode(step.args); });
    EXPECT_TRUE(step.outputs_untouched());
    plans.prepare();
    engine.decode(step.args);
    EXPECT_FALSE(step.outputs_untouched());
    const Engine late(config_of({8}), cpu_spec(), plans);  // a plan after prepare
    expect_error("plans", [&] { engine.decode(step.args); });
    plans.prepare();
    engine.decode(step.args);
}

// The engine's decode is the plan's decode, on memory of the cache or of the caller.
TEST(Engine, DecodeEqualsThePlansDecode) {
    for (const std::int64_t rows : {1, 3, 4}) {
        PlanCache plans;
        Step step({.rows = rows, .heads = 4, .sources = {{}}});
        step.plan();
        EngineConfig config = config_of({1, 2, 4, 8});
        config.problem.device = step.device.device;
        const Engine engine(config, step.device, plans);
        std::optional<GpuMemory> memory;
        if (on_gpu()) memory.emplace(plans);
        plans.prepare();
        randomise(step, 72);
        for (std::int32_t row = 0; row < rows; ++row) step.list(row, slot_range(row, 50));
        const Result expected = step.run(engine.plan_for(rows, 64));
        for (const bool own_memory : {false, true}) {
            const DecodeArgs& args = step.args;
            step.poison_outputs();
            DeviceCall(engine.plan_for(rows, 64), args, {.own_memory = own_memory})
                .run([&](const DecodeArgs& placed, Stream stream) { engine.decode(placed, stream); });
            for (std::int64_t row = 0; row < rows; ++row)
                for (std::int64_t head = 0; head < 4; ++head) {
                    const std::uint16_t* got =
                        step.out_memory().as<std::uint16_t>() + row * args.out.strides[0] + head * args.out.strides[1];
                    const auto want =
                        expected.out_bits_of(row).subspan(static_cast<std::size_t>(head * value_dims), value_dims);
                    ASSERT_TRUE(std::equal(want.begin(), want.end(), got)) << "row " << row << ", head " << head;
                }
        }
        expect_error("rows", [&] {
            DecodeArgs args = step.args;
            args.rows = 9;
            engine.decode(args);
        });
        expect_error("width", [&] {
            DecodeArgs args = step.args;
            args.sources[0].slots.shape[1] = 63;
            engine.decode(args);
        });
    }
}

TEST(Engine, RunIsConvertThenDecode) {
    for (const Sharding& sharding : {Sharding{}, Sharding{.world = 2, .rank = 1, .interleave = 16}}) {
        PlanCache plans;
        EngineConfig config = config_of({8});
        config.sharding = sharding;
        const Engine engine(config, cpu_spec(), plans);
        plans.prepare();

        ConvertedStep together(5);
        together.step.poison_outputs();
        engine.run(together.indices, together.step.args);

        ConvertedStep apart(5);
        apart.step.poison_outputs();
        engine.convert(apart.indices);
        apart.step.args.sources[0].slots = apart.indices.slots;
        apart.step.args.sources[0].counts = apart.indices.counts;
        engine.decode(apart.step.args);

        EXPECT_EQ(together.slots, apart.slots);
        EXPECT_EQ(together.counts, apart.counts);
        EXPECT_EQ(together.out(), apart.out());
        EXPECT_EQ(together.lse(), apart.lse());
        EXPECT_FALSE(together.step.outputs_untouched());

        // The engine's sharding is what counts, not that of the arguments.
        ConvertedStep plain(5);
        plain.indices.sharding = sharding;
        convert_indices(plain.indices);
        EXPECT_EQ(plain.slots, together.slots);
        EXPECT_EQ(plain.counts, together.counts);
    }
}

TEST(Engine, RunRefusesBeforeAnythingIsWritten) {
    PlanCache plans;
    const Engine engine(config_of({4}), cpu_spec(), plans);
    const auto refused = [&](const std::string& argument, std::int64_t rows, const auto& change) {
        ConvertedStep step(rows);
        change(step);
        step.step.poison_outputs();
        const std::vector<std::int32_t> slots = step.slots;
        const std::vector<std::int32_t> counts = step.counts;
        expect_error(argument, [&] { engine.run(step.indices, step.step.args); });
        EXPECT_TRUE(step.step.outputs_untouched()) << argument;
        EXPECT_EQ(step.slots, slots) << argument;
        EXPECT_EQ(step.counts, counts) << argument;
    };
    refused("plans", 3, [](ConvertedStep&) {});  // not prepared
    plans.prepare();
    refused("rows", 5, [](ConvertedStep&) {});
    refused("token_ids", 3, [](ConvertedStep& s) { s.step.args.rows = 2; });
    refused("slots", 3, [](ConvertedStep& s) { s.indices.slots.dtype = DType::i64; });
    refused("cache.page_size", 3, [](ConvertedStep& s) { s.step.args.sources[0].cache.page_size = 0; });

    // What only decode can find is found after the conversion, and before an output is written.
    ConvertedStep blind(3);
    blind.step.args.query = {};
    blind.step.poison_outputs();
    expect_error("query", [&] { engine.run(blind.indices, blind.step.args); });
    EXPECT_TRUE(blind.step.outputs_untouched());

    EngineConfig shifted = config_of({4});
    shifted.problem.sources[0].count_offset = 7;
    const Engine other(shifted, cpu_spec(), plans);
    plans.prepare();
    ConvertedStep step(3);
    expect_error("indices", [&] { other.run(step.indices, step.step.args); });
}

TEST(Engine, RunOfNoRowsDoesNothing) {
    PlanCache plans;
    const Engine engine(config_of({4}), cpu_spec(), plans);
    plans.prepare();
    ConvertedStep step(1);
    step.indices.token_ids.shape[0] = 0;
    step.step.args.rows = 0;
    step.step.poison_outputs();
    engine.run(step.indices, step.step.args);
    EXPECT_TRUE(step.step.outputs_untouched());
    EXPECT_EQ(step.counts, (std::vector<std::int32_t>{-99}));
}

}  // namespace
}  // namespace sparsemla::test
