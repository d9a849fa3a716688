// Which rows of a step take part in which of many exchanges.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/dcp_group.h"
#include "harness/random.h"

namespace sparsemla::harness {

/// Random windows; of a step of more than 4 rows, neighbours and the ones after them begin at other rows.
inline std::vector<DcpWindow> dcp_windows(std::int64_t rows, int count, std::uint64_t seed) {
    Random random(seed);
    std::vector<DcpWindow> windows;
    while (static_cast<int>(windows.size()) < count) {
        const std::int64_t first = random.below(rows), taken = 1 + random.below(rows - first);
        bool again = false;
        for (std::size_t i = windows.size(); i > 0 && i + 3 > windows.size(); --i)
            again = again || (windows[i - 1].first_row == first && rows > 4);
        if (!again) windows.push_back({first, taken});
    }
    return windows;
}

}  // namespace sparsemla::harness
