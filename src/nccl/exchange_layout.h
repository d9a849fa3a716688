// Where things lie in the memory of exchanges by collectives. A rank's heads stand together, [head][row][dims], so that
// each piece that travels is one block, whatever the number of rows; tensors over it are views. Pure.
#pragma once

#include <cstdint>

#include "mailbox_view.h"
#include "sparsemla/mailbox.h"

namespace sparsemla::detail {

struct Block {
    std::int64_t at = 0, bytes = 0;

    friend bool operator==(const Block&, const Block&) = default;
};

/// Offsets from the begin of one allocation, of exchanges of a number of rows:
///     gathered   [world][most_heads][rows][d_qk]  the query as all-gathered, padded to the largest share of heads
///     query      [heads][rows][d_qk]              without the padding; the same bytes where shares are equal
///     out, lse   [heads][rows][512], [heads][rows]             of all heads over this rank's records: what is sent
///     came       [world][own heads][rows][512], [..][rows]     of this rank's heads from each rank
struct ExchangeLayout {
    MailboxLayout shape;
    int rank = 0;
    std::int64_t gathered = 0, query = 0, out = 0, lse = 0, came_out = 0, came_lse = 0, bytes = 0;

    std::int64_t own_heads() const { return shape.heads_of(rank); }
    std::int64_t head_bytes() const { return shape.d_qk * size_bytes(shape.query_dtype); }
    bool equal_shares() const { return shape.most_heads * shape.world == shape.heads; }

    /// Rank `from`'s part of the all-gather; its first gathered_heads(from) bytes are heads.
    Block gathered_part(int from, std::int64_t rows) const {
        const std::int64_t part = shape.most_heads * rows * head_bytes();
        return {gathered + from * part, part};
    }
    Block gathered_heads(int from, std::int64_t rows) const {
        return {gathered_part(from, rows).at, shape.heads_of(from) * rows * head_bytes()};
    }
    /// Where they belong in the query.
    Block query_heads(int from, std::int64_t rows) const {
        return {query + shape.head_offset[from] * rows * head_bytes(), gathered_heads(from, rows).bytes};
    }
    /// Results of owner `to`'s heads.
    Block sent_out(int to, std::int64_t rows) const {
        return {out + shape.head_offset[to] * rows * bytes_of_values, shape.heads_of(to) * rows * bytes_of_values};
    }
    Block sent_lse(int to, std::int64_t rows) const {
        return {lse + shape.head_offset[to] * rows * 4, shape.heads_of(to) * rows * 4};
    }
    /// Results of this rank's heads that `from` sends.
    Block received_out(int from, std::int64_t rows) const {
        const std::int64_t part = own_heads() * rows * bytes_of_values;
        return {came_out + from * part, part};
    }
    Block received_lse(int from, std::int64_t rows) const {
        const std::int64_t part = own_heads() * rows * 4;
        return {came_lse + from * part, part};
    }
};

inline ExchangeLayout exchange_layout(const MailboxLayout& shape, int rank) {
    ExchangeLayout layout{.shape = shape, .rank = rank};
    std::int64_t end = 0;
    const auto place = [&](std::int64_t bytes) {
        const std::int64_t at = end;
        end += (bytes + 255) / 256 * 256;
        return at;
    };
    layout.gathered = place(shape.world * shape.most_heads * shape.rows * layout.head_bytes());
    layout.query = layout.equal_shares() ? layout.gathered : place(shape.heads * shape.rows * layout.head_bytes());
    layout.out = place(shape.heads * shape.rows * bytes_of_values);
    layout.lse = place(shape.heads * shape.rows * 4);
    layout.came_out = place(shape.world * layout.own_heads() * shape.rows * bytes_of_values);
    layout.came_lse = place(shape.world * layout.own_heads() * shape.rows * 4);
    layout.bytes = end;
    return layout;
}

}  // namespace sparsemla::detail
