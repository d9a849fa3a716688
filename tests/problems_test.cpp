// Every problem of the shared list is generated, run by every kernel that takes it, and compared with the oracle.
#include "harness/problems.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "harness/oracle.h"
#include "harness/pairwise.h"
#include "harness/tolerance.h"
#include "tests/device.h"
#include "tests/fenced.h"

namespace sparsemla::harness {
namespace {

using test::Fenced;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool sanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr bool sanitized = true;
#else
constexpr bool sanitized = false;
#endif
#else
constexpr bool sanitized = false;
#endif

// Plain loops over more multiplications than this take too long for a test; sanitizers slow all loops tenfold.
constexpr std::int64_t reference_limit = sanitized ? 2'000'000 : 20'000'000;
constexpr std::int64_t any_kernel_limit = sanitized ? 100'000'000 : std::int64_t{1} << 60;

std::int64_t multiplications(const Recipe& recipe) {
    std::int64_t columns = 0;
    for (const SourceRecipe& source : recipe.sources) columns += source.width;
    return recipe.rows * recipe.heads * columns * (layout_of(recipe.sources[0].record).d_qk() + value_dims);
}

/// Outputs in fenced memory, with gaps between rows and heads that must keep their poison.
class Outputs {
   public:
    Outputs(std::int64_t rows, std::int64_t heads, DType dtype)
        : rows_(rows),
          heads_(heads),
          dtype_(dtype),
          out_memory_(static_cast<std::size_t>((rows + 1) * row_stride() * size_bytes(dtype)), 4),
          lse_memory_(static_cast<std::size_t>((rows + 1) * lse_stride()) * sizeof(float), 4) {
        for (Fenced* memory : {&out_memory_, &lse_memory_}) memory->fill(poison);
    }

    Tensor out() const {
        Tensor view = dense(out_memory_.data(), dtype_, {rows_ + 1, heads_ + 1, value_dims});
        view.strides = {row_stride(), head_stride, 1, 0};
        return view;
    }
    Tensor lse() const {
        Tensor view = dense(lse_memory_.data(), DType::f32, {rows_ + 1, heads_ + 1});
        view.strides = {lse_stride(), 1, 0, 0};
        return view;
    }

    std::vector<Memory> surroundings() const { return {out_memory_.surroundings(), lse_memory_.surroundings()}; }

    /// Whether everything outside [rows, heads] is as it was.
    bool nothing_else_written() const {
        const auto clean = [](const Fenced& memory, std::int64_t first, std::int64_t count, std::int64_t element) {
            const auto* bytes = memory.as<std::uint8_t>();
            return std::all_of(bytes + first * element, bytes + (first + count) * element,
                               [](std::uint8_t byte) { return byte == poison; });
        };
        const std::int64_t element = size_bytes(dtype_);
        bool intact = out_memory_.slack_intact() && lse_memory_.slack_intact();
        for (std::int64_t row = 0; row <= rows_; ++row) {
            const std::int64_t heads = row < rows_ ? heads_ : 0;
            for (std::int64_t head = 0; head < heads; ++head)
                intact = intact && clean(out_memory_, row * row_stride() + head * head_stride + value_dims,
                                         head_stride - value_dims, element);
            intact = intact && clean(out_memory_, row * row_stride() + heads * head_stride,
                                     row_stride() - heads * head_stride, element);
            intact = intact && clean(lse_memory_, row * lse_stride() + heads, lse_stride() - heads, sizeof(float));
        }
        return intact;
    }

   private:
    static constexpr int poison = 0xA5;
    static constexpr std::int64_t head_stride = value_dims + 8;
    std::int64_t row_stride() const { return (heads_ + 2) * head_stride; }
    std::int64_t lse_stride() const { return heads_ + 3; }

    std::int64_t rows_, heads_;
    DType dtype_;
    Fenced out_memory_, lse_memory_;
};

/// Every kernel with every format of P, and one schedule with splits; another one in each problem.
std::vector<PlanOptions> wishes(std::size_t number) {
    std::vector<PlanOptions> list;
    for (const std::string& kernel : test::tested_kernels())
        for (const PFormat format : {PFormat::e4m3, PFormat::f16, PFormat::bf16, PFormat::f64}) {
            PlanOptions options;
            options.kernel = kernel;
            options.p_format = format;
            list.push_back(options);
        }
    PlanOptions options = list[number % 3];
    options.splits = std::array{1, 2, 4, 8, 16}[number % 5];
    if (test::on_gpu()) list.push_back(options);
    options.anchor = static_cast<Anchor>(number / 3 % 3);
    options.columns = static_cast<ColumnRule>(number / 9 % 3);
    options.splits = 1 + static_cast<int>(number % 7);
    options.chunk = std::array{64, 16, 1, 100, 256}[number % 5];
    list.push_back(options);
    return list;
}

/// The tool's commands that repeat a run.
std::string reproducer(const Recipe& recipe, const Schedule& schedule) {
    return gen_command(recipe, "case.safetensors") + " && sparsemla check --rms --kernel " + schedule.kernel +
           " --p-format " + std::string(name(schedule.p_format)) + " case.safetensors";
}

const std::vector<NamedRecipe>& shapes() {
    static const std::vector<NamedRecipe> list = problems("shapes");
    return list;
}

struct Finished {
    Plan plan;
    Outputs outputs;
};

Finished run(const CaseStep& step, const Plan& plan) {
    Finished result{plan, Outputs(step.rows, step.heads, plan.problem.out_dtype)};
    DecodeArgs args = step.args();
    args.out = result.outputs.out();
    args.lse = result.outputs.lse();
    const harness::GpuPlacement placement = test::placement();
    test::DeviceCall(plan, args, {.caches = {placement, placement}, .surroundings = result.outputs.surroundings()})
        .decode(plan);
    return result;
}

/// The same shape over flat records.
Recipe flat(Recipe recipe, std::size_t number) {
    recipe.query_dtype = DType::f8_e4m3;
    recipe.power_of_two_scales = false;
    for (SourceRecipe& source : recipe.sources) {
        const bool spaced = source.slots_per_page != 0 || source.page_stride_bytes != 0;
        source.record = number % 2 == 0 ? Record::fp8_576 : Record::fp8_512;
        source.form = RecordForm::contiguous;
        source.split_rope = false;
        source.page_stride_bytes = 0;
        source.slots_per_page = spaced ? source.page_size + 7 : 0;
    }
    return recipe;
}

/// The problem of test `number`; on a GPU whose kernels refuse it, over the records that they take.
Recipe recipe_of(std::size_t number) {
    Recipe recipe = shapes()[number].recipe;
    recipe.expected = false;
    if (!test::on_gpu()) return recipe;
    Problem problem{.rows = recipe.rows, .heads = recipe.heads, .query_dtype = recipe.query_dtype, .sources = {}};
    for (const SourceRecipe& source : recipe.sources)
        problem.sources.push_back({source.record, source.form, source.split_rope, source.width});
    problem.device = test::tested_device().device;
    return supports(problem, test::tested_device()) ? recipe : flat(recipe, number);
}

class Problems : public testing::TestWithParam<std::size_t> {};

TEST_P(Problems, EveryKernelAgreesWithTheOracle) {
    const NamedRecipe& named = shapes()[GetParam()];
    const Recipe recipe = recipe_of(GetParam());
    const std::int64_t cost = multiplications(recipe);
    if (cost > any_kernel_limit) GTEST_SKIP() << "too slow under a sanitizer";
    const Case file = generate(recipe);
    const CaseStep step = case_step(file);
    Problem problem = step.problem(test::tested_device().device);
    problem.out_dtype = GetParam() % 4 == 3 ? DType::f32 : DType::bf16;
    const DeviceSpec& device = test::tested_device();
    std::vector<Finished> runs;
    for (const PlanOptions& options : wishes(GetParam())) {
        if (options.kernel == "reference" && cost > reference_limit) continue;
        if (!supports(problem, device, options)) continue;
        runs.push_back(run(step, make_plan(problem, device, options)));
    }
    if (test::on_gpu() && runs.empty()) GTEST_SKIP() << refusal(problem, device).value_or("");
    EXPECT_GE(runs.size(), test::on_gpu() ? 1U : 4U) << "the fast kernel takes every problem in every format of P";

    const Oracle oracle = compute_oracle(step);
    for (const Finished& done : runs) {
        const Schedule& schedule = done.plan.schedule;
        const Verdict verdict =
            compare(oracle, done.outputs.out(), done.outputs.lse(), problem.lse_base, accuracy_of(schedule), true);
        EXPECT_TRUE(verdict.pass) << named.name << "\n  " << to_string(schedule) << "\n  " << verdict.problem << "\n  "
                                  << reproducer(recipe, schedule);
        EXPECT_TRUE(done.outputs.nothing_else_written()) << named.name << "\n  " << to_string(schedule);
    }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Problems, testing::Range(std::size_t{0}, shapes().size()),
                         [](const testing::TestParamInfo<std::size_t>& test) {
                             std::string name = std::to_string(test.param) + "_" + shapes()[test.param].name;
                             std::replace_if(
                                 name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
                             return name;
                         });

TEST(PairwiseCover, EveryPairMeets) {
    for (const std::vector<int>& sizes : std::vector<std::vector<int>>{
             {2, 2}, {1, 5, 3}, {3, 3, 3, 3}, {12, 11, 11, 6, 3, 2, 2, 2}, {7, 2, 2, 2, 2, 2}}) {
        const std::vector<std::vector<int>> cover = pairwise_cover(sizes);
        std::set<std::array<std::size_t, 4>> met;
        for (const std::vector<int>& combination : cover) {
            ASSERT_EQ(combination.size(), sizes.size());
            for (std::size_t a = 0; a < sizes.size(); ++a) {
                ASSERT_GE(combination[a], 0);
                ASSERT_LT(combination[a], sizes[a]);
                for (std::size_t b = a + 1; b < sizes.size(); ++b)
                    met.insert(
                        {a, static_cast<std::size_t>(combination[a]), b, static_cast<std::size_t>(combination[b])});
            }
        }
        std::size_t pairs = 0;
        std::size_t largest = 0;
        for (std::size_t a = 0; a < sizes.size(); ++a)
            for (std::size_t b = a + 1; b < sizes.size(); ++b) {
                const auto product = static_cast<std::size_t>(sizes[a] * sizes[b]);
                pairs += product;
                largest = std::max(largest, product);
            }
        EXPECT_EQ(met.size(), pairs);
        EXPECT_LE(cover.size(), 2 * largest + 4) << "a cover that long is hardly smaller than everything";
    }
}

/// What of a recipe must meet what, read back from the recipes.
std::vector<std::string> traits(const Recipe& recipe) {
    const SourceRecipe& first = recipe.sources[0];
    const bool spaced = first.slots_per_page != 0 || first.page_stride_bytes != 0;
    return {to_string(first.record) + (first.form == RecordForm::planar ? " planar" : "") +
                (first.split_rope ? " split" : ""),
            "heads " + std::to_string(recipe.heads),
            "width " + std::to_string(first.width),
            "page " + std::to_string(first.page_size),
            recipe.counts == CountsRecipe::all ? "all" : "ragged",
            recipe.sources.size() == 1 ? "one source"
            : recipe.one_list          ? "one list"
                                       : "two lists",
            recipe.sinks ? "sinks" : "no sinks",
            std::string(name(recipe.query_dtype)),
            std::string(name(recipe.lse_base)),
            spaced ? "spaced" : "dense"};
}

TEST(ProblemList, ShapesCoverEveryPair) {
    std::vector<std::set<std::string>> values(10);
    std::set<std::pair<std::string, std::string>> met;
    std::set<std::string> second_records;
    for (const NamedRecipe& named : problems("shapes")) {
        const std::vector<std::string> own = traits(named.recipe);
        ASSERT_EQ(own.size(), values.size());
        for (std::size_t a = 0; a < own.size(); ++a) {
            values[a].insert(own[a]);
            for (std::size_t b = a + 1; b < own.size(); ++b) met.insert({own[a], own[b]});
        }
        if (named.recipe.sources.size() == 2) second_records.insert(to_string(named.recipe.sources[1].record));
    }
    std::vector<std::size_t> sizes;
    for (const std::set<std::string>& set : values) sizes.push_back(set.size());
    EXPECT_EQ(sizes, (std::vector<std::size_t>{12, 11, 11, 6, 2, 3, 2, 2, 2, 2}));
    EXPECT_EQ(second_records.size(), record_layouts.size());
    for (std::size_t a = 0; a < values.size(); ++a)
        for (std::size_t b = a + 1; b < values.size(); ++b)
            for (const std::string& x : values[a])
                for (const std::string& y : values[b]) EXPECT_TRUE(met.count({x, y})) << x << " never meets " << y;
    for (const int heads : {1, 2, 6, 8, 12, 16, 24, 48, 64, 96, 128})
        EXPECT_TRUE(values[1].count("heads " + std::to_string(heads))) << heads;
    for (const int width : {0, 1, 63, 64, 65, 127, 128, 129, 640, 2048, 2049})
        EXPECT_TRUE(values[2].count("width " + std::to_string(width))) << width;
}

TEST(ProblemList, NamesAreUniqueAndEverySuiteIsNamed) {
    std::set<std::string> names;
    std::map<std::string, std::size_t> suites;
    for (const NamedRecipe& named : problems()) {
        EXPECT_TRUE(names.insert(named.name).second) << named.name << " occurs twice";
        ++suites[named.suite];
    }
    EXPECT_EQ(suites.size(), 2U);
    EXPECT_EQ(suites["shapes"], problems("shapes").size());
    EXPECT_EQ(suites["speed"], problems("speed").size());
    EXPECT_TRUE(problems("no such suite").empty());
}

TEST(ProblemList, SpeedProblemsAreTaken) {
    bool found = false;
    for (const NamedRecipe& named : problems("speed")) {
        found = found || named.name == "fp8_576/h16/r8/w2048";
        Problem problem{.rows = named.recipe.rows, .heads = named.recipe.heads, .sources = {}};
        problem.query_dtype = named.recipe.query_dtype;
        problem.sinks = named.recipe.sinks;
        for (const SourceRecipe& source : named.recipe.sources)
            problem.sources.push_back({.record = source.record, .form = source.form, .width = source.width});
        EXPECT_EQ(refusal(problem, query_device({})), std::nullopt) << named.name;
    }
    EXPECT_TRUE(found);
}

#ifdef SPARSEMLA_TOOL
/// The reproducers of this test's messages: the tool writes the case that the recipe gives.
TEST(ProblemList, CommandsOfTheToolGiveTheSameCases) {
    const std::string path = testing::TempDir() + "sparsemla_problems_test.safetensors";
    for (std::size_t number = 0; number < shapes().size(); number += 7) {
        Recipe recipe = shapes()[number].recipe;
        recipe.expected = false;
        const std::string command = gen_command(recipe, path);
        const std::string arguments = command.substr(command.find(' '));
        ASSERT_EQ(std::system((SPARSEMLA_TOOL + arguments + " > /dev/null").c_str()), 0) << command;
        const Case made = generate(recipe);
        const Case loaded = load_case(path);
        EXPECT_EQ(loaded.metadata, made.metadata) << command;
        ASSERT_EQ(loaded.tensors.size(), made.tensors.size()) << command;
        for (const auto& [name, tensor] : made.tensors) {
            const OwnedTensor* other = loaded.find(name);
            ASSERT_NE(other, nullptr) << name << ": " << command;
            EXPECT_EQ(other->shape, tensor.shape) << name << ": " << command;
            ASSERT_EQ(other->size_bytes, tensor.size_bytes) << name << ": " << command;
            EXPECT_EQ(std::memcmp(other->bytes.get(), tensor.bytes.get(), tensor.size_bytes), 0)
                << name << ": " << command;
        }
    }
    std::filesystem::remove(path);
}
#endif

}  // namespace
}  // namespace sparsemla::harness
