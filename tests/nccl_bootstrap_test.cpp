// How ranks meet: by TCP, by a file, from a launcher's environment. Ranks are threads.
#include "sparsemla/nccl_bootstrap.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>
#include <vector>

namespace sparsemla::test {
namespace {

NcclId id_of(char first) {
    NcclId id;
    for (std::size_t i = 0; i < id.bytes.size(); ++i) id.bytes[i] = static_cast<char>(first + static_cast<char>(i));
    return id;
}

/// A port that is free now.
int free_port() {
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address);
    socklen_t bytes = sizeof address;
    getsockname(socket, reinterpret_cast<sockaddr*>(&address), &bytes);
    close(socket);
    return ntohs(address.sin_port);
}

std::string fresh_path() {
    static std::atomic<int> number{0};
    return (std::filesystem::temp_directory_path() /
            ("sparsemla_meet_" + std::to_string(getpid()) + "_" + std::to_string(++number)))
        .string();
}

/// What each rank got: its id's first byte as text, or its Error's.
std::vector<std::string> meet_all(const std::vector<NcclBootstrap>& bootstraps, bool make_fails = false) {
    std::vector<std::string> results(bootstraps.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < bootstraps.size(); ++i)
        threads.emplace_back([&, i] {
            try {
                const NcclId id = meet(bootstraps[i], [&] {
                    if (make_fails) throw Error(ErrorKind::unsupported, "library x", "NCCL", "nothing");
                    return id_of('a');
                });
                results[i] = id == id_of('a') ? "id" : "another id";
            } catch (const Error& error) {
                results[i] = error.what();
            }
        });
    for (std::thread& thread : threads) thread.join();
    return results;
}

std::vector<NcclBootstrap> by_tcp(int world, double limit_s = 20) {
    const TcpMeeting meeting{.host = "127.0.0.1", .port = free_port(), .tag = "t"};
    std::vector<NcclBootstrap> all;
    for (int rank = 0; rank < world; ++rank)
        all.push_back({.rank = rank, .world = world, .meeting = meeting, .limit_s = limit_s});
    return all;
}

std::vector<NcclBootstrap> by_file(int world, double limit_s = 20) {
    const FileMeeting meeting{.path = fresh_path(), .nonce = "run 1"};
    std::vector<NcclBootstrap> all;
    for (int rank = 0; rank < world; ++rank)
        all.push_back({.rank = rank, .world = world, .meeting = meeting, .limit_s = limit_s});
    return all;
}

std::string text_of(const NcclBootstrap& bootstrap) {
    try {
        meet(bootstrap, [] { return id_of('a'); });
        return "id";
    } catch (const Error& error) {
        return error.what();
    }
}

void expect_has(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

TEST(K28_PeerSetUp, RanksMeetByTcp) {
    for (int world : {1, 2, 8})
        for (const std::string& result : meet_all(by_tcp(world))) EXPECT_EQ(result, "id");
}

TEST(K28_PeerSetUp, RanksMeetByFile) {
    for (int world : {1, 2, 8}) {
        const auto all = by_file(world);
        for (const std::string& result : meet_all(all)) EXPECT_EQ(result, "id");
        const std::string path = std::get<FileMeeting>(all[0].meeting).path;
        for (const NcclBootstrap& bootstrap : all) part(bootstrap);
        EXPECT_FALSE(std::filesystem::exists(path));
    }
}

// Everybody who came hears who did not.
TEST(K28_PeerSetUp, MissingRanksAreNamedOnEveryRank) {
    auto all = by_tcp(5, 0.5);
    all.erase(all.begin() + 3);
    all.erase(all.begin() + 1);
    for (const std::string& result : meet_all(all)) {
        expect_has(result, "all but 1 and 3");
        expect_has(result, "within 0.5 s");
    }
}

TEST(K28_PeerSetUp, WithoutRankZeroThereIsALimit) {
    auto all = by_tcp(3, 0.3);
    all.erase(all.begin());
    for (const std::string& result : meet_all(all)) expect_has(result, "the id from rank 0, within 0.3 s");
    all = by_file(3, 0.3);
    all.erase(all.begin());
    for (const std::string& result : meet_all(all)) expect_has(result, "no such file");
}

TEST(K28_PeerSetUp, RanksOfAnotherWorldOrTagOrNumberAreRefusedOnEveryRank) {
    auto all = by_tcp(3);
    all[1].world = 4;
    for (const std::string& result : meet_all(all)) expect_has(result, "rank 1 of 4 ranks");
    all = by_tcp(3);
    std::get<TcpMeeting>(all[2].meeting).tag = "other";
    for (const std::string& result : meet_all(all)) expect_has(result, "rank 2 of another tag");
    all = by_tcp(3);
    all[2].rank = 1;
    for (const std::string& result : meet_all(all)) expect_has(result, "two of rank 1");
}

// Rank 0 has no library: the others learn it from it.
TEST(K28_PeerSetUp, ARankZeroWithoutAnIdTellsTheOthers) {
    for (const std::string& result : meet_all(by_tcp(3), true)) expect_has(result, "library x: need NCCL, got nothing");
}

TEST(K28_PeerSetUp, StrayConnectionsAreNoRanks) {
    const auto all = by_tcp(2);
    const int port = std::get<TcpMeeting>(all[0].meeting).port;
    std::atomic<bool> stop{false};
    std::thread stranger([&] {
        while (!stop) {
            const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
            sockaddr_in address{};
            address.sin_family = AF_INET;
            address.sin_port = htons(static_cast<std::uint16_t>(port));
            address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            if (connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
                EXPECT_GE(send(socket, "GET / HTTP/1.1\r\n\r\nGET / HTTP", 28, MSG_NOSIGNAL), -1);
            }
            close(socket);
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    });
    std::vector<NcclBootstrap> late = {all[1]};
    std::vector<std::string> first(1);
    std::thread zero([&] { first = meet_all({all[0]}); });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_EQ(meet_all(late).front(), "id");
    zero.join();
    EXPECT_EQ(first.front(), "id");
    stop = true;
    stranger.join();
}

TEST(K28_PeerSetUp, APortInUseIsNamed) {
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    ASSERT_EQ(bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    ASSERT_EQ(listen(socket, 1), 0);
    socklen_t bytes = sizeof address;
    getsockname(socket, reinterpret_cast<sockaddr*>(&address), &bytes);
    const NcclBootstrap bootstrap{
        .rank = 0, .world = 2, .meeting = TcpMeeting{.host = "127.0.0.1", .port = ntohs(address.sin_port)}};
    expect_has(text_of(bootstrap), "a port that rank 0 can listen on");
    close(socket);
}

// What lies there already: of an earlier run, cut short, foreign, of another world. Rank 0 comes later, or never.
TEST(K28_PeerSetUp, StaleAndForeignFilesAreWaitedOut) {
    auto all = by_file(2, 0.3);
    const std::string path = std::get<FileMeeting>(all[0].meeting).path;
    auto earlier = all[0];
    std::get<FileMeeting>(earlier.meeting).nonce = "run 0";
    EXPECT_EQ(text_of(earlier), "id");
    expect_has(text_of(all[1]), "a file of another run");
    std::filesystem::resize_file(path, 100);
    expect_has(text_of(all[1]), "a file of 100 bytes");
    std::filesystem::resize_file(path, 160);
    expect_has(text_of(all[1]), "a file that no rank 0 has written");
    std::ofstream(path, std::ios::trunc) << std::string(500, 'x');
    expect_has(text_of(all[1]), "a longer file");
    for (NcclBootstrap& bootstrap : all) bootstrap.limit_s = 20;
    for (const std::string& result : meet_all(all)) EXPECT_EQ(result, "id");
    all[1].world = 3;
    expect_has(text_of(all[1]), "2 ranks, as rank 0 says");
    std::filesystem::remove(path);
}

TEST(K28_PeerSetUp, ImpossibleBootstrapsAreRefused) {
    expect_has(text_of({.rank = 2, .world = 2}), "bootstrap.rank");
    expect_has(text_of({.rank = 0, .world = 17}), "bootstrap.world");
    expect_has(text_of({.rank = 0, .world = 2}), "bootstrap.meeting");
    expect_has(text_of({.rank = 0, .world = 2, .meeting = id_of('a'), .limit_s = 0}), "bootstrap.limit_s");
    expect_has(text_of({.rank = 0, .world = 2, .meeting = FileMeeting{.path = fresh_path()}}), "file.nonce");
    expect_has(text_of({.rank = 0, .world = 2, .meeting = FileMeeting{.nonce = "x"}}), "file.path");
    expect_has(text_of({.rank = 1, .world = 2, .meeting = TcpMeeting{.host = "h"}}), "tcp.port");
    expect_has(text_of({.rank = 0, .world = 2, .meeting = FileMeeting{"/nonexistent/place/file", "x"}}),
               "a place where rank 0 can write");
    EXPECT_EQ(text_of({.rank = 1, .world = 2, .meeting = id_of('a')}), "id");
    EXPECT_EQ(text_of({}), "id");
}

using Variables = std::map<std::string, std::string>;

Environment environment_of(const Variables& variables) {
    return [variables](const char* name) {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
    };
}

std::string refusal(const Variables& variables, const EnvironmentOptions& options = {}) {
    try {
        bootstrap_from_environment(environment_of(variables), options);
        return "";
    } catch (const Error& error) {
        return error.what();
    }
}

TEST(NcclBootstrap, LaunchersAreRead) {
    const NcclBootstrap torchrun = bootstrap_from_environment(environment_of({{"RANK", "3"},
                                                                              {"WORLD_SIZE", "8"},
                                                                              {"LOCAL_RANK", "1"},
                                                                              {"MASTER_ADDR", "a"},
                                                                              {"MASTER_PORT", "29500"},
                                                                              {"SLURM_PROCID", "7"}}));
    EXPECT_EQ(torchrun.rank, 3);
    EXPECT_EQ(torchrun.world, 8);
    EXPECT_EQ(torchrun.local_rank, 1);
    EXPECT_EQ(std::get<TcpMeeting>(torchrun.meeting).host, "a");
    EXPECT_EQ(std::get<TcpMeeting>(torchrun.meeting).port, 29501);
    const NcclBootstrap mpi = bootstrap_from_environment(
        environment_of({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"PMIX_NAMESPACE", "n"}}),
        {.file = {.path = "p"}, .tag = "g"});
    EXPECT_EQ(mpi.local_rank, -1);
    EXPECT_EQ(std::get<FileMeeting>(mpi.meeting).nonce, "n/g");
    const NcclBootstrap slurm = bootstrap_from_environment(
        environment_of({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_ID", "5"}, {"SLURM_STEP_ID", "1"}}),
        {.file = {.path = "p"}});
    EXPECT_EQ(std::get<FileMeeting>(slurm.meeting).nonce, "5.1/");
    const NcclBootstrap pmi = bootstrap_from_environment(environment_of({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}));
    EXPECT_EQ(pmi.world, 1);
}

TEST(NcclBootstrap, WhatIsMissingOrMalformedIsNamed) {
    expect_has(refusal({}), "OMPI_COMM_WORLD_RANK");
    expect_has(refusal({{"RANK", "0"}}), "WORLD_SIZE: need a number");
    expect_has(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), "RANK: need a number 0 .. 1, got '2'");
    expect_has(refusal({{"RANK", "x"}, {"WORLD_SIZE", "2"}}), "'x'");
    expect_has(refusal({{"RANK", "0"}, {"WORLD_SIZE", "64"}}), "WORLD_SIZE: need a number 1 .. 16");
    expect_has(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), "MASTER_ADDR");
    expect_has(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}}), "MASTER_PORT");
    expect_has(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "65535"}}),
               "port_offset");
    expect_has(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}}, {.file = {.path = "p"}}), "file.nonce");
}

}  // namespace
}  // namespace sparsemla::test
