// Sources of a case: cache shapes and paging, defaults of the second source, lists of slots and of token ids.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "case_fields.h"
#include "tests/case_building.h"

namespace sparsemla {
namespace {

const std::filesystem::path source_dir = SPARSEMLA_SOURCE_DIR;

TEST(CaseSources, EveryRecordIsACase) {
    for (const RecordLayout& layout : record_layouts) {
        SCOPED_TRACE(to_string(layout.record));
        const Case c = case_of(layout.record);
        const CaseStep step = case_step(c);
        EXPECT_EQ(step.sources[0].cache.record, layout.record);
        EXPECT_EQ(step.sources[0].cache.form, layout.default_form());
        EXPECT_EQ(step.sources[0].cache.num_slots(), 8);
        EXPECT_EQ(static_cast<std::size_t>(cache_bytes(step.sources[0].cache)), c.find("cache")->size_bytes);
    }
}

TEST(CaseSources, RecordsAreFoundByNameAndBytes) {
    Case c = case_of(Record::fp8_576);
    c.metadata.erase("record_bytes");
    EXPECT_TRUE(contains(refusal_of(c), "record_bytes"));
    c.metadata["record_bytes"] = "432";
    EXPECT_TRUE(contains(refusal_of(c), "'fp8' of 432 bytes"));
    c = case_of(Record::fp8_v4);
    c.metadata.erase("record_bytes");
    EXPECT_EQ(refusal_of(c), "");
    c.metadata["record"] = "fp8_v5";
    EXPECT_TRUE(contains(refusal_of(c), "nvfp4_ds_mla"));
    c.metadata.erase("record");
    EXPECT_TRUE(contains(refusal_of(c), "case: record: need "));
    c = full_case();
    c.metadata["extra_record"] = "nvfp4_ds_mla";
    c.tensors["extra_cache"] = make_owned(DType::u8, {3, 2, record_bytes_of(Record::nvfp4_ds_mla)});
    EXPECT_TRUE(contains(refusal_of(c), "case: extra_record: need the d_qk of record"));
}

TEST(CaseSources, TokenIdsAreConverted) {
    Case c = load_case((source_dir / "tests/data/token_ids.safetensors").string());
    EXPECT_THROW(case_step(c), Error);
    const auto indices = case_indices(c);
    ASSERT_TRUE(indices);
    EXPECT_EQ(indices->sharding.world, 2);
    EXPECT_EQ(indices->sharding.rank, 1);
    convert_case(c);
    validate(c);
    const CaseStep step = case_step(c);
    // Rank 1 of 2 holds the odd ids; id t is its token t / 2, in pages of 2. Request 0: pages 2, 0. Request 1: 1, 2.
    EXPECT_EQ(ints_of(step.sources[0].slots), (std::vector<std::int32_t>{4, 0, -1, -1, 5, 3, 2, -1}));
    EXPECT_EQ(ints_of(step.sources[0].counts), (std::vector<std::int32_t>{2, 3}));
    const auto* slots = c.find("slots")->bytes.get();
    convert_case(c);
    EXPECT_EQ(c.find("slots")->bytes.get(), slots) << "a case with slots is left alone";
}

TEST(CaseSources, TokenIdsNeedTheirCompany) {
    const Case good = load_case((source_dir / "tests/data/token_ids.safetensors").string());
    const auto refused = [&](const std::function<void(Case&)>& change, const char* part) {
        Case c = good;
        change(c);
        EXPECT_TRUE(contains(refusal_of(c), part));
    };
    refused([](Case& c) { c.tensors.erase("block_table"); }, "block_table: need ");
    refused([](Case& c) { c.tensors.erase("request_of_row"); }, "request_of_row: need ");
    refused([](Case& c) { c.tensors.erase("token_ids"); }, "slots: need ");
    refused([](Case& c) { c.tensors["counts"] = make_owned(DType::i32, {2}); }, "counts: need no such tensor");
    refused([](Case& c) { c.metadata["world"] = "0"; }, "world: need ");
    refused([](Case& c) { c.metadata["rank"] = "2"; }, "rank: need an integer in [0, 1]");
    refused([](Case& c) { c.metadata["interleave"] = "3"; }, "a divisor of page_size = 2");
    refused([](Case& c) { c.metadata["first_width"] = "1"; }, "token_ids: need no such tensor");
    const std::int64_t bytes = record_bytes_of(Record::fp8_576);
    refused([&](Case& c) { c.tensors["cache"] = make_owned(DType::u8, {5, bytes}); }, "whole pages of 2 records");
    refused(
        [&](Case& c) {
            c.metadata.erase("page_size");
            c.tensors["cache"] = make_owned(DType::u8, {6, bytes});
        },
        "page_size: need ");
    Case c = case_of(Record::fp8_576);
    c.tensors["block_table"] = make_owned(DType::i32, {1, 1});
    EXPECT_TRUE(contains(refusal_of(c), "without token_ids"));
}

TEST(CaseSources, OneListServesTwoSources) {
    Case c = full_case();
    c.tensors.erase("extra_slots");
    c.tensors.erase("extra_counts");
    set_ints(c, "slots", {2, 5}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
    c.metadata["first_width"] = "2";
    const CaseStep step = case_step(c);
    ASSERT_EQ(step.sources.size(), 2U);
    const auto at = [](const ConstTensor& list, std::int64_t row, std::int64_t column) {
        return static_cast<const std::int32_t*>(list.data)[row * list.strides[0] + column];
    };
    EXPECT_EQ(step.sources[0].slots.shape[1], 2);
    EXPECT_EQ(step.sources[1].slots.shape[1], 3);
    EXPECT_EQ(at(step.sources[0].slots, 1, 1), 6);
    EXPECT_EQ(at(step.sources[1].slots, 0, 0), 2);
    EXPECT_EQ(at(step.sources[1].slots, 1, 2), 9);
    EXPECT_EQ(step.sources[0].count_offset, 0);
    EXPECT_EQ(step.sources[1].count_offset, 2);
    EXPECT_EQ(step.sources[0].counts.data, step.sources[1].counts.data);
    for (const char* width : {"0", "5"}) {
        c.metadata["first_width"] = width;
        EXPECT_EQ(refusal_of(c), "");
    }
    c.metadata["first_width"] = "6";
    EXPECT_TRUE(contains(refusal_of(c), "first_width: need an integer in [0, 5]"));
    c.metadata["first_width"] = "2";
    c.metadata["extra_count_offset"] = "3";
    EXPECT_TRUE(contains(refusal_of(c), "extra_count_offset: need an integer in [2, 2]"));
    c.metadata["extra_count_offset"] = "2";
    EXPECT_EQ(refusal_of(c), "");
    c.tensors["extra_slots"] = make_owned(DType::i32, {2, 1});
    EXPECT_TRUE(contains(refusal_of(c), "beside first_width"));
    c = case_of(Record::fp8_576);
    c.metadata["first_width"] = "2";
    EXPECT_TRUE(contains(refusal_of(c), "extra_cache: need "));
    c = case_of(Record::fp8_576);
    c.tensors["extra_slots"] = make_owned(DType::i32, {2, 1});
    EXPECT_TRUE(contains(refusal_of(c), "without extra_cache"));
}

struct Pages {
    std::int64_t pages = 0, page_size = 0, slot_step = 0;
    std::int64_t stride_bytes = 0;  ///< 0: dense
};

/// A cache tensor, metadata beside the record's, and what must come of them: pages, or a part of the refusal.
struct Form {
    Record record;
    std::vector<std::int64_t> shape;  ///< a last extent of 0 stands for record_bytes
    std::map<std::string, std::string> metadata;
    std::variant<Pages, std::string> outcome;
    DType dtype = DType::u8;
};

Case case_of(const Form& form) {
    Case c = case_of(form.record);
    c.metadata.erase("page_size");
    for (const auto& [key, value] : form.metadata) c.metadata[key] = value;
    std::vector<std::int64_t> shape = form.shape;
    if (shape.back() == 0) shape.back() = record_bytes_of(form.record) / size_bytes(form.dtype);
    c.tensors["cache"] = make_owned(form.dtype, shape);
    return c;
}

std::string text_of(const Form& form) {
    std::string out = to_string(form.record) + " shape";
    for (const std::int64_t extent : form.shape) out += " " + std::to_string(extent);
    for (const auto& [key, value] : form.metadata) out += ", " + key + " = " + value;
    return out;
}

void expect_forms(const std::vector<Form>& forms) {
    for (const Form& form : forms) {
        SCOPED_TRACE(text_of(form));
        const Case c = case_of(form);
        const std::string refusal = refusal_of(c);
        if (const auto* part = std::get_if<std::string>(&form.outcome)) {
            EXPECT_TRUE(contains(refusal, *part));
            continue;
        }
        const Pages& expected = std::get<Pages>(form.outcome);
        ASSERT_EQ(refusal, "");
        const CacheView view = case_step(c).sources[0].cache;
        EXPECT_EQ(view.pages, expected.pages);
        EXPECT_EQ(view.page_size, expected.page_size);
        EXPECT_EQ(view.slot_step(), expected.slot_step);
        EXPECT_EQ(view.page_stride_bytes, expected.stride_bytes);
        validate(view, "cache");
        if (view.num_slots() > 0) {
            EXPECT_LE(static_cast<std::size_t>(cache_bytes(view)), c.find("cache")->size_bytes);
        }
    }
}

TEST(CaseSources, ContiguousShapesGivePages) {
    constexpr Record flat = Record::fp8_576;
    const std::int64_t bytes = record_bytes_of(flat);
    const std::string stride = std::to_string(6 * bytes);
    expect_forms({
        {flat, {7, 0}, {}, Pages{7, 1, 1}},
        {flat, {8, 0}, {{"page_size", "4"}}, Pages{2, 4, 4}},
        {flat, {0, 0}, {{"page_size", "4"}}, Pages{0, 4, 4}},
        // A partial last page: every slot counts, as pages of one record.
        {flat, {7, 0}, {{"page_size", "4"}}, Pages{7, 1, 1}},
        {flat, {12, 0}, {{"page_size", "4"}, {"slots_per_page", "6"}}, Pages{2, 4, 6}},
        {flat, {10, 0}, {{"page_size", "4"}, {"slots_per_page", "6"}}, Pages{2, 4, 6}},
        {flat, {10, 0}, {{"page_size", "4"}, {"page_stride_bytes", stride}}, Pages{2, 4, 6}},
        {flat, {9, 0}, {{"page_size", "4"}, {"slots_per_page", "6"}}, "a last page of at least"},
        {flat, {12, 0}, {{"page_size", "4"}, {"slots_per_page", "3"}}, "slots_per_page: need at least"},
        {flat,
         {12, 0},
         {{"page_size", "4"}, {"page_stride_bytes", std::to_string(6 * bytes + 16)}},
         "page_stride_bytes: need whole records"},
        {flat,
         {12, 0},
         {{"page_size", "4"}, {"slots_per_page", "5"}, {"page_stride_bytes", stride}},
         "page_stride_bytes: need slots_per_page"},
        {flat, {3, 4, 0}, {}, Pages{3, 4, 4}},
        {flat, {3, 4, 0}, {{"page_size", "4"}}, Pages{3, 4, 4}},
        {flat, {0, 4, 0}, {}, Pages{0, 4, 4}},
        {flat, {3, 6, 0}, {{"page_size", "4"}, {"slots_per_page", "6"}}, Pages{3, 4, 6}},
        {flat, {3, 6, 0}, {{"page_size", "4"}}, "cache: need 4 records a page, got 6"},
        {flat, {3, 4, 0}, {{"page_size", "4"}, {"slots_per_page", "6"}}, "need 6 records a page"},
        {flat, {4, 0, 0}, {}, "cache: need "},
        {flat, {3, 4 * bytes}, {{"page_size", "4"}}, Pages{3, 4, 4}},
        {flat, {3, 6 * bytes}, {{"page_size", "4"}}, Pages{3, 4, 6}},
        {flat, {3, 4 * bytes}, {}, "cache: need "},
        {flat, {3, 4 * bytes + 16}, {{"page_size", "4"}}, "pages of whole records"},
        {flat, {3, 2 * bytes}, {{"page_size", "4"}}, "slots_per_page: need at least page_size"},
        {flat, {3, 4, bytes + 1}, {}, "cache: need "},
        {flat, {3, 2, 2, 0}, {}, "cache: need "},
        {flat, {7 * bytes}, {}, "cache: need "},
        {flat, {7, 0}, {{"page_size", "0"}}, "page_size: need an integer in [1, "},
        {flat, {7, 0}, {{"page_size", "2147483648"}}, "page_size: need an integer in [1, "},
        {flat, {7, 0}, {{"layout", "planar"}}, "layout: need a layout of fp8"},
        {flat, {7, 0}, {{"layout", "rows"}}, "planar or contiguous"},
        {flat, {7, 0}, {{"layout", "contiguous"}}, Pages{7, 1, 1}},
        {Record::nvfp4_v41, {7, 0}, {{"layout", "contiguous"}}, Pages{7, 1, 1}},
        {Record::bf16, {7, 0}, {}, Pages{7, 1, 1}, DType::bf16},
        {Record::bf16, {3, 4, 0}, {}, Pages{3, 4, 4}, DType::bf16},
        {Record::bf16, {3, 4, 0}, {}, Pages{3, 4, 4}},
        {flat, {7, 0}, {}, "cache: need ", DType::bf16},
        {flat, {7, 0}, {}, "cache: need ", DType::f8_e4m3},
    });
}

TEST(CaseSources, PlanarShapesGivePages) {
    constexpr Record planar = Record::fp8_v4;
    const std::int64_t bytes = record_bytes_of(planar);
    const auto text = [](std::int64_t value) { return std::to_string(value); };
    expect_forms({
        {planar, {3, 4 * bytes}, {{"page_size", "4"}}, Pages{3, 4, 4}},
        {planar, {3, 4 * bytes + 32}, {{"page_size", "4"}}, Pages{3, 4, 4, 4 * bytes + 32}},
        {planar,
         {3, 4 * bytes + 32},
         {{"page_size", "4"}, {"page_stride_bytes", text(4 * bytes + 32)}, {"slots_per_page", "4"}},
         Pages{3, 4, 4, 4 * bytes + 32}},
        {planar, {3, 4, 0}, {}, Pages{3, 4, 4}},
        {planar, {12, 0}, {{"page_size", "4"}}, Pages{3, 4, 4}},
        {planar, {7, 0}, {{"page_size", "1"}}, Pages{7, 1, 1}},
        {planar, {0, 4 * bytes}, {{"page_size", "4"}}, Pages{0, 4, 4}},
        {planar, {3, 5 * bytes}, {{"page_size", "5"}}, Pages{3, 5, 5}},
        {planar, {3, 5 * bytes + 8}, {{"page_size", "5"}}, Pages{3, 5, 5, 5 * bytes + 8}},
        {planar, {3, 5 * bytes + 4}, {{"page_size", "5"}}, "a multiple of 8"},
        {planar, {3, 4 * bytes + 8}, {{"page_size", "4"}}, "a multiple of 16"},
        {planar, {3, 4 * bytes - 16}, {{"page_size", "4"}}, "pages of at least"},
        {planar, {3, 4 * bytes}, {}, "page_size: need "},
        {planar, {11, 0}, {{"page_size", "4"}}, "whole pages of 4"},
        {planar, {3, 4, 0}, {{"page_size", "2"}}, "cache: need 2 records a page, got 4"},
        {planar, {3, 4, 0}, {{"page_stride_bytes", text(4 * bytes + 32)}}, "page_stride_bytes: need "},
        {planar, {3, 4, 0}, {{"slots_per_page", "6"}}, "slots_per_page: need page_size"},
        {planar, {3, 4, 0}, {{"layout", "contiguous"}}, "layout: need a layout of fp8_v4"},
    });
}

TEST(CaseSources, LatentAndRopeMayBeTwoTensors) {
    Case c = case_of(Record::bf16);
    c.metadata.erase("page_size");
    for (const std::vector<std::int64_t>& leading : {std::vector<std::int64_t>{6}, {3, 2}}) {
        const auto shaped = [&](std::int64_t dims) {
            std::vector<std::int64_t> shape = leading;
            shape.push_back(dims);
            return make_owned(DType::bf16, shape);
        };
        c.tensors["cache"] = shaped(512);
        c.tensors["cache_rope"] = shaped(64);
        const CaseStep step = case_step(c);
        EXPECT_EQ(step.sources[0].cache.num_slots(), 6);
        EXPECT_EQ(step.sources[0].cache.rope, c.find("cache_rope")->bytes.get());
        EXPECT_TRUE(step.problem().sources[0].split_rope);
        c.tensors["cache_rope"] = shaped(63);
        EXPECT_TRUE(contains(refusal_of(c), "case: cache_rope: need BF16"));
        c.tensors["cache_rope"] = shaped(64);
        c.tensors["cache"] = shaped(576);
        EXPECT_TRUE(contains(refusal_of(c), "case: cache: need "));
        c.tensors["cache"] = shaped(512);
        c.tensors["cache_rope"] = make_owned(DType::bf16, {5, 64});
        EXPECT_TRUE(contains(refusal_of(c), "case: cache_rope: need "));
        c.tensors.erase("cache_rope");
        EXPECT_TRUE(contains(refusal_of(c), "case: cache: need "));
    }
    c = case_of(Record::fp8_576);
    c.tensors["cache_rope"] = make_owned(DType::bf16, {4, 2, 64});
    EXPECT_TRUE(contains(refusal_of(c), "cache_rope: need no such tensor"));
}

TEST(CaseSources, TheSecondSourceDefaultsToTheFirst) {
    const std::int64_t bytes = record_bytes_of(Record::fp8_v41);
    Case c = case_of(Record::fp8_v41);
    const std::int64_t page_bytes = 2 * bytes + 32;
    c.metadata["page_stride_bytes"] = std::to_string(page_bytes);
    c.tensors["cache"] = make_owned(DType::u8, {4, page_bytes});
    c.tensors["extra_cache"] = make_owned(DType::u8, {3, page_bytes});
    c.tensors["extra_slots"] = make_owned(DType::i32, {2, 1});
    const auto extra = [&] { return case_step(c).sources[1].cache; };
    EXPECT_EQ(extra().record, Record::fp8_v41);
    EXPECT_EQ(extra().page_size, 2);
    EXPECT_EQ(extra().page_stride_bytes, page_bytes);
    EXPECT_EQ(extra().num_slots(), 6);

    // Another page size has another stride.
    c.metadata["extra_page_size"] = "4";
    c.tensors["extra_cache"] = make_owned(DType::u8, {3, 4 * bytes});
    EXPECT_EQ(extra().page_stride_bytes, 0);
    EXPECT_EQ(extra().num_slots(), 12);
    // The shape says the page size where the metadata does not.
    c.metadata.erase("extra_page_size");
    c.tensors["extra_cache"] = make_owned(DType::u8, {3, 8, bytes});
    EXPECT_EQ(extra().num_slots(), 24);

    // A layout is inherited by a record that has it.
    c = case_of(Record::fp8_v41);
    c.metadata["layout"] = "contiguous";
    c.tensors["extra_cache"] = make_owned(DType::u8, {3, 2, bytes});
    c.tensors["extra_slots"] = make_owned(DType::i32, {2, 1});
    EXPECT_EQ(extra().form, RecordForm::contiguous);
    c.metadata["extra_layout"] = "planar";
    EXPECT_EQ(extra().form, RecordForm::planar);
    c.metadata.erase("extra_layout");
    c.metadata["extra_record"] = "fp8_v4";
    c.tensors["extra_cache"] = make_owned(DType::u8, {3, 2, record_bytes_of(Record::fp8_v4)});
    EXPECT_EQ(extra().form, RecordForm::planar);
}

}  // namespace
}  // namespace sparsemla
