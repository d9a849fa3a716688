// decode_latency as a rank of decode context parallelism: the query of all ranks' heads comes from this rank's mailbox,
// piece by piece as it arrives, and results go to the mailboxes of the heads' owners.
#pragma once

#include "cuda/decode_latency_tile.cuh"
#include "cuda/mailbox_wait.cuh"

namespace sparsemla::detail::latency {

template <class T>
__device__ const MailboxView& mailbox_of(const Params& params) {
    static_assert(T::dcp);
    return static_cast<const DcpParams&>(params).mailbox;
}

/// Where a head's results go.
struct HeadOwner {
    std::byte* values;
    std::uint32_t* lse;

    __device__ HeadOwner(const MailboxView& mailbox, std::uint32_t exchange, int row, int head) {
        const int owner = mailbox.owner_of_head(head), of_owner = head - mailbox.head_offset[owner];
        std::byte* peer = mailbox.peers[owner];
        values = peer + mailbox.values_byte(exchange, mailbox.rank, row, of_owner);
        lse = reinterpret_cast<std::uint32_t*>(peer + mailbox.lse_byte(exchange, mailbox.rank, row, of_owner));
    }
};

__device__ inline void push_lse(const HeadOwner& owner, float lse) {
    store_peer(owner.lse, isnan(lse) ? nan_word : __float_as_uint(lse));
}

/// Dimensions dim, dim + 1 of the head whose results go to `values`, if it has any. NaN becomes 0x7FFF.
__device__ inline void push_pair(std::uint64_t values, int dim, float x, float y) {
    store_peer_if(values != 0, reinterpret_cast<std::byte*>(values) + 2 * dim, f32x2_to_bf16x2(x, y));
}

/// The exchange that the call belongs to. One thread of the grid says so to merge_pushed.
template <class T>
__device__ Exchange begin_exchange(const Params& params) {
    const MailboxView& mailbox = mailbox_of<T>(params);
    const ExchangeState state(mailbox);
    const int cta = static_cast<int>(blockIdx.x + blockIdx.y * gridDim.x);
    if (cta == 0 && threadIdx.x == 0 && state.failed == 0) mailbox.control->current = state.next;
    delay(mailbox, DcpStage::decode, cta);
    return {state.next, state.failed != 0};
}

/// From the mailbox's query of parity 0, where Params::query is, to the exchange's: pieces of 16 bytes.
template <class T>
__device__ std::int64_t parity_words(const Params& params, const Exchange& exchange) {
    return exchange.number % 2 * (mailbox_of<T>(params).query_parity_bytes / 16);
}

/// Whether results of this head of the tile go anywhere.
template <class T>
__device__ bool has_owner(const Params& params, const Place<T>& at, int head) {
    return at.first_head + head < params.heads && !at.exchange.failed;
}

/// Where the outputs of a head of the tile go, for the warps that have them: to Place::peer. Before its sums are known.
template <class T>
__device__ void find_owner(const Params& params, const Place<T>& at, int head) {
    std::uint64_t values = 0;
    if (has_owner(params, at, head)) {
        const HeadOwner owner(mailbox_of<T>(params), at.exchange.number, at.row, at.first_head + head);
        values = reinterpret_cast<std::uint64_t>(owner.values);
    }
    store_shared_64(at.peer(head), values);
}

/// By the same thread, once they are: a head without columns has no outputs to push. One of NaN has.
template <class T>
__device__ void check_owner(const Place<T>& at, int head, float sum) {
    if (sum == 0) store_shared_64(at.peer(head), 0);
}

template <class T>
__device__ void push_lse_of(const Params& params, const Place<T>& at, int head, float lse) {
    if (!has_owner(params, at, head)) return;
    push_lse(HeadOwner(mailbox_of<T>(params), at.exchange.number, at.row, at.first_head + head), lse);
}

}  // namespace sparsemla::detail::latency
