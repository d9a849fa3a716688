// Steps whose inputs change between calls on a GPU, and calls by graph replay.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "harness/gpu.h"
#include "harness/gpu_mirror.h"
#include "tests/cuda/kernels.h"
#include "tests/step_expect.h"

namespace sparsemla::test {

/// Tests that only a GPU can pass or fail.
class OnGpu : public testing::Test {
   protected:
    void SetUp() override {
        if (!on_gpu()) GTEST_SKIP() << "SPARSEMLA_TEST_DEVICE names no GPU";
        set_current_device(tested_device().device.index);  // where the kernels of tests/cuda/kernels.h run
    }
};

struct RandomSpec {
    std::int64_t rows = 3;
    std::int64_t heads = 20;
    Record record = Record::fp8_576;
    std::vector<std::int64_t> widths{300};  ///< of each source
    DType query_dtype = DType::f8_e4m3;
    bool sinks = true;
    DType out_dtype = DType::bf16;
    LseBase lse_base = LseBase::natural;
    bool lse = true;
};

/// "5 rows, 96 heads, fp8 (576 bytes), widths 2048".
inline std::string to_string(const RandomSpec& spec) {
    std::string text = std::to_string(spec.rows) + " rows, " + std::to_string(spec.heads) + " heads, " +
                       sparsemla::to_string(spec.record) + ", widths";
    for (const std::int64_t width : spec.widths) text += " " + std::to_string(width);
    return text;
}

/// New lists with holes, new counts (awkward ones, negative and too large ones too) and new queries.
inline void shuffle(Step& step, std::uint64_t seed) {
    std::mt19937_64 bits(seed);
    std::normal_distribution<float> normal;
    for (std::size_t source = 0; source < step.problem.sources.size(); ++source) {
        const std::int64_t width = step.problem.sources[source].width;
        const std::int64_t num_slots = step.cache(source).num_slots();
        for (std::int64_t row = 0; row < step.problem.rows; ++row) {
            for (std::int64_t column = 0; column < width; ++column)
                step.slot(row, column, source) =
                    bits() % 11 == 0 ? -1 : static_cast<std::int32_t>(bits() % static_cast<std::uint64_t>(num_slots));
            const std::int64_t counts[] = {width, 0, 1, 63, 64, 65, -3, width + 9, width - 1, width / 2, width, width};
            step.count(row, counts[bits() % 12], source);
        }
    }
    step.query([&](int) { return normal(bits); });
    for (std::int64_t head = 0; step.problem.sinks && head < step.problem.heads; ++head)
        step.sink(head) = 3 * normal(bits);
}

/// Random records in every slot, then shuffle.
inline Step random_step(const RandomSpec& spec, std::uint64_t seed) {
    StepSpec full{.rows = spec.rows,
                  .heads = spec.heads,
                  .query_dtype = spec.query_dtype,
                  .sources = {},
                  .sinks = spec.sinks,
                  .lse = spec.lse,
                  .lse_base = spec.lse_base,
                  .out_dtype = spec.out_dtype};
    for (const std::int64_t width : spec.widths)
        full.sources.push_back(
            {.layout = {spec.record, layout_of(spec.record).default_form()}, .width = width, .pages = 3});
    Step step(full);
    randomise(step, seed);
    shuffle(step, seed + 1);
    return step;
}

/// Bytes of an input: on the host, and where the GPU's kernels read them.
struct InputBytes {
    std::byte* image = nullptr;
    const std::byte* host = nullptr;
    std::size_t bytes = 0;
};

/// Query, sinks, lists and counts: what changes from call to call.
inline std::vector<InputBytes> changing_inputs(const Step& step, const DecodeArgs& image) {
    std::vector<InputBytes> inputs;
    const auto add = [&](const ConstTensor& host, const ConstTensor& there) {
        if (!host.present() || host.elements() == 0) return;
        const harness::MirrorPart part = harness::part_of(host, "", harness::GpuPlacement::plain);
        inputs.push_back({static_cast<std::byte*>(const_cast<void*>(there.data)), part.begin, part.bytes});
    };
    add(step.args.query, image.query);
    add(step.args.sinks, image.sinks);
    for (std::size_t i = 0; i < step.problem.sources.size(); ++i) {
        add(step.args.sources[i].slots, image.sources[i].slots);
        add(step.args.sources[i].counts, image.sources[i].counts);
    }
    return inputs;
}

/// Those and the records.
inline std::vector<InputBytes> all_inputs(const Step& step, const DecodeArgs& image) {
    std::vector<InputBytes> inputs = changing_inputs(step, image);
    for (std::size_t i = 0; i < step.problem.sources.size(); ++i)
        inputs.push_back({const_cast<std::byte*>(image.sources[i].cache.data), step.args.sources[i].cache.data,
                          static_cast<std::size_t>(cache_bytes(step.args.sources[i].cache))});
    return inputs;
}

/// What the host holds now, on the GPU too.
inline void refresh(const std::vector<InputBytes>& inputs) {
    for (const InputBytes& input : inputs) upload(input.image, input.host, input.bytes);
}

/// Copies of inputs on the GPU, and the writes that bring them to where kernels read.
class Staged {
   public:
    /// What the host holds now.
    explicit Staged(const std::vector<InputBytes>& inputs) {
        for (const InputBytes& input : inputs) {
            buffers_.emplace_back(tested_device().device, input.bytes);
            buffers_.back().upload(input.host, input.bytes);
            writes_.push_back({input.image, buffers_.back().data(), input.bytes});
        }
    }
    const std::vector<LateWrite>& writes() const { return writes_; }

   private:
    std::vector<harness::GpuBuffer> buffers_;
    std::vector<LateWrite> writes_;
};

/// The outputs' bytes on the GPU, gaps between strides included.
inline std::vector<std::pair<std::byte*, std::size_t>> output_bytes(const DecodeArgs& image) {
    std::vector<std::pair<std::byte*, std::size_t>> outputs;
    for (const Tensor& tensor : {image.out, image.lse}) {
        if (!tensor.present()) continue;
        const harness::MirrorPart part = harness::part_of(tensor, "", harness::GpuPlacement::plain);
        outputs.emplace_back(static_cast<std::byte*>(tensor.data), part.bytes);
    }
    return outputs;
}

/// One call by `submit`, which must have run when it returns; outputs are poison before, inputs must not change.
template <class Submit>
Result run_by(Step& step, const Plan& plan, DeviceCall& call, const Submit& submit) {
    step.poison_outputs();
    call.run([&](const DecodeArgs&, Stream) { submit(); });
    return step.collect(plan);
}

inline Result replay(Step& step, const Plan& plan, DeviceCall& call, const harness::GpuGraph& graph,
                     const harness::GpuStream& stream) {
    return run_by(step, plan, call, [&] {
        graph.replay(stream.stream());
        stream.synchronize();
    });
}

inline void expect_same_bits(const Result& got, const Result& expected, const std::string& what) {
    ASSERT_EQ(got.rows, expected.rows) << what;
    for (std::int64_t row = 0; row < got.rows; ++row)
        ASSERT_TRUE(same_bits(got, row, expected, row))
            << what << ": row " << row << " differs, " << sparsemla::to_string(got.schedule);
}

inline std::string text_of(const Plan& plan) {
    return sparsemla::to_string(plan.schedule) + " " + (plan.tiling ? sparsemla::to_string(*plan.tiling) : "");
}

}  // namespace sparsemla::test
