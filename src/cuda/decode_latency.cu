// decode_latency for records of plain forms.
#include "cuda/decode_latency_kernel.cuh"
#include "cuda/launch.h"

#include <string>

namespace sparsemla::detail::latency {

namespace {

/// Calls visit(kernel) with the instantiation for these values. Throws Error (unsupported) where there is none.
template <class Visit>
void with_kernel(const Variant& variant, const Visit& visit) {
    const auto with_query = [&]<int kHeads, StageForm kForm, bool kTwoSources, int kSplits>() {
        variant.bf16_query ? visit(decode<Tile<kHeads, kForm, Half::bf16, kTwoSources, kSplits>>)
                           : visit(decode<Tile<kHeads, kForm, Half::f16, kTwoSources, kSplits>>);
    };
    const auto with_sources = [&]<int kHeads, StageForm kForm, int kSplits>() {
        variant.two_sources ? with_query.template operator()<kHeads, kForm, true, kSplits>()
                            : with_query.template operator()<kHeads, kForm, false, kSplits>();
    };
    const auto with_record = [&]<int kHeads, int kSplits>() {
        variant.form == StageForm::codes_576
            ? with_sources.template operator()<kHeads, StageForm::codes_576, kSplits>()
            : with_sources.template operator()<kHeads, StageForm::codes_512, kSplits>();
    };
    const auto with_tile = [&]<int kSplits>() {
        if (variant.heads == 16) return with_record.template operator()<16, kSplits>();
        if (variant.heads == 32) return with_record.template operator()<32, kSplits>();
        throw Error(ErrorKind::unsupported, "tile_heads", "16 or 32 in this build", std::to_string(variant.heads));
    };
    switch (variant.fixed_splits) {
        case 1: return with_tile.template operator()<1>();
        case 2: return with_tile.template operator()<2>();
        case 4: return with_tile.template operator()<4>();
        case 8: return with_tile.template operator()<8>();
        default: return with_tile.template operator()<0>();
    }
}

}  // namespace

void prepare_plain_kernel(const Variant& variant, std::size_t shared_bytes) {
    with_kernel(variant, [&](auto* kernel) { allow_launches(kernel, shared_bytes, "decode_latency"); });
}

void launch_plain_kernel(const Variant& variant, const LaunchConfig& config, const Params& params) {
    with_kernel(variant, [&](auto* kernel) { launch(kernel, config, "decode_latency", params); });
}

}  // namespace sparsemla::detail::latency
