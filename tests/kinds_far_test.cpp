// K15: addresses beyond 2 and 4 GiB of caches, lists, queries and outputs. The mappings are sparse.
#include "sparsemla/indices.h"
#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

constexpr std::int64_t gib = std::int64_t{1} << 30;

/// A source whose cache of whole pages spans at least `bytes`, left as zeros.
SourceSpec far_source(const Layout& layout, std::int64_t bytes, std::int64_t page_size = 64) {
    const int per_slot = layout.split_rope ? layout.bytes().main.bytes() : layout.bytes().record_bytes;
    return {.layout = layout, .pages = bytes / (per_slot * page_size) + 2, .page_size = page_size, .poisoned = false};
}

/// Slots whose records lie at, before and behind the byte marks of 2 and 4 GiB, and the last slot.
std::vector<std::int32_t> slots_around_marks(const Step& step) {
    const MutableCacheView& cache = step.cache();
    const std::int64_t per_slot =
        cache.rope != nullptr ? cache.layout().main.bytes() : cache.stride_bytes() / cache.slot_step();
    std::vector<std::int32_t> slots = {0, 1};
    for (const std::int64_t mark : {2 * gib, 4 * gib})
        for (std::int64_t near = -2; near <= 2; ++near)
            slots.push_back(static_cast<std::int32_t>(mark / per_slot + near));
    slots.push_back(static_cast<std::int32_t>(cache.num_slots() - 1));
    return slots;
}

class K15_AddressOverflow : public EveryRecord {};

// B019: records on both sides of the marks; a wrapped address would show in the histogram.
TEST_P(K15_AddressOverflow, B019_RecordsAtTheMarks) {
    Step step({.rows = 1, .heads = 3, .sources = {far_source(layout(), 4 * gib + gib / 4)}});
    const std::vector<std::int32_t> slots = slots_around_marks(step);
    for (const std::int32_t slot : slots) step.histogram_record(slot);
    step.list(0, slots);
    for_each_schedule(kernel(), step, [&](const Result& result) { expect_histogram(result, 0, slots); });
}

// B020: each piece of 16 dimensions has its own constant, so that a record that straddles a mark is seen whole.
TEST_P(K15_AddressOverflow, B020_StraddlingRecords) {
    Step step({.rows = 16, .heads = 2, .sources = {far_source(layout(), 4 * gib + gib / 4)}});
    const std::vector<std::int32_t> slots = slots_around_marks(step);
    const auto value_of = [](std::int32_t slot) {
        return [slot](int d) { return Step::mark * static_cast<float>(1 << ((d / 16 + slot) % 3)); };
    };
    for (std::size_t i = 0; i < slots.size(); ++i) {
        step.record(slots[i], value_of(slots[i]));
        step.list(static_cast<std::int64_t>(i), {slots[i]});
    }
    step.args.rows = std::ssize(slots);
    const Result result = step.run({.kernel = kernel()});
    for (std::size_t i = 0; i < slots.size(); ++i) {
        Values expected;
        for (int d = 0; d < value_dims; ++d) expected.push_back(value_of(slots[i])(d));
        // Groups wider than a piece hold the smaller constants to within their scale's rounding.
        ASSERT_NO_FATAL_FAILURE(expect_row(result, static_cast<std::int64_t>(i), expected)) << "slot " << slots[i];
    }
}

// Few pages, but far apart.
TEST_P(K15_AddressOverflow, PageStridesOfGigabytes) {
    SourceSpec spec{.layout = layout(), .pages = 3, .poisoned = false};
    const std::int64_t records = (2 * gib + 4096) / layout().bytes().record_bytes / 64 * 64 + 64;
    if (layout().form == RecordForm::planar)
        spec.page_stride_bytes = records * layout().bytes().record_bytes;
    else
        spec.slots_per_page = records;
    Step step({.rows = 1, .heads = 2, .sources = {spec}});
    std::vector<std::int32_t> slots;
    for (std::int64_t page = 0; page < 3; ++page)
        for (const std::int64_t offset : {0, 1, 62, 63})
            slots.push_back(static_cast<std::int32_t>(page * step.cache().slot_step() + offset));
    for (const std::int32_t slot : slots) step.histogram_record(slot);
    step.list(0, slots);
    const Result result = step.run({.kernel = kernel()});
    expect_histogram(result, 0, slots);
}

// B047: block ids whose slots' bytes lie at the marks, through conversion and decode.
TEST_P(K15_AddressOverflow, B047_ConvertedBlocks) {
    Step step({.rows = 1, .heads = 2, .sources = {far_source(layout(), 4 * gib + gib / 4)}});
    const std::int64_t page_bytes =
        layout().split_rope ? 64 * layout().bytes().main.bytes() : step.cache().stride_bytes();
    const auto low = static_cast<std::int32_t>(2 * gib / page_bytes);
    const auto high = static_cast<std::int32_t>(4 * gib / page_bytes);
    const auto last = static_cast<std::int32_t>(step.cache().pages - 1);
    const std::vector<std::int32_t> table = {low, low + 1, high, high + 1, last, last + 1};
    std::vector<std::int32_t> ids;
    std::vector<std::int32_t> expected;
    for (std::int32_t block = 0; block < 6; ++block)
        for (const std::int32_t offset : {0, 5, 63}) {
            ids.push_back(block * 64 + offset);
            if (block < 5)
                expected.push_back(table[static_cast<std::size_t>(block)] * 64 + offset);  // the last is absent
        }
    for (const std::int32_t slot : expected) step.histogram_record(slot);
    std::vector<std::int32_t> request = {0}, slots(ids.size()), counts(1);
    convert_indices({.token_ids = dense(ids.data(), DType::i32, {1, std::ssize(ids)}),
                     .block_table = dense(table.data(), DType::i32, {1, 6}),
                     .request_of_row = dense(request.data(), DType::i32, {1}),
                     .cache = step.cache(),
                     .slots = dense(slots.data(), DType::i32, {1, std::ssize(ids)}),
                     .counts = dense(counts.data(), DType::i32, {1})});
    ASSERT_EQ(counts[0], std::ssize(expected));
    slots.resize(expected.size());
    ASSERT_EQ(slots, expected);
    step.list(0, slots);
    const Result result = step.run({.kernel = kernel()});
    expect_histogram(result, 0, expected);
}

INSTANTIATE_TEST_SUITE_P(All, K15_AddressOverflow, testing::ValuesIn(kernels_and_layouts()), test_name);

// ---------------------------------------------------------------------------------------------------------------------
// Strides of queries, lists and outputs do not depend on the record.
class K15_StrideOverflow : public EveryKernel {
   protected:
    static constexpr std::int64_t rows = 3;
    static constexpr std::int64_t heads = 3;

    static Step step_of(DType query_dtype, DType out_dtype) {
        Step step({.rows = rows, .heads = heads, .query_dtype = query_dtype, .sources = {{}}, .out_dtype = out_dtype});
        randomise(step, 61);
        for (std::int32_t row = 0; row < rows; ++row) step.list(row, slot_range(10 * row, 40 + row));
        return step;
    }
    void expect_same(Step& step, const Result& near) const {
        const Result far = step.run({.kernel = kernel()});
        for (std::int64_t row = 0; row < rows; ++row) ASSERT_TRUE(same_bits(far, row, near, row)) << "row " << row;
    }
};

// B043: query rows or heads whose byte offsets cross 2^31 and 2^32.
TEST_P(K15_StrideOverflow, B043_Query) {
    for (const DType dtype : {DType::f8_e4m3, DType::bf16}) {
        Step step = step_of(dtype, DType::bf16);
        if (!step.taken_by(kernel())) continue;
        const Result near = step.run({.kernel = kernel()});
        const ConstTensor query = step.args.query;
        const std::int64_t element = size_bytes(dtype);
        const std::int64_t far_stride = (2 * gib + 4096) / element;
        for (const auto& [row_stride, head_stride] : {std::pair{far_stride, std::int64_t{1024}}, {1024, far_stride}}) {
            Fenced memory(static_cast<std::size_t>((2 * row_stride + 2 * head_stride + d_qk(step.problem)) * element));
            for (std::int64_t row = 0; row < rows; ++row)
                for (std::int64_t head = 0; head < heads; ++head)
                    std::memcpy(memory.data() + (row * row_stride + head * head_stride) * element,
                                static_cast<const std::byte*>(query.data) +
                                    (row * query.strides[0] + head * query.strides[1]) * element,
                                static_cast<std::size_t>(d_qk(step.problem) * element));
            step.args.query = dense(memory.data(), dtype, {rows, heads, d_qk(step.problem)});
            step.args.query.strides = {row_stride, head_stride, 1, 0};
            ASSERT_NO_FATAL_FAILURE(expect_same(step, near));
        }
    }
}

TEST_P(K15_StrideOverflow, SlotsAndCounts) {
    Step step = step_of(DType::f8_e4m3, DType::bf16);
    const Result near = step.run({.kernel = kernel()});
    for (const std::int64_t stride : {gib / 2 + 3, gib + 1, (std::int64_t{1} << 31) + 5}) {
        Fenced slots(static_cast<std::size_t>((2 * stride + 64) * 4), 4);
        Fenced counts(static_cast<std::size_t>((2 * stride + 1) * 4), 4);
        for (std::int64_t row = 0; row < rows; ++row) {
            std::copy_n(&step.slot(row, 0), 64, slots.as<std::int32_t>() + row * stride);
            counts.as<std::int32_t>()[row * stride] = static_cast<std::int32_t>(40 + row);
        }
        const DecodeArgs args = step.args;
        step.args.sources[0].slots = dense(slots.data(), DType::i32, {rows, 64});
        step.args.sources[0].slots.strides[0] = stride;
        step.args.sources[0].counts = dense(counts.data(), DType::i32, {rows});
        step.args.sources[0].counts.strides[0] = stride;
        ASSERT_NO_FATAL_FAILURE(expect_same(step, near)) << "stride " << stride;
        step.args = args;
    }
}

// B043: outputs whose element or byte offsets cross 2^31; nothing appears where a wrapped offset would point.
TEST_P(K15_StrideOverflow, B043_Outputs) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
        Step step = step_of(DType::f8_e4m3, dtype);
        const Result near = step.run({.kernel = kernel()});
        const std::int64_t element = size_bytes(dtype);
        for (const std::int64_t far_stride : {(2 * gib + 1024 * 64) / element, (std::int64_t{1} << 31) + 1024 * 64})
            for (const bool far_rows : {true, false}) {
                const std::int64_t row_stride = far_rows ? far_stride : 1024;
                const std::int64_t head_stride = far_rows ? 1024 : far_stride;
                const std::int64_t span = 2 * row_stride + 2 * head_stride + value_dims;
                Fenced out(static_cast<std::size_t>(span * element));
                Fenced lse(static_cast<std::size_t>(span) * sizeof(float));
                DecodeArgs args = step.args;
                args.out = dense(out.data(), dtype, {rows, heads, value_dims});
                args.lse = dense(lse.data(), DType::f32, {rows, heads});
                args.out.strides = {row_stride, head_stride, 1, 0};
                args.lse.strides = {row_stride, head_stride, 0, 0};
                const Plan plan = step.plan({.kernel = kernel()});
                DeviceCall(plan, args).decode(plan);
                for (std::int64_t row = 0; row < rows; ++row)
                    for (std::int64_t head = 0; head < heads; ++head) {
                        const std::int64_t at = row * row_stride + head * head_stride;
                        for (std::int64_t d = 0; d < value_dims; ++d) {
                            const std::uint32_t bits = dtype == DType::bf16 ? out.as<std::uint16_t>()[at + d]
                                                                            : out.as<std::uint32_t>()[at + d];
                            ASSERT_EQ(bits,
                                      near.out_bits[static_cast<std::size_t>((row * heads + head) * value_dims + d)])
                                << "row " << row << ", head " << head << ", dimension " << d;
                        }
                        ASSERT_EQ(lse.as<std::uint32_t>()[at], near.lse_bits_of(row)[static_cast<std::size_t>(head)]);
                        const std::int64_t wrapped = at * element % (std::int64_t{1} << 32);
                        ASSERT_TRUE(wrapped == at * element || out.data()[wrapped] == std::byte{0}) << "wrapped write";
                    }
            }
    }
}

// The last slot that 32 bits can name.
TEST_P(K15_StrideOverflow, LargestSlot) {
    if (sanitized) GTEST_SKIP() << "a sanitizer has no shadow for half a terabyte";
    Layout smallest = layouts_of(kernel()).front();
    for (const Layout& layout : layouts_of(kernel()))
        if (layout.form == RecordForm::contiguous && !layout.split_rope &&
            layout.bytes().record_bytes < smallest.bytes().record_bytes)
            smallest = layout;
    SourceSpec spec{.layout = smallest, .pages = (std::int64_t{1} << 31) - 1, .page_size = 1, .poisoned = false};
    Step step({.rows = 1, .heads = 1, .sources = {spec}});
    const std::vector<std::int32_t> slots = {INT32_MAX - 1, INT32_MAX - 2, 1 << 30, 5};
    for (const std::int32_t slot : slots) step.histogram_record(slot);
    std::vector<std::int32_t> list = slots;
    list.push_back(INT32_MAX);  // one past the last
    step.list(0, list);
    expect_histogram(step.run({.kernel = kernel()}), 0, slots);
    step.args.sources[0].cache.pages += 1;
    EXPECT_THROW(step.run({.kernel = kernel()}), Error);
}

INSTANTIATE_TEST_SUITE_P(All, K15_StrideOverflow, testing::ValuesIn(tested_kernels()), kernel_test_name);

}  // namespace
}  // namespace sparsemla::test
