#include "harness/generate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "harness/columns.h"
#include "harness/latents.h"
#include "harness/oracle.h"
#include "harness/parallel.h"
#include "harness/random.h"
#include "sparsemla/formats.h"

namespace sparsemla::harness {

namespace {

enum Stream : std::int64_t { sinks_stream = 300 };

constexpr int nan_byte = 0xFF;               // NaN in every encoding of values and scales that has one
constexpr std::int64_t block_records = 256;  // packed at a time
constexpr std::int64_t max_int32 = std::numeric_limits<std::int32_t>::max();

[[noreturn]] void refuse(const std::string& argument, const std::string& required, const std::string& received) {
    throw Error(ErrorKind::invalid_argument, argument, required, received);
}

void check_range(const std::string& argument, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value < low || value > high)
        refuse(argument, std::to_string(low) + " .. " + std::to_string(high), std::to_string(value));
}

void check_source(const SourceRecipe& source, const Recipe& recipe, const std::string& name) {
    const RecordLayout& layout = layout_of(source.record);
    const bool planar = source.form == RecordForm::planar;
    if (planar ? !layout.has_planar : !layout.has_contiguous)
        refuse(name + "form", planar ? "contiguous" : "planar", planar ? "planar" : "contiguous");
    if (source.split_rope && !layout.may_split)
        refuse(name + "split_rope", "false for " + to_string(layout.record), "true");
    if (layout.d_qk() != layout_of(recipe.sources[0].record).d_qk())
        refuse(name + "record", "a record of source 0's d_qk", to_string(layout.record));
    check_range(name + "width", source.width, 0, max_int32);
    check_range(name + "page_size", source.page_size, 1, max_int32);
    check_range(name + "pages", source.pages, 0, max_int32);
    if (source.slots_per_page != 0)
        check_range(name + "slots_per_page", source.slots_per_page, source.page_size,
                    planar ? source.page_size : max_int32);
    const std::int64_t page_bytes = source.page_size * layout.record_bytes;
    if (planar && source.page_stride_bytes != 0)
        check_range(name + "page_stride_bytes", source.page_stride_bytes, page_bytes, std::int64_t{1} << 48);
}

void check_recipe(const Recipe& recipe) {
    check_range("rows", recipe.rows, 0, max_int32);
    check_range("heads", recipe.heads, 0, max_heads);
    if (recipe.query_dtype != DType::f8_e4m3 && recipe.query_dtype != DType::bf16)
        refuse("query_dtype", "f8_e4m3 or bf16", std::string(name(recipe.query_dtype)));
    check_range("sources", static_cast<std::int64_t>(recipe.sources.size()), 1, 2);
    for (std::size_t i = 0; i < recipe.sources.size(); ++i)
        check_source(recipe.sources[i], recipe, "sources[" + std::to_string(i) + "].");
    if (recipe.one_list && recipe.sources.size() != 2) refuse("one_list", "two sources", "one");
    if (recipe.counts == CountsRecipe::list && static_cast<std::int64_t>(recipe.counts_list.size()) != recipe.rows)
        refuse("counts_list", std::to_string(recipe.rows) + " counts, one per row",
               std::to_string(recipe.counts_list.size()));
    if (!(recipe.absent >= 0 && recipe.absent <= 1))
        refuse("absent", "a share in 0 .. 1", std::to_string(recipe.absent));
}

std::int64_t pages_of(const SourceRecipe& source) {
    return source.pages != 0 ? source.pages : std::max<std::int64_t>(2, 2 * source.width / source.page_size + 1);
}

/// A source's tensors, and the view of them.
struct Cache {
    OwnedTensor tensor;
    OwnedTensor rope;
    MutableCacheView view;
};

OwnedTensor nan_tensor(DType dtype, std::vector<std::int64_t> shape) {
    OwnedTensor tensor = make_owned(dtype, std::move(shape));
    std::memset(tensor.bytes.get(), nan_byte, tensor.size_bytes);
    return tensor;
}

Cache make_cache(const SourceRecipe& source, const std::string& name) {
    Cache cache;
    cache.view = {
        .record = source.record, .form = source.form, .pages = pages_of(source), .page_size = source.page_size};
    cache.view.slots_per_page = source.slots_per_page;
    cache.view.page_stride_bytes = source.page_stride_bytes;
    const RecordLayout& layout = cache.view.layout();
    if (cache.view.num_slots() > max_int32)
        refuse(name + "pages", "at most 2^31 - 1 slots", std::to_string(cache.view.num_slots()));
    if (source.form == RecordForm::planar) {
        cache.tensor = nan_tensor(DType::u8, {cache.view.pages, cache.view.stride_bytes()});
    } else {
        const bool bf16 = layout.main.encoding == ValueEncoding::bf16;
        const std::int64_t extent = source.split_rope ? layout.main.dims : bf16 ? layout.d_qk() : layout.record_bytes;
        // Pages with gaps between them are one run of slots.
        std::vector<std::int64_t> shape = {cache.view.num_slots(), extent};
        if (cache.view.slot_step() == source.page_size) shape = {cache.view.pages, source.page_size, extent};
        cache.tensor = nan_tensor(bf16 ? DType::bf16 : DType::u8, shape);
        shape.back() = layout.rope.dims;
        if (source.split_rope) cache.rope = nan_tensor(DType::bf16, shape);
    }
    cache.view.data = cache.tensor.bytes.get();
    cache.view.rope = cache.rope.bytes.get();
    validate(cache.view, name + "cache");
    return cache;
}

/// visit(slots, values [n, d_qk]) for the named slots, a block at a time.
template <class Visit>
void for_each_block(const Latents& latents, int source, const std::vector<std::int32_t>& named, Visit visit) {
    std::vector<float> values(static_cast<std::size_t>(block_records * latents.d_qk()));
    const auto count = static_cast<std::int64_t>(named.size());
    for (std::int64_t first = 0; first < count; first += block_records) {
        const std::int64_t n = std::min(block_records, count - first);
        for (std::int64_t i = 0; i < n; ++i)
            latents.key({source, named[static_cast<std::size_t>(first + i)]}, values.data() + i * latents.d_qk());
        visit(dense(named.data() + first, DType::i32, {n}), dense(values.data(), DType::f32, {n, latents.d_qk()}));
    }
}

float largest_magnitude(const ConstTensor& values) {
    float largest = 0;
    const auto* value = static_cast<const float*>(values.data);
    for (std::int64_t i = 0; i < values.elements(); ++i) largest = std::max(largest, std::fabs(value[i]));
    return largest;
}

/// Writes the named records; returns k_scale, which lets flat fp8 use its whole range.
float fill_cache(const Recipe& recipe, const Latents& latents, int source, const std::vector<std::int32_t>& named,
                 const MutableCacheView& view) {
    const RecordLayout& layout = view.layout();
    PackOptions options;
    options.power_of_two_scales = recipe.power_of_two_scales && layout.scale_rule == ScaleRule::amax_f32;
    if (layout.takes_k_scale && !named.empty()) {
        float largest = 0;
        for_each_block(latents, source, named, [&](const ConstTensor&, const ConstTensor& values) {
            largest = std::max(largest, largest_magnitude(values));
        });
        options.k_scale = largest / e4m3_max;
    }
    for_each_block(latents, source, named,
                   [&](const ConstTensor& slots, const ConstTensor& values) { pack(view, values, slots, options); });
    return options.k_scale;
}

/// The present active columns of a row, of all sources.
std::vector<Token> tokens_of(const ColumnLists& lists, std::int64_t row) {
    std::vector<Token> tokens;
    for (std::size_t i = 0; i < lists.sources.size(); ++i) {
        const SourceColumns& columns = lists.sources[i];
        const std::int32_t* slots = columns.slots.data() + row * columns.width;
        for (std::int64_t column = 0; column < columns.active[static_cast<std::size_t>(row)]; ++column)
            if (slots[column] >= 0) tokens.push_back({static_cast<int>(i), slots[column]});
    }
    return tokens;
}

OwnedTensor make_query(const Recipe& recipe, const Latents& latents, const ColumnLists& lists, double softmax_scale,
                       float& q_scale) {
    const std::int64_t d_qk = latents.d_qk();
    std::vector<float> values(static_cast<std::size_t>(recipe.rows * recipe.heads * d_qk));
    for_each_index(recipe.rows, [&](std::int64_t row) {
        const std::vector<Token> tokens = tokens_of(lists, row);
        for_each_index(recipe.heads, [&](std::int64_t head) {
            latents.query(row, head, tokens, softmax_scale, values.data() + (row * recipe.heads + head) * d_qk);
        });
    });
    const ConstTensor exact = dense(std::as_const(values).data(), DType::f32, {recipe.rows, recipe.heads, d_qk});
    OwnedTensor query = make_owned(recipe.query_dtype, {recipe.rows, recipe.heads, d_qk});
    if (recipe.query_dtype == DType::bf16) {
        auto* out = reinterpret_cast<std::uint16_t*>(query.bytes.get());
        std::transform(values.begin(), values.end(), out, float_to_bf16);
    } else if (!values.empty()) {
        q_scale = largest_magnitude(exact) / e4m3_max;
        quantize_query(exact, q_scale, query.view());
    }
    return query;
}

/// One sink per head: none, negligible, or up to what outweighs a row.
OwnedTensor make_sinks(const Recipe& recipe) {
    OwnedTensor sinks = make_owned(DType::f32, {recipe.heads});
    auto* value = reinterpret_cast<float*>(sinks.bytes.get());
    for (std::int64_t head = 0; head < recipe.heads; ++head) {
        Random random(recipe.seed, {sinks_stream, head});
        const std::int64_t kind = random.below(8);
        value[head] = kind == 0   ? -std::numeric_limits<float>::infinity()
                      : kind == 1 ? -1e30F
                                  : static_cast<float>(random.uniform(-2, 16));
    }
    return sinks;
}

template <class T>
OwnedTensor tensor_of(const std::vector<T>& values, DType dtype, std::vector<std::int64_t> shape) {
    OwnedTensor tensor = make_owned(dtype, std::move(shape));
    if (!values.empty()) std::memcpy(tensor.bytes.get(), values.data(), tensor.size_bytes);
    return tensor;
}

/// The lists of both sources side by side.
std::vector<std::int32_t> joined_slots(const ColumnLists& lists, std::int64_t rows) {
    std::vector<std::int32_t> joined;
    for (std::int64_t row = 0; row < rows; ++row)
        for (const SourceColumns& columns : lists.sources) {
            const auto first = columns.slots.begin() + row * columns.width;
            joined.insert(joined.end(), first, first + columns.width);
        }
    return joined;
}

void add_lists(const Recipe& recipe, const ColumnLists& lists, Case& c) {
    const std::string prefixes[] = {"", "extra_"};
    for (std::size_t i = 0; i < lists.sources.size() && !recipe.one_list; ++i)
        c.tensors[prefixes[i] + "slots"] =
            tensor_of(lists.sources[i].slots, DType::i32, {recipe.rows, recipe.sources[i].width});
    for (std::size_t i = 0; i < lists.counts.size(); ++i)
        c.tensors[prefixes[i] + "counts"] = tensor_of(lists.counts[i], DType::i32, {recipe.rows});
    if (!recipe.one_list) return;
    const std::int64_t width = recipe.sources[0].width + recipe.sources[1].width;
    c.tensors["slots"] = tensor_of(joined_slots(lists, recipe.rows), DType::i32, {recipe.rows, width});
    c.metadata["first_width"] = std::to_string(recipe.sources[0].width);
}

std::string text(float value) {
    std::array<char, 32> buffer{};
    std::snprintf(buffer.data(), buffer.size(), "%.9g", static_cast<double>(value));
    return buffer.data();
}

/// Every key of a source is written out: source 1 would inherit what it leaves out.
void add_source(const std::string& prefix, const SourceRecipe& recipe, float k_scale, Cache& cache, Case& c) {
    const RecordLayout& layout = cache.view.layout();
    c.metadata[prefix + "record"] = std::string(layout.name);
    c.metadata[prefix + "record_bytes"] = std::to_string(layout.record_bytes);
    c.metadata[prefix + "page_size"] = std::to_string(recipe.page_size);
    c.metadata[prefix + "slots_per_page"] = std::to_string(cache.view.slot_step());
    if (recipe.form == RecordForm::planar)
        c.metadata[prefix + "page_stride_bytes"] = std::to_string(cache.view.stride_bytes());
    if (layout.has_planar && layout.has_contiguous)
        c.metadata[prefix + "layout"] = recipe.form == RecordForm::planar ? "planar" : "contiguous";
    if (layout.takes_k_scale) c.metadata[prefix + "k_scale"] = text(k_scale);
    c.tensors[prefix + "cache"] = std::move(cache.tensor);
    if (recipe.split_rope) c.tensors[prefix + "cache_rope"] = std::move(cache.rope);
}

void add_expected(const Recipe& recipe, Case& c) {
    const Oracle oracle = compute_oracle(case_step(c));
    constexpr double log2_e = 1.4426950408889634;
    const double unit = recipe.lse_base == LseBase::two ? log2_e : 1;
    std::vector<float> out(oracle.out.begin(), oracle.out.end());
    std::vector<float> lse;
    for (const double value : oracle.lse) lse.push_back(static_cast<float>(value * unit));
    c.tensors["expected.out"] = tensor_of(out, DType::f32, {recipe.rows, recipe.heads, value_dims});
    c.tensors["expected.lse"] = tensor_of(lse, DType::f32, {recipe.rows, recipe.heads});
}

}  // namespace

Case generate(const Recipe& recipe) {
    check_recipe(recipe);
    const int d_qk = layout_of(recipe.sources[0].record).d_qk();
    // Of models with a nope and a rope part of 128 and 64 dimensions before absorption, and of those without.
    const auto softmax_scale = static_cast<float>(1 / std::sqrt(d_qk == value_dims ? 512.0 : 192.0));
    std::vector<Cache> caches;
    std::vector<CacheView> views;
    for (std::size_t i = 0; i < recipe.sources.size(); ++i) {
        caches.push_back(make_cache(recipe.sources[i], "sources[" + std::to_string(i) + "]."));
        views.emplace_back(caches[i].view);
    }
    const ColumnLists lists = make_columns(recipe, views);
    const Latents latents(recipe.seed, d_qk);
    Case c;
    for (std::size_t i = 0; i < caches.size(); ++i) {
        const float k_scale = fill_cache(recipe, latents, static_cast<int>(i), lists.sources[i].named, caches[i].view);
        add_source(i == 0 ? "" : "extra_", recipe.sources[i], k_scale, caches[i], c);
    }
    float q_scale = 1;
    c.tensors["query"] = make_query(recipe, latents, lists, double{softmax_scale}, q_scale);
    add_lists(recipe, lists, c);
    if (recipe.sinks) c.tensors["sinks"] = make_sinks(recipe);
    c.metadata["softmax_scale"] = text(softmax_scale);
    c.metadata["q_scale"] = text(q_scale);
    c.metadata["lse"] = recipe.lse_base == LseBase::two ? "log2" : "natural";
    validate(c);
    if (recipe.expected) add_expected(recipe, c);
    return c;
}

}  // namespace sparsemla::harness
