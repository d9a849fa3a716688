// Where things lie in a mailbox, and the texts of its state.
#include <algorithm>
#include <sstream>
#include <string>

#include "mailbox_view.h"
#include "sparsemla/mailbox.h"

namespace sparsemla {

namespace {

constexpr std::int64_t most_bytes = std::int64_t{1} << 40;
constexpr std::int64_t plane_alignment_bytes = 128;

[[noreturn]] void refuse(std::string_view field, const std::string& required, const std::string& received) {
    throw Error(ErrorKind::invalid_argument, "shape." + std::string(field), required, received);
}

void check_heads(const detail::ShapeView& shape) {
    const auto ranks = static_cast<std::int64_t>(shape.head_offset.size()) - 1;
    if (ranks < 1 || ranks > max_ranks)
        refuse("head_offset", "an entry more than ranks, of which there are 1 .. " + std::to_string(max_ranks),
               std::to_string(shape.head_offset.size()) + " entries");
    if (shape.head_offset.front() != 0) refuse("head_offset", "0 first", std::to_string(shape.head_offset.front()));
    for (std::size_t i = 0; i + 1 < shape.head_offset.size(); ++i)
        if (shape.head_offset[i + 1] <= shape.head_offset[i])
            refuse("head_offset", "at least one head of every rank",
                   std::to_string(shape.head_offset[i]) + " .. " + std::to_string(shape.head_offset[i + 1]) +
                       " of rank " + std::to_string(i));
    if (shape.head_offset.back() > max_heads)
        refuse("head_offset", "at most " + std::to_string(max_heads) + " heads in all",
               std::to_string(shape.head_offset.back()));
    if (shape.padded_heads != 0 &&
        (shape.padded_heads < shape.head_offset.back() || shape.padded_heads > 16 * max_heads))
        refuse("padded_heads",
               "0 or " + std::to_string(shape.head_offset.back()) + " .. " + std::to_string(16 * max_heads),
               std::to_string(shape.padded_heads));
}

void check_query(const detail::ShapeView& shape) {
    if (shape.query_dtype != DType::f8_e4m3 && shape.query_dtype != DType::bf16)
        refuse("query_dtype", "f8_e4m3 or bf16", std::string(name(shape.query_dtype)));
    if (shape.d_qk != 576 && shape.d_qk != 512) refuse("d_qk", "576 or 512", std::to_string(shape.d_qk));
}

std::int64_t aligned(std::int64_t bytes) {
    return (bytes + plane_alignment_bytes - 1) / plane_alignment_bytes * plane_alignment_bytes;
}

}  // namespace

DcpShape equal_shares(int world, std::int64_t heads, std::int64_t rows) {
    if (world < 1 || world > max_ranks)
        throw Error(ErrorKind::invalid_argument, "world", "1 .. " + std::to_string(max_ranks), std::to_string(world));
    if (heads < 1 || heads > max_heads / world)
        throw Error(ErrorKind::invalid_argument, "heads", "1 .. " + std::to_string(max_heads / world),
                    std::to_string(heads));
    DcpShape shape{.rows = rows};
    for (int rank = 0; rank <= world; ++rank) shape.head_offset.push_back(rank * heads);
    return shape;
}

MailboxLayout mailbox_layout(const DcpShape& shape) { return detail::layout_of(detail::view_of(shape)); }

MailboxLayout detail::layout_of(const ShapeView& shape) {
    check_heads(shape);
    check_query(shape);
    MailboxLayout layout{.world = static_cast<std::int32_t>(shape.head_offset.size() - 1),
                         .rows = shape.rows,
                         .heads = shape.head_offset.back(),
                         .padded_heads = shape.padded_heads != 0 ? shape.padded_heads : shape.head_offset.back(),
                         .query_dtype = shape.query_dtype,
                         .d_qk = shape.d_qk};
    std::transform(shape.head_offset.begin(), shape.head_offset.end(), layout.head_offset.begin(),
                   [](std::int64_t offset) { return static_cast<std::int32_t>(offset); });
    for (int rank = 0; rank < layout.world; ++rank)
        layout.most_heads = std::max(layout.most_heads, layout.heads_of(rank));

    const std::int64_t query_row = layout.padded_heads * layout.d_qk * size_bytes(layout.query_dtype);
    const std::int64_t pieces_of_row = layout.world * layout.most_heads;
    const std::int64_t most_rows = most_bytes / (2 * (query_row + pieces_of_row * (detail::bytes_of_values + 4)));
    if (shape.rows < 0 || shape.rows > std::min<std::int64_t>(most_rows, 65535))
        refuse("rows", "0 .. " + std::to_string(std::min<std::int64_t>(most_rows, 65535)), std::to_string(shape.rows));
    layout.query_parity_bytes = aligned(shape.rows * query_row);
    layout.values = 2 * layout.query_parity_bytes;
    layout.values_parity_bytes = aligned(shape.rows * pieces_of_row * detail::bytes_of_values);
    layout.lses = layout.values + 2 * layout.values_parity_bytes;
    layout.lses_parity_bytes = aligned(shape.rows * pieces_of_row * 4);
    layout.bytes = layout.lses + 2 * layout.lses_parity_bytes;
    return layout;
}

std::uint64_t MailboxLayout::fingerprint() const {
    std::uint64_t hash = 0xCBF29CE484222325;  // FNV-1a over 64-bit numbers
    const auto add = [&](std::int64_t value) { hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x100000001B3; };
    for (std::int64_t value : {std::int64_t{world}, rows, heads, padded_heads, most_heads, d_qk, query,
                               query_parity_bytes, values, values_parity_bytes, lses, lses_parity_bytes, bytes})
        add(value);
    add(static_cast<std::int64_t>(query_dtype));
    for (std::int32_t offset : head_offset) add(offset);
    return hash;
}

std::string_view name(DcpStage stage) {
    switch (stage) {
        case DcpStage::none: return "none";
        case DcpStage::gather: return "gather";
        case DcpStage::decode: return "decode";
        case DcpStage::push: return "push";
        case DcpStage::merge: return "merge";
    }
    return "unknown";
}

std::string MailboxStatus::text() const {
    std::ostringstream text;
    if (failed)
        text << "exchange " << exchange << ": " << name(stage) << " has waited in vain for rank " << missing_rank
             << " (row " << row << "); reset on all ranks is needed";
    else
        text << exchanges << (exchanges == 1 ? " exchange complete" : " exchanges complete");
    return text.str();
}

}  // namespace sparsemla
