// Exchanges of decode context parallelism by NCCL's collectives, for ranks whose GPUs cannot store to each other's
// memory (several machines): the same steps and results as through mailboxes (mailbox.h), slower.
#pragma once

#include <memory>
#include <string>

#include "sparsemla/nccl_group.h"

namespace sparsemla {

/// One rank of a group. An exchange is, on one stream and with the same rows on every rank:
///     gather_query    an all-gather, padded to the largest share of heads
///     decode          of a plain problem over all ranks' heads, then an all-to-all of the results; or, for results of
///                     another decode: receive_query and push
///     merge_pushed    merge of what came for this rank's heads, in order of ranks
/// Results are the bits that mailboxes give, payloads of NaN aside. (LSEs of natural base that are pushed become base 2
/// here with one rounding more or less.) All calls only enqueue, and can be captured. Nothing bounds the wait for
/// a rank that does not come: NCCL's kernels wait until give_up().
class NcclExchange {
   public:
    /// As NcclGroup's: meets (an id or a file serves one group), sets up two communicators, compares; errors likewise.
    /// Owns all memory that exchanges of up to shape.rows rows need: allocated here, and once. Runs exchanges without
    /// meaning, so that NCCL's connections stand. The set-up of the second communicator waits for ranks, all of which
    /// have just answered, without a limit.
    NcclExchange(const DcpShape& shape, Device device, const NcclBootstrap& bootstrap, const NcclOptions& options = {});
    /// The same on a device of the caller's making: for tests.
    NcclExchange(const DcpShape& shape, std::unique_ptr<detail::GroupDevice> device, const NcclBootstrap& bootstrap,
                 const NcclOptions& options);
    /// Nothing may be in flight.
    ~NcclExchange();
    NcclExchange(const NcclExchange&) = delete;
    NcclExchange& operator=(const NcclExchange&) = delete;

    int rank() const;
    int world() const;
    const MailboxLayout& layout() const;  ///< of a group with mailboxes of this shape
    std::string describe() const;

    /// What a dcp problem becomes for decode here: query and results as tensors, lse of base 2, BF16, no sinks.
    static Problem problem(Problem dcp);

    /// sparsemla::gather_query's arguments and checks.
    void gather_query(const GatherQueryArgs& args, Stream stream = {});
    /// The gathered query to `out` [>= rows, >= heads, d_qk] of the shape's dtype.
    void receive_query(std::int64_t rows, const Tensor& out, Stream stream = {});
    /// decode of a plan of problem(); args have no query, out and lse. Throws Error for another plan.
    void decode(const Plan& plan, DecodeArgs args, Stream stream = {});
    /// sparsemla::push's arguments and checks.
    void push(const PushArgs& args, Stream stream = {});
    /// sparsemla::merge_pushed's; query_gathered is not looked at.
    void merge_pushed(const MergePushedArgs& args, Stream stream = {});

    void barrier(Stream stream);  ///< as NcclGroup's
    /// Stops what waits in NCCL, on this rank: nothing but the destructor may be called from then on.
    void give_up() noexcept;

   private:
    struct Parts;
    std::unique_ptr<Parts> parts_;
};

}  // namespace sparsemla
