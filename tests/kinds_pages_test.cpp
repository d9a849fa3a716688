// K11: where the bytes of a record lie in its page, and where pages lie in the cache.
#include <cstring>
#include <numeric>

#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

class K11_RecordOrPageLayoutMismatch : public EveryRecord {
   protected:
    bool planar() const { return layout().form == RecordForm::planar; }
    std::int64_t record_bytes() const { return layout().bytes().record_bytes; }

    /// A source with room between its pages for `others` pages like its own.
    SourceSpec spread(std::int64_t others, std::int64_t pages = 4, std::int64_t page_size = 64) const {
        SourceSpec spec{.layout = layout(), .pages = pages, .page_size = page_size};
        if (planar())
            spec.page_stride_bytes = (1 + others) * page_size * record_bytes();
        else
            spec.slots_per_page = (1 + others) * page_size;
        return spec;
    }
    static std::int32_t slot_in(const Step& step, std::int64_t page, std::int64_t offset, std::size_t source = 0) {
        return static_cast<std::int32_t>(page * step.cache(source).slot_step() + offset);
    }
};

// B090: own pages, then pages full of NaN, repeated; two sources with different strides.
TEST_P(K11_RecordOrPageLayoutMismatch, B090_PoisonBetweenPages) {
    SourceSpec second = spread(3);
    second.count_offset = 64;
    Step step({.rows = 1, .heads = 4, .sources = {spread(1), second}});
    step.histogram(0);
    step.histogram(1);
    std::vector<std::int32_t> read;
    for (const std::size_t source : {0, 1}) {
        std::vector<std::int32_t> slots;
        for (std::int64_t page = 0; page < 4; ++page)
            for (const std::int64_t offset : {0, 1, 31, 62, 63}) slots.push_back(slot_in(step, page, offset, source));
        step.list(0, slots, source);
        read.insert(read.end(), slots.begin(), slots.end());
    }
    for_each_schedule(kernel(), step, [&](const Result& result) { expect_histogram(result, 0, read); });
}

// B048, B091: three layers share an allocation page by page, each with a constant of its own.
TEST_P(K11_RecordOrPageLayoutMismatch, B091_LayersInterleavedPerPage) {
    if (layout().split_rope) GTEST_SKIP() << "layers of split records are two allocations";
    constexpr std::int64_t page_size = 64;
    for (const std::int64_t layers : {2, 3}) {
        Step step({.rows = 1, .heads = 2, .sources = {spread(layers - 1)}});
        // The allocation of all layers; the step's own cache memory is set aside.
        Fenced all(static_cast<std::size_t>(4 * layers * page_size * record_bytes()));
        all.fill(0xFF);
        const std::int64_t page_bytes = page_size * record_bytes();
        const auto view_of = [&](std::int64_t layer) {
            MutableCacheView view = step.cache();
            view.data = all.data() + layer * page_bytes;
            return view;
        };
        std::vector<std::int32_t> slots;
        for (std::int64_t page = 0; page < 4; ++page)
            for (std::int64_t offset = 0; offset < page_size; ++offset) slots.push_back(slot_in(step, page, offset));
        for (std::int64_t layer = 0; layer < layers; ++layer) {
            std::vector<float> values(static_cast<std::size_t>(d_qk(step.problem)) * slots.size(),
                                      Step::mark * static_cast<float>(1 << layer));
            pack(view_of(layer), dense(values.data(), DType::f32, {std::ssize(slots), d_qk(step.problem)}),
                 dense(slots.data(), DType::i32, {std::ssize(slots)}));
        }
        step.list(0, std::vector<std::int32_t>(slots.end() - 64, slots.end()));
        for (std::int64_t layer = 0; layer < layers; ++layer) {
            step.args.sources[0].cache = view_of(layer);
            for_each_schedule(kernel(), step, [&](const Result& result) {
                expect_row(result, 0, constant(Step::mark * static_cast<double>(1 << layer)));
            });
        }
    }
}

// B048, B091: wide and odd strides: 96 and 4096 records a page of 64.
TEST_P(K11_RecordOrPageLayoutMismatch, B091_OtherStrides) {
    for (const std::int64_t records : {96, 4096}) {
        SourceSpec spec{.layout = layout(), .pages = 3};
        if (planar())
            spec.page_stride_bytes = records * record_bytes();
        else
            spec.slots_per_page = records;
        spec.poisoned = false;
        Step step({.rows = 1, .heads = 2, .sources = {spec}});
        const std::vector<std::int32_t> slots = {slot_in(step, 0, 0), slot_in(step, 1, 0), slot_in(step, 1, 63),
                                                 slot_in(step, 2, 5), slot_in(step, 2, 63)};
        for (const std::int32_t slot : slots) step.histogram_record(slot);
        step.list(0, slots);
        for_each_schedule(kernel(), step, [&](const Result& result) { expect_histogram(result, 0, slots); });
    }
}

// Slots in the gap between pages are absent, not records of another layer.
TEST_P(K11_RecordOrPageLayoutMismatch, GapSlotsAreAbsent) {
    if (planar()) GTEST_SKIP() << "planar records have no slots in gaps";
    Step step({.rows = 1, .heads = 2, .sources = {spread(1)}});
    step.histogram();
    step.list(0, {64, 63, 127, 128, 191, 192, 255, 256, static_cast<std::int32_t>(step.cache().num_slots()) - 1});
    const std::vector<std::int32_t> held = {63, 128, 191, 256, static_cast<std::int32_t>(step.cache().num_slots()) - 1};
    for_each_schedule(kernel(), step, [&](const Result& result) { expect_histogram(result, 0, held); });
}

// B092: a page stride that is not whole records. Planar: any aligned stride; contiguous: refused by name.
TEST_P(K11_RecordOrPageLayoutMismatch, B092_StridesThatAreNotWholeRecords) {
    const std::int64_t page_bytes = 64 * record_bytes();
    for (const std::int64_t extra : {100, 288, 16, 8, 1, -16}) {
        const bool legal = planar() && extra > 0 && extra % 16 == 0;
        SourceSpec spec{.layout = layout(), .pages = 3};
        if (legal) spec.page_stride_bytes = page_bytes + extra;
        Step step({.rows = 1, .heads = 2, .sources = {spec}});
        step.histogram();
        step.list(0, {0, 63, 64, 127, 128, 191});
        if (legal) {
            for_each_schedule(kernel(), step, [&](const Result& result) {
                expect_histogram(result, 0, {0, 63, 64, 127, 128, 191});
            });
            continue;
        }
        step.args.sources[0].cache.page_stride_bytes = page_bytes + extra;
        try {
            step.run({.kernel = kernel()});
            FAIL() << "a page stride of " << page_bytes + extra << " bytes was accepted";
        } catch (const Error& error) {
            EXPECT_EQ(error.argument(), "cache.page_stride_bytes") << error.what();
        }
    }
}

// B092: nothing behind the last page's last record is read, before the first page neither (all caches are fenced).
TEST_P(K11_RecordOrPageLayoutMismatch, B092_CacheEndsWithItsLastRecord) {
    for (const Against fence : {Against::end, Against::front}) {
        SourceSpec spec = spread(1, 2, 5 + 11);
        spec.fence = fence;
        Step step({.rows = 1, .heads = 3, .sources = {spec}});
        step.histogram();
        const auto last = static_cast<std::int32_t>(step.cache().num_slots() - 1);
        step.list(0, {last, 0, last, last, 0});
        for_each_schedule(kernel(), step, [&](const Result& result) {
            expect_histogram(result, 0, {last, 0, last, last, 0});
        });
    }
}

// B093: page sizes of all kinds; the records around every page's edge.
TEST_P(K11_RecordOrPageLayoutMismatch, B093_PageSizes) {
    for (const std::int64_t page_size : {1, 2, 3, 7, 16, 32, 48, 64, 128, 256, 1000}) {
        Step step({.rows = 1, .heads = 2, .sources = {{.layout = layout(), .pages = 3, .page_size = page_size}}});
        step.histogram();
        std::vector<std::int32_t> slots;
        for (const std::int64_t slot : {page_size - 1, page_size, page_size + 1, 2 * page_size, 3 * page_size - 1})
            if (slot < 3 * page_size) slots.push_back(static_cast<std::int32_t>(slot));
        step.list(0, slots);
        const Result result = step.run({.kernel = kernel()});
        ASSERT_NO_FATAL_FAILURE(expect_histogram(result, 0, slots)) << "page size " << page_size;
    }
}

// B094: values and scales in the other order of equal size are another answer: the test above would see it.
TEST_P(K11_RecordOrPageLayoutMismatch, B094_TheOtherOrderIsToldApart) {
    const RecordLayout& bytes = layout().bytes();
    if (!bytes.has_planar || !bytes.has_contiguous) GTEST_SKIP() << "the record has one order only";
    Step step({.rows = 1, .heads = 1, .sources = {{.layout = layout(), .pages = 1}}});
    for (std::int32_t s = 0; s < 64; ++s)
        step.record(s, [&](int d) { return Step::mark * static_cast<float>(1 + (d / 32 + s) % 4); });
    step.list(0, slot_range(0, 64));
    const Result right = step.run({.kernel = kernel()});
    step.args.sources[0].cache.form = planar() ? RecordForm::contiguous : RecordForm::planar;
    step.problem.sources[0].form = step.args.sources[0].cache.form;
    const Result wrong = step.run({.kernel = kernel()});
    double difference = 0, sum = 0;
    for (int d = 0; d < value_dims; ++d) {
        difference += std::fabs(double{wrong.out(0, 0, d)} - right.out(0, 0, d));
        sum += std::fabs(right.out(0, 0, d));
    }
    EXPECT_FALSE(difference <= 0.1 * sum);  // NaN differs too
}

// Two sources of a row may have different records, page sizes and strides.
TEST_P(K11_RecordOrPageLayoutMismatch, DifferentRecordsUnderOneSoftmax) {
    for (const Layout& other : layouts()) {
        if (other.bytes().d_qk() != layout().bytes().d_qk()) continue;
        Step step(
            {.rows = 2,
             .heads = 3,
             .sources = {spread(1, 2, 32), {.layout = other, .width = 100, .count_offset = 64, .page_size = 16}}});
        if (!step.taken_by(kernel())) continue;
        step.histogram(0);
        step.histogram(1);
        step.list(0, {0, 3, 31});
        step.list(0, {1, 16, 100, 100}, 1);
        step.list(1, {});
        step.list(1, {77}, 1);
        const Result result = step.run({.kernel = kernel()});
        ASSERT_NO_FATAL_FAILURE(expect_histogram(result, 0, {0, 3, 31, 1, 16, 100, 100})) << name(other);
        ASSERT_NO_FATAL_FAILURE(expect_histogram(result, 1, {77})) << name(other);
    }
}

// B095: what calls write, in a packed allocation of four layers: pack touches its records, decode nothing.
TEST_P(K11_RecordOrPageLayoutMismatch, B095_NeighboursKeepTheirBytes) {
    if (layout().split_rope) GTEST_SKIP() << "layers of split records are two allocations";
    Step step({.rows = 1, .heads = 2, .sources = {spread(3)}});
    const std::int64_t page_bytes = 64 * record_bytes();
    Fenced all(static_cast<std::size_t>(4 * 4 * page_bytes));
    all.fill(0x5A);
    MutableCacheView view = step.cache();
    view.data = all.data() + 2 * page_bytes;
    std::vector<std::int32_t> slots;
    for (std::int64_t page = 0; page < 4; ++page)
        for (std::int64_t offset = 0; offset < 64; ++offset) slots.push_back(slot_in(step, page, offset));
    std::vector<float> values(static_cast<std::size_t>(d_qk(step.problem)) * slots.size(), Step::mark);
    pack(view, dense(values.data(), DType::f32, {std::ssize(slots), d_qk(step.problem)}),
         dense(slots.data(), DType::i32, {std::ssize(slots)}));
    step.args.sources[0].cache = view;
    step.list(0, std::vector<std::int32_t>(slots.end() - 64, slots.end()));
    all.writable(false);
    ASSERT_NO_FATAL_FAILURE(expect_row(step.run({.kernel = kernel()}), 0, constant(Step::mark)));
    for (std::int64_t page = 0; page < 16; ++page) {
        if (page % 4 == 2) continue;
        ASSERT_TRUE(std::all_of(all.data() + page * page_bytes, all.data() + (page + 1) * page_bytes,
                                [](std::byte b) { return b == std::byte{0x5A}; }))
            << "page " << page << " of the allocation";
    }
}

INSTANTIATE_TEST_SUITE_P(All, K11_RecordOrPageLayoutMismatch, testing::ValuesIn(kernels_and_layouts()), test_name);

}  // namespace
}  // namespace sparsemla::test
