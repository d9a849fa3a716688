// The fast kernel against the float64 oracle: every record and form, P format, anchor, split count, column rule,
// chunk, head count and width, in every pair of values; on every SIMD target of this machine.
#include <hwy/targets.h>

#include <random>

#include "harness/pairwise.h"
#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

struct Options {
    Layout layout, second_layout;
    bool two_sources = false;
    StepSpec step;
    PlanOptions plan;
    double absent = 0;
    bool ragged = false;
    float out_scale = 1.0F;
};

std::string describe(const Options& options, std::uint64_t seed) {
    std::string text = name(options.layout) + (options.two_sources ? " + " + name(options.second_layout) : "");
    text += ", heads " + std::to_string(options.step.heads);
    for (const SourceSpec& source : options.step.sources) text += ", width " + std::to_string(source.width);
    return text + ", absent " + std::to_string(options.absent) + (options.ragged ? ", ragged" : "") +
           (options.step.sinks ? ", sinks" : "") + ", seed " + std::to_string(seed);
}

/// Lists of random slots with absent columns of every kind, and counts.
void fill_lists(Step& step, const Options& options, std::mt19937_64& bits) {
    for (std::size_t source = 0; source < step.problem.sources.size(); ++source) {
        const std::int64_t width = step.problem.sources[source].width;
        const auto num_slots = static_cast<std::int32_t>(step.cache(source).num_slots());
        const std::int32_t absent[] = {-1, std::numeric_limits<std::int32_t>::min(), num_slots,
                                       std::numeric_limits<std::int32_t>::max()};
        for (std::int64_t row = 0; row < step.args.rows; ++row) {
            for (std::int64_t column = 0; column < width; ++column) {
                const bool present = std::uniform_real_distribution<>()(bits) >= options.absent;
                step.slot(row, column, source) =
                    present ? static_cast<std::int32_t>(bits() % num_slots) : absent[bits() % std::size(absent)];
            }
            const std::int64_t count = options.ragged ? static_cast<std::int64_t>(bits() % (width + 2)) : width;
            step.count(row, step.problem.sources[source].count_offset + count, source);
        }
    }
}

/// The options, or of those that a GPU kernel does not take the ones that matter most; nothing where it takes none.
std::optional<PlanOptions> taken_options(const Step& step, const PlanOptions& wish) {
    if (!on_gpu()) return wish;
    const std::string& kernel = wish.kernel;
    for (const PlanOptions& options :
         {wish, PlanOptions{.kernel = kernel, .p_format = wish.p_format, .splits = wish.splits},
          PlanOptions{.kernel = kernel, .splits = wish.splits},
          PlanOptions{.kernel = kernel, .p_format = wish.p_format}, PlanOptions{.kernel = kernel}})
        if (supports(step.problem, step.device, options)) return options;
    return std::nullopt;
}

/// Whether the kernel takes the options, and with them the step.
bool expect_within_bounds(const Options& options, std::uint64_t seed) {
    SCOPED_TRACE(describe(options, seed));
    std::mt19937_64 bits(seed);
    StepSpec spec = options.step;
    if (!Step(spec).taken_by(options.plan.kernel)) spec.query_dtype = DType::f8_e4m3;
    Step step(spec);
    randomise(step, seed);
    fill_lists(step, options, bits);
    step.args.out_scale = options.out_scale;
    step.args.q_scale.value = 0.75F;
    for (std::size_t source = 0; source < step.problem.sources.size(); ++source)
        if (layout_of(step.problem.sources[source].record).takes_k_scale)
            step.args.sources[source].k_scale.value = source == 0 ? 1.25F : 0.375F;
    if (options.step.sinks)
        for (std::int64_t head = 0; head < options.step.heads; ++head)
            step.sink(head) = static_cast<float>(head % 5) - 2.0F;
    const std::optional<PlanOptions> taken = taken_options(step, options.plan);
    if (!taken) return false;
    const Result result = step.run(*taken);

    Tensor out;
    std::vector<std::uint16_t> halves(result.out_bits.begin(), result.out_bits.end());
    std::vector<std::uint32_t> words = result.out_bits, lse_words = result.lse_bits;
    if (result.out_dtype == DType::bf16)
        out = dense(halves.data(), DType::bf16, {result.rows, result.heads, value_dims});
    else
        out = dense(words.data(), DType::f32, {result.rows, result.heads, value_dims});
    const Tensor lse = dense(lse_words.data(), DType::f32, {result.rows, result.heads});
    const harness::Verdict verdict =
        harness::compare(harness::compute_oracle(step.case_step()), out, lse, step.problem.lse_base,
                         harness::accuracy_of(result.schedule), true);
    EXPECT_TRUE(verdict.pass) << to_string(result.schedule) << ": " << verdict.problem;
    return true;
}

template <class T>
T pick(std::initializer_list<T> values, int index) {
    return values.begin()[index];
}

constexpr auto head_counts = {1, 2, 4, 6, 8, 9, 12, 16, 17, 24, 33, 96, 128};
constexpr auto widths = {0, 1, 63, 64, 65, 129, 257};

/// The options that one combination of pairwise_cover stands for.
Options options_of(const std::vector<int>& choice, const std::vector<Layout>& all) {
    int i = 0;
    const auto next = [&] { return choice[static_cast<std::size_t>(i++)]; };
    Options options;
    options.layout = all[static_cast<std::size_t>(next())];
    options.step.heads = pick(head_counts, next());
    SourceSpec source{.layout = options.layout, .width = pick(widths, next()), .pages = 3, .page_size = 40};
    options.step.query_dtype = pick({DType::f8_e4m3, DType::bf16}, next());
    options.plan.kernel = fast_kernel();
    options.plan.p_format = pick({PFormat::f16, PFormat::e4m3, PFormat::bf16}, next());
    options.plan.anchor = pick({Anchor::split_running_max, Anchor::chunk_max, Anchor::row_max}, next());
    options.plan.splits = pick<std::optional<int>>({std::nullopt, 1, 3, 64}, next());
    options.plan.columns = pick({ColumnRule::blocks, ColumnRule::interleaved, ColumnRule::round_robin}, next());
    options.plan.chunk = pick<std::optional<int>>({std::nullopt, 1, 7, 256}, next());
    options.absent = pick({0.0, 0.2, 0.9}, next());
    options.ragged = next() == 1;
    options.step.sinks = next() == 1;
    options.step.lse_base = pick({LseBase::natural, LseBase::two}, next());
    options.step.out_dtype = pick({DType::bf16, DType::f32}, next());
    options.out_scale = pick({1.0F, -0.3F}, next());
    options.step.rows = 2;
    options.step.sources = {source};
    const int second = next();  // none, the same record, or another one of the same d_qk
    if (second != 0) {
        options.two_sources = true;
        options.second_layout = options.layout;
        for (const Layout& other : all)
            if (second == 2 && other.record != options.layout.record &&
                other.bytes().d_qk() == options.layout.bytes().d_qk())
                options.second_layout = other;
        options.step.sources.push_back({.layout = options.second_layout, .width = 70, .count_offset = 5, .pages = 2});
    }
    return options;
}

TEST(FastKernel, WithinBoundsOverEveryPairOfOptions) {
    const std::vector<Layout> all = layouts_of(fast_kernel());
    const std::vector<int> sizes = {static_cast<int>(all.size()),
                                    static_cast<int>(head_counts.size()),
                                    static_cast<int>(widths.size()),
                                    2,
                                    3,
                                    3,
                                    4,
                                    3,
                                    4,
                                    3,
                                    2,
                                    2,
                                    2,
                                    2,
                                    2,
                                    3};
    std::uint64_t seed = 100;
    int ran = 0;
    for (const std::vector<int>& choice : harness::pairwise_cover(sizes)) {
        ran += expect_within_bounds(options_of(choice, all), ++seed) ? 1 : 0;
        if (HasFailure()) return;
    }
    EXPECT_GT(ran, 0);
    RecordProperty("steps", ran);
}

/// Lets one SIMD target serve all calls of its lifetime.
class OnTarget {
   public:
    explicit OnTarget(std::int64_t target) {
        hwy::SetSupportedTargetsForTest(target);
        hwy::GetChosenTarget().DeInit();
    }
    ~OnTarget() {
        hwy::SetSupportedTargetsForTest(0);
        hwy::GetChosenTarget().DeInit();
    }
    OnTarget(const OnTarget&) = delete;
    OnTarget& operator=(const OnTarget&) = delete;
};

std::vector<std::int64_t> usable_targets() {
    std::vector<std::int64_t> targets;
    const std::int64_t usable = (hwy::SupportedTargets() & HWY_TARGETS) | HWY_STATIC_TARGET;
    for (int bit = 0; bit < 63; ++bit)
        if ((usable >> bit & 1) != 0) targets.push_back(std::int64_t{1} << bit);
    return targets;
}

TEST(CpuKernel, WithinBoundsOnEverySimdTarget) {
    if (on_gpu()) GTEST_SKIP() << "SIMD targets are the CPU's";
    for (const std::int64_t target : usable_targets()) {
        const OnTarget forced(target);
        EXPECT_EQ(cpu_spec().name, hwy::TargetName(target));
        SCOPED_TRACE(hwy::TargetName(target));
        std::uint64_t seed = 500;
        for (const Layout& layout : layouts())
            for (const PFormat format : {PFormat::f16, PFormat::e4m3, PFormat::bf16}) {
                Options options;
                options.layout = layout;
                options.step.heads = 13;
                options.step.sinks = true;
                options.step.sources = {{.layout = layout, .width = 21, .pages = 1}};
                options.plan = {.kernel = "cpu", .p_format = format, .splits = 2, .chunk = 8};
                expect_within_bounds(options, ++seed);
            }
    }
}

TEST(CpuKernel, EveryCodeOfEveryRecordOnEverySimdTarget) {
    // One column has weight 1, so that the output is the record's values: bytes counted up reach every code, and
    // scales from subnormal to large.
    for (const std::int64_t target : usable_targets()) {
        const OnTarget forced(target);
        for (const Layout& layout : layouts()) {
            SCOPED_TRACE(hwy::TargetName(target) + std::string(" ") + name(layout));
            constexpr std::int64_t slots = 128;
            Step step({.rows = slots,
                       .sources = {{.layout = layout, .width = 1, .pages = 2}},
                       .lse = false,
                       .out_dtype = DType::f32});
            step.query([](int) { return 0.0F; });
            for (std::int32_t s = 0; s < slots; ++s) {
                const auto at = locate(step.cache(), s);
                const RecordLayout& bytes = layout.bytes();
                for (int i = 0; i < bytes.main.bytes(); ++i) at.data[i] = static_cast<std::byte>(i + 3 * s);
                for (int i = 0; i < bytes.rope.bytes(); ++i) at.rope[i] = static_cast<std::byte>(5 * i + s);
                for (int i = 0; i < bytes.groups() * bytes.scale_size(); ++i)
                    at.scales[i] = static_cast<std::byte>(7 * i + 2 * s + 1);
                step.list(s, {s});
            }
            const Result result = step.run({.kernel = "cpu"});
            std::vector<std::int32_t> list = slot_range(0, slots);
            std::vector<float> values(static_cast<std::size_t>(slots * d_qk(step.problem)));
            unpack(step.cache(), dense(list.data(), DType::i32, {slots}),
                   dense(values.data(), DType::f32, {slots, d_qk(step.problem)}));
            for (std::int32_t s = 0; s < slots; ++s) {
                // A NaN anywhere makes the score NaN, hence the whole row.
                const auto first = values.begin() + s * d_qk(step.problem);
                const bool finite =
                    std::all_of(first, first + d_qk(step.problem), [](float v) { return std::isfinite(v); });
                for (int d = 0; d < value_dims; ++d)
                    if (finite)
                        ASSERT_EQ(result.out(s, 0, d), first[d]) << "slot " << s << ", dimension " << d;
                    else
                        ASSERT_TRUE(std::isnan(result.out(s, 0, d))) << "slot " << s << ", dimension " << d;
            }
        }
    }
}

TEST(CpuKernel, OptionsOutsideItsRangesAreRefusedByName) {
    Step step(StepSpec{});
    step.plan({.kernel = "cpu"});
    const auto reason = [&](PlanOptions options) {
        options.kernel = "cpu";
        return refusal(step.problem, step.device, options).value_or("");
    };
    EXPECT_EQ(reason({}), "");
    EXPECT_NE(reason({.p_format = PFormat::f64}).find("p_format"), std::string::npos);
    for (const float p_scale : {0.0F, -1.0F, not_a_number, infinity, 65536.0F})
        EXPECT_NE(reason({.p_scale = p_scale}).find("p_scale"), std::string::npos) << p_scale;
    EXPECT_NE(reason({.p_format = PFormat::e4m3, .p_scale = 449.0F}).find("p_scale"), std::string::npos);
    for (const int splits : {0, -1, 65})
        EXPECT_NE(reason({.splits = splits}).find("splits"), std::string::npos) << splits;
    for (const int chunk : {0, -1, 257}) EXPECT_NE(reason({.chunk = chunk}).find("chunk"), std::string::npos) << chunk;
}

TEST(CpuKernel, WorkspaceStaysBelow64MiB) {
    for (const std::int64_t rows : {0, 1, 7, 4096, 1 << 30})
        for (const std::int64_t heads : {0, 1, 16, 128})
            for (const int threads : {1, 2, 64, 4096})
                for (const int splits : {1, 8, 64})
                    for (const int chunk : {1, 64, 256}) {
                        Problem problem{.rows = rows, .heads = heads, .sources = {{.width = 1 << 30}}};
                        const Plan plan =
                            make_plan(problem, cpu_spec(threads), {.kernel = "cpu", .splits = splits, .chunk = chunk});
                        ASSERT_LT(plan.workspace_bytes, std::size_t{60} << 20)
                            << plan.describe() << " with " << threads << " threads";
                    }
}

}  // namespace
}  // namespace sparsemla::test
