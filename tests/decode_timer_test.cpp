// harness/decode_timer.h without a GPU: host memory plays it, and the cpu kernel decodes.
#include "harness/decode_timer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

#include "harness/record_pool.h"
#include "sparsemla/formats.h"

namespace sparsemla::harness {
namespace {

constexpr TimerSizes small{.records = 4096, .evict_bytes = 4096, .copy_bytes = 1 << 20};

ChainShape one_source() {
    return {.rows = 3, .heads = 5, .sources = {{.record = Record::fp8_576, .width = 100, .active = 70}}};
}

ChainShape two_sources() {
    return {.rows = 2,
            .heads = 16,
            .sources = {{.record = Record::fp8_512, .width = 64, .active = 64},
                        {.record = Record::fp8_512, .width = 130, .active = 129}},
            .sinks = true};
}

/// Rows of different numbers of columns.
ChainShape ragged() {
    return {.rows = 4,
            .heads = 3,
            .sources = {{.record = Record::fp8_576, .width = 90, .active = 90, .counts = {64, 1, 90, 3}}}};
}

Plan plan_of(const ChainShape& shape) { return make_plan(shape.problem({}), query_device({}), {}); }

std::vector<std::int32_t> list_of(const DecodeArgs& args, std::size_t source) {
    const ConstTensor& slots = args.sources[source].slots;
    const auto* data = static_cast<const std::int32_t*>(slots.data);
    return {data, data + slots.elements()};
}

TEST(RecordPool, HoldsNoNanAndReadsAllBeforeAnyAgain) {
    RecordPool pool({}, Record::fp8_512, 256);
    const CacheView cache = pool.cache();
    ASSERT_EQ(cache.num_slots(), 256);
    std::set<std::byte> codes;
    for (std::int64_t i = 0; i < cache_bytes(cache); ++i) {
        const auto code = static_cast<std::uint8_t>(cache.data[i]);
        ASSERT_LE(std::fabs(e4m3_to_float(code)), 2.0F);
        codes.insert(cache.data[i]);
    }
    EXPECT_EQ(codes.size(), 2U * 0x41);
    std::vector<std::int32_t> first(256), second(256);
    pool.take(std::span(first).subspan(0, 100));
    pool.take(std::span(first).subspan(100));
    pool.take(second);
    EXPECT_EQ(std::set<std::int32_t>(first.begin(), first.end()).size(), 256U);
    EXPECT_EQ(first, second);
    EXPECT_FALSE(std::is_sorted(first.begin(), first.end()));
    EXPECT_THROW(RecordPool({}, Record::fp8_512, 100), Error);
}

// Every call, the untimed one included, has a list of its own, of records that no other call reads.
TEST(DecodeTimer, CallsReadRecordsOfTheirOwn) {
    for (const ChainShape& shape : {one_source(), two_sources(), ragged()}) {
        DecodeTimer timer({}, small);
        timer.load(shape, 7);
        timer.cold(plan_of(shape), 1);
        std::multiset<std::int32_t> seen;
        std::size_t active = 0;
        for (int call = 0; call <= 7; ++call)
            for (std::size_t source = 0; source < shape.sources.size(); ++source) {
                const std::vector<std::int32_t> list = list_of(timer.args(call), source);
                ASSERT_EQ(list.size(), static_cast<std::size_t>(shape.rows * shape.sources[source].width));
                for (std::size_t i = 0; i < list.size(); ++i) {
                    const ChainSource& of = shape.sources[source];
                    const auto column = static_cast<std::int64_t>(i) % of.width;
                    const bool counted = column < of.count(static_cast<std::int64_t>(i) / of.width);
                    ASSERT_EQ(list[i] >= 0, counted);
                    if (counted) seen.insert(list[i]);
                    active += counted ? 1 : 0;
                }
            }
        EXPECT_EQ(std::set<std::int32_t>(seen.begin(), seen.end()).size(), active);
    }
}

// What conversion keeps of a call's token ids are the slots that the call has without, in any order, among ids of other
// ranks; and decode from ids runs.
TEST(DecodeTimer, TokenIdsNameTheSameRecords) {
    for (const std::int64_t world : {1, 8})
        for (const Conversion conversion : {Conversion::before, Conversion::within}) {
            ChainShape shape = one_source();
            DecodeTimer plain({}, small);
            plain.load(shape, 3);
            plain.cold(plan_of(shape), 1);
            shape.conversion = conversion;
            shape.world = world;
            DecodeTimer timer({}, small);
            timer.load(shape, 3);
            timer.cold(plan_of(shape), 1);
            for (int call = 0; call <= 3; ++call) {
                ConvertArgs indices = timer.indices(call);
                std::vector<std::int32_t> slots(300, -99), counts(3, -99);
                indices.slots = dense(slots.data(), DType::i32, {3, 100});
                indices.counts = dense(counts.data(), DType::i32, {3});
                convert_indices(indices);
                EXPECT_EQ(counts, (std::vector<std::int32_t>{70, 70, 70}));
                std::vector<std::int32_t> expected = list_of(plain.args(call), 0);
                for (auto* list : {&slots, &expected})
                    for (std::int64_t row = 0; row < 3; ++row)
                        std::sort(list->begin() + row * 100, list->begin() + (row + 1) * 100);
                EXPECT_EQ(slots, expected);
                EXPECT_EQ(timer.args(call).sources[0].slots.present(), conversion == Conversion::before);
            }
            timer.warm(plan_of(shape), 2, 1);
        }
}

TEST(DecodeTimer, OutputsAreThoseOfTheLastCall) {
    const ChainShape shape = two_sources();
    DecodeTimer timer({}, small);
    timer.load(shape, 3);
    const Plan plan = plan_of(shape);
    const Spread cold = timer.cold(plan, 4);
    EXPECT_GT(cold.p10, 0);
    EXPECT_LE(cold.p10, cold.median);
    EXPECT_LE(cold.median, cold.p90);
    const auto elements = static_cast<std::size_t>(shape.rows * shape.heads * value_dims);
    const auto outputs = [&](const DecodeArgs& args) {
        std::vector<std::uint16_t> held(elements);
        std::memcpy(held.data(), args.out.data, elements * sizeof(std::uint16_t));
        return held;
    };
    const std::vector<std::uint16_t> after_chain = outputs(timer.args(2));
    decode(plan, timer.args(2));
    EXPECT_EQ(outputs(timer.args(2)), after_chain);
    decode(plan, timer.args(1));
    EXPECT_NE(outputs(timer.args(1)), after_chain);
    timer.warm(plan, 5, 2);
    const std::vector<std::uint16_t> after_warm = outputs(timer.args(0));
    decode(plan, timer.args(0));
    EXPECT_EQ(outputs(timer.args(0)), after_warm);
}

TEST(DecodeTimer, StepsMayGrowAndShrink) {
    DecodeTimer timer({}, small);
    for (const std::int64_t rows : {1, 40, 2}) {
        ChainShape shape = one_source();
        shape.rows = rows;
        timer.load(shape, 2);
        EXPECT_NO_THROW(timer.cold(plan_of(shape), 1));
        EXPECT_NO_THROW(timer.warm(plan_of(shape), 2, 1));
    }
    EXPECT_THROW(timer.warm(plan_of(two_sources()), 2, 1), Error);
}

TEST(DecodeTimer, CountsBytesAndOperations) {
    EXPECT_EQ(one_source().record_bytes(), 3 * 70 * layout_of(Record::fp8_576).record_bytes);
    EXPECT_EQ(one_source().operations(), 2.0 * 3 * 5 * 70 * (576 + 512));
    EXPECT_EQ(two_sources().record_bytes(), 2 * (64 + 129) * 512);
    EXPECT_EQ(ragged().record_bytes(), 158 * 576);
    EXPECT_EQ(ragged().operations(), 2.0 * 158 * 3 * (576 + 512));
    const GpuLimits limits = DecodeTimer({}, small).measure_limits();
    EXPECT_GT(limits.copy_bytes_per_s, 0);
    EXPECT_GT(limits.empty_launch_us, 0);
}

}  // namespace
}  // namespace sparsemla::harness
