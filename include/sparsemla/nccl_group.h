// Mailboxes of processes, one GPU each, in memory that NCCL makes visible to all of them: the nccl provider. Exchanges
// (mailbox.h) know nothing of NCCL: it allocates, maps and meets.
//
// NCCL is loaded at run time; version 2.28 or newer, windows supported. Where ranks cannot store to each other's memory
// (other machines, no peer access) there are no mailboxes: NcclExchange (nccl_exchange.h) does the same exchanges with
// NCCL's collectives. On machines where NVLink multicast is off, NCCL_NVLS_ENABLE=0 must be in the environment before
// any communicator: NCCL uses multicast by itself, and this library sets no variables.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sparsemla/mailbox.h"
#include "sparsemla/nccl_bootstrap.h"

namespace sparsemla {

namespace detail {
class GroupDevice;
}

struct NcclOptions {
    std::string library = default_nccl_library;  ///< as dlopen takes it: a path, or a name that it finds
    double setup_limit_s = 60;                   ///< of each wait of the set-up for other ranks
    double wait_limit_s = 10;                    ///< Mailbox::wait_limit_s
    /// Optional: how the ranks of the group are numbered elsewhere (in the engine's world, say), in the group's order,
    /// and which of them this is. Compared over all ranks: a group whose ranks disagree about its order would send
    /// heads to the wrong owner.
    std::vector<int> members{};
    int member = -1;
};

/// One rank of a group. Every rank makes one at the same time, with equal arguments but for the rank.
class NcclGroup {
   public:
    /// Meets, sets up a communicator, compares what must be equal on all ranks, allocates and maps the mailboxes,
    /// checks that every address leads to the rank it should, and resets. Waits for all ranks; allocates; not within a
    /// stream capture. What fails on one rank after the meeting is an Error on all of them that names it:
    ///     unsupported       no such library or too old; no CUDA part; ranks out of reach of each other
    ///     invalid_argument  shape, bootstrap, options; ranks that disagree
    ///     io                the meeting (meet)
    ///     device            what a GPU or NCCL reports, a null address, a wait past its limit
    NcclGroup(const DcpShape& shape, Device device, const NcclBootstrap& bootstrap, const NcclOptions& options = {});
    /// The same on a device of the caller's making: for tests.
    NcclGroup(const DcpShape& shape, std::unique_ptr<detail::GroupDevice> device, const NcclBootstrap& bootstrap,
              const NcclOptions& options);
    /// Nothing of this rank may be in flight, and no other rank may send to it any more: a barrier first. Waits at most
    /// setup_limit_s for other ranks.
    ~NcclGroup();
    NcclGroup(const NcclGroup&) = delete;
    NcclGroup& operator=(const NcclGroup&) = delete;

    int rank() const;
    int world() const;
    Mailbox& mailbox();

    /// What follows on the stream starts once all ranks' streams have come here. Enqueues; waits on the host only for
    /// NCCL to take the call, at most setup_limit_s. Not within a stream capture.
    void barrier(Stream stream);
    /// sparsemla::reset of all ranks, each of which calls it: after a failed exchange, say. Nothing may be in flight on
    /// other streams. Waits for all ranks, at most setup_limit_s each way (Error(device)).
    void reset(Stream stream = {});

    /// "rank 1 of 4 on cuda:1, NCCL 2.28.9, mailbox of 12345 bytes".
    std::string describe() const;

   private:
    struct Parts;
    std::unique_ptr<Parts> parts_;
};

}  // namespace sparsemla
