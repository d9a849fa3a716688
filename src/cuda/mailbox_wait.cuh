// What kernels of an exchange have in common: its number, waits with a limit, addresses of pieces.
#pragma once

#include "cuda/device/barriers.cuh"
#include "cuda/device/copies.cuh"
#include "cuda/device/peer.cuh"
#include "mailbox_view.h"

namespace sparsemla::detail {

/// What the kernels before have left in the control: after the dependency wait. `failed` may rise meanwhile; whoever
/// waits notices (WaitLimit).
struct ExchangeState {
    std::uint32_t next, current, failed;

    __device__ explicit ExchangeState(const MailboxView& mailbox) {
        const uint4 words = device::load_global(reinterpret_cast<const uint4*>(mailbox.control));
        next = words.x;
        current = words.y;
        failed = words.z;
    }
};

/// The first failure of a rank is the one that is kept.
__device__ inline void fail(const MailboxView& mailbox, DcpStage stage, int peer, std::int64_t row,
                            std::uint32_t exchange) {
    MailboxControl& control = *mailbox.control;
    if (atomicCAS(&control.failed, 0U, 1U) != 0) return;
    control.stage = static_cast<std::uint32_t>(stage);
    control.peer = static_cast<std::uint32_t>(peer);
    control.row = static_cast<std::uint32_t>(row);
    control.exchange = exchange;
}

/// A thread's waits: they end together once the limit has passed since the first one, or a wait of another thread has
/// failed.
class WaitLimit {
   public:
    __device__ bool passed(const MailboxView& mailbox) {
        if (device::load_peer(&mailbox.control->failed) != 0) return true;
        const std::uint64_t now = device::clock_ns();
        if (begin_ == 0) begin_ = now;
        return now - begin_ > mailbox.limit_ns;
    }

   private:
    std::uint64_t begin_ = 0;
};

__device__ inline bool has_arrived(std::uint32_t word) { return word != armed_word; }
__device__ inline bool has_arrived(const uint4& words) {
    return has_arrived(words.x) && has_arrived(words.y) && has_arrived(words.z) && has_arrived(words.w);
}

/// Asks again until the value has arrived; `value` holds what was asked for already. False once the limit has passed.
template <class Value>
__device__ bool wait_for(const MailboxView& mailbox, const Value* from, Value& value, WaitLimit& limit) {
    for (int polls = 1; !has_arrived(value); ++polls) {
        if (polls % 16 == 0 && limit.passed(mailbox)) return false;
        value = device::load_peer(from);
    }
    return true;
}

/// For tests: the chosen CTA is late.
__device__ inline void delay(const MailboxView& mailbox, DcpStage stage, int cta) {
    if (mailbox.delayed_stage != stage || mailbox.delayed_cta != cta) return;
    const std::uint64_t begin = device::clock_ns();
    while (device::clock_ns() - begin < mailbox.delay_ns) {
    }
}

__device__ inline std::byte* own_mailbox(const MailboxView& mailbox) { return mailbox.peers[mailbox.rank]; }

__device__ inline uint4 armed_words() { return {armed_word, armed_word, armed_word, armed_word}; }

}  // namespace sparsemla::detail
