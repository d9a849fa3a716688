// decode_balanced's tiles and memory: what its host side, its device side and its tests must agree on. No CUDA headers.
#pragma once

#include "latency_layout.h"

namespace sparsemla::detail::balanced {

/// Pieces whose query is in shared memory: the one in work and the next.
inline constexpr int queries = 2;

/// Barriers, pieces, masks and weights: BalancedShared of cuda/decode_balanced_tile.cuh.
constexpr std::size_t small_shared_bytes(int heads) {
    return latency::round_up(
        512 + (16 + latency::chunk_keys) * latency::max_stages + std::size_t(heads) * 4 * (latency::max_splits + 1),
        1024);
}

/// Byte offsets in a CTA's shared memory.
struct SharedLayout {
    std::size_t weights = 0;  ///< P: halves [weight_tiles][heads][chunk_keys], 128-byte swizzle
    std::size_t query = 0;    ///< halves [queries][d_qk / 16][heads][16], 32-byte swizzle
    std::size_t scores = 0;   ///< f32 [2][heads][score_pitch]: from each half of the dimensions, its dot products
    std::size_t stages = 0;   ///< bytes [stages][stage_bytes]
    std::size_t bytes = 0;
};

constexpr SharedLayout shared_layout(int heads, StageForm form, int stages) {
    SharedLayout layout;
    layout.weights = small_shared_bytes(heads);
    layout.query = layout.weights + std::size_t(weight_tiles(form)) * heads * latency::chunk_keys * 2;
    layout.scores = layout.query + std::size_t(queries) * static_cast<std::size_t>(stage_layout(form).d_qk * heads * 2);
    layout.stages = latency::round_up(layout.scores + std::size_t(2) * heads * latency::score_pitch * 4, 128);
    layout.bytes = layout.stages + std::size_t(stages) * static_cast<std::size_t>(stage_bytes(form));
    return layout;
}

/// The most splits of a row: a merge needs room in the ring for 512 bytes of every split for each warp, and a stage
/// holds eight.
constexpr int max_splits_of(int stages) { return std::min(8 * stages, latency::max_splits); }

/// Byte offsets in the workspace. What a CTA hands over are its registers, thread by thread. Shapes are
/// decode_balanced's; decode_wide's: handed over f32x4 [heads / 2][256 threads], then f32x4 [128], then f32x2 [2];
/// partials f32x4 [rows][tiles][splits][heads / 2][256].
struct WorkspaceLayout {
    std::size_t handover_bytes =
        0;  ///< of one CTA: f32x4 [heads / 2][threads that multiply], then f32x2 [heads / 8 + 1][..]
    std::size_t partials =
        0;  ///< f32x4 [rows][tiles][splits][threads / 32][heads / 2][32], where there are several splits
    std::size_t stats = 0;  ///< f32x2 [rows][tiles][splits][heads]: maximum (log2), sum
    std::size_t bytes = 0;
};

constexpr WorkspaceLayout workspace_layout(int heads, int splits, std::size_t tiles_of_rows, int ctas) {
    constexpr std::size_t threads = 32 * latency::multiplying_warps;
    WorkspaceLayout layout;
    layout.handover_bytes = threads * (static_cast<std::size_t>(heads) / 2 * 16 + static_cast<std::size_t>(heads) + 8);
    layout.partials = static_cast<std::size_t>(ctas) * layout.handover_bytes;
    const std::size_t partial_heads = splits == 1 ? 0 : tiles_of_rows * static_cast<std::size_t>(splits * heads);
    layout.stats = layout.partials + partial_heads * 512 * 4;
    layout.bytes = latency::round_up(layout.stats + partial_heads * 8, 64);
    return layout;
}

/// Of the state: u32 [CTAs], whether a CTA has handed over; u32 [rows][tiles], arrivals of splits.
constexpr std::size_t state_bytes(std::size_t tiles_of_rows, int ctas) {
    return latency::round_up((tiles_of_rows + static_cast<std::size_t>(ctas)) * 4, 64);
}

}  // namespace sparsemla::detail::balanced
