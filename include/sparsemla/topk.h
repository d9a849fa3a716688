// The exact global top k of what the indexers of several ranks chose, and of it this rank's part: the step before
// decode under decode context parallelism.
#pragma once

#include <cstdint>

#include "sparsemla/indices.h"
#include "sparsemla/records.h"
#include "sparsemla/tensor.h"

namespace sparsemla {

/// The largest k that merge_topk takes on a GPU: what one CTA sorts in its shared memory.
inline constexpr std::int64_t max_gpu_topk = 4096;

/// The candidates of every row are the columns of `sources` lists, one from each rank: pairs of a score and a global
/// token id. A column at or past its list's count, or with an id below 0, is absent.
struct MergeTopkArgs {
    std::int64_t rows = 0;
    std::int64_t k = 0;  ///< 0 .. 2^31-1, on a GPU max_gpu_topk; may be more than there are candidates

    ConstTensor scores{};         ///< f32 [sources, >= rows, width], 1 or more sources, outer strides free
    ConstTensor ids{};            ///< i32 [sources, >= rows, width], outer strides free
    ConstTensor source_counts{};  ///< i32 [sources, >= rows], optional: columns of each list, clamped to [0, width]
    Sharding sharding{};          ///< which of the selected tokens are this rank's

    /// Where token ids are wanted, out: i32 [>= rows, k], row stride free. Otherwise nothing, and `slots` is given.
    Tensor token_ids{};

    /// Where slots are wanted: as in ConvertArgs. With token_ids tensors are not given, and the cache is not looked at.
    ConstTensor block_table{};     ///< i32 [requests, max_pages], row stride free
    ConstTensor request_of_row{};  ///< i32 [>= rows]
    ConstTensor lengths{};         ///< i32 [>= requests], optional
    CacheView cache{};             ///< only its geometry is used; page_size % sharding.interleave == 0
    Tensor slots{};                ///< out: i32 [>= rows, k], row stride free

    Tensor counts{};  ///< out: i32 [>= rows]: how many columns of a row's list are there; the others are -1
};

/// Selects the k first candidates of each row, by score descending, then by the lowest id; writes those of them that
/// this rank owns (owner_of), in that order, compacted to the front: as token ids, or as the slots that convert_indices
/// makes of them, which drops the same tokens, after the selection.
/// NaN of either sign sorts behind -inf, -0 is +0. A token that stands in several columns counts once for each of them,
/// in the selection and in the output. The token ids of all ranks partition the selection, ties or not: ranks that see
/// the same candidates select the same k.
/// Throws Error (invalid_argument) by the argument's name before anything runs: dtypes, shapes, devices other than that
/// of `scores`, strides, alignment (4 bytes), more than 2^31-1 columns of all sources, outputs that overlap inputs or
/// each other; Error (unsupported) for a k past max_gpu_topk on a GPU. No rows, a k of 0 and lists without columns are
/// fine. Runs on the device that holds the tensors. On a CPU it allocates 8 bytes a candidate of a row. On a GPU it is
/// one kernel in `stream` without scratch memory, which waits for the grid before it (programmatic dependency) and may
/// be captured: once prepare() has run for any plan on that GPU, also as the first call.
void merge_topk(const MergeTopkArgs& args, Stream stream = {});

}  // namespace sparsemla
