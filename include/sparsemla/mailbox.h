// Decode context parallelism (docs/dcp.md): ranks that each hold a part of the context decode all ranks' heads over
// what they hold, and push the results to the heads' owners. Layout of the memory in which they meet, and the verbs of
// one exchange:
//     gather_query    every rank's query heads to all ranks
//     decode          Problem::dcp: all heads over the records of this rank, results to their owners (decode.h)
//     merge_pushed    what the ranks found for this rank's heads -> out, lse
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "sparsemla/decode.h"
#include "sparsemla/tensor.h"

namespace sparsemla {

inline constexpr int max_ranks = 16;

/// What all ranks of a group must agree on.
struct DcpShape {
    std::int64_t rows = 0;  ///< capacity: exchanges of every number of rows up to it
    /// [world + 1], ascending from 0: rank r owns heads head_offset[r] .. head_offset[r + 1] - 1, at least one.
    std::vector<std::int64_t> head_offset{};
    std::int64_t padded_heads = 0;       ///< heads from row to row of the query's mailbox; 0: as many as there are
    DType query_dtype = DType::f8_e4m3;  ///< in the mailbox: f8_e4m3 or bf16
    std::int64_t d_qk = 576;             ///< or 512
};

/// `world` ranks of `heads` heads each. Throws Error (world, heads).
DcpShape equal_shares(int world, std::int64_t heads, std::int64_t rows);

/// Where things lie in a rank's mailbox; equal on all ranks. Offsets are in bytes from its begin.
///     query    [2 parities][rows][padded_heads][d_qk] E4M3 or BF16
///     values   [2][world: from whom][rows][most_heads][512] BF16
///     lses     [2][world][rows][most_heads] FP32, base 2
struct MailboxLayout {
    std::int32_t world = 0;
    std::int64_t rows = 0;
    std::int64_t heads = 0;  ///< of all ranks
    std::int64_t padded_heads = 0;
    std::int64_t most_heads = 0;  ///< that any rank owns
    std::array<std::int32_t, max_ranks + 1> head_offset{};
    DType query_dtype = DType::f8_e4m3;
    std::int64_t d_qk = 0;

    std::int64_t query = 0, query_parity_bytes = 0;
    std::int64_t values = 0, values_parity_bytes = 0;
    std::int64_t lses = 0, lses_parity_bytes = 0;
    std::int64_t bytes = 0;  ///< of the whole mailbox

    std::int64_t heads_of(int rank) const { return head_offset[rank + 1] - head_offset[rank]; }
    /// One number of all fields: ranks with different ones cannot exchange.
    std::uint64_t fingerprint() const;

    friend bool operator==(const MailboxLayout&, const MailboxLayout&) = default;
};

/// Throws Error naming the field of the shape.
MailboxLayout mailbox_layout(const DcpShape& shape);

/// Where every rank's mailbox lies in this rank's address space: layout.bytes each, 16-byte aligned, stores by this
/// rank's device must reach them. base[rank] is this rank's own. Who made them visible does not matter.
struct PeerTable {
    int rank = 0;
    std::array<std::byte*, max_ranks> base{};
};

/// Of a rank's memory beside the mailbox that no other rank sees: epoch and state.
inline constexpr std::size_t mailbox_control_bytes = 64;

/// A pause for tests of the protocol: the CTA `cta` of the stage's kernel (on a CPU: the call) first waits.
enum class DcpStage : std::uint8_t { none, gather, decode, push, merge };
struct DcpDelay {
    DcpStage stage = DcpStage::none;
    std::int32_t cta = 0;
    float us = 0;
};

std::string_view name(DcpStage stage);

/// One rank's end of a group. Plain data: the memory is the provider's or the caller's. One exchange at a time, whose
/// calls are in order on one stream (or thread); every rank makes the same sequence of exchanges, with the same rows.
struct Mailbox {
    MailboxLayout layout{};
    PeerTable peers{};
    Device device{};
    Memory control{};          ///< mailbox_control_bytes, 64-byte aligned, on the device
    double wait_limit_s = 10;  ///< how long a kernel waits for a rank before the exchange fails
    DcpDelay delay{};          ///< for tests
};

/// What became of a rank's exchanges.
struct MailboxStatus {
    std::uint32_t exchanges = 0;      ///< that are complete
    bool failed = false;              ///< a wait passed the limit: everything fails until reset
    DcpStage stage = DcpStage::none;  ///< that waited
    int missing_rank = -1;
    std::int64_t row = 0;
    std::uint32_t exchange = 0;  ///< its number

    /// "exchange 17: merge waited 10 s for rank 3 (row 2)", or "17 exchanges complete".
    std::string text() const;
};

/// Arms this rank's mailbox and starts counting at 0, after which the status is good again. All ranks do it together:
/// everything in flight ended on all of them, then reset on each, then no exchange before all have reset (a barrier on
/// either side; groups have it).
void reset(const Mailbox& mailbox, Stream stream = {});

/// Waits for the stream, and looks.
MailboxStatus status(const Mailbox& mailbox, Stream stream = {});

struct GatherQueryArgs {
    std::int64_t rows = 0;  ///< <= layout.rows
    ConstTensor query{};    ///< this rank's heads: [>= rows, >= own heads, d_qk] bf16, or f8_e4m3 where the mailbox is;
                            ///< heads dense and 16-byte aligned
    float q_scale = 1.0F;   ///< stored code = e4m3(x / q_scale), saturating, where BF16 becomes E4M3; else 1
};

/// This rank's query heads to the mailbox of every rank. NaN arrives as NaN, though with another payload.
void gather_query(const Mailbox& mailbox, const GatherQueryArgs& args, Stream stream = {});

/// Waits for all ranks' heads of the first `rows` rows: to `out` [>= rows, >= heads, d_qk] of the mailbox's dtype. For
/// kernels that read a tensor; decode of a dcp problem does it by itself.
void receive_query(const Mailbox& mailbox, std::int64_t rows, const Tensor& out, Stream stream = {});

struct PushArgs {
    std::int64_t rows = 0;
    ConstTensor out{};     ///< bf16 or f32 [>= rows, >= heads, 512]: of all ranks' heads, over this rank's records
    ConstTensor lse{};     ///< f32 [>= rows, >= heads]
    ConstTensor counts{};  ///< i32 [>= rows], optional: a count <= 0 empties the row, whatever its lse
    LseBase lse_base = LseBase::two;  ///< of lse; what travels is base 2
};

/// Results of a decode of its own to the heads' owners: what decode of a dcp problem does by itself. A head of lse -inf
/// sends nothing but that.
void push(const Mailbox& mailbox, const PushArgs& args, Stream stream = {});

struct MergePushedArgs {
    std::int64_t rows = 0;
    ConstTensor sinks{};  ///< f32 [>= own heads], optional: applied here, once
    Tensor out{};         ///< bf16 or f32 [>= rows, >= own heads, 512]
    Tensor lse{};         ///< f32 [>= rows, >= own heads], optional; excludes the sink
    LseBase lse_base = LseBase::natural;
    bool query_gathered = true;  ///< gather_query was part of the exchange; it must have been on all ranks or none
};

/// Waits for what all ranks pushed for this rank's heads: the arithmetic (and the bits) of merge, in order of ranks.
/// Frees the mailbox's pieces for the exchange after the next one, and ends the exchange.
void merge_pushed(const Mailbox& mailbox, const MergePushedArgs& args, Stream stream = {});

/// N ranks in one process and on one device: on a CPU for a thread each; on a GPU for calls of all ranks stage by stage
/// on one stream (lockstep), or on streams of their own where every kernel of all ranks fits the device at once. Owns
/// the memory.
class LoopbackGroup {
   public:
    LoopbackGroup(const DcpShape& shape, Device device);
    ~LoopbackGroup();
    LoopbackGroup(const LoopbackGroup&) = delete;
    LoopbackGroup& operator=(const LoopbackGroup&) = delete;

    int world() const { return static_cast<int>(mailboxes_.size()); }
    Mailbox& mailbox(int rank) { return mailboxes_.at(static_cast<std::size_t>(rank)); }
    const Mailbox& mailbox(int rank) const { return mailboxes_.at(static_cast<std::size_t>(rank)); }
    /// Of all ranks. Nothing may be in flight.
    void reset();

   private:
    void release();

    std::vector<Mailbox> mailboxes_;
    std::byte* memory_ = nullptr;
};

}  // namespace sparsemla
