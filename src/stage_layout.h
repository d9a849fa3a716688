// How the GPU kernels hold records in shared memory: one form for each way of computing with them, not for each record.
// No CUDA headers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "sparsemla/records.h"

namespace sparsemla::detail {

/// A record in a stage. Codes are E4M3, wide values BF16; E2M1 codes become the E4M3 codes of the same values on the
/// way there, and all scales of `blocks` BF16, which holds every UE8M0 and E4M3.
enum class StageForm : std::uint8_t {
    codes_576,    ///< flat fp8, without scales
    codes_512,    ///< the same
    groups_576,   ///< fp8_ds_mla: a float32 scale for 128 codes; a wide rope
    groups_512,   ///< fp8_ds_mla_norope
    blocks_rope,  ///< fp8_v4: a scale for 16 codes; a wide rope that is part of the value
    blocks_512,   ///< fp8_v41 and nvfp4_v41, mixed too
    blocks_576,   ///< nvfp4_ds_mla: a rope of codes without scales
    wide_576,     ///< bf16
};

constexpr StageForm stage_form(Record record) {
    switch (record) {
        case Record::fp8_576: return StageForm::codes_576;
        case Record::fp8_512: return StageForm::codes_512;
        case Record::fp8_ds_mla: return StageForm::groups_576;
        case Record::fp8_ds_mla_norope: return StageForm::groups_512;
        case Record::fp8_v4: return StageForm::blocks_rope;
        case Record::fp8_v41:
        case Record::nvfp4_v41: return StageForm::blocks_512;
        case Record::nvfp4_ds_mla: return StageForm::blocks_576;
        case Record::bf16: return StageForm::wide_576;
    }
    return {};
}

/// One of the form's records.
constexpr const RecordLayout& stored_layout(StageForm form) {
    const RecordLayout* found = record_layouts.data();
    while (stage_form(found->record) != form) ++found;
    return *found;
}

struct StageLayout {
    int d_qk = 0;
    int codes = 0;          ///< dimensions [0, codes) are E4M3, at byte 0; the others wide
    int scaled = 0;         ///< dimensions [0, scaled) have scales
    int scale_dims = 0;     ///< dimensions that share a scale; 0: no scales
    int wide_offset = 0;    ///< of the first wide value
    int scales_offset = 0;  ///< of the scales: float32 of 128 dimensions, BF16 of 16
    int pitch = 0;  ///< bytes between two records: an odd number of 16, so that 8 rows of 16 bytes meet all banks

    constexpr int wide() const { return d_qk - codes; }
    constexpr bool has_groups() const { return scale_dims == 128; }
    constexpr bool has_blocks() const { return scale_dims == 16; }
    /// Neither scales nor wide values: a stage holds the record's own bytes and nothing else.
    constexpr bool is_plain() const { return scale_dims == 0 && codes == d_qk; }
    /// Dimensions of the value that are wide.
    constexpr bool has_wide_values() const { return codes < value_dims; }
};

inline constexpr int value_blocks = value_dims / 16;

constexpr StageLayout stage_layout(StageForm form) {
    const RecordLayout& stored = stored_layout(form);
    const auto wide_dims = [](const RecordRun& run) { return run.encoding == ValueEncoding::bf16 ? run.dims : 0; };
    StageLayout stage;
    stage.d_qk = stored.d_qk();
    stage.codes = stage.d_qk - wide_dims(stored.main) - wide_dims(stored.rope);
    int bytes = stored.record_bytes;
    if (stage.codes > 0) stage.wide_offset = stored.rope.offset_bytes;
    if (stored.scale_encoding != ScaleEncoding::none) {
        // Float32 scales stay as they lie; those of 16 dimensions follow all values.
        const bool stays = stored.scale_encoding == ScaleEncoding::f32;
        stage.scaled = stored.main.dims;
        stage.scale_dims = stays ? stored.group_dims : 16;
        stage.scales_offset = stays ? stored.scale_offset_bytes : stage.codes + 2 * stage.wide();
        if (!stays) bytes = stage.scales_offset + 2 * value_blocks;
    }
    stage.pitch = bytes / 16 % 2 == 0 ? bytes + 16 : bytes;
    return stage;
}

/// What follows the records of a stage that have scales of blocks: these as FP16, [32 blocks][64 keys], and what they
/// are relative to, 8 bytes of a block.
inline constexpr int scale_table_pitch = 128;

constexpr int stage_bytes(StageForm form) {
    const StageLayout layout = stage_layout(form);
    return 64 * layout.pitch + (layout.has_blocks() ? value_blocks * (scale_table_pitch + 8) : 0);
}

/// P of a chunk: one tile, or one for each 128 dimensions, times their scales.
constexpr int weight_tiles(StageForm form) { return stage_layout(form).has_groups() ? value_dims / 128 : 1; }

/// Records of one form differ only in what changes on the way to a stage.
constexpr bool stages_consistent() {
    for (const RecordLayout& record : record_layouts) {
        const StageLayout stage = stage_layout(stage_form(record.record));
        const bool scaled = record.scale_encoding != ScaleEncoding::none;
        if (stage.d_qk != record.d_qk() || stage.pitch % 32 != 16 || stage.wide_offset % 16 != 0 ||
            stage.scaled != (scaled ? record.main.dims : 0) || (scaled && record.group_dims % stage.scale_dims != 0))
            return false;
    }
    return true;
}
static_assert(stages_consistent());

}  // namespace sparsemla::detail
