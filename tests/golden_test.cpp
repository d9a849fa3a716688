// What decode_latency and decode_wide gave on a GPU, committed in tests/data/golden, against what runs here: the cpu
// kernel executing the same schedule (or, with SPARSEMLA_TEST_DEVICE=cuda:0, the kernel itself). A drift of either side
// shows, without a GPU. With SPARSEMLA_GOLDEN_WRITE=FOLDER a run on a GPU writes the files; SPARSEMLA_GOLDEN=FOLDER
// looks elsewhere.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>

#include "harness/generate.h"
#include "harness/oracle.h"
#include "harness/tolerance.h"
#include "safetensors.h"
#include "sparsemla/formats.h"
#include "tests/device.h"

namespace sparsemla::test {
namespace {

using harness::Recipe;

struct GoldenCase {
    std::string name;
    int splits;
    Recipe recipe;
    std::string kernel = "decode_latency";  ///< of the GPU
};

void PrintTo(const GoldenCase& golden, std::ostream* stream) { *stream << golden.name; }

struct Size {
    std::int64_t rows, heads;
};

GoldenCase golden_case(const std::string& name, int splits, const Size& size, const std::vector<std::int64_t>& widths,
                       const std::function<void(Recipe&)>& change = {}) {
    GoldenCase golden{name, splits, {}};
    golden.recipe.rows = size.rows;
    golden.recipe.heads = size.heads;
    golden.recipe.sources.clear();
    const Record record = name.starts_with("f512") ? Record::fp8_512 : Record::fp8_576;
    for (const std::int64_t width : widths) golden.recipe.sources.push_back({.record = record, .width = width});
    if (change) change(golden.recipe);
    return golden;
}

void bf16(Recipe& recipe) { recipe.query_dtype = DType::bf16; }
void ragged(Recipe& recipe) { recipe.counts = harness::CountsRecipe::ragged; }
void holes(Recipe& recipe) { recipe.absent = 0.3; }
void sinks(Recipe& recipe) { recipe.sinks = true; }

/// A record with scales or wide values, with BF16 queries.
GoldenCase golden_of_records(const std::string& name, int splits, const Size& size,
                             const std::vector<std::pair<Record, std::int64_t>>& sources,
                             const std::function<void(Recipe&)>& change = {}) {
    GoldenCase golden{name, splits, {}};
    if (name.starts_with("wide_")) golden.kernel = "decode_wide";
    golden.recipe.rows = size.rows;
    golden.recipe.heads = size.heads;
    golden.recipe.query_dtype = DType::bf16;
    golden.recipe.sources.clear();
    for (const auto& [record, width] : sources)
        golden.recipe.sources.push_back({.record = record, .form = layout_of(record).default_form(), .width = width});
    if (change) change(golden.recipe);
    return golden;
}

/// Small outputs: all files together stay below 0.55 MB.
std::vector<GoldenCase> golden_cases() {
    std::vector<GoldenCase> cases = {
        golden_case("f576_h16_r1_w2048", 16, {1, 16}, {2048}),
        golden_case("f576_h12_r1_w2048", 7, {1, 12}, {2048}),
        golden_case("f576_h33_r1_w512", 8, {1, 33}, {512}),
        golden_case("f576_h1_r3_w640_ragged", 4, {3, 1}, {640}, ragged),
        golden_case("f576_h20_r1_w256_bf16", 2, {1, 20}, {256}, bf16),
        golden_case("f576_h5_r3_w64_holes", 1, {3, 5}, {64}, holes),
        golden_case("f576_h2_r6_w129_ragged", 3, {6, 2}, {129}, ragged),
        golden_case("f576_h8_r2_w2049_bf16_ragged", 5, {2, 8}, {2049},
                    [](Recipe& recipe) {
                        bf16(recipe);
                        ragged(recipe);
                    }),
        golden_case("f512_h16_r1_w128_sinks", 2, {1, 16}, {128}, sinks),
        golden_case("f512_h6_r3_w128_512_sinks_ragged", 10, {3, 6}, {128, 512},
                    [](Recipe& recipe) {
                        sinks(recipe);
                        ragged(recipe);
                    }),
        golden_case("f512_h4_r4_w100_70_one_list_log2", 3, {4, 4}, {100, 70},
                    [](Recipe& recipe) {
                        sinks(recipe);
                        recipe.one_list = true;
                        recipe.lse_base = LseBase::two;
                    }),
        golden_case("f512_h8_r1_w1", 1, {1, 8}, {1}, [](Recipe& recipe) { recipe.absent = 0; }),
        golden_case("f576_h6_r2_w256_ragged", 4, {2, 6}, {256}, ragged),
        golden_case("f512_h4_r2_w200_130_bf16", 8, {2, 4}, {200, 130}, bf16),
        golden_of_records("ds_mla_h5_r2_w300", 3, {2, 5}, {{Record::fp8_ds_mla, 300}}),
        golden_of_records("ds_mla_norope_h4_r2_w129", 1, {2, 4}, {{Record::fp8_ds_mla_norope, 129}}),
        golden_of_records("v4_h5_r2_w128_200_sinks", 4, {2, 5}, {{Record::fp8_v4, 128}, {Record::fp8_v4, 200}}, sinks),
        golden_of_records("v41_nvfp4_h4_r2_w128_256", 6, {2, 4}, {{Record::fp8_v41, 128}, {Record::nvfp4_v41, 256}}),
        golden_of_records("nvfp4_ds_mla_h3_r2_w300_ragged", 2, {2, 3}, {{Record::nvfp4_ds_mla, 300}}, ragged),
        golden_of_records("bf16_h4_r2_w200", 2, {2, 4}, {{Record::bf16, 200}}),
        golden_of_records("wide_f576_h3_r2_w300_ragged", 2, {2, 3}, {{Record::fp8_576, 300}}, ragged),
        golden_of_records("wide_ds_mla_h3_r2_w300", 3, {2, 3}, {{Record::fp8_ds_mla, 300}}),
        golden_of_records("wide_v4_h3_r2_w128_200_sinks", 1, {2, 3}, {{Record::fp8_v4, 128}, {Record::fp8_v4, 200}},
                          sinks),
        golden_of_records("wide_bf16_h3_r2_w200", 2, {2, 3}, {{Record::bf16, 200}}),
    };
    for (std::size_t i = 0; i < cases.size(); ++i) cases[i].recipe.seed = 1 + i;
    return cases;
}

/// Those that the GPU's kernel takes.
std::vector<PFormat> formats_of(const GoldenCase& golden) {
    const RecordLayout& layout = layout_of(golden.recipe.sources[0].record);
    const bool is_wide = golden.kernel == "decode_wide";
    if (layout.main.encoding == ValueEncoding::bf16) return {PFormat::bf16};
    if (layout.scale_encoding == ScaleEncoding::f32 || (is_wide && layout.scale_encoding == ScaleEncoding::none))
        return {PFormat::f16};
    return {PFormat::f16, is_wide ? PFormat::bf16 : PFormat::e4m3};
}

PlanOptions options_of(const GoldenCase& golden, PFormat format, const std::string& kernel) {
    return {.kernel = kernel,
            .p_format = format,
            .p_scale = format == PFormat::e4m3  ? 448.0F
                       : format == PFormat::f16 ? 32768.0F
                                                : 1.0F,
            .anchor = Anchor::split_running_max,
            .splits = golden.splits,
            .columns = ColumnRule::round_robin,
            .chunk = 64};
}

/// The schedule without its kernel: what both sides must execute.
std::string schedule_text(const Schedule& schedule) {
    const std::string text = to_string(schedule);
    return text.substr(text.find(' ') + 1);
}

struct Outputs {
    OwnedTensor out;  ///< BF16 [rows, heads, 512]
    OwnedTensor lse;  ///< F32 [rows, heads]
    Schedule schedule;
};

Case inputs_of(const GoldenCase& golden) {
    Recipe recipe = golden.recipe;
    recipe.expected = false;
    return harness::generate(recipe);
}

Outputs run(const CaseStep& step, const PlanOptions& options) {
    const DeviceSpec device = on_gpu() ? tested_device() : query_device({});
    const Plan plan = plan_or_skip(step.problem(device.device), device, options);
    Outputs outputs{make_owned(DType::bf16, {step.rows, step.heads, value_dims}),
                    make_owned(DType::f32, {step.rows, step.heads}), plan.schedule};
    std::memset(outputs.out.bytes.get(), 0xFF, outputs.out.size_bytes);
    std::memset(outputs.lse.bytes.get(), 0xFF, outputs.lse.size_bytes);
    DecodeArgs args = step.args();
    args.out = outputs.out.view();
    args.lse = outputs.lse.view();
    DeviceCall(plan, args).decode(plan);
    return outputs;
}

std::string key(PFormat format, const char* what) { return std::string(name(format)) + "." + what; }

void add(Case& file, PFormat format, const Outputs& outputs) {
    file.tensors[key(format, "out")] = outputs.out;
    file.tensors[key(format, "lse")] = outputs.lse;
    file.metadata[key(format, "schedule")] = schedule_text(outputs.schedule);
}

// ---------------------------------------------------------------------------------------------------------------------
std::string place(std::int64_t row, std::int64_t head) {
    return "row " + std::to_string(row) + ", head " + std::to_string(head) + ": ";
}

/// "", or how the 512 values of a row and head are further apart than the format of P explains.
std::string difference(PFormat format, const std::uint16_t* got, const std::uint16_t* golden) {
    double largest = 0, largest_error = 0, squares = 0, square_errors = 0;
    for (int d = 0; d < value_dims; ++d) {
        const double value = bf16_to_float(golden[d]);
        const double error = bf16_to_float(got[d]) - value;
        if (std::isnan(error)) return "NaN in dimension " + std::to_string(d);
        largest = std::max(largest, std::fabs(value));
        largest_error = std::max(largest_error, std::fabs(error));
        squares += value * value;
        square_errors += error * error;
    }
    if (largest == 0) return largest_error == 0 ? "" : "not zero";
    if (format != PFormat::e4m3) {
        const double unit = std::ldexp(1.0, std::ilogb(largest) - 7);  // in the last place of BF16
        if (largest_error <= 2 * unit) return "";
        return "out differs by " + std::to_string(largest_error / unit) + " units of the largest output, 2 are allowed";
    }
    const double ratio = std::sqrt(square_errors / squares);
    if (ratio <= 2e-3) return "";
    return "out differs by an RMS of " + std::to_string(ratio) + " of the row's, 0.002 is allowed";
}

std::string lse_difference(float got, float golden, LseBase base) {
    const double unit = base == LseBase::two ? 0.693147180559945309 : 1;
    if (std::isinf(golden)) return got == golden ? "" : "lse is not -inf";
    const double error = std::fabs(double{got} - double{golden}) * unit;
    return error <= 2e-5 ? "" : "lse differs by " + std::to_string(error) + ", 2e-5 is allowed";
}

/// "", or the first row and head that drifted.
std::string drift(PFormat format, const Outputs& got, const Case& file, LseBase base) {
    const OwnedTensor* out = file.find(key(format, "out"));
    const OwnedTensor* lse = file.find(key(format, "lse"));
    if (out == nullptr || lse == nullptr) return "the file has no outputs of this format";
    if (out->shape != got.out.shape || out->dtype_name != got.out.dtype_name || lse->shape != got.lse.shape)
        return "the file has another shape";
    if (file.metadata.at(key(format, "schedule")) != schedule_text(got.schedule))
        return "the file's schedule is " + file.metadata.at(key(format, "schedule"));
    const auto heads = got.lse.shape[1];
    for (std::int64_t i = 0; i < got.lse.shape[0] * heads; ++i) {
        const auto values = [&](const OwnedTensor& tensor) {
            return reinterpret_cast<const std::uint16_t*>(tensor.bytes.get()) + i * value_dims;
        };
        const auto lse_of = [&](const OwnedTensor& tensor) {
            return reinterpret_cast<const float*>(tensor.bytes.get())[i];
        };
        std::string problem = difference(format, values(got.out), values(*out));
        if (problem.empty()) problem = lse_difference(lse_of(got.lse), lse_of(*lse), base);
        if (!problem.empty()) return place(i / heads, i % heads) + problem;
    }
    return "";
}

// ---------------------------------------------------------------------------------------------------------------------
std::string golden_path(const std::string& folder, const GoldenCase& golden) {
    return folder + "/" + golden.name + ".safetensors";
}

/// Outputs of a kernel for every format of P; each of them right by the oracle.
Case make_golden(const GoldenCase& golden, const std::string& kernel) {
    const Case inputs = inputs_of(golden);
    const CaseStep step = case_step(inputs);
    const harness::Oracle oracle = harness::compute_oracle(step);
    Case file;
    for (const PFormat format : formats_of(golden)) {
        const Outputs outputs = run(step, options_of(golden, format, kernel));
        const harness::Verdict verdict =
            harness::compare(oracle, outputs.out.view(), outputs.lse.view(), step.lse_base,
                             harness::accuracy_of(outputs.schedule), golden.recipe.absent < 0.1);
        EXPECT_TRUE(verdict.pass) << golden.name << ", " << to_string(outputs.schedule) << ": " << verdict.problem;
        add(file, format, outputs);
    }
    file.metadata["kernel"] = kernel;
    file.metadata["device"] = on_gpu() ? tested_device().name : "cpu";
    file.metadata["inputs"] = harness::gen_command(golden.recipe, golden.name + ".case.safetensors");
    return file;
}

class Golden : public testing::TestWithParam<GoldenCase> {};

TEST_P(Golden, TheScheduleStillGivesTheOutputsOfTheGpu) {
    const GoldenCase& golden = GetParam();
    const std::string folder = environment("SPARSEMLA_GOLDEN", SPARSEMLA_SOURCE_DIR "/tests/data/golden");
    const std::string path = golden_path(folder, golden);
    if (!std::filesystem::exists(path))
        GTEST_SKIP() << "there is no " << path
                     << ": SPARSEMLA_TEST_DEVICE=cuda:0 SPARSEMLA_GOLDEN_WRITE=FOLDER golden_test writes it on a GPU";
    const Case file = detail::read_safetensors(path);
    const Case inputs = inputs_of(golden);
    const CaseStep step = case_step(inputs);
    for (const PFormat format : formats_of(golden)) {
        const Outputs outputs = run(step, options_of(golden, format, on_gpu() ? golden.kernel : fast_kernel()));
        EXPECT_EQ(drift(format, outputs, file, step.lse_base), "")
            << to_string(outputs.schedule) << " against " << file.metadata.at("kernel") << " on "
            << file.metadata.at("device");
    }
}

TEST_P(Golden, WriteWhereAsked) {
    const std::string folder = environment("SPARSEMLA_GOLDEN_WRITE", "");
    if (folder.empty()) GTEST_SKIP() << "SPARSEMLA_GOLDEN_WRITE names no folder";
    ASSERT_TRUE(on_gpu()) << "SPARSEMLA_TEST_DEVICE must name the GPU";
    std::filesystem::create_directories(folder);
    const Case file = make_golden(GetParam(), GetParam().kernel);
    if (!HasFailure()) detail::write_safetensors(file, golden_path(folder, GetParam()));
}

// The files' way there and back, and that a drift would show: here the cpu kernel plays the GPU's.
TEST_P(Golden, DriftsShow) {
    if (on_gpu()) GTEST_SKIP() << "about the CPU";
    const GoldenCase& golden = GetParam();
    const std::string path = testing::TempDir() + "sparsemla_golden_" + golden.name + ".safetensors";
    detail::write_safetensors(make_golden(golden, "cpu"), path);
    const Case file = detail::read_safetensors(path);
    std::filesystem::remove(path);
    const Case inputs = inputs_of(golden);
    const CaseStep step = case_step(inputs);
    for (const PFormat format : formats_of(golden)) {
        Outputs outputs = run(step, options_of(golden, format, "cpu"));
        EXPECT_EQ(drift(format, outputs, file, step.lse_base), "");
        PlanOptions other = options_of(golden, format, "cpu");
        other.splits = golden.splits + 1;
        EXPECT_NE(drift(format, run(step, other), file, step.lse_base), "") << "another schedule";
        auto* values = reinterpret_cast<std::uint16_t*>(outputs.out.bytes.get());
        auto* lse = reinterpret_cast<float*>(outputs.lse.bytes.get());
        const float before = lse[0];
        lse[0] += 1e-4F;
        const bool finite = std::isfinite(before);
        EXPECT_EQ(drift(format, outputs, file, step.lse_base).find("lse differs") != std::string::npos, finite);
        lse[0] = before;
        float largest = 0;
        for (int d = 0; d < value_dims; ++d) largest = std::max(largest, std::fabs(bf16_to_float(values[d])));
        for (int d = 0; d < value_dims; ++d)  // 3 % of the largest value, up and down
            values[d] = float_to_bf16(bf16_to_float(values[d]) + (d % 2 == 0 ? 0.03F : -0.03F) * largest);
        if (largest > 0) {
            EXPECT_NE(drift(format, outputs, file, step.lse_base), "");
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Cases, Golden, testing::ValuesIn(golden_cases()),
                         [](const testing::TestParamInfo<GoldenCase>& test) { return test.param.name; });

TEST(GoldenFiles, StaySmall) {
    std::int64_t bytes = 0;
    for (const GoldenCase& golden : golden_cases())
        bytes += static_cast<std::int64_t>(formats_of(golden).size()) * golden.recipe.rows * golden.recipe.heads *
                 (value_dims * 2 + 4);
    EXPECT_LE(bytes, 550'000);
}

}  // namespace
}  // namespace sparsemla::test
