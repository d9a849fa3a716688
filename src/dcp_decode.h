// decode of a dcp problem: the checks, and what stands around a kernel that does not exchange by itself.
#pragma once

#include "kernels.h"
#include "mailbox_view.h"

namespace sparsemla::detail {

/// What such a kernel reads and writes, at the end of the workspace (before what token ids become): query, out and
/// lse of the problem's rows, each from a multiple of 64 bytes on.
struct ExchangeMemory {
    std::size_t query_bytes = 0, out_bytes = 0, lse_bytes = 0;

    std::size_t bytes() const { return query_bytes + out_bytes + lse_bytes; }
};

ExchangeMemory exchange_memory(const Problem& problem);

/// 0 of other problems.
std::size_t exchange_bytes(const Problem& problem);

/// The mailbox of a call of a dcp problem. Throws Error where it is missing or of other heads, query, rows or device.
MailboxView check_mailbox(const Plan& plan, const DecodeArgs& args);

/// Waits for the query, decodes and pushes; query, out and lse of `params` are not set.
void decode_between_calls(const Kernel& kernel, DecodeParams params, Stream stream);

}  // namespace sparsemla::detail
