// decode_latency's tiles: what its host side, its device side and its tests must agree on. No CUDA headers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "stage_layout.h"

namespace sparsemla::detail::latency {

inline constexpr int chunk_keys = 64;  ///< columns that a CTA takes at a time: the M of one wgmma

inline constexpr int multiplying_warps = 8;  ///< two warpgroups
inline constexpr int helper_warps = 4;  ///< after those: they gather what is not the first chunk, send P, and add up
inline constexpr int threads = 32 * (multiplying_warps + helper_warps);

inline constexpr int max_splits = 16;  ///< CTAs of a cluster
inline constexpr int max_stages = 4;   ///< chunks under way to shared memory
inline constexpr int unit_dims = 16;   ///< dimensions of the output that a warp holds in one wgmma
inline constexpr int units = 512 / unit_dims;
inline constexpr int quad_bytes = 512;  ///< 8 heads of a unit: 32 lanes of 4 floats
inline constexpr int head_tiles[] = {16, 32};

/// Floats between two heads of the partial scores: 2 * 68 % 32 = 8 spreads a warp's stores over all banks.
inline constexpr int score_pitch = chunk_keys + 4;

/// Transport::weights: the splits of a row among which the 512 dimensions are shared out so that wgmma's M is full.
constexpr bool can_exchange_weights(int splits) { return splits == 2 || splits == 4 || splits == 8; }

/// Bytes between two records' slices, the dimensions that one CTA of such a cluster computes.
constexpr int slice_pitch(int splits) { return 512 / splits + 16; }

/// CTA c of a cluster merges units [c * n, c * n + n), as far as there are units.
constexpr int units_of_cta(int splits) { return (units + splits - 1) / splits; }

constexpr std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

/// Barriers, masks, maxima, sums and weights: SmallShared of cuda/decode_latency_tile.cuh.
constexpr std::size_t small_shared_bytes(int heads) {
    return round_up(
        48 + (16 + chunk_keys) * max_stages + std::size_t(heads) * 4 * (32 + 1 + 2 * max_splits + max_splits + 1),
        1024);
}

/// What a CTA's shared memory depends on.
struct SharedShape {
    int heads = 16;
    StageForm form = StageForm::codes_576;
    int splits = 1, stages = 1;
    bool exchanges_weights = false;
    std::int64_t converted_columns = 0;  ///< width of a list that the CTA converts from token ids; 0: of none
};

/// Byte offsets in a CTA's shared memory. The inbox is memory of its own: peers may write to it at any time.
struct SharedLayout {
    std::size_t weights = 0;    ///< P: halves [weight_tiles][heads][chunk_keys], 128-byte swizzle
    std::size_t query = 0;      ///< halves [d_qk / 16][heads][16], 32-byte swizzle
    std::size_t scores = 0;     ///< f32 [2][heads][score_pitch]: from each half of the dimensions, its dot products
    std::size_t inbox = 0;      ///< f32 [splits][units of this CTA][heads / 8][32 lanes][4], or P of each split
    std::size_t stages = 0;     ///< bytes [stages][stage_bytes]
    std::size_t slices = 0;     ///< bytes [splits - 1][chunk_keys][slice_pitch], in place of all stages but the first
    std::size_t converted = 0;  ///< where token ids are converted: at converted_slots_offset i32 [converted_columns]
    std::size_t bytes = 0;
};

/// Of the row's slots in SharedLayout::converted; before them two numbers of each warp (RowConverter::kept_bytes).
inline constexpr std::size_t converted_slots_offset = round_up(2 * (threads / 32) * 4, 128);

/// What depends on splits, stages and transport comes last.
constexpr SharedLayout shared_layout(const SharedShape& shape) {
    SharedLayout layout;
    layout.weights = small_shared_bytes(shape.heads);
    layout.query = layout.weights + std::size_t(weight_tiles(shape.form)) * shape.heads * chunk_keys * 2;
    layout.scores = layout.query + std::size_t(stage_layout(shape.form).d_qk) * shape.heads * 2;
    layout.inbox = round_up(layout.scores + std::size_t(2) * shape.heads * score_pitch * 4, 1024);
    const std::size_t inbox_bytes =
        shape.splits == 1 ? 0 : std::size_t(shape.splits) * units_of_cta(shape.splits) * (shape.heads / 8) * quad_bytes;
    layout.stages = round_up(layout.inbox + inbox_bytes, 128);
    const std::size_t bytes_of_stage = static_cast<std::size_t>(stage_bytes(shape.form));
    layout.slices = layout.stages + bytes_of_stage;
    layout.bytes = layout.stages + shape.stages * bytes_of_stage;
    if (shape.exchanges_weights)
        layout.bytes = std::max(layout.bytes,
                                layout.slices + std::size_t(shape.splits - 1) * chunk_keys * slice_pitch(shape.splits));
    layout.converted = layout.bytes;
    if (shape.converted_columns > 0)
        layout.bytes += round_up(converted_slots_offset + 4 * static_cast<std::size_t>(shape.converted_columns), 128);
    return layout;
}

}  // namespace sparsemla::detail::latency
