// From the numbers of a launch to the template parameters of kernels: each with_ calls visit with one of them as a
// template argument, visit.template operator()<value>(). Host code of .cu files.
#pragma once

#include <string>
#include <string_view>

#include "cuda/device/mma.cuh"
#include "sparsemla/tensor.h"
#include "stage_layout.h"

namespace sparsemla::detail {

/// Tiles of heads. Throws Error (unsupported) for others.
template <class Visit>
void with_heads(int heads, const Visit& visit) {
    if (heads == 16) return visit.template operator()<16>();
    if (heads == 32) return visit.template operator()<32>();
    throw Error(ErrorKind::unsupported, "tile_heads", "16 or 32 in this build", std::to_string(heads));
}

template <class Visit>
void with_flag(bool flag, const Visit& visit) {
    flag ? visit.template operator()<true>() : visit.template operator()<false>();
}

/// A query in shared memory beside plain records.
template <class Visit>
void with_query(bool bf16, const Visit& visit) {
    bf16 ? visit.template operator()<device::Half::bf16>() : visit.template operator()<device::Half::f16>();
}

/// Splits that exchange P, or 0: any number.
template <class Visit>
void with_exchanging_splits(int splits, const Visit& visit) {
    switch (splits) {
        case 2: return visit.template operator()<2>();
        case 4: return visit.template operator()<4>();
        case 8: return visit.template operator()<8>();
        default: return visit.template operator()<0>();
    }
}

/// Forms of records, plain ones.
template <class Visit>
void with_plain_form(StageForm form, const Visit& visit) {
    switch (form) {
        case StageForm::codes_576: return visit.template operator()<StageForm::codes_576>();
        case StageForm::codes_512: return visit.template operator()<StageForm::codes_512>();
        default: break;
    }
    throw Error(ErrorKind::unsupported, "record", "a plain one", "one with scales or wide values");
}

/// The others.
template <class Visit>
void with_other_form(StageForm form, const Visit& visit) {
    switch (form) {
        case StageForm::groups_576: return visit.template operator()<StageForm::groups_576>();
        case StageForm::groups_512: return visit.template operator()<StageForm::groups_512>();
        case StageForm::blocks_rope: return visit.template operator()<StageForm::blocks_rope>();
        case StageForm::blocks_512: return visit.template operator()<StageForm::blocks_512>();
        case StageForm::blocks_576: return visit.template operator()<StageForm::blocks_576>();
        case StageForm::wide_576: return visit.template operator()<StageForm::wide_576>();
        case StageForm::codes_576:
        case StageForm::codes_512: break;
    }
    throw Error(ErrorKind::unsupported, "record", "one with scales or wide values", "a plain one");
}

}  // namespace sparsemla::detail
