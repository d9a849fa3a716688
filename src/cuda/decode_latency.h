// What the host hands to decode_latency: plain data, passed by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/convert_indices.h"
#include "mailbox_view.h"
#include "sparsemla/decode.h"
#include "stage_layout.h"

namespace sparsemla::detail {
struct LaunchConfig;
}

namespace sparsemla::detail::latency {

/// Which instantiation.
struct Variant {
    int heads;  ///< of a CTA
    StageForm form;
    bool bf16_query;   ///< of plain forms; the others take both
    bool two_sources;  ///< of plain forms; the others take both
    int fixed_splits;  ///< 1, or 2, 4 or 8 with Transport::weights; 0: any number
    bool from_ids;     ///< slots of source 0 come from token ids
    bool dcp;          ///< the query comes from a mailbox, results go to others; not from_ids
};

struct SourceView {
    Record record;
    bool planar;
    const std::byte* records;        ///< contiguous: slot s at s * record bytes
    const std::byte* rope;           ///< of records in two tensors; null: there is one
    std::int64_t page_stride_bytes;  ///< planar
    std::int64_t scales_of_page;     ///< from the page's begin (planar) or the record's to the scales
    std::int32_t data_bytes;         ///< from one record to the next: all of it, its data (planar), its latent
    std::int32_t scale_bytes;        ///< the same of scales (planar) or of the rope of records in two tensors
    const std::int32_t* slots;       ///< [rows][slots_row_stride]
    const std::int32_t* counts;      ///< [rows], stride counts_stride; null: all columns
    std::int64_t slots_row_stride;
    std::int64_t counts_stride;
    std::int64_t count_offset;
    std::int32_t width;
    std::int32_t chunks;  ///< of the whole list: ceil(width / chunk)
    std::int32_t num_slots;
    std::int32_t slots_per_page;
    std::uint32_t page_multiplier;  ///< of gaps and planar records: slot / slots_per_page = (slot * page_multiplier >>
                                    ///< 32) >> page_shift
    std::int32_t page_shift;
    std::int32_t page_size;  ///< slots of a page past this are absent
    float score_factor;      ///< from dot product to base-2 score, where no scale comes through a pointer
    float k_scale;
    const float* k_scale_pointer;  ///< read instead of k_scale where there is one
};

struct Params {
    SourceView sources[2];  ///< the second one has no chunks where there is only one
    std::int32_t heads;
    std::int32_t splits;             ///< CTAs of a cluster
    std::uint32_t split_multiplier;  ///< n / splits = (n * split_multiplier >> 32) >> split_shift, n below 2^31
    std::int32_t split_shift;
    std::int32_t second_begin_split;  ///< of the first chunk of source 1: sources[0].chunks % splits
    std::int32_t units_of_cta;
    std::uint32_t owner_multiplier;  ///< unit / units_of_cta = unit * owner_multiplier >> 16
    std::int32_t stages;
    std::uint32_t stages_offset;  ///< SharedLayout::stages
    Trigger trigger;
    Transport transport;
    Gather gather;
    std::int32_t tiles;          ///< of heads in a cluster, which share the records that each of them gathers
    std::uint32_t sharing_ctas;  ///< bit i: CTA i of the cluster has split 0
    bool gaps;                   ///< some source has slots_per_page > page_size
    bool query_is_e4m3;          ///< of forms that are not plain
    bool narrow_copies;          ///< some source's records are only 8-byte aligned
    bool p_is_e4m3;              ///< P is rounded to E4M3, otherwise to Tile::value_half
    bool out_is_f32;
    bool out_pairs;   ///< BF16 outputs of which two neighbours may be stored at once
    bool out_octets;  ///< the same of eight
    bool lse_natural;

    const std::byte* query;  ///< [rows][heads][d_qk], strides in bytes
    std::int64_t query_row_stride_bytes;
    std::int64_t query_head_stride_bytes;

    float score_scale;  ///< softmax_scale * log2(e): with pointers, scores are times this, q_scale and k_scale
    float q_scale;
    const float* q_scale_pointer;
    bool scale_pointers;  ///< some scale comes through a pointer
    float p_scale;
    float inverse_p_scale;
    float out_scale;
    const float* sinks;  ///< null: none
    std::int64_t sinks_stride;

    std::byte* out;
    std::int64_t out_row_stride;   ///< elements
    std::int64_t out_head_stride;  ///< elements
    float* lse;                    ///< null: not wanted
    std::int64_t lse_row_stride;
    std::int64_t lse_head_stride;

    ConvertView convert;             ///< of a variant that converts
    std::uint32_t converted_offset;  ///< SharedLayout::converted
};

/// Of a variant of dcp: `query` is the mailbox's of parity 0; there is no out and lse.
struct DcpParams : Params {
    MailboxView mailbox;
};

/// Allows the launches of one instantiation on the current device, and loads it: of plain forms, of the others, and of
/// either where it converts or exchanges, which are compiled apart.
void prepare_plain_kernel(const Variant& variant, std::size_t shared_bytes);
void prepare_form_kernel(const Variant& variant, std::size_t shared_bytes);
void prepare_ids_kernel(const Variant& variant, std::size_t shared_bytes);
void prepare_dcp_kernel(const Variant& variant, std::size_t shared_bytes);
void launch_plain_kernel(const Variant& variant, const LaunchConfig& config, const Params& params);
void launch_form_kernel(const Variant& variant, const LaunchConfig& config, const Params& params);
void launch_ids_kernel(const Variant& variant, const LaunchConfig& config, const Params& params);
void launch_dcp_kernel(const Variant& variant, const LaunchConfig& config, const DcpParams& params);

inline void prepare_kernel(const Variant& variant, std::size_t shared_bytes) {
    const bool plain = stage_layout(variant.form).is_plain();
    if (variant.dcp) return prepare_dcp_kernel(variant, shared_bytes);
    (variant.from_ids ? prepare_ids_kernel : plain ? prepare_plain_kernel : prepare_form_kernel)(variant, shared_bytes);
}
/// Of a variant that is not one of dcp.
inline void launch_kernel(const Variant& variant, const LaunchConfig& config, const Params& params) {
    const bool plain = stage_layout(variant.form).is_plain();
    (variant.from_ids ? launch_ids_kernel : plain ? launch_plain_kernel : launch_form_kernel)(variant, config, params);
}

}  // namespace sparsemla::detail::latency
