// Views of paged caches: where records lie, which bytes pack touches, caches beyond 4 GiB, and what is refused.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "sparsemla/records.h"
#include "tests/fenced.h"
#include "tests/step.h"

namespace sparsemla {
namespace {

using test::Fenced;
using test::Layout;

constexpr std::int64_t GiB = std::int64_t{1} << 30;

struct Geometry {
    std::int64_t pages = 1;
    std::int64_t page_size = 64;
    std::int64_t slots_per_page = 0;
    std::int64_t page_stride_bytes = 0;
};

MutableCacheView view_of(const Layout& form, const Geometry& geometry, std::byte* data, std::byte* rope) {
    return {.record = form.record,
            .form = form.form,
            .data = data,
            .rope = form.split_rope ? rope : nullptr,
            .pages = geometry.pages,
            .page_size = geometry.page_size,
            .slots_per_page = geometry.slots_per_page,
            .page_stride_bytes = geometry.page_stride_bytes};
}

/// Values that every record holds exactly, different from slot to slot and from group to group.
std::vector<float> values_of_slot(std::int64_t slot, int dims) {
    std::vector<float> x(dims);
    for (int d = 0; d < dims; ++d) {
        constexpr float codes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
        const auto mixed = static_cast<std::uint64_t>(slot + 1) * 0x9E3779B97F4A7C15U;
        x[d] = d % 16 == 0 ? 6.0F : codes[(mixed >> (d % 50)) % 8];
        if ((mixed >> (d % 47)) % 2 == 1) x[d] = -x[d];
    }
    return x;
}

void pack_slot(const MutableCacheView& cache, std::int64_t slot) {
    const std::vector<float> x = values_of_slot(slot, cache.layout().d_qk());
    pack(cache, dense(x.data(), DType::f32, {1, cache.layout().d_qk()}), dense(&slot, DType::i64, {1}));
}

/// Whether the slot reads back as packed. Every record holds values_of_slot to a sixteenth or better.
bool reads_back(const CacheView& cache, std::int64_t slot) {
    const int dims = cache.layout().d_qk();
    std::vector<double> y(dims, -777);
    unpack(cache, dense(&slot, DType::i64, {1}), dense(y.data(), DType::f64, {1, dims}));
    const std::vector<float> x = values_of_slot(slot, dims);
    for (int d = 0; d < dims; ++d)
        if (std::abs(y[d] - x[d]) > std::abs(x[d]) / 16 * 1.001) return false;
    return true;
}

/// The bytes of a record by the address rules of records.md: (offset in data, bytes) runs; split rope in the second.
struct Span {
    bool in_rope;
    std::int64_t first;
    std::int64_t bytes;
};

std::vector<Span> spans_of(const Layout& form, const Geometry& geometry, std::int64_t slot) {
    const RecordLayout& layout = layout_of(form.record);
    if (form.split_rope) return {{false, slot * 512 * 2, 512 * 2}, {true, slot * 64 * 2, 64 * 2}};
    if (form.form == RecordForm::contiguous) return {{false, slot * layout.record_bytes, layout.record_bytes}};
    const std::int64_t page = slot / geometry.page_size;
    const std::int64_t offset = slot % geometry.page_size;
    const std::int64_t dense_bytes = geometry.page_size * (layout.data_bytes + layout.scale_bytes);
    const std::int64_t base = page * (geometry.page_stride_bytes == 0 ? dense_bytes : geometry.page_stride_bytes);
    return {{false, base + offset * layout.data_bytes, layout.data_bytes},
            {false, base + geometry.page_size * layout.data_bytes + offset * layout.scale_bytes, layout.scale_bytes}};
}

/// Page sizes with their gaps or padded strides, each as the form allows.
std::vector<Geometry> geometries(const Layout& form) {
    std::vector<Geometry> all;
    for (std::int64_t page_size : {1, 2, 61, 64, 256, 9 * 64}) {
        const std::int64_t pages = page_size > 100 ? 2 : 5;
        all.push_back({pages, page_size});
        if (form.form == RecordForm::planar) {
            const std::int64_t page_bytes = page_size * layout_of(form.record).record_bytes;
            for (std::int64_t multiple : {16, 512, 9 * 64, 4096})
                all.push_back({pages, page_size, 0, (page_bytes / multiple + 1) * multiple});
            if (page_bytes % 16 == 8) all.push_back({pages, page_size, page_size, page_bytes + 16});
        } else {
            all.push_back({pages, page_size, page_size});
            all.push_back({pages, page_size, page_size + 1});
            all.push_back({pages, page_size, 3 * page_size});
        }
    }
    return all;
}

std::string text_of(const Layout& form, const Geometry& g) {
    return test::name(form) + ", pages " + std::to_string(g.pages) + ", page_size " + std::to_string(g.page_size) +
           ", slots_per_page " + std::to_string(g.slots_per_page) + ", stride " + std::to_string(g.page_stride_bytes);
}

/// The slots to try: the ends of the first, second and last page.
std::set<std::int64_t> probes(const CacheView& cache) {
    std::set<std::int64_t> slots;
    for (std::int64_t page : {std::int64_t{0}, std::int64_t{1}, cache.pages - 1})
        for (std::int64_t offset : {std::int64_t{0}, cache.page_size / 2, cache.page_size - 1})
            slots.insert(page * cache.slot_step() + offset);
    return slots;
}

class Geometries : public testing::TestWithParam<Layout> {};
INSTANTIATE_TEST_SUITE_P(Records, Geometries, testing::ValuesIn(test::layouts()),
                         [](const auto& form) { return test::name(form.param); });

TEST_P(Geometries, PackWritesTheRecordsBytesAndNoOthers) {
    for (const Geometry& geometry : geometries(GetParam())) {
        SCOPED_TRACE(text_of(GetParam(), geometry));
        const CacheView sized = view_of(GetParam(), geometry, nullptr, reinterpret_cast<std::byte*>(16));
        const Fenced data(static_cast<std::size_t>(cache_bytes(sized)), 16);
        const Fenced rope(static_cast<std::size_t>(sized.num_slots() * 64 * 2), 16);
        std::memset(data.data(), 0xA5, data.size());
        std::memset(rope.data(), 0xA5, rope.size());
        const MutableCacheView cache = view_of(GetParam(), geometry, data.data(), rope.data());

        std::vector<std::uint8_t> may_change(data.size()), rope_may_change(rope.size());
        for (std::int64_t slot : probes(cache)) {
            pack_slot(cache, slot);
            for (const Span& span : spans_of(GetParam(), geometry, slot))
                std::fill_n((span.in_rope ? rope_may_change : may_change).begin() + span.first, span.bytes, 1);
        }
        for (std::int64_t slot : probes(cache)) ASSERT_TRUE(reads_back(cache, slot)) << "slot " << slot;
        for (std::size_t i = 0; i < data.size(); ++i)
            ASSERT_TRUE(may_change[i] == 1 || data.data()[i] == std::byte{0xA5}) << "byte " << i << " was written";
        for (std::size_t i = 0; i < rope.size(); ++i)
            ASSERT_TRUE(rope_may_change[i] == 1 || rope.data()[i] == std::byte{0xA5}) << "rope byte " << i;
    }
}

TEST_P(Geometries, AbsentSlotsReadAsZerosWithoutTouchingMemory) {
    const bool planar = GetParam().form == RecordForm::planar;
    const Geometry geometry{.pages = 3, .page_size = 4, .slots_per_page = planar ? 0 : 6};
    const CacheView sized = view_of(GetParam(), geometry, nullptr, reinterpret_cast<std::byte*>(16));
    const Fenced data(static_cast<std::size_t>(cache_bytes(sized)), 16);
    const Fenced rope(static_cast<std::size_t>(sized.num_slots() * 64 * 2), 16);
    std::memset(data.data(), 0x7F, data.size());
    const CacheView cache = view_of(GetParam(), geometry, data.data(), rope.data());
    std::vector<std::int64_t> absent = {-1, std::numeric_limits<std::int64_t>::min(), cache.num_slots(),
                                        std::int64_t{1} << 40, std::numeric_limits<std::int64_t>::max()};
    if (!planar) absent.insert(absent.end(), {4, 5, 10, 11});  // in the gaps
    const auto n = static_cast<std::int64_t>(absent.size());
    const int dims = cache.layout().d_qk();
    std::vector<float> y(static_cast<std::size_t>(n * dims), -777);
    unpack(cache, dense(absent.data(), DType::i64, {n}), dense(y.data(), DType::f32, {n, dims}));
    EXPECT_EQ(y, std::vector<float>(y.size(), 0.0F));
}

TEST(CacheView, CountsSlotsAndBytes) {
    CacheView cache{.record = Record::fp8_512, .pages = 3, .page_size = 4, .slots_per_page = 10};
    EXPECT_EQ(cache.num_slots(), 24);
    EXPECT_EQ(cache_bytes(cache), 24 * 512);
    std::set<std::int64_t> held;
    for (std::int64_t slot = -3; slot < 40; ++slot)
        if (cache.holds(slot)) held.insert(slot);
    EXPECT_EQ(held, (std::set<std::int64_t>{0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23}));
    cache.pages = 0;
    EXPECT_EQ(cache.num_slots(), 0);
    EXPECT_EQ(cache_bytes(cache), 0);
    EXPECT_FALSE(cache.holds(0));

    const CacheView planar{
        .record = Record::fp8_v41, .form = RecordForm::planar, .pages = 3, .page_size = 4, .page_stride_bytes = 4096};
    EXPECT_EQ(cache_bytes(planar), 2 * 4096 + 4 * (512 + 16)) << "the last page ends with its last byte";
}

// ---- beyond 4 GiB ----

/// The pages around the marks 2 GiB and 4 GiB, the first and the last: their slots are packed, then read.
void expect_far_slots_read_back(const MutableCacheView& cache, const Layout& form, const Geometry& geometry) {
    SCOPED_TRACE(text_of(form, geometry));
    std::set<std::int64_t> slots = {0, cache.num_slots() - 1};
    for (std::int64_t slot = 0; slot < cache.num_slots(); slot += 1 + cache.num_slots() / 16) slots.insert(slot);
    for (std::int64_t mark : {2 * GiB, 4 * GiB}) {
        const std::int64_t record_bytes = form.split_rope ? 512 * 2 : cache.layout().record_bytes;
        const std::int64_t at =
            form.form == RecordForm::planar ? mark / cache.stride_bytes() * geometry.page_size : mark / record_bytes;
        for (std::int64_t near : {at - 1, at, at + 1}) slots.insert(near);
    }
    for (std::int64_t slot : slots)
        if (cache.holds(slot)) pack_slot(cache, slot);
    for (std::int64_t slot : slots) {
        if (!cache.holds(slot)) continue;
        ASSERT_TRUE(reads_back(cache, slot)) << "slot " << slot;
    }
}

TEST_P(Geometries, CachesBeyond4GiB) {
    const Layout& form = GetParam();
    const Fenced data(5 * GiB);
    const Fenced rope(form.split_rope ? GiB : 16);
    const std::int64_t record_bytes = form.split_rope ? 512 * 2 : layout_of(form.record).record_bytes;
    for (std::int64_t page_size : {1, 64}) {
        const Geometry geometry{.pages = 5 * GiB / (page_size * record_bytes), .page_size = page_size};
        const MutableCacheView cache = view_of(form, geometry, data.data(), rope.data());
        ASSERT_GT(cache_bytes(cache), 5 * GiB - 64 * 2048);
        expect_far_slots_read_back(cache, form, geometry);
    }
    if (form.form == RecordForm::planar) {
        const Geometry far{.pages = 5, .page_size = 61, .page_stride_bytes = GiB + 48};
        expect_far_slots_read_back(view_of(form, far, data.data(), nullptr), form, far);
    } else {
        const Geometry far{.pages = 5, .page_size = 61, .slots_per_page = GiB / record_bytes};
        expect_far_slots_read_back(view_of(form, far, data.data(), rope.data()), form, far);
    }
}

}  // namespace
}  // namespace sparsemla
