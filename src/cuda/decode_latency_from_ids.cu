// decode_latency whose slots of source 0 come from token ids. Two sources do not exchange P, and a CTA that has its row
// alone has a kernel of any number of splits.
#include "cuda/decode_latency_kernel.cuh"
#include "cuda/launch.h"

#include <string>

namespace sparsemla::detail::latency {

namespace {

/// Calls visit(kernel) with the instantiation for these values. Throws Error (unsupported) where there is none.
template <class Visit>
void with_kernel(const Variant& variant, const Visit& visit) {
    const auto with_tile = [&]<StageForm kForm, Half kQuery, bool kTwoSources, int kSplits>() {
        if (variant.heads == 16) return visit(decode<Tile<16, kForm, kQuery, kTwoSources, kSplits, true>>);
        if (variant.heads == 32) return visit(decode<Tile<32, kForm, kQuery, kTwoSources, kSplits, true>>);
        throw Error(ErrorKind::unsupported, "tile_heads", "16 or 32 in this build", std::to_string(variant.heads));
    };
    const auto with_query = [&]<StageForm kForm, bool kTwoSources, int kSplits>() {
        variant.bf16_query ? with_tile.template operator()<kForm, Half::bf16, kTwoSources, kSplits>()
                           : with_tile.template operator()<kForm, Half::f16, kTwoSources, kSplits>();
    };
    const auto plain = [&]<StageForm kForm>() {
        if (variant.two_sources) return with_query.template operator()<kForm, true, 0>();
        switch (variant.fixed_splits) {
            case 2: return with_query.template operator()<kForm, false, 2>();
            case 4: return with_query.template operator()<kForm, false, 4>();
            case 8: return with_query.template operator()<kForm, false, 8>();
            default: return with_query.template operator()<kForm, false, 0>();
        }
    };
    const auto other = [&]<StageForm kForm>() { return with_tile.template operator()<kForm, Half::bf16, true, 0>(); };
    switch (variant.form) {
        case StageForm::codes_576: return plain.template operator()<StageForm::codes_576>();
        case StageForm::codes_512: return plain.template operator()<StageForm::codes_512>();
        case StageForm::groups_576: return other.template operator()<StageForm::groups_576>();
        case StageForm::groups_512: return other.template operator()<StageForm::groups_512>();
        case StageForm::blocks_rope: return other.template operator()<StageForm::blocks_rope>();
        case StageForm::blocks_512: return other.template operator()<StageForm::blocks_512>();
        case StageForm::blocks_576: return other.template operator()<StageForm::blocks_576>();
        case StageForm::wide_576: return other.template operator()<StageForm::wide_576>();
    }
}

}  // namespace

void prepare_ids_kernel(const Variant& variant, std::size_t shared_bytes) {
    with_kernel(variant, [&](auto* kernel) { allow_launches(kernel, shared_bytes, "decode_latency"); });
}

void launch_ids_kernel(const Variant& variant, const LaunchConfig& config, const Params& params) {
    with_kernel(variant, [&](auto* kernel) { launch(kernel, config, "decode_latency", params); });
}

}  // namespace sparsemla::detail::latency
