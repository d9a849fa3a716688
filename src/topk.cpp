// Checks of merge_topk's arguments, and its dispatch to a device.
#include "sparsemla/topk.h"

#include <algorithm>
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

[[noreturn]] void refuse(std::string_view argument, std::string_view required, std::string_view received) {
    throw Error(ErrorKind::invalid_argument, std::string(argument), required, received);
}

void check_sizes(const MergeTopkArgs& args) {
    if (args.rows < 0) refuse("rows", ">= 0", std::to_string(args.rows));
    if (args.k < 0 || args.k > int32_max) refuse("k", "0 .. 2^31-1", std::to_string(args.k));
    if (args.scores.device.kind != Device::Kind::cpu && args.k > max_gpu_topk)
        throw Error(ErrorKind::unsupported, "k", "0 .. " + std::to_string(max_gpu_topk) + " on a GPU",
                    std::to_string(args.k));
}

void check_candidates(const MergeTopkArgs& args) {
    const Device device = args.scores.device;
    const Extent rows = Extent::at_least(args.rows, "rows");
    detail::check_tensor(args.scores, {.argument = "scores",
                                       .dtypes = {DType::f32},
                                       .shape = {Extent::at_least(1, "sources"), rows, Extent::any("width")},
                                       .device = device});
    const std::int64_t sources = args.scores.shape[0], width = args.scores.shape[2];
    if (sources > int32_max / std::max<std::int64_t>(width, 1))
        refuse("scores", "at most 2^31-1 columns of all sources", detail::describe(args.scores));
    detail::check_tensor(args.ids,
                         {.argument = "ids",
                          .dtypes = {DType::i32},
                          .shape = {Extent::exactly(sources, "sources"), rows, Extent::exactly(width, "width")},
                          .device = device});
    if (args.source_counts.present())
        detail::check_tensor(args.source_counts, {.argument = "source_counts",
                                                  .dtypes = {DType::i32},
                                                  .shape = {Extent::exactly(sources, "sources"), rows},
                                                  .device = device,
                                                  .dense_last = false});
}

/// Without a cache, whose page size bounds it, the interleave is any.
void check_sharding(const Sharding& sharding) {
    detail::check_ranks(sharding);
    if (sharding.interleave < 1 || sharding.interleave > int32_max)
        refuse("sharding.interleave", "1 .. 2^31-1", std::to_string(sharding.interleave));
}

/// One of the two lists is wanted, and what only the other one needs is not given.
void check_form(const MergeTopkArgs& args) {
    if (!args.token_ids.present() && !args.slots.present()) refuse("slots", "slots or token_ids", "neither");
    if (!args.token_ids.present()) return;
    for (const auto& [tensor, argument] : {std::pair<ConstTensor, std::string_view>{args.slots, "slots"},
                                           {args.block_table, "block_table"},
                                           {args.request_of_row, "request_of_row"},
                                           {args.lengths, "lengths"}})
        if (tensor.present()) refuse(argument, "nothing where token_ids are wanted", detail::describe(tensor));
}

void check_outputs(const MergeTopkArgs& args, const Tensor& list, std::string_view list_name) {
    const Extent rows = Extent::at_least(args.rows, "rows");
    detail::check_tensor(list, {.argument = list_name,
                                .dtypes = {DType::i32},
                                .shape = {rows, Extent::exactly(args.k, "k")},
                                .device = args.scores.device});
    detail::check_tensor(args.counts, {.argument = "counts",
                                       .dtypes = {DType::i32},
                                       .shape = {rows},
                                       .device = args.scores.device,
                                       .dense_last = false});
}

void check_overlap(const MergeTopkArgs& args, const Tensor& list, std::string_view list_name) {
    using detail::region_of;
    const std::int64_t sources = args.scores.shape[0];
    detail::check_no_overlap(
        {region_of(list, list_name, {args.rows}), region_of(args.counts, "counts", {args.rows})},
        {region_of(args.scores, "scores", {sources, args.rows}), region_of(args.ids, "ids", {sources, args.rows}),
         region_of(args.source_counts, "source_counts", {sources, args.rows}),
         region_of(args.block_table, "block_table"), region_of(args.request_of_row, "request_of_row", {args.rows}),
         region_of(args.lengths, "lengths", {args.block_table.shape[0]})});
}

/// The conversion of the selected ids to slots; they lie where the slots will. Without one its sharding alone counts.
detail::ConvertParams check_conversion(const MergeTopkArgs& args) {
    if (!args.slots.present()) {
        check_sharding(args.sharding);
        return {.page_size = 1, .slots_per_page = 1, .sharding = args.sharding};
    }
    CacheView geometry = args.cache;
    geometry.device = args.scores.device;
    return detail::check_indices({.token_ids = args.slots,
                                  .block_table = args.block_table,
                                  .request_of_row = args.request_of_row,
                                  .lengths = args.lengths,
                                  .cache = {},
                                  .sharding = args.sharding,
                                  .slots = {},
                                  .counts = {}},
                                 geometry, args.rows, args.k);
}

detail::MergeTopkParams resolve(const MergeTopkArgs& args, const Tensor& list, detail::ConvertParams conversion) {
    conversion.slots = static_cast<std::int32_t*>(list.data);
    conversion.slots_row_stride = list.strides[0];
    conversion.counts = static_cast<std::int32_t*>(args.counts.data);
    conversion.counts_stride = args.counts.strides[0];
    conversion.rows = args.rows;
    conversion.width = args.k;
    return {.scores = static_cast<const float*>(args.scores.data),
            .scores_source_stride = args.scores.strides[0],
            .scores_row_stride = args.scores.strides[1],
            .ids = static_cast<const std::int32_t*>(args.ids.data),
            .ids_source_stride = args.ids.strides[0],
            .ids_row_stride = args.ids.strides[1],
            .source_counts = static_cast<const std::int32_t*>(args.source_counts.data),
            .counts_source_stride = args.source_counts.strides[0],
            .counts_row_stride = args.source_counts.strides[1],
            .sources = args.scores.shape[0],
            .width = args.scores.shape[2],
            .to_slots = args.slots.present(),
            .conversion = conversion};
}

}  // namespace

void merge_topk(const MergeTopkArgs& args, Stream stream) {
    check_sizes(args);
    check_candidates(args);
    check_form(args);
    const Tensor& list = args.slots.present() ? args.slots : args.token_ids;
    const std::string_view list_name = args.slots.present() ? "slots" : "token_ids";
    check_outputs(args, list, list_name);
    const detail::ConvertParams conversion = check_conversion(args);
    check_overlap(args, list, list_name);

    const detail::MergeTopkParams params = resolve(args, list, conversion);
    if (const Device device = args.scores.device; device.kind == Device::Kind::cpu)
        detail::merge_topk_cpu(params);
    else
        detail::merge_topk_gpu(params, device.index, stream);
}

}  // namespace sparsemla
