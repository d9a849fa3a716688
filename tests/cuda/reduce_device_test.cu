// cuda/device/reduce.cuh: the order of floats, and reductions over a warp of which every lane has the result.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <random>

#include "cuda/device/reduce.cuh"
#include "tests/cuda/on_device.h"

namespace sparsemla::test {
namespace {

class ReduceDevice : public OnDevice {};

using Warp = std::array<float, 32>;

float value_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

struct Ordered {
    __device__ int operator()(int bits) const { return device::ordered(bits); }
};
struct OrderedTwice {
    __device__ int operator()(int bits) const { return device::ordered(device::ordered(bits)); }
};

TEST_F(ReduceDevice, OrderedIsTheOrderOfFloats) {
    const std::vector<float> ascending = {value_of(0xFFC00000),
                                          -INFINITY,
                                          -3e38F,
                                          -1.0F,
                                          -1e-38F,
                                          -1e-45F,
                                          -0.0F,
                                          0.0F,
                                          1e-45F,
                                          1e-38F,
                                          1.0F,
                                          3e38F,
                                          INFINITY,
                                          value_of(0x7FC00000)};
    std::vector<int> bits;
    for (const float value : ascending) bits.push_back(std::bit_cast<int>(value));
    const std::vector<int> keys = map<int, Ordered>(bits);
    for (std::size_t i = 1; i < keys.size(); ++i) EXPECT_LT(keys[i - 1], keys[i]) << ascending[i];
    std::mt19937 random(1);
    for (int i = 0; i < 10000; ++i) bits.push_back(static_cast<int>(random()));
    EXPECT_EQ((map<int, OrderedTwice>(bits)), bits);
}

template <class Function>
__global__ void reduce_kernel(const float* in, float* out) {
    const unsigned i = blockIdx.x * 32 + threadIdx.x;
    out[i] = Function()(in[i]);
}

/// The reduction of every warp, which all its lanes must hold.
template <class Function>
std::vector<float> reduce(const std::vector<Warp>& warps) {
    std::vector<float> flat;
    for (const Warp& warp : warps) flat.insert(flat.end(), warp.begin(), warp.end());
    const DeviceArray<float> in(flat), out(flat.size());
    run(reduce_kernel<Function>, {.grid = dim3(static_cast<unsigned>(warps.size())), .threads = 32}, in.data(),
        out.data());
    const std::vector<float> lanes = out.values();
    std::vector<float> results;
    for (std::size_t warp = 0; warp < warps.size(); ++warp) {
        results.push_back(lanes[32 * warp]);
        for (std::size_t lane = 1; lane < 32; ++lane)
            EXPECT_EQ(bits_of(lanes[32 * warp + lane]), bits_of(results.back()))
                << "warp " << warp << ", lane " << lane;
    }
    return results;
}

struct WarpMax {
    __device__ float operator()(float value) const { return device::warp_max(value); }
};
struct WarpSum {
    __device__ float operator()(float value) const { return device::warp_sum(value); }
};
struct SumOf8 {
    __device__ float operator()(float value) const { return device::warp_sum<8>(value); }
};

Warp constant(float value) {
    Warp warp;
    warp.fill(value);
    return warp;
}

std::vector<Warp> random_warps(int count, float spread) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal(0, spread);
    std::vector<Warp> warps(static_cast<std::size_t>(count));
    for (Warp& warp : warps)
        for (float& value : warp) value = normal(random);
    return warps;
}

TEST_F(ReduceDevice, MaximumInEveryLane) {
    std::vector<Warp> warps = random_warps(200, 100.0F);
    for (std::size_t lane = 0; lane < 32; ++lane) {  // the largest in each place, also among negative numbers
        warps.push_back(constant(-5.0F));
        warps.back()[lane] = -1e-45F;
    }
    const std::vector<float> maxima = reduce<WarpMax>(warps);
    for (std::size_t i = 0; i < warps.size(); ++i)
        EXPECT_EQ(bits_of(maxima[i]), bits_of(*std::max_element(warps[i].begin(), warps[i].end()))) << "warp " << i;
}

TEST_F(ReduceDevice, MaximumOfZerosInfinitiesAndNan) {
    const auto with = [](Warp warp, std::size_t lane, float value) {
        warp[lane] = value;
        return warp;
    };
    const std::vector<Warp> warps = {constant(-INFINITY),
                                     with(constant(-INFINITY), 17, -3e38F),
                                     constant(-0.0F),
                                     with(constant(-0.0F), 31, 0.0F),
                                     with(constant(1.0F), 3, INFINITY),
                                     with(constant(INFINITY), 9, value_of(0x7FFFFFFF)),
                                     with(constant(-INFINITY), 0, value_of(0x7FC00001)),
                                     with(constant(-7.0F), 30, value_of(0xFFC00000)),
                                     constant(value_of(0x7FC00000))};
    const std::vector<float> maxima = reduce<WarpMax>(warps);
    EXPECT_EQ(maxima[0], -INFINITY);
    EXPECT_EQ(maxima[1], -3e38F);
    EXPECT_EQ(bits_of(maxima[2]), bits_of(-0.0F));
    EXPECT_EQ(bits_of(maxima[3]), bits_of(0.0F));
    EXPECT_EQ(maxima[4], INFINITY);
    EXPECT_TRUE(std::isnan(maxima[5]));
    EXPECT_TRUE(std::isnan(maxima[6]));
    EXPECT_EQ(maxima[7], -7.0F) << "a NaN with its sign set loses";
    EXPECT_TRUE(std::isnan(maxima[8]));
}

/// The same tree in host code: lane l adds lane l ^ distance, distances 16, 8, 4, 2, 1.
float tree_sum(Warp warp) {
    for (std::size_t distance = 16; distance > 0; distance /= 2) {
        const Warp before = warp;
        for (std::size_t lane = 0; lane < 32; ++lane) warp[lane] = before[lane] + before[lane ^ distance];
    }
    return warp[0];
}

TEST_F(ReduceDevice, SumInAFixedOrder) {
    std::vector<Warp> warps = random_warps(500, 1.0F);
    for (Warp& warp : random_warps(500, 1e30F)) warps.push_back(warp);
    warps.push_back(constant(-0.0F));
    warps.push_back(constant(1.0F));
    const std::vector<float> sums = reduce<WarpSum>(warps);
    for (std::size_t i = 0; i < warps.size(); ++i) EXPECT_EQ(bits_of(sums[i]), bits_of(tree_sum(warps[i]))) << i;
    EXPECT_EQ(sums.back(), 32.0F);
    Warp nan = constant(1.0F);
    nan[13] = NAN;
    Warp infinity = constant(1.0F);
    infinity[13] = INFINITY;
    const std::vector<float> special = reduce<WarpSum>({nan, infinity});
    EXPECT_TRUE(std::isnan(special[0]));
    EXPECT_EQ(special[1], INFINITY);
}

// Four groups of the same 8 numbers: each group its own sum, the largest distance first.
TEST_F(ReduceDevice, SumsOfEightLanes) {
    std::vector<Warp> warps = random_warps(50, 10.0F);
    for (Warp& warp : warps)
        for (std::size_t lane = 8; lane < 32; ++lane) warp[lane] = warp[lane - 8];
    const std::vector<float> sums = reduce<SumOf8>(warps);
    for (std::size_t i = 0; i < warps.size(); ++i) {
        const Warp& w = warps[i];
        EXPECT_EQ(sums[i], ((w[0] + w[4]) + (w[2] + w[6])) + ((w[1] + w[5]) + (w[3] + w[7]))) << "warp " << i;
    }
}

__global__ void prefix_kernel(const int* in, int* out) {
    const unsigned i = blockIdx.x * 32 + threadIdx.x;
    out[i] = device::warp_prefix_sum(in[i], static_cast<int>(threadIdx.x));
}

TEST_F(ReduceDevice, PrefixSums) {
    std::mt19937 random(2);
    std::vector<int> values(32 * 50), expected;
    for (int& value : values) value = static_cast<int>(random() % 2001) - 1000;
    for (std::size_t i = 0; i < values.size(); ++i) expected.push_back(values[i] + (i % 32 == 0 ? 0 : expected.back()));
    const DeviceArray<int> in(values), out(values.size());
    run(prefix_kernel, {.grid = dim3(50), .threads = 32}, in.data(), out.data());
    EXPECT_EQ(out.values(), expected);
}

}  // namespace
}  // namespace sparsemla::test
