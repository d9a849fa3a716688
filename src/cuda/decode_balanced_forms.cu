// decode_balanced for records of the other forms.
#include "cuda/decode_balanced_kernel.cuh"
#include "cuda/launch.h"
#include "cuda/variants.cuh"

namespace sparsemla::detail::balanced {

namespace {

/// Calls visit(kernel) with the instantiation for these values. Throws Error (unsupported) where there is none.
template <class Visit>
void with_kernel(const Variant& variant, const Visit& visit) {
    with_heads(variant.heads, [&]<int kHeads>() {
        with_other_form(variant.form,
                        [&]<StageForm kForm>() { visit(decode<BalancedTile<kHeads, kForm, Half::bf16, true>>); });
    });
}

}  // namespace

void prepare_form_kernel(const Variant& variant, std::size_t shared_bytes) {
    with_kernel(variant, [&](auto* kernel) { allow_launches(kernel, shared_bytes, "decode_balanced"); });
}

void launch_form_kernel(const Variant& variant, const LaunchConfig& config, const Params& params) {
    with_kernel(variant, [&](auto* kernel) { launch(kernel, config, "decode_balanced", params); });
}

}  // namespace sparsemla::detail::balanced
