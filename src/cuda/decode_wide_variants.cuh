// The instantiations of decode_wide for one number of parts of P.
#pragma once

#include "cuda/decode_wide_kernel.cuh"
#include "cuda/launch.h"
#include "cuda/variants.cuh"

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
    stage_layout(form).is_plain() ? with_plain_form(form, with_form) : with_other_form(form, with_form);
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
