// How the fast CPU kernel cuts a problem into tasks, and where in the workspace each thing lies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparsemla/decode.h"

namespace sparsemla::detail {

/// Offsets are in floats; every array starts on a 64-byte boundary. A pure function of problem, schedule and threads.
struct DecodeLayout {
    int groups = 0;              ///< head groups of the problem
    int tile_groups = 0;         ///< head groups of a task
    int head_tiles = 0;          ///< tasks that share a split
    int key_capacity = 0;        ///< rows of a tile: a chunk and its padding
    int threads = 1;             ///< that a call uses
    std::int64_t wave_rows = 1;  ///< rows whose partials exist at the same time

    struct {
        std::int64_t size = 0;
        std::int64_t keys = 0;          ///< [key_capacity][tile_stride]
        std::int64_t dots = 0;          ///< [tile_groups][key_capacity][head_group]
        std::int64_t keep_factor = 0;   ///< [tile_groups][head_group]
        std::int64_t chunk_factor = 0;  ///< [tile_groups][head_group]
        std::int64_t row_max = 0;       ///< [tile_groups][head_group]
    } thread;                           ///< scratch of one thread

    struct {
        std::int64_t size = 0;
        std::int64_t num_keys = 0;  ///< int64
        std::int64_t row_max = 0;   ///< [groups][head_group]: the split's share of the row's maximum
        std::int64_t max = 0;       ///< [groups][head_group]
        std::int64_t sum = 0;       ///< [groups][head_group]
        std::int64_t sums = 0;      ///< [heads][value_dims]
    } split;                        ///< result of one split of a row

    struct {
        std::int64_t size = 0;
        std::int64_t query = 0;   ///< [groups][d_qk][head_group]
        std::int64_t splits = 0;  ///< [splits] of `split`
    } row;                        ///< one row of a wave

    std::int64_t rows_offset = 0;  ///< after the threads' scratch
    std::size_t workspace_bytes = 0;
};

DecodeLayout decode_layout(const Problem& problem, const Schedule& schedule, int threads);

}  // namespace sparsemla::detail
