// A step shared out over ranks as decode context parallelism does it: each rank a part of every source's records, and a
// part of the heads. Slots count as tokens: slot s belongs to rank (s / interleave) % world.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/oracle.h"
#include "sparsemla/case_file.h"
#include "sparsemla/mailbox.h"

namespace sparsemla::harness {

struct Sharing {
    std::int64_t interleave = 1;
    std::vector<std::int64_t> head_offset{};  ///< DcpShape::head_offset: world + 1 entries

    int world() const { return static_cast<int>(head_offset.size()) - 1; }
};

/// Heads as equal as they go round: 7 heads of 3 ranks are 3, 2, 2. Throws Error where there are fewer heads than
/// ranks.
std::vector<std::int64_t> share_heads(std::int64_t heads, int world);

/// What one rank holds. Records that no active column names are NaN codes.
struct Shard {
    struct Source {
        OwnedTensor cache, rope;  ///< rope: of records in two tensors
        OwnedTensor slots;        ///< i32 [rows, width]: this rank's, in the order of the step's list, then -1
        OwnedTensor counts;       ///< i32 [rows]
        MutableCacheView view;    ///< dense pages of 64
        float k_scale = 1;
    };
    std::vector<Source> sources;

    /// The step over this rank's records, of all heads, without sinks. Views into the shard and the step it came from.
    CaseStep step(const CaseStep& whole) const;
};

std::vector<Shard> shard(const CaseStep& whole, const Sharing& sharing);

/// The oracle of the whole step, with what may be lost because ranks' results travel as BF16 (Oracle::pushed_abs).
Oracle dcp_oracle(const CaseStep& whole, const std::vector<Shard>& shards);

}  // namespace sparsemla::harness
