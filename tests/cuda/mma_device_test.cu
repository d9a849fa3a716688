// cuda/device/mma.cuh: tiles as wgmma takes them, and its products and sums for every N and both formats. Small whole
// numbers are exact; sums are FP32: 2^e + 1 survives up to e = 23.
#include <bit>
#include <cmath>
#include <random>
#include <utility>

#include "cuda/device/copies.cuh"
#include "cuda/device/mma.cuh"
#include "sparsemla/formats.h"
#include "tests/cuda/on_device.h"

namespace sparsemla::test {
namespace {

using device::FragmentA;
using device::Half;
using device::SharedAddress;
using device::SwizzledTile;

class MmaDevice : public OnDevice {};

constexpr int keys = 64;         // rows of A
constexpr int step_halves = 16;  // K of one wgmma

/// d (+)= a * b^T by one warpgroup. a: halves [64][16 * kSteps]; b: [kHeads][16 * kSteps]; d: floats [64][kHeads].
/// In shared memory b is tiles of kRowBytes, one after the other along K. kApart: every step is a group of its own.
template <int kHeads, Half kHalf, int kRowBytes, int kSteps, bool kApart>
__global__ void multiply_kernel(const std::uint32_t* a, const uint4* b, float* d, bool accumulate) {
    using Tile = SwizzledTile<kRowBytes>;
    constexpr int tile_bytes = kHeads * kRowBytes;
    constexpr int pieces_of_tile = kRowBytes / 16, pieces_of_head = 2 * kSteps;
    static_assert(tile_bytes % Tile::alignment_bytes == 0 && pieces_of_head % pieces_of_tile == 0);
    __shared__ __align__(1024) unsigned char shared[kHeads * kSteps * 32];
    const SharedAddress base = device::shared_address(shared);
    for (int i = static_cast<int>(threadIdx.x); i < kHeads * pieces_of_head; i += 128) {
        const int head = i / pieces_of_head, piece = i % pieces_of_head;
        device::store_shared(base + piece / pieces_of_tile * tile_bytes + Tile::byte(head, piece % pieces_of_tile),
                             b[i]);
    }
    device::fence_async_proxy();
    __syncthreads();

    const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
    const int row = static_cast<int>(threadIdx.x) / 32 * 16 + g;
    FragmentA fragments[kSteps];
    for (int step = 0; step < kSteps; ++step)
        for (int i = 0; i < 4; ++i)  // words of two halves: rows g and g + 8, columns 2t and 2t + 8
            fragments[step][i] = a[(row + i % 2 * 8) * kSteps * 8 + step * 8 + t + i / 2 * 4];
    float sums[kHeads / 2];
    float* const first = d + row * kHeads + 2 * t;
    const auto place = [&](int i) { return first + i % 4 / 2 * 8 * kHeads + i / 4 * 8 + i % 2; };
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) sums[i] = *place(i);
#pragma unroll
    for (FragmentA& fragment : fragments) device::pin(fragment);
    device::pin(sums);
    device::fence_mma();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        constexpr int steps_of_tile = kRowBytes / 32;
        device::mma_async<kHalf>(sums, fragments[step],
                                 Tile::descriptor(base + step / steps_of_tile * tile_bytes) + step % steps_of_tile * 2,
                                 accumulate || step > 0);
        if constexpr (kApart) {
            device::commit_mma();
            device::wait_for_mma<0>();
            device::pin(sums);
            device::fence_mma();
        }
    }
    device::commit_mma();
    device::wait_for_mma<0>();
    device::pin(sums);
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) *place(i) = sums[i];
}

/// Matrices of floats that the format holds exactly, and what they give.
struct Product {
    int heads, halves;
    std::vector<float> a, b, d;  ///< [64][halves], [heads][halves], [64][heads]

    Product(int of_heads, int steps)
        : heads(of_heads),
          halves(steps * step_halves),
          a(static_cast<std::size_t>(keys * halves), 0.0F),
          b(static_cast<std::size_t>(heads * halves), 0.0F),
          d(static_cast<std::size_t>(keys * heads), NAN) {}

    float& a_at(int key, int k) { return a[static_cast<std::size_t>(key * halves + k)]; }
    float& b_at(int head, int k) { return b[static_cast<std::size_t>(head * halves + k)]; }
    float& d_at(int key, int head) { return d[static_cast<std::size_t>(key * heads + head)]; }

    double expected(int key, int head, bool accumulate) {
        double sum = accumulate ? double{d_at(key, head)} : 0;
        for (int k = 0; k < halves; ++k) sum += double{a_at(key, k)} * double{b_at(head, k)};
        return sum;
    }
};

template <Half kHalf>
std::uint32_t half_bits(float value) {
    if (kHalf == Half::bf16) return float_to_bf16(value);
    if (value == 0) return std::signbit(value) ? 0x8000 : 0;  // the other values of these tests are normal
    const auto bits = std::bit_cast<std::uint32_t>(value);
    return (bits >> 16 & 0x8000) | (((bits & 0x7FFFFFFF) >> 13) - ((127 - 15) << 10));
}

template <Half kHalf>
std::vector<std::uint32_t> packed(const std::vector<float>& values) {
    std::vector<std::uint32_t> words;
    for (std::size_t i = 0; i < values.size(); i += 2)
        words.push_back(half_bits<kHalf>(values[i]) | half_bits<kHalf>(values[i + 1]) << 16);
    return words;
}

/// The product on the GPU, [64][heads].
template <int kHeads, Half kHalf, int kRowBytes, int kSteps, bool kApart = false>
std::vector<float> multiply(const Product& product, bool accumulate) {
    const DeviceArray<std::uint32_t> a(packed<kHalf>(product.a)), b(packed<kHalf>(product.b));
    const DeviceArray<float> d(product.d);
    run(multiply_kernel<kHeads, kHalf, kRowBytes, kSteps, kApart>, {.threads = 128}, a.data(),
        reinterpret_cast<const uint4*>(b.data()), d.data(), accumulate);
    return d.values();
}

void expect_exact(Product& product, const std::vector<float>& got, bool accumulate) {
    int failures = 0;
    for (int key = 0; key < keys; ++key)
        for (int head = 0; head < product.heads && failures < 10; ++head) {
            const double expected = product.expected(key, head, accumulate);
            const double value = got[static_cast<std::size_t>(key * product.heads + head)];
            if (value == expected) continue;
            ++failures;
            ADD_FAILURE() << "key " << key << ", head " << head << ": got " << value << ", expected " << expected;
        }
}

/// Calls test.template operator()<heads, half, row bytes, steps>() for all of them.
template <class Test>
void for_each_shape(const Test& test) {
    const auto with_heads = [&]<int kHeads>() {
        const auto with_half = [&]<Half kHalf>() {
            SCOPED_TRACE(std::to_string(kHeads) + " heads, " + (kHalf == Half::f16 ? "f16" : "bf16"));
            test.template operator()<kHeads, kHalf, 32, 1>();
            test.template operator()<kHeads, kHalf, 32, 6>();
            test.template operator()<kHeads, kHalf, 128, 4>();
            test.template operator()<kHeads, kHalf, 128, 8>();
        };
        with_half.template operator()<Half::f16>();
        if constexpr (kHeads > 8) with_half.template operator()<Half::bf16>();
    };
    with_heads.template operator()<8>();
    with_heads.template operator()<16>();
    with_heads.template operator()<32>();
}

// Each element of A meets each of B alone: a wrong place shows as a wrong number, not as a wrong sum.
TEST_F(MmaDevice, EveryElementHasItsPlace) {
    for_each_shape([&]<int kHeads, Half kHalf, int kRowBytes, int kSteps>() {
        for (int k = 0; k < kSteps * step_halves; ++k) {
            Product product(kHeads, kSteps);
            for (int key = 0; key < keys; ++key) product.a_at(key, k) = static_cast<float>(key + 1);
            for (int head = 0; head < kHeads; ++head) product.b_at(head, k) = static_cast<float>(head + 1);
            SCOPED_TRACE("k = " + std::to_string(k) + ", rows of " + std::to_string(kRowBytes));
            expect_exact(product, multiply<kHeads, kHalf, kRowBytes, kSteps>(product, false), false);
            if (HasFailure()) return;
        }
    });
}

TEST_F(MmaDevice, WholeNumbersAreExact) {
    for_each_shape([&]<int kHeads, Half kHalf, int kRowBytes, int kSteps>() {
        std::mt19937 random(kHeads + kSteps);
        Product product(kHeads, kSteps);
        for (std::vector<float>* values : {&product.a, &product.b})
            for (float& value : *values) value = static_cast<float>(static_cast<int>(random() % 17) - 8);
        // What the sums held before must not matter: NaN.
        expect_exact(product, multiply<kHeads, kHalf, kRowBytes, kSteps>(product, false), false);
        for (float& value : product.d) value = static_cast<float>(static_cast<int>(random() % 2001) - 1000);
        expect_exact(product, multiply<kHeads, kHalf, kRowBytes, kSteps>(product, true), true);
        expect_exact(product, multiply<kHeads, kHalf, kRowBytes, kSteps, true>(product, true), true);
    });
}

TEST_F(MmaDevice, RandomNumbersWithinFp32) {
    for_each_shape([&]<int kHeads, Half kHalf, int kRowBytes, int kSteps>() {
        std::mt19937 random(kHeads * kSteps);
        std::normal_distribution<float> normal;
        Product product(kHeads, kSteps);
        for (std::vector<float>* values : {&product.a, &product.b})
            for (float& value : *values) value = bf16_to_float(float_to_bf16(0.1F + std::fabs(normal(random))));
        const std::vector<float> got = multiply<kHeads, kHalf, kRowBytes, kSteps>(product, false);
        for (int key = 0; key < keys; ++key)
            for (int head = 0; head < kHeads; ++head) {
                const double expected = product.expected(key, head, false);  // of positive terms
                ASSERT_NEAR(got[static_cast<std::size_t>(key * kHeads + head)], expected, expected * kSteps * 0x1p-21)
                    << "key " << key << ", head " << head;
            }
    });
}

// Key e has the products 2^e and 1; e = 23 needs all of FP32's bits.
TEST_F(MmaDevice, SumsAreFp32) {
    for_each_shape([&]<int kHeads, Half kHalf, int kRowBytes, int kSteps>() {
        constexpr int last = kSteps * step_halves - 1;
        for (const float sign : {1.0F, -1.0F})
            for (const auto& [large, small] : std::vector<std::pair<int, int>>{{0, 1}, {0, 8}, {0, last}, {last, 0}}) {
                Product product(kHeads, kSteps);
                for (int head = 0; head < kHeads; ++head) {
                    product.b_at(head, large) = 0x1p8F;
                    product.b_at(head, small) = 1;
                }
                for (int e = 0; e < 24; ++e) {
                    product.a_at(e, large) = sign * std::ldexp(1.0F, e - 8);
                    product.a_at(e, small) = sign;
                }
                SCOPED_TRACE("2^e at " + std::to_string(large) + ", 1 at " + std::to_string(small));
                expect_exact(product, multiply<kHeads, kHalf, kRowBytes, kSteps>(product, false), false);
                expect_exact(product, multiply<kHeads, kHalf, kRowBytes, kSteps, true>(product, false), false);
                if (HasFailure()) return;
            }
    });
}

// The same with one of the two in the sums already.
TEST_F(MmaDevice, AccumulatorsAreFp32) {
    for_each_shape([&]<int kHeads, Half kHalf, int kRowBytes, int kSteps>() {
        for (const bool large_first : {true, false}) {
            Product product(kHeads, kSteps);
            for (int head = 0; head < kHeads; ++head) product.b_at(head, 5) = large_first ? 1 : 0x1p8F;
            for (int key = 0; key < keys; ++key) {
                const int e = key % 24;
                product.a_at(key, 5) = large_first ? 1 : std::ldexp(1.0F, e - 8);
                for (int head = 0; head < kHeads; ++head)
                    product.d_at(key, head) = large_first ? std::ldexp(1.0F, e) : 1;
            }
            expect_exact(product, multiply<kHeads, kHalf, kRowBytes, kSteps>(product, true), true);
        }
    });
}

TEST_F(MmaDevice, NanAndInfinityReachTheirRowOnly) {
    Product product(16, 1);
    for (float& value : product.a) value = 1;
    for (float& value : product.b) value = 1;
    std::vector<std::uint32_t> a = packed<Half::f16>(product.a);
    a[3 * 8] = 0x7E003C00;   // key 3, k = 1: NaN
    a[40 * 8] = 0x7C003C00;  // key 40, k = 1: infinity
    const DeviceArray<std::uint32_t> a_there(a), b_there(packed<Half::f16>(product.b));
    const DeviceArray<float> d(product.d);
    run(multiply_kernel<16, Half::f16, 32, 1, false>, {.threads = 128}, a_there.data(),
        reinterpret_cast<const uint4*>(b_there.data()), d.data(), false);
    const std::vector<float> got = d.values();
    for (int key = 0; key < keys; ++key)
        for (int head = 0; head < 16; ++head) {
            const float value = got[static_cast<std::size_t>(key * 16 + head)];
            if (key == 3)
                EXPECT_TRUE(std::isnan(value)) << head;
            else
                EXPECT_EQ(value, key == 40 ? INFINITY : 16.0F) << "key " << key << ", head " << head;
        }
}

}  // namespace
}  // namespace sparsemla::test
