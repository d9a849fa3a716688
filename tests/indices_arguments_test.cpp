// Which arguments convert_indices takes: strides, empty tensors, many rows, and every refusal.
#include <gtest/gtest.h>

#include <climits>
#include <functional>
#include <string>
#include <vector>

#include "tests/conversion.h"

namespace sparsemla::test {
namespace {

TEST(K12_Strides, TablesCutFromAPaddedAllocation) {
    Conversion c;
    c.rows = c.requests = 3;
    c.width = 2;
    c.max_pages = 17;
    c.cache = {.pages = 51, .page_size = 8};
    c.ids = {0, 135, 1, 134, 2, 133};
    c.request_of_row = {2, 0, 1};
    c.table = iota(0, 51);
    for (std::int64_t padding : {0, 1, 495}) {
        c.padding = padding;
        c.list_stride = padding + 1;
        c.expect(model(c), "padding " + std::to_string(padding));
    }
    ConvertArgs args = c.args();
    Ints big(3 * 512, list_poison);
    for (int i = 0; i < 51; ++i) big[i / 17 * 512 + 3 + i % 17] = i;
    args.block_table = columns(dense(static_cast<const std::int32_t*>(big.data()), DType::i32, {3, 512}), 3, 17);
    Conversion expected = c;
    convert_indices(args);
    convert_indices(expected.args());
    EXPECT_EQ(c.slots_memory, expected.slots_memory);
    EXPECT_EQ(c.counts_memory, expected.counts_memory);
}

TEST(K12_Strides, StridesOfSizeOneDimensionsAreIgnored) {
    Conversion c = single({5}, {1}, {.pages = 2, .page_size = 8});
    c.lengths = Ints{8};
    ConvertArgs args = c.args();
    for (std::int64_t stride : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{LLONG_MAX}, std::int64_t{LLONG_MIN}}) {
        for (ConstTensor* t : {&args.token_ids, &args.block_table, &args.request_of_row, &args.lengths})
            t->strides.fill(stride);
        args.slots.strides.fill(stride);
        args.counts.strides.fill(stride);
        c.slots_memory[list_guard] = list_poison;
        convert_indices(args);
        EXPECT_EQ(c.slots_memory[list_guard], 13) << "stride " << stride;
        EXPECT_EQ(c.counts_memory[list_guard], 1);
    }
}

TEST(K12_Strides, RowsBeyondTheListAreUntouched) {
    Conversion c = single({5, 6}, {1}, {.pages = 2, .page_size = 8});
    ConvertArgs args = c.args();
    Ints slots(20, list_poison), counts(5, list_poison), requests(5, 0);
    args.slots = dense(slots.data(), DType::i32, {5, 2});
    args.slots.strides[0] = 4;
    args.counts = dense(counts.data(), DType::i32, {5});
    args.request_of_row = dense(static_cast<const std::int32_t*>(requests.data()), DType::i32, {5});
    convert_indices(args);
    Ints expected_slots(20, list_poison), expected_counts(5, list_poison);
    expected_slots[0] = 13;
    expected_slots[1] = 14;
    expected_counts[0] = 2;
    EXPECT_EQ(slots, expected_slots);
    EXPECT_EQ(counts, expected_counts);
}

TEST(K20_ZeroSize, NothingToConvert) {
    const CacheView cache{.pages = 2, .page_size = 8};
    Conversion no_rows = single({}, {1}, cache);
    no_rows.rows = 0;
    no_rows.width = 4;
    no_rows.request_of_row = {};
    no_rows.expect({}, "rows 0");
    single({}, {1}, cache).expect({{}}, "width 0");
    single({0, 1}, {}, cache).expect({{}}, "max_pages 0");
    single({0, 1}, {1}, {.pages = 0, .page_size = 8}).expect({{}}, "a cache of no pages");
    Conversion no_requests = single({0, 1}, {}, cache);
    no_requests.requests = 0;
    no_requests.max_pages = 3;
    no_requests.lengths = Ints{};
    no_requests.expect({{}}, "requests 0");
}

TEST(K20_ZeroSize, EmptyTensorsMayHaveNullPointersAndAnyStrides) {
    for (int empty = 0; empty < 3; ++empty) {
        Conversion c = single({0, 1}, {1}, {.pages = 2, .page_size = 8});
        ConvertArgs args = c.args();
        auto make_empty = [](auto& tensor, int dimension) {
            tensor.data = nullptr;
            tensor.shape[dimension] = 0;
            tensor.strides.fill(LLONG_MAX);
        };
        if (empty == 0) make_empty(args.token_ids, 1), make_empty(args.slots, 1);
        if (empty == 1) make_empty(args.block_table, 1);
        if (empty == 2) make_empty(args.block_table, 0);
        convert_indices(args);
        EXPECT_EQ(c.counts_memory[list_guard], 0) << empty;
    }
}

TEST(K20_LaunchLimit, ManyRows) {
    for (std::int64_t rows : {65535, 65536, 70000}) {
        Conversion c = single({}, {3, 2}, {.pages = 4, .page_size = 16});
        c.rows = rows;
        c.width = 1;
        c.request_of_row.assign(static_cast<std::size_t>(rows), 0);
        for (std::int64_t row = 0; row < rows; ++row) c.ids.push_back(static_cast<std::int32_t>(row % 33));
        c.expect(model(c), std::to_string(rows) + " rows");
    }
}

struct Fault {
    const char* argument;
    std::function<void(ConvertArgs&)> make;
    ErrorKind kind = ErrorKind::invalid_argument;
};

const std::vector<Fault>& faults() {
    static const std::vector<Fault> list = {
        {"token_ids", [](ConvertArgs& a) { a.token_ids = {}; }},
        {"token_ids", [](ConvertArgs& a) { a.token_ids.dtype = DType::i64; }},
        {"token_ids", [](ConvertArgs& a) { a.token_ids.rank = 1; }},
        {"token_ids", [](ConvertArgs& a) { a.token_ids.data = nullptr; }},
        {"token_ids", [](ConvertArgs& a) { a.token_ids.strides[1] = 2; }},
        {"token_ids", [](ConvertArgs& a) { a.token_ids.strides[0] = -4; }},
        {"token_ids", [](ConvertArgs& a) { a.token_ids.shape[0] = -1; }},
        {"block_table",  // not where token_ids is
         [](ConvertArgs& a) {
             a.token_ids.device = {Device::Kind::cuda, 0};
         }},
        {"block_table", [](ConvertArgs& a) { a.block_table.strides[1] = 2; }},
        {"block_table",
         [](ConvertArgs& a) {
             a.block_table.device = {Device::Kind::cuda, 1};
         }},
        {"request_of_row", [](ConvertArgs& a) { a.request_of_row.shape[0] = 1; }},
        {"request_of_row", [](ConvertArgs& a) { a.request_of_row = {}; }},
        {"lengths", [](ConvertArgs& a) { a.lengths.shape[0] = 1; }},
        {"lengths", [](ConvertArgs& a) { a.lengths.dtype = DType::f32; }},
        {"slots", [](ConvertArgs& a) { a.slots = {}; }},
        {"slots", [](ConvertArgs& a) { a.slots.shape[1] = 2; }},
        {"slots", [](ConvertArgs& a) { a.slots.shape[0] = 1; }},
        {"slots", [](ConvertArgs& a) { a.slots.strides[0] = 2; }},
        {"slots", [](ConvertArgs& a) { a.slots.strides[0] = 0; }},
        {"slots", [](ConvertArgs& a) { a.slots.strides[0] = LLONG_MAX / 2; }},
        {"slots", [](ConvertArgs& a) { a.slots.data = static_cast<char*>(a.slots.data) + 2; }},
        {"slots", [](ConvertArgs& a) { a.slots.data = const_cast<void*>(a.token_ids.data); }},
        {"slots", [](ConvertArgs& a) { a.slots.data = const_cast<void*>(a.block_table.data); }},
        {"counts", [](ConvertArgs& a) { a.counts.data = const_cast<void*>(a.request_of_row.data); }},
        {"counts", [](ConvertArgs& a) { a.counts.data = const_cast<void*>(a.lengths.data); }},
        {"counts", [](ConvertArgs& a) { a.counts.data = a.slots.data; }},
        {"counts", [](ConvertArgs& a) { a.counts.strides[0] = 0; }},
        {"counts", [](ConvertArgs& a) { a.counts.shape[0] = 1; }},
        {"sharding.world", [](ConvertArgs& a) { a.sharding.world = 0; }},
        {"sharding.world", [](ConvertArgs& a) { a.sharding.world = std::int64_t{1} << 31; }},
        {"sharding.rank", [](ConvertArgs& a) { a.sharding.rank = -1; }},
        {"sharding.rank", [](ConvertArgs& a) { a.sharding.rank = a.sharding.world; }},
        {"sharding.interleave", [](ConvertArgs& a) { a.sharding.interleave = 0; }},
        {"sharding.interleave", [](ConvertArgs& a) { a.sharding.interleave = -4; }},
        {"sharding.interleave", [](ConvertArgs& a) { a.sharding.interleave = 3; }},
        {"sharding.interleave", [](ConvertArgs& a) { a.sharding.interleave = 16; }},
        {"cache.page_size", [](ConvertArgs& a) { a.cache.page_size = 0; }},
        {"cache.page_size", [](ConvertArgs& a) { a.cache.page_size = LLONG_MIN; }},
        {"cache.slots_per_page", [](ConvertArgs& a) { a.cache.slots_per_page = 7; }},
        {"cache.slots_per_page", [](ConvertArgs& a) { a.cache.slots_per_page = LLONG_MAX; }},
        {"cache.pages", [](ConvertArgs& a) { a.cache = {.pages = 33554432, .page_size = 64}; }},  // 2^31 slots
        {"cache.pages", [](ConvertArgs& a) { a.cache.pages = -1; }},
        {"cache.pages", [](ConvertArgs& a) { a.cache.pages = LLONG_MAX; }},
    };
    return list;
}

ErrorKind refusal_of(const ConvertArgs& args, std::string& argument) {
    try {
        convert_indices(args);
    } catch (const Error& error) {
        argument = error.argument();
        return error.kind();
    }
    ADD_FAILURE() << "accepted";
    return ErrorKind::io;
}

TEST(K30_Arguments, EveryFaultIsRefusedByNameAndNothingIsWritten) {
    for (std::size_t i = 0; i < faults().size(); ++i) {
        Conversion c;
        c.rows = 2;
        c.width = 3;
        c.requests = 2;
        c.max_pages = 2;
        c.cache = {.pages = 4, .page_size = 8};
        c.sharding = {2, 1, 4};
        c.ids = iota(0, 6);
        c.table = {0, 1, 2, 3};
        c.request_of_row = {0, 1};
        c.lengths = Ints{9, 9};
        c.list_stride = 1;
        ConvertArgs args = c.args();
        faults()[i].make(args);
        const Conversion before = c;
        std::string argument;
        EXPECT_EQ(refusal_of(args, argument), faults()[i].kind) << "fault " << i << " in " << faults()[i].argument;
        EXPECT_EQ(argument, faults()[i].argument) << "fault " << i;
        EXPECT_EQ(c.slots_memory, before.slots_memory) << "fault " << i;
        EXPECT_EQ(c.counts_memory, before.counts_memory) << "fault " << i;
        EXPECT_EQ(c.ids_memory, before.ids_memory) << "fault " << i;
    }
}

TEST(K30_Arguments, NeighbouringColumnsOfOneAllocationDoNotOverlap) {
    Conversion c = single(iota(0, 4), {1}, {.pages = 2, .page_size = 8});
    c.rows = 3;
    c.ids = {0, 1, 2, 3, 4, 5, 6, 7, 0, 0, -1, 1};
    c.request_of_row = {0, 0, 0};
    ConvertArgs args = c.args();
    Ints shared(3 * 9, list_poison);
    for (int i = 0; i < 12; ++i) shared[i / 4 * 9 + i % 4] = c.ids[i];
    Tensor all = dense(shared.data(), DType::i32, {3, 9});
    args.token_ids = columns(all, 0, 4);
    args.slots = columns(all, 4, 4);
    args.counts = {shared.data() + 8, DType::i32, {}, 1, {3}, {9}};
    convert_indices(args);
    EXPECT_EQ(shared, (Ints{0, 1, 2,  3, 8,  9,  10, 11, 4,  //
                            4, 5, 6,  7, 12, 13, 14, 15, 4,  //
                            0, 0, -1, 1, 8,  8,  9,  -1, 3}));
}

}  // namespace
}  // namespace sparsemla::test
