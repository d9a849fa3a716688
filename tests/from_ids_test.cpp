// Token ids that decode converts itself: the bits of convert_indices followed by decode, whatever the ids, the table,
// the sharding and the schedule.
#include <map>
#include <random>

#include "sparsemla/engine.h"
#include "tests/conversion.h"
#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

template <class T, std::size_t n>
T pick(const T (&values)[n], std::mt19937_64& bits) {
    return values[bits() % n];
}

struct IdStepSpec {
    Record record = Record::fp8_576;
    std::int64_t heads = 20;
    std::int64_t width = 300;
    bool two_sources = false;
    DType query_dtype = DType::f8_e4m3;
};

/// A step, and the token ids from which its first source's slots come.
struct IdStep {
    IdStep(const IdStepSpec& spec, std::mt19937_64& bits)
        : conversion(random_conversion(bits, spec.width)), step(step_spec(spec, conversion)) {
        // Of page-planar records none lie between pages.
        conversion.cache = step.cache();
        randomise(step, bits());
        for (std::size_t i = 1; i < step.problem.sources.size(); ++i)
            for (std::int64_t row = 0; row < conversion.rows; ++row) step.list(row, slot_range(0, 70), i);
    }

    static StepSpec step_spec(const IdStepSpec& spec, const Conversion& conversion) {
        const RecordForm form = layout_of(spec.record).default_form();
        const std::int64_t slots_per_page = form == RecordForm::planar ? 0 : conversion.cache.slots_per_page;
        StepSpec result{.rows = conversion.rows,
                        .heads = spec.heads,
                        .query_dtype = spec.query_dtype,
                        .sources = {{.layout = {spec.record, form},
                                     .width = spec.width,
                                     .pages = conversion.cache.pages,
                                     .page_size = conversion.cache.page_size,
                                     .slots_per_page = slots_per_page}},
                        .sinks = true};
        if (spec.two_sources) result.sources.push_back({.layout = {spec.record, form}, .width = 70, .pages = 3});
        return result;
    }

    /// By convert_indices on the CPU, then decode.
    Result apart(const PlanOptions& options) {
        convert_indices(conversion.args());
        for (std::int64_t row = 0; row < conversion.rows; ++row) {
            const std::int32_t* slots =
                conversion.slots_memory.data() + list_guard + row * (conversion.width + conversion.padding);
            const std::int32_t kept = conversion.counts_memory[list_guard + row * conversion.list_stride];
            step.list(row, {slots, slots + kept});
        }
        return step.run(options);
    }

    /// By decode alone. The step is one of token ids from here on.
    void take_ids() {
        step.problem.from_ids = true;
        step.args.indices = conversion.args();
        step.args.indices.slots = step.args.indices.counts = {};
        step.args.indices.cache = {};
        step.args.sources[0].slots = step.args.sources[0].counts = {};
    }

    Conversion conversion;
    Step step;
};

void expect_same(const Result& got, const Result& expected, const std::string& what) {
    EXPECT_EQ(got.schedule, expected.schedule) << what;
    ASSERT_EQ(got.out_bits, expected.out_bits) << what << ": " << to_string(got.schedule);
    ASSERT_EQ(got.lse_bits, expected.lse_bits) << what << ": " << to_string(got.schedule);
}

/// Schedules and tilings of the kernels that convert.
std::vector<PlanOptions> wishes(std::mt19937_64& bits) {
    if (!on_gpu()) {
        std::vector<PlanOptions> list = schedules();
        return {{.kernel = "reference"}, list[bits() % list.size()], list[bits() % list.size()]};
    }
    std::vector<PlanOptions> list;
    for (const int splits : {1, pick({2, 4, 8}, bits), pick({3, 5, 16}, bits)})
        list.push_back({.kernel = "decode_latency",
                        .splits = splits,
                        .tile_heads = pick({16, 32}, bits),
                        .gather = pick({Gather::copies, Gather::bulk}, bits),
                        .transport = pick({Transport::stores, Transport::bulk, Transport::weights}, bits)});
    return list;
}

TEST(FromIds, GivesTheBitsOfConversionAndDecode) {
    std::mt19937_64 bits(310);
    constexpr Record records[] = {Record::fp8_576,           Record::fp8_512, Record::bf16,      Record::fp8_ds_mla,
                                  Record::fp8_ds_mla_norope, Record::fp8_v41, Record::nvfp4_v41, Record::fp8_v4,
                                  Record::nvfp4_ds_mla};
    std::map<std::pair<Record, std::size_t>, int> compared;  // of a record and a number of sources
    for (int number = 0; number < (on_gpu() ? 144 : 72); ++number) {
        constexpr std::int64_t widths[] = {1, 0, 63, 64, 65, 383, 600, 2048, 2304, 2305, 5000};
        IdStepSpec spec{.record = records[number % std::size(records)],
                        .heads = pick({1, 5, 16, 17, 40, 64}, bits),
                        .width = widths[number % 11],
                        .two_sources = number / 9 % 2 == 1,
                        .query_dtype = pick({DType::f8_e4m3, DType::bf16}, bits)};
        IdStep ids(spec, bits);
        std::vector<std::pair<PlanOptions, Result>> expected;
        for (const PlanOptions& options : wishes(bits))
            if (supports(ids.step.problem, ids.step.device, options))
                expected.emplace_back(options, ids.apart(options));
        ids.take_ids();
        for (const auto& [options, result] : expected) {
            // The list may take the room that a stage needed.
            if (on_gpu() && !supports(ids.step.problem, ids.step.device, options)) continue;
            expect_same(ids.step.run(options), result, "step " + std::to_string(number));
            if (HasFatalFailure()) return;
            ++compared[{spec.record, ids.step.problem.sources.size()}];
        }
    }
    EXPECT_EQ(compared.size(), 2 * std::size(records));
}

TEST(FromIds, RefusesWhatItCannotBeGiven) {
    std::mt19937_64 bits(311);
    const auto refused = [&](const std::string& argument, const auto& change) {
        IdStep ids({}, bits);
        ids.take_ids();
        const Plan plan = ids.step.plan();
        change(ids);
        ids.step.poison_outputs();
        try {
            ids.step.place(plan).decode(plan);
            ADD_FAILURE() << argument << ": accepted";
        } catch (const Error& error) {
            EXPECT_EQ(error.argument(), argument) << error.what();
            EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
        }
        EXPECT_TRUE(ids.step.outputs_untouched()) << argument;
    };
    std::vector<std::int32_t> list(10000);
    const auto some = [&](std::int64_t rows, std::int64_t width) {
        return dense(list.data(), DType::i32, {rows, width});
    };
    refused("slots", [&](IdStep& ids) { ids.step.args.sources[0].slots = some(ids.conversion.rows, 300); });
    refused("counts", [&](IdStep& ids) { ids.step.args.sources[0].counts = dense(list.data(), DType::i32, {8}); });
    refused("indices.slots", [&](IdStep& ids) { ids.step.args.indices.slots = some(ids.conversion.rows, 300); });
    refused("indices.counts", [&](IdStep& ids) { ids.step.args.indices.counts = dense(list.data(), DType::i32, {8}); });
    refused("token_ids", [](IdStep& ids) { ids.step.args.indices.token_ids = {}; });
    refused("token_ids", [](IdStep& ids) { ids.step.args.indices.token_ids.shape[1] = 299; });
    refused("token_ids", [](IdStep& ids) { ids.step.args.indices.token_ids.dtype = DType::i64; });
    refused("block_table", [](IdStep& ids) { ids.step.args.indices.block_table = {}; });
    refused("request_of_row", [](IdStep& ids) { ids.step.args.indices.request_of_row.shape[0] = 0; });
    refused("lengths", [&](IdStep& ids) { ids.step.args.indices.lengths = dense(list.data(), DType::i32, {0}); });
    refused("sharding.rank", [](IdStep& ids) { ids.step.args.indices.sharding.rank = 64; });
    refused("sharding.interleave", [](IdStep& ids) { ids.step.args.indices.sharding.interleave = 0; });
    refused("out", [](IdStep& ids) {
        ids.step.args.out = {const_cast<void*>(ids.step.args.indices.token_ids.data),
                             DType::bf16,
                             {},
                             3,
                             ids.step.args.out.shape,
                             ids.step.args.out.strides};
    });

    // A plan that takes slots takes no ids.
    for (const bool all : {true, false}) {
        IdStep ids({}, bits);
        if (all) ids.step.args.indices = ids.conversion.args();
        ids.step.args.indices.block_table = some(1, 1);
        const Plan plan = ids.step.plan();
        try {
            ids.step.place(plan).decode(plan);
            ADD_FAILURE() << "accepted";
        } catch (const Error& error) {
            EXPECT_EQ(error.argument(), all ? "token_ids" : "block_table") << error.what();
        }
    }
    IdStep ids({}, bits);
    Problem shifted = ids.step.problem;
    shifted.from_ids = true;
    shifted.sources[0].count_offset = 3;
    const auto reason = refusal(shifted, ids.step.device);
    ASSERT_TRUE(reason);
    EXPECT_NE(reason->find("sources[0].count_offset"), std::string::npos) << *reason;
}

// The plan of a batch, or with a kernel that does not take ids; of one source, or two.
TEST(FromIds, EngineRunsItWhereAKernelCan) {
    std::mt19937_64 bits(312);
    for (const bool two_sources : {false, true})
        for (const std::string kernel : {"", on_gpu() ? "decode_balanced" : "reference"}) {
            IdStep ids({.heads = 16, .two_sources = two_sources}, bits);
            ids.step.plan();
            PlanCache plans;
            EngineConfig config{.problem = ids.step.problem,
                                .row_capacities = {8},
                                .sharding = ids.conversion.sharding,
                                .options = {.kernel = kernel}};
            const Engine plain(config, ids.step.device, plans);
            EXPECT_EQ(plain.from_ids_plan_for(1, 300), nullptr);
            config.from_ids = true;
            const Engine engine(config, ids.step.device, plans);
            const Plan* from_ids = engine.from_ids_plan_for(1, 300);
            const Plan& plan = engine.plan_for(1, 300);
            const bool can = kernel != "decode_balanced";
            ASSERT_EQ(from_ids != nullptr, can) << engine.explain();
            EXPECT_NE(engine.explain().find(can ? "converted within decode" : "converted before: "), std::string::npos);
            if (can) {
                EXPECT_EQ(from_ids->schedule, plan.schedule);
                EXPECT_NE(from_ids->describe().find("from token ids"), std::string::npos);
            }
            harness::GpuBuffer workspace, state;
            if (on_gpu()) {
                workspace = harness::GpuBuffer(tested_device().device, plans.workspace_bytes());
                state = harness::GpuBuffer(tested_device().device, plans.state_bytes());
                plans.set_memory({workspace.data(), workspace.bytes()}, {state.data(), state.bytes()});
            }
            plans.prepare();
            const Result expected = ids.apart({.kernel = plan.schedule.kernel, .splits = plan.schedule.splits});
            std::vector<std::int32_t> lists(static_cast<std::size_t>(ids.conversion.rows * 301));
            ids.take_ids();
            ids.step.poison_outputs();
            const Device device = tested_device().device;
            harness::GpuBuffer lists_there;
            if (on_gpu()) lists_there = harness::GpuBuffer(device, lists.size() * sizeof(std::int32_t));
            DeviceCall(ids.step.plan(), ids.step.args, {.own_memory = false})
                .run([&](const DecodeArgs& placed, Stream stream) {
                    ConvertArgs indices = placed.indices;
                    indices.cache = placed.sources[0].cache;
                    auto* memory = on_gpu() ? reinterpret_cast<std::int32_t*>(lists_there.data()) : lists.data();
                    if (!can) {
                        indices.slots = dense(memory, DType::i32, {ids.conversion.rows, 300}, device);
                        indices.counts =
                            dense(memory + ids.conversion.rows * 300, DType::i32, {ids.conversion.rows}, device);
                    }
                    engine.run(indices, placed, stream);
                });
            const Result got = ids.step.collect(plan);
            ASSERT_EQ(got.out_bits, expected.out_bits);
            ASSERT_EQ(got.lse_bits, expected.lse_bits);
        }
    EngineConfig config{.problem = IdStep({}, bits).step.problem, .row_capacities = {8}};
    config.problem.from_ids = true;
    PlanCache plans;
    EXPECT_THROW(Engine(config, tested_device(), plans), Error);
}

}  // namespace
}  // namespace sparsemla::test
