#include "sparsemla/indices.h"

#include <limits>
#include <string>
#include <utility>

#include "check.h"
#include "gpu.h"
#include "indices_check.h"

namespace sparsemla {

namespace {

constexpr std::int64_t int32_max = std::numeric_limits<std::int32_t>::max();

using detail::Extent;

[[noreturn]] void refuse(std::string_view argument, std::string_view required, std::int64_t received) {
    throw Error(ErrorKind::invalid_argument, std::string(argument), required, std::to_string(received));
}

/// The part of a cache view that conversion uses; its memory may be missing or elsewhere.
void check_geometry(const CacheView& cache) {
    if (cache.page_size < 1 || cache.page_size > int32_max) refuse("cache.page_size", "1 .. 2^31-1", cache.page_size);
    const std::int64_t step = cache.slot_step();
    if (step < cache.page_size || step > int32_max)
        refuse("cache.slots_per_page", "0 or page_size .. 2^31-1", cache.slots_per_page);
    if (cache.form == RecordForm::planar && step != cache.page_size)
        refuse("cache.slots_per_page", "0 or page_size for page-planar records", cache.slots_per_page);
    if (cache.pages < 0 || cache.pages > int32_max) refuse("cache.pages", "0 .. 2^31-1", cache.pages);
    if (cache.num_slots() > int32_max)
        refuse("cache.pages", "(pages - 1) * slots_per_page + page_size <= 2^31-1", cache.num_slots());
}

void check_sharding(const Sharding& sharding, std::int64_t page_size) {
    detail::check_ranks(sharding);
    if (sharding.interleave < 1 || page_size % sharding.interleave != 0)
        refuse("sharding.interleave", "a divisor of page_size = " + std::to_string(page_size), sharding.interleave);
}

void check_list(const ConstTensor& tensor, std::string_view argument, const Extent& extent, Device device) {
    detail::check_tensor(
        tensor,
        {.argument = argument, .dtypes = {DType::i32}, .shape = {extent}, .device = device, .dense_last = false});
}

void check_table(const ConstTensor& tensor, std::string_view argument, const Extent& rows, const Extent& columns,
                 Device device) {
    detail::check_tensor(tensor,
                         {.argument = argument, .dtypes = {DType::i32}, .shape = {rows, columns}, .device = device});
}

/// Of `rows` rows, on `device`; token_ids is there and checked.
void check_inputs(const ConvertArgs& args, std::int64_t rows, Device device) {
    check_table(args.block_table, "block_table", Extent::any("requests"), Extent::any("max_pages"), device);
    if (args.token_ids.shape[1] > int32_max)
        refuse("token_ids", "a width of at most 2^31-1, which counts can hold", args.token_ids.shape[1]);
    check_list(args.request_of_row, "request_of_row", Extent::at_least(rows, "rows"), device);
    if (args.lengths.present())
        check_list(args.lengths, "lengths", Extent::at_least(args.block_table.shape[0], "requests"), device);
}

void check_tensors(const ConvertArgs& args) {
    const Device device = args.token_ids.device;
    check_table(args.token_ids, "token_ids", Extent::any("rows"), Extent::any("width"), device);
    const std::int64_t rows = args.token_ids.shape[0];
    const std::int64_t width = args.token_ids.shape[1];
    check_inputs(args, rows, device);
    check_table(args.slots, "slots", Extent::at_least(rows, "rows"), Extent::exactly(width, "width"), device);
    check_list(args.counts, "counts", Extent::at_least(rows, "rows"), device);

    detail::check_no_overlap(
        {detail::region_of(args.slots, "slots", {rows}), detail::region_of(args.counts, "counts", {rows})},
        detail::regions_of(args, rows));
}

detail::ConvertParams resolve(const ConvertArgs& args) {
    return {.token_ids = static_cast<const std::int32_t*>(args.token_ids.data),
            .ids_row_stride = args.token_ids.strides[0],
            .block_table = static_cast<const std::int32_t*>(args.block_table.data),
            .table_row_stride = args.block_table.strides[0],
            .request_of_row = static_cast<const std::int32_t*>(args.request_of_row.data),
            .request_stride = args.request_of_row.strides[0],
            .lengths = static_cast<const std::int32_t*>(args.lengths.data),
            .lengths_stride = args.lengths.strides[0],
            .slots = static_cast<std::int32_t*>(args.slots.data),
            .slots_row_stride = args.slots.strides[0],
            .counts = static_cast<std::int32_t*>(args.counts.data),
            .counts_stride = args.counts.strides[0],
            .rows = args.token_ids.shape[0],
            .width = args.token_ids.shape[1],
            .requests = args.block_table.shape[0],
            .max_pages = args.block_table.shape[1],
            .pages = args.cache.pages,
            .page_size = args.cache.page_size,
            .slots_per_page = args.cache.slot_step(),
            .sharding = args.sharding};
}

}  // namespace

void detail::check_ranks(const Sharding& sharding) {
    if (sharding.world < 1 || sharding.world > int32_max) refuse("sharding.world", "1 .. 2^31-1", sharding.world);
    if (sharding.rank < 0 || sharding.rank >= sharding.world)
        refuse("sharding.rank", "0 .. world - 1 = " + std::to_string(sharding.world - 1), sharding.rank);
}

detail::Regions detail::regions_of(const ConvertArgs& args, std::int64_t rows) {
    return {region_of(args.token_ids, "token_ids", {rows}), region_of(args.block_table, "block_table"),
            region_of(args.request_of_row, "request_of_row", {rows}),
            region_of(args.lengths, "lengths", {args.block_table.shape[0]})};
}

detail::ConvertParams detail::check_indices(ConvertArgs args, const CacheView& cache, std::int64_t rows,
                                            std::int64_t width) {
    for (const auto& [tensor, argument] : {std::pair(&args.slots, "indices.slots"), {&args.counts, "indices.counts"}})
        if (tensor->present())
            throw Error(ErrorKind::invalid_argument, argument, "nothing: decode keeps what it converts to itself",
                        describe(*tensor));
    args.cache = cache;
    check_geometry(args.cache);
    check_sharding(args.sharding, args.cache.page_size);
    check_table(args.token_ids, "token_ids", Extent::at_least(rows, "rows"), Extent::exactly(width, "width"),
                cache.device);
    check_inputs(args, rows, cache.device);
    ConvertParams params = resolve(args);
    params.rows = rows;
    return params;
}

void detail::convert_to_workspace(DecodeParams& params) {
    const Problem& problem = params.plan->problem;
    auto* counts =
        reinterpret_cast<std::int32_t*>(params.workspace + params.plan->workspace_bytes - converted_bytes(problem));
    ConvertParams& indices = params.indices;
    indices.counts = counts;
    indices.counts_stride = 1;
    indices.slots = counts + problem.rows;
    indices.slots_row_stride = indices.width;
    convert_indices_cpu(indices);
    SourceParams& source = params.sources[0];
    source.slots = indices.slots;
    source.slots_row_stride = indices.slots_row_stride;
    source.counts = indices.counts;
    source.counts_stride = indices.counts_stride;
}

void convert_indices(const ConvertArgs& args, Stream stream) {
    check_geometry(args.cache);
    check_sharding(args.sharding, args.cache.page_size);
    check_tensors(args);
    const Device device = args.token_ids.device;
    if (device.kind == Device::Kind::cpu)
        detail::convert_indices_cpu(resolve(args));
    else
        detail::convert_indices_gpu(resolve(args), device.index, stream);
}

}  // namespace sparsemla
