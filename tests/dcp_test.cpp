// Exchanges of decode context parallelism: a pairwise cover of ranks, interleave, heads, records and forms, each with
// rows that change from exchange to exchange; every result is the bits of the merged partial results, and within the
// DCP bound of the float64 oracle.
#include "tests/dcp.h"

#include "harness/pairwise.h"

namespace sparsemla::test {
namespace {

const std::vector<std::vector<std::int64_t>> shares = {{0, 5},       {0, 3, 6},       {0, 5, 16},
                                                       {0, 3, 5, 7}, {0, 2, 4, 6, 8}, {0, 1, 2, 3, 4, 5, 6, 7, 8}};
constexpr std::int64_t interleaves[] = {1, 16, 64};
constexpr Record records[] = {Record::fp8_576, Record::fp8_512, Record::fp8_ds_mla,
                              Record::bf16,    Record::fp8_v4,  Record::nvfp4_ds_mla};
constexpr std::int64_t widths[] = {1, 17, 130};

/// Combination `c` of the cover.
DcpSpec spec_of(const std::vector<int>& c, std::uint64_t seed) {
    const Record record = records[c[2]];
    const bool takes_codes = record != Record::bf16;
    return {.rows = 3 + 2 * c[3],
            .head_offset = shares[static_cast<std::size_t>(c[0])],
            .interleave = interleaves[c[1]],
            .width = widths[c[3]],
            .record = record,
            .query_dtype = c[4] == 0 && takes_codes ? DType::f8_e4m3 : DType::bf16,
            .sinks = c[5] != 0,
            .second_source = c[6] != 0,
            .by_calls = c[7] != 0,
            .bf16_query = c[8] != 0,
            .lse_base = c[5] != 0 ? LseBase::two : LseBase::natural,
            .out_dtype = c[8] != 0 ? DType::f32 : DType::bf16,
            .seed = seed};
}

TEST(Dcp, EveryExchangeGivesTheBitsOfTheMergedPartials) {
    std::uint64_t seed = 0;
    const auto cover = harness::pairwise_cover({6, 3, 6, 3, 2, 2, 2, 2, 2});
    const int exchanges = wanted_exchanges(1000) / static_cast<int>(cover.size()) + 1;
    for (const std::vector<int>& combination : cover) {
        DcpStep step(spec_of(combination, ++seed));
        step.expect_run(exchanges, seed);
        step.expect_oracle();
    }
}

TEST(Dcp, ManyExchangesOfOneGroup) {
    for (int world : {2, 8}) {
        DcpStep step({.rows = 8, .head_offset = equal_heads(world, 2), .width = 24, .seed = 40});
        step.expect_run(wanted_exchanges(1000));
        EXPECT_EQ(status(step.group().mailbox(0)).exchanges, static_cast<std::uint32_t>(wanted_exchanges(1000)));
    }
}

// A rank without records of a row sends nothing but that (B073): interleave 64 and few tokens leave most ranks empty.
TEST(K27_RankLiveness, RanksThatOwnNothingStillTakePart) {
    DcpStep step({.head_offset = equal_heads(8, 1), .interleave = 64, .width = 8, .seed = 3});
    std::int64_t empty = 0;
    for (const harness::Shard& shard : step.group().shards())
        for (std::int64_t row = 0; row < step.step().rows; ++row)
            empty += reinterpret_cast<const std::int32_t*>(shard.sources[0].counts.bytes.get())[row] == 0 ? 1 : 0;
    EXPECT_GT(empty, 8) << "the test needs ranks without records";
    step.expect_run(200);
    step.expect_oracle();
}

// An exchange of no rows is none (B060): the next one is right.
TEST(K20_ZeroSize, NoRowsNoExchange) {
    DcpStep step({});
    const std::vector<harness::DcpWindow> windows = {{0, 2}, {0, 0}, {1, 3}, {0, 0}, {2, 1}};
    EXPECT_EQ(step.group().run(windows), "");
    for (int rank = 0; rank < step.group().world(); ++rank) EXPECT_EQ(status(step.group().mailbox(rank)).exchanges, 3U);
}

// Late ranks, at every stage (B062 to B066): every result is of its own exchange.
TEST(K26_MailboxProtocol, LateRanksAtEveryStage) {
    for (DcpStage stage : {DcpStage::gather, DcpStage::decode, DcpStage::push, DcpStage::merge})
        for (int late = 0; late < 3; ++late) {
            DcpStep step({.rows = 6, .head_offset = {0, 2, 3, 5}, .width = 20, .by_calls = true, .seed = 5});
            step.group().mailbox(late).delay = {.stage = stage, .us = 300};
            EXPECT_EQ(step.group().run(step.windows(40)), "")
                << "rank " << late << " late at " << name(stage) << ", " << step.text();
        }
}

}  // namespace
}  // namespace sparsemla::test
