// One exchange on a CPU: ranks are threads, and a mailbox's words are atomics. Words are written with release and read
// with acquire: what a rank did before it wrote, its re-arming too, happened before what the reader does next.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "kernels.h"
#include "mailbox_view.h"
#include "sparsemla/formats.h"

namespace sparsemla::detail {

namespace {

using Clock = std::chrono::steady_clock;
using Word = std::uint32_t;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float log2_e = 1.44269504F;
constexpr std::size_t most_query_words = 576 * 2 / sizeof(Word);  // of a head, in BF16

std::atomic_ref<Word> word_at(std::byte* piece, std::int64_t i) {
    return std::atomic_ref<Word>(reinterpret_cast<Word*>(piece)[i]);
}

void write_piece(std::byte* to, const Word* words, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) word_at(to, i).store(words[i], std::memory_order_release);
}

void arm(std::byte* piece, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) word_at(piece, i).store(armed_word, std::memory_order_release);
}

/// Waits of one call. Once one has failed, nothing more is waited for.
class Waiter {
   public:
    Waiter(const MailboxView& mailbox, DcpStage stage, std::uint32_t exchange)
        : mailbox_(mailbox), stage_(stage), exchange_(exchange) {}

    bool failed() const { return mailbox_.control->failed != 0; }

    /// The piece's words, or false once the limit has passed.
    bool read(std::byte* piece, Word* words, std::int64_t count, int from_rank, std::int64_t row) {
        for (std::int64_t i = 0; i < count; ++i) {
            const std::atomic_ref<Word> word = word_at(piece, i);
            for (int spins = 0; (words[i] = word.load(std::memory_order_acquire)) == armed_word; ++spins) {
                if (failed()) return false;
                if (spins < 64) continue;
                std::this_thread::yield();
                if (!passed_limit(from_rank)) continue;
                fail(from_rank, row);
                return false;
            }
        }
        heard_[from_rank] = true;
        since_[from_rank] = {};
        return true;
    }

   private:
    /// For a rank not heard of in this call, counts from the call's first wait that is one; for another, whose pieces
    /// come one after another, from the wait for its next piece.
    bool passed_limit(int from_rank) {
        const Clock::time_point now = Clock::now();
        if (begin_ == Clock::time_point{}) begin_ = now;
        Clock::time_point& since = since_[from_rank];
        if (since == Clock::time_point{}) since = heard_[from_rank] ? now : begin_;
        return now - since > std::chrono::nanoseconds(mailbox_.limit_ns);
    }

    void fail(int from_rank, std::int64_t row) {
        MailboxControl& control = *mailbox_.control;
        control.stage = static_cast<std::uint32_t>(stage_);
        control.peer = static_cast<std::uint32_t>(from_rank);
        control.row = static_cast<std::uint32_t>(row);
        control.exchange = exchange_;
        control.failed = 1;
    }

    const MailboxView& mailbox_;
    DcpStage stage_;
    std::uint32_t exchange_;
    Clock::time_point begin_{};
    std::array<Clock::time_point, max_ranks> since_{};
    std::array<bool, max_ranks> heard_{};
};

void delay(const MailboxView& mailbox, DcpStage stage) {
    if (mailbox.delayed_stage == stage) std::this_thread::sleep_for(std::chrono::nanoseconds(mailbox.delay_ns));
}

/// One head of a query as the mailbox holds it: no word is armed_word.
struct StoredHead {
    std::array<Word, most_query_words> words;

    void take(const GatherQueryParams& params, const std::byte* head) {
        if (params.from == params.to) {
            std::memcpy(words.data(), head, static_cast<std::size_t>(params.dims * size_bytes(params.to)));
            params.to == DType::bf16 ? each<std::uint16_t>(params.dims, 0x7FFF, 0x7F80)
                                     : each<std::uint8_t>(params.dims, 0x7F, 0x7E);
            return;
        }
        auto* codes = reinterpret_cast<std::uint8_t*>(words.data());
        const auto* values = reinterpret_cast<const std::uint16_t*>(head);
        for (int d = 0; d < params.dims; ++d) codes[d] = float_to_e4m3(bf16_to_float(values[d]) / params.q_scale);
        each<std::uint8_t>(params.dims, 0x7F, 0x7E);
    }

   private:
    /// NaN, magnitudes above the largest number, become one NaN.
    template <class Code>
    void each(int dims, Code nan, Code largest_number) {
        auto* codes = reinterpret_cast<Code*>(words.data());
        const Code magnitude = static_cast<Code>(~(1U << (8 * sizeof(Code) - 1)));
        for (int d = 0; d < dims; ++d)
            if ((codes[d] & magnitude) > largest_number) codes[d] = nan;
    }
};

/// 512 values as they travel.
using StoredValues = std::array<std::uint16_t, value_dims>;

StoredValues stored_values(const PushParams& params, std::int64_t row, std::int64_t head) {
    const std::int64_t element = row * params.out_row_stride + head * params.out_head_stride;
    StoredValues values;
    for (int d = 0; d < value_dims; ++d) {
        values[d] = params.out_dtype == DType::bf16 ? static_cast<const std::uint16_t*>(params.out)[element + d]
                                                    : float_to_bf16(static_cast<const float*>(params.out)[element + d]);
        if ((values[d] & 0x7FFF) > 0x7F80) values[d] = 0x7FFF;
    }
    return values;
}

float stored_lse(const PushParams& params, std::int64_t row, std::int64_t head) {
    if (params.counts != nullptr && params.counts[row * params.counts_stride] <= 0) return -infinity;
    const float lse = params.lse[row * params.lse_row_stride + head * params.lse_head_stride];
    if (std::isnan(lse)) return std::bit_cast<float>(nan_word);
    return params.lse_base == LseBase::two ? lse : lse * log2_e;
}

Tensor out_of_head(const MergePushedParams& params, std::int64_t row, std::int64_t head) {
    const std::int64_t element = row * params.out_row_stride + head * params.out_head_stride;
    return dense(static_cast<std::byte*>(params.out) + element * size_bytes(params.out_dtype), params.out_dtype,
                 {1, 1, value_dims});
}

/// What the ranks pushed for one (row, head): read, merged and freed.
class PushedHead {
   public:
    PushedHead(const MergePushedParams& params, std::uint32_t exchange, std::int64_t row, int head)
        : params_(params), mailbox_(params.mailbox), exchange_(exchange), row_(row), head_(head) {}

    bool read(Waiter& waiter) {
        for (int source = 0; source < mailbox_.world; ++source) {
            Word lse = 0;
            if (!waiter.read(lse_piece(source), &lse, 1, source, row_)) return false;
            lses_[source] = std::bit_cast<float>(lse);
            if (is_empty(source)) continue;
            auto* words = reinterpret_cast<Word*>(values_[source].data());
            if (!waiter.read(values_piece(source), words, words_of_values, source, row_)) return false;
        }
        return true;
    }

    void merge() {
        std::array<Partial, max_ranks> partials;
        for (int source = 0; source < mailbox_.world; ++source)
            partials[source] = {.out = dense(values_[source].data(), DType::bf16, {1, 1, value_dims}),
                                .lse = dense(&lses_[source], DType::f32, {1, 1})};
        MergeArgs args{.rows = 1,
                       .heads = 1,
                       .partials = std::span(partials.data(), static_cast<std::size_t>(mailbox_.world)),
                       .partial_base = LseBase::two,
                       .out = out_of_head(params_, row_, head_),
                       .lse_base = params_.lse_base};
        if (params_.sinks != nullptr) args.sinks = dense(params_.sinks + head_ * params_.sinks_stride, DType::f32, {1});
        if (params_.lse != nullptr)
            args.lse = dense(params_.lse + row_ * params_.lse_row_stride + head_ * params_.lse_head_stride, DType::f32,
                             {1, 1});
        merge_cpu(args);
    }

    void free() {
        for (int source = 0; source < mailbox_.world; ++source) {
            if (!is_empty(source)) arm(values_piece(source), words_of_values);
            arm(lse_piece(source), 1);
        }
    }

   private:
    static constexpr std::int64_t words_of_values = bytes_of_values / 4;

    bool is_empty(int source) const { return lses_[source] == -infinity; }
    std::byte* values_piece(int source) const {
        return mailbox_.peers[mailbox_.rank] + mailbox_.values_byte(exchange_, source, row_, head_);
    }
    std::byte* lse_piece(int source) const {
        return mailbox_.peers[mailbox_.rank] + mailbox_.lse_byte(exchange_, source, row_, head_);
    }

    const MergePushedParams& params_;
    const MailboxView& mailbox_;
    std::uint32_t exchange_;
    std::int64_t row_;
    int head_;
    std::array<float, max_ranks> lses_{};
    alignas(16) std::array<StoredValues, max_ranks> values_;
};

void write_nan(const MergePushedParams& params, std::int64_t row, std::int64_t head) {
    const Tensor out = out_of_head(params, row, head);
    if (params.out_dtype == DType::bf16)
        std::fill_n(static_cast<std::uint16_t*>(out.data), value_dims, std::uint16_t{0x7FFF});
    else
        std::fill_n(static_cast<float*>(out.data), value_dims, std::bit_cast<float>(nan_word));
    if (params.lse != nullptr)
        params.lse[row * params.lse_row_stride + head * params.lse_head_stride] = std::bit_cast<float>(nan_word);
}

/// Frees the query's pieces of the exchange, which decode has read, or never will.
bool free_query(const MergePushedParams& params, std::uint32_t exchange, Waiter& waiter) {
    const MailboxView& mailbox = params.mailbox;
    std::array<Word, most_query_words> words;
    for (std::int64_t row = 0; row < params.rows; ++row)
        for (int head = 0; head < mailbox.heads; ++head) {
            std::byte* piece = mailbox.peers[mailbox.rank] + mailbox.query_byte(exchange, row, head);
            const std::int64_t count = mailbox.query_head_bytes / 4;
            if (!waiter.read(piece, words.data(), count, mailbox.owner_of_head(head), row)) return false;
            arm(piece, count);
        }
    return true;
}

}  // namespace

void reset_cpu(const MailboxView& mailbox, std::int64_t bytes) {
    *mailbox.control = {};
    arm(mailbox.peers[mailbox.rank], bytes / 4);
}

void gather_query_cpu(const GatherQueryParams& params) {
    const MailboxView& mailbox = params.mailbox;
    delay(mailbox, DcpStage::gather);
    if (mailbox.control->failed != 0) return;
    const std::uint32_t exchange = mailbox.control->next;
    const int first_head = mailbox.head_offset[mailbox.rank];
    StoredHead stored;
    for (std::int64_t row = 0; row < params.rows; ++row)
        for (int head = 0; head < mailbox.own_heads; ++head) {
            stored.take(params,
                        params.query + row * params.query_row_stride_bytes + head * params.query_head_stride_bytes);
            for (int i = 0; i < mailbox.world; ++i) {
                std::byte* peer = mailbox.peers[(mailbox.rank + i) % mailbox.world];
                write_piece(peer + mailbox.query_byte(exchange, row, first_head + head), stored.words.data(),
                            mailbox.query_head_bytes / 4);
            }
        }
}

void receive_query_cpu(const ReceiveQueryParams& params) {
    const MailboxView& mailbox = params.mailbox;
    delay(mailbox, DcpStage::decode);
    const std::uint32_t exchange = mailbox.control->next;
    Waiter waiter(mailbox, DcpStage::decode, exchange);
    std::array<Word, most_query_words> words;
    for (std::int64_t row = 0; row < params.rows; ++row)
        for (int head = 0; head < mailbox.heads; ++head) {
            std::byte* piece = mailbox.peers[mailbox.rank] + mailbox.query_byte(exchange, row, head);
            // What has not come is NaN.
            const std::int64_t count = mailbox.query_head_bytes / 4;
            if (waiter.failed() || !waiter.read(piece, words.data(), count, mailbox.owner_of_head(head), row))
                words.fill(armed_word);
            std::memcpy(params.out + row * params.out_row_stride_bytes + head * params.out_head_stride_bytes,
                        words.data(), static_cast<std::size_t>(mailbox.query_head_bytes));
        }
}

void push_cpu(const PushParams& params) {
    const MailboxView& mailbox = params.mailbox;
    delay(mailbox, DcpStage::push);
    if (mailbox.control->failed != 0) return;
    const std::uint32_t exchange = mailbox.control->next;
    mailbox.control->current = exchange;
    for (std::int64_t row = 0; row < params.rows; ++row)
        for (int i = 0; i < mailbox.world; ++i) {
            const int owner = (mailbox.rank + i) % mailbox.world;
            for (int head = mailbox.head_offset[owner]; head < mailbox.head_offset[owner + 1]; ++head) {
                const int of_owner = head - mailbox.head_offset[owner];
                const float lse = stored_lse(params, row, head);
                if (lse != -infinity) {
                    const StoredValues values = stored_values(params, row, head);
                    std::array<Word, bytes_of_values / 4> words;
                    std::memcpy(words.data(), values.data(), sizeof words);
                    write_piece(mailbox.peers[owner] + mailbox.values_byte(exchange, mailbox.rank, row, of_owner),
                                words.data(), words.size());
                }
                const Word lse_word = std::bit_cast<Word>(lse);
                write_piece(mailbox.peers[owner] + mailbox.lse_byte(exchange, mailbox.rank, row, of_owner), &lse_word,
                            1);
            }
        }
}

void merge_pushed_cpu(const MergePushedParams& params) {
    const MailboxView& mailbox = params.mailbox;
    delay(mailbox, DcpStage::merge);
    const std::uint32_t exchange = mailbox.control->current;
    Waiter waiter(mailbox, DcpStage::merge, exchange);
    for (std::int64_t row = 0; row < params.rows; ++row)
        for (int head = 0; head < mailbox.own_heads; ++head) {
            PushedHead pushed(params, exchange, row, head);
            if (waiter.failed() || !pushed.read(waiter)) {
                write_nan(params, row, head);
                continue;
            }
            pushed.merge();
            pushed.free();
        }
    if (params.query_gathered && !waiter.failed()) free_query(params, exchange, waiter);
    if (!waiter.failed()) mailbox.control->next = exchange + 1;
}

}  // namespace sparsemla::detail
