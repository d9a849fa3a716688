// What kernels and CPU code know of a mailbox: plain data, passed by value, and where each piece of it lies. No CUDA
// headers. docs/dcp.md has the protocol.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sparsemla/mailbox.h"

namespace sparsemla::detail {

/// A piece of the mailbox is armed, free to be written, while its words are this. Valid data never is: NaN codes are
/// made 0x7F, 0x7FFF and 0x7FFFFFFF on their way in, so that no word of four E4M3, two BF16 or one FP32 has every bit.
inline constexpr std::uint32_t armed_word = 0xFFFFFFFF;
inline constexpr std::uint32_t nan_word = 0x7FFFFFFF;  ///< the FP32 NaN that travels

inline constexpr std::int64_t bytes_of_values = value_dims * 2;  ///< of a head's result, BF16

/// Of one rank, in its own memory. `next` and `current` are written by kernels in which nobody reads them: what one
/// kernel writes, the ones after it on the stream read.
struct MailboxControl {
    std::uint32_t next;     ///< number of the exchange under way, or to come; merge_pushed sets it to the one after
    std::uint32_t current;  ///< of the exchange that merge_pushed ends; decode or push sets it
    std::uint32_t failed;   ///< not 0: a wait passed the limit, and this says where
    std::uint32_t stage, peer, row, exchange;
};
static_assert(sizeof(MailboxControl) <= mailbox_control_bytes);

/// A validated Mailbox.
struct MailboxView {
    std::byte* peers[max_ranks];  ///< [world] mailboxes, the rank's own too
    MailboxControl* control;
    std::uint64_t limit_ns;  ///< of a wait
    std::int32_t rank, world;
    std::int32_t heads;       ///< of all ranks
    std::int32_t own_heads;   ///< of this rank
    std::int32_t most_heads;  ///< from row to row of values and lses
    std::int32_t rows;        ///< capacity
    std::int32_t head_offset[max_ranks + 1];
    std::int32_t query_head_bytes;
    std::int64_t query_row_bytes;
    std::int64_t query_parity_bytes, values, values_parity_bytes, lses, lses_parity_bytes;
    DcpStage delayed_stage;  ///< for tests: its CTA waits so long at its begin
    std::int32_t delayed_cta;
    std::uint64_t delay_ns;

    constexpr int owner_of_head(int head) const {
        int owner = 0;
        while (owner + 1 < world && head >= head_offset[owner + 1]) ++owner;
        return owner;
    }

    /// From a mailbox's begin to a head's query.
    constexpr std::int64_t query_byte(std::uint32_t exchange, std::int64_t row, int head) const {
        return exchange % 2 * query_parity_bytes + row * query_row_bytes + std::int64_t{head} * query_head_bytes;
    }
    /// The same to what rank `source` found for `head_of_owner`, and its lse.
    constexpr std::int64_t values_byte(std::uint32_t exchange, int source, std::int64_t row, int head_of_owner) const {
        return values + exchange % 2 * values_parity_bytes + piece(source, row, head_of_owner) * bytes_of_values;
    }
    constexpr std::int64_t lse_byte(std::uint32_t exchange, int source, std::int64_t row, int head_of_owner) const {
        return lses + exchange % 2 * lses_parity_bytes + piece(source, row, head_of_owner) * 4;
    }

   private:
    constexpr std::int64_t piece(int source, std::int64_t row, int head_of_owner) const {
        return (std::int64_t{source} * rows + row) * most_heads + head_of_owner;
    }
};

/// Validated calls. Strides are in elements of their tensor, but for those of a query: bytes.
struct GatherQueryParams {
    MailboxView mailbox;
    std::int64_t rows = 0;
    const std::byte* query = nullptr;
    std::int64_t query_row_stride_bytes = 0, query_head_stride_bytes = 0;
    std::int32_t dims = 0;
    DType from = DType::bf16, to = DType::bf16;
    float q_scale = 1;
};
struct ReceiveQueryParams {
    MailboxView mailbox;
    std::int64_t rows = 0;
    std::byte* out = nullptr;
    std::int64_t out_row_stride_bytes = 0, out_head_stride_bytes = 0;
};
struct PushParams {
    MailboxView mailbox;
    std::int64_t rows = 0;
    const void* out = nullptr;
    DType out_dtype = DType::bf16;
    std::int64_t out_row_stride = 0, out_head_stride = 0;
    const float* lse = nullptr;
    std::int64_t lse_row_stride = 0, lse_head_stride = 0;
    const std::int32_t* counts = nullptr;  ///< null: none
    std::int64_t counts_stride = 0;
    LseBase lse_base = LseBase::two;
};
struct MergePushedParams {
    MailboxView mailbox;
    std::int64_t rows = 0;
    const float* sinks = nullptr;  ///< null: none
    std::int64_t sinks_stride = 0;
    void* out = nullptr;
    DType out_dtype = DType::bf16;
    std::int64_t out_row_stride = 0, out_head_stride = 0;
    float* lse = nullptr;  ///< null: not wanted
    std::int64_t lse_row_stride = 0, lse_head_stride = 0;
    LseBase lse_base = LseBase::natural;
    bool query_gathered = true;
};

/// A DcpShape in somebody else's memory.
struct ShapeView {
    std::int64_t rows = 0;
    std::span<const std::int64_t> head_offset;
    std::int64_t padded_heads = 0;
    DType query_dtype = DType::f8_e4m3;
    std::int64_t d_qk = 0;
};

inline ShapeView view_of(const DcpShape& shape) {
    return {.rows = shape.rows,
            .head_offset = shape.head_offset,
            .padded_heads = shape.padded_heads,
            .query_dtype = shape.query_dtype,
            .d_qk = shape.d_qk};
}

/// What mailbox_layout does, without an allocation.
MailboxLayout layout_of(const ShapeView& shape);

/// Checks a mailbox and that it lies on a device this build has. Throws Error naming its field.
MailboxView view_of(const Mailbox& mailbox);

void reset_cpu(const MailboxView& mailbox, std::int64_t bytes);
void gather_query_cpu(const GatherQueryParams& params);
void receive_query_cpu(const ReceiveQueryParams& params);
void push_cpu(const PushParams& params);
void merge_pushed_cpu(const MergePushedParams& params);

}  // namespace sparsemla::detail
