// Tiles of heads, stages, ways of gathering, transports and triggers are choices for speed: for one schedule all of
// them give equal bits. And a cache that no 32-bit byte offset spans.
#include "tests/cuda/gpu_calls.h"

namespace sparsemla::test {
namespace {

using harness::GpuBuffer;

class GpuTilings : public OnGpu {};

/// How records come, and the tiles of heads that share them.
struct Sharing {
    Gather gather;
    int cluster_tiles;
};
constexpr Sharing sharings[] = {{Gather::copies, 1}, {Gather::bulk, 1}, {Gather::bulk, 2}, {Gather::bulk, 3}};

/// Every combination of the tiling's options, for given splits and format of P.
std::vector<PlanOptions> tilings(const PlanOptions& schedule) {
    std::vector<PlanOptions> list;
    for (const int tile : {16, 32, 64})
        for (const int stages : {1, 2, 3, 4})
            for (const Sharing& sharing : sharings)
                for (const Transport transport : {Transport::stores, Transport::bulk, Transport::weights})
                    for (const Trigger trigger : {Trigger::start, Trigger::loaded, Trigger::end}) {
                        PlanOptions options = schedule;
                        options.tile_heads = tile;
                        options.stages = stages;
                        options.cluster_tiles = sharing.cluster_tiles;
                        options.gather = sharing.gather;
                        options.transport = transport;
                        options.trigger = trigger;
                        list.push_back(options);
                    }
    return list;
}

template <class T, std::size_t n>
T pick(const T (&values)[n], std::mt19937_64& bits) {
    return values[bits() % n];
}

RandomSpec random_spec(std::mt19937_64& bits) {
    RandomSpec spec;
    spec.rows = 1 + static_cast<std::int64_t>(bits() % 5);
    spec.heads = pick({1, 2, 12, 15, 16, 17, 33, 64, 65, 96, 128}, bits);
    spec.record = pick({Record::fp8_576, Record::fp8_512}, bits);
    spec.widths = {pick({1, 63, 64, 65, 200, 513, 1000}, bits)};
    if (bits() % 2 == 0) spec.widths.push_back(pick({1, 64, 70, 512}, bits));
    spec.query_dtype = pick({DType::f8_e4m3, DType::bf16}, bits);
    spec.sinks = bits() % 2 == 0;
    spec.out_dtype = bits() % 4 == 0 ? DType::f32 : DType::bf16;
    spec.lse_base = pick({LseBase::natural, LseBase::two}, bits);
    return spec;
}

/// All tilings of one schedule on one place on the GPU; returns how many there were.
int expect_equal_tilings(Step& step, const PlanOptions& schedule, const std::string& what) {
    if (!supports(step.problem, step.device, schedule)) return 0;
    const Plan first = step.plan(schedule);
    DeviceCall call = step.place(first);
    const auto run = [&](const Plan& plan) {
        prepare(plan, call.args.state, call.stream());
        step.poison_outputs();
        call.decode(plan);
        return step.collect(plan);
    };
    const Result expected = run(first);
    expect_oracle(step, expected);
    int taken = 0;
    for (const PlanOptions& options : tilings(schedule)) {
        if (!supports(step.problem, step.device, options)) continue;
        const Plan plan = step.plan(options);
        EXPECT_EQ(plan.schedule, first.schedule) << what;
        expect_same_bits(run(plan), expected, what + ", " + text_of(plan) + " against " + text_of(first));
        ++taken;
        if (testing::Test::HasFailure()) return taken;
    }
    return taken;
}

TEST_F(GpuTilings, EqualBitsForOneSchedule) {
    std::mt19937_64 bits(2026);
    int taken = 0;
    for (std::uint64_t number = 0; number < 24; ++number) {
        const RandomSpec spec = random_spec(bits);
        Step step = random_step(spec, 900 + number);
        const PFormat format = number % 2 == 0 ? PFormat::f16 : PFormat::e4m3;
        for (const int splits : {1, 1 + static_cast<int>(bits() % 16)})
            taken += expect_equal_tilings(step, {.kernel = "decode_latency", .p_format = format, .splits = splits},
                                          to_string(spec));
        if (HasFailure()) return;
    }
    EXPECT_GT(taken, 24 * 2 * 6) << "hardly any tiling is taken";
}

// Every number of splits over the same step, so that every inbox and every owner of units is used.
TEST_F(GpuTilings, EverySplitCount) {
    for (const RandomSpec& spec :
         {RandomSpec{.rows = 2, .heads = 33, .widths = {1100}},
          RandomSpec{
              .rows = 3, .heads = 16, .record = Record::fp8_512, .widths = {128, 900}, .out_dtype = DType::f32}}) {
        Step step = random_step(spec, 77);
        step.count(0, spec.widths[0]);
        for (int splits = 1; splits <= 16; ++splits) {
            EXPECT_GT(expect_equal_tilings(step, {.kernel = "decode_latency", .splits = splits}, to_string(spec)), 0)
                << splits << " splits";
            if (HasFailure()) return;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
class GpuLargeCache : public OnGpu {};

constexpr std::size_t cache_bytes_wanted = (std::size_t{9} << 30) / 2;  // 4.5 GiB, all of it memory, NaN but for a few

/// Slots around the bytes 2^31 and 2^32, the first ones and the last ones.
std::vector<std::int32_t> far_slots(std::int64_t record_bytes, std::int64_t num_slots) {
    std::vector<std::int32_t> slots = {0, 1, 2};
    for (const std::int64_t mark : {std::int64_t{1} << 31, std::int64_t{1} << 32})
        for (std::int64_t near = -3; near <= 3; ++near)
            slots.push_back(static_cast<std::int32_t>(mark / record_bytes + near));
    for (std::int64_t back = 1; back <= 3; ++back) slots.push_back(static_cast<std::int32_t>(num_slots - back));
    return slots;
}

/// The same records near each other and far apart give the same bits.
void expect_far_as_near(Record record) {
    const std::int64_t record_bytes = layout_of(record).record_bytes;
    const std::int64_t pages = static_cast<std::int64_t>(cache_bytes_wanted) / (record_bytes * 64);
    const std::vector<std::int32_t> far = far_slots(record_bytes, pages * 64);
    Step step = random_step({.rows = 2, .heads = 20, .record = record, .widths = {200}}, 31);
    std::vector<std::int32_t> near_list, far_list;
    std::mt19937_64 bits(32);
    for (int i = 0; i < 180; ++i) {
        const std::size_t at = bits() % far.size();
        near_list.push_back(static_cast<std::int32_t>(at));
        far_list.push_back(far[at]);
    }
    GpuBuffer cache(tested_device().device, static_cast<std::size_t>(pages * 64 * record_bytes));
    cache.fill(0xFF);
    for (std::size_t i = 0; i < far.size(); ++i)
        cache.upload(step.cache().data + static_cast<std::int64_t>(i) * record_bytes,
                     static_cast<std::size_t>(record_bytes), static_cast<std::size_t>(far[i] * record_bytes));
    for (std::int64_t row = 0; row < 2; ++row) step.list(row, near_list);
    for (const int splits : {1, 4}) {
        const Plan plan = step.plan({.splits = splits});
        const Result near = step.run(plan);
        expect_oracle(step, near);
        DeviceCall call = step.place(plan);
        Step far_step = random_step({.rows = 2, .heads = 20, .record = record, .widths = {200}}, 31);
        for (std::int64_t row = 0; row < 2; ++row) far_step.list(row, far_list);
        refresh(changing_inputs(far_step, call.args));
        call.args.sources[0].cache.data = cache.data();
        call.args.sources[0].cache.pages = pages;
        step.poison_outputs();
        call.upload_outputs();
        decode(plan, call.args, call.stream());
        call.download_outputs();
        expect_same_bits(step.collect(plan), near, "4.5 GiB of " + sparsemla::to_string(record));
    }
}

TEST_F(GpuLargeCache, SlotsBeyondFourGiB) {
    for (const Record record : {Record::fp8_576, Record::fp8_512}) {
        expect_far_as_near(record);
        if (HasFailure()) return;
    }
}

}  // namespace
}  // namespace sparsemla::test
