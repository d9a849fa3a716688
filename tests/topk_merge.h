// A merge of top-k lists with memory of its own, and what it must give by sorting everything.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "sparsemla/topk.h"
#include "tests/conversion.h"
#include "tests/device.h"
#include "tests/mirror.h"

namespace sparsemla::test {

/// One merge. Every stride is larger than its shape asks, outputs are poisoned, and what lies between the columns of
/// inputs would be selected first.
struct TopkMerge {
    std::int64_t sources = 1, rows = 1, width = 1, k = 1;
    std::int64_t padding = 3;         ///< elements between rows
    std::int64_t source_padding = 7;  ///< elements between sources
    std::int64_t list_stride = 2;     ///< of counts
    Sharding sharding{};
    std::vector<float> scores;          ///< [sources][rows][width]
    Ints ids;                           ///< the same
    std::optional<Ints> source_counts;  ///< [sources][rows]
    std::optional<Conversion> to;       ///< to slots: its table, requests, lengths and cache

    std::vector<float> scores_memory;
    Ints ids_memory, source_counts_memory, list_memory, counts_memory;

    template <class T>
    ConstTensor lists(std::vector<T>& memory, const std::vector<T>& values, DType dtype, T poison) const {
        const std::int64_t row_stride = width + padding, source_stride = rows * row_stride + source_padding;
        memory.assign(static_cast<std::size_t>(2 * list_guard + sources * source_stride), poison);
        for (std::int64_t i = 0; i < sources * rows * width; ++i)
            memory[list_guard + i / (rows * width) * source_stride + i / width % rows * row_stride + i % width] =
                values[i];
        Tensor tensor = dense(memory.data() + list_guard, dtype, {sources, rows, width});
        tensor.strides = {source_stride, row_stride, 1};
        return tensor;
    }

    MergeTopkArgs args() {
        MergeTopkArgs result;
        result.rows = rows;
        result.k = k;
        result.scores = lists(scores_memory, scores, DType::f32, std::numeric_limits<float>::infinity());
        result.ids = lists(ids_memory, ids, DType::i32, list_poison);
        if (source_counts) {
            const std::int64_t stride = rows * list_stride + source_padding;
            source_counts_memory.assign(static_cast<std::size_t>(2 * list_guard + sources * stride), list_poison);
            for (std::int64_t i = 0; i < sources * rows; ++i)
                source_counts_memory[list_guard + i / rows * stride + i % rows * list_stride] = (*source_counts)[i];
            result.source_counts = dense(static_cast<const std::int32_t*>(source_counts_memory.data()) + list_guard,
                                         DType::i32, {sources, rows});
            result.source_counts.strides = {stride, list_stride};
        }
        result.sharding = sharding;
        Conversion outputs;
        outputs.padding = padding;
        outputs.list_stride = list_stride;
        const Tensor list = Conversion::writable(outputs.matrix(list_memory, {}, rows, k), list_memory);
        result.counts = Conversion::writable(outputs.list(counts_memory, {}, rows), counts_memory);
        if (!to) {
            result.token_ids = list;
            return result;
        }
        result.slots = list;
        to->rows = rows;
        const ConvertArgs conversion = to->args();
        result.block_table = conversion.block_table;
        result.request_of_row = conversion.request_of_row;
        result.lengths = conversion.lengths;
        result.cache = conversion.cache;
        return result;
    }

    /// The k first of all ranks, by the definition.
    std::vector<Ints> selection() const {
        struct Candidate {
            float score;
            std::int32_t id;
        };
        const auto precedes = [](const Candidate& a, const Candidate& b) {
            if (std::isnan(a.score) != std::isnan(b.score)) return std::isnan(b.score);
            if (!std::isnan(a.score) && a.score != b.score) return a.score > b.score;
            return a.id < b.id;
        };
        std::vector<Ints> selected;
        for (std::int64_t row = 0; row < rows; ++row) {
            std::vector<Candidate> candidates;
            for (std::int64_t source = 0; source < sources; ++source)
                for (std::int64_t column = 0; column < width; ++column) {
                    if (source_counts && column >= (*source_counts)[source * rows + row]) break;
                    const std::int64_t i = (source * rows + row) * width + column;
                    if (ids[i] >= 0) candidates.push_back({scores[i], ids[i]});
                }
            std::stable_sort(candidates.begin(), candidates.end(), precedes);
            selected.emplace_back();
            for (std::size_t i = 0; i < candidates.size() && static_cast<std::int64_t>(i) < k; ++i)
                selected.back().push_back(candidates[i].id);
        }
        return selected;
    }

    /// What this rank's list must hold: token ids, or slots by the model of conversion.
    std::vector<Ints> expected() const {
        std::vector<Ints> kept = selection();
        for (Ints& row : kept)
            std::erase_if(row,
                          [&](std::int32_t id) { return id / sharding.interleave % sharding.world != sharding.rank; });
        if (!to) return kept;
        Conversion conversion = *to;
        conversion.rows = rows;
        conversion.width = k;
        conversion.sharding = sharding;
        conversion.ids.assign(static_cast<std::size_t>(rows * k), -1);
        for (std::int64_t row = 0; row < rows; ++row)
            std::copy(kept[row].begin(), kept[row].end(), conversion.ids.begin() + row * k);
        return model(conversion);
    }

    /// Merges on the tested device; what it gave and all that lies around is in list_memory and counts_memory.
    void run(MergeTopkArgs args) {
        if (!on_gpu()) return merge_topk(args);
        const Device device = tested_device().device;
        const Mirror scores_there(device, scores_memory), ids_there(device, ids_memory),
            source_counts_there(device, source_counts_memory), list_there(device, list_memory),
            counts_there(device, counts_memory);
        const Ints none;
        const Mirror table_there(device, to ? to->table_memory : none),
            requests_there(device, to ? to->requests_memory : none),
            lengths_there(device, to ? to->lengths_memory : none);
        for (const auto& [tensor, mirror] : {std::pair{&args.scores, &scores_there},
                                             {&args.ids, &ids_there},
                                             {&args.source_counts, &source_counts_there},
                                             {&args.block_table, &table_there},
                                             {&args.request_of_row, &requests_there},
                                             {&args.lengths, &lengths_there}})
            if (tensor->present()) *tensor = (*mirror)(*tensor);
        for (Tensor* list : {&args.token_ids, &args.slots})
            if (list->present()) *list = list_there(*list);
        args.counts = counts_there(args.counts);
        const harness::GpuStream stream(device);
        merge_topk(args, stream.stream());
        stream.synchronize();
        list_memory = list_there.download<std::int32_t>(list_memory.size());
        counts_memory = counts_there.download<std::int32_t>(counts_memory.size());
        EXPECT_EQ(ids_there.download<std::int32_t>(ids_memory.size()), ids_memory) << "an input was written";
    }

    /// What the memory of the outputs must hold, list_poison where nothing was declared.
    std::pair<Ints, Ints> expected_memory(const std::vector<Ints>& kept) const {
        Conversion outputs;
        outputs.padding = padding;
        outputs.list_stride = list_stride;
        Ints list(static_cast<std::size_t>(rows * k), -1), counts;
        for (std::int64_t row = 0; row < rows; ++row) {
            std::copy(kept[row].begin(), kept[row].end(), list.begin() + row * k);
            counts.push_back(static_cast<std::int32_t>(kept[row].size()));
        }
        std::pair<Ints, Ints> memory;
        outputs.matrix(memory.first, list, rows, k);
        outputs.list(memory.second, counts, rows);
        return memory;
    }

    /// Merges; then both outputs must be as they must, everything around them included.
    void expect_right(const std::string& what) {
        run(args());
        const auto [list, counts] = expected_memory(expected());
        EXPECT_TRUE(list_memory == list) << what << ": the list differs first at "
                                         << first_difference(list_memory, list);
        EXPECT_EQ(counts_memory, counts) << what;
    }
    static std::string first_difference(const Ints& got, const Ints& want) {
        if (got.size() != want.size()) return "its size";
        const auto [a, b] = std::mismatch(got.begin(), got.end(), want.begin());
        if (a == got.end()) return "nowhere";
        return std::to_string(a - got.begin() - list_guard) + ": " + std::to_string(*a) + " instead of " +
               std::to_string(*b);
    }

    /// The written part of a row.
    Ints written(std::int64_t row) const {
        const auto begin = list_memory.begin() + list_guard + row * (k + padding);
        return {begin, begin + counts_memory[list_guard + row * list_stride]};
    }
};

/// One row; the lists may have different lengths.
inline TopkMerge one_row(const std::vector<std::vector<std::pair<float, std::int32_t>>>& lists, std::int64_t k) {
    TopkMerge m;
    m.sources = static_cast<std::int64_t>(lists.size());
    m.k = k;
    m.width = 0;
    m.source_counts.emplace();
    for (const auto& list : lists) {
        m.width = std::max(m.width, static_cast<std::int64_t>(list.size()));
        m.source_counts->push_back(static_cast<std::int32_t>(list.size()));
    }
    for (const auto& list : lists)
        for (std::int64_t column = 0; column < m.width; ++column) {
            const bool exists = column < static_cast<std::int64_t>(list.size());
            m.scores.push_back(exists ? list[column].first : std::numeric_limits<float>::infinity());
            m.ids.push_back(exists ? list[column].second : 0);
        }
    return m;
}

enum class Scores : std::uint8_t { normal, close, few, equal, any_bits };

struct TopkSpec {
    std::int64_t sources = 8, rows = 2, width = 300, k = 256;
    Scores scores = Scores::normal;
    std::int64_t tokens = 1 << 20;
    bool counts = true;
    bool holes = true;  ///< some ids are negative
};

/// Ids are any, some of them in several lists.
inline TopkMerge random_topk(const TopkSpec& spec, Sharding sharding, std::mt19937_64& bits) {
    const auto below = [&](std::int64_t n) {
        return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(n));
    };
    TopkMerge m;
    m.sources = spec.sources;
    m.rows = spec.rows;
    m.width = spec.width;
    m.k = spec.k;
    m.sharding = sharding;
    std::normal_distribution<float> normal;
    const auto score = [&]() -> float {
        switch (spec.scores) {
            case Scores::normal: return normal(bits);
            case Scores::close: return 100.0F + 1e-4F * normal(bits);
            case Scores::few: return static_cast<float>(below(5) - 2) / 4 * (below(2) == 0 ? 1.0F : -1.0F);
            case Scores::equal: return -1.5F;
            case Scores::any_bits: return std::bit_cast<float>(static_cast<std::uint32_t>(bits()));
        }
        return 0;
    };
    for (std::int64_t i = 0; i < m.sources * m.rows * m.width; ++i) {
        m.scores.push_back(score());
        m.ids.push_back(static_cast<std::int32_t>(spec.holes && below(9) == 0 ? -1 - below(100) : below(spec.tokens)));
    }
    if (!spec.counts) return m;
    m.source_counts.emplace();
    for (std::int64_t i = 0; i < m.sources * m.rows; ++i) {
        const std::int64_t counts[] = {0, -4, m.width, m.width + 3, m.width, below(m.width + 1)};
        m.source_counts->push_back(static_cast<std::int32_t>(counts[below(6)]));
    }
    return m;
}

}  // namespace sparsemla::test
