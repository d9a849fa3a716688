// merge against a float64 model, and the conventions at its edges: bases, empty partials, sinks, single contributors.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <string>
#include <vector>

#include "tests/fenced.h"
#include "tests/merging.h"

namespace sparsemla::test {
namespace {

using Options = Merging::Options;

constexpr LseBase bases[] = {LseBase::natural, LseBase::two};
constexpr DType dtypes[] = {DType::f32, DType::bf16};

/// log of z in the base of the partials.
float log_of(double z, LseBase base) { return static_cast<float>(base == LseBase::two ? std::log2(z) : std::log(z)); }

std::string text(LseBase from, LseBase to) { return std::string(name(from)) + " to " + std::string(name(to)); }

bool is_plus_zero(const Padded& tensor, std::int64_t row, std::int64_t head) {
    for (int d = 0; d < value_dims; ++d)
        if (tensor.value(row, head, d) != 0 || std::signbit(tensor.value(row, head, d))) return false;
    return true;
}

bool is_nan(const Padded& tensor, std::int64_t row, std::int64_t head) {
    for (int d = 0; d < value_dims; ++d)
        if (!std::isnan(tensor.value(row, head, d))) return false;
    return true;
}

TEST(Merge, RandomPartialsEqualTheModel) {
    std::uint32_t seed = 100;
    for (std::size_t n : {1U, 2U, 3U, 8U})
        for (LseBase from : bases)
            for (LseBase to : bases)
                for (DType partial : dtypes)
                    for (DType out : dtypes) {
                        Merging m(n, 3, 2,
                                  {.partial_dtype = partial,
                                   .out_dtype = out,
                                   .partial_base = from,
                                   .lse_base = to,
                                   .padding = seed % 4,
                                   .transposed_lse = seed % 3 == 0});
                        m.fill_random(++seed, 30, 0.25);
                        if (seed % 2 == 0) m.set_sinks({-1.5F, 25.0F});
                        const std::string what = "seed " + std::to_string(seed) + ", " + text(from, to);
                        m.run(what);
                        expect_model(m, what);
                    }
}

TEST(K06_LogBase, WeightsFollowTheStatedBase) {
    for (LseBase from : bases)
        for (LseBase to : bases) {
            Merging two(2, 1, 1, {.partial_base = from, .lse_base = to});
            two.set(0, log_of(2, from), 1);
            two.set(1, log_of(8, from), 0);
            two.run(text(from, to));
            EXPECT_NEAR(two.out.value(0, 0, 17), 0.2, 1e-6) << text(from, to) << " (0.277 or 0.119: the other base)";
            EXPECT_NEAR(two.lse.value(0, 0), log_of(10, to), 1e-6) << text(from, to);

            for (std::size_t rank = 0; rank < 4; ++rank) {
                Merging four(4, 1, 1, {.partial_base = from, .lse_base = to});
                for (std::size_t i = 0; i < 4; ++i) four.set(i, log_of(std::pow(10, i), from), i == rank ? 1 : 0);
                four.run(text(from, to));
                EXPECT_NEAR(four.out.value(0, 0, 511), std::pow(10, rank) / 1111, 1e-6) << text(from, to);
            }
        }
}

TEST(K06_LogBase, SinksAreNaturalInEitherBase) {
    for (LseBase from : bases) {
        Merging m(2, 1, 1, {.partial_base = from});
        m.set(0, log_of(3, from), 1);
        m.set(1, log_of(1, from), 5);
        m.set_sinks({std::log(4.0F)});
        m.run(text(from, from));
        EXPECT_NEAR(m.out.value(0, 0), 1.0, 1e-6) << text(from, from) << ": (3 * 1 + 1 * 5) / (3 + 1 + 4)";
        EXPECT_NEAR(m.lse.value(0, 0), std::log(4.0), 1e-6) << "without the sink";
    }
}

TEST(K05_Order, RankOrderChangesAtMostOneUlpOfBf16) {
    std::vector<std::size_t> order{0, 1, 2, 3};
    Merging m(4, 2, 3, {.out_dtype = DType::bf16});
    m.fill_random(5, 6, 0.2);
    m.run("first order");
    Padded first(DType::f32, {2, 3, value_dims}, 0);
    for (int i = 0; i < 6 * value_dims; ++i)
        first.at<float>(i / (3 * value_dims), i / value_dims % 3, i % value_dims) =
            m.out.value(i / (3 * value_dims), i / value_dims % 3, i % value_dims);
    const std::vector<Partial> partials = m.partials;
    while (std::next_permutation(order.begin(), order.end())) {
        for (std::size_t i = 0; i < 4; ++i) m.partials[i] = partials[order[i]];
        m.run("permuted");
        for (std::int64_t row = 0; row < 2; ++row)
            for (std::int64_t head = 0; head < 3; ++head)
                for (int d = 0; d < value_dims; ++d) {
                    const float expected = first.at<float>(row, head, d);
                    ASSERT_NEAR(m.out.value(row, head, d), expected, 0x1p-7F * std::fabs(expected) + 1e-6F);
                }
    }
}

TEST(K07_EmptyRow, EmptyEverywhereIsZeroAndMinusInfinity) {
    for (DType out : dtypes)
        for (std::size_t n : {0U, 1U, 5U})
            for (float sink : {-infinity, 0.0F, infinity, not_a_number}) {
                Merging m(n, 2, 2, {.out_dtype = out});
                for (std::size_t i = 0; i < n; ++i)
                    for (std::int64_t j = 0; j < 4; ++j) m.set(i, -infinity, not_a_number, j / 2, j % 2);
                m.set_sinks({sink, sink});
                m.run("all empty");
                for (std::int64_t j = 0; j < 4; ++j) {
                    EXPECT_TRUE(is_plus_zero(m.out, j / 2, j % 2)) << n << " partials, sink " << sink;
                    EXPECT_EQ(m.lse.value(j / 2, j % 2), -infinity);
                }
            }
}

/// Bit patterns that arithmetic would change: signed zeros, subnormals, infinities, signalling and quiet NaN.
template <class Bits>
std::vector<Bits> awkward_bits() {
    std::vector<Bits> all;
    for (Bits high : {0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x7FFF, 0x3F80, 0xC2F7})
        all.push_back(sizeof(Bits) == 2 ? high : static_cast<Bits>(high << 16 | 0x1235));
    return all;
}

template <class Bits>
void expect_single_contributor_passes(DType dtype) {
    const std::vector<Bits> bits = awkward_bits<Bits>();
    for (std::size_t only = 0; only < 4; ++only)
        for (const bool small_sink : {false, true}) {
            Merging m(4, 1, 1, {.partial_dtype = dtype, .out_dtype = dtype});
            for (std::size_t i = 0; i < 4; ++i) m.set(i, -infinity, not_a_number);
            m.lses[only].set(-0.0F, 0, 0);
            for (int d = 0; d < value_dims; ++d) m.outs[only].at<Bits>(0, 0, d) = bits[d % bits.size()];
            if (small_sink) m.set_sinks({-FLT_MAX});
            m.run("single contributor");
            for (int d = 0; d < value_dims; ++d)
                ASSERT_EQ(m.out.at<Bits>(0, 0, d), bits[d % bits.size()])
                    << name(dtype) << " partial " << only << " dim " << d << (small_sink ? ", with a sink" : "");
            EXPECT_TRUE(std::signbit(m.lse.value(0, 0)));
        }
}

TEST(K07_EmptyRow, ASingleContributorPassesBitForBit) {
    expect_single_contributor_passes<std::uint16_t>(DType::bf16);
    expect_single_contributor_passes<std::uint32_t>(DType::f32);
}

TEST(K07_EmptyRow, ASingleContributorOfTheOtherDtypeIsRoundedOnce) {
    Merging widened(2, 1, 1, {.partial_dtype = DType::bf16, .out_dtype = DType::f32});
    Merging rounded(2, 1, 1, {.partial_dtype = DType::f32, .out_dtype = DType::bf16});
    for (Merging* m : {&widened, &rounded}) {
        m->set(0, -infinity, not_a_number);
        m->set(1, 3.25F, 1.00390625F);  // halfway between two bf16 values
        m->run("other dtype");
        EXPECT_EQ(m->out.value(0, 0, 3), 1.0F);
        EXPECT_EQ(m->lse.value(0, 0), 3.25F);
    }
}

TEST(K07_EmptyRow, PlusInfinityIsEmptyOnlyWhenMarkedForeign) {
    for (const bool foreign : {false, true}) {
        Merging m(2, 1, 1, {});
        m.set(0, infinity, 0);
        m.set(1, 1.5F, 3);
        m.plus_inf_is_empty = foreign;
        m.run("plus infinity");
        if (foreign) {
            EXPECT_EQ(m.out.value(0, 0), 3.0F);
            EXPECT_EQ(m.lse.value(0, 0), 1.5F);
        } else {
            EXPECT_TRUE(is_nan(m.out, 0, 0));
            EXPECT_TRUE(std::isnan(m.lse.value(0, 0)));
        }
    }
}

TEST(K07_EmptyRow, CountsDropRowsOfOnePartialOnly) {
    // One request with five verify rows: partial 1 owns keys of rows 3 and 4 only, whatever its lse says elsewhere.
    for (float junk : {0.0F, 80.0F, infinity, not_a_number, -infinity}) {
        Merging m(2, 5, 2, {});
        m.fill_random(83, 4, 0);
        const std::vector<std::int32_t> counts{0, -1, std::numeric_limits<std::int32_t>::min(), 1, 2048};
        for (std::int64_t row = 0; row < 3; ++row)
            for (std::int64_t head = 0; head < 2; ++head) m.set(1, junk, not_a_number, row, head);
        m.set_counts(1, counts);
        m.run("counts");
        expect_model(m, "lse of dropped rows " + std::to_string(junk));
        for (std::int64_t row = 0; row < 3; ++row)
            for (int d = 0; d < value_dims; ++d) ASSERT_EQ(m.out.value(row, 1, d), m.outs[0].value(row, 1, d));
    }
}

TEST(K03_ZeroTimesNonFinite, EmptyPayloadsChangeNothing) {
    for (DType dtype : dtypes)
        for (float junk : {not_a_number, infinity, -infinity, 448.0F, FLT_MAX}) {
            Merging with(8, 2, 1, {.partial_dtype = dtype, .out_dtype = dtype});
            with.fill_random(84, 3, 0);
            Merging without(3, 2, 1, {.partial_dtype = dtype, .out_dtype = dtype});
            for (std::size_t i = 0; i < 8; ++i)
                for (std::int64_t row = 0; row < 2; ++row)
                    if (i % 3 != 1) with.set(i, -infinity, junk, row, 0);
            for (std::size_t i = 0; i < 3; ++i) without.partials[i] = with.partials[3 * i + (i < 3 ? 1 : 0)];
            with.run("with");
            without.run("without");
            EXPECT_EQ(with.out.memory(), without.out.memory()) << name(dtype) << " payload " << junk;
            EXPECT_EQ(with.lse.memory(), without.lse.memory());
        }
}

TEST(K03_ZeroTimesNonFinite, EmptyPayloadsAreNotRead) {
    // Partial 0 has rows 0 and 1 in memory; rows 2 and 3 would lie in a page that faults. Partial 2 has no row at all.
    const std::int64_t row_bytes = 2 * value_dims * size_bytes(DType::bf16);
    const Fenced two_rows(static_cast<std::size_t>(2 * row_bytes));
    const Fenced no_rows(0);
    Merging m(3, 4, 2, {.partial_dtype = DType::bf16, .out_dtype = DType::bf16});
    m.fill_random(9, 2, 0);
    for (std::size_t i : {0U, 2U}) {
        const std::byte* data = i == 0 ? two_rows.data() : no_rows.data();
        m.partials[i].out = dense(static_cast<const void*>(data), DType::bf16, {4, 2, value_dims});
    }
    for (std::int64_t row = 0; row < 4; ++row)
        for (std::int64_t head = 0; head < 2; ++head) {
            if (row == 2) m.lses[0].set(-infinity, row, head);
            m.lses[2].set(row % 2 == 0 ? -infinity : 1.0F, row, head);
            for (int d = 0; d < value_dims; ++d)
                if (row < 2)
                    two_rows.as<std::uint16_t>()[(row * 2 + head) * value_dims + d] =
                        m.outs[0].at<std::uint16_t>(row, head, d);
        }
    m.set_counts(0, {1, 1, 1, 0});
    m.set_counts(2, {7, 0, 7, 0});
    m.run("fenced");
    expect_model(m, "fenced");
}

TEST(K08_Sinks, EveryValueIsHandled) {
    const float sinks[] = {-infinity, -FLT_MAX, -1e30F, -700.0F, -5.0F, 0.0F, 5.0F, 95.0F, 700.0F};
    for (LseBase from : bases)
        for (float sink : sinks) {
            Merging m(3, 2, 1, {.partial_base = from});
            m.fill_random(11, 20, 0.2);
            Merging plain(3, 2, 1, {.partial_base = from});
            plain.fill_random(11, 20, 0.2);
            m.set_sinks({sink});
            m.run("sink");
            plain.run("no sink");
            if (std::fabs(sink) < 600) expect_model(m, "sink " + std::to_string(sink));
            if (sink <= -700) {
                EXPECT_EQ(m.out.memory(), plain.out.memory()) << "sink " << sink << " has no effect";
            }
            EXPECT_EQ(m.lse.memory(), plain.lse.memory()) << "the sink " << sink << " is not in the lse";
        }
}

TEST(K08_Sinks, TheLargestSinksTakeAllWeight) {
    for (LseBase from : bases)
        for (DType out : dtypes)
            for (float lse : {-FLT_MAX, -90.0F, 0.0F, 90.0F})
                for (float sink : {1e30F, FLT_MAX, infinity})
                    for (std::size_t n : {1U, 3U}) {
                        Merging m(n, 1, 1, {.out_dtype = out, .partial_base = from});
                        for (std::size_t i = 0; i < n; ++i) m.set(i, lse, -2.5F);
                        m.set_sinks({sink});
                        m.run("large sink");
                        EXPECT_TRUE(is_plus_zero(m.out, 0, 0)) << "lse " << lse << ", sink " << sink;
                        EXPECT_FALSE(std::isnan(m.lse.value(0, 0)));
                    }
}

TEST(K08_Sinks, ASinkFarAboveTheScoresLeavesWhatFloat32Holds) {
    Merging m(2, 1, 1, {});
    m.set(0, 0, 1e38F);
    m.set(1, -infinity, not_a_number);
    m.set_sinks({95});
    m.run("sink 95");
    EXPECT_NEAR(m.out.value(0, 0) / (1e38 * std::exp(-95.0)), 1.0, 1e-3) << "the weight is subnormal, not zero";
}

TEST(K01_SoftmaxState, ExtremeScoresStayFinite) {
    for (LseBase base : bases)
        for (float peak : {-FLT_MAX, -1e5F, 1e5F, FLT_MAX}) {
            Merging m(3, 1, 1, {.partial_base = base, .lse_base = base});
            m.set(0, -FLT_MAX, 1);
            m.set(1, peak, 3);
            m.set(2, peak, 5);
            m.run("extreme");
            EXPECT_NEAR(m.out.value(0, 0), peak == -FLT_MAX ? 3.0 : 4.0, 1e-6) << peak;
            const double lse = static_cast<double>(peak) + log_of(peak == -FLT_MAX ? 3 : 2, base);
            EXPECT_NEAR(m.lse.value(0, 0) / lse, 1.0, 0x1p-23) << peak;
        }
}

TEST(K01_SoftmaxState, LargeValuesDoNotOverflowInTheSum) {
    Merging m(4, 1, 1, {.out_dtype = DType::bf16});
    for (std::size_t i = 0; i < 4; ++i) m.set(i, 2, 3e38F);
    m.run("large values");
    EXPECT_NEAR(m.out.value(0, 0) / 3e38, 1.0, 0x1p-8);
}

TEST(NonFinite, AnUndefinedLseIsNaNHoweverManyContribute) {
    for (float undefined : {not_a_number, infinity})
        for (std::size_t contributors : {1U, 2U, 3U})
            for (LseBase to : bases) {
                Merging m(3, 1, 1, {.lse_base = to});
                for (std::size_t i = 0; i < 3; ++i) m.set(i, i < contributors ? 0.5F : -infinity, 2);
                m.lses[contributors / 2].set(undefined, 0, 0);
                m.run("undefined");
                EXPECT_TRUE(is_nan(m.out, 0, 0)) << undefined << " among " << contributors;
                EXPECT_TRUE(std::isnan(m.lse.value(0, 0))) << undefined << " among " << contributors;
            }
}

TEST(NonFinite, NaNStaysInItsRowAndHead) {
    for (const bool in_lse : {true, false}) {
        Merging m(3, 3, 3, {.out_dtype = DType::bf16});
        m.fill_random(21, 3, 0);
        Merging clean(3, 3, 3, {.out_dtype = DType::bf16});
        clean.fill_random(21, 3, 0);
        if (in_lse)
            m.lses[1].set(not_a_number, 1, 2);
        else
            m.outs[1].set(not_a_number, 1, 2, 77);
        m.run("NaN");
        clean.run("clean");
        for (std::int64_t row = 0; row < 3; ++row)
            for (std::int64_t head = 0; head < 3; ++head)
                for (int d = 0; d < value_dims; ++d) {
                    const bool reached = row == 1 && head == 2 && (in_lse || d == 77);
                    const auto expected = reached ? std::uint16_t{0x7FFF} : clean.out.at<std::uint16_t>(row, head, d);
                    ASSERT_EQ(m.out.at<std::uint16_t>(row, head, d), expected) << row << ' ' << head << ' ' << d;
                }
        EXPECT_EQ(std::isnan(m.lse.value(1, 2)), in_lse);
    }
}

}  // namespace
}  // namespace sparsemla::test
