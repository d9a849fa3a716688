// pack and unpack: bytes derived by hand, random data against the textbook writer and reader, and the edge rules.
#include "sparsemla/records.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/one_record.h"
#include "tests/textbook_record.h"

namespace sparsemla {
namespace {

using test::Layout;
using test::OneRecord;
using test::RecordBytes;
using test::TextbookReader;
using test::TextbookWriter;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

void put_f32(std::vector<std::uint8_t>& bytes, int at, float value) { std::memcpy(bytes.data() + at, &value, 4); }

testing::AssertionResult same_bytes(const std::vector<std::uint8_t>& got, const std::vector<std::uint8_t>& expected) {
    if (got.size() != expected.size()) return testing::AssertionFailure() << got.size() << " bytes";
    for (std::size_t i = 0; i < got.size(); ++i)
        if (got[i] != expected[i])
            return testing::AssertionFailure()
                   << "byte " << i << ": got " << std::hex << int{got[i]} << ", expected " << int{expected[i]};
    return testing::AssertionSuccess();
}

class EveryForm : public testing::TestWithParam<Layout> {
   protected:
    const RecordLayout& layout() const { return layout_of(GetParam().record); }
};

INSTANTIATE_TEST_SUITE_P(Records, EveryForm, testing::ValuesIn(test::layouts()),
                         [](const auto& form) { return test::name(form.param); });

// ---- layouts ----

TEST(Layouts, HaveTheSizesOfTheTextbook) {
    for (const RecordLayout& layout : record_layouts) {
        const std::vector<float> zeros(layout.d_qk());
        const RecordBytes bytes = TextbookWriter(zeros, {}).write(layout.record);
        EXPECT_EQ(layout.record_bytes, static_cast<int>(bytes.together().size())) << to_string(layout.record);
        if (layout.has_planar) {
            EXPECT_EQ(layout.data_bytes, static_cast<int>(bytes.data.size())) << to_string(layout.record);
            EXPECT_EQ(layout.scale_bytes, static_cast<int>(bytes.scales.size())) << to_string(layout.record);
        }
    }
}

TEST(Layouts, AreFoundByNameAndSize) {
    for (const RecordLayout& layout : record_layouts) {
        EXPECT_EQ(&find_layout(layout.name, layout.record_bytes), &layout);
        if (layout.name != "fp8") {
            EXPECT_EQ(&find_layout(layout.name, 0), &layout);
        }
    }
}

TEST(Layouts, RefuseUnknownNamesAmbiguousNamesAndForeignSizes) {
    struct Wrong {
        std::string name;
        std::int64_t bytes;
    };
    for (const Wrong& wrong : {Wrong{"fp8", 0}, Wrong{"nvfp4_ds_mla", 432}, Wrong{"nvfp4_ds_mla", 304}, Wrong{"", 0},
                               Wrong{"FP8_DS_MLA", 0}, Wrong{"bf16", -1}}) {
        try {
            find_layout(wrong.name, wrong.bytes);
            ADD_FAILURE() << wrong.name << " of " << wrong.bytes << " bytes was found";
        } catch (const Error& error) {
            EXPECT_EQ(error.argument(), "record");
            for (const RecordLayout& layout : record_layouts)
                EXPECT_NE(std::string(error.what()).find(to_string(layout.record)), std::string::npos) << error.what();
        }
    }
}

// ---- bytes derived by hand ----

TEST(GoldenBytes, Bf16) {
    OneRecord record({Record::bf16});
    std::vector<float> x(512 + 64);
    x[0] = 1, x[511] = -2, x[512] = 0x1.01p0F /* a tie, to even */, x[513] = infinity, x[575] = -0.0F;
    std::vector<std::uint8_t> bytes(2 * (512 + 64));
    bytes[0] = 0x80, bytes[1] = 0x3F, bytes[2 * 511 + 1] = 0xC0, bytes[2 * 512] = 0x80, bytes[2 * 512 + 1] = 0x3F;
    bytes[2 * 513] = 0x80, bytes[2 * 513 + 1] = 0x7F, bytes[2 * 575 + 1] = 0x80;
    EXPECT_TRUE(same_bytes(record.pack(x), bytes));
}

TEST(GoldenBytes, FlatFp8DividesByTheScaleOfTheSource) {
    OneRecord record({Record::fp8_576});
    std::vector<float> x(512 + 64);
    x[0] = 1, x[1] = -2, x[511] = 448, x[512] = 0.5F, x[513] = 1000, x[575] = -0.0F;
    std::vector<std::uint8_t> bytes(512 + 64);
    bytes[0] = 0x38, bytes[1] = 0xC0, bytes[511] = 0x7E, bytes[512] = 0x30, bytes[513] = 0x7E, bytes[575] = 0x80;
    EXPECT_TRUE(same_bytes(record.pack(x), bytes));
    bytes[0] = 0x40, bytes[1] = 0xC8, bytes[512] = 0x38;  // twice as much
    EXPECT_TRUE(same_bytes(record.pack(x, {.k_scale = 0.5F}), bytes));
}

TEST(GoldenBytes, Fp8DsMla) {
    OneRecord record({Record::fp8_ds_mla});
    std::vector<float> x(512 + 64);
    x[0] = 448, x[1] = 1;                                              // d = 1
    x[128] = 336, x[129] = 0.75F;                                      // d = 0.75, no power of two; group 2 stays zero
    x[384] = nan_value, x[385] = -896, x[386] = infinity, x[387] = 2;  // d = 2
    x[512] = 1, x[575] = -1;
    std::vector<std::uint8_t> bytes(512 + 4 * 4 + 2 * 64);
    bytes[0] = 0x7E, bytes[1] = 0x38, bytes[128] = 0x7E, bytes[129] = 0x38;
    bytes[384] = 0x7F, bytes[385] = 0xFE, bytes[386] = 0x7E, bytes[387] = 0x38;
    put_f32(bytes, 512, 1.0F), put_f32(bytes, 516, 0.75F), put_f32(bytes, 520, 0x1p-126F), put_f32(bytes, 524, 2.0F);
    const int rope = 512 + 4 * 4;
    bytes[rope] = 0x80, bytes[rope + 1] = 0x3F, bytes[rope + 2 * 63] = 0x80, bytes[rope + 2 * 63 + 1] = 0xBF;
    EXPECT_TRUE(same_bytes(record.pack(x), bytes));

    bytes[128] = 0x7A, bytes[129] = 0x34;                      // 336 lies between 320 and 352; 0.75
    put_f32(bytes, 516, 1.0F), put_f32(bytes, 520, 0x1p-13F);  // 2^-13 is the first power of two above 1e-4
    EXPECT_TRUE(same_bytes(record.pack(x, {.power_of_two_scales = true}), bytes));
}

TEST(GoldenBytes, Fp8V4) {
    OneRecord record({Record::fp8_v4, RecordForm::planar});
    std::vector<float> x(512);
    x[0] = 448, x[64] = 449, x[447] = -7 * 0x1p-14F, x[448] = 1, x[511] = -1;
    std::vector<std::uint8_t> bytes(448 + 2 * 64 + 8);
    bytes[0] = 0x7E, bytes[64] = 0x76 /* 449 / 2 is nearest to 224 */, bytes[447] = 0xC6 /* -3.5 */;
    bytes[448] = 0x80, bytes[449] = 0x3F, bytes[448 + 2 * 63] = 0x80, bytes[448 + 2 * 63 + 1] = 0xBF;
    const std::vector<std::uint8_t> scales = {127, 128, 114, 114, 114, 114, 114, 0};  // 2^-13 = code 114; the pad byte
    std::copy(scales.begin(), scales.end(), bytes.end() - 8);
    EXPECT_TRUE(same_bytes(record.pack(x), bytes));
}

TEST(GoldenBytes, Fp8V41) {
    for (RecordForm form : {RecordForm::planar, RecordForm::contiguous}) {
        OneRecord record({Record::fp8_v41, form});
        std::vector<float> x(512);
        x[0] = 448, x[32] = 0x1p-20F, x[511] = -448 * 0x1p-127F;
        std::vector<std::uint8_t> bytes(512 + 16);
        bytes[0] = 0x7E, bytes[32] = 0x78 /* 2^-20 / 2^-28 = 256 */, bytes[511] = 0xFE;
        bytes[512] = 127, bytes[513] = 127 - 28;  // the last group's scale is 2^-127: code 0, as for zeros
        EXPECT_TRUE(same_bytes(record.pack(x), bytes));
    }
}

TEST(GoldenBytes, Nvfp4V41) {
    for (RecordForm form : {RecordForm::planar, RecordForm::contiguous}) {
        OneRecord record({Record::nvfp4_v41, form});
        std::vector<float> x(512);
        x[0] = 6, x[1] = -3, x[16] = 6 * 1.0625F, x[33] = -0.0F, x[510] = 12000, x[511] = -0.5F;
        std::vector<std::uint8_t> bytes(512 / 2 + 32);
        bytes[0] = 0xD7, bytes[8] = 0x07 /* 6.375 / 1 saturates */, bytes[16] = 0x80, bytes[255] = 0x87;
        std::fill(bytes.begin() + 256, bytes.end(), std::uint8_t{0x01});  // zeros: 2^-9
        bytes[256] = 0x38, bytes[257] = 0x38 /* 1.0625 is a tie, to even */, bytes[256 + 31] = 0x7E;
        EXPECT_TRUE(same_bytes(record.pack(x), bytes));
    }
}

TEST(GoldenBytes, Nvfp4DsMla) {
    OneRecord record({Record::nvfp4_ds_mla});
    std::vector<float> x(512 + 64);
    x[0] = 6, x[1] = -3;
    x[16] = 6.01F;        // group 1: d = 1.125, the code above 1.0017
    x[6 * 16 + 15] = -3;  // group 6: d = 0.5
    x[31 * 16] = nan_value, x[31 * 16 + 1] = 5;
    x[512] = 1, x[575] = -500;
    std::vector<std::uint8_t> bytes(512 / 2 + 64 + 32);
    bytes[0] = 0xD7, bytes[8] = 0x07 /* 6.01 / 1.125 = 5.34 */, bytes[6 * 8 + 7] = 0xF0;
    bytes[256] = 0x38, bytes[256 + 63] = 0xFE;
    std::fill(bytes.begin() + 320, bytes.end(), std::uint8_t{0x01});
    bytes[320] = 0x38, bytes[320 + 8] = 0x39, bytes[320 + 16 + 1] = 0x30, bytes[320 + 24 + 7] = 0x7F;
    EXPECT_TRUE(same_bytes(record.pack(x), bytes));
}

TEST(GoldenBytes, Nvfp4DsMlaPermutesItsScales) {
    OneRecord record({Record::nvfp4_ds_mla});
    for (int group = 0; group < 32; ++group) {
        std::vector<float> x(512 + 64);
        x[16 * group + 3] = 6 * 2;  // d = 2, code 0x40; all other groups have 0x01
        const std::vector<std::uint8_t> bytes = record.pack(x);
        for (int at = 0; at < 32; ++at) {
            const bool here = at == 8 * (group % 4) + group / 4;
            EXPECT_EQ(bytes[320 + at], here ? 0x40 : 0x01) << "group " << group << ", scale byte " << at;
        }
        EXPECT_EQ(record.unpack(), std::vector<double>(x.begin(), x.end())) << "group " << group;
    }
}

// ---- random data ----

/// Values of all magnitudes with the awkward ones among them: zeros of both signs, whole groups of them, subnormals,
/// exact powers of two times 448, ties, and (on request) NaN and infinity.
std::vector<float> awkward_values(std::mt19937& random, int dims, bool non_finite) {
    std::vector<float> x(dims);
    const int spread = static_cast<int>(random() % 3) * 20;
    for (float& value : x) {
        value = (static_cast<float>(random() % 20001) - 10000) * 0x1p-10F;
        value = std::ldexp(value, static_cast<int>(random() % (spread + 4)) - spread / 2);
        if (random() % 16 == 0) value = std::round(value * 2) / 2;
    }
    const auto some = [&](float value, int copies) {
        for (int i = 0; i < copies; ++i) x[random() % dims] = random() % 2 == 0 ? value : -value;
    };
    some(0.0F, 20);
    some(std::ldexp(448.0F, static_cast<int>(random() % 40) - 20), 1);
    if (random() % 4 == 0) some(std::numeric_limits<float>::max(), 1);
    if (random() % 2 == 0) some(0x1p-140F, 3);
    const int zero_group = static_cast<int>(random() % 4) * 128;
    if (random() % 2 == 0) std::fill_n(x.begin() + zero_group, 128, 0.0F);
    if (random() % 4 == 0) std::fill_n(x.begin() + zero_group, 128, -0x1p-135F);
    if (non_finite) some(nan_value, 2), some(infinity, 2);
    return x;
}

TEST_P(EveryForm, PackEqualsTheTextbookByteByByte) {
    OneRecord record(GetParam());
    std::vector<PackOptions> options(1);
    if (layout().takes_k_scale)
        for (float k_scale : {0.75F, 1.3F, 3.7e-3F, 1 / 448.0F, std::numeric_limits<float>::min(), 0x1p-149F, 3e38F})
            options.push_back({.k_scale = k_scale});
    if (layout().scale_rule == ScaleRule::amax_f32) options.push_back({.power_of_two_scales = true});
    for (std::uint32_t seed = 1; seed <= 12; ++seed) {
        std::mt19937 random(seed);
        const std::vector<float> x = awkward_values(random, layout().d_qk(), seed % 3 == 0);
        for (const PackOptions& option : options)
            ASSERT_TRUE(
                same_bytes(record.pack(x, option), TextbookWriter(x, option).write(GetParam().record).together()))
                << "seed " << seed << ", k_scale " << option.k_scale << ", pow2 " << option.power_of_two_scales;
    }
}

TEST_P(EveryForm, Bf16ValuesPackAsTheFloatsTheyAre) {
    OneRecord record(GetParam());
    std::mt19937 random(5);
    std::vector<std::uint16_t> bits(layout().d_qk());
    std::vector<float> x;
    for (std::uint16_t& value : bits) {
        value = static_cast<std::uint16_t>(0x3C00 + random() % 0x600 + random() % 2 * 0x8000);
        x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16));
    }
    const std::vector<std::uint8_t> from_floats = record.pack(x);
    EXPECT_TRUE(same_bytes(record.pack(dense(bits.data(), DType::bf16, {1, layout().d_qk()})), from_floats));
}

/// Bit-exact, with all NaN alike.
testing::AssertionResult same_values(const std::vector<double>& got, const std::vector<double>& expected) {
    if (got.size() != expected.size()) return testing::AssertionFailure() << got.size() << " values";
    for (std::size_t i = 0; i < got.size(); ++i) {
        const bool both_nan = std::isnan(got[i]) && std::isnan(expected[i]);
        if (!both_nan && (got[i] != expected[i] || std::signbit(got[i]) != std::signbit(expected[i])))
            return testing::AssertionFailure()
                   << "dim " << i << ": got " << std::hexfloat << got[i] << ", expected " << expected[i];
    }
    return testing::AssertionSuccess();
}

testing::AssertionResult reads_as_the_textbook(OneRecord& record, const RecordBytes& bytes) {
    record.set(bytes);
    const std::vector<double> expected = TextbookReader(bytes).read(record.record());
    if (testing::AssertionResult exact = same_values(record.unpack(), expected); !exact) return exact << " (f64)";
    std::vector<double> rounded;
    for (double value : expected) rounded.push_back(static_cast<float>(value));
    return same_values(record.unpack(DType::f32), rounded) << " (f32)";
}

RecordBytes random_bytes(const RecordLayout& layout, std::mt19937& random) {
    const std::vector<float> zeros(layout.d_qk());
    RecordBytes bytes = TextbookWriter(zeros, {}).write(layout.record);
    for (std::uint8_t& byte : bytes.data) byte = static_cast<std::uint8_t>(random());
    for (std::uint8_t& byte : bytes.scales) byte = static_cast<std::uint8_t>(random());
    return bytes;
}

TEST_P(EveryForm, UnpackEqualsTheTextbookForAnyBytes) {
    OneRecord record(GetParam());
    for (std::uint32_t seed = 1; seed <= 40; ++seed) {
        std::mt19937 random(seed);
        ASSERT_TRUE(reads_as_the_textbook(record, random_bytes(layout(), random))) << "seed " << seed;
    }
}

TEST_P(EveryForm, EveryByteValueInEveryPlaceReadsRight) {
    OneRecord record(GetParam());
    std::mt19937 random(3);
    for (int code = 0; code < 256; ++code) {
        RecordBytes bytes = random_bytes(layout(), random);
        for (std::size_t i = 0; i < bytes.data.size(); ++i) bytes.data[i] = static_cast<std::uint8_t>(code + i);
        for (std::size_t i = 0; i < bytes.scales.size(); ++i)
            bytes.scales[i] = static_cast<std::uint8_t>(code + 37 * i);
        ASSERT_TRUE(reads_as_the_textbook(record, bytes)) << "code " << code;
    }
}

TEST(Unpack, TakesAnyFloat32Scale) {
    for (Record name : {Record::fp8_ds_mla, Record::fp8_ds_mla_norope}) {
        OneRecord record({name});
        std::mt19937 random(9);
        for (float scale : {0.75F, 1.3F, 3.7e-3F, 1 / 448.0F, std::numeric_limits<float>::min(), 0x1p-149F, 3e38F,
                            -2.5F, 0.0F, infinity, nan_value}) {
            RecordBytes bytes = random_bytes(layout_of(name), random);
            for (int group = 0; group < 4; ++group) put_f32(bytes.data, 512 + 4 * group, scale);
            EXPECT_TRUE(reads_as_the_textbook(record, bytes)) << to_string(name) << ", scale " << scale;
        }
    }
}

TEST(Unpack, TakesTheExtremesOfUe8m0) {
    for (const Layout& form : test::layouts()) {
        if (layout_of(form.record).scale_encoding != ScaleEncoding::ue8m0) continue;
        OneRecord record(form);
        std::mt19937 random(10);
        for (int code : {0, 1, 126, 127, 128, 253, 254, 255}) {
            RecordBytes bytes = random_bytes(layout_of(form.record), random);
            std::fill(bytes.scales.begin(), bytes.scales.end(), static_cast<std::uint8_t>(code));
            EXPECT_TRUE(reads_as_the_textbook(record, bytes)) << test::name(form) << ", scale code " << code;
        }
    }
}

// ---- rules of the writer, as properties ----

TEST_P(EveryForm, PackedValuesAreWithinHalfAStep) {
    OneRecord record(GetParam());
    const int group_dims = layout().group_dims == 0 ? 512 : layout().group_dims;
    for (std::uint32_t seed = 1; seed <= 20; ++seed) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal(0, 3);
        std::vector<float> x(layout().d_qk());
        for (float& value : x) value = normal(random);
        record.pack(x);
        const std::vector<double> y = record.unpack();
        for (int d = 0; d < layout().d_qk(); ++d) {
            float amax = 0;
            for (int i = d / group_dims * group_dims; i < std::min((d / group_dims + 1) * group_dims, layout().d_qk());
                 ++i)
                amax = std::max(amax, std::fabs(x[i]));
            // Half a step at the top of the group's range: e2m1 1 of 6, plus the 1/16 of its scale's rounding.
            const double bound =
                layout().main.encoding == ValueEncoding::e2m1 ? amax * (1 + 0.0625) / 6 + amax / 16 : amax / 16;
            ASSERT_LE(std::fabs(x[d] - y[d]), bound) << "seed " << seed << ", dim " << d;
        }
    }
}

TEST_P(EveryForm, NanInfinityAndZerosFollowTheRules) {
    OneRecord record(GetParam());
    const int dims = layout().d_qk();
    std::vector<float> x(dims, 2.0F);
    x[5] = nan_value, x[dims - 1] = -nan_value, x[100] = infinity, x[101] = -infinity, x[102] = 0.0F, x[103] = -0.0F;
    record.pack(x);
    const std::vector<double> y = record.unpack();
    const bool whole_groups = layout().main.encoding == ValueEncoding::e2m1;
    for (int d = 0; d < dims; ++d) {
        const bool shares_group = whole_groups && (d / 16 == 0 || (dims == 512 && d / 16 == 31));
        EXPECT_EQ(std::isnan(y[d]), d == 5 || d == dims - 1 || shares_group) << "dim " << d;
    }
    // amax is that of the finite values, so an infinity becomes the largest code: 2 or a little more.
    const bool saturates = layout().main.encoding != ValueEncoding::bf16;
    const double largest = layout().groups() == 0 ? 448.0 : 4.0;
    EXPECT_EQ(std::isfinite(y[100]), saturates);
    EXPECT_GE(y[100], 2.0);
    EXPECT_EQ(y[101], -y[100]);
    if (saturates) {
        EXPECT_LE(y[100], largest);
    }
    EXPECT_TRUE(y[102] == 0 && !std::signbit(y[102]));
    EXPECT_TRUE(y[103] == 0 && std::signbit(y[103]));
}

}  // namespace
}  // namespace sparsemla
