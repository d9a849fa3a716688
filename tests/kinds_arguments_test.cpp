// K30: every argument wrong in every way is refused by name, before anything is written.
#include <limits>
#include <tuple>

#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

/// A device on which no argument lies.
Device other_device() { return on_gpu() ? Device{} : Device{Device::Kind::cuda, 0}; }

/// A step whose every argument is right: two sources, of different records where the kernel takes them, sinks, LSE.
Step right_step(const std::string& kernel) {
    StepSpec spec{.rows = 3,
                  .heads = 4,
                  .sources = {{.layout = {Record::fp8_512, RecordForm::contiguous, false}, .slots_per_page = 100},
                              {.layout = {Record::fp8_v4, RecordForm::planar, false}, .width = 32, .count_offset = 64}},
                  .sinks = true};
    if (!Step(spec).taken_by(kernel)) spec.sources[1].layout = spec.sources[0].layout;
    Step step(spec);
    step.histogram(0);
    step.histogram(1);
    for (std::int32_t row = 0; row < 3; ++row) {
        step.list(row, {row, 1, 2}, 0);
        step.list(row, {row, 5}, 1);
    }
    return step;
}

class K30_ArgumentValidationGap : public EveryKernel {
   protected:
    K30_ArgumentValidationGap()
        : step_(right_step(GetParam())),
          plan_(step_.plan({.kernel = GetParam()})),
          call_(step_.place(plan_)),
          right_(call_.args) {}

    /// One call with one thing changed: refused as invalid, naming `argument` or one of its fields; nothing is written.
    template <class Change>
    void refused(const std::string& argument, const std::string& what, Change change) {
        DecodeArgs args = right_;
        change(args);
        step_.poison_outputs();
        call_.upload_outputs();
        call_.fill_workspace(0x77);
        const std::string where = argument + ", " + what;
        try {
            decode(plan_, args, call_.stream());
            ADD_FAILURE() << where << ": accepted";
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::invalid_argument) << where << ": " << error.what();
            EXPECT_TRUE(error.argument() == argument || error.argument().starts_with(argument + "."))
                << where << ": " << error.what();
            EXPECT_NE(std::string(error.what()).find(": need "), std::string::npos) << error.what();
        }
        call_.download_outputs();
        EXPECT_TRUE(step_.outputs_untouched()) << where;
        EXPECT_TRUE(call_.workspace_is(0x77)) << where;
    }
    template <class Change>
    void accepted(const std::string& what, Change change) {
        DecodeArgs args = right_;
        change(args);
        EXPECT_NO_THROW(decode(plan_, args, call_.stream())) << what;
        call_.download_outputs();
    }

    /// What can be wrong with any tensor, wherever it stands in the arguments.
    template <class Select>
    void tensor_refused(const std::string& argument, DType other_dtype, bool dense_last, Select select) {
        const auto with = [&](auto change) { return [&select, change](DecodeArgs& args) { change(select(args)); }; };
        using T = std::remove_reference_t<decltype(select(right_))>;
        const int rank = select(right_).rank;
        const auto last = static_cast<std::size_t>(rank - 1);
        refused(argument, "absent", with([](T& t) { t = {}; }));
        refused(argument, "null pointer", with([](T& t) { t.data = nullptr; }));
        refused(argument, "other dtype", with([=](T& t) { t.dtype = other_dtype; }));
        refused(argument, "dtype u8", with([](T& t) { t.dtype = DType::u8; }));
        refused(argument, "other device", with([](T& t) { t.device = other_device(); }));
        refused(argument, "rank + 1", with([=](T& t) {
                    t.rank = rank + 1;
                    t.shape[static_cast<std::size_t>(rank)] = 1;
                    t.strides[static_cast<std::size_t>(rank)] = 1;
                }));
        refused(argument, "rank - 1", with([=](T& t) { t.rank = rank - 1; }));
        refused(argument, "rank 7", with([=](T& t) { t.rank = 7; }));
        refused(argument, "rank -1", with([=](T& t) { t.rank = -1; }));
        refused(argument, "negative extent", with([](T& t) { t.shape[0] = -1; }));
        refused(argument, "extent 0", with([](T& t) { t.shape[0] = 0; }));
        refused(argument, "negative stride", with([](T& t) { t.strides[0] = -t.strides[0]; }));
        refused(argument, "unaddressable stride", with([](T& t) { t.strides[0] = std::int64_t{1} << 62; }));
        if (dense_last && select(right_).shape[last] > 1) {
            refused(argument, "last stride 2", with([=](T& t) { t.strides[last] = 2; }));
            refused(argument, "last stride 0", with([=](T& t) { t.strides[last] = 0; }));
        }
        const std::int64_t element = size_bytes(select(right_).dtype);
        if (element > 1)
            refused(argument, "misaligned", with([=](T& t) {
                        using Byte = std::conditional_t<std::is_same_v<T, Tensor>, std::byte, const std::byte>;
                        t.data = static_cast<Byte*>(t.data) + element / 2;
                    }));
    }
    template <class Select>
    void extent_refused(const std::string& argument, std::size_t dimension, std::initializer_list<std::int64_t> extents,
                        Select select) {
        for (const std::int64_t extent : extents)
            refused(argument, "extent " + std::to_string(extent) + " in dimension " + std::to_string(dimension),
                    [&](DecodeArgs& args) { select(args).shape[dimension] = extent; });
    }

    Step step_;
    Plan plan_;
    DeviceCall call_;
    DecodeArgs right_;  ///< on the tested device
};

constexpr float bad_scales[] = {0.0F, -0.0F, -1.0F, infinity, -infinity, not_a_number};

TEST_P(K30_ArgumentValidationGap, TheRightStepIsAccepted) {
    accepted("all arguments as they should be", [](DecodeArgs&) {});
    accepted("counts left out", [](DecodeArgs& args) { args.sources[0].counts = {}; });
    accepted("more workspace than needed", [&](DecodeArgs& args) { args.workspace.bytes += 1; });
    accepted("fewer rows", [](DecodeArgs& args) { args.rows = 1; });
}

TEST_P(K30_ArgumentValidationGap, B103_Rows) {
    for (const std::int64_t rows : {std::int64_t{-1}, std::int64_t{4}, std::numeric_limits<std::int64_t>::max(),
                                    std::numeric_limits<std::int64_t>::min()})
        refused("rows", std::to_string(rows), [&](DecodeArgs& args) { args.rows = rows; });
}

TEST_P(K30_ArgumentValidationGap, B103_Query) {
    const auto query = [](DecodeArgs& args) -> ConstTensor& { return args.query; };
    tensor_refused("query", DType::bf16, true, query);
    extent_refused("query", 0, {2}, query);
    extent_refused("query", 1, {3, 0}, query);
    extent_refused("query", 2, {value_dims - 1, value_dims + 1, value_dims + 64, 0}, query);
}

TEST_P(K30_ArgumentValidationGap, B103_SlotsAndCounts) {
    for (const std::size_t i : {0, 1}) {
        const std::string prefix = i == 0 ? "" : "extra_";
        const auto slots = [=](DecodeArgs& args) -> ConstTensor& { return args.sources[i].slots; };
        const auto counts = [=](DecodeArgs& args) -> ConstTensor& { return args.sources[i].counts; };
        tensor_refused(prefix + "slots", DType::i64, true, slots);
        extent_refused(prefix + "slots", 0, {2}, slots);
        extent_refused(prefix + "slots", 1, {31, 63, 65, 0}, slots);
        extent_refused(prefix + "counts", 0, {2, 0, -1}, counts);
        refused(prefix + "counts", "i64", [&](DecodeArgs& args) { counts(args).dtype = DType::i64; });
        refused(prefix + "counts", "null", [&](DecodeArgs& args) { counts(args).data = nullptr; });
        refused(prefix + "counts", "device", [&](DecodeArgs& args) { counts(args).device = other_device(); });
        refused(prefix + "counts", "rank 2", [&](DecodeArgs& args) { counts(args).rank = 2; });
        refused(prefix + "counts", "misaligned",
                [&](DecodeArgs& args) { counts(args).data = static_cast<const std::byte*>(counts(args).data) + 2; });
    }
}

TEST_P(K30_ArgumentValidationGap, Sinks) {
    const auto sinks = [](DecodeArgs& args) -> ConstTensor& { return args.sinks; };
    tensor_refused("sinks", DType::bf16, false, sinks);
    extent_refused("sinks", 0, {3}, sinks);
}

TEST_P(K30_ArgumentValidationGap, B100_OutAndLse) {
    const auto out = [](DecodeArgs& args) -> Tensor& { return args.out; };
    const auto lse = [](DecodeArgs& args) -> Tensor& { return args.lse; };
    tensor_refused("out", DType::f32, true, out);
    extent_refused("out", 0, {2}, out);
    extent_refused("out", 1, {3}, out);
    extent_refused("out", 2, {value_dims - 1, value_dims + 1, 0}, out);
    tensor_refused("lse", DType::bf16, false, lse);
    extent_refused("lse", 0, {2}, lse);
    extent_refused("lse", 1, {3, 0}, lse);
}

// What the problem does not have must not be given: it would be dropped silently.
TEST_P(K30_ArgumentValidationGap, WhatTheProblemDoesNotHave) {
    const Tensor lse = right_.lse;
    const ConstTensor sinks = right_.sinks;
    step_.problem.lse = false;
    step_.problem.sinks = false;
    plan_ = step_.plan({.kernel = kernel()});
    prepare(plan_, right_.state, call_.stream());
    right_.lse = {};
    right_.sinks = {};
    accepted("neither lse nor sinks", [](DecodeArgs&) {});
    refused("lse", "given, not planned", [&](DecodeArgs& args) { args.lse = lse; });
    refused("sinks", "given, not planned", [&](DecodeArgs& args) { args.sinks = sinks; });
}

TEST_P(K30_ArgumentValidationGap, Caches) {
    for (const std::size_t i : {0, 1}) {
        const std::string argument = i == 0 ? "cache" : "extra_cache";
        const auto wrong = [&](const std::string& what, auto change) {
            refused(argument, what, [&](DecodeArgs& args) { change(args.sources[i].cache); });
        };
        wrong("other record", [](CacheView& c) {
            c.record = Record::fp8_576;
            c.form = RecordForm::contiguous;
        });
        wrong("no record", [](CacheView& c) { c.record = static_cast<Record>(200); });
        wrong("other form", [](CacheView& c) {
            c.form = c.form == RecordForm::planar ? RecordForm::contiguous : RecordForm::planar;
        });
        wrong("no form", [](CacheView& c) { c.form = static_cast<RecordForm>(9); });
        wrong("null", [](CacheView& c) { c.data = nullptr; });
        for (const int bytes : {1, 4, 8}) wrong("misaligned", [=](CacheView& c) { c.data += bytes; });
        wrong("rope of a record in one piece", [](CacheView& c) { c.rope = c.data; });
        wrong("negative pages", [](CacheView& c) { c.pages = -1; });
        wrong("too many pages", [](CacheView& c) { c.pages = std::int64_t{1} << 31; });
        wrong("absurdly many pages", [](CacheView& c) { c.pages = std::numeric_limits<std::int64_t>::max(); });
        for (const std::int64_t size : {std::int64_t{0}, std::int64_t{-1}, std::numeric_limits<std::int64_t>::max(),
                                        std::numeric_limits<std::int64_t>::min()}) {
            wrong("page_size", [=](CacheView& c) { c.page_size = size; });
            if (size != 0) wrong("slots_per_page", [=](CacheView& c) { c.slots_per_page = size; });
        }
        wrong("slots_per_page below page_size", [](CacheView& c) { c.slots_per_page = c.page_size - 1; });
        for (const std::int64_t stride :
             {std::int64_t{1}, std::int64_t{-64 * value_dims}, std::int64_t{64 * value_dims + 100},
              std::int64_t{value_dims}, std::numeric_limits<std::int64_t>::max(),
              std::numeric_limits<std::int64_t>::max() / 16 * 16, std::numeric_limits<std::int64_t>::min()})
            wrong("page_stride_bytes " + std::to_string(stride), [=](CacheView& c) { c.page_stride_bytes = stride; });
        wrong("other device", [](CacheView& c) { c.device = other_device(); });
    }
}

// A cache in two tensors where one was planned, and the other way round.
TEST_P(K30_ArgumentValidationGap, SplitRope) {
    for (const bool split : {false, true}) {
        Step step({.rows = 1, .heads = 1, .sources = {{.layout = {Record::bf16, RecordForm::contiguous, split}}}});
        Step other({.rows = 1, .heads = 1, .sources = {{.layout = {Record::bf16, RecordForm::contiguous, !split}}}});
        step.args.sources[0].cache = other.args.sources[0].cache;
        step.poison_outputs();
        try {
            step.run({.kernel = kernel()});
            FAIL() << "accepted, split " << split;
        } catch (const Error& error) {
            EXPECT_EQ(error.argument(), "cache") << error.what();
        }
        EXPECT_TRUE(step.outputs_untouched());
    }
}

TEST_P(K30_ArgumentValidationGap, B104_Scales) {
    for (const float bad : bad_scales) {
        const std::string what = std::to_string(bad);
        refused("softmax_scale", what, [=](DecodeArgs& args) { args.softmax_scale = bad; });
        refused("q_scale", what, [=](DecodeArgs& args) { args.q_scale.value = bad; });
        refused("k_scale", what, [=](DecodeArgs& args) { args.sources[0].k_scale.value = bad; });
        refused("extra_k_scale", what, [=](DecodeArgs& args) { args.sources[1].k_scale.value = bad; });
        if (!std::isfinite(bad)) refused("out_scale", what, [=](DecodeArgs& args) { args.out_scale = bad; });
    }
    const DeviceFloat one(1.0F);
    accepted("a pointer for flat fp8", [&](DecodeArgs& args) { args.sources[0].k_scale.pointer = one.pointer(); });
    if (layout_of(step_.problem.sources[1].record).takes_k_scale) return;
    refused("extra_k_scale", "2 for a record without one", [](DecodeArgs& args) { args.sources[1].k_scale.value = 2; });
    refused("extra_k_scale", "a pointer for a record without one",
            [&](DecodeArgs& args) { args.sources[1].k_scale.pointer = one.pointer(); });
}

TEST_P(K30_ArgumentValidationGap, WorkspaceMemory) {
    if (on_gpu() && plan_.workspace_bytes == 0) GTEST_SKIP() << kernel() << " needs no workspace";
    ASSERT_GT(plan_.workspace_bytes, 0U);
    refused("workspace", "null", [](DecodeArgs& args) { args.workspace = {}; });
    refused("workspace", "null with a size", [](DecodeArgs& args) { args.workspace.data = nullptr; });
    refused("workspace", "a byte short", [](DecodeArgs& args) { args.workspace.bytes -= 1; });
    refused("workspace", "no bytes", [](DecodeArgs& args) { args.workspace.bytes = 0; });
    for (const int bytes : {1, 16, 32})
        refused("workspace", "misaligned", [=](DecodeArgs& args) {
            args.workspace.data = static_cast<std::byte*>(args.workspace.data) + bytes;
            args.workspace.bytes += 64;
        });
}

// Every output, the workspace among them, over every input and every other output.
TEST_P(K30_ArgumentValidationGap, B103_Overlap) {
    const std::vector<std::tuple<std::string, const void*>> inputs = {
        {"query", right_.query.data},
        {"sinks", right_.sinks.data},
        {"cache", right_.sources[0].cache.data},
        {"extra_cache", right_.sources[1].cache.data},
        {"slots", right_.sources[0].slots.data},
        {"extra_slots", right_.sources[1].slots.data},
        {"counts", right_.sources[0].counts.data},
        {"extra_counts", right_.sources[1].counts.data},
    };
    const auto aligned = [](const void* data, std::uintptr_t alignment) {  // downwards, never dereferenced
        return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(data) / alignment * alignment);
    };
    for (const auto& [name, data] : inputs) {
        const void* input = data;
        refused("out", "over " + name, [&](DecodeArgs& args) { args.out.data = aligned(input, 16); });
        refused("lse", "over " + name, [&](DecodeArgs& args) { args.lse.data = aligned(input, 4); });
        if (plan_.workspace_bytes == 0) continue;
        refused("workspace", "over " + name, [&](DecodeArgs& args) { args.workspace.data = aligned(input, 64); });
    }
    refused("lse", "over out", [&](DecodeArgs& args) { args.lse.data = aligned(args.out.data, 4); });
    for (const auto& [name, output] : {std::pair<std::string, void*>{"out", right_.out.data}, {"lse", right_.lse.data}})
        if (plan_.workspace_bytes != 0)
            refused("workspace", "over " + name,
                    [&, at = output](DecodeArgs& args) { args.workspace.data = aligned(at, 64); });
    // The last byte of one on the first of the other.
    refused("lse", "over out's last bytes", [&](DecodeArgs& args) {
        const std::int64_t last = 2 * args.out.strides[0] + 3 * args.out.strides[1] + value_dims - 2;
        args.lse.data = static_cast<std::uint16_t*>(args.out.data) + last;
    });
    // Outputs that repeat their own elements.
    refused("out", "row stride 0", [](DecodeArgs& args) { args.out.strides[0] = 0; });
    refused("out", "head stride 0", [](DecodeArgs& args) { args.out.strides[1] = 0; });
    refused("out", "heads overlap by one", [](DecodeArgs& args) { args.out.strides[1] = value_dims - 1; });
    refused("out", "rows overlap", [](DecodeArgs& args) { args.out.strides[0] = args.out.strides[1] * 3; });
    refused("lse", "row stride 0", [](DecodeArgs& args) { args.lse.strides[0] = 0; });
    refused("lse", "rows overlap heads", [](DecodeArgs& args) { args.lse.strides[0] = args.lse.strides[1]; });
}

// Memory that interleaves without sharing a byte is not overlap.
TEST_P(K30_ArgumentValidationGap, InterleavedMemoryIsAccepted) {
    accepted("lse in the room between heads of out", [](DecodeArgs& args) {
        args.lse.data = static_cast<std::uint16_t*>(args.out.data) + value_dims;
        args.lse.strides = {args.out.strides[0] / 2, args.out.strides[1] / 2, 0, 0};
    });
    accepted("lse in the gap between pages of the cache", [](DecodeArgs& args) {
        const std::int64_t page_bytes = args.sources[0].cache.page_size * args.sources[0].cache.layout().record_bytes;
        args.lse.data = const_cast<std::byte*>(args.sources[0].cache.data) + page_bytes;
        args.lse.strides = {4, 1, 0, 0};
    });
    accepted("lse in a padded head of the query", [](DecodeArgs& args) {
        args.lse.data = static_cast<std::byte*>(const_cast<void*>(args.query.data)) + 4 * args.query.strides[1];
        args.lse.strides = {args.query.strides[0] / 4, 1, 0, 0};
    });
    accepted("heads interleaved with rows", [](DecodeArgs& args) { args.lse.strides = {1, 3, 0, 0}; });
}

TEST_P(K30_ArgumentValidationGap, PlanNotMade) {
    plan_ = Plan{};
    refused("plan", "empty", [](DecodeArgs&) {});
    EXPECT_THROW(prepare(plan_, {}), Error);
}

INSTANTIATE_TEST_SUITE_P(All, K30_ArgumentValidationGap, testing::ValuesIn(tested_kernels()), kernel_test_name);

// Problems that no kernel could make sense of.
TEST(K30_ArgumentValidationGap_Problem, EveryFieldIsChecked) {
    const Problem right{
        .rows = 4,
        .heads = 16,
        .sources = {{.record = Record::fp8_512, .width = 128},
                    {.record = Record::fp8_v41, .form = RecordForm::planar, .width = 64, .count_offset = 128}}};
    const DeviceSpec device = cpu_spec();
    EXPECT_NO_THROW(make_plan(right, device));
    const auto refused = [&](const std::string& argument, auto change) {
        Problem problem = right;
        DeviceSpec spec = device;
        change(problem, spec);
        try {
            make_plan(problem, spec);
            ADD_FAILURE() << argument << ": accepted";
        } catch (const Error& error) {
            EXPECT_EQ(error.argument(), argument) << error.what();
            EXPECT_EQ(error.kind(), ErrorKind::invalid_argument) << error.what();
            EXPECT_EQ(refusal(problem, spec).value_or(""), error.what());
        }
    };
    constexpr std::int64_t big = std::int64_t{1} << 31;
    for (const std::int64_t bad :
         {std::int64_t{-1}, big, std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()}) {
        refused("rows", [=](Problem& p, DeviceSpec&) { p.rows = bad; });
        refused("heads", [=](Problem& p, DeviceSpec&) { p.heads = bad; });
        refused("sources[0].width", [=](Problem& p, DeviceSpec&) { p.sources[0].width = bad; });
        refused("sources[1].width", [=](Problem& p, DeviceSpec&) { p.sources[1].width = bad; });
        refused("sources[1].count_offset", [=](Problem& p, DeviceSpec&) { p.sources[1].count_offset = bad; });
    }
    refused("heads", [](Problem& p, DeviceSpec&) { p.heads = max_heads + 1; });
    for (const DType bad : {DType::u8, DType::f16, DType::f32, DType::f64, DType::i32, static_cast<DType>(99)})
        refused("query_dtype", [=](Problem& p, DeviceSpec&) { p.query_dtype = bad; });
    for (const DType bad : {DType::u8, DType::f16, DType::f64, DType::f8_e4m3, static_cast<DType>(99)})
        refused("out_dtype", [=](Problem& p, DeviceSpec&) { p.out_dtype = bad; });
    refused("sources", [](Problem& p, DeviceSpec&) { p.sources.clear(); });
    refused("sources", [](Problem& p, DeviceSpec&) { p.sources.push_back(p.sources[0]); });
    refused("sources[1].record", [](Problem& p, DeviceSpec&) { p.sources[1] = {.record = Record::fp8_576}; });
    refused("sources[1].record", [](Problem& p, DeviceSpec&) { p.sources[1].record = static_cast<Record>(9); });
    refused("sources[0].form", [](Problem& p, DeviceSpec&) { p.sources[0].form = RecordForm::planar; });
    refused("sources[0].form", [](Problem& p, DeviceSpec&) { p.sources[0].form = static_cast<RecordForm>(7); });
    refused("sources[1].form", [](Problem& p, DeviceSpec&) { p.sources[1] = {.record = Record::fp8_v4}; });
    refused("sources[0].split_rope", [](Problem& p, DeviceSpec&) { p.sources[0].split_rope = true; });
    refused("lse_base", [](Problem& p, DeviceSpec&) { p.lse_base = static_cast<LseBase>(5); });
    refused("device", [](Problem& p, DeviceSpec&) { p.device.index = 1; });
    refused("device", [](Problem& p, DeviceSpec&) { p.device.kind = Device::Kind::cuda; });
    for (const int threads : {0, -1, 1 << 20})
        refused("device.threads", [=](Problem&, DeviceSpec& d) { d.threads = threads; });
}

}  // namespace
}  // namespace sparsemla::test
