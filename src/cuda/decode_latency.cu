// decode_latency for records of plain forms.
#include "cuda/decode_latency_kernel.cuh"
#include "cuda/launch.h"
#include "cuda/variants.cuh"

namespace sparsemla::detail::latency {

namespace {

/// Calls visit(kernel) with the instantiation for these values. Throws Error (unsupported) where there is none.
template <class Visit>
void with_kernel(const Variant& variant, const Visit& visit) {
    const auto with_splits = [&]<int kSplits>() {
        with_heads(variant.heads, [&]<int kHeads>() {
            with_plain_form(variant.form, [&]<StageForm kForm>() {
                with_flag(variant.two_sources, [&]<bool kTwoSources>() {
                    with_query(variant.bf16_query, [&]<Half kQuery>() {
                        visit(decode<Tile<kHeads, kForm, kQuery, kTwoSources, kSplits>>);
                    });
                });
            });
        });
    };
    variant.fixed_splits == 1 ? with_splits.template operator()<1>()
                              : with_exchanging_splits(variant.fixed_splits, with_splits);
}

}  // namespace

void prepare_plain_kernel(const Variant& variant, std::size_t shared_bytes) {
    with_kernel(variant, [&](auto* kernel) { allow_launches(kernel, shared_bytes, "decode_latency"); });
}

void launch_plain_kernel(const Variant& variant, const LaunchConfig& config, const Params& params) {
    with_kernel(variant, [&](auto* kernel) { launch(kernel, config, "decode_latency", params); });
}

}  // namespace sparsemla::detail::latency
