// A conversion with memory of its own, and a model of it that hands tokens out one by one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "sparsemla/indices.h"

namespace sparsemla::test {

using Ints = std::vector<std::int32_t>;

inline constexpr std::int32_t list_poison = 0x5A5A5A5A;
inline constexpr std::int64_t list_guard = 8;

/// One conversion with memory of its own. Every stride is larger than its shape asks, outputs are poisoned, and
/// everything beside them is part of what is compared.
struct Conversion {
    std::int64_t rows = 1, width = 1, requests = 1, max_pages = 1;
    std::int64_t padding = 3;      ///< elements between the rows of every matrix
    std::int64_t list_stride = 2;  ///< of request_of_row, lengths and counts
    CacheView cache{.pages = 1, .page_size = 64};
    Sharding sharding{};
    Ints ids, table, request_of_row;  ///< dense
    std::optional<Ints> lengths;

    Ints ids_memory, table_memory, requests_memory, lengths_memory, slots_memory, counts_memory;

    ConstTensor matrix(Ints& memory, const Ints& values, std::int64_t n, std::int64_t columns) const {
        memory.assign(static_cast<std::size_t>(2 * list_guard + n * (columns + padding)), list_poison);
        for (std::int64_t i = 0; i < n * columns && !values.empty(); ++i)
            memory[list_guard + i / columns * (columns + padding) + i % columns] = values[i];
        Tensor tensor = dense(memory.data() + list_guard, DType::i32, {n, columns});
        tensor.strides[0] = columns + padding;
        return tensor;
    }
    ConstTensor list(Ints& memory, const Ints& values, std::int64_t n) const {
        memory.assign(static_cast<std::size_t>(2 * list_guard + n * list_stride), list_poison);
        for (std::int64_t i = 0; i < n && !values.empty(); ++i) memory[list_guard + i * list_stride] = values[i];
        Tensor tensor = dense(memory.data() + list_guard, DType::i32, {n});
        tensor.strides[0] = list_stride;
        return tensor;
    }
    static Tensor writable(const ConstTensor& t, Ints& memory) {
        return {memory.data() + list_guard, t.dtype, t.device, t.rank, t.shape, t.strides};
    }

    ConvertArgs args() {
        ConvertArgs result{.token_ids = matrix(ids_memory, ids, rows, width),
                           .block_table = matrix(table_memory, table, requests, max_pages),
                           .request_of_row = list(requests_memory, request_of_row, rows),
                           .lengths = {},
                           .cache = cache,
                           .sharding = sharding,
                           .slots = {},
                           .counts = {}};
        if (lengths) result.lengths = list(lengths_memory, *lengths, requests);
        result.slots = writable(matrix(slots_memory, {}, rows, width), slots_memory);
        result.counts = writable(list(counts_memory, {}, rows), counts_memory);
        return result;
    }

    /// Converts; then the whole of both output buffers must be as `kept` says, list_poison where nothing was declared.
    void expect(const std::vector<Ints>& kept, const std::string& what) {
        convert_indices(args());
        Conversion other = *this;
        Ints expected_slots, expected_counts;
        Ints slots(static_cast<std::size_t>(rows * width), -1);
        Ints counts;
        for (std::int64_t row = 0; row < rows; ++row) {
            std::copy(kept[row].begin(), kept[row].end(), slots.begin() + row * width);
            counts.push_back(static_cast<std::int32_t>(kept[row].size()));
        }
        other.matrix(expected_slots, slots, rows, width);
        other.list(expected_counts, counts, rows);
        EXPECT_EQ(slots_memory, expected_slots) << what;
        EXPECT_EQ(counts_memory, expected_counts) << what;
    }
};

/// local_index[rank][token], or -1: tokens are dealt in turns of `interleave`, and each rank numbers what it gets.
inline std::vector<Ints> deal(std::int64_t tokens, std::int64_t world, std::int64_t interleave) {
    std::vector<Ints> local(static_cast<std::size_t>(world), Ints(static_cast<std::size_t>(tokens), -1));
    Ints held(static_cast<std::size_t>(world), 0);
    std::int64_t rank = 0;
    for (std::int64_t token = 0; token < tokens;) {
        for (std::int64_t i = 0; i < interleave && token < tokens; ++i) local[rank][token++] = held[rank]++;
        rank = rank + 1 == world ? 0 : rank + 1;
    }
    return local;
}

/// What each row keeps, by the model.
inline std::vector<Ints> model(const Conversion& c) {
    const std::int64_t limit =
        c.sharding.world * (c.max_pages * c.cache.page_size + c.sharding.interleave);  // ids past it have no page
    const Ints local = deal(limit, c.sharding.world, c.sharding.interleave)[c.sharding.rank];
    std::vector<Ints> kept(static_cast<std::size_t>(c.rows));
    for (std::int64_t row = 0; row < c.rows; ++row) {
        const std::int32_t request = c.request_of_row[row];
        if (request < 0 || request >= c.requests) continue;
        for (std::int64_t column = 0; column < c.width; ++column) {
            const std::int32_t id = c.ids[row * c.width + column];
            if (id < 0 || id >= limit || local[id] < 0) continue;
            if (c.lengths && id >= (*c.lengths)[request]) continue;
            std::int64_t offset = local[id];
            std::int64_t page = 0;
            for (; offset >= c.cache.page_size; offset -= c.cache.page_size) ++page;
            if (page >= c.max_pages) continue;
            const std::int32_t block = c.table[request * c.max_pages + page];
            if (block < 0 || block >= c.cache.pages) continue;
            kept[row].push_back(static_cast<std::int32_t>(block * c.cache.slot_step() + offset));
        }
    }
    return kept;
}

/// Ids, blocks and requests of which some do not exist, over pages of any size. A row that names a request keeps an id
/// in `world` on average, but for those.
inline Conversion random_conversion(std::mt19937_64& bits, std::int64_t width) {
    const auto below = [&](std::int64_t n) {
        return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(n));
    };
    Conversion c;
    c.rows = 1 + below(7);
    c.width = width;
    c.requests = 1 + below(4);
    c.cache.page_size = std::int64_t{1} << below(8);
    c.sharding.interleave = std::int64_t{1} << below(std::bit_width(static_cast<std::uint64_t>(c.cache.page_size)));
    c.sharding.world = 1 + below(9);
    c.sharding.rank = below(c.sharding.world);
    if (below(3) == 0) {  // no powers of two
        c.cache.page_size = 61;
        c.sharding.interleave = below(2) == 0 ? 1 : 61;
    }
    if (below(6) == 0) {  // more ranks than ids, or turns that no id reaches
        constexpr std::int64_t most = (std::int64_t{1} << 31) - 1;
        c.sharding.world = below(2) == 0 ? most - below(3) : std::min(most / c.sharding.interleave + below(2), most);
        c.sharding.rank = below(2) == 0 ? below(3) : most / c.sharding.interleave - below(3);
        c.sharding.rank = std::clamp<std::int64_t>(c.sharding.rank, 0, c.sharding.world - 1);
    }
    c.max_pages = 1 + below(40);
    c.cache.pages = 1 + below(60);
    if (below(2) == 0) c.cache.slots_per_page = c.cache.page_size + below(100);
    constexpr std::int64_t ids = std::int64_t{1} << 31;
    const std::int64_t tokens = std::min(c.max_pages * c.cache.page_size * c.sharding.world, ids * 7 / 8);
    const std::int64_t first = c.sharding.rank * c.sharding.interleave;  // that the rank holds
    for (std::int64_t i = 0; i < c.rows * c.width; ++i) {
        std::int64_t id = below(tokens + tokens / 8 + 4) - 3;
        if (below(8) == 0) id = std::min(first + below(2 * c.sharding.interleave + 4) - 2, ids - 1);
        c.ids.push_back(static_cast<std::int32_t>(id));
    }
    for (std::int64_t i = 0; i < c.requests * c.max_pages; ++i)
        c.table.push_back(static_cast<std::int32_t>(below(c.cache.pages + 4) - 2));
    for (std::int64_t i = 0; i < c.rows; ++i)
        c.request_of_row.push_back(static_cast<std::int32_t>(below(c.requests + 2) - 1));
    if (below(2) == 0) {
        c.lengths.emplace();
        for (std::int64_t i = 0; i < c.requests; ++i)
            c.lengths->push_back(static_cast<std::int32_t>(below(tokens + 2) - 1));
    }
    return c;
}

/// One row over one request whose pages are `table`.
inline Conversion single(Ints ids, Ints table, CacheView cache, Sharding sharding = {}) {
    Conversion c;
    c.width = static_cast<std::int64_t>(ids.size());
    c.max_pages = static_cast<std::int64_t>(table.size());
    c.ids = std::move(ids);
    c.table = std::move(table);
    c.request_of_row = {0};
    c.cache = cache;
    c.sharding = sharding;
    return c;
}

inline Ints iota(std::int32_t first, std::int32_t last, std::int32_t step = 1) {
    Ints values;
    for (std::int32_t i = first; i < last; i += step) values.push_back(i);
    return values;
}

}  // namespace sparsemla::test
