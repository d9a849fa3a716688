// What of NCCL this library calls: own declarations of its C interface as NCCL 2.28.3 to 2.32.3 have it (checked
// against their headers), found in a shared library at run time. NCCL's own headers are not needed.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <string>

#include "sparsemla/nccl_bootstrap.h"

namespace sparsemla::detail {

inline constexpr int oldest_nccl = 22800;              ///< windows
inline constexpr int nccl_with_peer_pointers = 22900;  ///< ncclGetPeerDevicePointer

/// 22809 of "2.28.9": versions from 2.9 on.
std::string nccl_version_text(int version);

using NcclComm = struct NcclCommOpaque*;
using NcclWindow = struct NcclWindowOpaque*;  ///< to memory of the device

enum NcclResult : int { nccl_success = 0, nccl_in_progress = 7 };

inline constexpr int nccl_uint8 = 1;
inline constexpr int nccl_window_symmetric = 1;

/// ncclConfig_t of 2.28. Newer libraries take it: it says its size and version.
struct NcclConfig {
    std::size_t size = sizeof(NcclConfig);
    std::uint32_t magic = 0xCAFEBEEF;
    std::uint32_t version = oldest_nccl;
    int blocking = INT_MIN;
    int cga_cluster_size = INT_MIN, min_ctas = INT_MIN, max_ctas = INT_MIN;
    const char* net_name = nullptr;
    int split_share = INT_MIN, traffic_class = INT_MIN;
    const char* comm_name = nullptr;
    int collnet_enable = INT_MIN, cta_policy = INT_MIN, shrink_share = INT_MIN, nvls_ctas = INT_MIN;
    int channels_per_net_peer = INT_MIN, nvlink_centric_sched = INT_MIN;
};
static_assert(sizeof(NcclConfig) == 80);

/// The begin of what a window handle points to in 2.28, where no host call gives peers' addresses: rank r of the team
/// that can store to each other's memory has its part at flat_base + r * stride_4g * 2^32.
struct NcclWindowHead {
    void* host;
    std::byte* flat_base;
    std::int32_t team_rank, world_rank;
    std::uint32_t stride_4g, multicast_offset_4k;
};
static_assert(sizeof(NcclWindowHead) == 32);

struct NcclTeam {
    int ranks, rank, stride;
};

struct NcclApi {
    int version = 0;
    std::string library;  ///< as it was asked for

    int (*get_version)(int*) = nullptr;
    int (*get_unique_id)(NcclId*) = nullptr;
    int (*comm_init)(NcclComm*, int world, NcclId, int rank, NcclConfig*) = nullptr;
    int (*comm_async_error)(NcclComm, int*) = nullptr;
    int (*comm_finalize)(NcclComm) = nullptr;
    int (*comm_destroy)(NcclComm) = nullptr;
    int (*comm_abort)(NcclComm) = nullptr;
    const char* (*error_text)(int) = nullptr;
    const char* (*last_error)(NcclComm) = nullptr;
    int (*mem_alloc)(void**, std::size_t) = nullptr;
    int (*mem_free)(void*) = nullptr;
    int (*window_register)(NcclComm, void*, std::size_t, NcclWindow*, int flags) = nullptr;
    int (*window_deregister)(NcclComm, NcclWindow) = nullptr;
    int (*peer_pointer)(NcclWindow, std::size_t offset, int peer, void**) = nullptr;  ///< from 2.29 on
    NcclTeam (*team_lsa)(NcclComm) = nullptr;
    /// A cudaStream_t at the end; counts of bytes, as nccl_uint8 is the type.
    int (*all_gather)(const void*, void*, std::size_t, int type, NcclComm, void* stream) = nullptr;
    int (*send)(const void*, std::size_t, int type, int peer, NcclComm, void* stream) = nullptr;
    int (*recv)(void*, std::size_t, int type, int peer, NcclComm, void* stream) = nullptr;
    int (*group_start)() = nullptr;
    int (*group_end)() = nullptr;

    NcclId new_id() const;
    /// "unhandled system error: <what NCCL says of the last one>".
    std::string text_of(int result, NcclComm comm) const;
};

/// Loads the library if this process has not, and never unloads it. Throws Error (unsupported) naming the library where
/// there is none, where it is older than 2.28 or another major version, or lacks a function.
NcclApi load_nccl(const std::string& library);

}  // namespace sparsemla::detail
