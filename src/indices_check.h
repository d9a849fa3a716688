// Token ids as an argument of decode: the checks, and where a CPU kernel's slots of them lie.
#pragma once

#include "check.h"
#include "kernels.h"

namespace sparsemla::detail {

/// Throws Error unless world and rank are in their ranges.
void check_ranks(const Sharding& sharding);

/// convert_indices for decode, which keeps slots and counts to itself: the call with this cache and these first rows,
/// without outputs. Throws Error as convert_indices does, and where slots or counts are given.
ConvertParams check_indices(ConvertArgs args, const CacheView& cache, std::int64_t rows, std::int64_t width);

/// What such a call reads.
Regions regions_of(const ConvertArgs& args, std::int64_t rows);

/// At the end of a CPU kernel's workspace: counts i32 [rows], then slots i32 [rows, width of source 0], of the
/// problem's rows. None where the problem is not from ids.
constexpr std::size_t converted_bytes(const Problem& problem) {
    if (!problem.from_ids) return 0;
    return static_cast<std::size_t>(problem.rows * (1 + problem.sources[0].width)) * sizeof(std::int32_t);
}

/// Converts source 0's token ids to there, and makes them the call's slots and counts.
void convert_to_workspace(DecodeParams& params);

}  // namespace sparsemla::detail
