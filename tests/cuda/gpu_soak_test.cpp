// Many launches of different plans while other kernels occupy part of the GPU: every one gives the same bits. 2000 of
// them, or SPARSEMLA_SOAK.
#include <cstdlib>
#include <memory>

#include "tests/cuda/gpu_calls.h"

namespace sparsemla::test {
namespace {

using harness::GpuBuffer;
using harness::GpuGraph;
using harness::GpuStream;

class GpuSoak : public OnGpu {};

int wanted_launches() { return std::max(1, std::atoi(environment("SPARSEMLA_SOAK", "2000").c_str())); }

/// A call that is repeated: outputs are overwritten by a kernel that lets decode start early, and compared afterwards.
class Repeated {
   public:
    Repeated(const RandomSpec& spec, const PlanOptions& options, std::uint64_t seed)
        : step_(random_step(spec, seed)), plan_(step_.plan(options)), call_(step_.place(plan_)) {
        const GpuStream stream(tested_device().device);
        fill_and_decode(stream.stream());
        for (const auto& [at, bytes] : output_bytes(call_.args)) {
            expected_.emplace_back(tested_device().device, bytes);
            plain_write({{expected_.back().data(), at, bytes}}, 0, stream.stream());
        }
        stream.synchronize();
        expect_oracle(step_, step_.run(plan_));
    }

    /// The number of bytes that differ is added to `count`.
    void submit(std::uint32_t* count, Stream stream) const {
        fill_and_decode(stream);
        const auto outputs = output_bytes(call_.args);
        for (std::size_t i = 0; i < outputs.size(); ++i)
            count_differences(outputs[i].first, expected_[i].data(), outputs[i].second, count, stream);
    }
    std::string text() const { return text_of(plan_); }

   private:
    void fill_and_decode(Stream stream) const {
        for (const auto& [at, bytes] : output_bytes(call_.args)) late_fill(at, 0xA5, bytes, stream);
        decode(plan_, call_.args, stream);
    }

    Step step_;
    Plan plan_;
    DeviceCall call_;
    std::vector<GpuBuffer> expected_;
};

struct Shape {
    RandomSpec spec;
    PlanOptions options;
};

/// Clusters of 1 to 16, every tile, both transports, one source and two, and CTAs that hand sums to each other; what
/// the kernel does not take is left out.
std::vector<Shape> shapes() {
    const RandomSpec wide{.rows = 5, .heads = 96, .widths = {700}};
    const RandomSpec long_row{.rows = 1, .heads = 16, .widths = {2048}};
    const RandomSpec two{.rows = 6, .heads = 16, .record = Record::fp8_512, .widths = {128, 512}};
    const RandomSpec short_row{.rows = 12, .heads = 12, .record = Record::fp8_512, .widths = {64}};
    const RandomSpec many{.rows = 150, .heads = 16, .record = Record::fp8_512, .widths = {200, 100}};
    const RandomSpec queries{.rows = 2, .heads = 64, .widths = {300}, .query_dtype = DType::bf16};
    return {{wide, {}},
            {wide, {.splits = 4, .transport = Transport::bulk}},
            {wide, {.splits = 4, .tile_heads = 16, .cluster_tiles = 2, .gather = Gather::bulk}},
            {long_row, {.splits = 12, .gather = Gather::bulk}},
            {wide, {.p_format = PFormat::e4m3, .splits = 2, .tile_heads = 32}},
            {long_row, {.splits = 16}},
            {long_row, {.splits = 8, .stages = 3, .trigger = Trigger::end}},
            {two, {}},
            {two, {.splits = 10, .trigger = Trigger::start}},
            {short_row, {}},
            {short_row, {.splits = 1, .tile_heads = 16}},
            {queries, {.splits = 3, .tile_heads = 32, .cluster_tiles = 2, .gather = Gather::bulk}},
            {queries, {.splits = 5, .tile_heads = 16}},
            {wide, {.kernel = "decode_balanced"}},
            {many, {.kernel = "decode_balanced", .splits = 1}},
            {many, {.kernel = "decode_balanced", .splits = 2, .tile_heads = 32, .trigger = Trigger::start}},
            {queries, {.kernel = "decode_balanced", .splits = 4, .gather = Gather::copies}},
            {wide, {.kernel = "decode_wide", .splits = 2}},
            {many, {.kernel = "decode_wide", .splits = 1}},
            {many, {.kernel = "decode_wide", .splits = 3, .trigger = Trigger::start}},
            {queries, {.kernel = "decode_wide", .splits = 5}}};
}

std::vector<std::unique_ptr<Repeated>> repeated_calls() {
    std::vector<std::unique_ptr<Repeated>> calls;
    for (const Shape& shape : shapes())
        if (random_step(shape.spec, 1).taken_by("decode_latency") &&
            supports(random_step(shape.spec, 1).problem, tested_device(), shape.options))
            calls.push_back(std::make_unique<Repeated>(shape.spec, shape.options, 500 + calls.size()));
    return calls;
}

/// How many bytes differed since the last time.
class Differences {
   public:
    Differences() : buffer_(tested_device().device, sizeof(std::uint32_t)) { buffer_.fill(0); }
    std::uint32_t* pointer() const { return reinterpret_cast<std::uint32_t*>(buffer_.data()); }
    std::uint32_t take() {
        std::uint32_t count = 0;
        buffer_.download(&count, sizeof count);
        buffer_.fill(0);
        return count;
    }

   private:
    GpuBuffer buffer_;
};

constexpr int calls_of_graph = 50;

/// Kernels of other sizes and lengths on another stream, so that clusters find places at different times.
void disturb(int round, Stream stream) {
    const int sms = tested_device().sms;
    const int shares[] = {1, sms / 8, sms / 3, sms / 2, sms - 20, sms - 1};
    for (int i = 0; i < 6; ++i) occupy(std::max(1, shares[(round + i) % 6]), 20 + (round * 37 + i * 11) % 150, stream);
}

TEST_F(GpuSoak, SameBitsBesideOtherKernels) {
    const std::vector<std::unique_ptr<Repeated>> calls = repeated_calls();
    ASSERT_FALSE(calls.empty());
    Differences differences;
    const GpuStream stream(tested_device().device), other(tested_device().device);
    std::size_t next = 0;
    const auto submit = [&](Stream on) { calls[next++ % calls.size()]->submit(differences.pointer(), on); };
    const GpuGraph graph(stream, [&](Stream on) {
        for (int i = 0; i < calls_of_graph; ++i) submit(on);
    });
    disturb(0, other.stream());
    other.synchronize();
    const int launches = wanted_launches();
    for (int done = 0, round = 0; done < launches; done += calls_of_graph, ++round) {
        disturb(round, other.stream());
        if (round % 4 == 3)
            for (int i = 0; i < calls_of_graph; ++i) submit(stream.stream());
        else
            graph.replay(stream.stream());
        if (round % 8 != 7 && done + calls_of_graph < launches) continue;
        stream.synchronize();
        other.synchronize();
        ASSERT_EQ(differences.take(), 0U) << "after " << done + calls_of_graph << " launches";
    }
}

// Each alone, so that a failure above has a name.
TEST_F(GpuSoak, EachPlanAlone) {
    const std::vector<std::unique_ptr<Repeated>> calls = repeated_calls();
    Differences differences;
    const GpuStream stream(tested_device().device), other(tested_device().device);
    const int launches = std::max(10, wanted_launches() / 20);
    for (const auto& call : calls) {
        for (int i = 0; i < launches; ++i) {
            if (i % 25 == 0) disturb(i, other.stream());
            call->submit(differences.pointer(), stream.stream());
        }
        stream.synchronize();
        other.synchronize();
        EXPECT_EQ(differences.take(), 0U) << call->text();
    }
}

// Two streams at a time, each with plans of its own.
TEST_F(GpuSoak, TwoStreamsAtOnce) {
    const std::vector<std::unique_ptr<Repeated>> calls = repeated_calls();
    ASSERT_GE(calls.size(), 2U);
    Differences differences;
    const GpuStream streams[] = {GpuStream(tested_device().device), GpuStream(tested_device().device)};
    const int launches = std::max(10, wanted_launches() / 2);
    for (int i = 0; i < launches; ++i)
        for (std::size_t k = 0; k < 2; ++k)
            calls[(static_cast<std::size_t>(i) * 2 + k) % (calls.size() / 2 * 2)]->submit(differences.pointer(),
                                                                                          streams[k].stream());
    for (const GpuStream& stream : streams) stream.synchronize();
    EXPECT_EQ(differences.take(), 0U);
}

}  // namespace
}  // namespace sparsemla::test
