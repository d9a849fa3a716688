// merge on a GPU gives the bits of the CPU, whatever the strides, types and counts; what lies beside its outputs stays.
#include <random>

#include "tests/cuda/kernels.h"
#include "tests/device.h"
#include "tests/merging.h"
#include "tests/mirror.h"

namespace sparsemla::test {
namespace {

using harness::GpuGraph;
using harness::GpuStream;

class GpuMerge : public testing::Test {
   protected:
    void SetUp() override {
        if (!on_gpu()) GTEST_SKIP() << "SPARSEMLA_TEST_DEVICE names no GPU";
        set_current_device(tested_device().device.index);
    }
};

/// A merge's tensors on the GPU, as they are now.
class MergingThere {
   public:
    explicit MergingThere(const Merging& m)
        : args_(m.args()), out_(device(), m.out.memory()), lse_(device(), m.lse.memory()) {
        for (std::size_t i = 0; i < m.partials.size(); ++i) {
            Partial partial = m.partials[i];
            partial.out = there(m.outs[i], partial.out);
            partial.lse = there(m.lses[i], partial.lse);
            for (const Padded& counts : m.counts)
                if (partial.counts.present() && partial.counts.data == counts.view().data)
                    partial.counts = there(counts, partial.counts);
            partials_.push_back(partial);
        }
        if (m.sinks) args_.sinks = there(*m.sinks, args_.sinks);
        args_.out = out_(args_.out);
        args_.lse = lse_(args_.lse);
        args_.partials = partials_;
    }
    MergingThere(const MergingThere&) = delete;

    const MergeArgs& args() const { return args_; }
    std::vector<std::uint8_t> out(std::size_t bytes) const { return out_.download<std::uint8_t>(bytes); }
    std::vector<std::uint8_t> lse(std::size_t bytes) const { return lse_.download<std::uint8_t>(bytes); }

   private:
    static Device device() { return tested_device().device; }
    template <class Void>
    BasicTensor<Void> there(const Padded& host, const BasicTensor<Void>& tensor) {
        return inputs_.emplace_back(device(), host.memory())(tensor);
    }

    MergeArgs args_;
    std::vector<Mirror> inputs_;
    Mirror out_, lse_;
    std::vector<Partial> partials_;
};

/// Equal bits, or NaN in both: which NaN a sum gives, arithmetic leaves open.
template <class Bits>
void expect_same_elements(const std::vector<std::uint8_t>& got, const std::vector<std::uint8_t>& wanted,
                          const std::string& what) {
    ASSERT_EQ(got.size(), wanted.size());
    const auto is_nan = [](Bits bits) {
        if constexpr (sizeof(Bits) == 2) return std::isnan(bf16_to_float(bits));
        return std::isnan(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    };
    for (std::size_t i = 0; i < got.size(); i += sizeof(Bits)) {
        Bits x = 0, y = 0;
        std::memcpy(&x, got.data() + i, sizeof x);
        std::memcpy(&y, wanted.data() + i, sizeof y);
        ASSERT_TRUE(x == y || (is_nan(x) && is_nan(y)))
            << what << ", element " << i / sizeof(Bits) << " of the memory: " << std::hex << x << " instead of " << y;
    }
}

void expect_same_outputs(const Merging& m, const MergingThere& there, const std::string& what) {
    const auto out = there.out(m.out.memory().size());
    if (m.options.out_dtype == DType::bf16)
        expect_same_elements<std::uint16_t>(out, m.out.memory(), what + ": out");
    else
        expect_same_elements<std::uint32_t>(out, m.out.memory(), what + ": out");
    expect_same_elements<std::uint32_t>(there.lse(m.lse.memory().size()), m.lse.memory(), what + ": lse");
}

/// On the GPU, then on the CPU.
void expect_cpu_bits(Merging& m, const std::string& what) {
    const MergingThere there(m);
    const GpuStream stream(tested_device().device);
    merge(there.args(), stream.stream());
    stream.synchronize();
    m.run(what);
    expect_same_outputs(m, there, what);
}

template <class T>
T one_of(std::mt19937& random, std::initializer_list<T> values) {
    return values.begin()[random() % values.size()];
}

/// What partials of kernels rarely are.
void add_awkward_values(Merging& m, std::mt19937& random) {
    constexpr float largest = std::numeric_limits<float>::max();
    for (int i = 0; i < 4; ++i) {
        const std::size_t partial = random() % m.partials.size();
        const std::int64_t row = random() % m.rows, head = random() % m.heads;
        m.lses[partial].set(
            one_of(random, {infinity, -infinity, not_a_number, 0.0F, -0.0F, 1e30F, -1e30F, largest, -largest}), row,
            head);
        const std::size_t other = random() % m.partials.size();
        m.outs[other].set(one_of(random, {infinity, -infinity, not_a_number, -0.0F, 1e-40F, 3e38F}), random() % m.rows,
                          random() % m.heads, random() % value_dims);
    }
}

std::vector<std::int32_t> random_counts(std::int64_t rows, std::mt19937& random) {
    std::vector<std::int32_t> counts;
    for (std::int64_t row = 0; row < rows; ++row)
        counts.push_back(one_of<std::int32_t>(random, {0, -1, 1, 64, 2048, 5}));
    return counts;
}

TEST_F(GpuMerge, TheBitsOfTheCpu) {
    for (int number = 0; number < 400; ++number) {
        std::mt19937 random(1000U + static_cast<unsigned>(number));
        const auto flag = [&] { return random() % 2 == 0; };
        const std::size_t n = number < 33 ? static_cast<std::size_t>(number) : 1 + random() % 32;
        const auto dtype = [&] { return flag() ? DType::bf16 : DType::f32; };
        const auto base = [&] { return flag() ? LseBase::two : LseBase::natural; };
        Merging m(n, 1 + random() % 5, 1 + random() % 6,
                  {.partial_dtype = dtype(),
                   .out_dtype = dtype(),
                   .partial_base = base(),
                   .lse_base = base(),
                   .padding = static_cast<std::int64_t>(random() % 6),
                   .transposed_lse = flag()});
        m.fill_random(random(), one_of(random, {2.0F, 30.0F, 200.0F}), one_of(random, {0.0, 0.25, 0.9}));
        m.plus_inf_is_empty = flag();
        if (n > 0 && random() % 3 == 0) add_awkward_values(m, random);
        if (flag()) {
            std::vector<float> sinks;
            for (std::int64_t head = 0; head < m.heads; ++head)
                sinks.push_back(
                    one_of(random, {-infinity, infinity, not_a_number, -1e30F, 1e30F, 0.0F, -3.5F, 12.25F, 95.0F}));
            m.set_sinks(sinks);
        }
        m.counts.reserve(n);
        for (std::size_t i = 0; i < n; ++i)
            if (random() % 4 == 0) m.set_counts(i, random_counts(m.rows, random));
        ASSERT_NO_FATAL_FAILURE(expect_cpu_bits(m, "problem " + std::to_string(number) + ", " + std::to_string(n) +
                                                       " partials, " + std::to_string(m.rows) + " x " +
                                                       std::to_string(m.heads)));
    }
}

// More rows and heads than a CTA has warps.
TEST_F(GpuMerge, ManyRowsAndHeads) {
    for (const std::int64_t padding : {0, 8}) {
        Merging m(8, 41, 37, {.partial_dtype = DType::bf16, .out_dtype = DType::bf16, .padding = padding});
        m.fill_random(7, 20, 0.2);
        m.set_sinks(std::vector<float>(37, 1.5F));
        ASSERT_NO_FATAL_FAILURE(expect_cpu_bits(m, "many, padding " + std::to_string(padding)));
    }
}

TEST_F(GpuMerge, AnOptionalLse) {
    Merging m(3, 2, 2, {});
    m.fill_random(9, 5, 0);
    const MergingThere there(m);
    const GpuStream stream(tested_device().device);
    MergeArgs args = there.args();
    args.lse = {};
    merge(args, stream.stream());
    stream.synchronize();
    EXPECT_TRUE(there.lse(m.lse.memory().size()) == m.lse.memory()) << "written without being asked for";
    m.run("with lse");
    expect_same_elements<std::uint32_t>(there.out(m.out.memory().size()), m.out.memory(), "out");
}

TEST_F(GpuMerge, MoreThanThirtyTwoPartialsAreRefused) {
    Merging m(33, 1, 1, {});
    m.fill_random(10, 5, 0);
    const MergingThere there(m);
    const GpuStream stream(tested_device().device);
    try {
        merge(there.args(), stream.stream());
        ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::unsupported) << error.what();
        EXPECT_EQ(error.argument(), "partials") << error.what();
        EXPECT_NE(std::string(error.what()).find("33"), std::string::npos) << error.what();
    }
    stream.synchronize();
    EXPECT_TRUE(there.out(m.out.memory().size()) == m.out.memory()) << "written though refused";
    EXPECT_STREQ(kept_error(), "");
}

TEST_F(GpuMerge, NothingToDo) {
    Merging m(2, 1, 1, {});
    m.fill_random(11, 5, 0);
    const MergingThere there(m);
    const GpuStream stream(tested_device().device);
    for (const auto& [rows, heads] : {std::pair{0, 1}, std::pair{1, 0}}) {
        MergeArgs args = there.args();
        args.rows = rows;
        args.heads = heads;
        merge(args, stream.stream());
    }
    stream.synchronize();
    EXPECT_TRUE(there.out(m.out.memory().size()) == m.out.memory()) << "written";
    EXPECT_STREQ(kept_error(), "");
}

// Partials by a kernel that lets merge start long before it writes them, in a graph and without (K25).
TEST_F(GpuMerge, ALateWriterIsSeen) {
    Merging before(3, 4, 5, {}), after(3, 4, 5, {});
    before.fill_random(12, 10, 0.2);
    after.fill_random(13, 10, 0.2);
    const MergingThere live(before), later(after), old(before);
    std::vector<LateWrite> writes, undo;
    for (std::size_t i = 0; i < 3; ++i) {
        const auto add = [&](const ConstTensor& to, const ConstTensor& from, const ConstTensor& back) {
            const std::size_t bytes = static_cast<std::size_t>(4 * (to.strides[0] * to.shape[0]));
            auto* at = static_cast<std::byte*>(const_cast<void*>(to.data));
            writes.push_back({at, static_cast<const std::byte*>(from.data), bytes});
            undo.push_back({at, static_cast<const std::byte*>(back.data), bytes});
        };
        add(live.args().partials[i].out, later.args().partials[i].out, old.args().partials[i].out);
        add(live.args().partials[i].lse, later.args().partials[i].lse, old.args().partials[i].lse);
    }
    after.run("after");
    constexpr double late_us = 300;
    const GpuStream stream(tested_device().device);
    const auto submit = [&](Stream on) {
        late_write(writes, late_us, on);
        merge(live.args(), on);
    };
    submit(stream.stream());  // loads what a capture may not
    stream.synchronize();
    const GpuGraph graph(stream, submit);
    for (int round = 0; round < 6; ++round) {
        plain_write(undo, 0, stream.stream());
        stream.synchronize();
        if (round % 2 == 0)
            submit(stream.stream());
        else
            graph.replay(stream.stream());
        stream.synchronize();
        ASSERT_NO_FATAL_FAILURE(expect_same_outputs(after, live, "round " + std::to_string(round)));
    }
}

}  // namespace
}  // namespace sparsemla::test
