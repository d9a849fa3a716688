// decode_balanced for records of the other forms.
#include "cuda/decode_balanced_kernel.cuh"
#include "cuda/launch.h"

#include <string>

namespace sparsemla::detail::balanced {

namespace {

/// Calls visit(kernel) with the instantiation for these values. Throws Error (unsupported) where there is none.
template <class Visit>
void with_kernel(const Variant& variant, const Visit& visit) {
    const auto with_tile = [&]<StageForm kForm>() {
        if (variant.heads == 16) return visit(decode<BalancedTile<16, kForm, Half::bf16, true>>);
        if (variant.heads == 32) return visit(decode<BalancedTile<32, kForm, Half::bf16, true>>);
        throw Error(ErrorKind::unsupported, "tile_heads", "16 or 32 in this build", std::to_string(variant.heads));
    };
    switch (variant.form) {
        case StageForm::groups_576: return with_tile.template operator()<StageForm::groups_576>();
        case StageForm::groups_512: return with_tile.template operator()<StageForm::groups_512>();
        case StageForm::blocks_rope: return with_tile.template operator()<StageForm::blocks_rope>();
        case StageForm::blocks_512: return with_tile.template operator()<StageForm::blocks_512>();
        case StageForm::blocks_576: return with_tile.template operator()<StageForm::blocks_576>();
        case StageForm::wide_576: return with_tile.template operator()<StageForm::wide_576>();
        case StageForm::codes_576:
        case StageForm::codes_512: break;
    }
    throw Error(ErrorKind::unsupported, "record", "one with scales or wide values", "a plain one");
}

}  // namespace

void prepare_form_kernel(const Variant& variant, std::size_t shared_bytes) {
    with_kernel(variant, [&](auto* kernel) { allow_launches(kernel, shared_bytes, "decode_balanced"); });
}

void launch_form_kernel(const Variant& variant, const LaunchConfig& config, const Params& params) {
    with_kernel(variant, [&](auto* kernel) { launch(kernel, config, "decode_balanced", params); });
}

}  // namespace sparsemla::detail::balanced
