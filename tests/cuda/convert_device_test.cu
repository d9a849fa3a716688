// cuda/device/convert.cuh against the scalar formats: every code, every kind of float, ties and their neighbours.
#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "cuda/device/convert.cuh"
#include "sparsemla/formats.h"
#include "tests/cuda/on_device.h"

namespace sparsemla::test {
namespace {

class ConvertDevice : public OnDevice {};

float value_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
std::uint16_t half_of(std::uint32_t pair, std::size_t i) { return static_cast<std::uint16_t>(pair >> (16 * i)); }

/// The bits of what round_to_f16 gives; NaN is 0x7FFF.
std::uint16_t float_to_f16(float x) {
    if (x != x) return 0x7FFF;
    const float rounded = round_to_f16(x);
    const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
    const float magnitude = std::fabs(rounded);
    if (std::isinf(magnitude)) return sign | 0x7C00;
    if (magnitude < 0x1p-14F) return sign | static_cast<std::uint16_t>(magnitude * 0x1p24F);
    return sign | static_cast<std::uint16_t>((bits_of(magnitude) >> 13) - ((127 - 15) << 10));
}

/// Every upper half of a float (all exponents, NaN and infinities among them), with lower halves at and beside every
/// tie of BF16, FP16 and E4M3, and random ones.
std::vector<float> all_kinds_of_floats() {
    std::vector<float> values;
    std::mt19937 random(1);
    for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
        for (const std::uint32_t lower : {0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7000, 0x7FFF, 0x8000,
                                          0x8001, 0x9000, 0xB000, 0xEFFF, 0xF000, 0xF001, 0xFFFF})
            values.push_back(value_of(upper << 16 | lower));
        values.push_back(value_of(upper << 16 | (random() & 0xFFFF)));
    }
    return values;
}

/// Each value once in x and, of another position, once in y.
std::vector<float2> pairs_of(const std::vector<float>& values) {
    std::vector<float2> pairs;
    for (std::size_t i = 0; i < values.size(); ++i) pairs.push_back({values[i], values[values.size() - 1 - i]});
    return pairs;
}

/// Words whose four bytes run through all codes, each in every place.
std::vector<std::uint32_t> code_words() {
    std::vector<std::uint32_t> words;
    for (std::uint32_t code = 0; code < 256; ++code)
        words.push_back(code | (code * 7 + 3) % 256 << 8 | (code * 11 + 5) % 256 << 16 | (255 - code) << 24);
    return words;
}

/// Equal, the sign of zero included; any NaN for a NaN.
void expect_same_value(float got, float expected, const std::string& what) {
    if (std::isnan(expected))
        EXPECT_TRUE(std::isnan(got)) << what << ": got " << got;
    else
        EXPECT_EQ(bits_of(got), bits_of(expected)) << what << ": got " << got << ", expected " << expected;
}

struct ToF16 {
    __device__ device::TwoPairs operator()(std::uint32_t codes) const { return device::e4m3x4_to_f16(codes); }
};
struct ToBf16 {
    __device__ device::TwoPairs operator()(std::uint32_t codes) const { return device::e4m3x4_to_bf16(codes); }
};

template <class Function, class Decode>
void expect_every_code(const Decode& decode) {
    const std::vector<std::uint32_t> words = code_words();
    const auto halves = map<device::TwoPairs, Function>(words);
    for (std::size_t i = 0; i < words.size(); ++i)
        for (std::size_t byte = 0; byte < 4; ++byte) {
            const auto code = static_cast<std::uint8_t>(words[i] >> (8 * byte));
            const std::uint32_t pair = byte < 2 ? halves[i].low : halves[i].high;
            expect_same_value(decode(half_of(pair, byte % 2)), e4m3_to_float(code),
                              "code " + std::to_string(code) + " in byte " + std::to_string(byte));
        }
}

/// By integers, as decode_wide does: NaN through the other way.
struct ToBf16ByIntegers {
    __device__ device::TwoPairs operator()(std::uint32_t codes) const {
        device::LargestCodes largest;
        const device::TwoPairs halves = device::finite_e4m3x4_to_bf16(codes, device::e4m3_bf16_factor, largest);
        return largest.has_nan() ? device::e4m3x4_to_bf16(codes) : halves;
    }
};
/// Times a scale of BF16, in one product, and in two: x codes, y the scale twice.
struct ToBf16InOneProduct {
    __device__ device::TwoPairs operator()(uint2 words) const {
        device::LargestCodes largest;
        return device::finite_e4m3x4_to_bf16(words.x, device::multiply_bf16x2(words.y, device::e4m3_bf16_factor),
                                             largest);
    }
};
struct ToBf16InTwoProducts {
    __device__ device::TwoPairs operator()(uint2 words) const {
        const device::TwoPairs halves = device::e4m3x4_to_bf16(words.x);
        return {device::multiply_bf16x2(halves.low, words.y), device::multiply_bf16x2(halves.high, words.y)};
    }
};
struct FindsNan {
    __device__ std::uint32_t operator()(std::uint32_t codes) const {
        device::LargestCodes largest;
        device::finite_e4m3x4_to_bf16(codes, device::e4m3_bf16_factor, largest);
        return largest.has_nan() ? 1 : 0;
    }
};

TEST_F(ConvertDevice, EveryE4m3CodeToBf16ByIntegers) {
    expect_every_code<ToBf16ByIntegers>(bf16_to_float);
    std::vector<std::uint32_t> alone;
    for (std::uint32_t code = 0; code < 256; ++code)
        for (int byte = 0; byte < 4; ++byte) alone.push_back(code << (8 * byte));
    const auto found = map<std::uint32_t, FindsNan>(alone);
    for (std::size_t i = 0; i < alone.size(); ++i) EXPECT_EQ(found[i] != 0, (i / 4 & 0x7F) == 0x7F) << i / 4;
}

// Every code with every UE8M0 and E4M3 scale below 2^8, the signs of zeros included.
TEST_F(ConvertDevice, EveryScaleInOneProduct) {
    std::vector<uint2> words;
    for (std::uint32_t scale = 0; scale < 512; ++scale) {
        const auto code = static_cast<std::uint8_t>(scale);
        const float value = scale < 256 ? ue8m0_to_float(code) : e4m3_to_float(code);
        if (!(std::abs(value) < 256)) continue;
        for (std::uint32_t magnitude = 0; magnitude < 0x7F; ++magnitude) {  // 0x7F is NaN
            const std::uint32_t codes = magnitude * 0x01000001 | (magnitude | 0x80) * 0x00010100;
            words.push_back({codes, float_to_bf16(value) * 0x10001U});
        }
    }
    const auto one = map<device::TwoPairs, ToBf16InOneProduct>(words);
    const auto two = map<device::TwoPairs, ToBf16InTwoProducts>(words);
    for (std::size_t i = 0; i < words.size(); ++i) {
        ASSERT_EQ(one[i].low, two[i].low) << std::hex << "codes " << words[i].x << ", scale " << words[i].y;
        ASSERT_EQ(one[i].high, two[i].high) << std::hex << "codes " << words[i].x << ", scale " << words[i].y;
    }
}

TEST_F(ConvertDevice, EveryE4m3CodeToF16) { expect_every_code<ToF16>(f16_to_float); }
TEST_F(ConvertDevice, EveryE4m3CodeToBf16) { expect_every_code<ToBf16>(bf16_to_float); }

struct ToE4m3 {
    __device__ std::uint16_t operator()(float2 pair) const { return device::f32x2_to_e4m3x2(pair.x, pair.y); }
};
struct ToE4m3AsF16 {
    __device__ std::uint32_t operator()(float2 pair) const { return device::f32x2_to_e4m3_as_f16x2(pair.x, pair.y); }
};
struct ToF16Pair {
    __device__ std::uint32_t operator()(float2 pair) const { return device::f32x2_to_f16x2(pair.x, pair.y); }
};
struct ToBf16Pair {
    __device__ std::uint32_t operator()(float2 pair) const { return device::f32x2_to_bf16x2(pair.x, pair.y); }
};

/// x of every pair must become encode(x) in the low half of the result, y encode(y) above it.
template <class Packed, class Function, class Encode>
void expect_packed(const Encode& encode) {
    constexpr int bits = 4 * sizeof(Packed);
    const std::vector<float2> pairs = pairs_of(all_kinds_of_floats());
    const std::vector<Packed> packed = map<Packed, Function>(pairs);
    int failures = 0;
    for (std::size_t i = 0; i < pairs.size() && failures < 10; ++i) {
        const auto expected = static_cast<Packed>(encode(pairs[i].x) | static_cast<Packed>(encode(pairs[i].y)) << bits);
        if (packed[i] == expected) continue;
        ++failures;
        ADD_FAILURE() << std::hex << "of 0x" << bits_of(pairs[i].x) << " and 0x" << bits_of(pairs[i].y) << ": got 0x"
                      << packed[i] << ", expected 0x" << expected;
    }
}

TEST_F(ConvertDevice, E4m3RoundsToEvenAndSaturates) { expect_packed<std::uint16_t, ToE4m3>(float_to_e4m3); }
TEST_F(ConvertDevice, F16RoundsToEven) { expect_packed<std::uint32_t, ToF16Pair>(float_to_f16); }
TEST_F(ConvertDevice, Bf16RoundsToEven) { expect_packed<std::uint32_t, ToBf16Pair>(float_to_bf16); }

TEST_F(ConvertDevice, ValuesOfNote) {
    const std::vector<float2> pairs = {{448.0F, -448.0F},     {464.0F, 1e30F},        {INFINITY, -INFINITY},
                                       {NAN, -NAN},           {0.0F, -0.0F},          {0x1p-9F, 0x1p-10F},
                                       {0x1.8p-9F, 0x1p-11F}, {17.0F, 19.0F},         {65519.0F, 65520.0F},
                                       {0x1p-24F, 0x1p-25F},  {0x1.8p-24F, 0x1p-26F}, {1e-40F, -1e-40F}};
    const auto codes = map<std::uint16_t, ToE4m3>(pairs);
    EXPECT_EQ(codes, (std::vector<std::uint16_t>{0xFE7E, 0x7E7E, 0xFE7E, 0x7F7F, 0x8000, 0x0001, 0x0002, 0x5A58, 0x7E7E,
                                                 0x0000, 0x0000, 0x8000}));
    const auto halves = map<std::uint32_t, ToF16Pair>(pairs);
    EXPECT_EQ(halves[3], 0x7FFF7FFFU);
    EXPECT_EQ(halves[8], 0x7C007BFFU);
    EXPECT_EQ(halves[9], 0x00000001U);
    EXPECT_EQ(halves[10], 0x00000002U);
    EXPECT_EQ((map<std::uint32_t, ToBf16Pair>(pairs)[3]), 0x7FFF7FFFU);
}

TEST_F(ConvertDevice, E4m3HandedOnAsF16) {
    const std::vector<float2> pairs = pairs_of(all_kinds_of_floats());
    const auto halves = map<std::uint32_t, ToE4m3AsF16>(pairs);
    for (std::size_t i = 0; i < pairs.size() && !HasFailure(); ++i) {
        expect_same_value(f16_to_float(half_of(halves[i], 0)), e4m3_to_float(float_to_e4m3(pairs[i].x)), "x");
        expect_same_value(f16_to_float(half_of(halves[i], 1)), e4m3_to_float(float_to_e4m3(pairs[i].y)), "y");
    }
}

struct F16ToBf16 {
    __device__ std::uint32_t operator()(std::uint32_t halves) const { return device::f16x2_to_bf16x2(halves); }
};

TEST_F(ConvertDevice, EveryF16ToBf16) {
    std::vector<std::uint32_t> words;
    for (std::uint32_t half = 0; half < 0x10000; ++half) words.push_back(half | (0xFFFF - half) << 16);
    const auto pairs = map<std::uint32_t, F16ToBf16>(words);
    for (std::size_t i = 0; i < words.size() && !HasFailure(); ++i)
        for (std::size_t part = 0; part < 2; ++part)
            EXPECT_EQ(half_of(pairs[i], part), float_to_bf16(f16_to_float(half_of(words[i], part))))
                << "half " << half_of(words[i], part);
}

struct TransposePairs {
    __device__ std::uint32_t operator()(std::uint32_t word) const { return device::transpose_byte_pairs(word); }
};

TEST_F(ConvertDevice, TransposesBytePairs) {
    std::vector<std::uint32_t> words = {0x04030201, 0xFF00FF00, 0x000000FF, 0x0000FF00, 0x00FF0000, 0xFF000000};
    std::mt19937 random(2);
    for (int i = 0; i < 1000; ++i) words.push_back(random());
    const auto transposed = map<std::uint32_t, TransposePairs>(words);
    EXPECT_EQ(transposed[0], 0x04020301U);
    for (std::size_t i = 0; i < words.size(); ++i)
        EXPECT_EQ(transposed[i], (words[i] & 0xFF0000FF) | (words[i] >> 8 & 0xFF00) | (words[i] & 0xFF00) << 8);
}

// ---------------------------------------------------------------------------------------------------------------------
struct Exp2 {
    __device__ float operator()(float x) const { return device::exp2_approximate(x); }
};
struct Log2 {
    __device__ float operator()(float x) const { return device::log2_approximate(x); }
};
struct Reciprocal {
    __device__ float operator()(float x) const { return device::reciprocal_approximate(x); }
};

constexpr double smallest_normal = 0x1p-126;

/// Floats between low and high, evenly spread, and their neighbours.
std::vector<float> floats_between(float low, float high, int count) {
    std::vector<float> values;
    for (int i = 0; i <= count; ++i) {
        const float x = low + (high - low) * (static_cast<float>(i) / static_cast<float>(count));
        values.insert(values.end(), {x, std::nextafter(x, high), std::nextafter(x, low)});
    }
    return values;
}

TEST_F(ConvertDevice, Exp2WithinItsBound) {
    std::vector<float> values = floats_between(-160.0F, 127.99F, 100000);
    for (const float x : floats_between(-2.0F, 2.0F, 20000)) values.push_back(x);
    const std::vector<float> powers = map<float, Exp2>(values);
    double worst = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        const double expected = std::exp2(double{values[i]});
        const double got = powers[i];
        if (expected < smallest_normal * (1 + 0x1p-22)) {
            EXPECT_TRUE(got == 0 || std::fabs(got - smallest_normal) <= 0x1p-148) << "2^" << values[i] << " = " << got;
            EXPECT_FALSE(std::signbit(powers[i]));
            continue;
        }
        worst = std::max(worst, std::fabs(got - expected) / expected);
    }
    EXPECT_LE(worst, 0x1p-22);
    const auto special = map<float, Exp2>(std::vector<float>{-INFINITY, INFINITY, NAN, -0.0F, 0.0F, 1e-40F, -1e-40F,
                                                             -200.0F, 128.0F, 1.0F, -1.0F, 100.0F, -126.0F});
    EXPECT_EQ(bits_of(special[0]), 0U);  // a masked column weighs +0
    EXPECT_EQ(special[1], INFINITY);
    EXPECT_TRUE(std::isnan(special[2]));
    for (std::size_t i = 3; i < 7; ++i) EXPECT_EQ(special[i], 1.0F);
    EXPECT_EQ(bits_of(special[7]), 0U);
    EXPECT_EQ(special[8], INFINITY);
    EXPECT_EQ(special[9], 2.0F);  // whole powers are exact: a maximum that rises by one halves the older sums
    EXPECT_EQ(special[10], 0.5F);
    EXPECT_EQ(special[11], 0x1p100F);
    EXPECT_EQ(special[12], 0x1p-126F);
}

TEST_F(ConvertDevice, ReciprocalWithinAUnitInTheLastPlace) {
    std::vector<float> values = floats_between(1.0F, 2.0F, 50000);
    std::mt19937 random(3);
    for (int i = 0; i < 100000; ++i)
        values.push_back(value_of((random() & 0x807FFFFF) | (1 + random() % 253) << 23));  // normal, its reciprocal too
    const std::vector<float> reciprocals = map<float, Reciprocal>(values);
    for (std::size_t i = 0; i < values.size() && !HasFailure(); ++i) {
        const double expected = 1 / double{values[i]};
        const double unit = std::exp2(std::floor(std::log2(std::fabs(expected))) - 23);
        if (std::fabs(expected) < smallest_normal) continue;
        EXPECT_LE(std::fabs(double{reciprocals[i]} - expected), unit) << "1 / " << values[i];
    }
    const auto special = map<float, Reciprocal>(
        std::vector<float>{0.0F, -0.0F, 1e-40F, -1e-40F, INFINITY, -INFINITY, NAN, 0x1.8p126F, 1.0F, 0x1p-100F, -4.0F});
    EXPECT_EQ(special[0], INFINITY);
    EXPECT_EQ(special[1], -INFINITY);
    EXPECT_EQ(special[2], INFINITY);
    EXPECT_EQ(special[3], -INFINITY);
    EXPECT_EQ(bits_of(special[4]), 0U);
    EXPECT_EQ(bits_of(special[5]), 0x80000000U);
    EXPECT_TRUE(std::isnan(special[6]));
    EXPECT_EQ(special[7], 0.0F);
    EXPECT_EQ(special[8], 1.0F);
    EXPECT_EQ(special[9], 0x1p100F);
    EXPECT_EQ(special[10], -0.25F);
}

TEST_F(ConvertDevice, Log2WithinItsBound) {
    std::vector<float> values = floats_between(0.25F, 4.0F, 100000);
    std::mt19937 random(4);
    for (int i = 0; i < 100000; ++i) values.push_back(value_of((random() & 0x7FFFFF) | (1 + random() % 254) << 23));
    const std::vector<float> logarithms = map<float, Log2>(values);
    for (std::size_t i = 0; i < values.size() && !HasFailure(); ++i) {
        const double expected = std::log2(double{values[i]});
        const bool near_one = values[i] > 0.5F && values[i] < 2.0F;
        EXPECT_LE(std::fabs(double{logarithms[i]} - expected), near_one ? 0x1p-22 : 0x1p-22 * std::fabs(expected))
            << "log2 of " << values[i];
    }
    const auto special = map<float, Log2>(std::vector<float>{0.0F, -0.0F, 1e-40F, INFINITY, -1.0F, NAN, 1.0F});
    for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(special[i], -INFINITY);
    EXPECT_EQ(special[3], INFINITY);
    EXPECT_TRUE(std::isnan(special[4]));
    EXPECT_TRUE(std::isnan(special[5]));
    EXPECT_EQ(special[6], 0.0F);
}

}  // namespace
}  // namespace sparsemla::test
