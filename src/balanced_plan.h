// The host's side of decode_balanced: the launch and the memory that follow from a plan.
#pragma once

#include <cstddef>

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

/// The launch of every call of a plan of decode_balanced.
BalancedShape balanced_shape(const Plan& plan);

/// Offsets in the plan's workspace; `bytes` is Plan::workspace_bytes.
balanced::WorkspaceLayout balanced_workspace(const Plan& plan);

/// Plan::state_bytes.
std::size_t balanced_state_bytes(const Plan& plan);

}  // namespace sparsemla::detail
