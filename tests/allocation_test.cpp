// After planning, a call allocates nothing: every allocation of this thread is counted.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "harness/generate.h"
#include "sparsemla/case_file.h"
#include "sparsemla/indices.h"
#include "sparsemla/mailbox.h"
#include "sparsemla/sparsemla_dcp.h"
#include "tests/device.h"

namespace {

thread_local std::int64_t allocations = 0;  // of this thread: oneTBB's own threads come and go as they like

void* counted(std::size_t bytes, std::size_t alignment) {
    ++allocations;
    const std::size_t rounded = (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
    void* memory = std::aligned_alloc(alignment, rounded);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
    return counted(bytes, static_cast<std::size_t>(alignment));
}
// Not inlined: the compiler would then see new paired with free and warn.
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace sparsemla {
namespace {

template <class Call>
std::int64_t allocations_of(const Call& call) {
    const std::int64_t before = allocations;
    call();
    return allocations - before;
}

/// Two sources with counts and sinks: every argument that a call can have. `flat`: of the records that every kernel
/// takes.
Case full_case(bool flat) {
    harness::Recipe recipe;
    recipe.rows = 2;
    recipe.heads = 4;
    recipe.query_dtype = DType::bf16;
    recipe.sources = {{.record = Record::fp8_v4, .form = RecordForm::planar, .width = 70},
                      {.record = Record::fp8_v4, .form = RecordForm::planar, .width = 130}};
    if (flat) {
        recipe.query_dtype = DType::f8_e4m3;
        recipe.sources = {{.width = 70}, {.width = 130}};
    }
    recipe.counts = harness::CountsRecipe::ragged;
    recipe.sinks = true;
    recipe.expected = false;
    return harness::generate(recipe);
}

class DecodeAllocations : public testing::TestWithParam<std::string> {};

TEST_P(DecodeAllocations, AreNone) {
    const Case c = full_case(test::on_gpu());
    const CaseStep step = case_step(c);
    DeviceSpec device = test::tested_device();
    device.threads = 1;  // oneTBB, which runs more threads, keeps memory of its own
    const Plan plan = test::plan_or_skip(step.problem(device.device), device, {.kernel = GetParam()});
    std::vector<std::uint16_t> out(static_cast<std::size_t>(step.rows * step.heads * value_dims));
    std::vector<float> lse(static_cast<std::size_t>(step.rows * step.heads));
    DecodeArgs args = step.args();
    args.out = dense(out.data(), DType::bf16, {step.rows, step.heads, value_dims});
    args.lse = dense(lse.data(), DType::f32, {step.rows, step.heads});
    args.validate = false;
    test::DeviceCall call(plan, args);
    call.decode(plan);  // first-use tables of the kernels
    EXPECT_EQ(allocations_of([&] { decode(plan, call.args, call.stream()); }), 0);
    call.download_outputs();
}

INSTANTIATE_TEST_SUITE_P(Kernels, DecodeAllocations, testing::ValuesIn(test::tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

TEST(MergeAllocations, AreNone) {
    const std::vector<float> partial(2 * 3 * value_dims, 1.0F);
    const std::vector<float> partial_lse(2 * 3, 0.5F);
    const std::vector<Partial> partials(5, {.out = dense(partial.data(), DType::f32, {2, 3, value_dims}),
                                            .lse = dense(partial_lse.data(), DType::f32, {2, 3}),
                                            .counts = {}});
    std::vector<float> out(2 * 3 * value_dims);
    MergeArgs args;
    args.rows = 2;
    args.heads = 3;
    args.partials = partials;
    args.out = dense(out.data(), DType::f32, {2, 3, value_dims});
    EXPECT_EQ(allocations_of([&] { merge(args); }), 0);
    EXPECT_EQ(out[0], 1.0F);
}

TEST(ConvertAllocations, AreNone) {
    const std::vector<std::int32_t> ids{3, 1, -1, 70};
    const std::vector<std::int32_t> table{4, 0};
    const std::vector<std::int32_t> requests{0};
    std::vector<std::int32_t> slots(4);
    std::vector<std::int32_t> counts(1);
    ConvertArgs args;
    args.token_ids = dense(ids.data(), DType::i32, {1, 4});
    args.block_table = dense(table.data(), DType::i32, {1, 2});
    args.request_of_row = dense(requests.data(), DType::i32, {1});
    args.cache = {.pages = 5, .page_size = 64};
    args.slots = dense(slots.data(), DType::i32, {1, 4});
    args.counts = dense(counts.data(), DType::i32, {1});
    EXPECT_EQ(allocations_of([&] { convert_indices(args); }), 0);
    EXPECT_EQ(counts[0], 3);
}

/// Two ranks in one thread, each with half of a step's heads; both see all its records, as results are not looked at.
class DcpAllocations : public testing::TestWithParam<std::string> {
   protected:
    static constexpr int world = 2;

    DcpAllocations() {
        device_.threads = 1;
        Problem problem = step_.problem();
        problem.sinks = false;
        problem.dcp = true;
        plan_ = make_plan(problem, device_, {.kernel = GetParam()});
        workspace_ = make_owned(DType::u8, {static_cast<std::int64_t>(plan_.workspace_bytes)});
    }

    /// A rank's heads of a tensor of all.
    template <class Void>
    BasicTensor<Void> part_of(BasicTensor<Void> all, int rank, int heads_at) const {
        using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
        all.data = static_cast<Byte*>(all.data) + rank * heads_ * all.strides[heads_at] * size_bytes(all.dtype);
        all.shape[heads_at] = heads_;
        return all;
    }
    GatherQueryArgs gather_args(int rank) const { return {.rows = step_.rows, .query = part_of(step_.query, rank, 1)}; }
    DecodeArgs decode_args(int rank) {
        DecodeArgs args = step_.args();
        args.query = {};
        args.sinks = {};
        args.validate = false;
        args.mailbox = &group_.mailbox(rank);
        args.workspace = {workspace_.bytes.get(), workspace_.size_bytes};
        return args;
    }
    MergePushedArgs merge_args(int rank) const {
        return {.rows = step_.rows,
                .sinks = part_of(step_.sinks, rank, 0),
                .out = part_of(out_.view(), rank, 1),
                .lse = part_of(lse_.view(), rank, 1)};
    }

    Case case_ = full_case(false);
    CaseStep step_ = case_step(case_);
    std::int64_t heads_ = step_.heads / world;
    DeviceSpec device_ = query_device({});
    Plan plan_;
    LoopbackGroup group_{
        {.rows = step_.rows, .head_offset = {0, heads_, step_.heads}, .query_dtype = DType::bf16, .d_qk = d_qk()}, {}};
    OwnedTensor workspace_;
    OwnedTensor query_ = make_owned(DType::bf16, {step_.rows, step_.heads, d_qk()});
    OwnedTensor out_ = make_owned(DType::bf16, {step_.rows, step_.heads, value_dims});
    OwnedTensor lse_ = make_owned(DType::f32, {step_.rows, step_.heads});

   private:
    std::int64_t d_qk() const { return step_.query.shape[2]; }
};

TEST_P(DcpAllocations, OfAnExchangeAreNone) {
    const auto exchange = [&] {
        for (int rank = 0; rank < world; ++rank) gather_query(group_.mailbox(rank), gather_args(rank));
        for (int rank = 0; rank < world; ++rank) decode(plan_, decode_args(rank));
        for (int rank = 0; rank < world; ++rank) merge_pushed(group_.mailbox(rank), merge_args(rank));
    };
    exchange();  // first-use tables of the kernels
    EXPECT_EQ(allocations_of(exchange), 0);
    EXPECT_EQ(status(group_.mailbox(0)).exchanges, 2U);
}

TEST_P(DcpAllocations, OfSeparateCallsAreNone) {
    const PushArgs push_args{.rows = step_.rows, .out = out_.view(), .lse = lse_.view(), .counts = {}};
    EXPECT_EQ(allocations_of([&] {
                  for (int rank = 0; rank < world; ++rank) gather_query(group_.mailbox(rank), gather_args(rank));
                  for (int rank = 0; rank < world; ++rank) {
                      receive_query(group_.mailbox(rank), step_.rows, query_.view());
                      push(group_.mailbox(rank), push_args);
                  }
                  for (int rank = 0; rank < world; ++rank) merge_pushed(group_.mailbox(rank), merge_args(rank));
              }),
              0);
    EXPECT_EQ(status(group_.mailbox(1)).exchanges, 1U);
}

sparsemla_tensor c_tensor(const ConstTensor& tensor) {
    sparsemla_tensor result{.data = const_cast<void*>(tensor.data),
                            .dtype = static_cast<std::int32_t>(tensor.dtype),
                            .device_kind = SPARSEMLA_CPU,
                            .device_index = 0,
                            .rank = tensor.rank,
                            .shape = {},
                            .strides = {}};
    std::copy(tensor.shape.begin(), tensor.shape.end(), result.shape);
    std::copy(tensor.strides.begin(), tensor.strides.end(), result.strides);
    return result;
}

sparsemla_cache c_cache(const CacheView& cache) {
    return {.size = sizeof(sparsemla_cache),
            .record = static_cast<std::int32_t>(cache.record),
            .form = static_cast<std::int32_t>(cache.form),
            .device_kind = SPARSEMLA_CPU,
            .device_index = 0,
            .data = const_cast<std::byte*>(cache.data),
            .rope = nullptr,
            .pages = cache.pages,
            .page_size = cache.page_size,
            .slots_per_page = cache.slots_per_page,
            .page_stride_bytes = cache.page_stride_bytes};
}

/// The same exchange by the C interface.
class CApiDcpAllocations : public DcpAllocations {
   protected:
    CApiDcpAllocations() {
        sparsemla_problem problem = sparsemla_problem_default();
        sparsemla_device_spec device{};
        sparsemla_plan_options options = sparsemla_plan_options_default();
        std::vector<sparsemla_source_problem> sources;
        for (const SourceProblem& source : plan_.problem.sources)
            sources.push_back({.size = sizeof(sparsemla_source_problem),
                               .record = static_cast<std::int32_t>(source.record),
                               .form = static_cast<std::int32_t>(source.form),
                               .width = source.width,
                               .count_offset = source.count_offset,
                               .split_rope = 0,
                               .reserved = 0});
        problem.rows = step_.rows;
        problem.heads = step_.heads;
        problem.sources = sources.data();
        problem.num_sources = static_cast<std::int32_t>(sources.size());
        problem.query_dtype = SPARSEMLA_BF16;
        problem.dcp = 1;
        device.size = sizeof device;
        expect_ok(sparsemla_query_device(SPARSEMLA_CPU, 0, &device));
        device.threads = 1;
        const std::string kernel = GetParam();
        options.kernel = kernel.c_str();
        expect_ok(sparsemla_plan_create(&problem, &device, &options, &c_plan_));

        for (const CaseSource& source : step_.sources) c_caches_.push_back(c_cache(source.cache));
        for (const CaseSource& source : step_.sources) {
            sparsemla_source_args args = sparsemla_source_args_default();
            args.cache = &c_caches_[c_sources_.size()];
            args.slots = c_tensor(source.slots);
            args.counts = c_tensor(source.counts);
            c_sources_.push_back(args);
        }
        sparsemla_dcp_shape shape = sparsemla_dcp_shape_default();
        const std::int64_t head_offset[world + 1] = {0, heads_, step_.heads};
        shape.rows = step_.rows;
        shape.head_offset = head_offset;
        shape.world = world;
        shape.query_dtype = SPARSEMLA_BF16;
        shape.d_qk = query_.shape[2];
        expect_ok(sparsemla_loopback_create(&shape, SPARSEMLA_CPU, 0, &loopback_));
        for (int rank = 0; rank < world; ++rank) {
            mailboxes_[rank].size = sizeof mailboxes_[rank];
            expect_ok(sparsemla_loopback_mailbox(loopback_, rank, &mailboxes_[rank]));
        }
    }
    ~CApiDcpAllocations() override {
        sparsemla_plan_destroy(c_plan_);
        sparsemla_loopback_destroy(loopback_);
    }

    static void expect_ok(sparsemla_status status) { EXPECT_EQ(status, SPARSEMLA_OK) << sparsemla_last_error(); }

    void gather(int rank) {
        sparsemla_gather_query_args args = sparsemla_gather_query_args_default();
        args.rows = step_.rows;
        args.query = c_tensor(gather_args(rank).query);
        expect_ok(sparsemla_gather_query(&mailboxes_[rank], &args, nullptr));
    }
    void decode_with_mailbox(int rank) {
        sparsemla_decode_args args = sparsemla_decode_args_default();
        args.rows = step_.rows;
        args.sources = c_sources_.data();
        args.num_sources = static_cast<std::int32_t>(c_sources_.size());
        args.softmax_scale = step_.softmax_scale;
        args.workspace = workspace_.bytes.get();
        args.workspace_bytes = workspace_.size_bytes;
        args.mailbox = &mailboxes_[rank];
        expect_ok(sparsemla_decode(c_plan_, &args, nullptr));
    }
    void receive_and_push(int rank) {
        sparsemla_push_args args = sparsemla_push_args_default();
        const sparsemla_tensor query = c_tensor(query_.view());
        args.rows = step_.rows;
        args.out = c_tensor(out_.view());
        args.lse = c_tensor(lse_.view());
        expect_ok(sparsemla_receive_query(&mailboxes_[rank], step_.rows, &query, nullptr));
        expect_ok(sparsemla_push(&mailboxes_[rank], &args, nullptr));
    }
    void merge(int rank) {
        sparsemla_merge_pushed_args args = sparsemla_merge_pushed_args_default();
        const MergePushedArgs given = merge_args(rank);
        args.rows = step_.rows;
        args.out = c_tensor(given.out);
        args.lse = c_tensor(given.lse);
        args.sinks = c_tensor(given.sinks);
        expect_ok(sparsemla_merge_pushed(&mailboxes_[rank], &args, nullptr));
    }

   private:
    sparsemla_plan* c_plan_ = nullptr;
    sparsemla_loopback* loopback_ = nullptr;
    sparsemla_mailbox mailboxes_[world] = {};
    std::vector<sparsemla_cache> c_caches_;
    std::vector<sparsemla_source_args> c_sources_;
};

TEST_P(CApiDcpAllocations, AreNone) {
    const auto exchange = [&] {
        for (int rank = 0; rank < world; ++rank) gather(rank);
        for (int rank = 0; rank < world; ++rank) decode_with_mailbox(rank);
        for (int rank = 0; rank < world; ++rank) merge(rank);
    };
    exchange();  // first-use tables of the kernels
    EXPECT_EQ(allocations_of(exchange), 0);
    EXPECT_EQ(allocations_of([&] {
                  for (int rank = 0; rank < world; ++rank) gather(rank);
                  for (int rank = 0; rank < world; ++rank) receive_and_push(rank);
                  for (int rank = 0; rank < world; ++rank) merge(rank);
              }),
              0);
}

INSTANTIATE_TEST_SUITE_P(Kernels, DcpAllocations, testing::ValuesIn(harness::kernels_on(Device::Kind::cpu)),
                         [](const auto& kernel) { return kernel.param; });
INSTANTIATE_TEST_SUITE_P(Kernels, CApiDcpAllocations, testing::ValuesIn(harness::kernels_on(Device::Kind::cpu)),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace sparsemla
