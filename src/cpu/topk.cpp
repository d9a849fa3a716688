// The exact global top k of several lists: all candidates of a row as one list of keys, and the first k of them.
#include <algorithm>
#include <bit>
#include <vector>

#include "kernels.h"
#include "topk_key.h"

namespace sparsemla::detail {

namespace {

/// Replaces `keys` by those of the row's candidates. Addresses are formed only where an element exists.
void collect(const MergeTopkParams& params, std::int64_t row, std::vector<std::uint64_t>& keys) {
    keys.clear();
    for (std::int64_t source = 0; source < params.sources; ++source) {
        std::int64_t count = params.width;
        if (params.source_counts != nullptr)
            count = std::min<std::int64_t>(
                count, params.source_counts[source * params.counts_source_stride + row * params.counts_row_stride]);
        for (std::int64_t column = 0; column < count; ++column) {
            const std::int32_t id =
                params.ids[source * params.ids_source_stride + row * params.ids_row_stride + column];
            const float score =
                params.scores[source * params.scores_source_stride + row * params.scores_row_stride + column];
            if (id >= 0) keys.push_back(topk_key(std::bit_cast<std::uint32_t>(score), id));
        }
    }
}

/// Leaves the first k, in order.
void select(std::int64_t k, std::vector<std::uint64_t>& keys) {
    if (static_cast<std::int64_t>(keys.size()) > k) {
        std::nth_element(keys.begin(), keys.begin() + k, keys.end());
        keys.resize(static_cast<std::size_t>(k));
    }
    std::sort(keys.begin(), keys.end());
}

/// Compacts the ids that this rank owns to the front of the row's list; returns how many there are.
std::int64_t keep_own(const ConvertParams& to, std::int64_t row, const std::vector<std::uint64_t>& keys) {
    const auto& [world, rank, interleave] = to.sharding;
    std::int64_t kept = 0;
    for (const std::uint64_t key : keys)
        if (owner_of(id_of_key(key), world, interleave) == rank)
            to.slots[row * to.slots_row_stride + kept++] = id_of_key(key);
    for (std::int64_t column = kept; column < to.width; ++column) to.slots[row * to.slots_row_stride + column] = -1;
    return kept;
}

}  // namespace

void merge_topk_cpu(const MergeTopkParams& params) {
    const ConvertParams& conversion = params.conversion;
    std::vector<std::uint64_t> keys;
    for (std::int64_t row = 0; row < conversion.rows; ++row) {
        collect(params, row, keys);
        select(conversion.width, keys);
        conversion.counts[row * conversion.counts_stride] = static_cast<std::int32_t>(keep_own(conversion, row, keys));
    }
    if (params.to_slots) convert_indices_cpu(conversion);  // in place: a kept column goes to its own or one before it
}

}  // namespace sparsemla::detail
