// From token ids of a request to the slots of this rank's cache, and the arithmetic of who owns a token.
#pragma once

#include <cstdint>

#include "sparsemla/records.h"
#include "sparsemla/tensor.h"

namespace sparsemla {

/// Who owns which token: token t belongs to rank (t / interleave) % world.
struct Sharding {
    std::int64_t world = 1;
    std::int64_t rank = 0;
    std::int64_t interleave = 1;
};

constexpr std::int64_t owner_of(std::int64_t token, std::int64_t world, std::int64_t interleave) {
    return (token / interleave) % world;
}

/// Position of a token among the tokens its owner holds.
constexpr std::int64_t local_of(std::int64_t token, std::int64_t world, std::int64_t interleave) {
    return (token / (world * interleave)) * interleave + token % interleave;
}

/// Inverse of local_of for the tokens of `rank`.
constexpr std::int64_t global_of(std::int64_t local, const Sharding& sharding) {
    return ((local / sharding.interleave) * sharding.world + sharding.rank) * sharding.interleave +
           local % sharding.interleave;
}

/// How many of the tokens 0 .. length - 1 the rank owns; the lengths of all ranks add up to `length` (0 if negative).
constexpr std::int64_t local_length(std::int64_t length, const Sharding& sharding) {
    if (length <= 0) return 0;
    const std::int64_t turn = sharding.world * sharding.interleave;
    const std::int64_t rest = length % turn - sharding.rank * sharding.interleave;
    const std::int64_t in_last_turn = rest < 0 ? 0 : rest < sharding.interleave ? rest : sharding.interleave;
    return (length / turn) * sharding.interleave + in_last_turn;
}

struct ConvertArgs {
    ConstTensor token_ids{};       ///< i32 [rows, width], row stride free
    ConstTensor block_table{};     ///< i32 [requests, max_pages], row stride free: ids of this rank's pages in order
    ConstTensor request_of_row{};  ///< i32 [>= rows]
    ConstTensor lengths{};  ///< i32 [>= requests], optional: global token counts; ids at or past them are dropped
    CacheView cache{};      ///< only its geometry is used: pages, page_size, slots_per_page; data may be null
    Sharding sharding{};    ///< page_size % interleave == 0

    Tensor slots{};   ///< out: i32 [>= rows, width], row stride free; kept columns in input order, then -1
    Tensor counts{};  ///< out: i32 [>= rows]: how many columns were kept
};

/// Token ids of a request to slots of this rank: for id t of row r, q = request_of_row[r]
///     local = local_of(t)      slot = block_table[q, local / page_size] * slots_per_page + local % page_size
/// Kept are ids t >= 0 below the request's length (if given), owned by this rank, whose page lies in the table and
/// whose block id is in [0, pages). Duplicates are kept. A request outside [0, requests) gives an empty row.
/// Outputs may not overlap inputs or each other. Does not allocate. Runs on the device that holds the tensors; on a GPU
/// as one kernel in `stream`, which waits for the grid before it (programmatic dependency) and may be captured: once
/// prepare() has run for any plan on that GPU, also as the first call.
void convert_indices(const ConvertArgs& args, Stream stream = {});

}  // namespace sparsemla
