// decode_latency for records of the other forms.
#include "cuda/decode_latency_kernel.cuh"
#include "cuda/launch.h"
#include "cuda/variants.cuh"

namespace sparsemla::detail::latency {

namespace {

/// Calls visit(kernel) with the instantiation for these values. Throws Error (unsupported) where there is none.
template <class Visit>
void with_kernel(const Variant& variant, const Visit& visit) {
    with_heads(variant.heads, [&]<int kHeads>() {
        with_other_form(variant.form, [&]<StageForm kForm>() {
            variant.fixed_splits == 1 ? visit(decode<Tile<kHeads, kForm, Half::bf16, true, 1>>)
                                      : visit(decode<Tile<kHeads, kForm, Half::bf16, true, 0>>);
        });
    });
}

}  // namespace

void prepare_form_kernel(const Variant& variant, std::size_t shared_bytes) {
    with_kernel(variant, [&](auto* kernel) { allow_launches(kernel, shared_bytes, "decode_latency"); });
}

void launch_form_kernel(const Variant& variant, const LaunchConfig& config, const Params& params) {
    with_kernel(variant, [&](auto* kernel) { launch(kernel, config, "decode_latency", params); });
}

}  // namespace sparsemla::detail::latency
