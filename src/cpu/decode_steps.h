// The four SIMD steps of a chunk and of a row: query -> tiles, tiles -> dots, dots -> weights, weights -> sums -> out.
// Heads come in groups of 16, one head a lane, whatever the vector length: what a head computes, and in which order,
// depends on no other head. Groups are padded; what a padded lane computes is never stored in an output.
#pragma once

#include <array>
#include <cstdint>

#include "cpu/slot_list.h"
#include "kernels.h"

namespace sparsemla::detail {

inline constexpr int head_group = 16;
inline constexpr int tile_stride = max_d_qk;  ///< floats between the records of a tile
inline constexpr int key_padding = 16;        ///< keys that the widest register tile may run past a chunk's last

constexpr int head_groups(std::int64_t heads) { return static_cast<int>((heads + head_group - 1) / head_group); }

/// The query of a row, transposed: `tiles` [groups][d_qk][head_group], from head group `first_group` on.
void transpose_query(const DecodeParams& params, std::int64_t row, int first_group, int groups, float* tiles);

/// q . k of some heads and the keys of a chunk, in FP32: partial sums over 64 dimensions, then their sum.
struct DotsArgs {
    const float* query = nullptr;  ///< [head_groups(heads)][d_qk][head_group]
    float* keys = nullptr;         ///< [key_capacity][tile_stride]; rows past the last key may be zeroed
    float* dots = nullptr;         ///< out: [head_groups(heads)][key_capacity][head_group]
    int heads = 0;
    int num_keys = 0;
    int key_capacity = 0;  ///< at least num_keys + key_padding
    int d_qk = 0;
};
void dot_products(const DotsArgs& args);

/// Softmax of a chunk within its split. Arrays of heads are padded to whole groups.
struct WeightsArgs {
    float* dots = nullptr;  ///< [head_groups(heads)][key_capacity][head_group]; out: the weights
    int heads = 0;
    int num_keys = 0;
    int key_capacity = 0;
    int first_source_keys = 0;             ///< keys [0, first_source_keys) are of source 0, the rest of source 1
    std::array<float, 2> score_factor{};   ///< per source: dot to score in base 2
    std::array<float, 2> weight_factor{};  ///< per source: rounded P to weight
    const Schedule* schedule = nullptr;
    bool first_chunk = false;        ///< of the split: max and sum hold nothing yet
    const float* row_max = nullptr;  ///< anchor row_max: [heads]
    float* max = nullptr;            ///< [heads] of the split so far, base 2
    float* sum = nullptr;            ///< [heads] of 2^(s - max), unquantised
    float* keep_factor = nullptr;    ///< out: [heads] what the split's sums so far are multiplied by
    float* chunk_factor = nullptr;   ///< out: [heads] what the chunk's sums are multiplied by
};
void softmax_weights(const WeightsArgs& args);

/// The largest score of each head over a chunk, joined into `max` (`first_chunk`: replacing it).
void score_maxima(const WeightsArgs& args);

/// sums = sums * keep_factor + chunk_factor * (weights . values), a chunk at a time.
struct ValuesArgs {
    const float* weights = nullptr;  ///< [head_groups(heads)][key_capacity][head_group]
    const float* values = nullptr;   ///< [num_keys][tile_stride]
    float* sums = nullptr;           ///< [heads][value_dims]
    int heads = 0;
    int num_keys = 0;
    int key_capacity = 0;
    bool first_chunk = false;             ///< sums hold nothing yet
    const float* keep_factor = nullptr;   ///< [heads]
    const float* chunk_factor = nullptr;  ///< [heads]; null: 1
};
void weighted_values(const ValuesArgs& args);

/// A split's result. `max` (base 2) and `sum` are padded to whole head groups; nothing is read where there is no key.
struct SplitPartial {
    std::int64_t num_keys = 0;
    const float* sums = nullptr;  ///< [heads][value_dims]
    const float* max = nullptr;   ///< [heads]
    const float* sum = nullptr;   ///< [heads]
};

/// Merges the splits of one row in order, applies sinks and factors, and writes out and lse of some heads.
struct MergeRowArgs {
    const DecodeParams* params = nullptr;
    std::int64_t row = 0;
    std::int64_t first_head = 0;
    std::int64_t end_head = 0;
    const SplitPartial* splits = nullptr;
    int num_splits = 0;        ///< at most max_splits
    double value_scale = 1.0;  ///< what the weights lack
};
void merge_row(const MergeRowArgs& args);

inline constexpr int max_splits = 64;

}  // namespace sparsemla::detail
