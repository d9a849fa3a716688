// decode_latency whose slots of source 0 come from token ids. Two sources do not exchange P, and a CTA that has its row
// alone has a kernel of any number of splits.
#include "cuda/decode_latency_kernel.cuh"
#include "cuda/launch.h"
#include "cuda/variants.cuh"

namespace sparsemla::detail::latency {

namespace {

/// Calls visit(kernel) with the instantiation for these values. Throws Error (unsupported) where there is none.
template <class Visit>
void with_kernel(const Variant& variant, const Visit& visit) {
    with_heads(variant.heads, [&]<int kHeads>() {
        if (!stage_layout(variant.form).is_plain())
            return with_other_form(variant.form, [&]<StageForm kForm>() {
                visit(decode<Tile<kHeads, kForm, Half::bf16, true, 0, true>>);
            });
        with_plain_form(variant.form, [&]<StageForm kForm>() {
            with_query(variant.bf16_query, [&]<Half kQuery>() {
                if (variant.two_sources) return visit(decode<Tile<kHeads, kForm, kQuery, true, 0, true>>);
                with_exchanging_splits(variant.fixed_splits, [&]<int kSplits>() {
                    visit(decode<Tile<kHeads, kForm, kQuery, false, kSplits, true>>);
                });
            });
        });
    });
}

}  // namespace

void prepare_ids_kernel(const Variant& variant, std::size_t shared_bytes) {
    with_kernel(variant, [&](auto* kernel) { allow_launches(kernel, shared_bytes, "decode_latency"); });
}

void launch_ids_kernel(const Variant& variant, const LaunchConfig& config, const Params& params) {
    with_kernel(variant, [&](auto* kernel) { launch(kernel, config, "decode_latency", params); });
}

}  // namespace sparsemla::detail::latency
