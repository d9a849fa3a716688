// decode_wide's tiles and memory: what its host side, its device side and its tests must agree on. No CUDA headers.
#pragma once

#include "latency_layout.h"

namespace sparsemla::detail::wide {

inline constexpr int heads = 64;            ///< of a CTA: the M of one wgmma
inline constexpr int step_keys = 32;        ///< half of a chunk: what is converted and multiplied at a time
inline constexpr int raw_steps = 2;         ///< under way to shared memory as they are stored: a chunk
inline constexpr int max_stages = 3;        ///< steps as halves
inline constexpr int value_warps = 8;       ///< two warpgroups, of 256 dimensions each
inline constexpr int converting_warps = 4;  ///< they gather, too
inline constexpr int score_warps = 4;       ///< one warpgroup
inline constexpr int threads = 32 * (value_warps + converting_warps + score_warps);
/// What waits for helpers, syncs multiplying warps and lays out the workspace is decode_balanced's.
static_assert(value_warps == latency::multiplying_warps && converting_warps == latency::helper_warps);
inline constexpr int pieces = 4;          ///< that are announced and not yet begun by all
inline constexpr int weight_buffers = 2;  ///< P of so many steps

/// Whether codes and P are FP16 in shared memory: where no scale of few dimensions asks for more exponents. Otherwise
/// all is BF16, and P one such number (p_bf16) or the sum of two (p_f16, and better).
constexpr bool is_f16(StageForm form) { return stage_layout(form).is_plain() || stage_layout(form).has_groups(); }

/// Barriers, pieces, masks, scales and weights: WideShared of cuda/decode_wide_tile.cuh.
inline constexpr std::size_t small_shared_bytes = 9 * 1024;

/// Byte offsets in a CTA's shared memory.
struct SharedLayout {
    std::size_t query = 0;    ///< halves [d_qk / 64][heads][64], 128-byte swizzle
    std::size_t stages = 0;   ///< halves [stages][d_qk / 64][step_keys][64], 128-byte swizzle
    std::size_t weights = 0;  ///< P: f32x4 [weight_buffers][4][128 threads]
    std::size_t raw = 0;      ///< records as of stage_layout.h [64]
    std::size_t bytes = 0;
};

constexpr std::size_t step_bytes(StageForm form) {
    return static_cast<std::size_t>(stage_layout(form).d_qk * step_keys * 2);
}

constexpr SharedLayout shared_layout(StageForm form, int stages) {
    const StageLayout record = stage_layout(form);
    SharedLayout layout;
    layout.query = small_shared_bytes;
    layout.stages = layout.query + static_cast<std::size_t>(record.d_qk * heads * 2);
    layout.weights = layout.stages + static_cast<std::size_t>(stages) * step_bytes(form);
    layout.raw = layout.weights + std::size_t(weight_buffers) * heads * step_keys * 4;
    layout.bytes = layout.raw + static_cast<std::size_t>(raw_steps * step_keys * record.pitch);
    return layout;
}

}  // namespace sparsemla::detail::wide
