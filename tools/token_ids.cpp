#include "tools/token_ids.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace sparsemla::tool {
namespace {

using Random = std::mt19937_64;

/// Verification of drafted tokens gives a request two rows here, so that rows and requests differ.
constexpr std::int64_t rows_per_request = 2;

std::int64_t below(Random& random, std::int64_t limit) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
}

std::int32_t* ints(OwnedTensor& tensor) { return reinterpret_cast<std::int32_t*>(tensor.bytes.get()); }

/// The pages of each request in order: a permutation of all of them.
OwnedTensor shuffled_tables(std::int64_t requests, std::int64_t pages, Random& random) {
    OwnedTensor table = make_owned(DType::i32, {requests, pages});
    for (std::int64_t q = 0; q < requests; ++q) {
        std::int32_t* row = ints(table) + q * pages;
        std::iota(row, row + pages, 0);
        for (std::int64_t i = pages - 1; i > 0; --i) std::swap(row[i], row[below(random, i + 1)]);
    }
    return table;
}

/// Where each page stands in a request's table.
std::vector<std::int64_t> positions(const std::int32_t* table, std::int64_t pages) {
    std::vector<std::int64_t> result(static_cast<std::size_t>(pages));
    for (std::int64_t i = 0; i < pages; ++i) result[static_cast<std::size_t>(table[i])] = i;
    return result;
}

std::vector<std::int32_t> active_slots(const CaseSource& source, std::int64_t row) {
    const std::int64_t width = source.slots.shape[1];
    const auto* slots = static_cast<const std::int32_t*>(source.slots.data) + row * source.slots.strides[0];
    std::int64_t count = width;
    if (source.counts.present())
        count = std::clamp<std::int64_t>(static_cast<const std::int32_t*>(source.counts.data)[row], 0, width);
    std::vector<std::int32_t> active;
    std::copy_if(slots, slots + count, std::back_inserter(active), [&](auto slot) { return source.cache.holds(slot); });
    return active;
}

void check_id_range(const CacheView& cache, const Sharding& sharding) {
    const double last =
        static_cast<double>(cache.pages) * static_cast<double>(cache.page_size) * static_cast<double>(sharding.world);
    if (last > std::numeric_limits<std::int32_t>::max())
        throw Error(ErrorKind::invalid_argument, "--world",
                    "world x pages x page size below 2^31, as token ids are i32",
                    std::to_string(sharding.world) + " x " + std::to_string(cache.pages) + " x " +
                        std::to_string(cache.page_size));
}

/// An id that some other rank owns.
std::int32_t foreign_id(const CacheView& cache, const Sharding& sharding, Random& random) {
    Sharding other = sharding;
    other.rank = (sharding.rank + 1 + below(random, sharding.world - 1)) % sharding.world;
    return static_cast<std::int32_t>(global_of(below(random, cache.pages * cache.page_size), other));
}

/// The row's ids: its own in order, foreign ones at random places between them, -1 behind.
void fill_row(std::int32_t* ids, const std::vector<std::int32_t>& own, const CacheView& cache,
              const TokenIdsRecipe& recipe, Random& random) {
    const auto kept = static_cast<std::int64_t>(own.size());
    std::int64_t foreign = std::min(kept * (recipe.sharding.world - 1), recipe.width - kept);
    std::int64_t next = 0;
    std::int64_t column = 0;
    while (next < kept || foreign > 0)
        if (below(random, kept - next + foreign) < foreign) {
            ids[column++] = foreign_id(cache, recipe.sharding, random);
            --foreign;
        } else {
            ids[column++] = own[static_cast<std::size_t>(next++)];
        }
    std::fill(ids + column, ids + recipe.width, -1);
}

}  // namespace

void to_token_ids(Case& c, const TokenIdsRecipe& recipe) {
    const CaseStep step = case_step(c);
    const CaseSource& source = step.sources.at(0);
    const CacheView& cache = source.cache;
    check_id_range(cache, recipe.sharding);
    Random random(recipe.seed);
    const std::int64_t requests = (step.rows + rows_per_request - 1) / rows_per_request;
    OwnedTensor table = shuffled_tables(requests, cache.pages, random);
    OwnedTensor request_of_row = make_owned(DType::i32, {step.rows});
    OwnedTensor ids = make_owned(DType::i32, {step.rows, recipe.width});
    for (std::int64_t row = 0; row < step.rows; ++row) {
        const std::int64_t request = row / rows_per_request;
        ints(request_of_row)[row] = static_cast<std::int32_t>(request);
        const std::vector<std::int64_t> position = positions(ints(table) + request * cache.pages, cache.pages);
        std::vector<std::int32_t> own = active_slots(source, row);
        for (std::int32_t& slot : own) {
            const std::int64_t page = slot / cache.slot_step();
            const std::int64_t local =
                position[static_cast<std::size_t>(page)] * cache.page_size + slot % cache.slot_step();
            slot = static_cast<std::int32_t>(global_of(local, recipe.sharding));
        }
        fill_row(ints(ids) + row * recipe.width, own, cache, recipe, random);
    }
    c.tensors.erase("slots");
    c.tensors.erase("counts");
    c.tensors["token_ids"] = std::move(ids);
    c.tensors["block_table"] = std::move(table);
    c.tensors["request_of_row"] = std::move(request_of_row);
    c.metadata["world"] = std::to_string(recipe.sharding.world);
    c.metadata["rank"] = std::to_string(recipe.sharding.rank);
    c.metadata["interleave"] = std::to_string(recipe.sharding.interleave);
}

}  // namespace sparsemla::tool
