// cuda/device/copies.cuh: asynchronous copies that read nothing where a column is absent, the barriers that say when
// they have come, typed accesses to shared memory, and which element of which matrix ldmatrix hands to which lane.
#include <algorithm>
#include <array>

#include "cuda/device/copies.cuh"
#include "harness/gpu.h"
#include "tests/cuda/on_device.h"

namespace sparsemla::test {
namespace {

using device::SharedAddress;

class CopiesDevice : public OnDevice {};

constexpr Device gpu{Device::Kind::cuda, 0};

std::vector<std::uint8_t> pattern(std::size_t bytes) {
    std::vector<std::uint8_t> values(bytes);
    for (std::size_t i = 0; i < bytes; ++i) values[i] = static_cast<std::uint8_t>(i * 37 + 11);
    return values;
}

/// An mbarrier of a CTA, whose every phase takes `arrivals`.
__device__ inline SharedAddress start_barrier(std::uint64_t* memory, std::uint32_t arrivals) {
    const SharedAddress barrier = device::shared_address(memory);
    if (threadIdx.x == 0) {
        device::init_mbarrier(barrier, arrivals);
        device::fence_mbarrier_init();
    }
    __syncthreads();
    return barrier;
}

/// A lane of `absent` copies from address `elsewhere`, which nobody may read; its 16 bytes must become zeros.
__global__ void copy_kernel(const std::byte* from, const std::byte* elsewhere, std::uint32_t absent, std::byte* out) {
    __shared__ __align__(16) uint4 shared[32];
    __shared__ std::uint64_t memory;
    const SharedAddress barrier = start_barrier(&memory, 32);
    const unsigned lane = threadIdx.x;
    shared[lane] = {0xEEEEEEEE, 0xEEEEEEEE, 0xEEEEEEEE, 0xEEEEEEEE};
    __syncthreads();
    const bool is_absent = (absent >> lane & 1) != 0;
    device::copy_16_async(device::shared_address(&shared[lane]), is_absent ? elsewhere : from + 16 * lane, is_absent);
    device::arrive_after_copies(barrier);
    device::wait_mbarrier(barrier, 0);
    reinterpret_cast<uint4*>(out)[31 - lane] = shared[31 - lane];
}

TEST_F(CopiesDevice, AbsentSourcesAreZerosAndNeverRead) {
    constexpr std::size_t bytes = 32 * 16;
    const std::vector<std::uint8_t> data = pattern(bytes);
    harness::GpuBuffer source(gpu, bytes, {.placement = harness::GpuPlacement::against_end});
    source.upload(data.data(), bytes);
    const std::byte* unmapped = source.data() + bytes;
    for (const std::byte* elsewhere : {unmapped, static_cast<const std::byte*>(nullptr)})
        for (const std::uint32_t absent : {0U, ~0U, 0x80000001U, 0x5A5AF00FU}) {
            const DeviceArray<std::uint8_t> out(bytes);
            run(copy_kernel, {.threads = 32}, source.data(), elsewhere, absent,
                reinterpret_cast<std::byte*>(out.data()));
            std::vector<std::uint8_t> expected = data;
            for (std::size_t i = 0; i < bytes; ++i)
                if ((absent >> (i / 16) & 1) != 0) expected[i] = 0;
            EXPECT_EQ(out.values(), expected) << std::hex << absent;
        }
}

/// Stages of copies by all threads, all under way at once, each with a barrier; a thread looks at what others copied.
__global__ void stages_kernel(const uint4* from, uint4* out) {
    constexpr unsigned threads = 128;
    constexpr int stages = 4;
    __shared__ __align__(16) uint4 shared[stages][threads];
    __shared__ std::uint64_t memory[stages];
    SharedAddress barriers[stages];
#pragma unroll
    for (int stage = 0; stage < stages; ++stage) barriers[stage] = start_barrier(&memory[stage], threads);
    const unsigned i = threadIdx.x;
    for (std::uint32_t round = 0; round < 2; ++round) {
        for (int stage = 0; stage < stages; ++stage) shared[stage][i] = {0, 0, 0, 0};
        __syncthreads();
#pragma unroll
        for (int stage = 0; stage < stages; ++stage) {
            device::copy_16_async(device::shared_address(&shared[stage][i]), from + stage * threads + i, false);
            device::arrive_after_copies(barriers[stage]);
        }
#pragma unroll
        for (int stage = 0; stage < stages; ++stage) {
            device::wait_mbarrier(barriers[stage], round);
            const unsigned other = (i * 37 + 5) % threads;
            out[stage * threads + other] = shared[stage][other];
        }
        __syncthreads();
    }
}

/// Runs of bytes by the copy engine, from and to different places.
__global__ void bulk_kernel(const std::byte* from, std::uint32_t bytes, uint4* out) {
    __shared__ __align__(128) uint4 shared[64];
    __shared__ std::uint64_t memory;
    const SharedAddress barrier = start_barrier(&memory, 1);
    const unsigned i = threadIdx.x;
    shared[i] = {0, 0, 0, 0};
    device::fence_async_proxy();
    __syncthreads();
    if (i == 0) {
        device::arrive_expecting(barrier, bytes);
        device::copy_bulk_async(device::shared_address(shared) + 16, from, bytes, barrier);
    }
    device::wait_mbarrier(barrier, 0);
    out[i] = shared[i];
}

/// What a thread wrote is there for whoever waits for the phase that it arrived at.
__global__ void arrivals_kernel(std::uint32_t* out) {
    __shared__ std::uint32_t shared[96];
    __shared__ std::uint64_t memory;
    const SharedAddress barrier = start_barrier(&memory, 64);
    const unsigned i = threadIdx.x;
    if (i >= 32) {
        if (i % 32 == 7) spin(100000);
        shared[i] = i * 3;
        device::arrive(barrier);
        return;
    }
    device::wait_mbarrier(barrier, 0);
    out[i] = shared[32 + i];
    out[32 + i] = shared[64 + i];
}

/// Warps 0 and 1 meet at a barrier of their own while warp 2 is far away.
__global__ void some_warps_kernel(std::uint32_t* out) {
    __shared__ std::uint32_t shared[64];
    const unsigned i = threadIdx.x;
    if (i >= 64) {
        spin(200000);
        return;
    }
    for (std::uint32_t round = 0; round < 3; ++round) {
        if (i / 32 == round % 2) spin(20000);
        shared[i] = i + round;
        device::sync_threads(1, 64);
        out[round * 64 + i] = shared[63 - i];
        device::sync_threads(1, 64);
    }
}

std::vector<uint4> vectors_of(const std::vector<std::uint8_t>& bytes) {
    std::vector<uint4> vectors(bytes.size() / 16);
    std::memcpy(vectors.data(), bytes.data(), bytes.size());
    return vectors;
}

bool same_bytes(const std::vector<uint4>& a, const std::vector<uint4>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 16) == 0;
}

TEST_F(CopiesDevice, StagesAreThereOnceTheirBarrierSaysSo) {
    const std::vector<uint4> data = vectors_of(pattern(4 * 128 * 16));
    const DeviceArray<uint4> from(data), out(data.size());
    for (int repeat = 0; repeat < 20; ++repeat) {
        run(stages_kernel, {.threads = 128}, from.data(), out.data());
        ASSERT_TRUE(same_bytes(out.values(), data)) << "repeat " << repeat;
    }
}

TEST_F(CopiesDevice, BulkCopiesOfEveryLength) {
    constexpr std::size_t size = 64 * 16;
    const std::vector<std::uint8_t> data = pattern(size);
    harness::GpuBuffer source(gpu, size, {.placement = harness::GpuPlacement::against_end});
    source.upload(data.data(), size);
    for (const std::uint32_t bytes : {16U, 32U, 512U, 576U, 1008U}) {
        const DeviceArray<uint4> out(64);
        run(bulk_kernel, {.threads = 64}, source.data() + (size - bytes), bytes, out.data());
        std::vector<std::uint8_t> expected(size, 0);
        std::copy(data.end() - bytes, data.end(), expected.begin() + 16);
        EXPECT_TRUE(same_bytes(out.values(), vectors_of(expected))) << bytes;
    }
}

TEST_F(CopiesDevice, ArrivalsRelease) {
    const DeviceArray<std::uint32_t> out(64);
    for (int repeat = 0; repeat < 20; ++repeat) {
        run(arrivals_kernel, {.threads = 96}, out.data());
        const std::vector<std::uint32_t> seen = out.values();
        for (std::size_t i = 0; i < 64; ++i) ASSERT_EQ(seen[i], (32 + i) * 3);
    }
}

TEST_F(CopiesDevice, SomeWarpsMeet) {
    const DeviceArray<std::uint32_t> out(3 * 64);
    run(some_warps_kernel, {.threads = 96}, out.data());
    const std::vector<std::uint32_t> seen = out.values();
    for (std::size_t round = 0; round < 3; ++round)
        for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(seen[round * 64 + i], 63 - i + round) << round;
}

struct LoadWord {
    __device__ std::int32_t operator()(const std::int32_t* from) const { return device::load_global(from); }
};
struct LoadVector {
    __device__ uint4 operator()(const uint4* from) const { return device::load_global(from); }
};

TEST_F(CopiesDevice, GlobalLoads) {
    const std::vector<uint4> data = vectors_of(pattern(64 * 16));
    const DeviceArray<uint4> memory(data);
    std::vector<const uint4*> vectors;
    std::vector<const std::int32_t*> words;
    for (std::size_t i = 0; i < data.size(); ++i) {
        vectors.push_back(memory.data() + i);
        words.push_back(reinterpret_cast<const std::int32_t*>(memory.data() + i) + 3);
    }
    EXPECT_TRUE(same_bytes(map<uint4, LoadVector>(vectors), data));
    const std::vector<std::int32_t> loaded = map<std::int32_t, LoadWord>(words);
    for (std::size_t i = 0; i < data.size(); ++i) EXPECT_EQ(loaded[i], static_cast<std::int32_t>(data[i].w));
}

/// Every typed store by lane 0, each to 16 bytes of its own; every load of them by all lanes.
__global__ void shared_kernel(uint4* words, float4* loaded) {
    __shared__ __align__(16) uint4 shared[8];
    const unsigned lane = threadIdx.x;
    if (lane < 8) shared[lane] = {0, 0, 0, 0};
    __syncwarp();
    const SharedAddress base = device::shared_address(shared);
    if (lane == 0) {
        device::store_shared(base, uint4{1, 2, 3, 4});
        device::store_shared(base + 16, 1.0F, 2.0F, 3.0F, 4.0F);
        device::store_shared(base + 32 + 8, 5.0F, 6.0F);
        device::store_shared(base + 48 + 4, std::uint32_t{0xDEADBEEF});
        device::store_shared(base + 64 + 12, 7.0F);
        device::store_shared_8(base + 80 + 6, 0x1CD);
        device::store_shared_8(base + 80 + 7, 0x2AB);
    }
    __syncwarp();
    if (lane < 8) words[lane] = shared[lane];
    const float2 pair = device::load_shared<float2>(base + 32 + 8);
    const float4 four = device::load_shared<float4>(base + 16);
    loaded[lane] = {pair.x, pair.y, four.x, static_cast<float>(device::load_shared_16(base + 80 + 6))};
}

TEST_F(CopiesDevice, SharedStoresAndLoads) {
    const DeviceArray<uint4> words(8);
    const DeviceArray<float4> loaded(32);
    run(shared_kernel, {.threads = 32}, words.data(), loaded.data());
    const auto bits = [](float value) {
        std::uint32_t word;
        std::memcpy(&word, &value, sizeof word);
        return word;
    };
    const std::vector<uint4> expected = {{1, 2, 3, 4},
                                         {bits(1), bits(2), bits(3), bits(4)},
                                         {0, 0, bits(5), bits(6)},
                                         {0, 0xDEADBEEF, 0, 0},
                                         {0, 0, 0, bits(7)},
                                         {0, 0xABCD0000, 0, 0},
                                         {0, 0, 0, 0},
                                         {0, 0, 0, 0}};
    EXPECT_TRUE(same_bytes(words.values(), expected));
    for (const float4& value : loaded.values()) {
        EXPECT_EQ(value.x, 5.0F);
        EXPECT_EQ(value.y, 6.0F);
        EXPECT_EQ(value.z, 1.0F);
        EXPECT_EQ(value.w, static_cast<float>(0xABCD));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
enum class Matrices { two, four, four_transposed };

/// Element (row, column) of matrix m is m * 64 + row * 8 + column; rows lie `pitch` bytes apart, as records do.
template <Matrices kWhich>
__global__ void matrices_kernel(uint4* out) {
    constexpr int pitch = 592;
    __shared__ __align__(16) unsigned char shared[32 * pitch];
    const int lane = static_cast<int>(threadIdx.x);
    for (int column = 0; column < 8; ++column)
        reinterpret_cast<std::uint16_t*>(shared + lane * pitch)[column] = static_cast<std::uint16_t>(lane * 8 + column);
    __syncwarp();
    const SharedAddress row = device::shared_address(shared) + lane * pitch;
    std::uint32_t words[4] = {};
    if constexpr (kWhich == Matrices::two) {
        std::uint32_t pair[2];
        device::load_matrices(pair, row);
        words[0] = pair[0];
        words[1] = pair[1];
    } else if constexpr (kWhich == Matrices::four) {
        device::load_matrices(words, row);
    } else {
        device::load_matrices_transposed(words, row);
    }
    out[lane] = {words[0], words[1], words[2], words[3]};
}

template <Matrices kWhich>
void expect_matrices(int count) {
    const DeviceArray<uint4> out(32);
    run(matrices_kernel<kWhich>, {.threads = 32}, out.data());
    const std::vector<uint4> lanes = out.values();
    for (int lane = 0; lane < 32; ++lane) {
        const uint4& words = lanes[static_cast<std::size_t>(lane)];
        const std::array<std::uint32_t, 4> of_lane = {words.x, words.y, words.z, words.w};
        for (int matrix = 0; matrix < count; ++matrix)
            for (int i = 0; i < 2; ++i) {
                const int major = lane / 4, minor = 2 * (lane % 4) + i;
                const int element = kWhich == Matrices::four_transposed ? minor * 8 + major : major * 8 + minor;
                EXPECT_EQ(of_lane[static_cast<std::size_t>(matrix)] >> (16 * i) & 0xFFFF,
                          static_cast<std::uint32_t>(matrix * 64 + element))
                    << "lane " << lane << ", matrix " << matrix << ", half " << i;
            }
    }
}

TEST_F(CopiesDevice, TwoMatrices) { expect_matrices<Matrices::two>(2); }
TEST_F(CopiesDevice, FourMatrices) { expect_matrices<Matrices::four>(4); }
TEST_F(CopiesDevice, FourMatricesTransposed) { expect_matrices<Matrices::four_transposed>(4); }

}  // namespace
}  // namespace sparsemla::test
