// The host's side of decode_balanced: the launch and the memory that follow from a plan.
#pragma once

#include <cstddef>

#include "balanced_layout.h"
#include "sparsemla/decode.h"

namespace sparsemla::detail {

/// One grid for any number of rows.
struct BalancedShape {
    int ctas = 0;
    int tiles = 0;                ///< of heads
    bool one_split_each = false;  ///< a CTA for every split of the plan's rows and tiles
    std::size_t shared_bytes = 0;
};

BalancedShape balanced_launch(const Plan& plan);
balanced::WorkspaceLayout balanced_workspace(const Plan& plan);

}  // namespace sparsemla::detail
