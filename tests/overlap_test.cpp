// Which bytes views share, against sets of bytes counted one by one.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"

namespace sparsemla::detail {
namespace {

using Bytes = std::multiset<std::uintptr_t>;

/// Addresses that nobody dereferences.
const std::byte* address(std::int64_t offset) { return reinterpret_cast<const std::byte*>(0x10000 + offset); }

Bytes bytes_of(const Region& region) {
    Bytes bytes;
    const auto base = reinterpret_cast<std::uintptr_t>(region.base);
    for (std::int64_t i = 0; i < region.steps[0].count; ++i)
        for (std::int64_t j = 0; j < region.steps[1].count; ++j)
            for (std::int64_t k = 0; k < region.steps[2].count; ++k)
                for (std::int64_t byte = 0; byte < region.run_bytes; ++byte)
                    bytes.insert(base + static_cast<std::uintptr_t>(i * region.steps[0].stride_bytes +
                                                                    j * region.steps[1].stride_bytes +
                                                                    k * region.steps[2].stride_bytes + byte));
    return bytes;
}

bool share(const Bytes& a, const Bytes& b) {
    return std::any_of(a.begin(), a.end(), [&](std::uintptr_t byte) { return b.contains(byte); });
}

bool repeats(const Bytes& bytes) { return std::adjacent_find(bytes.begin(), bytes.end()) != bytes.end(); }

/// Whether each step is at least as long as what the shorter ones span: the shape of every sensible output.
bool nested(const Region& region) {
    std::array<Region::Step, 3> steps = region.steps;
    std::sort(steps.begin(), steps.end(), [](auto a, auto b) { return a.stride_bytes < b.stride_bytes; });
    std::int64_t span = region.run_bytes;
    for (const auto& [count, stride_bytes] : steps) {
        if (count <= 1) continue;
        if (stride_bytes < span) return false;
        span += (count - 1) * stride_bytes;
    }
    return true;
}

std::string text(const Region& region) {
    std::string text =
        std::to_string(reinterpret_cast<std::uintptr_t>(region.base)) + " run " + std::to_string(region.run_bytes);
    for (const auto& [count, stride_bytes] : region.steps)
        text += " x" + std::to_string(count) + " by " + std::to_string(stride_bytes);
    return text;
}

class Random {
   public:
    explicit Random(std::uint64_t seed) : bits_(seed) {}
    std::int64_t operator()(std::int64_t low, std::int64_t high) {
        return std::uniform_int_distribution<std::int64_t>(low, high)(bits_);
    }
    /// Steps of any size, often dense or nested, sometimes empty or of stride 0.
    Region region() {
        Region region{.base = address((*this)(0, 60)), .run_bytes = (*this)(0, 5), .steps = {}, .argument = "random"};
        for (Region::Step& step : region.steps)
            if ((*this)(0, 2) != 0) step = {(*this)(0, 4), (*this)(0, 1) == 0 ? region.run_bytes : (*this)(0, 30)};
        return region;
    }

   private:
    std::mt19937_64 bits_;
};

TEST(Overlaps, EqualsTheCountOfBytes) {
    Random random(1);
    int shared = 0;
    constexpr int trials = 20000;
    for (int i = 0; i < trials; ++i) {
        const Region a = random.region();
        const Region b = random.region();
        const bool expected = share(bytes_of(a), bytes_of(b));
        shared += expected ? 1 : 0;
        ASSERT_EQ(overlaps(a, b), expected) << text(a) << "; " << text(b) << "; trial " << i << " of seed 1";
        ASSERT_EQ(overlaps(b, a), expected) << text(b) << "; " << text(a) << "; trial " << i << " of seed 1";
    }
    EXPECT_GT(shared, trials / 10);  // both answers occur often
    EXPECT_LT(shared, trials * 9 / 10);
}

TEST(CheckNoOverlap, OutputsThatRepeatTheirOwnBytes) {
    Random random(2);
    int refused = 0;
    int accepted = 0;
    for (int i = 0; i < 20000; ++i) {
        const Region region = random.region();
        const Bytes bytes = bytes_of(region);
        bool throws = false;
        try {
            check_no_overlap({region}, {});
        } catch (const Error& error) {
            throws = true;
            EXPECT_EQ(error.argument(), "random");
        }
        if (repeats(bytes)) {
            ASSERT_TRUE(throws) << text(region) << "; trial " << i << " of seed 2";
            ++refused;
        } else if (!bytes.empty() && nested(region)) {
            ASSERT_FALSE(throws) << text(region) << "; trial " << i << " of seed 2";
            ++accepted;
        }
    }
    EXPECT_GT(refused, 1000);
    EXPECT_GT(accepted, 1000);
}

TEST(CheckNoOverlap, NamesBothSides) {
    const auto piece = [](std::int64_t offset, std::string_view argument) {
        return region_of(address(offset), 8, argument);
    };
    const auto message = [](const Regions& outputs, const Regions& inputs) -> std::string {
        try {
            check_no_overlap(outputs, inputs);
        } catch (const Error& error) {
            return error.what();
        }
        return "";
    };
    EXPECT_EQ(message({piece(0, "out"), piece(8, "lse")}, {piece(16, "query"), piece(16, "slots")}), "");
    EXPECT_EQ(message({piece(0, "out"), piece(7, "lse")}, {}),
              "lse: need memory of its own, got memory shared with out");
    EXPECT_EQ(message({piece(0, "out")}, {piece(-7, "query")}),
              "out: need memory of its own, got memory shared with query");
    EXPECT_EQ(message({region_of(nullptr, 8, "out")}, {region_of(nullptr, 8, "query")}), "");  // nothing is shared
}

/// The bytes of a tensor cut to `rows`, element by element.
Bytes bytes_of(const ConstTensor& tensor, std::int64_t rows) {
    Bytes bytes;
    if (tensor.elements() == 0) return bytes;
    std::array<std::int64_t, 4> extent = tensor.shape;
    for (int i = tensor.rank; i < 4; ++i) extent[static_cast<std::size_t>(i)] = 1;
    extent[0] = std::min(extent[0], rows);
    const std::int64_t element = size_bytes(tensor.dtype);
    for (std::int64_t a = 0; a < extent[0]; ++a)
        for (std::int64_t b = 0; b < extent[1]; ++b)
            for (std::int64_t c = 0; c < extent[2]; ++c) {
                std::int64_t at = extent[0] > 1 ? a * tensor.strides[0] : 0;
                if (extent[1] > 1) at += b * tensor.strides[1];
                if (extent[2] > 1) at += c * tensor.strides[2];
                for (std::int64_t byte = 0; byte < element; ++byte)
                    bytes.insert(reinterpret_cast<std::uintptr_t>(tensor.data) +
                                 static_cast<std::uintptr_t>(at * element + byte));
            }
    return bytes;
}

TEST(RegionOf, TensorsOfAnyStrides) {
    Random random(3);
    const DType dtypes[] = {DType::f8_e4m3, DType::bf16, DType::f32, DType::i64};
    for (int i = 0; i < 10000; ++i) {
        ConstTensor tensor{.data = address(8 * random(0, 9)), .dtype = dtypes[random(0, 3)]};
        tensor.rank = static_cast<int>(random(1, 3));
        for (int d = 0; d < tensor.rank; ++d) {
            const auto at = static_cast<std::size_t>(d);
            tensor.shape[at] = random(0, 4);
            tensor.strides[at] = tensor.shape[at] <= 1 ? std::numeric_limits<std::int64_t>::min() : random(0, 12);
            if (d + 1 == tensor.rank && tensor.shape[at] > 1 && random(0, 1) == 0) tensor.strides[at] = 1;
        }
        const std::int64_t rows = random(0, 4);
        const Bytes expected = bytes_of(tensor, rows);
        ASSERT_EQ(bytes_of(region_of(tensor, "tensor", {rows})), expected)
            << describe(tensor) << ", strides " << tensor.strides[0] << ", " << tensor.strides[1] << ", "
            << tensor.strides[2] << "; rows " << rows << "; trial " << i << " of seed 3";
    }
    EXPECT_TRUE(bytes_of(region_of(ConstTensor{}, "absent")).empty());
}

/// What the records of all held slots occupy.
Bytes bytes_of(const CacheView& cache) {
    const RecordLayout& layout = cache.layout();
    Bytes bytes;
    const auto add = [&](const std::byte* from, int count) {
        for (int i = 0; i < count; ++i) bytes.insert(reinterpret_cast<std::uintptr_t>(from) + static_cast<unsigned>(i));
    };
    for (std::int64_t slot = 0; slot < cache.num_slots(); ++slot) {
        if (!cache.holds(slot)) continue;
        const auto at = locate(cache, slot);
        add(at.data, cache.form == RecordForm::planar ? layout.data_bytes
                     : cache.rope != nullptr          ? layout.main.bytes()
                                                      : layout.record_bytes);
        if (cache.form == RecordForm::planar) add(at.scales, layout.scale_bytes);
        if (cache.rope != nullptr) add(at.rope, layout.rope.bytes());
    }
    return bytes;
}

TEST(RegionsOf, CachesWithAndWithoutGaps) {
    for (const RecordLayout& layout : record_layouts)
        for (const RecordForm form : {RecordForm::contiguous, RecordForm::planar})
            for (const bool split : {false, true})
                for (const std::int64_t pages : {0, 1, 3})
                    for (const std::int64_t gap : {0, 2}) {
                        const bool planar = form == RecordForm::planar;
                        if (!(planar ? layout.has_planar : layout.has_contiguous) || (split && !layout.may_split))
                            continue;
                        CacheView cache{.record = layout.record,
                                        .form = form,
                                        .data = address(0),
                                        .rope = split ? address(1 << 20) : nullptr,
                                        .pages = pages,
                                        .page_size = 4,
                                        .device = {}};
                        (planar ? cache.page_stride_bytes : cache.slots_per_page) =
                            gap == 0 ? 0 : (4 + gap) * (planar ? layout.record_bytes : 1);
                        Bytes bytes;
                        for (const Region& region : regions_of(cache, "cache")) bytes.merge(bytes_of(region));
                        ASSERT_EQ(bytes, bytes_of(cache)) << to_string(layout.record) << ", pages " << pages;
                    }
}

// Interleaved regions of millions of runs are told apart without walking over the bytes.
TEST(Overlaps, LargeRegionsAreCheap) {
    const Region evens{.base = address(0), .run_bytes = 4, .steps = {{{1 << 20, 8}, {}, {}}}, .argument = "evens"};
    const Region odds{.base = address(4), .run_bytes = 4, .steps = {{{1 << 20, 8}, {}, {}}}, .argument = "odds"};
    Region last = odds;
    last.base = address(8 * ((1 << 20) - 1) + 3);
    EXPECT_FALSE(overlaps(evens, odds));
    EXPECT_TRUE(overlaps(evens, last));
}

}  // namespace
}  // namespace sparsemla::detail
