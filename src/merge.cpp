// Checks of merge's arguments, and its dispatch to a device.
#include <algorithm>
#include <array>
#include <charconv>
#include <string>

#include "check.h"
#include "gpu.h"
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

/// "partials[3].out", without an allocation.
class PartialName {
   public:
    PartialName(std::size_t partial, std::string_view tensor) {
        append("partials[");
        end_ = std::to_chars(end_, text_.data() + text_.size(), partial).ptr;
        append("].");
        append(tensor);
    }
    PartialName(const PartialName&) = delete;
    PartialName& operator=(const PartialName&) = delete;
    operator std::string_view() const { return {text_.data(), static_cast<std::size_t>(end_ - text_.data())}; }

   private:
    void append(std::string_view text) { end_ = std::copy(text.begin(), text.end(), end_); }

    std::array<char, 48> text_;
    char* end_ = text_.data();
};

detail::Regions outputs_of(const MergeArgs& args) {
    return {detail::region_of(args.out, "out", {args.rows, args.heads}),
            detail::region_of(args.lse, "lse", {args.rows, args.heads})};
}

void check_partial(const MergeArgs& args, std::size_t i) {
    const Partial& partial = args.partials[i];
    const PartialName out(i, "out");
    const PartialName lse(i, "lse");
    const PartialName counts(i, "counts");
    check_out(partial.out, out, args);
    check_lse(partial.lse, lse, args);
    if (partial.counts.present())
        check_list(partial.counts, counts, DType::i32, Extent::at_least(args.rows, "rows"), args.out.device);
    detail::check_no_overlap(outputs_of(args), {detail::region_of(partial.out, out, {args.rows, args.heads}),
                                                detail::region_of(partial.lse, lse, {args.rows, args.heads}),
                                                detail::region_of(partial.counts, counts, {args.rows})});
}

}  // namespace

void merge(const MergeArgs& args, Stream stream) {
    check_count(args.rows, "rows");
    check_count(args.heads, "heads");
    if (args.rows == 0 || args.heads == 0) return;
    check_out(args.out, "out", args);
    if (args.lse.present()) check_lse(args.lse, "lse", args);
    if (args.sinks.present())
        check_list(args.sinks, "sinks", DType::f32, Extent::at_least(args.heads, "heads"), args.out.device);

    detail::check_no_overlap(outputs_of(args), {detail::region_of(args.sinks, "sinks", {args.heads})});
    for (std::size_t i = 0; i < args.partials.size(); ++i) check_partial(args, i);
    if (args.out.device.kind == Device::Kind::cpu)
        detail::merge_cpu(args);
    else
        detail::merge_gpu(args, args.out.device.index, stream);
}

}  // namespace sparsemla
