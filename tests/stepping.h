// Ranks whose exchanges carry their own number: what a rank sends is a function of exchange, rank, row and head, and so
// is what it must get. For a thread of each rank on the CPU.
#pragma once

#include <chrono>
#include <cmath>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "harness/random.h"
#include "tests/mailboxes.h"

namespace sparsemla::test {

/// What all ranks know of an exchange without asking.
struct Exchange {
    std::uint64_t number = 0;
    std::int64_t rows = 1;
    bool query = true;

    /// Rows change, and some exchanges have no query.
    static Exchange of(std::uint64_t number, std::int64_t capacity, std::uint64_t seed = 1) {
        harness::Random random(seed, {static_cast<std::int64_t>(number)});
        return {number, 1 + random.below(capacity), random.below(4) != 0};
    }
};

class SteppingRank {
   public:
    explicit SteppingRank(const Mailbox& mailbox)
        : mailbox_(mailbox),
          layout_(mailbox.layout),
          rank_(mailbox.peers.rank),
          own_(layout_.heads_of(rank_)),
          query_(DType::f8_e4m3, {layout_.rows, own_, layout_.d_qk}, 16),
          received_(DType::f8_e4m3, {layout_.rows, layout_.heads, layout_.d_qk}, 32),
          partial_(DType::bf16, {layout_.rows, layout_.heads, value_dims}, 0),
          partial_lse_(DType::f32, {layout_.rows, layout_.heads}, 1),
          out_(DType::f32, {layout_.rows, own_, value_dims}, 2),
          lse_(DType::f32, {layout_.rows, own_}, 3) {}

    void gather(const Exchange& exchange) {
        if (!exchange.query) return;
        for_each(exchange.rows, own_, layout_.d_qk, [&](auto row, auto head, auto d) {
            query_.at<std::uint8_t>(row, head, d) = code(exchange, row, first_head() + head, d);
        });
        gather_query(mailbox_, {.rows = exchange.rows, .query = query_.view()});
    }
    /// Receives the query and pushes. "", or what was wrong with the query.
    std::string decode(const Exchange& exchange) {
        std::string fault;
        if (exchange.query) {
            receive_query(mailbox_, exchange.rows, received_.view());
            for_each(exchange.rows, layout_.heads, layout_.d_qk, [&](auto row, auto head, auto d) {
                if (received_.at<std::uint8_t>(row, head, d) != code(exchange, row, head, d) && fault.empty())
                    fault = where(exchange, row, head) + "another exchange's query";
            });
        }
        push_results(exchange);
        return fault;
    }
    void push_results(const Exchange& exchange) {
        for (std::int64_t row = 0; row < exchange.rows; ++row)
            for (std::int64_t head = 0; head < layout_.heads; ++head) {
                const bool empty = is_empty(exchange, rank_, row);
                partial_lse_.set(empty ? -infinity : lse(exchange), row, head);
                for (int d = 0; d < value_dims; ++d) partial_.set(value(exchange, rank_, row, head, d), row, head, d);
            }
        push(mailbox_, {.rows = exchange.rows, .out = partial_.view(), .lse = partial_lse_.view()});
    }
    /// "", or what was wrong with the result.
    std::string merge(const Exchange& exchange) {
        merge_pushed(mailbox_, {.rows = exchange.rows,
                                .sinks = {},
                                .out = out_.view(),
                                .lse = lse_.view(),
                                .lse_base = LseBase::two,
                                .query_gathered = exchange.query});
        std::string fault;
        for_each(exchange.rows, own_, value_dims, [&](auto row, auto head, auto d) {
            double sum = 0;
            int sources = 0;
            for (int source = 0; source < layout_.world; ++source) {
                if (is_empty(exchange, source, row)) continue;
                sum += value(exchange, source, row, first_head() + head, d);
                ++sources;
            }
            const double mean = sources == 0 ? 0 : sum / sources;
            const double expected_lse = sources == 0 ? -infinity : lse(exchange) + std::log2(sources);
            const bool same_lse = sources == 0 ? lse_.value(row, head) == -infinity
                                               : std::fabs(lse_.value(row, head) - expected_lse) < 1e-4;
            // A value of another exchange is off by 1 / world or more.
            if ((!(std::fabs(out_.value(row, head, d) - mean) < 1e-3) || !same_lse) && fault.empty())
                fault = where(exchange, row, head) + "got " + std::to_string(out_.value(row, head, d)) + ", lse " +
                        std::to_string(lse_.value(row, head)) + ", expected " + std::to_string(mean) + ", lse " +
                        std::to_string(expected_lse) + "; " + status(mailbox_).text();
        });
        return fault;
    }
    /// Whether the results of these rows are NaN.
    bool is_nan(std::int64_t first_row, std::int64_t rows) const {
        bool all = true;
        for_each(rows, own_, value_dims, [&](auto row, auto head, auto d) {
            all = all && std::isnan(out_.value(first_row + row, head, d)) &&
                  std::isnan(lse_.value(first_row + row, head));
        });
        return all;
    }

   private:
    template <class Call>
    static void for_each(std::int64_t rows, std::int64_t heads, std::int64_t dims, const Call& call) {
        for (std::int64_t row = 0; row < rows; ++row)
            for (std::int64_t head = 0; head < heads; ++head)
                for (std::int64_t d = 0; d < dims; ++d) call(row, head, d);
    }
    std::int64_t first_head() const { return layout_.head_offset[static_cast<std::size_t>(rank_)]; }
    static std::uint8_t code(const Exchange& exchange, std::int64_t row, std::int64_t head, std::int64_t d) {
        return static_cast<std::uint8_t>((exchange.number * 31 + static_cast<std::uint64_t>(row * 7 + head * 5 + d)) %
                                         0x7F);
    }
    static float value(const Exchange& exchange, int source, std::int64_t row, std::int64_t head, std::int64_t d) {
        return static_cast<float>((exchange.number * 3 + static_cast<std::uint64_t>(source * 5 + row + head + d)) % 64);
    }
    static bool is_empty(const Exchange& exchange, int source, std::int64_t row) {
        return (exchange.number + static_cast<std::uint64_t>(source + row)) % 5 == 0;
    }
    static float lse(const Exchange& exchange) { return static_cast<float>(exchange.number % 8); }
    std::string where(const Exchange& exchange, std::int64_t row, std::int64_t head) const {
        return "exchange " + std::to_string(exchange.number) + ", rank " + std::to_string(rank_) + ", row " +
               std::to_string(row) + ", head " + std::to_string(head) + ": ";
    }

    const Mailbox& mailbox_;
    const MailboxLayout& layout_;
    int rank_;
    std::int64_t own_;
    Padded query_, received_, partial_, partial_lse_, out_, lse_;
};

inline void sleep_us(double us) {
    if (us > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(us));
}

/// call(rank) by a thread for each rank; what they return, the first that is not "".
inline std::string on_threads(int world, const std::function<std::string(int)>& call) {
    std::vector<std::string> faults(static_cast<std::size_t>(world));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world; ++rank)
        threads.emplace_back([&, rank] { faults[static_cast<std::size_t>(rank)] = call(rank); });
    for (std::thread& thread : threads) thread.join();
    for (const std::string& fault : faults)
        if (!fault.empty()) return fault;
    return "";
}

}  // namespace sparsemla::test
