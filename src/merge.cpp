// Checks of merge's arguments, and its dispatch to a device.
#include <string>
#include <vector>

#include "check.h"
#include "kernels.h"
#include "sparsemla/decode.h"

namespace sparsemla {

namespace {

using detail::Extent;

void check_count(std::int64_t value, std::string_view argument) {
    if (value < 0) throw Error(ErrorKind::invalid_argument, std::string(argument), ">= 0", std::to_string(value));
}

void check_out(const ConstTensor& tensor, std::string_view argument, const MergeArgs& args) {
    detail::check_tensor(tensor, {.argument = argument,
                                  .dtypes = {DType::f32, DType::bf16},
                                  .shape = {Extent::at_least(args.rows, "rows"), Extent::at_least(args.heads, "heads"),
                                            Extent::exactly(value_dims)},
                                  .device = args.out.device});
}

void check_lse(const ConstTensor& tensor, std::string_view argument, const MergeArgs& args) {
    detail::check_tensor(tensor, {.argument = argument,
                                  .dtypes = {DType::f32},
                                  .shape = {Extent::at_least(args.rows, "rows"), Extent::at_least(args.heads, "heads")},
                                  .device = args.out.device,
                                  .dense_last = false});
}

void check_list(const ConstTensor& tensor, std::string_view argument, DType dtype, const Extent& extent,
                Device device) {
    detail::check_tensor(
        tensor, {.argument = argument, .dtypes = {dtype}, .shape = {extent}, .device = device, .dense_last = false});
}

/// The names of one partial's tensors in messages: "partials[3].out".
struct PartialNames {
    explicit PartialNames(std::size_t partial)
        : out("partials[" + std::to_string(partial) + "].out"),
          lse("partials[" + std::to_string(partial) + "].lse"),
          counts("partials[" + std::to_string(partial) + "].counts") {}
    std::string out, lse, counts;
};

void check_overlap(const MergeArgs& args, const std::vector<PartialNames>& names) {
    const std::int64_t rows = args.rows;
    const std::int64_t heads = args.heads;
    std::vector<detail::Region> inputs{detail::region_of(args.sinks, "sinks", {heads})};
    for (std::size_t i = 0; i < names.size(); ++i) {
        inputs.push_back(detail::region_of(args.partials[i].out, names[i].out, {rows, heads}));
        inputs.push_back(detail::region_of(args.partials[i].lse, names[i].lse, {rows, heads}));
        inputs.push_back(detail::region_of(args.partials[i].counts, names[i].counts, {rows}));
    }
    detail::check_no_overlap(
        {detail::region_of(args.out, "out", {rows, heads}), detail::region_of(args.lse, "lse", {rows, heads})}, inputs);
}

}  // namespace

void merge(const MergeArgs& args, Stream) {
    detail::check_on_cpu(args.out, "out", "merge");
    check_count(args.rows, "rows");
    check_count(args.heads, "heads");
    if (args.rows == 0 || args.heads == 0) return;
    check_out(args.out, "out", args);
    if (args.lse.present()) check_lse(args.lse, "lse", args);
    if (args.sinks.present())
        check_list(args.sinks, "sinks", DType::f32, Extent::at_least(args.heads, "heads"), args.out.device);

    std::vector<PartialNames> names;
    for (std::size_t i = 0; i < args.partials.size(); ++i) {
        const Partial& partial = args.partials[i];
        names.emplace_back(i);
        check_out(partial.out, names[i].out, args);
        check_lse(partial.lse, names[i].lse, args);
        if (partial.counts.present())
            check_list(partial.counts, names[i].counts, DType::i32, Extent::at_least(args.rows, "rows"),
                       args.out.device);
    }
    check_overlap(args, names);
    detail::merge_cpu(args);
}

}  // namespace sparsemla
