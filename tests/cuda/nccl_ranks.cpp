// One process of a group of several, a GPU each: nccl_ranks [EXCHANGES]. A launcher's environment says which rank it is
// (nccl_bootstrap.h); scripts/nccl_check.sh starts all. Exchanges through mailboxes, with rows that change, must give
// the bits of the merged partial results, and so must exchanges by collectives; then a group with a rank that disagrees
// must be refused on every rank. Ends with 0, 1 (wrong) or 77 (skipped: no GPU for this rank, no NCCL).
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "tests/dcp.h"
#include "tests/nccl_ranks.h"

namespace sparsemla::test {
namespace {

struct Setting {
    NcclBootstrap bootstrap;
    NcclOptions options;
    int exchanges;
};

/// Another meeting of the same ranks.
NcclBootstrap meeting_of(const Setting& setting, int number) {
    NcclBootstrap bootstrap = setting.bootstrap;
    if (auto* tcp = std::get_if<TcpMeeting>(&bootstrap.meeting)) tcp->tag += '/' + std::to_string(number);
    if (auto* file = std::get_if<FileMeeting>(&bootstrap.meeting)) {
        file->path += '.' + std::to_string(number);
        file->nonce += '/' + std::to_string(number);
    }
    return bootstrap;
}

int say(const Setting& setting, const std::string& what, const std::string& problem) {
    std::printf("%s rank %d: %s%s%s\n", problem.empty() ? "PASS" : "FAIL", setting.bootstrap.rank, what.c_str(),
                problem.empty() ? "" : ": ", problem.c_str());
    std::fflush(stdout);
    return problem.empty() ? 0 : 1;
}

/// Unequal shares: 3, 4, 5, 3 ..
std::vector<std::int64_t> heads_of(int world) {
    std::vector<std::int64_t> offset{0};
    for (int rank = 0; rank < world; ++rank) offset.push_back(offset.back() + 3 + rank % 3);
    return offset;
}

int check_mailboxes(const Setting& setting, bool unequal, int number) {
    const int world = setting.bootstrap.world;
    DcpStep step({.rows = 8,
                  .head_offset = unequal ? heads_of(world) : equal_heads(world, 4),
                  .width = 130,
                  .sinks = true,
                  .seed = 51});
    NcclGroup group(shape_of(step.group(), step.step()), tested_device().device, meeting_of(setting, number),
                    setting.options);
    std::printf("     %s\n", group.describe().c_str());
    const harness::GpuStream stream(tested_device().device);
    const std::string problem =
        run_by_mailbox(group, step.group(), step.step(), step.windows(setting.exchanges), stream.stream());
    group.reset(stream.stream());
    group.barrier(stream.stream());
    stream.synchronize();
    return say(setting, std::string("mailboxes, ") + (unequal ? "unequal shares" : "equal shares"), problem);
}

int check_collectives(const Setting& setting, bool unequal, int number) {
    const int world = setting.bootstrap.world;
    DcpStep step({.rows = 8,
                  .head_offset = unequal ? heads_of(world) : equal_heads(world, 4),
                  .width = 130,
                  .sinks = true,
                  .by_calls = true,
                  .seed = 52});
    NcclExchange exchange(shape_of(step.group(), step.step()), tested_device().device, meeting_of(setting, number),
                          setting.options);
    std::printf("     %s\n", exchange.describe().c_str());
    const harness::GpuStream stream(tested_device().device);
    std::string problem =
        run_by_collectives(exchange, step.group(), step.step(), step.windows(setting.exchanges), &stream);
    CollectiveRank rank(exchange, step.group(), step.step());
    const harness::DcpWindow window{1, 5};
    const harness::GpuGraph graph(stream, [&](Stream s) { rank.enqueue(window, false, s); });
    for (int i = 0; i < 5 && problem.empty(); ++i) {
        rank.poison();
        graph.replay(stream.stream());
        stream.synchronize();
        problem = rank.difference_of(window);
        if (!problem.empty()) problem = "in a graph: " + problem;
    }
    exchange.barrier(stream.stream());
    stream.synchronize();
    return say(setting, std::string("collectives, ") + (unequal ? "unequal shares" : "equal shares"), problem);
}

/// The last rank has other rows: every rank must hear of it.
int check_disagreement(const Setting& setting, int number) {
    const int world = setting.bootstrap.world;
    const bool last = setting.bootstrap.rank == world - 1;
    std::string problem = "no Error";
    try {
        const NcclGroup group(equal_shares(world, 4, last ? 9 : 8), tested_device().device, meeting_of(setting, number),
                              setting.options);
    } catch (const Error& error) {
        const std::string wanted = "rank " + std::to_string(world - 1) + " with 9 rows";
        problem = std::string(error.what()).find(wanted) != std::string::npos ? "" : error.what();
    }
    return world == 1 ? 0 : say(setting, "a rank that disagrees", problem);
}

int run(int exchanges) {
    Setting setting{.bootstrap = {},
                    .options = {.library = environment("SPARSEMLA_NCCL", default_nccl_library)},
                    .exchanges = exchanges};
    EnvironmentOptions meeting{.file = {}, .port_offset = 1, .tag = "nccl_ranks", .limit_s = 120};
    meeting.file.path = environment("SPARSEMLA_MEETING_FILE", "");
    meeting.file.nonce = environment("SPARSEMLA_MEETING_NONCE", "");
    setting.bootstrap = bootstrap_from_environment([](const char* name) { return std::getenv(name); }, meeting);
    const int gpu = setting.bootstrap.local_rank >= 0 ? setting.bootstrap.local_rank : setting.bootstrap.rank;
    if (gpu >= harness::gpu_count()) {
        std::printf("SKIP rank %d: no GPU %d\n", setting.bootstrap.rank, gpu);
        return 77;
    }
    setenv("SPARSEMLA_TEST_DEVICE", ("cuda:" + std::to_string(gpu)).c_str(), 1);
    int failures = 0, number = 0;
    for (const bool unequal : {false, true}) failures += check_mailboxes(setting, unequal, number++);
    for (const bool unequal : {false, true}) failures += check_collectives(setting, unequal, number++);
    failures += check_disagreement(setting, number++);
    return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace sparsemla::test

int main(int argc, char** argv) {
    try {
        return sparsemla::test::run(argc > 1 ? std::atoi(argv[1]) : 200);
    } catch (const std::exception& error) {
        std::printf("FAIL %s\n", error.what());
        return 1;
    }
}
