// NCCL's interface for ranks that are threads of one process, in host memory: as much of it as groups call. Tests load
// it in NCCL's place, and tell it what to do wrong (fake_nccl.h).
#include "tests/fake_nccl.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

using sparsemla::test::FakeNcclFaults;
using sparsemla::test::FakeNcclState;

constexpr int success = 0, unhandled = 1, invalid_argument = 4, in_progress = 7;
constexpr std::size_t stride = std::size_t{1} << 32;

struct Id {
    char bytes[128];
    bool operator<(const Id& other) const { return std::memcmp(bytes, other.bytes, sizeof bytes) < 0; }
};

struct Comm;

/// What NCCL 2.28 keeps of a window in memory of the device.
struct alignas(16) Window {
    void* host;
    char* flat_base;
    std::int32_t team_rank, world_rank;
    std::uint32_t stride_4g, multicast;
    Comm* comm;
    char* memory;
};

/// A collective call of all ranks, in the order of each rank's calls.
struct Collective {
    std::vector<Comm*> came;
    std::vector<std::vector<char>> sent;
    std::vector<void*> to;
    int count = 0;
    bool done = false;
};

struct World {
    int size = 0;
    std::vector<Comm*> comms;
    int joined = 0;
    std::map<int, Collective> collectives;
    std::map<std::pair<int, int>, std::deque<std::vector<char>>> mail;  ///< [from, to]
    char* flat = nullptr;
};

struct Comm {
    std::shared_ptr<World> world;
    int rank = 0;
    bool blocking = false;
    int calls = 0;
    std::set<Window*> windows;
};

struct Memory {
    int file;
    std::size_t bytes;
};

struct Library {
    std::mutex mutex;
    std::condition_variable changed;
    FakeNcclFaults faults;
    FakeNcclState state;
    std::map<Id, std::weak_ptr<World>> worlds;
    std::map<void*, Memory> memory;
    long ids = 0;
};
Library& library() {
    static Library instance;
    return instance;
}

using Lock = std::unique_lock<std::mutex>;

/// The call's bytes of this rank to all; `done(all)` by the last to come, under the lock.
template <class Done>
int collective(Comm* comm, Lock& lock, std::vector<char> sent, void* to, const Done& done) {
    World& world = *comm->world;
    const int number = comm->calls++;
    Collective& call = world.collectives[number];
    const auto size = static_cast<std::size_t>(world.size);
    call.came.resize(size);
    call.sent.resize(size);
    call.to.resize(size);
    const auto rank = static_cast<std::size_t>(comm->rank);
    call.came[rank] = comm;
    call.sent[rank] = std::move(sent);
    call.to[rank] = to;
    if (++call.count == world.size) {
        done(call);
        call.done = true;
        call.sent.clear();
        library().changed.notify_all();
    }
    if (!comm->blocking) return in_progress;
    library().changed.wait_for(lock, std::chrono::seconds(20), [&] { return call.done; });
    return call.done ? success : unhandled;
}

void close_window(Comm* comm, Window* window) {
    comm->windows.erase(window);
    --library().state.windows;
    delete window;
}

/// The memory of all ranks side by side, a second time.
void map_flat(World& world, const Collective& call) {
    if (world.flat == nullptr)
        world.flat = static_cast<char*>(mmap(nullptr, static_cast<std::size_t>(world.size) * stride, PROT_NONE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (std::size_t rank = 0; rank < call.sent.size(); ++rank) {
        void* memory = nullptr;
        std::memcpy(&memory, call.sent[rank].data(), sizeof memory);
        const Memory& of = library().memory.at(memory);
        mmap(world.flat + rank * stride, of.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, of.file, 0);
    }
}

void open_windows(Collective& call) {
    const FakeNcclFaults& faults = library().faults;
    World& world = *call.came.front()->world;
    if (faults.version < 22900) map_flat(world, call);
    const int team = faults.team == 0 ? world.size : faults.team;
    for (std::size_t rank = 0; rank < call.to.size(); ++rank) {
        Comm* comm = call.came[rank];
        auto** to = static_cast<Window**>(call.to[rank]);
        if (comm == nullptr || faults.null_window == static_cast<int>(rank)) continue;
        if (faults.foreign_window == static_cast<int>(rank)) {
            *to = reinterpret_cast<Window*>(reinterpret_cast<char*>(&library().ids) + 1);
            continue;
        }
        const int number = static_cast<int>(rank);
        auto* window = new Window{};
        window->team_rank = number % team;
        window->world_rank = number;
        window->flat_base = world.flat + static_cast<std::size_t>(number - number % team) * stride;
        window->stride_4g = 1;
        window->comm = comm;
        std::memcpy(&window->memory, call.sent[rank].data(), sizeof window->memory);
        comm->windows.insert(window);
        ++library().state.windows;
        *to = window;
    }
}

/// Nobody writes to it any more.
void forget(Comm* comm) {
    World& world = *comm->world;
    for (auto& [number, call] : world.collectives)
        for (Comm*& other : call.came)
            if (other == comm) other = nullptr;
    world.comms[static_cast<std::size_t>(comm->rank)] = nullptr;
    while (!comm->windows.empty()) close_window(comm, *comm->windows.begin());
    --library().state.comms;
    delete comm;
}

struct Transfer {
    bool is_send;
    const void* from;
    void* to;
    std::size_t bytes;
    int peer;
    Comm* comm;
};
thread_local std::vector<Transfer> transfers;

}  // namespace

extern "C" {

struct ConfigHead {
    std::size_t size;
    unsigned magic, version;
    int blocking;
};
struct Team {
    int ranks, rank, stride;
};

void fake_nccl_set(const FakeNcclFaults* faults) {
    const Lock lock(library().mutex);
    library().faults = *faults;
    library().state = {};
}
void fake_nccl_state(FakeNcclState* state) {
    const Lock lock(library().mutex);
    *state = library().state;
}

int ncclGetVersion(int* version) {
    *version = library().faults.version;
    return success;
}
const char* ncclGetErrorString(int code) { return code == success ? "no error" : "a fake error"; }
const char* ncclGetLastError(Comm*) { return "said the fake"; }

int ncclGetUniqueId(Id* id) {
    const Lock lock(library().mutex);
    std::memset(id->bytes, 0, sizeof id->bytes);
    const long number = ++library().ids;
    std::memcpy(id->bytes, &number, sizeof number);
    return success;
}

int ncclCommInitRankConfig(Comm** out, int size, Id id, int rank, ConfigHead* config) {
    Lock lock(library().mutex);
    if (config->magic != 0xCAFEBEEF || config->size < 80) return invalid_argument;
    std::shared_ptr<World> world = library().worlds[id].lock();
    if (!world) {
        world = std::make_shared<World>();
        world->size = size;
        world->comms.resize(static_cast<std::size_t>(size));
        library().worlds[id] = world;
    }
    auto* comm = new Comm{.world = world, .rank = rank, .blocking = config->blocking == 1, .windows = {}};
    world->comms[static_cast<std::size_t>(rank)] = comm;
    ++world->joined;
    ++library().state.comms;
    *out = comm;
    library().changed.notify_all();
    if (!comm->blocking) return in_progress;
    const bool all =
        library().changed.wait_for(lock, std::chrono::seconds(20), [&] { return world->joined == world->size; });
    return all ? success : unhandled;
}

int ncclCommGetAsyncError(Comm* comm, int* state) {
    const Lock lock(library().mutex);
    const World& world = *comm->world;
    *state = world.joined < world.size ? in_progress : success;
    for (const auto& [number, call] : world.collectives)
        if (number < comm->calls && !call.done) *state = in_progress;
    if (library().faults.async_error == comm->rank && comm->calls > 1) *state = unhandled;
    return success;
}

int ncclCommFinalize(Comm*) { return success; }
int ncclCommDestroy(Comm* comm) {
    const Lock lock(library().mutex);
    if (!comm->windows.empty()) library().state.violations |= 1;
    forget(comm);
    return success;
}
int ncclCommAbort(Comm* comm) {
    const Lock lock(library().mutex);
    ++library().state.aborts;
    forget(comm);
    return success;
}

int ncclMemAlloc(void** out, std::size_t bytes) {
    const Lock lock(library().mutex);
    Library& all = library();
    *out = nullptr;
    if (all.faults.null_memory > 0 && ++all.state.allocations == all.faults.null_memory) return success;
    if (all.faults.no_memory > 0 && ++all.state.allocations == all.faults.no_memory) return unhandled;
    const std::size_t whole = (bytes + 4095) / 4096 * 4096;
    const int file = memfd_create("fake_nccl", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(whole)) != 0) return unhandled;
    *out = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    all.memory[*out] = {file, whole};
    ++all.state.memory;
    return success;
}
int ncclMemFree(void* memory) {
    const Lock lock(library().mutex);
    const auto found = library().memory.find(memory);
    if (found == library().memory.end()) return invalid_argument;
    for (const auto& [id, weak] : library().worlds)
        if (const auto world = weak.lock())
            for (const Comm* comm : world->comms)
                if (comm != nullptr)
                    for (const Window* window : comm->windows)
                        if (window->memory == memory) library().state.violations |= 2;
    munmap(memory, found->second.bytes);
    close(found->second.file);
    library().memory.erase(found);
    --library().state.memory;
    return success;
}

int ncclCommWindowRegister(Comm* comm, void* memory, std::size_t, Window** window, int flags) {
    Lock lock(library().mutex);
    *window = nullptr;
    if (flags != 1) return invalid_argument;
    if (library().faults.register_error == comm->rank) return unhandled;
    std::vector<char> sent(sizeof memory);
    std::memcpy(sent.data(), &memory, sizeof memory);
    collective(comm, lock, sent, window, [](Collective& call) { open_windows(call); });
    return success;  // as NCCL 2.28 does while it is still under way
}
int ncclCommWindowDeregister(Comm* comm, Window* window) {
    const Lock lock(library().mutex);
    if (reinterpret_cast<std::uintptr_t>(window) % 16 == 0) close_window(comm, window);
    return success;
}
Team ncclTeamLsa(Comm* comm) {
    const int team = library().faults.team == 0 ? comm->world->size : library().faults.team;
    return {team, comm->rank % team, 1};
}
int ncclGetPeerDevicePointer(Window* window, std::size_t offset, int peer, void** out) {
    const Lock lock(library().mutex);
    const FakeNcclFaults& faults = library().faults;
    World& world = *window->comm->world;
    *out = nullptr;
    if (faults.team != 0 && peer / faults.team != window->world_rank / faults.team) return success;
    if (faults.swapped == window->world_rank) peer = world.size - 1 - peer;
    const Comm* comm = world.comms[static_cast<std::size_t>(peer)];
    if (comm == nullptr || comm->windows.empty()) return success;
    *out = (*comm->windows.begin())->memory + offset;
    return success;
}

int ncclAllGather(const void* from, void* to, std::size_t bytes, int type, Comm* comm, void*) {
    Lock lock(library().mutex);
    if (type != 1) return invalid_argument;
    const auto* begin = static_cast<const char*>(from);
    return collective(comm, lock, std::vector<char>(begin, begin + bytes), to, [&](Collective& call) {
        for (std::size_t rank = 0; rank < call.to.size(); ++rank)
            for (std::size_t other = 0; other < call.to.size(); ++other)
                if (call.came[rank] != nullptr)
                    std::memcpy(static_cast<char*>(call.to[rank]) + other * bytes, call.sent[other].data(), bytes);
    });
}

int ncclSend(const void* from, std::size_t bytes, int, int peer, Comm* comm, void*) {
    transfers.push_back({true, from, nullptr, bytes, peer, comm});
    return success;
}
int ncclRecv(void* to, std::size_t bytes, int, int peer, Comm* comm, void*) {
    transfers.push_back({false, nullptr, to, bytes, peer, comm});
    return success;
}
int ncclGroupStart() {
    transfers.clear();
    return success;
}
int ncclGroupEnd() {
    Lock lock(library().mutex);
    for (const Transfer& transfer : transfers)
        if (transfer.is_send) {
            const auto* begin = static_cast<const char*>(transfer.from);
            transfer.comm->world->mail[{transfer.comm->rank, transfer.peer}].emplace_back(begin,
                                                                                          begin + transfer.bytes);
        }
    library().changed.notify_all();
    for (const Transfer& transfer : transfers)
        if (!transfer.is_send) {
            auto& box = transfer.comm->world->mail[{transfer.peer, transfer.comm->rank}];
            if (!library().changed.wait_for(lock, std::chrono::seconds(20), [&] { return !box.empty(); }))
                return unhandled;
            if (box.front().size() != transfer.bytes) return invalid_argument;
            std::memcpy(transfer.to, box.front().data(), transfer.bytes);
            box.pop_front();
        }
    transfers.clear();
    return success;
}

}  // extern "C"
