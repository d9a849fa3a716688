// From a case to the library's arguments: one reading of the fields serves validate, case_step and case_indices.
#include <utility>

#include "case_fields.h"
#include "safetensors.h"

namespace sparsemla {

namespace {

using detail::CaseCache;
using detail::CaseFields;
using detail::Extent;
using detail::max_extent;

/// A case read whole.
struct Reading {
    CaseStep step;                       ///< sources without slots where the case has token ids only
    bool has_slots = false;              ///< else token ids
    std::optional<ConvertArgs> indices;  ///< where the case has token ids
};

void read_scalars(const CaseFields& fields, CaseStep& step) {
    const std::optional<float> softmax_scale = fields.scale("softmax_scale");
    if (!softmax_scale) fields.fail("softmax_scale", "a positive finite number", "none");
    step.softmax_scale = *softmax_scale;
    step.q_scale = fields.scale("q_scale").value_or(1.0F);
    step.out_scale = fields.scale("out_scale").value_or(1.0F);
    if (const std::string* base = fields.text("lse")) {
        if (*base != "natural" && *base != "log2") fields.fail("lse", "natural or log2", detail::in_quotes(*base));
        step.lse_base = *base == "log2" ? LseBase::two : LseBase::natural;
    }
}

void read_query(const CaseFields& fields, CaseStep& step) {
    const int d_qk = step.sources[0].cache.layout().d_qk();
    step.query = fields.tensor("query", {DType::f8_e4m3, DType::bf16},
                               {Extent::any("rows"), Extent::any("heads"), Extent::exactly(d_qk, "d_qk")});
    step.rows = step.query.shape[0];
    step.heads = step.query.shape[1];
    // Rows without heads hold no byte, and what is kept for each of them would be more than the file justifies.
    constexpr std::int64_t max_rows_without_heads = std::int64_t{1} << 16;
    if (step.heads == 0 && step.rows > max_rows_without_heads)
        fields.fail("query", "at most " + std::to_string(max_rows_without_heads) + " rows without heads",
                    std::to_string(step.rows));
    step.sinks = fields.optional_tensor("sinks", {DType::f32}, {Extent::exactly(step.heads, "heads")});
}

/// A scale other than 1 is refused where the record has none, and not inherited by such a record.
void read_k_scales(const CaseFields& fields, CaseStep& step) {
    for (std::size_t i = 0; i < step.sources.size(); ++i) {
        CaseSource& source = step.sources[i];
        const char* key = i == 0 ? "k_scale" : "extra_k_scale";
        const RecordLayout& layout = source.cache.layout();
        const std::optional<float> own = fields.scale(key);
        if (own && *own != 1.0F && !layout.takes_k_scale)
            fields.fail(key, "1, since " + to_string(layout.record) + " takes no per-tensor scale", *fields.text(key));
        source.k_scale = own ? *own : i == 1 && layout.takes_k_scale ? fields.scale("k_scale").value_or(1.0F) : 1.0F;
    }
}

ConstTensor read_counts(const CaseFields& fields, const char* name, const CaseStep& step) {
    return fields.optional_tensor(name, {DType::i32}, {Extent::exactly(step.rows, "rows")});
}

ConstTensor read_list(const CaseFields& fields, const char* name, const CaseStep& step) {
    return fields.tensor(name, {DType::i32}, {Extent::exactly(step.rows, "rows"), Extent::any("width")});
}

/// `slots` alone: its first columns address source 0, the others source 1, under one count.
void cut_list(const CaseFields& fields, CaseStep& step) {
    for (const char* field : {"extra_slots", "extra_counts", "token_ids"}) fields.forbid(field, "beside first_width");
    if (step.sources.size() != 2) fields.fail("extra_cache", "the cache of the columns past first_width", "none");
    const ConstTensor list = read_list(fields, "slots", step);
    const std::int64_t first_width = *fields.integer("first_width", 0, list.shape[1]);
    fields.integer("count_offset", 0, 0);
    fields.integer("extra_count_offset", first_width, first_width);
    step.sources[0].slots = columns(list, 0, first_width);
    step.sources[1].slots = columns(list, first_width, list.shape[1] - first_width);
    step.sources[1].count_offset = first_width;
    for (CaseSource& source : step.sources) source.counts = read_counts(fields, "counts", step);
}

void read_lists(const CaseFields& fields, CaseStep& step) {
    CaseSource& first = step.sources[0];
    if (fields.has_tensor("slots")) {
        first.slots = read_list(fields, "slots", step);
        first.counts = read_counts(fields, "counts", step);
        first.count_offset = fields.integer("count_offset", 0, max_extent).value_or(0);
    } else {
        fields.forbid("counts", "beside token_ids without slots: conversion counts what it keeps");
        fields.integer("count_offset", 0, 0);
    }
    if (step.sources.size() == 2) {
        CaseSource& extra = step.sources[1];
        extra.slots = read_list(fields, "extra_slots", step);
        extra.counts = read_counts(fields, "extra_counts", step);
        extra.count_offset = fields.integer("extra_count_offset", 0, max_extent).value_or(0);
    }
}

void read_sources(const CaseFields& fields, CaseStep& step, CaseCache& first) {
    first = case_cache(fields, "", nullptr);
    step.sources.push_back({.cache = first.view, .slots = {}, .counts = {}});
    if (fields.has_tensor("extra_cache")) {
        const CaseCache extra = case_cache(fields, "extra_", &first);
        step.sources.push_back({.cache = extra.view, .slots = {}, .counts = {}});
        if (extra.view.layout().d_qk() != first.view.layout().d_qk())
            fields.fail("extra_record", "the d_qk of record, " + std::to_string(first.view.layout().d_qk()),
                        to_string(extra.view.record));
    } else {
        for (const char* field : {"extra_cache_rope", "extra_slots", "extra_counts"})
            fields.forbid(field, "without extra_cache");
    }
}

/// What conversion reads; `cache` is source 0's, whose pages the block ids name.
ConvertArgs read_indices(const CaseFields& fields, const CaseStep& step, const CaseCache& cache) {
    ConvertArgs args;
    args.token_ids = read_list(fields, "token_ids", step);
    args.block_table = fields.tensor("block_table", {DType::i32}, {Extent::any("requests"), Extent::any("max_pages")});
    args.request_of_row = fields.tensor("request_of_row", {DType::i32}, {Extent::exactly(step.rows, "rows")});
    args.cache = cache.view;
    args.sharding.world = fields.integer("world", 1, max_extent).value_or(1);
    args.sharding.rank = fields.integer("rank", 0, args.sharding.world - 1).value_or(0);
    args.sharding.interleave = fields.integer("interleave", 1, max_extent).value_or(1);
    if (cache.page_size == 0) fields.fail("page_size", "the tokens of a page, to which block ids refer", "none");
    if (cache.page_size != cache.view.page_size)
        fields.fail("cache", "whole pages of " + std::to_string(cache.page_size) + " records beside token_ids",
                    std::to_string(cache.view.num_slots()) + " records");
    if (cache.page_size % args.sharding.interleave != 0)
        fields.fail("interleave", "a divisor of page_size = " + std::to_string(cache.page_size),
                    std::to_string(args.sharding.interleave));
    return args;
}

Reading read(const Case& c) {
    const CaseFields fields(c);
    Reading reading;
    CaseStep& step = reading.step;
    CaseCache first;
    read_sources(fields, step, first);
    read_query(fields, step);
    read_scalars(fields, step);
    read_k_scales(fields, step);

    reading.has_slots = fields.has_tensor("slots");
    const bool has_ids = fields.has_tensor("token_ids");
    if (!reading.has_slots && !has_ids) fields.fail("slots", "I32 [rows, width], or token_ids", "no such tensor");
    if (fields.has_text("first_width"))
        cut_list(fields, step);
    else
        read_lists(fields, step);
    if (has_ids) {
        reading.indices = read_indices(fields, step, first);
    } else {
        for (const char* field : {"block_table", "request_of_row"}) fields.forbid(field, "without token_ids");
    }
    return reading;
}

/// Shapes of what the case says the result is.
void check_answers(const CaseFields& fields, const CaseStep& step) {
    const Extent rows = Extent::exactly(step.rows, "rows");
    const Extent heads = Extent::exactly(step.heads, "heads");
    const CacheView& cache = step.sources[0].cache;
    fields.optional_tensor("expected.out", {DType::f32, DType::bf16}, {rows, heads, Extent::exactly(value_dims)});
    fields.optional_tensor("expected.lse", {DType::f32}, {rows, heads});
    fields.optional_tensor("peer.out", {DType::bf16}, {rows, heads, Extent::exactly(value_dims)});
    const ConstTensor values = fields.optional_tensor("expected.dequantised", {DType::f32},
                                                      {Extent::any("n"), Extent::exactly(cache.layout().d_qk())});
    if (values.present() && values.shape[0] > cache.num_slots())
        fields.fail("expected.dequantised", "at most the " + std::to_string(cache.num_slots()) + " slots of the cache",
                    std::to_string(values.shape[0]));
}

}  // namespace

void validate(const Case& c) { check_answers(CaseFields(c), read(c).step); }

CaseStep case_step(const Case& c) {
    Reading reading = read(c);
    if (!reading.has_slots)
        CaseFields(c).fail("slots", "slots: a case of token_ids is converted first", "token_ids only");
    return std::move(reading.step);
}

std::optional<ConvertArgs> case_indices(const Case& c) { return read(c).indices; }

void convert_case(Case& c) {
    Reading reading = read(c);
    if (reading.has_slots) return;
    ConvertArgs& args = *reading.indices;
    OwnedTensor slots = make_owned(DType::i32, {args.token_ids.shape[0], args.token_ids.shape[1]});
    OwnedTensor counts = make_owned(DType::i32, {args.token_ids.shape[0]});
    args.slots = slots.view();
    args.counts = counts.view();
    convert_indices(args);
    c.tensors.insert_or_assign("slots", std::move(slots));
    c.tensors.insert_or_assign("counts", std::move(counts));
}

Problem CaseStep::problem(Device device) const {
    Problem problem{.rows = rows,
                    .heads = heads,
                    .query_dtype = query.dtype,
                    .sources = {},
                    .sinks = sinks.present(),
                    .lse = true,
                    .lse_base = lse_base,
                    .out_dtype = DType::bf16,
                    .device = device};
    for (const CaseSource& source : sources)
        problem.sources.push_back({.record = source.cache.record,
                                   .form = source.cache.form,
                                   .split_rope = source.cache.rope != nullptr,
                                   .width = source.slots.shape[1],
                                   .count_offset = source.count_offset});
    return problem;
}

DecodeArgs CaseStep::args() const {
    DecodeArgs args{.rows = rows,
                    .query = query,
                    .sources = {},
                    .sinks = sinks,
                    .softmax_scale = softmax_scale,
                    .q_scale = {.value = q_scale},
                    .out_scale = out_scale,
                    .out = {},
                    .lse = {}};
    for (std::size_t i = 0; i < sources.size(); ++i)
        args.sources[i] = {.cache = sources[i].cache,
                           .slots = sources[i].slots,
                           .counts = sources[i].counts,
                           .k_scale = {.value = sources[i].k_scale}};
    return args;
}

}  // namespace sparsemla
