// The instantiations of decode_wide for one number of parts of P.
#pragma once

#include "cuda/decode_wide_kernel.cuh"
#include "cuda/launch.h"

namespace sparsemla::detail::wide {

/// Calls visit(kernel) with the instantiation for this form. Throws Error (unsupported) where there is none.
template <int kParts, class Visit>
void with_kernel(StageForm form, const Visit& visit) {
    const auto with_form = [&]<StageForm kForm>() {
        if constexpr (kParts == 1 || !is_f16(kForm))
            visit(decode<WideTile<kForm, kParts>>);
        else
            throw Error(ErrorKind::unsupported, "p_format", "P of one number with codes of FP16", "of two");
    };
    switch (form) {
        case StageForm::codes_576: return with_form.template operator()<StageForm::codes_576>();
        case StageForm::codes_512: return with_form.template operator()<StageForm::codes_512>();
        case StageForm::groups_576: return with_form.template operator()<StageForm::groups_576>();
        case StageForm::groups_512: return with_form.template operator()<StageForm::groups_512>();
        case StageForm::blocks_rope: return with_form.template operator()<StageForm::blocks_rope>();
        case StageForm::blocks_512: return with_form.template operator()<StageForm::blocks_512>();
        case StageForm::blocks_576: return with_form.template operator()<StageForm::blocks_576>();
        case StageForm::wide_576: return with_form.template operator()<StageForm::wide_576>();
    }
}

template <int kParts>
void prepare_kernel(StageForm form, std::size_t shared_bytes) {
    with_kernel<kParts>(form, [&](auto* kernel) { allow_launches(kernel, shared_bytes, "decode_wide"); });
}

template <int kParts>
void launch_kernel(StageForm form, const LaunchConfig& config, const Params& params) {
    with_kernel<kParts>(form, [&](auto* kernel) { launch(kernel, config, "decode_wide", params); });
}

}  // namespace sparsemla::detail::wide
