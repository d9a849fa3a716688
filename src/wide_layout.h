// decode_wide's tiles and memory: what its host side, its device side and its tests must agree on. No CUDA headers.
#pragma once

#include "latency_layout.h"

namespace sparsemla::detail::wide {

inline constexpr int heads = 64;        ///< of a CTA: the M of one wgmma
inline constexpr int step_keys = 32;    ///< half of a chunk: what is converted and multiplied at a time
inline constexpr int lower_dims = 256;  ///< of a record: they come, and become halves, before the others
inline constexpr int min_stages = 2;    ///< steps as halves: the scores are a step ahead of the values
inline constexpr int max_stages = 3;
inline constexpr int value_warps = 8;       ///< two warpgroups, of 256 dimensions each
inline constexpr int converting_warps = 4;  ///< they gather, too
inline constexpr int score_warps = 4;       ///< one warpgroup
inline constexpr int threads = 32 * (value_warps + converting_warps + score_warps);
/// What waits for helpers, syncs multiplying warps and lays out the workspace is decode_balanced's.
static_assert(value_warps == latency::multiplying_warps && converting_warps == latency::helper_warps);
inline constexpr int pieces = 6;  ///< that are announced and not yet ended by all

/// Whether codes and P are FP16 in shared memory: where no scale of few dimensions asks for more exponents. Otherwise
/// all is BF16, and P one such number (p_bf16) or the sum of two (p_f16, and better).
constexpr bool is_f16(StageForm form) { return stage_layout(form).is_plain() || stage_layout(form).has_groups(); }

/// Barriers, pieces, masks, scales and weights: WideShared of cuda/decode_wide_tile.cuh.
inline constexpr std::size_t small_shared_bytes = 10 * 1024;

/// Records as they are stored, on their way to a stage. Their lower dimensions have room for two steps, the others for
/// one: they come once those of the step before are halves. Records with scales of blocks stay whole, in two rooms.
struct RawLayout {
    int lower_pitch = 0;  ///< bytes between two records' lower dimensions [2 steps][step_keys]
    int upper_pitch = 0;  ///< of the others [step_keys]

    constexpr bool is_whole() const { return upper_pitch == 0; }
    constexpr std::size_t upper() const { return static_cast<std::size_t>(2 * step_keys * lower_pitch); }
    constexpr std::size_t bytes() const { return upper() + static_cast<std::size_t>(step_keys * upper_pitch); }
};

constexpr RawLayout raw_layout(StageForm form) {
    const StageLayout record = stage_layout(form);
    if (record.has_blocks()) return {.lower_pitch = record.pitch};
    if (record.codes == 0)  // an odd number of 16 bytes: a lane reads 32 bytes, 16 at a time
        return {.lower_pitch = 2 * lower_dims + 16, .upper_pitch = 2 * (record.d_qk - lower_dims) + 16};
    return {.lower_pitch = lower_dims, .upper_pitch = record.codes - lower_dims + 2 * record.wide()};
}

/// Four lanes read 64 bytes of a record, eight lanes of two records at a time: where all records begin in the same
/// banks, odd ones have each two of their blocks of 64 bytes exchanged.
constexpr bool exchanges_blocks(int pitch) { return pitch % 128 == 0; }

/// Byte offsets in a CTA's shared memory.
struct SharedLayout {
    std::size_t query = 0;    ///< halves [d_qk / 64][heads][64], 128-byte swizzle
    std::size_t stages = 0;   ///< halves [stages][d_qk / 64][step_keys][64], 128-byte swizzle
    std::size_t weights = 0;  ///< P of a step: f32x4 [4][128 threads]
    std::size_t raw = 0;      ///< as of raw_layout
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
    layout.raw = layout.weights + std::size_t(heads) * step_keys * 4;
    layout.bytes = layout.raw + raw_layout(form).bytes();
    return layout;
}

}  // namespace sparsemla::detail::wide
