// cuda/device/mma.cuh with 64 heads on M: BlockTile as keys and as values, FP16 and BF16. Small whole numbers are
// exact.
#include <bit>
#include <random>

#include "cuda/device/copies.cuh"
#include "cuda/device/mma.cuh"
#include "sparsemla/formats.h"
#include "tests/cuda/on_device.h"

namespace sparsemla::test {
namespace {

using device::BlockTile;
using device::Half;
using device::SharedAddress;

class MmaWideDevice : public OnDevice {};

constexpr int heads = 64, keys = 32, dims = 256;

/// A row-major matrix of BF16, 16 bytes at a time, to a BlockTile.
template <int kRows>
__device__ void store_tile(SharedAddress tile, const uint4* matrix, int columns) {
    const int pieces = columns / 8;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * pieces; i += static_cast<int>(blockDim.x))
        device::store_shared(tile + BlockTile<kRows>::byte(i / pieces, i % pieces), matrix[i]);
}

/// d = q * k^T: [heads][keys], by one warpgroup.
template <Half kHalf>
__global__ void scores_kernel(const uint4* q, const uint4* k, float* d) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const SharedAddress query = device::shared_address(shared), cache = query + heads * dims * 2;
    store_tile<heads>(query, q, dims);
    store_tile<keys>(cache, k, dims);
    device::fence_async_proxy();
    __syncthreads();
    float sums[keys / 2];
    device::fence_mma();
#pragma unroll
    for (int dim = 0; dim < dims; dim += 16)
        device::mma_async_shared<kHalf, BlockTile<heads>::upper_word()>(
            sums, device::lower_word(BlockTile<heads>::rows(query) + BlockTile<heads>::rows_from(dim)),
            device::lower_word(BlockTile<keys>::rows(cache) + BlockTile<keys>::rows_from(dim)), dim > 0);
    device::commit_mma();
    device::wait_for_mma<0>();
    device::pin(sums);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int head = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < keys / 2; ++i) d[(head + i % 4 / 2 * 8) * keys + i / 4 * 8 + 2 * (lane % 4) + i % 2] = sums[i];
}

/// d (+)= p * v for dimensions dim .. dim + 63: [heads][64]. p: [heads][keys / 2] pairs.
template <Half kHalf>
__global__ void values_kernel(const std::uint32_t* p, const uint4* v, float* d, int dim, bool accumulate) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const SharedAddress cache = device::shared_address(shared);
    store_tile<keys>(cache, v, dims);
    device::fence_async_proxy();
    __syncthreads();
    const int lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4;
    const int head = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
    device::FragmentA weights[keys / 16];
#pragma unroll
    for (int step = 0; step < keys / 16; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[step][i] = p[(head + i % 2 * 8) * (keys / 2) + step * 8 + i / 2 * 4 + t];
    const auto place = [&](int i) { return (head + i % 4 / 2 * 8) * 64 + i / 4 * 8 + 2 * t + i % 2; };
    float sums[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i] = d[place(i)];
    device::pin(sums);
    for (device::FragmentA& fragment : weights) device::pin(fragment);
    device::fence_mma();
#pragma unroll
    for (int step = 0; step < keys / 16; ++step)
        device::mma_async_values<kHalf>(sums, weights[step],
                                        BlockTile<keys>::values(cache) + BlockTile<keys>::values_from(dim, 16 * step),
                                        accumulate || step > 0);
    device::commit_mma();
    device::wait_for_mma<0>();
    device::pin(sums);
#pragma unroll
    for (int i = 0; i < 32; ++i) d[place(i)] = sums[i];
}

constexpr std::size_t shared_bytes = (heads + keys) * dims * 2;

std::vector<float> whole_numbers(int size, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<float> values(static_cast<std::size_t>(size));
    for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 17) - 8);
    return values;
}

/// Of a whole number.
template <Half kHalf>
std::uint32_t half_bits(float value) {
    if (kHalf == Half::bf16) return float_to_bf16(value);
    if (value == 0) return 0;
    const auto bits = std::bit_cast<std::uint32_t>(value);
    return (bits >> 16 & 0x8000) | (((bits & 0x7FFFFFFF) >> 13) - ((127 - 15) << 10));
}

template <Half kHalf>
std::vector<std::uint32_t> pairs(const std::vector<float>& values) {
    std::vector<std::uint32_t> words;
    for (std::size_t i = 0; i < values.size(); i += 2)
        words.push_back(half_bits<kHalf>(values[i]) | half_bits<kHalf>(values[i + 1]) << 16);
    return words;
}

template <Half kHalf>
void expect_heads_times_keys() {
    const std::vector<float> q = whole_numbers(heads * dims, 1), k = whole_numbers(keys * dims, 2);
    const DeviceArray<std::uint32_t> q_there(pairs<kHalf>(q)), k_there(pairs<kHalf>(k));
    const DeviceArray<float> d(static_cast<std::size_t>(heads * keys));
    run(scores_kernel<kHalf>, {.threads = 128, .shared_bytes = shared_bytes},
        reinterpret_cast<const uint4*>(q_there.data()), reinterpret_cast<const uint4*>(k_there.data()), d.data());
    const std::vector<float> got = d.values();
    for (int head = 0; head < heads; ++head)
        for (int key = 0; key < keys; ++key) {
            float sum = 0;
            for (int dim = 0; dim < dims; ++dim)
                sum += q[static_cast<std::size_t>(head * dims + dim)] * k[static_cast<std::size_t>(key * dims + dim)];
            ASSERT_EQ(got[static_cast<std::size_t>(head * keys + key)], sum) << "head " << head << ", key " << key;
        }
}

template <Half kHalf>
void expect_weights_times_values() {
    const std::vector<float> p = whole_numbers(heads * keys, 3), v = whole_numbers(keys * dims, 4);
    const DeviceArray<std::uint32_t> p_there(pairs<kHalf>(p)), v_there(pairs<kHalf>(v));
    for (const int dim : {0, 64, 128})
        for (const bool accumulate : {false, true}) {
            const std::vector<float> before = whole_numbers(heads * 64, 5);
            const DeviceArray<float> d(before);
            run(values_kernel<kHalf>, {.threads = 128, .shared_bytes = shared_bytes}, p_there.data(),
                reinterpret_cast<const uint4*>(v_there.data()), d.data(), dim, accumulate);
            const std::vector<float> got = d.values();
            for (int head = 0; head < heads; ++head)
                for (int i = 0; i < 64; ++i) {
                    const auto place = static_cast<std::size_t>(head * 64 + i);
                    float sum = accumulate ? before[place] : 0;
                    for (int key = 0; key < keys; ++key)
                        sum += p[static_cast<std::size_t>(head * keys + key)] *
                               v[static_cast<std::size_t>(key * dims + dim + i)];
                    ASSERT_EQ(got[place], sum) << "head " << head << ", dimension " << dim + i;
                }
        }
}

TEST_F(MmaWideDevice, HeadsTimesKeys) {
    expect_heads_times_keys<Half::f16>();
    expect_heads_times_keys<Half::bf16>();
}

TEST_F(MmaWideDevice, WeightsTimesValues) {
    expect_weights_times_values<Half::f16>();
    expect_weights_times_values<Half::bf16>();
}

}  // namespace
}  // namespace sparsemla::test
