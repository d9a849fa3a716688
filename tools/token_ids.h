// A generated case in the form in which engines pose it: token ids and a block table instead of slots.
#pragma once

#include <cstdint>

#include "sparsemla/case_file.h"
#include "sparsemla/indices.h"

namespace sparsemla::tool {

struct TokenIdsRecipe {
    Sharding sharding{};
    std::int64_t width = 0;  ///< columns of the list of ids, at least the case's width
    std::uint64_t seed = 1;
};

/// Replaces `slots` and `counts` of a case with one source by `token_ids`, `block_table` and `request_of_row`, so that
/// conversion gives every row its active slots back, in order. Ids of other ranks are mixed in: (world - 1) per kept
/// id, as far as the width allows. Throws Error if a token id would not fit in 32 bits.
void to_token_ids(Case& c, const TokenIdsRecipe& recipe);

}  // namespace sparsemla::tool
