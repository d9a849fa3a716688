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

}  // namespace
}  // namespace sparsemla
