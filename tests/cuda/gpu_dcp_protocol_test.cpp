// The mailbox protocol on a GPU, stage by stage on one stream: delayed CTAs, and which bytes of the mailboxes each
// stage writes, frees and leaves alone.
#include <algorithm>

#include "mailbox_view.h"
#include "tests/cuda/gpu_dcp.h"

namespace sparsemla::test {
namespace {

using detail::armed_word;
using detail::MailboxView;
using harness::DcpResults;
using harness::DcpWindow;
using harness::GpuBuffer;
using harness::GpuStream;

constexpr DcpStage stages[] = {DcpStage::gather, DcpStage::decode, DcpStage::push, DcpStage::merge};

// The first, a middle and the last CTA of every stage of every rank, half a millisecond late (B062 to B065): kernels
// behind it wait for it, and results are those of the exchange.
TEST_F(GpuDcp, ADelayedCtaOfAnyStage) {
    constexpr float delay_us = 500;
    const GpuStream stream(gpu());
    for (const bool by_calls : {false, true}) {
        LimitedStep step({.rows = 6,
                          .head_offset = {0, 20, 37},
                          .width = 130,
                          .sinks = true,
                          .by_calls = by_calls,
                          .plan = {.kernel = "decode_latency", .splits = 2},
                          .seed = 11});
        harness::DcpGroup& group = step.group();
        DcpResults results = group.make_results();
        std::uint64_t seed = 12;
        for (const DcpStage stage : stages)
            for (int late = 0; late < group.world(); ++late)
                for (const int place : {0, 1, 2})
                    for (const DcpWindow& window : step.windows(3, ++seed)) {
                        const std::int64_t ctas = group.grids(late, window.rows).of(stage);
                        if (ctas == 0) continue;  // decode pushes by itself
                        const auto cta = static_cast<std::int32_t>(place == 0 ? 0 : place == 1 ? ctas / 2 : ctas - 1);
                        fill(results, 0xFF);
                        group.mailbox(late).delay = {.stage = stage, .cta = cta, .us = delay_us};
                        const double us = stream.time_us([&](Stream on) { group.lockstep(window, on, &results); });
                        group.mailbox(late).delay = {};
                        const std::string what = "CTA " + std::to_string(cta) + " of " + std::to_string(ctas) + " of " +
                                                 std::string(name(stage)) + " of rank " + std::to_string(late) + ", " +
                                                 step.text();
                        EXPECT_GE(us, delay_us * 0.98) << what << " was not late";
                        ASSERT_EQ(difference(group, window, results), "") << what;
                    }
        exchanges_of(group);
    }
}

/// Mailboxes of a group in memory of their own that touches addresses that are not mapped, with guard bytes at the
/// other end; for more rows, and more heads from row to row, than the group needs. The group must not run afterwards.
class GuardedMailboxes {
   public:
    GuardedMailboxes(harness::DcpGroup& group, const DcpShape& shape, Against against)
        : layout_(mailbox_layout(shape)), against_(against) {
        const Device device = tested_device().device;
        const harness::GpuBufferOptions options{.placement = placement(against)};
        for (int rank = 0; rank < group.world(); ++rank) {
            memory_.emplace_back(device, bytes() + guard_bytes, options);
            memory_.back().fill(guard);
            controls_.emplace_back(device, mailbox_control_bytes,
                                   harness::GpuBufferOptions{.placement = placement(against), .alignment_bytes = 64});
        }
        for (int rank = 0; rank < group.world(); ++rank) {
            Mailbox& mailbox = group.mailbox(rank);
            mailbox.layout = layout_;
            for (int peer = 0; peer < group.world(); ++peer)
                mailbox.peers.base[static_cast<std::size_t>(peer)] =
                    memory_[static_cast<std::size_t>(peer)].data() + begin();
            mailbox.control = {controls_[static_cast<std::size_t>(rank)].data(), mailbox_control_bytes};
        }
        for (int rank = 0; rank < group.world(); ++rank) reset(group.mailbox(rank));
        for (int rank = 0; rank < group.world(); ++rank) status(group.mailbox(rank));  // waits
    }

    /// The mailbox's words now.
    std::vector<std::uint32_t> words(int rank) const {
        std::vector<std::uint32_t> words(bytes() / 4);
        memory_[static_cast<std::size_t>(rank)].download(words.data(), bytes(), begin());
        return words;
    }
    bool guards_intact() const {
        return std::ranges::all_of(memory_, [&](const GpuBuffer& memory) {
            std::vector<std::uint8_t> guards(guard_bytes);
            const std::size_t before = begin();
            memory.download(guards.data(), before, 0);
            memory.download(guards.data() + before, guard_bytes - before, before + bytes());
            return std::ranges::all_of(guards, [](std::uint8_t byte) { return byte == guard; });
        });
    }

   private:
    static constexpr std::size_t guard_bytes = 4096;
    static constexpr std::uint8_t guard = 0xA5;

    std::size_t bytes() const { return static_cast<std::size_t>(layout_.bytes); }
    /// Of the mailbox in its memory. Against the front, 16 bytes are left, as no more alignment than that is asked for.
    std::size_t begin() const { return against_ == Against::end ? guard_bytes : 16; }

    MailboxLayout layout_;
    Against against_;
    std::vector<GpuBuffer> memory_, controls_;
};

/// Which words of a rank's mailbox hold something.
class ExpectedWords {
   public:
    ExpectedWords(const Mailbox& mailbox, std::uint32_t exchange, std::int64_t rows)
        : view_(detail::view_of(mailbox)),
          exchange_(exchange),
          rows_(rows),
          held_(static_cast<std::size_t>(mailbox.layout.bytes / 4)) {}

    void add_query() {
        for (std::int64_t row = 0; row < rows_; ++row)
            for (int head = 0; head < view_.heads; ++head)
                add(view_.query_byte(exchange_, row, head), view_.query_head_bytes);
    }
    /// A head of lse -inf has no values.
    void add_results(const std::vector<std::uint32_t>& words) {
        for (int source = 0; source < view_.world; ++source)
            for (std::int64_t row = 0; row < rows_; ++row)
                for (int head = 0; head < view_.own_heads; ++head) {
                    const std::int64_t lse = view_.lse_byte(exchange_, source, row, head);
                    add(lse, 4);
                    constexpr std::uint32_t minus_infinity = 0xFF800000;
                    if (words[static_cast<std::size_t>(lse / 4)] != minus_infinity)
                        add(view_.values_byte(exchange_, source, row, head), detail::bytes_of_values);
                }
    }
    /// "", or the first word that is armed and should hold something, or the other way round.
    std::string difference(const std::vector<std::uint32_t>& words) const {
        for (std::size_t i = 0; i < words.size(); ++i)
            if ((words[i] != armed_word) != held_[i])
                return "byte " + std::to_string(4 * i) + (held_[i] ? " is still armed" : " is not armed") +
                       ", values begin at " + std::to_string(view_.values) + ", lses at " + std::to_string(view_.lses);
        return "";
    }

   private:
    void add(std::int64_t begin, std::int64_t bytes) { std::fill_n(held_.begin() + begin / 4, bytes / 4, true); }

    MailboxView view_;
    std::uint32_t exchange_;
    std::int64_t rows_;
    std::vector<bool> held_;
};

/// An exchange, after each of whose stages every word of every mailbox is looked at.
void expect_words(DcpStep& step, GuardedMailboxes& mailboxes, const DcpWindow& window, const GpuStream& stream) {
    harness::DcpGroup& group = step.group();
    const std::uint32_t exchange = exchanges_of(group);
    const auto compare = [&](bool gathered, bool decoded, const char* when) {
        for (int rank = 0; rank < group.world(); ++rank) {
            const std::vector<std::uint32_t> words = mailboxes.words(rank);
            ExpectedWords expected(group.mailbox(rank), exchange, window.rows);
            if (gathered) expected.add_query();
            if (decoded) expected.add_results(words);
            ASSERT_EQ(expected.difference(words), "") << when << ", mailbox of rank " << rank << ", exchange "
                                                      << exchange << " of " << window.rows << " rows, " << step.text();
        }
    };
    for (int rank = 0; rank < group.world(); ++rank) group.rank(rank).gather(window, stream.stream());
    stream.synchronize();
    ASSERT_NO_FATAL_FAILURE(compare(true, false, "after gather"));
    for (int rank = 0; rank < group.world(); ++rank) group.rank(rank).decode(window, stream.stream());
    stream.synchronize();
    ASSERT_NO_FATAL_FAILURE(compare(true, true, "after decode"));
    for (int rank = 0; rank < group.world(); ++rank) {
        group.rank(rank).poison();
        group.rank(rank).merge(window, stream.stream());
    }
    stream.synchronize();
    for (int rank = 0; rank < group.world(); ++rank) ASSERT_EQ(group.difference(rank, window), "") << step.text();
    ASSERT_NO_FATAL_FAILURE(compare(false, false, "after merge"));
}

// What gather and decode write is the batch's rows of this parity and nothing else, and all of it is armed after merge;
// no byte beside a mailbox is read or written.
TEST_F(GpuDcp, OnlyTheBatchsPiecesAreWrittenAndAllAreFreed) {
    const GpuStream stream(gpu());
    std::uint64_t seed = 20;
    for (const Against against : {Against::end, Against::front})
        for (const DType query : {DType::f8_e4m3, DType::bf16})
            for (const bool by_calls : {false, true})
                for (const bool padded : {false, true}) {
                    DcpSpec spec{.rows = 6,
                                 .head_offset = {0, 3, 4, 9},
                                 .width = 80,
                                 .query_dtype = query,
                                 .sinks = true,
                                 .by_calls = by_calls,
                                 .seed = ++seed};
                    LimitedStep step(spec);
                    GuardedMailboxes mailboxes(step.group(),
                                               {.rows = spec.rows + (padded ? 5 : 0),
                                                .head_offset = spec.head_offset,
                                                .padded_heads = padded ? 16 : 0,
                                                .query_dtype = query},
                                               against);
                    for (const DcpWindow& window : step.windows(8, seed))
                        ASSERT_NO_FATAL_FAILURE(expect_words(step, mailboxes, window, stream));
                    EXPECT_TRUE(mailboxes.guards_intact()) << step.text();
                }
}

// The same without a look between the stages, in mailboxes that touch unmapped memory: every record.
TEST_F(GpuDcp, GuardedMailboxesOfEveryRecord) {
    std::uint64_t seed = 40;
    for (const RecordLayout& layout : record_layouts) {
        DcpSpec spec{.rows = 5,
                     .head_offset = {0, 5, 17},
                     .width = 150,
                     .record = layout.record,
                     .query_dtype = DType::bf16,
                     .seed = ++seed};
        LimitedStep step(spec);
        GuardedMailboxes mailboxes(
            step.group(),
            {.rows = spec.rows, .head_offset = spec.head_offset, .query_dtype = DType::bf16, .d_qk = layout.d_qk()},
            seed % 2 == 0 ? Against::end : Against::front);
        step.expect_run(12, seed);
        for (int rank = 0; rank < step.group().world(); ++rank) {
            const std::vector<std::uint32_t> words = mailboxes.words(rank);
            EXPECT_EQ(std::ranges::count(words, armed_word), static_cast<std::ptrdiff_t>(words.size())) << step.text();
        }
        EXPECT_TRUE(mailboxes.guards_intact()) << step.text();
    }
}

}  // namespace
}  // namespace sparsemla::test
