#include "nccl/window.h"

#include <cstring>

namespace sparsemla::detail {

namespace {

constexpr const char* fall_back = "; NcclExchange needs no reach";

/// Stands at the begin of each rank's memory while addresses are checked.
struct Tag {
    std::uint64_t magic = 0x736D6C61'77696E64;
    std::uint64_t rank = 0;
    std::uint64_t layout = 0;

    friend bool operator==(const Tag&, const Tag&) = default;
};

[[noreturn]] void fail(const char* call, const std::string& required, const std::string& received) {
    throw Error(ErrorKind::device, call, required, received);
}

}  // namespace

std::byte* peer_base(const NcclWindowHead& head, NcclTeam team, int peer) {
    const int place = team.rank + peer - head.world_rank;
    if (head.flat_base == nullptr || place < 0 || place >= team.ranks) return nullptr;
    return head.flat_base + (static_cast<std::uint64_t>(place) * head.stride_4g << 32);
}

PeerWindow::PeerWindow(GroupRank& rank, std::size_t bytes) : rank_(rank), bytes_(bytes) {
    try {
        rank.together("memory that NCCL makes visible to other ranks", [&](StepReport&) { allocate(); });
        rank.together("an NCCL window", [&](StepReport&) { map(); });
        const std::vector<StepReport> reports = rank.together("addresses of an NCCL window", [&](StepReport& own) {
            find_bases();
            for (int peer = 0; peer < rank.world(); ++peer)
                if (bases_[static_cast<std::size_t>(peer)] != nullptr) own.reaches |= 1U << peer;
        });
        std::vector<std::uint32_t> reaches;
        for (const StepReport& report : reports) reaches.push_back(report.reaches);
        if (const std::string text = unreachable_text(reaches, rank.records()); !text.empty())
            throw Error(ErrorKind::unsupported, "mailboxes", "ranks that can store to each other's memory",
                        text + fall_back);
        check_bases();
    } catch (...) {
        release();
        throw;
    }
}

PeerWindow::~PeerWindow() { release(); }

void PeerWindow::allocate() {
    int result = nccl_success;
    rank_.device().with_current([&] { result = rank_.api().mem_alloc(&memory_, bytes_); });
    if (result != nccl_success) {
        memory_ = nullptr;
        fail("ncclMemAlloc", std::to_string(bytes_) + " bytes", rank_.api().text_of(result, nullptr));
    }
    // Seen of NCCL 2.28 for the second device of one process.
    if (memory_ == nullptr) fail("ncclMemAlloc", std::to_string(bytes_) + " bytes", "success and a null address");
}

void PeerWindow::map() {
    Communicator& communicator = rank_.communicator();
    rank_.device().with_current([&] {
        communicator.finish(
            rank_.api().window_register(communicator.handle(), memory_, bytes_, &window_, nccl_window_symmetric),
            "ncclCommWindowRegister");
    });
    if (window_ == nullptr)
        throw Error(ErrorKind::unsupported, "ncclCommWindowRegister", "a window",
                    std::string("none: no peer access between all ranks, or no cuMem support") + fall_back);
    // Without support, 2.28 returns a handle of its own in host memory instead.
    if (rank_.api().peer_pointer == nullptr && !rank_.device().holds(window_))
        throw Error(ErrorKind::unsupported, "ncclCommWindowRegister", "a window in memory of the device",
                    std::string("another handle: no peer access between all ranks, or no cuMem support") + fall_back);
}

void PeerWindow::find_bases() {
    const NcclApi& api = rank_.api();
    Communicator& communicator = rank_.communicator();
    NcclWindowHead head{};
    NcclTeam team{};
    if (api.peer_pointer == nullptr) {
        rank_.device().with_current([&] { team = api.team_lsa(communicator.handle()); });
        const Stream stream = rank_.device().stream();
        rank_.device().download(&head, window_, sizeof head, stream);
        if (head.world_rank != rank_.rank() || head.team_rank != team.rank || head.stride_4g == 0)
            fail(
                "the window of NCCL "
                "2.28",
                "rank " + std::to_string(rank_.rank()) + ", " + std::to_string(team.rank) +
                    " of its team, and a stride",
                "rank " + std::to_string(head.world_rank) + ", " + std::to_string(head.team_rank) + ", stride " +
                    std::to_string(head.stride_4g));
    }
    for (int peer = 0; peer < rank_.world(); ++peer) {
        void* address = nullptr;
        if (api.peer_pointer == nullptr)
            address = peer_base(head, team, peer);
        else
            communicator.finish(api.peer_pointer(window_, 0, peer, &address), "ncclGetPeerDevicePointer");
        bases_[static_cast<std::size_t>(peer)] = static_cast<std::byte*>(address);
    }
}

/// Each rank's tag, through every rank's addresses. Own memory is looked at through the window, too.
void PeerWindow::check_bases() {
    const Stream stream = rank_.device().stream();
    const auto self = static_cast<std::size_t>(rank_.rank());
    Tag tag{.rank = self, .layout = rank_.records().front().fingerprint};
    rank_.together("a mark in an NCCL window", [&](StepReport&) {
        rank_.device().upload(memory_, &tag, sizeof tag, stream);
        rank_.communicator().wait(stream, "a mark in an NCCL window");
    });
    rank_.together("addresses of an NCCL window", [&](StepReport&) {
        for (std::size_t peer = 0; peer < static_cast<std::size_t>(rank_.world()); ++peer) {
            Tag seen{.magic = 0};
            rank_.device().download(&seen, bases_[peer], sizeof seen, stream);
            tag.rank = peer;
            if (!(seen == tag))
                fail("addresses of an NCCL window", "the memory of rank " + std::to_string(peer),
                     seen.magic == tag.magic ? "that of rank " + std::to_string(seen.rank) : "other memory");
        }
    });
    bases_[self] = static_cast<std::byte*>(memory_);
}

/// The window, then its memory. A communicator that does not work any more takes the window with it: first.
void PeerWindow::release() noexcept {
    try {
        Communicator& communicator = rank_.communicator();
        if (communicator.broken()) communicator.give_up();
        rank_.device().with_current([&] {
            if (window_ != nullptr && !communicator.broken())
                rank_.api().window_deregister(communicator.handle(), window_);
            if (memory_ != nullptr) rank_.api().mem_free(memory_);
        });
    } catch (...) {
        // No device to make current: nothing can be freed.
    }
    window_ = nullptr;
    memory_ = nullptr;
}

}  // namespace sparsemla::detail
