// Which arguments merge_topk takes: sizes of zero, strides that mean nothing, and every refusal. On a CPU.
#include <gtest/gtest.h>

#include <climits>
#include <functional>
#include <string>
#include <vector>

#include "tests/topk_merge.h"

namespace sparsemla::test {
namespace {

/// Two sources, two rows, three columns, k of four; everything optional is there.
TopkMerge small(bool to_slots) {
    TopkMerge m;
    m.sources = m.rows = 2;
    m.width = 3;
    m.k = 4;
    m.list_stride = 1;
    m.sharding = {2, 1, 4};
    m.scores = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    m.ids = iota(0, 12);
    m.source_counts = Ints{3, 2, 1, 3};
    if (!to_slots) return m;
    m.to.emplace();
    m.to->requests = m.to->max_pages = 2;
    m.to->cache = {.pages = 4, .page_size = 8};
    m.to->table = {0, 1, 2, 3};
    m.to->request_of_row = {0, 1};
    m.to->lengths = Ints{9, 9};
    return m;
}

TEST(K20_ZeroSize, EmptyTopkMergesGiveEmptyLists) {
    for (const bool to_slots : {false, true})
        for (int empty = 0; empty < 3; ++empty) {
            TopkMerge m = small(to_slots);
            if (empty == 0) m.k = 0;
            if (empty == 1) m.width = 0, m.scores.clear(), m.ids.clear();
            if (empty == 2) m.rows = 0, m.scores.clear(), m.ids.clear(), m.source_counts->clear();
            if (empty == 2 && to_slots) m.to->request_of_row.clear();
            m.expect_right(std::to_string(empty));
            if (empty < 2) {
                EXPECT_EQ(m.counts_memory[list_guard], 0);
            }
        }
}

TEST(K20_ZeroSize, EmptyTopkTensorsMayHaveNullPointersAndAnyStrides) {
    const auto make_empty = [](auto& tensor, int dimension) {
        tensor.data = nullptr;
        tensor.shape[dimension] = 0;
        tensor.strides.fill(LLONG_MAX);
    };
    for (const bool to_slots : {false, true})
        for (const bool no_k : {false, true}) {
            TopkMerge m = small(to_slots);
            MergeTopkArgs args = m.args();
            if (no_k) {
                args.k = 0;
                make_empty(to_slots ? args.slots : args.token_ids, 1);
            } else {
                make_empty(args.scores, 2);
                make_empty(args.ids, 2);
            }
            merge_topk(args);
            EXPECT_EQ(m.counts_memory[list_guard], 0);
            EXPECT_EQ(m.counts_memory[list_guard + 1], 0);
        }
}

TEST(K12_Strides, StridesOfSizeOneDimensionsOfATopkMergeAreIgnored) {
    TopkMerge m = one_row({{{1.0F, 5}}}, 1);
    m.to = single({}, {1}, {.pages = 2, .page_size = 8});
    MergeTopkArgs args = m.args();
    for (std::int64_t stride : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{LLONG_MAX}, std::int64_t{LLONG_MIN}}) {
        for (ConstTensor* t : {&args.scores, &args.ids, &args.source_counts, &args.block_table, &args.request_of_row})
            t->strides.fill(stride);
        args.slots.strides.fill(stride);
        args.counts.strides.fill(stride);
        m.list_memory[list_guard] = list_poison;
        merge_topk(args);
        EXPECT_EQ(m.list_memory[list_guard], 13) << "stride " << stride;
        EXPECT_EQ(m.counts_memory[list_guard], 1);
    }
}

TEST(K12_Strides, ATopkMergeTakesTheFirstRowsOfLargerTensors) {
    for (const bool to_slots : {false, true}) {
        TopkMerge m = small(to_slots);
        TopkMerge first = m;
        MergeTopkArgs args = m.args();
        args.rows = 1;
        merge_topk(args);
        const std::vector<Ints> kept = first.expected();
        const auto [list, counts] = first.expected_memory(kept);
        const std::int64_t row_end = list_guard + m.k;
        EXPECT_EQ(Ints(m.list_memory.begin(), m.list_memory.begin() + row_end),
                  Ints(list.begin(), list.begin() + row_end));
        EXPECT_EQ(Ints(m.list_memory.begin() + row_end, m.list_memory.end()),
                  Ints(m.list_memory.size() - static_cast<std::size_t>(row_end), list_poison));
        EXPECT_EQ(m.counts_memory[list_guard], counts[list_guard]);
        EXPECT_EQ(m.counts_memory[list_guard + 1], list_poison);
    }
}

TEST(K12_Strides, OneListMayServeAsEverySource) {
    TopkMerge m = one_row({{{1.0F, 5}, {2.0F, 6}}}, 4);
    MergeTopkArgs args = m.args();
    for (ConstTensor* t : {&args.scores, &args.ids, &args.source_counts}) {
        t->shape[0] = 3;
        t->strides[0] = 0;
    }
    merge_topk(args);
    EXPECT_EQ(m.written(0), (Ints{6, 6, 6, 5}));
}

struct Fault {
    const char* argument;
    std::function<void(MergeTopkArgs&)> make;
    ErrorKind kind = ErrorKind::invalid_argument;
};

void* writable(const ConstTensor& tensor) { return const_cast<void*>(tensor.data); }

/// Of either form; `list` is its output.
std::vector<Fault> common_faults(bool to_slots, Tensor MergeTopkArgs::*list) {
    const char* name = to_slots ? "slots" : "token_ids";
    return {
        {"rows", [](MergeTopkArgs& a) { a.rows = -1; }},
        {"scores", [](MergeTopkArgs& a) { a.rows = 3; }},
        {"k", [](MergeTopkArgs& a) { a.k = -1; }},
        {"k", [](MergeTopkArgs& a) { a.k = std::int64_t{1} << 31; }},
        {name, [](MergeTopkArgs& a) { a.k = 3; }},
        {"scores", [](MergeTopkArgs& a) { a.scores = {}; }},
        {"scores", [](MergeTopkArgs& a) { a.scores.dtype = DType::bf16; }},
        {"scores", [](MergeTopkArgs& a) { a.scores.rank = 2; }},
        {"scores", [](MergeTopkArgs& a) { a.scores.data = nullptr; }},
        {"scores", [](MergeTopkArgs& a) { a.scores.shape[0] = 0; }},
        {"scores", [](MergeTopkArgs& a) { a.scores.shape[1] = 1; }},
        {"scores", [](MergeTopkArgs& a) { a.scores.strides[2] = 2; }},
        {"scores", [](MergeTopkArgs& a) { a.scores.strides[0] = -6; }},
        {"scores", [](MergeTopkArgs& a) { a.scores.strides[1] = LLONG_MAX / 2; }},
        {"scores", [](MergeTopkArgs& a) { a.scores.data = static_cast<const char*>(a.scores.data) + 2; }},
        {"scores",  // 3 * 2^30 columns
         [](MergeTopkArgs& a) {
             a.scores.shape[0] = std::int64_t{1} << 30;
             a.scores.strides[0] = 0;
         }},
        {"ids", [](MergeTopkArgs& a) { a.ids = {}; }},
        {"ids", [](MergeTopkArgs& a) { a.ids.dtype = DType::i64; }},
        {"ids", [](MergeTopkArgs& a) { a.ids.shape[0] = 3; }},
        {"ids", [](MergeTopkArgs& a) { a.ids.shape[1] = 1; }},
        {"ids", [](MergeTopkArgs& a) { a.ids.shape[2] = 2; }},
        {"ids", [](MergeTopkArgs& a) { a.ids.strides[2] = 3; }},
        {"ids",
         [](MergeTopkArgs& a) {
             a.scores.device = {Device::Kind::cuda, 0};
         }},
        {"source_counts", [](MergeTopkArgs& a) { a.source_counts.dtype = DType::i64; }},
        {"source_counts", [](MergeTopkArgs& a) { a.source_counts.shape[0] = 1; }},
        {"source_counts", [](MergeTopkArgs& a) { a.source_counts.shape[1] = 1; }},
        {"source_counts", [](MergeTopkArgs& a) { a.source_counts.rank = 1; }},
        {"sharding.world", [](MergeTopkArgs& a) { a.sharding.world = 0; }},
        {"sharding.world", [](MergeTopkArgs& a) { a.sharding.world = std::int64_t{1} << 31; }},
        {"sharding.rank", [](MergeTopkArgs& a) { a.sharding.rank = -1; }},
        {"sharding.rank", [](MergeTopkArgs& a) { a.sharding.rank = 2; }},
        {"sharding.interleave", [](MergeTopkArgs& a) { a.sharding.interleave = 0; }},
        {"sharding.interleave", [](MergeTopkArgs& a) { a.sharding.interleave = std::int64_t{1} << 31; }},
        {"slots",
         [](MergeTopkArgs& a) {
             a.slots = {};
             a.token_ids = {};
         }},
        {"slots",
         [=](MergeTopkArgs& a) {
             a.slots = a.*list;
             a.token_ids = a.*list;
         }},
        {name, [=](MergeTopkArgs& a) { (a.*list).dtype = DType::i64; }},
        {name, [=](MergeTopkArgs& a) { (a.*list).shape[0] = 1; }},
        {name, [=](MergeTopkArgs& a) { (a.*list).shape[1] = 5; }},
        {name, [=](MergeTopkArgs& a) { (a.*list).strides[0] = 3; }},
        {name, [=](MergeTopkArgs& a) { (a.*list).strides[1] = 2; }},
        {name, [=](MergeTopkArgs& a) { (a.*list).data = writable(a.scores); }},
        {name, [=](MergeTopkArgs& a) { (a.*list).data = writable(a.ids); }},
        {name, [=](MergeTopkArgs& a) { (a.*list).data = writable(a.source_counts); }},
        {name,
         [=](MergeTopkArgs& a) {
             (a.*list).device = {Device::Kind::cuda, 0};
         }},
        {"counts", [](MergeTopkArgs& a) { a.counts = {}; }},
        {"counts", [](MergeTopkArgs& a) { a.counts.shape[0] = 1; }},
        {"counts", [](MergeTopkArgs& a) { a.counts.strides[0] = 0; }},
        {"counts", [](MergeTopkArgs& a) { a.counts.data = writable(a.source_counts); }},
        {"counts", [=](MergeTopkArgs& a) { a.counts.data = (a.*list).data; }},
    };
}

std::vector<Fault> faults_of_ids() {
    return {
        {"block_table", [](MergeTopkArgs& a) { a.block_table = a.token_ids; }},
        {"request_of_row", [](MergeTopkArgs& a) { a.request_of_row = a.counts; }},
        {"lengths", [](MergeTopkArgs& a) { a.lengths = a.counts; }},
    };
}

std::vector<Fault> faults_of_slots() {
    return {
        {"block_table", [](MergeTopkArgs& a) { a.block_table = {}; }},
        {"block_table", [](MergeTopkArgs& a) { a.block_table.strides[1] = 2; }},
        {"request_of_row", [](MergeTopkArgs& a) { a.request_of_row = {}; }},
        {"request_of_row", [](MergeTopkArgs& a) { a.request_of_row.shape[0] = 1; }},
        {"lengths", [](MergeTopkArgs& a) { a.lengths.shape[0] = 1; }},
        {"lengths",
         [](MergeTopkArgs& a) {
             a.lengths.device = {Device::Kind::cuda, 0};
         }},
        {"slots", [](MergeTopkArgs& a) { a.slots.data = writable(a.block_table); }},
        {"counts", [](MergeTopkArgs& a) { a.counts.data = writable(a.request_of_row); }},
        {"counts", [](MergeTopkArgs& a) { a.counts.data = writable(a.lengths); }},
        {"sharding.interleave", [](MergeTopkArgs& a) { a.sharding.interleave = 3; }},
        {"cache.page_size", [](MergeTopkArgs& a) { a.cache.page_size = 0; }},
        {"cache.slots_per_page", [](MergeTopkArgs& a) { a.cache.slots_per_page = 7; }},
        {"cache.pages", [](MergeTopkArgs& a) { a.cache.pages = -1; }},
    };
}

void expect_refused(const MergeTopkArgs& args, const Fault& fault, const std::string& what) {
    try {
        merge_topk(args);
        ADD_FAILURE() << what << ": accepted";
    } catch (const Error& error) {
        EXPECT_EQ(error.argument(), fault.argument) << what << ": " << error.what();
        EXPECT_EQ(error.kind(), fault.kind) << what << ": " << error.what();
    }
}

TEST(K30_Arguments, EveryFaultOfATopkMergeIsRefusedByNameAndNothingIsWritten) {
    for (const bool to_slots : {false, true}) {
        std::vector<Fault> faults =
            common_faults(to_slots, to_slots ? &MergeTopkArgs::slots : &MergeTopkArgs::token_ids);
        for (Fault& fault : to_slots ? faults_of_slots() : faults_of_ids()) faults.push_back(std::move(fault));
        for (std::size_t i = 0; i < faults.size(); ++i) {
            TopkMerge m = small(to_slots);
            MergeTopkArgs args = m.args();
            faults[i].make(args);
            const TopkMerge before = m;
            expect_refused(args, faults[i], (to_slots ? "slots, fault " : "ids, fault ") + std::to_string(i));
            EXPECT_EQ(m.list_memory, before.list_memory) << i;
            EXPECT_EQ(m.counts_memory, before.counts_memory) << i;
            EXPECT_EQ(m.ids_memory, before.ids_memory) << i;
        }
    }
}

// Sizes are looked at before any GPU is: addresses of the host serve.
TEST(K30_Arguments, ALargerKThanAGpuSortsIsRefusedThere) {
    TopkMerge m = one_row({{{1.0F, 5}, {2.0F, 6}}}, max_gpu_topk + 1);
    MergeTopkArgs args = m.args();
    merge_topk(args);
    EXPECT_EQ(m.written(0), (Ints{6, 5}));
    for (ConstTensor* t : {&args.scores, &args.ids, &args.source_counts}) t->device = {Device::Kind::cuda, 0};
    args.token_ids.device = args.counts.device = {Device::Kind::cuda, 0};
    expect_refused(args, {"k", {}, ErrorKind::unsupported}, "one more");
}

TEST(K30_Arguments, TopkListsBesideEachOtherDoNotOverlap) {
    Ints shared = {5, 3, 0, 0, 0, 1, 4, 0, 0, 0};  // a row: two ids, two of the output, its count
    const std::vector<float> scores = {1, 2, 2, 1};
    const Tensor all = dense(shared.data(), DType::i32, {2, 5});
    MergeTopkArgs args{.rows = 2, .k = 2};
    args.scores = dense(scores.data(), DType::f32, {1, 2, 2});
    args.ids = {shared.data(), DType::i32, {}, 3, {1, 2, 2}, {0, 5, 1}};
    args.token_ids = columns(all, 2, 2);
    args.counts = {shared.data() + 4, DType::i32, {}, 1, {2}, {5}};
    merge_topk(args);
    EXPECT_EQ(shared, (Ints{5, 3, 3, 5, 2, 1, 4, 1, 4, 2}));
}

}  // namespace
}  // namespace sparsemla::test
