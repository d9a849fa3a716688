// dcp: a case shared out over ranks, whole exchanges between them, checked and timed stage by stage.
#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "tools/dcp_report.h"
#include "tools/dcp_run.h"
#include "tools/subcommands.h"

namespace sparsemla::tool {
namespace {

/// Who gives the ranks the memory in which they meet, and runs them.
struct Provider {
    std::string name;
    DcpReport (*run)(const LoadedStep&, const DcpFlags&, Progress&) = nullptr;  ///< null: not in this build
};

std::vector<Provider> providers() { return {{"loopback", run_loopback}, {"nccl"}}; }

std::vector<std::string> provider_names() {
    std::vector<std::string> names;
    for (const Provider& provider : providers()) names.push_back(provider.name);
    return names;
}

/// Throws Error (unsupported) for one that this build has not.
Provider find_provider(const std::string& name) {
    std::string there;
    for (const Provider& provider : providers()) {
        if (provider.run == nullptr) continue;
        if (provider.name == name) return provider;
        there += (there.empty() ? "" : " or ") + provider.name;
    }
    throw Error(ErrorKind::unsupported, "--provider", there + ": this build has no other", name);
}

Status run_dcp(const DcpFlags& flags) {
    const Provider provider = find_provider(flags.provider);
    Progress progress;
    const DcpReport report = provider.run(load_step(flags.path), flags, progress);
    progress.clear();
    flags.json ? print_json(to_json(report, flags)) : print(text_of(report, flags));
    return report.pass() ? Status::ok : Status::check_failed;
}

}  // namespace

Subcommand add_dcp(CLI::App& parent) {
    CLI::App* app =
        parent.add_subcommand("dcp", "Share a case out over ranks, run whole exchanges, check and time them");
    auto flags = std::make_shared<DcpFlags>();
    app->add_option("CASE", flags->path, "a case file; its slots count as tokens")->required()->type_name("FILE");
    integer_option(*app, "--ranks", flags->ranks, 1, max_ranks, "ranks that share the case's heads and records")
        ->required();
    word_option(*app, "--provider", flags->provider, provider_names(),
                "who gives the ranks the memory in which they meet")
        ->capture_default_str();
    integer_option(*app, "--interleave", flags->interleave, 1, std::int64_t{1} << 30,
                   "tokens in a row that a rank owns: token t belongs to rank (t / interleave) % ranks")
        ->capture_default_str();
    app->add_option("--heads", flags->heads, "heads of each rank, such as 5,11 (default: as equal as possible)")
        ->type_name("LIST");
    integer_option(*app, "--steps", flags->steps, 1, 100'000, "exchanges to check, and again to time")
        ->capture_default_str();
    app->add_flag("--by-calls", flags->by_calls, "receive_query, decode and push apart, instead of decode alone");
    number_option(*app, "--wait-limit", flags->wait_limit_s, 1e-3, 1e6, "seconds a rank waits for another one")
        ->capture_default_str();
    app->add_option("--late", flags->late,
                    "RANK:STAGE:MICROSECONDS: in every exchange this rank is late at gather, decode, push or merge")
        ->type_name("TEXT");
    add_run_flags(*app, flags->run, false);
    app->add_flag("--json", flags->json,
                  "one JSON document: path, status, step, provider, interleave, by_calls, device, kernel, schedule, "
                  "fused, mailbox_bytes, float64, expected, exchanges, difference, lockstep, timed_exchanges, slowest, "
                  "ranks [rank, first_head, heads, columns, median]; times in us");
    app->footer(
        "The first exchange is of all rows; it is held against float64 and against expected.*, with what may be lost\n"
        "because partial results travel as BF16. The others are of rows that change from exchange to exchange; every\n"
        "result must be the bits of the merged partial results of plain decodes. Times are of exchanges of all rows.\n"
        "CPU: a thread for each rank, whose kernel takes --threads more (default: an equal share of all).\n"
        "GPU: stage by stage, and in each rank by rank, on one stream.\n"
        "Exit status: 0 all pass, 1 a check failed, 2 bad input or a rank that waited in vain.\n"
        "Examples:\n"
        "  sparsemla dcp step.safetensors --ranks 4\n"
        "  sparsemla dcp step.safetensors --ranks 2 --heads 5,11 --interleave 16 --late 1:gather:500");
    return {app, [flags] { return run_dcp(*flags); }};
}

}  // namespace sparsemla::tool
