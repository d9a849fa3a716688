// decode_balanced for records of plain forms.
#include "cuda/decode_balanced_kernel.cuh"
#include "cuda/launch.h"

namespace sparsemla::detail::balanced {

namespace {

/// Calls visit(kernel) with the instantiation for these values.
template <class Visit>
void with_kernel(const Variant& variant, const Visit& visit) {
    const auto with_query = [&]<int kHeads, StageForm kForm, bool kTwoSources>() {
        variant.bf16_query ? visit(decode<BalancedTile<kHeads, kForm, Half::bf16, kTwoSources>>)
                           : visit(decode<BalancedTile<kHeads, kForm, Half::f16, kTwoSources>>);
    };
    const auto with_sources = [&]<int kHeads, StageForm kForm>() {
        variant.two_sources ? with_query.template operator()<kHeads, kForm, true>()
                            : with_query.template operator()<kHeads, kForm, false>();
    };
    const auto with_record = [&]<int kHeads>() {
        variant.form == StageForm::codes_576 ? with_sources.template operator()<kHeads, StageForm::codes_576>()
                                             : with_sources.template operator()<kHeads, StageForm::codes_512>();
    };
    variant.heads == 16 ? with_record.template operator()<16>() : with_record.template operator()<32>();
}

}  // namespace

void prepare_plain_kernel(const Variant& variant, std::size_t shared_bytes) {
    with_kernel(variant, [&](auto* kernel) { allow_launches(kernel, shared_bytes, "decode_balanced"); });
}

void launch_plain_kernel(const Variant& variant, const LaunchConfig& config, const Params& params) {
    with_kernel(variant, [&](auto* kernel) { launch(kernel, config, "decode_balanced", params); });
}

}  // namespace sparsemla::detail::balanced
