// How long the stages of an exchange take.
#pragma once

#include <span>
#include <vector>

#include "harness/dcp_group.h"

namespace sparsemla::harness {

/// Of one rank in one exchange.
struct DcpTimes {
    double gather_us = 0;
    double decode_us = 0;  ///< and push: DcpRank::decode
    double merge_us = 0;
    double step_us = 0;  ///< all of it
};

/// [window][rank]: one exchange after another, whose results nobody looks at.
/// On a CPU a thread for each rank, all of which begin an exchange together, and wall clock: what a rank waits for
/// others is in its times. On a GPU lockstep on one stream between events, stage by stage and in each one rank after
/// the other: a time is of one rank alone, nobody waits, and step_us is the sum of the three.
std::vector<std::vector<DcpTimes>> time_exchanges(DcpGroup& group, std::span<const DcpWindow> windows);

}  // namespace sparsemla::harness
