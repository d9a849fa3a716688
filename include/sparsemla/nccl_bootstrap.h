// How the processes of an nccl group (nccl_group.h) meet: which rank each one is, and how the 128 bytes that NCCL calls
// a unique id come from rank 0 to the others. No part of it needs NCCL or a GPU but new_nccl_id.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <variant>

#include "sparsemla/tensor.h"

namespace sparsemla {

inline constexpr const char* default_nccl_library = "libnccl.so.2";

/// What a communicator is made from: one id, one communicator.
struct NcclId {
    std::array<char, 128> bytes{};

    friend bool operator==(const NcclId&, const NcclId&) = default;
};

/// Rank 0 listens on the port of all its addresses until every other rank has come, the others connect. Ranks of other
/// tags, of another world or of a number that has come are refused, on all ranks. Nothing is encrypted: for networks of
/// the job's own.
struct TcpMeeting {
    std::string host{};  ///< where rank 0 is, as other ranks name it
    int port = 0;        ///< free on rank 0's machine
    std::string tag{};   ///< of this group: a second group of the same job takes another one, and another port
};

/// Rank 0 writes a file that the others wait for, all at once (it renames it). Those take no file of another nonce, so
/// that one which an earlier run left behind is no danger. rank 0 removes it once the group stands.
struct FileMeeting {
    std::string path{};   ///< that all ranks see
    std::string nonce{};  ///< of this group and run, the same on all ranks: a job's number, and the group's name
};

/// Which rank of how many, and how the id comes to it.
struct NcclBootstrap {
    int rank = 0;
    int world = 1;
    int local_rank = -1;  ///< among those of this machine, where the environment says it; -1: unknown
    /// An NcclId is one that the caller has brought to all ranks. Nothing: for a group of one rank.
    std::variant<std::monostate, NcclId, TcpMeeting, FileMeeting> meeting{};
    double limit_s = 60;  ///< of the meeting
};

/// Reads a variable: null where it is not set. The library reads no environment by itself; the caller hands over how,
/// as a lambda around the C library's function.
using Environment = std::function<const char*(const char*)>;

struct EnvironmentOptions {
    FileMeeting file{};   ///< not empty: meet by this file. Its nonce may be empty where the launcher tells a job's
    int port_offset = 1;  ///< from MASTER_PORT, where torchrun's own store listens. Groups of one job: one each
    std::string tag{};
    double limit_s = 60;
};

/// Rank and world from the first launcher that shows itself, and a meeting by options.file, or by TCP at
/// MASTER_ADDR : MASTER_PORT + port_offset:
///     torchrun   RANK, WORLD_SIZE, LOCAL_RANK (nonce: TORCHELASTIC_RUN_ID)
///     Open MPI   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK (PMIX_NAMESPACE, OMPI_MCA_ess_base_jobid)
///     MPICH      PMI_RANK, PMI_SIZE, MPI_LOCALRANKID (PMI_JOBID)
///     Slurm      SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID (SLURM_JOB_ID and SLURM_STEP_ID)
/// The group is the launcher's whole world; for a part of it, fill an NcclBootstrap in by hand. Throws Error
/// (invalid_argument) naming the variable that is missing or malformed. Waits for nobody.
NcclBootstrap bootstrap_from_environment(const Environment& environment, const EnvironmentOptions& options = {});

/// For callers who bring it to the other ranks themselves. The process that calls it takes part in every rank's set-up
/// and must live on until then. Throws Error (unsupported: no such library, or an old one; device: NCCL's own).
NcclId new_nccl_id(const std::string& library = default_nccl_library);

/// The id, on every rank: make_id() of rank 0. Throws Error (io) after limit_s, naming the ranks that have not come (by
/// TCP: on every rank that came) or what was seen instead, and Error (invalid_argument) for a bootstrap that cannot be.
NcclId meet(const NcclBootstrap& bootstrap, const std::function<NcclId()>& make_id);

/// After all ranks have the id: rank 0 removes the file, if it is one. Never throws.
void part(const NcclBootstrap& bootstrap) noexcept;

}  // namespace sparsemla
