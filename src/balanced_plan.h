// The host's side of decode_balanced and decode_wide, which share chunks out alike: the launch and the memory that
// follow from a plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "balanced_layout.h"
#include "sparsemla/decode.h"

namespace sparsemla::detail {

/// The grid depends on the plan's rows, not on the call's.
struct BalancedShape {
    int ctas = 0;
    int tiles = 0;                ///< of heads
    bool one_split_each = false;  ///< a CTA for every split of the plan's rows and tiles
    std::size_t shared_bytes = 0;
};

/// The launch of every call of a plan of either.
BalancedShape balanced_shape(const Plan& plan);

/// Offsets in the plan's workspace; `bytes` is Plan::workspace_bytes.
balanced::WorkspaceLayout balanced_workspace(const Plan& plan);

/// Plan::state_bytes.
std::size_t balanced_state_bytes(const Plan& plan);

/// Whether the plan's kernel is one of them.
bool shares_chunks_out(const Plan& plan);

/// Rows times tiles of heads.
std::int64_t tiles_of_rows(const Problem& problem, int heads);

/// A CTA on each SM, as far as there are splits of rows and tiles.
int balanced_ctas(const Problem& problem, const DeviceSpec& device, int heads, int splits);

/// A list of token ids, as a reason; or nothing. Their CTAs have pieces of many rows, and would convert each again.
std::optional<std::string> refuse_token_ids(const Problem& problem);

/// Too many chunks for their numbers, as a reason; or nothing.
std::optional<std::string> refuse_chunks(const Problem& problem, int heads);

}  // namespace sparsemla::detail
