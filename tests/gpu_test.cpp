// harness/gpu.h on a real GPU: memory, placement, streams, graphs. Where there is none, what its absence looks like.
#include "harness/gpu.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "harness/gpu_probes.h"
#include "harness/gpu_step.h"
#include "sparsemla/device.h"

namespace sparsemla::harness {
namespace {

constexpr Device gpu{Device::Kind::cuda, 0};

TEST(NoGpu, EveryEntrySaysSo) {
    if (gpu_count() != 0) GTEST_SKIP() << "there is a GPU";
    const ErrorKind kind = build_info().cuda ? ErrorKind::device : ErrorKind::unsupported;
    const auto refused = [&](const auto& call) {
        try {
            call();
            ADD_FAILURE() << "accepted";
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), kind) << error.what();
            const bool names_cuda = std::string(error.what()).find("CUDA") != std::string::npos;
            EXPECT_TRUE(names_cuda || build_info().cuda) << error.what();
        }
    };
    refused([] { const GpuBuffer buffer(gpu, 16); });
    refused([] { const GpuBuffer buffer(gpu, 16, {.placement = GpuPlacement::against_end}); });
    refused([] { const GpuStream stream(gpu); });
}

class Gpu : public testing::Test {
   protected:
    void SetUp() override {
        if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
    }
};

std::vector<std::uint8_t> pattern(std::size_t bytes) {
    std::vector<std::uint8_t> data(bytes);
    std::iota(data.begin(), data.end(), std::uint8_t{3});
    return data;
}

TEST_F(Gpu, BuffersHoldWhatWasPutThere) {
    for (const GpuPlacement placement : {GpuPlacement::plain, GpuPlacement::against_end, GpuPlacement::against_begin})
        for (const std::size_t bytes : {1, 15, 16, 4096, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, 50 << 20}) {
            GpuBuffer buffer(gpu, bytes, {.placement = placement});
            EXPECT_EQ(buffer.bytes(), bytes);
            EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 16, 0U);
            const std::vector<std::uint8_t> data = pattern(bytes);
            buffer.fill(0xAB);
            std::vector<std::uint8_t> held(bytes);
            buffer.download(held.data(), bytes);
            EXPECT_EQ(held, std::vector<std::uint8_t>(bytes, 0xAB));
            buffer.upload(data.data(), bytes);
            buffer.fill(0, bytes / 2, bytes - bytes / 2);
            buffer.download(held.data(), bytes);
            EXPECT_TRUE(std::equal(held.begin(), held.begin() + (bytes - bytes / 2), data.begin()));
            EXPECT_TRUE(std::all_of(held.begin() + (bytes - bytes / 2), held.end(), [](auto b) { return b == 0; }));
        }
}

TEST_F(Gpu, GuardedBuffersTouchTheEndOfTheirMapping) {
    constexpr std::size_t granule = 2 << 20;
    for (const std::size_t alignment : {16, 64})
        for (const std::size_t bytes : {std::size_t{1}, std::size_t{17}, std::size_t{1000}, granule, granule + 48}) {
            const GpuBuffer end(gpu, bytes, {.placement = GpuPlacement::against_end, .alignment_bytes = alignment});
            const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
            EXPECT_EQ((reinterpret_cast<std::uintptr_t>(end.data()) + rounded) % granule, 0U);
            const GpuBuffer begin(gpu, bytes, {.placement = GpuPlacement::against_begin});
            EXPECT_EQ(reinterpret_cast<std::uintptr_t>(begin.data()) % granule, 0U);
        }
}

TEST_F(Gpu, RangesOfATerabyteTakeOnlyTheirGranules) {
    constexpr std::size_t terabyte = std::size_t{1} << 40;
    GpuBuffer buffer(
        gpu, terabyte,
        {.placement = GpuPlacement::against_end, .backed = {{0, 1}, {terabyte / 2 - 8, 16}, {terabyte - 16, 16}}});
    buffer.fill(0x42);
    const std::vector<std::uint8_t> data = pattern(16);
    for (const std::size_t offset : {std::size_t{0}, terabyte / 2 - 8, terabyte - 16}) {
        std::vector<std::uint8_t> held(16);
        buffer.download(held.data(), 16, offset);
        EXPECT_EQ(held, std::vector<std::uint8_t>(16, 0x42));
        buffer.upload(data.data(), 16, offset);
        buffer.download(held.data(), 16, offset);
        EXPECT_EQ(held, data);
    }
}

TEST_F(Gpu, RangesOutsideABufferAreRefused) {
    GpuBuffer buffer(gpu, 100);
    std::vector<std::uint8_t> data(200);
    EXPECT_THROW(buffer.upload(data.data(), 101), Error);
    EXPECT_THROW(buffer.upload(data.data(), 1, 100), Error);
    EXPECT_THROW(buffer.download(data.data(), 2, 99), Error);
    EXPECT_THROW(buffer.fill(0, SIZE_MAX, 1), Error);
    EXPECT_NO_THROW(buffer.upload(data.data(), 0, 100));
    EXPECT_THROW(GpuBuffer({Device::Kind::cpu, 0}, 8), Error);
    EXPECT_THROW(GpuBuffer({Device::Kind::cuda, gpu_count()}, 8), Error);
}

TEST_F(Gpu, BuffersMove) {
    GpuBuffer first(gpu, 64);
    first.fill(7);
    std::byte* data = first.data();
    GpuBuffer second = std::move(first);
    EXPECT_EQ(second.data(), data);
    second = GpuBuffer(gpu, 32, {.placement = GpuPlacement::against_end});
    second.fill(1);
    second = GpuBuffer();
    EXPECT_EQ(second.bytes(), 0U);
}

TEST_F(Gpu, StreamsRunAndTimeWork) {
    const GpuStream stream(gpu);
    const GpuBuffer buffer(gpu, std::size_t{256} << 20);
    EXPECT_NE(stream.stream().handle, nullptr);
    const double us = stream.time_us([&](Stream on) { buffer.fill(5, on); });
    EXPECT_GT(us, 1);
    EXPECT_LT(us, 1e6);
    const std::vector<std::function<void(Stream)>> pieces(3, [&](Stream on) { buffer.fill(5, on); });
    const std::vector<double> each = stream.times_us(pieces);
    ASSERT_EQ(each.size(), 3U);
    for (const double of_piece : each) {
        EXPECT_GT(of_piece, 1);
        EXPECT_LT(of_piece, 1e6);
    }
    EXPECT_TRUE(stream.times_us({}).empty());
    buffer.fill(6, stream.stream());
    stream.synchronize();
    std::uint8_t last = 0;
    buffer.download(&last, 1, buffer.bytes() - 1);
    EXPECT_EQ(last, 6);
    EXPECT_THROW(stream.time_us([](Stream) { throw Error(ErrorKind::unsupported, "work", "nothing", "this"); }), Error);
}

TEST_F(Gpu, GraphsReplayWhatWasCaptured) {
    const GpuStream stream(gpu);
    GpuBuffer buffer(gpu, 1000);
    buffer.fill(1);
    int calls = 0;
    const GpuGraph graph(stream, [&](Stream on) {
        ++calls;
        buffer.fill(9, on);
    });
    std::uint8_t held = 0;
    buffer.download(&held, 1, 999);
    EXPECT_EQ(held, 1) << "captured, not run";
    graph.replay(stream.stream());
    stream.synchronize();
    buffer.download(&held, 1, 999);
    EXPECT_EQ(held, 9);
    EXPECT_GT(graph.time_us(stream), 0);
    EXPECT_GT(graph.time_us(stream, 20), 0);
    EXPECT_EQ(calls, 1);
}

TEST_F(Gpu, AFailedCaptureLeavesTheStreamUsable) {
    const GpuStream stream(gpu);
    const GpuBuffer buffer(gpu, 64);
    const auto fails = [&](Stream on) {
        buffer.fill(1, on);
        throw Error(ErrorKind::invalid_argument, "work", "nothing", "this");
    };
    EXPECT_THROW(GpuGraph(stream, fails), Error);
    buffer.fill(2, stream.stream());
    EXPECT_NO_THROW(stream.synchronize());
}

TEST_F(Gpu, ProbesRunOnAStreamAndInAGraph) {
    constexpr std::size_t bytes = 4 << 20;
    const std::vector<std::uint8_t> data = pattern(bytes);
    GpuBuffer from(gpu, bytes), to(gpu, bytes);
    from.upload(data.data(), bytes);
    to.fill(0);
    const GpuStream stream(gpu);
    read_on(gpu, stream.stream(), from.data(), bytes);
    copy_on(gpu, stream.stream(), to.data() + 16, from.data(), bytes - 16);
    stream.synchronize();
    std::vector<std::uint8_t> held(bytes);
    to.download(held.data(), bytes - 16, 16);
    EXPECT_TRUE(std::equal(held.begin(), held.end() - 16, data.begin()));
    const GpuGraph chain(stream, [](Stream on) {
        for (int i = 0; i < 100; ++i) empty_on(gpu, on);
    });
    EXPECT_GT(chain.time_us(stream), 10.0);
    EXPECT_GT(measure_clocks(gpu).sm_mhz, 100.0);
}

}  // namespace
}  // namespace sparsemla::harness
