// decode_latency as a rank of decode context parallelism. Two sources do not exchange P, and a CTA that has its row
// alone has a kernel of any number of splits. Tiles of 32 heads that are not those of flat fp8 with an E4M3 query would
// spill (latency_plan.cpp refuses them).
#include "cuda/decode_latency_kernel.cuh"
#include "cuda/launch.h"
#include "cuda/variants.cuh"

namespace sparsemla::detail::latency {

namespace {

/// Calls visit(kernel) with the instantiation for these values. Throws Error (unsupported) where there is none.
template <class Visit>
void with_kernel(const Variant& variant, const Visit& visit) {
    const auto with_splits = [&]<int kHeads, StageForm kForm, Half kQuery>() {
        if (variant.two_sources) return visit(decode<Tile<kHeads, kForm, kQuery, true, 0, false, true>>);
        with_exchanging_splits(variant.fixed_splits, [&]<int kSplits>() {
            visit(decode<Tile<kHeads, kForm, kQuery, false, kSplits, false, true>>);
        });
    };
    if (!stage_layout(variant.form).is_plain())
        return with_other_form(
            variant.form, [&]<StageForm kForm>() { visit(decode<Tile<16, kForm, Half::bf16, true, 0, false, true>>); });
    with_plain_form(variant.form, [&]<StageForm kForm>() {
        if (variant.bf16_query) return with_splits.template operator()<16, kForm, Half::bf16>();
        with_heads(variant.heads, [&]<int kHeads>() { with_splits.template operator()<kHeads, kForm, Half::f16>(); });
    });
}

}  // namespace

void prepare_dcp_kernel(const Variant& variant, std::size_t shared_bytes) {
    with_kernel(variant, [&](auto* kernel) { allow_launches(kernel, shared_bytes, "decode_latency"); });
}

void launch_dcp_kernel(const Variant& variant, const LaunchConfig& config, const DcpParams& params) {
    with_kernel(variant, [&](auto* kernel) { launch(kernel, config, "decode_latency", params); });
}

}  // namespace sparsemla::detail::latency
