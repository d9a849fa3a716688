// Memory of every rank at an address of this rank, by an NCCL window.
#pragma once

#include <array>

#include "nccl/communicator.h"

namespace sparsemla::detail {

class PeerWindow {
   public:
    /// All ranks at once, of equal size. What fails on one is an Error on all; every address has been seen to lead to
    /// its rank. The contents are undefined.
    PeerWindow(GroupRank& rank, std::size_t bytes);
    ~PeerWindow();
    PeerWindow(const PeerWindow&) = delete;
    PeerWindow& operator=(const PeerWindow&) = delete;

    /// By rank. This rank's own is the memory as it was allocated: a kernel uses one address of it, and no other.
    const std::array<std::byte*, max_ranks>& bases() const { return bases_; }

   private:
    void allocate();
    void map();
    void find_bases();
    void check_bases();
    void release() noexcept;

    GroupRank& rank_;
    std::size_t bytes_;
    void* memory_ = nullptr;
    NcclWindow window_ = nullptr;  ///< NCCL may write it after the call that is given its address
    std::array<std::byte*, max_ranks> bases_{};
};

/// Of rank `peer`, where a window of NCCL 2.28 puts it; null where the team does not hold it. Pure.
std::byte* peer_base(const NcclWindowHead& head, NcclTeam team, int peer);

}  // namespace sparsemla::detail
