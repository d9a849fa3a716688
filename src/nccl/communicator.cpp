#include "nccl/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace sparsemla::detail {

namespace {

/// Soon at first, as most calls take microseconds.
void pause(int round) { round < 200 ? static_cast<void>(usleep(20)) : pause_ms(1); }

std::string host_name() {
    std::array<char, 256> name{};
    return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "an unnamed machine";
}

}  // namespace

Communicator::Communicator(const NcclApi& api, const GroupDevice& device, int rank, int world, const NcclId& id,
                           double limit_s, bool blocking)
    : api_(api), device_(device), rank_(rank), world_(world), limit_s_(limit_s), blocking_(blocking) {
    NcclConfig config{.blocking = blocking ? 1 : 0, .comm_name = "sparsemla"};
    try {
        device.with_current([&] {
            finish(api.comm_init(&handle_, world, id, rank, &config),
                   ("ncclCommInitRankConfig of " + std::to_string(world) + " ranks").c_str());
        });
    } catch (...) {
        end();
        throw;
    }
}

Communicator::~Communicator() { end(); }

void Communicator::fail(const char* call, const std::string& received) {
    broken_ = true;
    throw Error(ErrorKind::device, call, "success on every rank, " + Deadline(limit_s_).text(),
                received + " (rank " + std::to_string(rank_) + ')');
}

void Communicator::finish(int result, const char* call) {
    if (result != nccl_success && result != nccl_in_progress) fail(call, api_.text_of(result, handle_));
    if (blocking_) return;
    const Deadline deadline(limit_s_);
    for (int round = 0;; ++round) {
        int state = nccl_success;
        // A call that has failed may have left the state as it was, and one under way may have returned success.
        const int asked = api_.comm_async_error(handle_, &state);
        if (asked != nccl_success && asked != nccl_in_progress) fail(call, api_.text_of(asked, handle_));
        if (state == nccl_success && asked == nccl_success) return;
        if (state != nccl_success && state != nccl_in_progress) fail(call, api_.text_of(state, handle_));
        if (deadline.passed()) fail(call, "other ranks that have not come");
        pause(round);
    }
}

void Communicator::wait(Stream stream, const char* what) {
    const Deadline deadline(limit_s_);
    for (int round = 0; !device_.idle(stream); ++round) {
        if (deadline.passed()) fail(what, "other ranks that have not come");
        pause(round);
    }
}

void Communicator::all_gather(const void* from, void* to, std::size_t bytes, Stream stream) {
    device_.with_current(
        [&] { finish(api_.all_gather(from, to, bytes, nccl_uint8, handle_, stream.handle), "ncclAllGather"); });
}

void Communicator::give_up() noexcept {
    broken_ = true;
    end();
}

/// Finalize first, so that destroy has nothing to wait for; what other ranks keep from ending is aborted.
void Communicator::end() noexcept {
    if (handle_ == nullptr) return;
    try {
        device_.with_current([&] {
            if (!broken_) {
                try {
                    if (!blocking_) finish(api_.comm_finalize(handle_), "ncclCommFinalize");
                } catch (const Error&) {
                }
            }
            broken_ ? api_.comm_abort(handle_) : api_.comm_destroy(handle_);
        });
    } catch (...) {
        // No device to make current: nothing can be freed.
    }
    handle_ = nullptr;
    broken_ = true;
}

GroupRank::GroupRank(const MailboxLayout& layout, std::unique_ptr<GroupDevice> device, const NcclBootstrap& bootstrap,
                     const NcclOptions& options, int kind)
    : bootstrap_(bootstrap), options_(options), device_(std::move(device)) {
    if (bootstrap.world != layout.world)
        throw Error(ErrorKind::invalid_argument, "bootstrap.world", std::to_string(layout.world) + ", as of the shape",
                    std::to_string(bootstrap.world));
    if (!(options.setup_limit_s > 0) || options.setup_limit_s > 1e6)
        throw Error(ErrorKind::invalid_argument, "setup_limit_s", "above 0 and at most 10^6",
                    std::to_string(options.setup_limit_s));
    if (!options.members.empty() && static_cast<int>(options.members.size()) != layout.world)
        throw Error(ErrorKind::invalid_argument, "members", "none or " + std::to_string(layout.world),
                    std::to_string(options.members.size()));
    // A rank without the library does not come to the meeting, where the others hear which one is missing; rank 0 tells
    // them.
    if (bootstrap.rank != 0) api_ = load_nccl(options.library);
    const NcclId id = meet(bootstrap, [&] {
        api_ = load_nccl(options.library);
        return api_.new_id();
    });
    if (api_.version == 0) api_ = load_nccl(options.library);
    memory_.emplace(*device_, 2 * static_cast<std::size_t>(world() + 1) * record_bytes);
    communicator_ = std::make_unique<Communicator>(api_, *device_, rank(), world(), id, options.setup_limit_s);
    part(bootstrap);
    compare(layout, kind);
}

void GroupRank::compare(const MailboxLayout& layout, int kind) {
    RankRecord own = record_of(layout, rank(), options_, api_.version, host_name(), device_->identity());
    own.kind = kind;
    records_ = gather(own);
    const Disagreement found = disagreement(records_, options_.members);
    if (!found.received.empty())
        throw Error(ErrorKind::invalid_argument, found.argument, found.required, found.received);
}

void GroupRank::gather_bytes(const void* own, void* all) {
    const Stream stream = device_->stream();
    std::byte* gathered = memory_->data() + record_bytes;
    device_->upload(memory_->data(), own, record_bytes, stream);
    communicator_->all_gather(memory_->data(), gathered, record_bytes, stream);
    communicator_->wait(stream, "the set-up of a group");
    device_->download(all, gathered, static_cast<std::size_t>(world()) * record_bytes, stream);
}

std::vector<StepReport> GroupRank::together(const char* step, const std::function<void(StepReport&)>& work) {
    StepReport own;
    try {
        work(own);
    } catch (const Error& error) {
        if (communicator_->broken()) throw;
        own.failed = 1 + static_cast<std::int32_t>(error.kind());
        put_text(own.problem, error.what());
    }
    std::vector<StepReport> all = gather(own);
    const auto failed = std::find_if(all.begin(), all.end(), [](const StepReport& r) { return r.failed != 0; });
    if (failed == all.end()) return all;
    throw Error(static_cast<ErrorKind>(failed->failed - 1), step, "success on every rank", problems_text(all));
}

std::unique_ptr<GroupMemory> GroupRank::allocate(std::size_t bytes) {
    std::unique_ptr<GroupMemory> memory;
    together("memory of a group", [&](StepReport&) { memory = std::make_unique<GroupMemory>(*device_, bytes); });
    return memory;
}

void GroupRank::barrier(Stream stream) {
    std::byte* memory = memory_->data() + static_cast<std::size_t>(world() + 1) * record_bytes;
    constexpr std::size_t bytes = 16;
    communicator_->all_gather(memory, memory + record_bytes, bytes, stream);
}

}  // namespace sparsemla::detail
