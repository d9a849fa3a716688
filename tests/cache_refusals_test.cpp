// What validate, pack and unpack refuse: the argument at fault is named, and nothing is written.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "sparsemla/records.h"

namespace sparsemla {
namespace {

alignas(64) std::byte memory[1 << 16];

CacheView flat() { return {.record = Record::fp8_576, .data = memory, .pages = 2, .page_size = 4}; }
CacheView planar() {
    return {.record = Record::fp8_v4, .form = RecordForm::planar, .data = memory, .pages = 2, .page_size = 4};
}
CacheView split() {
    return {.record = Record::bf16, .data = memory, .rope = memory + (1 << 15), .pages = 2, .page_size = 4};
}

struct Refused {
    std::string what;
    std::function<CacheView()> base;
    std::function<void(CacheView&)> spoil;
    std::string argument;  ///< without "cache."
    std::string mentions;
};

void expect_refused(const Refused& refused) {
    CacheView cache = refused.base();
    EXPECT_NO_THROW(validate(cache, "cache")) << refused.what << ": before it is spoilt";
    refused.spoil(cache);
    try {
        validate(cache, "cache");
        ADD_FAILURE() << refused.what << ": accepted";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::invalid_argument) << refused.what;
        EXPECT_EQ(error.argument(), "cache." + refused.argument) << refused.what << ": " << error.what();
        EXPECT_NE(std::string(error.what()).find(refused.mentions), std::string::npos)
            << refused.what << ": '" << error.what() << "' does not mention " << refused.mentions;
    }
}

constexpr std::int64_t huge = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t most_slots = std::numeric_limits<std::int32_t>::max();
const std::int64_t flat_bytes = layout_of(Record::fp8_576).record_bytes;
const std::int64_t planar_bytes = layout_of(Record::fp8_v4).record_bytes;

TEST(ValidateCache, RefusesUnknownRecordsAndForms) {
    expect_refused({"record 9", flat, [](auto& c) { c.record = static_cast<Record>(9); }, "record", "9"});
    expect_refused({"form 7", flat, [](auto& c) { c.form = static_cast<RecordForm>(7); }, "form", "7"});
    for (const RecordLayout& layout : record_layouts)
        for (RecordForm form : {RecordForm::contiguous, RecordForm::planar}) {
            CacheView cache{.record = layout.record, .form = form, .data = memory, .pages = 1, .page_size = 2};
            if (form == RecordForm::planar ? layout.has_planar : layout.has_contiguous)
                EXPECT_NO_THROW(validate(cache, "cache")) << to_string(layout.record);
            else
                EXPECT_THROW(validate(cache, "cache"), Error) << to_string(layout.record);
        }
}

TEST(ValidateCache, RefusesCountsOutsideTheirRange) {
    expect_refused({"negative pages", flat, [](auto& c) { c.pages = -1; }, "pages", "-1"});
    expect_refused({"huge pages", flat, [](auto& c) { c.pages = huge; }, "pages", "0 .. "});
    expect_refused({"no page_size", flat, [](auto& c) { c.page_size = 0; }, "page_size", "1 .. "});
    expect_refused({"negative page_size", flat, [](auto& c) { c.page_size = -64; }, "page_size", "-64"});
    expect_refused({"huge page_size", flat, [](auto& c) { c.page_size = huge; }, "page_size", "1 .. "});
    expect_refused({"slots_per_page below", flat, [](auto& c) { c.slots_per_page = 3; }, "slots_per_page", "4"});
    expect_refused({"negative slots_per_page", flat, [](auto& c) { c.slots_per_page = -4; }, "slots_per_page", "-4"});
    expect_refused({"huge slots_per_page", flat, [](auto& c) { c.slots_per_page = huge; }, "slots_per_page", "0 .. "});
    expect_refused({"planar gap", planar, [](auto& c) { c.slots_per_page = 5; }, "slots_per_page", "planar"});
    expect_refused(
        {"too many slots", flat, [](auto& c) { c.pages = (most_slots + 1) / 4; }, "pages", std::to_string(most_slots)});
    expect_refused({"too many slots by the gap", flat, [](auto& c) { c.pages = 3, c.slots_per_page = most_slots / 2; },
                    "pages", "page_size <="});
}

TEST(ValidateCache, AcceptsTheLargestCache) {
    CacheView cache = flat();
    cache.page_size = 1;
    cache.pages = most_slots;
    EXPECT_NO_THROW(validate(cache, "cache"));
    EXPECT_EQ(cache.num_slots(), most_slots);
    cache.pages = 1;
    cache.page_size = most_slots;
    EXPECT_NO_THROW(validate(cache, "cache"));
}

TEST(ValidateCache, ContiguousStrideIsWholeSlots) {
    for (std::int64_t odd : {100, 288, -100, 1}) {
        const auto spoil = [&](auto& c) { c.page_stride_bytes = 4 * flat_bytes + odd; };
        expect_refused({"stride + " + std::to_string(odd), flat, spoil, "page_stride_bytes", "slots_per_page"});
    }
    expect_refused({"whole records without slots_per_page", flat, [](auto& c) { c.page_stride_bytes = 6 * flat_bytes; },
                    "page_stride_bytes", "pass slots_per_page = 6"});
    expect_refused({"less than a page", flat, [](auto& c) { c.page_stride_bytes = 3 * flat_bytes; },
                    "page_stride_bytes", std::to_string(4 * flat_bytes)});
    expect_refused({"negative", flat, [](auto& c) { c.page_stride_bytes = -flat_bytes; }, "page_stride_bytes", "-"});
    expect_refused(
        {"split", split, [](auto& c) { c.page_stride_bytes = 4 * 1024; }, "page_stride_bytes", "two tensors"});

    CacheView cache = flat();
    cache.page_stride_bytes = 4 * flat_bytes;
    EXPECT_NO_THROW(validate(cache, "cache"));
    cache.slots_per_page = 6;
    cache.page_stride_bytes = 6 * flat_bytes;
    EXPECT_NO_THROW(validate(cache, "cache"));
    cache.pages = 1;
    cache.page_stride_bytes = 13;
    EXPECT_NO_THROW(validate(cache, "cache")) << "the stride of a single page means nothing";
}

TEST(ValidateCache, PlanarStrideHoldsAPageAndIsAligned) {
    const std::string page = std::to_string(4 * planar_bytes);
    for (std::int64_t stride : {4 * planar_bytes - 16, std::int64_t{16}, std::int64_t{-4096}})
        expect_refused({"stride " + std::to_string(stride), planar, [&](auto& c) { c.page_stride_bytes = stride; },
                        "page_stride_bytes", page});
    expect_refused({"8-byte stride of an even page", planar,
                    [](auto& c) { c.page_stride_bytes = 4 * planar_bytes + 8; }, "page_stride_bytes",
                    "multiple of 16"});
    expect_refused({"4-byte stride of an odd page", planar,
                    [](auto& c) { c.page_size = 3, c.page_stride_bytes = 3 * planar_bytes + 4; }, "page_stride_bytes",
                    "multiple of 8"});
    expect_refused({"8-byte stride of 16-byte pages", planar,
                    [](auto& c) {
                        c.record = Record::fp8_v41, c.page_size = 3;
                        c.page_stride_bytes = 3 * layout_of(Record::fp8_v41).record_bytes + 8;
                    },
                    "page_stride_bytes", "multiple of 16"});
    expect_refused({"stride that overflows", planar,
                    [](auto& c) { c.pages = 9, c.page_stride_bytes = huge / 8 / 16 * 16; }, "page_stride_bytes",
                    "2^63"});
    CacheView cache = planar();
    cache.page_size = 3;
    EXPECT_NO_THROW(validate(cache, "cache")) << "a dense odd page is 8-byte aligned";
    cache.page_stride_bytes = 3 * planar_bytes + 8;
    EXPECT_NO_THROW(validate(cache, "cache")) << "a padded stride";
    cache.pages = 1;
    cache.page_stride_bytes = -5;
    EXPECT_NO_THROW(validate(cache, "cache")) << "the stride of a single page means nothing";
}

TEST(ValidateCache, RefusesPointersThatCannotBe) {
    expect_refused({"null", flat, [](auto& c) { c.data = nullptr; }, "data", "null"});
    expect_refused({"8-byte aligned", flat, [](auto& c) { c.data += 8; }, "data", "16-byte"});
    expect_refused({"8-byte aligned rope", split, [](auto& c) { c.rope += 8; }, "rope", "16-byte"});
    expect_refused({"rope inside data", split, [](auto& c) { c.rope = memory + 1024; }, "rope", "data"});
    expect_refused({"rope of a record that has none", flat, [](auto& c) { c.rope = memory + 4096; }, "rope", "fp8"});
    expect_refused({"past the address space", flat,
                    [](auto& c) { c.data = reinterpret_cast<const std::byte*>(~std::uintptr_t{15}); }, "data",
                    "address space"});
    CacheView empty = flat();
    empty.pages = 0;
    empty.data = nullptr;
    EXPECT_NO_THROW(validate(empty, "cache")) << "a cache without pages needs no memory";
}

// ---- arguments of pack and unpack ----

class PackArguments : public testing::Test {
   protected:
    void expect_refused(const std::string& argument, const std::function<void()>& call) {
        std::fill(std::begin(memory), std::end(memory), std::byte{0xA5});
        try {
            call();
            ADD_FAILURE() << argument << ": accepted";
        } catch (const Error& error) {
            EXPECT_EQ(error.argument().substr(0, argument.size()), argument) << error.what();
        }
        for (std::byte byte : memory) ASSERT_EQ(byte, std::byte{0xA5}) << argument << ": written before the refusal";
    }

    MutableCacheView cache_{
        .record = Record::fp8_ds_mla, .data = memory, .pages = 2, .page_size = 4, .slots_per_page = 5};
    std::vector<float> x_ = std::vector<float>(2 * 1024, 1.0F);
    std::vector<std::int64_t> slots_ = {0, 8};
    ConstTensor values_ = dense(x_.data(), DType::f32, {2, 512 + 64});
    ConstTensor list_ = dense(slots_.data(), DType::i64, {2});
};

TEST_F(PackArguments, RefusesSlotsThatTheCacheDoesNotHoldBeforeWriting) {
    for (std::int64_t slot : {std::int64_t{4}, std::int64_t{9}, std::int64_t{1} << 32, huge}) {
        slots_[1] = slot;
        expect_refused("slots[1]", [&] { pack(cache_, values_, list_); });
    }
    slots_[1] = std::numeric_limits<std::int64_t>::min();
    EXPECT_NO_THROW(pack(cache_, values_, list_)) << "negative slots are skipped";
}

TEST_F(PackArguments, RefusesScalesThatCannotBe) {
    cache_.record = Record::fp8_576;
    for (float scale : {0.0F, -1.0F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
        expect_refused("options.k_scale", [&] { pack(cache_, values_, list_, {.k_scale = scale}); });
    expect_refused("options.power_of_two_scales", [&] { pack(cache_, values_, list_, {.power_of_two_scales = true}); });
    for (Record record : {Record::bf16, Record::fp8_ds_mla, Record::nvfp4_ds_mla}) {
        cache_.record = record;
        expect_refused("options.k_scale", [&] { pack(cache_, values_, list_, {.k_scale = 3.0F}); });
    }
}

TEST_F(PackArguments, RefusesTensorsOfTheWrongKind) {
    expect_refused("values", [&] { pack(cache_, dense(x_.data(), DType::f32, {2, 512}), list_); });
    expect_refused("values", [&] { pack(cache_, dense(x_.data(), DType::f32, {3, 512 + 64}), list_); });
    expect_refused("values", [&] { pack(cache_, dense(x_.data(), DType::f16, {2, 512 + 64}), list_); });
    expect_refused("values", [&] { pack(cache_, {}, list_); });
    expect_refused("slots", [&] { pack(cache_, values_, {}); });
    expect_refused("slots", [&] { pack(cache_, values_, dense(slots_.data(), DType::f32, {2})); });
    expect_refused("cache", [&] { pack(cache_, dense(memory + 256, DType::f32, {2, 512 + 64}), list_); });
    const Device gpu{Device::Kind::cuda, 0};
    expect_refused("values", [&] { pack(cache_, dense(x_.data(), DType::f32, {2, 512 + 64}, gpu), list_); });
    cache_.device = gpu;  // where the others are not
    expect_refused("slots", [&] { pack(cache_, values_, list_); });
}

TEST_F(PackArguments, UnpackRefusesOutputsOfTheWrongKind) {
    std::vector<double> y(2 * 1024);
    expect_refused("out", [&] { unpack(cache_, list_, dense(y.data(), DType::f64, {2, 512})); });
    expect_refused("out", [&] { unpack(cache_, list_, dense(y.data(), DType::f16, {2, 512 + 64})); });
    expect_refused("out", [&] { unpack(cache_, list_, dense(memory + 64, DType::f32, {2, 512 + 64})); });
    expect_refused("out", [&] { unpack(cache_, list_, dense<double>(nullptr, DType::f64, {2, 512 + 64})); });
    expect_refused("out", [&] {
        Tensor out = dense(y.data(), DType::f64, {2, 512 + 64});
        out.strides[0] = 512;
        unpack(cache_, list_, out);
    });
    cache_.device = {Device::Kind::cuda, 0};
    expect_refused("slots", [&] { unpack(cache_, list_, dense(y.data(), DType::f64, {2, 512 + 64})); });
}

TEST_F(PackArguments, StridedListsDuplicatesAndBothIntegerTypes) {
    const int dims = 512 + 64;
    std::vector<float> x(3 * 1000, 99.0F);
    for (int row = 0; row < 3; ++row) std::fill_n(x.begin() + row * 1000, dims, static_cast<float>(row + 1));
    ConstTensor values = dense(x.data(), DType::f32, {3, dims});
    values.strides[0] = 1000;
    const std::int32_t every_other[] = {7, 99, -1, 99, 7, 99};  // slots 7, none, 7: the later wins
    ConstTensor slots = dense(every_other, DType::i32, {3});
    slots.strides[0] = 2;
    std::fill(std::begin(memory), std::end(memory), std::byte{0});
    pack(cache_, values, slots);

    std::vector<double> y(3 * 700, -777.0);
    Tensor out = dense(y.data(), DType::f64, {3, dims});
    out.strides[0] = 700;
    unpack(cache_, slots, out);
    for (int i = 0; i < 3 * 700; ++i) {
        const bool outside = i % 700 >= dims;
        ASSERT_NEAR(y[i], outside ? -777.0 : i / 700 == 1 ? 0.0 : 3.0, 1e-6) << "element " << i;
    }
}

TEST_F(PackArguments, NothingToDoIsFine) {
    const Tensor none = dense<double>(nullptr, DType::f64, {0, 512 + 64});
    const ConstTensor no_slots = dense<const std::int32_t>(nullptr, DType::i32, {0});
    EXPECT_NO_THROW(pack(cache_, dense<const float>(nullptr, DType::f32, {0, 512 + 64}), no_slots));
    EXPECT_NO_THROW(unpack(cache_, no_slots, none));
    cache_.pages = 0;
    cache_.data = nullptr;
    std::vector<double> y(2 * (512 + 64), -777.0);
    EXPECT_NO_THROW(unpack(cache_, list_, dense(y.data(), DType::f64, {2, 512 + 64})));
    EXPECT_EQ(y, std::vector<double>(y.size(), 0.0)) << "a cache without pages holds no slot";
}

}  // namespace
}  // namespace sparsemla
