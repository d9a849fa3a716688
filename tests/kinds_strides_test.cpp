// K12: alignment and strides. What is allowed gives the answer of the dense tensors bit for bit, the rest is refused.
#include <limits>

#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

constexpr std::int64_t absurd_strides[] = {0,
                                           -1,
                                           1,
                                           3,
                                           std::numeric_limits<std::int64_t>::max(),
                                           std::numeric_limits<std::int64_t>::min(),
                                           std::int64_t{1} << 62};

class K12_AlignmentAndStrides : public EveryRecord {
   protected:
    static constexpr std::int64_t rows = 2;
    static constexpr std::int64_t heads = 5;

    /// Small, with different lists and queries for every row and head.
    Step step_of(DType query_dtype = DType::f8_e4m3, std::int64_t width = 70) const {
        Step step({.rows = rows,
                   .heads = heads,
                   .query_dtype = query_dtype,
                   .sources = {{.layout = layout(), .width = width, .pages = 4}},
                   .sinks = true});
        randomise(step, 31);
        step.list(0, slot_range(0, static_cast<std::int32_t>(width)));
        step.list(1, slot_range(9, static_cast<std::int32_t>(width) - 3, 1));
        for (std::int64_t head = 0; head < heads; ++head) step.sink(head) = 0.25F * static_cast<float>(head);
        return step;
    }
    void expect_same(Step& step, const Result& dense, const std::string& what) const {
        const Result result = step.run({.kernel = kernel()});
        for (std::int64_t row = 0; row < result.rows; ++row)
            ASSERT_TRUE(same_bits(result, row, dense, row)) << kernel() << ": " << what << ", row " << row;
    }
    template <class Change>
    void expect_refused(Step& step, const std::string& argument, const std::string& what, Change change) const {
        const DecodeArgs before = step.args;
        change(step.args);
        step.poison_outputs();
        try {
            step.run({.kernel = kernel()});
            ADD_FAILURE() << what << " was accepted";
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::invalid_argument) << error.what();
            EXPECT_EQ(error.argument(), argument) << error.what();
        }
        EXPECT_TRUE(step.outputs_untouched()) << what;
        step.args = before;
    }
};

// B042: odd widths without padding between rows, lists and counts at every 4-byte offset.
TEST_P(K12_AlignmentAndStrides, B042_OddWidthsAndBases) {
    for (const std::int64_t width : {129, 130, 131, 637}) {
        Step step = step_of(DType::f8_e4m3, width);
        const Result expected = step.run({.kernel = kernel()});
        expect_oracle(step, expected);
        for (const std::int64_t offset : {0, 1, 2, 3}) {
            Fenced slots(static_cast<std::size_t>((rows * width + offset) * 4), 16);
            Fenced counts(static_cast<std::size_t>((rows + offset) * 4), 16);
            for (std::int64_t row = 0; row < rows; ++row) {
                std::copy_n(&step.slot(row, 0), width, slots.as<std::int32_t>() + offset + row * width);
                counts.as<std::int32_t>()[offset + row] = static_cast<std::int32_t>(row == 0 ? width : width - 3);
            }
            Step changed = step_of(DType::f8_e4m3, width);
            changed.args.sources[0].slots = dense(slots.as<std::int32_t>() + offset, DType::i32, {rows, width});
            changed.args.sources[0].counts = dense(counts.as<std::int32_t>() + offset, DType::i32, {rows});
            expect_same(changed, expected, "offset " + std::to_string(4 * offset) + " bytes");
        }
    }
}

// Counts and sinks as columns of wider tables, and one list that all rows share.
TEST_P(K12_AlignmentAndStrides, StridedCountsAndSinks) {
    Step step = step_of();
    const Result expected = step.run({.kernel = kernel()});
    std::vector<std::int32_t> counts(7 * rows, -77);
    std::vector<float> sinks(3 * heads, not_a_number);
    for (std::size_t row = 0; row < rows; ++row) counts[7 * row] = row == 0 ? 70 : 67;
    for (std::size_t head = 0; head < heads; ++head) sinks[3 * head] = 0.25F * static_cast<float>(head);
    step.args.sources[0].counts = dense(counts.data(), DType::i32, {rows});
    step.args.sources[0].counts.strides[0] = 7;
    step.args.sinks = dense(sinks.data(), DType::f32, {heads});
    step.args.sinks.strides[0] = 3;
    expect_same(step, expected, "strided counts and sinks");

    step.list(1, slot_range(0, 70));
    const Result separate = step.run({.kernel = kernel()});
    step.args.sources[0].slots.strides[0] = 0;
    expect_same(step, separate, "a list shared by all rows");
}

// B099: queries transposed, sliced out of something wider, and shared by rows or heads.
TEST_P(K12_AlignmentAndStrides, B099_QueryViews) {
    for (const DType dtype : {DType::f8_e4m3, DType::bf16}) {
        Step step = step_of(dtype);
        if (!step.taken_by(kernel())) continue;
        const Result expected = step.run({.kernel = kernel()});
        expect_oracle(step, expected);
        const std::int64_t d = d_qk(step.problem);
        const std::int64_t element = size_bytes(dtype);
        const ConstTensor packed = step.args.query;
        const auto copy_as = [&](const Fenced& memory, std::int64_t row_stride, std::int64_t head_stride) {
            for (std::int64_t row = 0; row < rows; ++row)
                for (std::int64_t head = 0; head < heads; ++head)
                    std::memcpy(
                        memory.data() + (row * row_stride + head * head_stride) * element,
                        step.query_memory().data() + (row * packed.strides[0] + head * packed.strides[1]) * element,
                        static_cast<std::size_t>(d * element));
            step.args.query = dense(memory.data(), dtype, {rows, heads, d});
            step.args.query.strides = {row_stride, head_stride, 1, 0};
        };
        for (const auto& [row_stride, head_stride] :
             {std::pair{heads * d, d}, {d, rows * d}, {heads * (d + 64), d + 64}, {d + 16, 4 * (d + 16)}}) {
            const std::int64_t span = (rows - 1) * row_stride + (heads - 1) * head_stride + d;
            Fenced memory(static_cast<std::size_t>(span * element));
            memory.fill(0xFF);
            copy_as(memory, row_stride, head_stride);
            expect_same(step, expected,
                        "query strides " + std::to_string(row_stride) + ", " + std::to_string(head_stride));
        }
        step.args.query = packed;
        step.args.query.strides = {0, 0, 1, 0};
        const Result shared = step.run({.kernel = kernel()});
        step.args.query = packed;
        ASSERT_TRUE(
            std::ranges::equal(shared.out_bits_of(0).first(value_dims), expected.out_bits_of(0).first(value_dims)));
    }
}

// B099: what does not suit 16-byte loads is refused by name.
TEST_P(K12_AlignmentAndStrides, B099_QueryMisaligned) {
    for (const DType dtype : {DType::f8_e4m3, DType::bf16}) {
        Step step = step_of(dtype);
        if (!step.taken_by(kernel())) continue;
        const std::int64_t element = size_bytes(dtype);
        for (const std::int64_t bytes : {2, 4, 8, 14})
            expect_refused(step, "query", "a base of +" + std::to_string(bytes) + " bytes", [&](DecodeArgs& args) {
                args.query.data = static_cast<const std::byte*>(args.query.data) + bytes;
            });
        for (const int dimension : {0, 1})
            for (const std::int64_t bytes : {2, 4, 8})
                expect_refused(step, "query", "a stride of +" + std::to_string(bytes) + " bytes",
                               [&](DecodeArgs& args) {
                                   args.query.strides[static_cast<std::size_t>(dimension)] += bytes / element;
                               });
        expect_refused(step, "query", "a last dimension of stride 2",
                       [](DecodeArgs& args) { args.query.strides[2] = 2; });
        expect_refused(step, "query", "a last dimension of stride 0",
                       [](DecodeArgs& args) { args.query.strides[2] = 0; });
    }
}

// B100: any view of the LSE; the canaries around it stay (Step checks).
TEST_P(K12_AlignmentAndStrides, B100_LseViews) {
    Step step = step_of();
    const Result expected = step.run({.kernel = kernel()});
    for (const auto& [row_stride, head_stride] :
         {std::pair<std::int64_t, std::int64_t>{1, rows}, {1, rows + 2}, {2 * heads, 2}, {heads, 1}, {1, 5}, {13, 2}}) {
        step.args.lse = dense(step.lse_memory().data(), DType::f32, {rows, heads});
        step.args.lse.strides = {row_stride, head_stride, 0, 0};
        expect_same(step, expected, "lse strides " + std::to_string(row_stride) + ", " + std::to_string(head_stride));
    }
}

// The output transposed, packed, and 2-byte aligned only.
TEST_P(K12_AlignmentAndStrides, OutputViews) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
        Step step = step_of();
        step.problem.out_dtype = dtype;
        if (dtype == DType::f32) {  // reuse a step whose memory fits
            Step wide({.rows = rows,
                       .heads = heads,
                       .sources = {{.layout = layout(), .width = 70, .pages = 4}},
                       .out_dtype = dtype});
            randomise(wide, 32);
            wide.list(0, slot_range(0, 70));
            wide.list(1, slot_range(3, 9));
            const Result expected = wide.run({.kernel = kernel()});
            wide.args.out.strides = {value_dims + 3, (value_dims + 3) * rows, 1, 0};
            expect_same(wide, expected, "f32 out transposed");
            continue;
        }
        const Result expected = step.run({.kernel = kernel()});
        for (const auto& [row_stride, head_stride] :
             {std::pair<std::int64_t, std::int64_t>{heads * value_dims, value_dims},
              {value_dims, rows * value_dims},
              {value_dims + 1, rows * (value_dims + 1)},
              {heads * (value_dims + 7) + 5, value_dims + 7}}) {
            step.args.out = dense(step.out_memory().as<std::uint16_t>() + 1, dtype, {rows, heads, value_dims});
            step.args.out.strides = {row_stride, head_stride, 1, 0};
            expect_same(step, expected,
                        "out strides " + std::to_string(row_stride) + ", " + std::to_string(head_stride));
        }
    }
}

// The stride of a dimension of size 1 is never looked at.
TEST_P(K12_AlignmentAndStrides, SizeOneDimensionsHaveNoStride) {
    Step step({.rows = 1, .heads = 1, .sources = {{.layout = layout(), .width = 1, .pages = 1}}, .sinks = true});
    step.histogram();
    step.list(0, {7});
    const Result expected = step.run({.kernel = kernel()});
    const DecodeArgs dense_args = step.args;
    for (const std::int64_t stride : absurd_strides) {
        step.args = dense_args;
        for (ConstTensor* tensor :
             {&step.args.query, &step.args.sources[0].slots, &step.args.sources[0].counts, &step.args.sinks})
            for (int i = 0; i < tensor->rank; ++i)
                if (i < 2) {
                    tensor->shape[static_cast<std::size_t>(i)] = 1;
                    tensor->strides[static_cast<std::size_t>(i)] = stride;
                }
        for (Tensor* tensor : {&step.args.out, &step.args.lse})
            for (std::size_t i : {0, 1}) {
                tensor->shape[i] = 1;
                tensor->strides[i] = stride;
            }
        expect_same(step, expected, "strides of " + std::to_string(stride));
    }
}

// Strides that would leave the address space are refused before anything is added to a pointer.
TEST_P(K12_AlignmentAndStrides, UnaddressableStrides) {
    Step step = step_of();
    for (const std::int64_t stride :
         {std::numeric_limits<std::int64_t>::max(), std::int64_t{1} << 62, std::int64_t{-16},
          std::numeric_limits<std::int64_t>::max() / (rows + Step::extra_rows - 1) / 16 * 16,
          std::numeric_limits<std::int64_t>::min()}) {
        const std::string what = "a stride of " + std::to_string(stride);
        expect_refused(step, "query", what, [&](DecodeArgs& args) { args.query.strides[0] = stride; });
        expect_refused(step, "query", what, [&](DecodeArgs& args) { args.query.strides[1] = stride; });
        expect_refused(step, "slots", what, [&](DecodeArgs& args) { args.sources[0].slots.strides[0] = stride; });
        expect_refused(step, "counts", what, [&](DecodeArgs& args) { args.sources[0].counts.strides[0] = stride; });
        expect_refused(step, "sinks", what, [&](DecodeArgs& args) { args.sinks.strides[0] = stride; });
        expect_refused(step, "out", what, [&](DecodeArgs& args) { args.out.strides[0] = stride; });
        expect_refused(step, "lse", what, [&](DecodeArgs& args) { args.lse.strides[1] = stride; });
    }
}

INSTANTIATE_TEST_SUITE_P(All, K12_AlignmentAndStrides, testing::ValuesIn(kernels_and_layouts()), test_name);

}  // namespace
}  // namespace sparsemla::test
