// The ranks of decode context parallelism over one case: shared out, exchanged, judged and timed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "harness/dcp_times.h"
#include "harness/tolerance.h"
#include "sparsemla/mailbox.h"
#include "tools/flags.h"
#include "tools/output.h"
#include "tools/run.h"

namespace sparsemla::tool {

/// --late: a rank that waits before a stage, in every exchange.
struct LateRank {
    int rank = 0;
    DcpDelay delay{};
};

struct DcpFlags {
    std::string path;
    std::int64_t ranks = 0;
    std::string provider = "loopback";
    std::int64_t interleave = 1;
    std::string heads;  ///< "5,11"; "": as equal as they go round
    std::int64_t steps = 20;
    double wait_limit_s = 10;
    bool by_calls = false;
    std::string late;
    RunFlags run;
    bool json = false;
};

struct DcpRankReport {
    std::int64_t first_head = 0, heads = 0;
    std::int64_t least_columns = 0, most_columns = 0;  ///< of a row that the rank owns
    double mean_columns = 0;
    harness::DcpTimes median{};  ///< of the timed exchanges
};

struct DcpReport {
    std::string step;
    std::vector<std::string> notes;
    std::int64_t interleave = 1;
    bool by_calls = false;
    std::int64_t rows = 0;
    Plan plan;  ///< of every rank
    MailboxLayout mailbox;
    std::vector<DcpRankReport> ranks;
    harness::Verdict oracle;               ///< of an exchange of all rows
    std::optional<harness::Verdict> file;  ///< the same against expected.*
    std::int64_t exchanges = 0;            ///< whose results were compared with the merged partial results
    std::string difference;                ///< the first one found
    std::int64_t timed = 0;                ///< exchanges, of all rows; none where a check failed
    harness::DcpTimes slowest{};           ///< median over them, of the rank that took longest in each

    bool pass() const { return oracle.pass && (!file || file->pass) && difference.empty(); }
};

/// Throws Error for ranks, heads and late ranks that the step does not have, and where an exchange waited too long.
DcpReport run_loopback(const LoadedStep& loaded, const DcpFlags& flags, Progress& progress);

}  // namespace sparsemla::tool
