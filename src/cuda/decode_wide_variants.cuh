// The instantiations of decode_wide for one number of parts of P.
#pragma once

#include "cuda/decode_wide_kernel.cuh"
#include "cuda/launch.h"

namespace sparsemla::detail::wide {

/// Calls visit(kernel) with the instantiation for this form.
template <int kParts, class Visit>
void with_kernel(StageForm form, const Visit& visit) {
    switch (form) {
        case StageForm::codes_576: return visit(decode<WideTile<StageForm::codes_576, kParts>>);
        case StageForm::codes_512: return visit(decode<WideTile<StageForm::codes_512, kParts>>);
        case StageForm::groups_576: return visit(decode<WideTile<StageForm::groups_576, kParts>>);
        case StageForm::groups_512: return visit(decode<WideTile<StageForm::groups_512, kParts>>);
        case StageForm::blocks_rope: return visit(decode<WideTile<StageForm::blocks_rope, kParts>>);
        case StageForm::blocks_512: return visit(decode<WideTile<StageForm::blocks_512, kParts>>);
        case StageForm::blocks_576: return visit(decode<WideTile<StageForm::blocks_576, kParts>>);
        case StageForm::wide_576: return visit(decode<WideTile<StageForm::wide_576, kParts>>);
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
