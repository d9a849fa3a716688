// Query heads of every rank on their way through mailboxes, and what must arrive.
#pragma once

#include <string>
#include <vector>

#include "tests/mailboxes.h"

namespace sparsemla::test {

/// One row and one head more in every buffer than there must be.
struct Gathering {
    Mailboxes& boxes;
    std::int64_t rows;
    DType dtype;
    float q_scale = 1;
    std::vector<Padded> queries;  ///< of every rank: [rows + 1, own + 1, d_qk]

    Gathering(Mailboxes& boxes_, std::int64_t rows_, DType dtype_, std::int64_t padding = 16)
        : boxes(boxes_), rows(rows_), dtype(dtype_) {
        for (int rank = 0; rank < boxes.world(); ++rank)
            queries.emplace_back(
                dtype, std::vector<std::int64_t>{rows + 1, boxes.layout().heads_of(rank) + 1, boxes.layout().d_qk},
                padding);
    }

    /// code_of(row, head of all, dimension): E4M3 or BF16 bits.
    template <class CodeOf>
    void fill(CodeOf code_of) {
        for (int rank = 0; rank < boxes.world(); ++rank)
            for (std::int64_t row = 0; row < rows; ++row)
                for (std::int64_t own = 0; own < boxes.layout().heads_of(rank); ++own)
                    for (std::int64_t d = 0; d < boxes.layout().d_qk; ++d) {
                        const unsigned code = code_of(row, boxes.first_head(rank) + own, d);
                        const Padded& query = queries[static_cast<std::size_t>(rank)];
                        if (dtype == DType::bf16)
                            query.at<std::uint16_t>(row, own, d) = static_cast<std::uint16_t>(code);
                        else
                            query.at<std::uint8_t>(row, own, d) = static_cast<std::uint8_t>(code);
                    }
    }

    void gather_all() {
        std::vector<Placed> placed;
        placed.reserve(queries.size());
        for (int rank = 0; rank < boxes.world(); ++rank)
            gather_query(boxes[rank],
                         {.rows = rows,
                          .query = placed.emplace_back(queries[static_cast<std::size_t>(rank)]).view(),
                          .q_scale = q_scale},
                         boxes.stream());
        boxes.synchronize();
    }

    /// Every rank receives every head, NaN as the one NaN of the mailbox, and not a byte beside.
    void expect_received(const std::string& what) {
        for (int rank = 0; rank < boxes.world(); ++rank) {
            const Padded received(boxes.layout().query_dtype, {rows + 1, boxes.layout().heads + 1, boxes.layout().d_qk},
                                  32);
            const Placed placed(received);
            receive_query(boxes[rank], rows, placed.view(), boxes.stream());
            boxes.synchronize();
            placed.fetch();
            EXPECT_TRUE(received.rest_intact(rows, boxes.layout().heads)) << what << ": written beside a query";
            for (std::int64_t row = 0; row < rows; ++row)
                for (std::int64_t head = 0; head < boxes.layout().heads; ++head)
                    for (std::int64_t d = 0; d < boxes.layout().d_qk; ++d) {
                        const unsigned got = boxes.layout().query_dtype == DType::bf16
                                                 ? received.at<std::uint16_t>(row, head, d)
                                                 : received.at<std::uint8_t>(row, head, d);
                        ASSERT_EQ(got, expected(row, head, d))
                            << what << ", rank " << rank << ", row " << row << ", head " << head << ", dim " << d;
                    }
        }
    }

    unsigned expected(std::int64_t row, std::int64_t head, std::int64_t d) const {
        int owner = 0;
        while (head >= boxes.first_head(owner + 1)) ++owner;
        const Padded& query = queries[static_cast<std::size_t>(owner)];
        const std::int64_t own = head - boxes.first_head(owner);
        if (dtype == DType::f8_e4m3) {
            const std::uint8_t code = query.at<std::uint8_t>(row, own, d);
            return (code & 0x7F) == 0x7F ? 0x7F : code;
        }
        const std::uint16_t bits = query.at<std::uint16_t>(row, own, d);
        if (boxes.layout().query_dtype == DType::bf16) return (bits & 0x7FFF) > 0x7F80 ? 0x7FFF : bits;
        return float_to_e4m3(bf16_to_float(bits) / q_scale);
    }
};

}  // namespace sparsemla::test
