// quantize_query against the definition: the e4m3 code nearest to the float32 quotient, ties to even, saturating.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "sparsemla/formats.h"
#include "sparsemla/records.h"

namespace sparsemla {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr std::uint8_t poison = 0x5A;

/// The magnitudes of all codes but NaN, by the format's definition: exponent field 0 is subnormal, 2^-6 the smallest
/// normal.
std::vector<double> magnitudes() {
    std::vector<double> values;
    for (int code = 0; code < 0x7F; ++code)
        values.push_back(code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10));
    return values;
}

/// The code whose value is nearest to x; of two equally near, the even one. Looks at every magnitude.
std::uint8_t nearest_code(float x) {
    static const std::vector<double> values = magnitudes();
    if (std::isnan(x)) return 0x7F;
    const double magnitude = std::min<double>(std::fabs(x), 2 * values.back());
    int best = 0;
    for (int code = 1; code < 0x7F; ++code) {
        const double nearer = std::fabs(magnitude - values[code]) - std::fabs(magnitude - values[best]);
        if (nearer < 0 || (nearer == 0 && code % 2 == 0)) best = code;
    }
    return static_cast<std::uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

/// [1, 1, n] in, dense, through the library.
std::vector<std::uint8_t> quantise(const std::vector<float>& values, float q_scale) {
    const auto n = static_cast<std::int64_t>(values.size());
    std::vector<std::uint8_t> codes(values.size() + 16, poison);
    quantize_query(dense(static_cast<const void*>(values.data()), DType::f32, {1, 1, n}), q_scale,
                   dense(static_cast<void*>(codes.data()), DType::f8_e4m3, {1, 1, n}));
    EXPECT_EQ(std::vector<std::uint8_t>(codes.begin() + n, codes.end()), std::vector<std::uint8_t>(16, poison));
    codes.resize(values.size());
    return codes;
}

TEST(Quantise, EveryBf16ValueAndScale) {
    std::vector<std::uint16_t> bits(65536);
    for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint16_t>(i);
    std::vector<std::uint8_t> codes(bits.size());
    for (float q_scale : {1.0F, 0.0371F, 3.0F, FLT_MIN, FLT_TRUE_MIN, FLT_MAX}) {
        std::fill(codes.begin(), codes.end(), poison);
        quantize_query(dense(static_cast<const void*>(bits.data()), DType::bf16, {128, 8, 64}), q_scale,
                       dense(static_cast<void*>(codes.data()), DType::f8_e4m3, {128, 8, 64}));
        for (std::size_t i = 0; i < bits.size(); ++i)
            ASSERT_EQ(codes[i], nearest_code(bf16_to_float(bits[i]) / q_scale))
                << "bf16 bits " << i << ", q_scale " << q_scale;
    }
}

TEST(Quantise, TiesAndTheirNeighboursInFloat32) {
    std::vector<float> values{0.0F, infinity, not_a_number, FLT_TRUE_MIN, FLT_MAX, 448, 464, 480, 447.99997F};
    for (std::uint8_t code = 0; code < 0x7E; ++code) {
        const float middle = (e4m3_to_float(code) + e4m3_to_float(code + 1)) / 2;
        for (float value :
             {middle, std::nextafter(middle, 0.0F), std::nextafter(middle, infinity), e4m3_to_float(code)})
            values.push_back(value);
    }
    const std::size_t positive = values.size();
    for (std::size_t i = 0; i < positive; ++i) values.push_back(-values[i]);
    const std::vector<std::uint8_t> codes = quantise(values, 1.0F);
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(codes[i], nearest_code(values[i])) << values[i];
}

TEST(Quantise, TheQuotientIsAFloat32Division) {
    // A multiplication by the reciprocal rounds some of these to the other side of a tie.
    std::mt19937 random(77);
    std::uniform_int_distribution<std::uint32_t> code(0, 0x7D);
    std::uniform_real_distribution<float> scales(1e-3F, 10.0F);
    for (int i = 0; i < 300; ++i) {
        const float q_scale = scales(random);
        std::vector<float> values;
        for (int n = 0; n < 8; ++n) {
            const auto low = static_cast<std::uint8_t>(code(random));
            values.push_back((e4m3_to_float(low) + e4m3_to_float(low + 1)) / 2 * q_scale);
        }
        const std::vector<std::uint8_t> codes = quantise(values, q_scale);
        for (std::size_t n = 0; n < values.size(); ++n)
            ASSERT_EQ(codes[n], nearest_code(values[n] / q_scale)) << values[n] << " / " << q_scale;
    }
}

TEST(K09_Fp8Range, FiniteInputNeverGivesANaNCode) {
    for (float x : {1e-45F, 1.0F, 448.0F, 449.0F, 1e4F, FLT_MAX})
        for (float q_scale : {FLT_TRUE_MIN, 1e-20F, 1.0F, FLT_MAX})
            for (std::uint8_t code : quantise({x, -x}, q_scale)) EXPECT_NE(code & 0x7F, 0x7F) << x << " / " << q_scale;
    EXPECT_EQ(quantise({infinity, -infinity, not_a_number, -not_a_number}, 2.0F),
              (std::vector<std::uint8_t>{0x7E, 0xFE, 0x7F, 0x7F}));
}

TEST(K12_Strides, StridedViewsWriteOnlyTheirElements) {
    constexpr std::int64_t rows = 3, heads = 4, dims = 37;
    std::mt19937 random(12);
    std::normal_distribution<float> normal(0, 50);
    // Query rows lie inside heads (a transposed view), outputs have gaps after every head and row.
    std::vector<float> in(2000, not_a_number);
    std::vector<std::uint8_t> out(1000, poison);
    Tensor from{in.data() + 5, DType::f32, {}, 3, {rows, heads, dims}, {dims + 2, rows * (dims + 2) + 1, 1}};
    Tensor to{out.data() + 7, DType::f8_e4m3, {}, 3, {rows, heads, dims}, {heads * (dims + 3) + 5, dims + 3, 1}};
    std::vector<std::uint8_t> expected = out;
    for (std::int64_t row = 0; row < rows; ++row)
        for (std::int64_t head = 0; head < heads; ++head)
            for (std::int64_t d = 0; d < dims; ++d) {
                float& value = in[5 + row * from.strides[0] + head * from.strides[1] + d];
                value = normal(random);
                expected[7 + row * to.strides[0] + head * to.strides[1] + d] = nearest_code(value / 0.25F);
            }
    quantize_query(from, 0.25F, to);
    EXPECT_EQ(out, expected);

    float one = 1.5F;
    std::uint8_t code = poison;
    for (std::int64_t stride : {std::int64_t{-1}, std::int64_t{LLONG_MAX}, std::int64_t{LLONG_MIN}}) {
        code = poison;
        quantize_query({&one, DType::f32, {}, 3, {1, 1, 1}, {stride, stride, stride}}, 1.0F,
                       {&code, DType::f8_e4m3, {}, 3, {1, 1, 1}, {stride, stride, stride}});
        EXPECT_EQ(code, 0x3C) << "strides of size-1 dimensions are ignored";
    }
}

TEST(K20_ZeroSize, NothingToQuantise) {
    std::uint8_t code = poison;
    for (int empty = 0; empty < 3; ++empty) {
        Tensor in{nullptr, DType::bf16, {}, 3, {2, 2, 2}, {LLONG_MAX, LLONG_MAX, 1}};
        Tensor out{&code, DType::f8_e4m3, {}, 3, {2, 2, 2}, {LLONG_MAX, LLONG_MAX, 1}};
        in.shape[empty] = out.shape[empty] = 0;
        quantize_query(in, 1.0F, out);
        EXPECT_EQ(code, poison);
    }
}

struct Call {
    ConstTensor in;
    float q_scale = 1.0F;
    Tensor out;
};

struct Fault {
    const char* argument;
    std::function<void(Call&)> make;
    ErrorKind kind = ErrorKind::invalid_argument;
};

TEST(K30_Arguments, EveryFaultIsRefusedByNameAndNothingIsWritten) {
    const std::vector<Fault> faults = {
        {"in", [](Call& c) { c.in = {}; }},
        {"in", [](Call& c) { c.in.dtype = DType::f16; }},
        {"in", [](Call& c) { c.in.rank = 2; }},
        {"in", [](Call& c) { c.in.strides[2] = 2; }},
        {"in", [](Call& c) { c.in.data = static_cast<const char*>(c.in.data) + 1; }},
        {"out",  // not where `in` is
         [](Call& c) {
             c.in.device = {Device::Kind::cuda, 0};
         }},
        {"out", [](Call& c) { c.out = {}; }},
        {"out", [](Call& c) { c.out.dtype = DType::u8; }},
        {"out", [](Call& c) { c.out.shape[0] = 1; }},
        {"out", [](Call& c) { c.out.shape[1] = 4; }},
        {"out", [](Call& c) { c.out.shape[2] = 4; }},
        {"out", [](Call& c) { c.out.strides[2] = 2; }},
        {"out", [](Call& c) { c.out.strides[1] = 0; }},
        {"out", [](Call& c) { c.out.strides[1] = 4; }},
        {"out",
         [](Call& c) {
             c.out.device = {Device::Kind::cuda, 0};
         }},
        {"out", [](Call& c) { c.out.data = const_cast<void*>(c.in.data); }},
        {"out", [](Call& c) { c.out.data = static_cast<char*>(const_cast<void*>(c.in.data)) + 119; }},
        {"q_scale", [](Call& c) { c.q_scale = 0.0F; }},
        {"q_scale", [](Call& c) { c.q_scale = -1.0F; }},
        {"q_scale", [](Call& c) { c.q_scale = infinity; }},
        {"q_scale", [](Call& c) { c.q_scale = not_a_number; }},
    };
    for (std::size_t i = 0; i < faults.size(); ++i) {
        std::vector<float> in(30, 1.0F);
        std::vector<std::uint8_t> out(64, poison);
        Call call{.in = dense(static_cast<const void*>(in.data()), DType::f32, {2, 3, 5}),
                  .out = dense(static_cast<void*>(out.data()), DType::f8_e4m3, {2, 3, 5})};
        faults[i].make(call);
        const std::string fault = "fault " + std::to_string(i) + " in " + faults[i].argument;
        try {
            quantize_query(call.in, call.q_scale, call.out);
            ADD_FAILURE() << fault << " was accepted";
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), faults[i].kind) << fault;
            EXPECT_EQ(error.argument(), faults[i].argument) << fault << ": " << error.what();
        }
        EXPECT_EQ(out, std::vector<std::uint8_t>(64, poison)) << fault;
        EXPECT_EQ(in, std::vector<float>(30, 1.0F)) << fault;
    }
}

}  // namespace
}  // namespace sparsemla
