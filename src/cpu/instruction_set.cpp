#include "cpu/decode_targets.h"
//
#include <hwy/targets.h>

#include "kernels.h"

namespace sparsemla::detail {

/// The best that both this CPU and this build know. Highway numbers better sets lower.
std::string cpu_instruction_set() {
    const auto usable = static_cast<std::uint64_t>(hwy::SupportedTargets() & HWY_TARGETS);
    return hwy::TargetName(static_cast<int64_t>(usable & (~usable + 1)));
}

}  // namespace sparsemla::detail
