// GpuStep mirrors what a call reads and writes, byte for byte, and brings back what was written: on a GPU of host
// memory (fake_gpu.cpp), so that the CPU's kernels can run on the mirror.
#include "harness/gpu_step.h"

#include <random>

#include "harness/gpu_mirror.h"
#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

using harness::GpuPlacement;
using harness::GpuStep;
using harness::GpuStepOptions;

Step two_sources() {
    Step step({.rows = 3,
               .heads = 5,
               .sources = {{.layout = {Record::bf16, RecordForm::contiguous, true}, .pages = 2},
                           {.layout = {Record::fp8_576}, .width = 40, .count_offset = 64, .pages = 2}},
               .sinks = true});
    randomise(step, 5);
    for (std::int32_t row = 0; row < 3; ++row) {
        step.list(row, slot_range(row, 30));
        step.list(row, slot_range(2 * row, 20), 1);
    }
    for (std::int64_t head = 0; head < 5; ++head) step.sink(head) = static_cast<float>(head) - 2;
    return step;
}

/// The bytes that a view's elements lie in.
template <class Void>
std::vector<std::byte> bytes_of(const BasicTensor<Void>& tensor) {
    std::size_t bytes = static_cast<std::size_t>(size_bytes(tensor.dtype));
    for (int i = 0; i < tensor.rank; ++i)
        if (tensor.shape[i] > 1)
            bytes += static_cast<std::size_t>((tensor.shape[i] - 1) * tensor.strides[i] * size_bytes(tensor.dtype));
    const auto* begin = static_cast<const std::byte*>(tensor.data);
    return {begin, begin + bytes};
}

template <class Void>
void expect_image(const BasicTensor<Void>& host, const BasicTensor<Void>& image, const char* name) {
    ASSERT_NE(host.data, image.data) << name;
    EXPECT_EQ(host.strides, image.strides) << name;
    EXPECT_EQ(host.shape, image.shape) << name;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(host.data) % 16, reinterpret_cast<std::uintptr_t>(image.data) % 16)
        << name;
    EXPECT_EQ(bytes_of(host), bytes_of(image)) << name;
}

std::byte* writable(const void* image) { return static_cast<std::byte*>(const_cast<void*>(image)); }

TEST(GpuStep, MirrorsEveryByteOfEveryTensor) {
    for (const GpuPlacement placed : {GpuPlacement::plain, GpuPlacement::against_end, GpuPlacement::against_begin}) {
        Step step = two_sources();
        step.poison_outputs();
        const float scale = 1.5F;
        step.args.q_scale.pointer = &scale;
        const GpuStep mirror(step.plan(), step.args, {.caches = {placed, placed}, .others = placed});
        const DecodeArgs& image = mirror.args();
        expect_image(step.args.query, image.query, "query");
        expect_image(step.args.sinks, image.sinks, "sinks");
        expect_image(step.args.out, image.out, "out");
        expect_image(step.args.lse, image.lse, "lse");
        for (const std::size_t i : {0, 1}) {
            const SourceArgs& host = step.args.sources[i];
            expect_image(host.slots, image.sources[i].slots, "slots");
            expect_image(host.counts, image.sources[i].counts, "counts");
            const std::int64_t bytes = cache_bytes(host.cache);
            EXPECT_TRUE(std::equal(host.cache.data, host.cache.data + bytes, image.sources[i].cache.data));
        }
        const CacheView& split = step.args.sources[0].cache;
        EXPECT_TRUE(std::equal(split.rope, split.rope + split.num_slots() * 128, image.sources[0].cache.rope));
        ASSERT_NE(image.q_scale.pointer, &scale);
        EXPECT_EQ(*image.q_scale.pointer, scale);
        EXPECT_EQ(image.sources[0].k_scale.pointer, nullptr);
        EXPECT_EQ(mirror.changed_input(), "");
    }
}

TEST(GpuStep, ResultsAndWhatLiesBesideThemComeBack) {
    Step step = two_sources();
    const Plan plan = step.plan();
    const Result expected = step.run(plan);
    step.poison_outputs();
    GpuStep mirror(plan, step.args,
                   {.surroundings = {step.out_memory().surroundings(), step.lse_memory().surroundings()}});
    prepare(plan, mirror.args().state);
    decode(plan, mirror.args());
    EXPECT_TRUE(step.outputs_untouched());
    mirror.download_outputs();
    EXPECT_TRUE(same_bits(step.collect(plan), 1, expected, 1));
    EXPECT_TRUE(mirror.beside_memory_intact());

    const auto written = [&](std::byte* image) {
        step.poison_outputs();
        mirror.upload_outputs();
        *image ^= std::byte{1};
        mirror.download_outputs();
        const bool seen = !step.outputs_untouched();
        *image ^= std::byte{1};
        mirror.download_outputs();
        return seen && step.outputs_untouched();
    };
    std::byte* out = writable(mirror.args().out.data);
    const auto bytes = static_cast<std::ptrdiff_t>(step.out_memory().size());
    for (const std::ptrdiff_t at : {std::ptrdiff_t{-1}, std::ptrdiff_t{2 * value_dims}, bytes - 1})
        EXPECT_TRUE(written(out + at)) << "byte " << at << " of out";
    EXPECT_TRUE(written(writable(mirror.args().lse.data) + step.lse_memory().size() - 1));
}

TEST(GpuStep, ChangedInputsAreNamed) {
    Step step = two_sources();
    const float scale = 1.5F;
    step.args.q_scale.pointer = &scale;
    const GpuStep mirror(step.plan(), step.args);
    const DecodeArgs& image = mirror.args();
    const auto name_of = [&](const void* at, std::int64_t offset) {
        std::byte* byte = writable(at) + offset;
        *byte ^= std::byte{0x80};
        const std::string name = mirror.changed_input();
        *byte ^= std::byte{0x80};
        return name;
    };
    EXPECT_EQ(name_of(image.query.data, 600), "query");
    EXPECT_EQ(name_of(image.sinks.data, 7 * 4), "sinks");
    EXPECT_EQ(name_of(image.sources[0].slots.data, 64 * 4), "slots");
    EXPECT_EQ(name_of(image.sources[1].counts.data, 0), "extra_counts");
    EXPECT_EQ(name_of(image.q_scale.pointer, 3), "q_scale");
    EXPECT_EQ(name_of(image.sources[0].cache.data, 128 * 1024 - 1), "cache");
    EXPECT_EQ(name_of(image.sources[0].cache.rope, 128 * 128 - 1), "cache (rope)");
    EXPECT_EQ(name_of(image.sources[1].cache.data, 0), "extra_cache");
    EXPECT_EQ(mirror.changed_input(), "");
}

// One list cut in two, and an LSE in the room between the heads of the output.
TEST(GpuStep, SharedMemoryStaysShared) {
    Step step = two_sources();
    const std::vector<std::int32_t> list(3 * 104, 1);
    const ConstTensor both = dense(list.data(), DType::i32, {3, 104});
    step.args.sources[0].slots = columns(both, 0, 64);
    step.args.sources[1].slots = columns(both, 64, 40);
    step.args.lse.data = static_cast<std::uint16_t*>(step.args.out.data) + value_dims;
    step.args.lse.strides = {step.args.out.strides[0] / 2, step.args.out.strides[1] / 2, 0, 0};
    const GpuStep mirror(step.plan(), step.args);
    const DecodeArgs& image = mirror.args();
    const auto distance = [](const void* a, const void* b) {
        return static_cast<const std::byte*>(b) - static_cast<const std::byte*>(a);
    };
    EXPECT_EQ(distance(image.sources[0].slots.data, image.sources[1].slots.data), 64 * 4);
    EXPECT_EQ(distance(image.out.data, image.lse.data), 2 * value_dims);
}

TEST(GpuStep, SparseCachesHoldTheirRecordsOnly) {
    for (const Layout& layout : layouts()) {
        SourceSpec spec{.layout = layout, .pages = std::int64_t{1} << 16, .poisoned = false};
        Step step({.rows = 1, .heads = 2, .sources = {spec}});
        const auto last = static_cast<std::int32_t>(step.cache().num_slots() - 1);
        const std::vector<std::int32_t> slots = {0, 1, 77, last / 2, last};
        for (const std::int32_t slot : slots) step.histogram_record(slot);
        step.list(0, slots);
        const Plan plan = step.plan();
        GpuStepOptions options;
        options.sparse[0] = {.fill_byte = 0x11, .slots = slots};
        GpuStep mirror(plan, step.args, options);
        step.poison_outputs();
        mirror.upload_outputs();
        decode(plan, mirror.args());
        mirror.download_outputs();
        expect_histogram(step.collect(plan), 0, slots);
        EXPECT_EQ(mirror.changed_input(), "") << name(layout);
        EXPECT_EQ(mirror.args().sources[0].cache.data[3 * layout.bytes().record_bytes], std::byte{0x11});
    }
}

// Of a span of gigabytes the elements travel, both ways.
TEST(GpuStep, FarStrides) {
    if (sanitized) GTEST_SKIP() << "gigabytes of shadow";
    Step step = two_sources();
    const Plan plan = step.plan();
    const Result near = step.run(plan);
    constexpr std::int64_t far = (std::int64_t{1} << 30) + 4096;
    Fenced query(static_cast<std::size_t>(2 * far + 16 * 1024)), out(static_cast<std::size_t>(4 * far + 16 * 1024));
    for (std::int64_t row = 0; row < 3; ++row)
        std::memcpy(query.data() + row * far,
                    static_cast<const std::byte*>(step.args.query.data) + row * step.args.query.strides[0],
                    static_cast<std::size_t>(5 * step.args.query.strides[1]));
    DecodeArgs args = step.args;
    args.query.data = query.data();
    args.query.shape = {3, 5, d_qk(step.problem), 0};
    args.query.strides[0] = far;
    args.out = dense(out.data(), DType::bf16, {3, 5, value_dims});
    args.out.strides = {far, value_dims + 8, 1, 0};
    GpuStep mirror(plan, args);
    decode(plan, mirror.args());
    mirror.download_outputs();
    for (std::int64_t row = 0; row < 3; ++row)
        for (std::int64_t head = 0; head < 5; ++head)
            for (int d = 0; d < value_dims; ++d)
                ASSERT_EQ(out.as<std::uint16_t>()[row * far + head * (value_dims + 8) + d],
                          near.out_bits_of(row)[static_cast<std::size_t>(head * value_dims + d)]);
    EXPECT_EQ(mirror.changed_input(), "");
}

TEST(GpuStep, WorkspaceIsWatched) {
    Step step = two_sources();
    const Plan plan = step.plan();
    ASSERT_GT(plan.workspace_bytes, 0U);
    GpuStep mirror(plan, step.args, {.workspace_byte = 0x77});
    EXPECT_TRUE(mirror.workspace_is(0x77));
    EXPECT_EQ(mirror.args().workspace.bytes, plan.workspace_bytes);
    auto* bytes = static_cast<std::byte*>(mirror.args().workspace.data);
    bytes[plan.workspace_bytes - 1] = std::byte{0};
    EXPECT_FALSE(mirror.workspace_is(0x77));
    mirror.fill_workspace(0x12);
    EXPECT_TRUE(mirror.workspace_is(0x12));
    EXPECT_TRUE(mirror.beside_memory_intact());
    bytes[-1] = std::byte{0};
    EXPECT_FALSE(mirror.beside_memory_intact());
    const GpuStep none(plan, step.args, {.own_memory = false});
    EXPECT_EQ(none.args().workspace.data, nullptr);
}

TEST(GpuStep, NothingToMirror) {
    Step step({.rows = 2, .heads = 2, .sources = {{.width = 0, .pages = 0}}, .lse = false});
    const Plan plan = step.plan();
    DeviceCall call = step.place(plan);
    step.poison_outputs();
    call.decode(plan);
    expect_empty_row(step.collect(plan), 1);
}

}  // namespace
}  // namespace sparsemla::test
