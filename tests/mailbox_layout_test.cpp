// Where things lie in a mailbox: planes of the specified sizes, apart and aligned; which shapes there are; the number
// by which ranks see that they disagree; the texts of a mailbox's state.
#include <gtest/gtest.h>

#include <climits>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "sparsemla/mailbox.h"

namespace sparsemla::test {
namespace {

constexpr std::int64_t bytes_of_values = value_dims * 2;

std::vector<std::int64_t> equal(int world, std::int64_t heads) { return equal_shares(world, heads, 1).head_offset; }

/// Shares of heads, among them 7 ranks of 3, 5 + 11, 8 of 12 and 2 of 48.
const std::vector<std::vector<std::int64_t>>& shares() {
    static const std::vector<std::vector<std::int64_t>> all = {{0, 1},       equal(1, 128), {0, 5, 16},    {0, 3, 5, 7},
                                                               equal(7, 3),  equal(12, 8),  equal(8, 12),  equal(2, 48),
                                                               equal(16, 1), equal(16, 8),  {0, 127, 128}, {0, 1, 128}};
    return all;
}

std::vector<DcpShape> shapes() {
    std::vector<DcpShape> all;
    for (const std::vector<std::int64_t>& offset : shares())
        for (std::int64_t rows : {1, 3, 64})
            for (std::int64_t padded : {0, 128, 2048})
                for (DType dtype : {DType::f8_e4m3, DType::bf16})
                    for (std::int64_t d_qk : {576, 512})
                        all.push_back({.rows = rows,
                                       .head_offset = offset,
                                       .padded_heads = padded,
                                       .query_dtype = dtype,
                                       .d_qk = d_qk});
    return all;
}

std::string text(const DcpShape& shape) {
    return std::to_string(shape.head_offset.size() - 1) + " ranks, " + std::to_string(shape.head_offset.back()) +
           " heads padded to " + std::to_string(shape.padded_heads) + ", rows " + std::to_string(shape.rows) + ", " +
           std::string(name(shape.query_dtype)) + " of " + std::to_string(shape.d_qk);
}

// The planes of the specification: query [2][cap, padded, query_bytes], values BF16 [2][N][cap][heads_max][512],
// lses FP32 [2][N][cap][heads_max].
TEST(MailboxLayout, PlanesAreAsSpecifiedAndApart) {
    for (const DcpShape& shape : shapes()) {
        const MailboxLayout layout = mailbox_layout(shape);
        const auto world = static_cast<std::int64_t>(shape.head_offset.size()) - 1;
        std::int64_t most = 0;
        for (int rank = 0; rank < world; ++rank) {
            EXPECT_EQ(layout.heads_of(rank), shape.head_offset[rank + 1] - shape.head_offset[rank]);
            most = std::max(most, layout.heads_of(rank));
        }
        const std::string what = text(shape);
        ASSERT_EQ(layout.world, world) << what;
        ASSERT_EQ(layout.rows, shape.rows) << what;
        ASSERT_EQ(layout.heads, shape.head_offset.back()) << what;
        ASSERT_EQ(layout.padded_heads, shape.padded_heads == 0 ? layout.heads : shape.padded_heads) << what;
        ASSERT_EQ(layout.most_heads, most) << what;

        struct Plane {
            std::int64_t begin, parity_bytes, needed;
        };
        const std::int64_t pieces = world * shape.rows * most;
        const Plane planes[] = {{layout.query, layout.query_parity_bytes,
                                 shape.rows * layout.padded_heads * shape.d_qk * size_bytes(shape.query_dtype)},
                                {layout.values, layout.values_parity_bytes, pieces * bytes_of_values},
                                {layout.lses, layout.lses_parity_bytes, pieces * 4}};
        std::int64_t end = 0;
        for (const Plane& plane : planes) {
            ASSERT_GE(plane.begin, end) << what;
            ASSERT_EQ(plane.begin % 16, 0) << what;
            ASSERT_EQ(plane.parity_bytes % 16, 0) << what;
            ASSERT_GE(plane.parity_bytes, plane.needed) << what;
            ASSERT_LT(plane.parity_bytes, plane.needed + 256) << what << ": no more than alignment takes";
            end = plane.begin + 2 * plane.parity_bytes;
        }
        ASSERT_GE(layout.bytes, end) << what;
        ASSERT_LT(layout.bytes, end + 256) << what;
    }
}

TEST(MailboxLayout, NoRowsNoBytes) { EXPECT_EQ(mailbox_layout(equal_shares(3, 2, 0)).bytes, 0); }

TEST(MailboxLayout, EqualShares) {
    EXPECT_EQ(equal_shares(3, 5, 7).head_offset, (std::vector<std::int64_t>{0, 5, 10, 15}));
    EXPECT_EQ(equal_shares(3, 5, 7).rows, 7);
    EXPECT_EQ(equal_shares(1, 128, 0).head_offset, (std::vector<std::int64_t>{0, 128}));
    EXPECT_EQ(equal_shares(16, 8, 1).head_offset.back(), 128);
}

void expect_refused(const std::string& argument, const std::string& what, const std::function<void()>& call) {
    try {
        call();
        ADD_FAILURE() << argument << ", " << what << ": accepted";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::invalid_argument) << what << ": " << error.what();
        EXPECT_EQ(error.argument(), argument) << what << ": " << error.what();
        EXPECT_NE(std::string(error.what()).find(": need "), std::string::npos) << error.what();
    }
}

TEST(K30_Arguments, EqualSharesRefuses) {
    for (int world : {0, -1, 17, INT_MAX, INT_MIN})
        expect_refused("world", std::to_string(world), [=] { equal_shares(world, 1, 1); });
    for (std::int64_t heads :
         {std::int64_t{0}, std::int64_t{-1}, std::int64_t{33}, std::int64_t{LLONG_MAX}, std::int64_t{LLONG_MIN}})
        expect_refused("heads", std::to_string(heads), [=] { equal_shares(4, heads, 1); });
}

TEST(K30_Arguments, EveryFieldOfAShapeIsRefusedByName) {
    constexpr std::int64_t most = LLONG_MAX, least = LLONG_MIN;
    const std::vector<std::vector<std::int64_t>> offsets = {
        {},           {0},         {1, 2},     {-1, 2},       {0, 0},           {0, 2, 2},  {0, 3, 2},
        {0, 129},     {0, most},   {0, least}, {0, 1, least}, {0, most, least}, {least, 0}, {0, 64, 200, 128},
        equal(16, 1), equal(16, 1)};
    for (std::size_t i = 0; i < offsets.size(); ++i) {
        DcpShape shape{.rows = 4, .head_offset = offsets[i]};
        if (i + 2 >= offsets.size())  // 17 and 40 ranks
            while (shape.head_offset.size() < (i + 1 == offsets.size() ? 41U : 18U))
                shape.head_offset.push_back(shape.head_offset.back() + 1);
        expect_refused("shape.head_offset", "list " + std::to_string(i), [&] { mailbox_layout(shape); });
    }
    const auto refused = [](const std::string& field, const std::string& what,
                            const std::function<void(DcpShape&)>& change) {
        DcpShape shape = equal_shares(3, 5, 4);
        change(shape);
        expect_refused("shape." + field, what, [&] { mailbox_layout(shape); });
    };
    for (std::int64_t rows : {std::int64_t{-1}, std::int64_t{65536}, most, least})
        refused("rows", std::to_string(rows), [=](DcpShape& s) { s.rows = rows; });
    for (std::int64_t padded : {std::int64_t{-1}, std::int64_t{1}, std::int64_t{14}, std::int64_t{2049}, most, least})
        refused("padded_heads", std::to_string(padded), [=](DcpShape& s) { s.padded_heads = padded; });
    for (DType dtype : {DType::u8, DType::i32, DType::f16, DType::f32})
        refused("query_dtype", std::string(name(dtype)), [=](DcpShape& s) { s.query_dtype = dtype; });
    for (std::int64_t d_qk : {std::int64_t{0}, std::int64_t{-576}, std::int64_t{511}, std::int64_t{577}, most})
        refused("d_qk", std::to_string(d_qk), [=](DcpShape& s) { s.d_qk = d_qk; });
}

// The largest of everything is a layout of its own, and every number of it is right.
TEST(MailboxLayout, TheLargestShape) {
    const MailboxLayout layout = mailbox_layout(
        {.rows = 65535,
         .head_offset = {0, 113, 114, 115, 116, 117, 118, 119, 120, 121, 122, 123, 124, 125, 126, 127, 128},
         .padded_heads = 2048,
         .query_dtype = DType::bf16});
    EXPECT_EQ(layout.query_parity_bytes, std::int64_t{65535} * 2048 * 1152);
    EXPECT_EQ(layout.values_parity_bytes, std::int64_t{65535} * 16 * 113 * 1024);
    EXPECT_LE(layout.bytes, std::int64_t{1} << 40);
}

// Ranks compare one number: layouts that differ in anything have different ones (B077: mismatches are found at set-up).
TEST(K18_RankMapping, B077_FingerprintsOfDifferentShapesDiffer) {
    std::set<std::uint64_t> seen;
    const std::vector<DcpShape> all = shapes();
    std::size_t different = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
        const MailboxLayout layout = mailbox_layout(all[i]);
        bool again = false;  // heads padded to as many as there are: the same layout
        for (std::size_t j = 0; j < i && !again; ++j) again = mailbox_layout(all[j]) == layout;
        if (!again) ++different;
        seen.insert(layout.fingerprint());
        EXPECT_EQ(layout.fingerprint(), mailbox_layout(all[i]).fingerprint());
        EXPECT_EQ(seen.size(), different) << text(all[i]);
    }
    EXPECT_NE(mailbox_layout({.rows = 4, .head_offset = {0, 3, 5, 7}}).fingerprint(),
              mailbox_layout({.rows = 4, .head_offset = {0, 2, 5, 7}}).fingerprint());
}

TEST(K18_RankMapping, B077_EveryFieldOfALayoutIsInItsFingerprint) {
    const MailboxLayout layout = mailbox_layout({.rows = 4, .head_offset = {0, 3, 5, 7}, .padded_heads = 16});
    const std::vector<std::function<void(MailboxLayout&)>> changes = {
        [](MailboxLayout& l) { ++l.world; },
        [](MailboxLayout& l) { ++l.rows; },
        [](MailboxLayout& l) { ++l.heads; },
        [](MailboxLayout& l) { ++l.padded_heads; },
        [](MailboxLayout& l) { ++l.most_heads; },
        [](MailboxLayout& l) { ++l.head_offset[1]; },
        [](MailboxLayout& l) { ++l.head_offset[max_ranks]; },
        [](MailboxLayout& l) { l.query_dtype = DType::bf16; },
        [](MailboxLayout& l) { l.d_qk = 512; },
        [](MailboxLayout& l) { l.query += 16; },
        [](MailboxLayout& l) { l.query_parity_bytes += 16; },
        [](MailboxLayout& l) { l.values += 16; },
        [](MailboxLayout& l) { l.values_parity_bytes += 16; },
        [](MailboxLayout& l) { l.lses += 16; },
        [](MailboxLayout& l) { l.lses_parity_bytes += 16; },
        [](MailboxLayout& l) { l.bytes += 16; },
        [](MailboxLayout& l) { l.bytes += std::int64_t{1} << 32; },
        [](MailboxLayout& l) { std::swap(l.values, l.lses); },
    };
    for (std::size_t i = 0; i < changes.size(); ++i) {
        MailboxLayout changed = layout;
        changes[i](changed);
        EXPECT_FALSE(changed == layout) << "change " << i;
        EXPECT_NE(changed.fingerprint(), layout.fingerprint()) << "change " << i;
    }
}

TEST(MailboxStatus, Texts) {
    EXPECT_EQ(MailboxStatus{}.text(), "0 exchanges complete");
    EXPECT_EQ(MailboxStatus{.exchanges = 1}.text(), "1 exchange complete");
    const std::string failed =
        MailboxStatus{
            .exchanges = 5, .failed = true, .stage = DcpStage::merge, .missing_rank = 3, .row = 2, .exchange = 17}
            .text();
    for (const char* part : {"exchange 17", "merge", "rank 3", "row 2"})
        EXPECT_NE(failed.find(part), std::string::npos) << failed;
    EXPECT_EQ(name(DcpStage::none), "none");
    EXPECT_EQ(name(DcpStage::gather), "gather");
    EXPECT_EQ(name(DcpStage::decode), "decode");
    EXPECT_EQ(name(DcpStage::push), "push");
    EXPECT_EQ(name(static_cast<DcpStage>(99)), "unknown");
}

}  // namespace
}  // namespace sparsemla::test
