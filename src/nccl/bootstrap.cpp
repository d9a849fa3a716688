// Who this rank is, and how it gets the group's id.
#include "sparsemla/nccl_bootstrap.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <sstream>
#include <thread>

#include "nccl/api.h"
#include "nccl/meeting.h"
#include "sparsemla/mailbox.h"

namespace sparsemla {

namespace {

[[noreturn]] void refuse(std::string argument, const std::string& required, const std::string& received) {
    throw Error(ErrorKind::invalid_argument, std::move(argument), required, received);
}

std::optional<std::string> variable(const Environment& environment, const char* name) {
    const char* value = environment(name);
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

int number(const Environment& environment, const char* name, int least, int most) {
    const std::optional<std::string> text = variable(environment, name);
    const std::string required = "a number " + std::to_string(least) + " .. " + std::to_string(most);
    if (!text) refuse(name, required, "no such variable");
    int value = 0;
    const char* end = text->data() + text->size();
    const auto [stop, error] = std::from_chars(text->data(), end, value);
    if (error != std::errc() || stop != end || value < least || value > most) refuse(name, required, "'" + *text + "'");
    return value;
}

struct Launcher {
    const char *rank, *world, *local_rank;
    std::array<const char*, 2> job;  ///< variables that together name a run; those that are set
};

constexpr Launcher launchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
    {"OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK",
     {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", {"PMI_JOBID", "SLURM_JOB_ID"}},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
};

const Launcher& launcher_of(const Environment& environment) {
    for (const Launcher& launcher : launchers)
        if (environment(launcher.rank) != nullptr) return launcher;
    std::string names;
    for (const Launcher& launcher : launchers) names += (names.empty() ? "" : ", ") + std::string(launcher.rank);
    refuse("environment", "a launcher's rank: one of " + names, "none of them");
}

std::string job_of(const Environment& environment, const Launcher& launcher) {
    std::string job;
    for (const char* name : launcher.job)
        if (const auto value = variable(environment, name)) job += (job.empty() ? "" : ".") + *value;
    return job;
}

TcpMeeting tcp_from(const Environment& environment, const EnvironmentOptions& options, const std::string& job) {
    const std::optional<std::string> host = variable(environment, "MASTER_ADDR");
    if (!host || host->empty())
        refuse("MASTER_ADDR", "rank 0's address, or a file to meet by (EnvironmentOptions::file)", "no such variable");
    const int port = number(environment, "MASTER_PORT", 1, 65535) + options.port_offset;
    if (port < 1 || port > 65535)
        refuse("port_offset", "a port 1 .. 65535 beside MASTER_PORT", "port " + std::to_string(port));
    return {.host = *host, .port = port, .tag = job + '/' + options.tag};
}

void check(const NcclBootstrap& bootstrap) {
    if (bootstrap.world < 1 || bootstrap.world > max_ranks)
        refuse("bootstrap.world", "1 .. " + std::to_string(max_ranks), std::to_string(bootstrap.world));
    if (bootstrap.rank < 0 || bootstrap.rank >= bootstrap.world)
        refuse("bootstrap.rank", "0 .. " + std::to_string(bootstrap.world - 1), std::to_string(bootstrap.rank));
    if (!(bootstrap.limit_s > 0) || bootstrap.limit_s > 1e6)
        refuse("bootstrap.limit_s", "above 0 and at most 10^6", std::to_string(bootstrap.limit_s));
}

}  // namespace

NcclBootstrap bootstrap_from_environment(const Environment& environment, const EnvironmentOptions& options) {
    const Launcher& launcher = launcher_of(environment);
    NcclBootstrap bootstrap{.limit_s = options.limit_s};
    bootstrap.world = number(environment, launcher.world, 1, max_ranks);
    bootstrap.rank = number(environment, launcher.rank, 0, bootstrap.world - 1);
    if (environment(launcher.local_rank) != nullptr)
        bootstrap.local_rank = number(environment, launcher.local_rank, 0, 1 << 20);
    const std::string job = job_of(environment, launcher);
    if (options.file.path.empty()) {
        if (bootstrap.world > 1) bootstrap.meeting = tcp_from(environment, options, job);
        return bootstrap;
    }
    FileMeeting file = options.file;
    if (file.nonce.empty()) file.nonce = job.empty() ? job : job + '/' + options.tag;
    if (file.nonce.empty()) refuse("file.nonce", "a name of this run, as the launcher gives none", "nothing");
    bootstrap.meeting = file;
    return bootstrap;
}

NcclId meet(const NcclBootstrap& bootstrap, const std::function<NcclId()>& make_id) {
    check(bootstrap);
    if (const auto* id = std::get_if<NcclId>(&bootstrap.meeting)) return *id;
    if (bootstrap.world == 1) return make_id();
    if (const auto* tcp = std::get_if<TcpMeeting>(&bootstrap.meeting))
        return detail::meet_by_tcp(bootstrap, *tcp, make_id);
    if (const auto* file = std::get_if<FileMeeting>(&bootstrap.meeting))
        return detail::meet_by_file(bootstrap, *file, make_id);
    refuse("bootstrap.meeting", "an id, TCP or a file, as there are " + std::to_string(bootstrap.world) + " ranks",
           "nothing");
}

void part(const NcclBootstrap& bootstrap) noexcept {
    const auto* file = std::get_if<FileMeeting>(&bootstrap.meeting);
    if (file != nullptr && bootstrap.rank == 0 && bootstrap.world > 1) detail::remove_meeting_file(*file);
}

NcclId new_nccl_id(const std::string& library) { return detail::load_nccl(library).new_id(); }

int detail::Deadline::milliseconds(int most) const {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - std::chrono::steady_clock::now());
    return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, most));
}

std::string detail::Deadline::text() const {
    std::ostringstream text;
    text << "within " << limit_s_ << " s";
    return text.str();
}

void detail::pause_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

std::uint64_t detail::hash_of(std::string_view text) {
    std::uint64_t hash = 0xCBF29CE484222325;  // FNV-1a
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
    return hash;
}

std::string detail::ranks_text(const std::vector<int>& ranks) {
    std::string text;
    for (std::size_t i = 0; i < ranks.size(); ++i)
        text += (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") + std::to_string(ranks[i]);
    return text;
}

}  // namespace sparsemla
