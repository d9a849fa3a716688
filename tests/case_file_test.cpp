// What a case means: fields checked against each other, and the library's arguments that come out.
#include "sparsemla/case_file.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "case_fields.h"
#include "tests/case_building.h"

namespace sparsemla {
namespace {

namespace fs = std::filesystem;

const fs::path source_dir = SPARSEMLA_SOURCE_DIR;

std::vector<fs::path> files_in(const fs::path& folder) {
    std::vector<fs::path> out;
    for (const auto& entry : fs::directory_iterator(folder))
        if (entry.path().extension() == ".safetensors") out.push_back(entry.path());
    return out;
}

std::string bytes_of(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

TEST(CaseFile, OwnFixturesLoadAndKeepTheirBytes) {
    for (const char* folder : {"tests/data", "fuzz/corpus"}) {
        const std::vector<fs::path> files = files_in(source_dir / folder);
        EXPECT_GE(files.size(), 8U);
        for (const fs::path& file : files) {
            SCOPED_TRACE(file.string());
            Case c = load_case(file.string());
            EXPECT_EQ(c.path, file.string());
            EXPECT_TRUE(c.notes.empty()) << c.notes.front();
            convert_case(c);
            EXPECT_GT(case_step(c).rows, 0);
        }
    }
}

TEST(CaseFile, FixtureAnswersMeetTheReference) {
    int answered = 0;
    for (const fs::path& file : files_in(source_dir / "tests/data")) {
        SCOPED_TRACE(file.string());
        const Case c = load_case(file.string());
        if (c.find("expected.out") == nullptr) continue;
        ++answered;
        const CaseStep step = case_step(c);
        Problem problem = step.problem();
        problem.out_dtype = DType::f32;
        const Plan plan = make_plan(problem, query_device({}), {.kernel = "reference"});
        OwnedTensor out = make_owned(DType::f32, {step.rows, step.heads, value_dims});
        OwnedTensor lse = make_owned(DType::f32, {step.rows, step.heads});
        OwnedTensor workspace = make_owned(DType::u8, {static_cast<std::int64_t>(plan.workspace_bytes)});
        OwnedTensor state = make_owned(DType::u8, {static_cast<std::int64_t>(plan.state_bytes)});
        DecodeArgs args = step.args();
        args.out = out.view();
        args.lse = lse.view();
        args.workspace = {workspace.bytes.get(), workspace.size_bytes};
        args.state = {state.bytes.get(), state.size_bytes};
        prepare(plan, args.state);
        decode(plan, args);
        const auto expect_close = [](const OwnedTensor& got, const OwnedTensor& expected, const char* what) {
            ASSERT_EQ(got.size_bytes, expected.size_bytes);
            const auto floats = [](const OwnedTensor& tensor) { return static_cast<const float*>(tensor.view().data); };
            for (std::size_t i = 0; i < got.size_bytes / sizeof(float); ++i) {
                const float e = floats(expected)[i];
                // Both are float64 results rounded once to float32.
                const float bound = std::isinf(e) ? 0.0F : 0x1p-22F * std::fabs(e) + 1e-30F;
                ASSERT_TRUE(floats(got)[i] == e || std::fabs(floats(got)[i] - e) <= bound)
                    << what << " element " << i << ": got " << floats(got)[i] << ", expected " << e;
            }
        };
        expect_close(out, *c.find("expected.out"), "out");
        expect_close(lse, *c.find("expected.lse"), "lse");
    }
    EXPECT_EQ(answered, 7);
}

TEST(CaseFile, SharedCasesLoad) {
    const fs::path folder = source_dir.parent_path() / "shared" / "cases";
    if (!fs::is_directory(folder)) GTEST_SKIP() << "no folder of shared cases beside the source tree";
    const std::vector<fs::path> files = files_in(folder);
    EXPECT_FALSE(files.empty());
    for (const fs::path& file : files) {
        SCOPED_TRACE(file.string());
        const Case c = load_case(file.string());
        EXPECT_TRUE(c.notes.empty()) << c.notes.front();
        EXPECT_NE(c.find("expected.out"), nullptr);
        const CaseStep step = case_step(c);
        EXPECT_EQ(step.problem().rows, step.rows);
        EXPECT_EQ(step.problem().sources.size(), step.sources.size());
        for (const CaseSource& source : step.sources)
            EXPECT_LE(static_cast<std::size_t>(cache_bytes(source.cache)), fs::file_size(file));
    }
}

TEST(CaseFile, StepCarriesEverything) {
    Case c = full_case();
    c.metadata.insert({{"q_scale", "0.25"}, {"out_scale", "2"}, {"count_offset", "1"}, {"extra_count_offset", "5"}});
    EXPECT_EQ(refusal_of(c), "");
    const CaseStep step = case_step(c);
    EXPECT_EQ(step.rows, 2);
    EXPECT_EQ(step.heads, 3);
    EXPECT_EQ(step.softmax_scale, 0.125F);
    const Problem problem = step.problem();
    EXPECT_EQ(problem.query_dtype, DType::bf16);
    EXPECT_TRUE(problem.sinks);
    EXPECT_EQ(problem.lse_base, LseBase::two);
    ASSERT_EQ(problem.sources.size(), 2U);
    EXPECT_EQ(problem.sources[0].width, 5);
    EXPECT_EQ(problem.sources[0].count_offset, 1);
    EXPECT_EQ(problem.sources[1].record, Record::nvfp4_v41);
    EXPECT_EQ(problem.sources[1].form, RecordForm::planar);
    EXPECT_EQ(problem.sources[1].width, 7);
    EXPECT_EQ(problem.sources[1].count_offset, 5);
    const DecodeArgs args = step.args();
    EXPECT_EQ(args.q_scale.value, 0.25F);
    EXPECT_EQ(args.out_scale, 2.0F);
    EXPECT_EQ(args.sources[0].k_scale.value, 0.5F);
    EXPECT_EQ(args.sources[1].k_scale.value, 1.0F) << "a record without k_scale does not inherit one";
    EXPECT_EQ(args.sources[1].counts.data, c.find("extra_counts")->bytes.get());
    EXPECT_EQ(args.sinks.data, c.find("sinks")->bytes.get());
}

TEST(CaseFile, UnknownContentIsKeptAndNoted) {
    Case c = full_case();
    c.tensors["extra_room"] = make_owned(DType::f64, {2});
    c.metadata["author"] = "somebody";
    c.metadata["extra_count_offset"] = "5";
    c.tensors.erase("extra_counts");
    c.metadata.erase("k_scale");
    const fs::path file = fs::path(testing::TempDir()) / "sparsemla_case_file_test.safetensors";
    save_case(c, file.string());
    const Case back = load_case(file.string());
    fs::remove(file);
    ASSERT_EQ(back.notes.size(), 4U);
    EXPECT_TRUE(contains(back.notes[0], "'extra_room' (F64 [2])"));
    EXPECT_TRUE(contains(back.notes[1], "'author'"));
    EXPECT_TRUE(contains(back.notes[2], "'k_scale' is not given: 1"));
    EXPECT_TRUE(contains(back.notes[3], "'extra_count_offset' has no effect"));
    EXPECT_EQ(back.metadata, c.metadata);
    EXPECT_EQ(back.tensors.size(), c.tensors.size());
}

TEST(CaseFile, AbsentAndMisshapenTensorsAreNamed) {
    for (const char* name : {"query", "cache", "slots", "extra_slots"}) {
        Case c = full_case();
        c.tensors.erase(name);
        EXPECT_TRUE(contains(refusal_of(c), std::string("case: ") + name + ": need ")) << name;
    }
    const Case good = full_case();
    EXPECT_EQ(refusal_of(good), "");
    for (const auto& [name, tensor] : good.tensors) {
        SCOPED_TRACE(name);
        Case c = good;
        c.tensors[name] = make_owned(DType::f16, tensor.shape);
        EXPECT_TRUE(contains(refusal_of(c), "case: " + name + ": need "));
        const DType dtype = tensor.view().dtype;
        for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
            // Free extents, which other tensors then disagree with, or nobody.
            const bool free = (name == "query" && i < 2) || (name.find("slots") != std::string::npos && i == 1) ||
                              (name.find("cache") != std::string::npos && i == 0) ||
                              (name == "expected.dequantised" && i == 0);
            std::vector<std::int64_t> shape = tensor.shape;
            shape[i] += 1;
            c.tensors[name] = make_owned(dtype, shape);
            const std::string text = refusal_of(c);
            if (!free) {
                EXPECT_TRUE(contains(text, "case: " + name + ": need ")) << "dimension " << i;
            } else {
                EXPECT_EQ(text.empty(), name != "query" && name != "expected.dequantised") << "dimension " << i;
            }
        }
        std::vector<std::int64_t> shape = tensor.shape;
        shape.push_back(1);
        c.tensors[name] = make_owned(dtype, shape);
        EXPECT_TRUE(contains(refusal_of(c), "case: " + name + ": need "));
        c.tensors[name] = tensor;
        c.tensors[name].size_bytes -= 1;
        EXPECT_TRUE(contains(refusal_of(c), "case: " + name + ": need "));
        c.tensors[name].size_bytes += 1;
        c.tensors[name].bytes = nullptr;
        EXPECT_TRUE(contains(refusal_of(c), "case: " + name + ": need "));
    }
    Case c = good;
    c.tensors["expected.dequantised"] = make_owned(DType::f32, {9, 512});
    EXPECT_TRUE(contains(refusal_of(c), "at most the 8 slots"));
}

TEST(CaseFile, RowsWithoutAByteAreLimited) {
    for (const std::int64_t rows : {std::int64_t{65536}, std::int64_t{65537}, std::int64_t{1} << 40}) {
        Case c = case_of(Record::fp8_576);
        c.tensors["query"] = make_owned(DType::bf16, {rows, 0, layout_of(Record::fp8_576).d_qk()});
        c.tensors["slots"] = make_owned(DType::i32, {rows, 0});
        if (rows == 65536)
            EXPECT_EQ(refusal_of(c), "");
        else
            EXPECT_TRUE(contains(refusal_of(c), "at most 65536 rows without heads, got " + std::to_string(rows)));
    }
}

TEST(CaseFile, NumbersAreReadStrictly) {
    for (const char* key : {"softmax_scale", "q_scale", "k_scale", "out_scale"})
        for (const char* value : {"nan", "NaN", "0", "-0", "0.0", "-1", "inf", "-inf", "1e39", "1e-60", "", " 1", "1 ",
                                  "+1", "1,5", "0x1", "1f", "one"}) {
            Case c = full_case();
            c.metadata[key] = value;
            EXPECT_TRUE(contains(refusal_of(c), std::string("case: ") + key + ": need a positive finite number"))
                << value;
        }
    for (const char* key : {"page_size", "record_bytes", "slots_per_page", "page_stride_bytes", "count_offset",
                            "extra_page_size", "extra_count_offset"})
        for (const char* value : {"-1", "1.0", "", " 2", "2 ", "+2", "0x2", "99999999999999999999", "two"}) {
            Case c = full_case();
            c.metadata[key] = value;
            EXPECT_TRUE(contains(refusal_of(c), std::string("case: ") + key + ": need an integer in [")) << value;
        }
    Case c = full_case();
    c.metadata.erase("softmax_scale");
    EXPECT_TRUE(contains(refusal_of(c), "softmax_scale"));
    c = full_case();
    c.metadata["softmax_scale"] = "0.041666666666666664";
    EXPECT_EQ(case_step(c).softmax_scale, 0.041666666666666664F);
    c.metadata["k_scale"] = "1e-40";
    EXPECT_EQ(case_step(c).sources[0].k_scale, 1e-40F);
    c.metadata["lse"] = "ln";
    EXPECT_TRUE(contains(refusal_of(c), "natural or log2"));
}

TEST(CaseFile, ScalesBelongToRecordsThatTakeThem) {
    Case c = case_of(Record::nvfp4_ds_mla);
    c.metadata["k_scale"] = "0.5";
    EXPECT_TRUE(contains(refusal_of(c), "takes no per-tensor scale"));
    c.metadata["k_scale"] = "1.0";
    EXPECT_EQ(refusal_of(c), "");
    c = full_case();
    c.metadata["extra_record"] = "fp8";
    c.tensors["extra_cache"] = make_owned(DType::u8, {3, 2, record_bytes_of(Record::fp8_512)});
    EXPECT_EQ(case_step(c).sources[1].k_scale, 0.5F);
    c.metadata["extra_k_scale"] = "0.25";
    EXPECT_EQ(case_step(c).sources[1].k_scale, 0.25F);
    EXPECT_EQ(case_step(c).sources[0].k_scale, 0.5F);
}

TEST(CaseFile, RandomDamageIsAnErrorOrACase) {
    constexpr unsigned seed = 20240607;
    std::mt19937 random(seed);
    int loaded = 0;
    int refused = 0;
    for (const fs::path& file : files_in(source_dir / "fuzz/corpus")) {
        const std::string whole = bytes_of(file);
        const std::size_t header_bytes =
            8 + static_cast<unsigned char>(whole[0]) + 256U * static_cast<unsigned char>(whole[1]);
        for (int i = 0; i < 300; ++i) {
            SCOPED_TRACE("seed " + std::to_string(seed) + ", change " + std::to_string(i) + " of " + file.string());
            std::vector<char> bytes(whole.begin(), whole.end());
            for (unsigned flips = 1 + random() % 3; flips > 0; --flips)
                bytes[random() % header_bytes] ^= static_cast<char>(1U << random() % 8);
            try {
                Case c = detail::parse_case(std::as_bytes(std::span(bytes)), "damaged");
                convert_case(c);
                static_cast<void>(case_step(c).problem());
                ++loaded;
            } catch (const Error& error) {
                EXPECT_TRUE(contains(error.what(), "damaged"));
                ++refused;
            }
        }
    }
    EXPECT_GT(loaded, 0);
    EXPECT_GT(refused, 1000);
}

TEST(OwnedTensor, IsZeroedAlignedAndChecked) {
    const OwnedTensor tensor = make_owned(DType::f32, {3, 5});
    EXPECT_EQ(tensor.size_bytes, 60U);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.bytes.get()) % 64, 0U);
    for (std::size_t i = 0; i < tensor.size_bytes; ++i)
        EXPECT_EQ(tensor.bytes[static_cast<std::ptrdiff_t>(i)], std::byte{0});
    const Tensor view = tensor.view();
    EXPECT_EQ(view.strides[0], 5);
    EXPECT_EQ(view.strides[1], 1);
    EXPECT_THROW(make_owned(DType::u8, {-1}), Error);
    EXPECT_THROW(make_owned(DType::f32, {std::int64_t{1} << 31, std::int64_t{1} << 31}), Error);
    EXPECT_THROW(make_owned(DType::u8, {1, 1, 1, 1, 1}).view(), Error);
    EXPECT_THROW(make_owned(DType::u8, {}).view(), Error) << "a view of rank 0 would read as an absent tensor";
    OwnedTensor unknown = tensor;
    unknown.dtype_name = "U32";
    EXPECT_THROW(unknown.view(), Error);
}

}  // namespace
}  // namespace sparsemla
