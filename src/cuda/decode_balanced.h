// What the host hands to decode_balanced: decode_latency's parameters and more.
#pragma once

#include "cuda/decode_latency.h"

namespace sparsemla::detail::balanced {

struct Params {
    latency::Params call;  ///< `splits` is a row's number; of clusters, transport and stages_offset nothing is read
    std::int32_t rows;
    std::int32_t tiles_of_row;  ///< of heads

    bool one_split_each;           ///< as many CTAs as splits of all rows and tiles
    std::uint32_t cta_multiplier;  ///< n / CTAs, as Params::split_multiplier of decode_latency
    std::int32_t cta_shift;

    std::byte* handovers;           ///< balanced_layout.h: WorkspaceLayout
    std::int64_t handover_bytes;    ///< of one CTA
    float* partials;                ///< written by the CTAs that end a split, read by those that end the row's others
    float* stats;                   ///< pairs
    std::uint32_t* handed_over;     ///< [CTAs], 0 between calls; decode_wide's two readers count before it is 0 again
    std::uint32_t* arrived_splits;  ///< [rows][tiles], 0 between calls
};

/// Which instantiation.
struct Variant {
    int heads;  ///< of a CTA
    StageForm form;
    bool bf16_query;  ///< as of latency::Variant
    bool two_sources;
};

/// Allows the launches of one instantiation on the current device, and loads it: of plain forms, and of the others,
/// which are compiled apart.
void prepare_plain_kernel(const Variant& variant, std::size_t shared_bytes);
void prepare_form_kernel(const Variant& variant, std::size_t shared_bytes);
void launch_plain_kernel(const Variant& variant, const LaunchConfig& config, const Params& params);
void launch_form_kernel(const Variant& variant, const LaunchConfig& config, const Params& params);

inline void prepare_kernel(const Variant& variant, std::size_t shared_bytes) {
    (stage_layout(variant.form).is_plain() ? prepare_plain_kernel : prepare_form_kernel)(variant, shared_bytes);
}
inline void launch_kernel(const Variant& variant, const LaunchConfig& config, const Params& params) {
    (stage_layout(variant.form).is_plain() ? launch_plain_kernel : launch_form_kernel)(variant, config, params);
}

}  // namespace sparsemla::detail::balanced
