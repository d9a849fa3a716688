// cuda/launch.h with the barriers between dependent grids: a kernel that starts early sees all that the grid before it
// wrote, however late, and overwrites nothing that it still reads. And registers that warpgroups hand to each other.
#include "cuda/device/barriers.cuh"
#include "tests/cuda/on_device.h"

namespace sparsemla::test {
namespace {

class LaunchDevice : public OnDevice {};

constexpr unsigned blocks = 8;
constexpr unsigned threads = 128;
constexpr int size = blocks * threads;
constexpr long long late_cycles = 1'000'000;  // half a millisecond: launching the next kernel takes microseconds

__device__ inline int index_of_thread() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

/// Lets the next grid start, and writes much later.
__global__ void late_writer(int* values, int value, int* ended) {
    device::wait_for_prerequisite_grids();
    device::launch_dependent_grids();
    spin(late_cycles);
    values[index_of_thread()] = value;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(ended, 1);
}

/// Copies what the grid before it wrote; notes whether it was there before that grid's end.
__global__ void reader(const int* values, int* copy, volatile int* ended, int before, int* early) {
    if (threadIdx.x == 0 && *ended < before + static_cast<int>(blocks)) atomicAdd(early, 1);
    device::wait_for_prerequisite_grids();
    device::launch_dependent_grids();
    copy[index_of_thread()] = values[index_of_thread()];
}

/// Pairs of a late writer and a reader on one stream; every reader copies to a place of its own.
template <class Submit>
void expect_readers_see(int pairs, unsigned cluster, const Submit& submit) {
    const DeviceArray<int> values(static_cast<std::size_t>(size)), copies(static_cast<std::size_t>(pairs * size));
    const DeviceArray<int> ended(std::vector<int>{0}), early(std::vector<int>{0});
    const detail::OwnedStream stream;
    submit(stream.get(), [&] {
        for (int pair = 0; pair < pairs; ++pair) {
            const detail::LaunchConfig config{
                .grid = dim3(blocks), .cluster = dim3(cluster), .threads = threads, .stream = stream.get()};
            detail::launch<int*, int, int*>(late_writer, config, "late_writer", values.data(), 100 + pair,
                                            ended.data());
            detail::launch<const int*, int*, volatile int*, int, int*>(reader, config, "reader", values.data(),
                                                                       copies.data() + pair * size, ended.data(),
                                                                       pair * static_cast<int>(blocks), early.data());
        }
    });
    detail::check_cuda(cudaStreamSynchronize(stream.get()), "the kernels");
    const std::vector<int> seen = copies.values();
    for (int pair = 0; pair < pairs; ++pair)
        for (int i = 0; i < size; ++i)
            ASSERT_EQ(seen[static_cast<std::size_t>(pair * size + i)], 100 + pair) << "pair " << pair << ", " << i;
    if (early.values()[0] == 0) GTEST_SKIP() << "values are right, but no reader started before its writer's end";
}

TEST_F(LaunchDevice, AReaderWaitsForALateWriter) {
    for (const unsigned cluster : {1U, 2U, 8U})
        expect_readers_see(6, cluster, [](cudaStream_t, const auto& work) { work(); });
}

TEST_F(LaunchDevice, AlsoInAGraph) {
    expect_readers_see(6, 2, [](cudaStream_t stream, const auto& work) {
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        detail::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        work();
        detail::check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
        detail::check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
        detail::check_cuda(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
        detail::check_cuda(cudaStreamSynchronize(stream), "the graph");
        cudaGraphExecDestroy(executable);
        cudaGraphDestroy(graph);
    });
}

/// Reads late, after the next grid may start.
__global__ void late_reader(const int* values, int* copy) {
    device::wait_for_prerequisite_grids();
    device::launch_dependent_grids();
    spin(late_cycles);
    copy[index_of_thread()] = values[index_of_thread()];
}

__global__ void early_writer(int* values, int value) {
    device::wait_for_prerequisite_grids();
    values[index_of_thread()] = value;
}

TEST_F(LaunchDevice, AWriterWaitsForALateReader) {
    const DeviceArray<int> values(std::vector<int>(size, 7)), copy(static_cast<std::size_t>(size));
    const detail::OwnedStream stream;
    const detail::LaunchConfig config{.grid = dim3(blocks), .threads = threads, .stream = stream.get()};
    detail::launch<const int*, int*>(late_reader, config, "late_reader", values.data(), copy.data());
    detail::launch<int*, int>(early_writer, config, "early_writer", values.data(), 8);
    detail::check_cuda(cudaStreamSynchronize(stream.get()), "the kernels");
    EXPECT_EQ(copy.values(), std::vector<int>(size, 7));
    EXPECT_EQ(values.values(), std::vector<int>(size, 8));
}

// ---------------------------------------------------------------------------------------------------------------------
constexpr int live_words = 160;  // of a thread, all in use at once
constexpr int rounds = 20;

/// One warpgroup gives registers back, two take them and keep more words alive than a thread had at first.
__global__ void __launch_bounds__(384, 1) registers_kernel(const std::uint32_t* in, std::uint32_t* out) {
    const unsigned thread = threadIdx.x;
    if (thread >= 256) {
        device::keep_registers<40>();
        out[thread] = in[thread] + 1;
        return;
    }
    device::take_registers<232>();
    std::uint32_t words[live_words];
#pragma unroll
    for (int i = 0; i < live_words; ++i) words[i] = in[thread + i];
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        const std::uint32_t first = words[0];
#pragma unroll
        for (int i = 0; i < live_words; ++i) words[i] = words[i] * 3 + (i + 1 < live_words ? words[i + 1] : first);
    }
    std::uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < live_words; ++i) sum = sum * 31 + words[i];
    out[thread] = sum;
}

std::uint32_t expected_sum(const std::uint32_t* in) {
    std::vector<std::uint32_t> words(in, in + live_words);
    for (int round = 0; round < rounds; ++round) {
        const std::uint32_t first = words[0];
        for (std::size_t i = 0; i < words.size(); ++i)
            words[i] = words[i] * 3 + (i + 1 < words.size() ? words[i + 1] : first);
    }
    std::uint32_t sum = 0;
    for (const std::uint32_t word : words) sum = sum * 31 + word;
    return sum;
}

TEST_F(LaunchDevice, RegistersMoveBetweenWarpgroups) {
    std::vector<std::uint32_t> in(512);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::uint32_t>(i * 2654435761U);
    const DeviceArray<std::uint32_t> from(in), to(384);
    for (int repeat = 0; repeat < 10; ++repeat) {
        run(registers_kernel, {.grid = dim3(200), .threads = 384}, from.data(), to.data());
        const std::vector<std::uint32_t> out = to.values();
        for (std::size_t i = 0; i < 256; ++i) ASSERT_EQ(out[i], expected_sum(in.data() + i)) << i;
        for (std::size_t i = 256; i < 384; ++i) ASSERT_EQ(out[i], in[i] + 1) << i;
    }
}

TEST_F(LaunchDevice, WhatCannotBeLaunchedIsAnErrorAndLeavesNoTrace) {
    const DeviceArray<int> values(static_cast<std::size_t>(size));
    const auto launch_with = [&](std::size_t shared_bytes, unsigned threads_of_cta) {
        run(early_writer, {.grid = dim3(blocks), .threads = threads_of_cta, .shared_bytes = shared_bytes},
            values.data(), 9);
    };
    EXPECT_THROW(launch_with(std::size_t{200} << 10, threads), Error);  // was not allowed
    EXPECT_THROW(launch_with(0, 2048), Error);
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
    launch_with(0, threads);
    EXPECT_EQ(values.values(), std::vector<int>(size, 9));
    detail::allow_launches(early_writer, std::size_t{200} << 10, "early_writer");
    EXPECT_NO_THROW(launch_with(std::size_t{200} << 10, threads));
}

}  // namespace
}  // namespace sparsemla::test
