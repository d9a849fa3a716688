// A communicator and its end: every call looked at, every wait bounded, cleaned up on every path.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "nccl/agreement.h"
#include "nccl/api.h"
#include "nccl/group_device.h"
#include "nccl/meeting.h"

namespace sparsemla::detail {

/// Non-blocking, but for what `blocking` asks for.
class Communicator {
   public:
    /// Waits until all ranks have come. Throws Error(device) when they have not within the limit.
    Communicator(const NcclApi& api, const GroupDevice& device, int rank, int world, const NcclId& id, double limit_s,
                 bool blocking = false);
    ~Communicator();
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    const NcclApi& api() const { return api_; }
    NcclComm handle() const { return handle_; }
    int rank() const { return rank_; }
    int world() const { return world_; }

    /// After a call: until NCCL has done it (the limit counts from here). Throws Error(device) with NCCL's text, after
    /// which only the end is left.
    void finish(int result, const char* call);
    /// Until the stream has ended what is on it; the same limit.
    void wait(Stream stream, const char* what);
    /// Bytes of each rank, of memory of the device, in order of ranks; on the stream. In place where from is its part.
    void all_gather(const void* from, void* to, std::size_t bytes, Stream stream);

    bool broken() const { return broken_; }
    /// The end of a communicator that other ranks may not end with: frees it, and nothing else works from then on.
    void give_up() noexcept;

   private:
    void end() noexcept;
    [[noreturn]] void fail(const char* call, const std::string& received);

    const NcclApi& api_;
    const GroupDevice& device_;
    int rank_, world_;
    double limit_s_;
    bool blocking_;
    NcclComm handle_ = nullptr;
    bool broken_ = false;
};

/// A rank that has met the others and agreed with them.
class GroupRank {
   public:
    GroupRank(const MailboxLayout& layout, std::unique_ptr<GroupDevice> device, const NcclBootstrap& bootstrap,
              const NcclOptions& options, int kind);
    GroupRank(const GroupRank&) = delete;
    GroupRank& operator=(const GroupRank&) = delete;

    const NcclApi& api() const { return api_; }
    const GroupDevice& device() const { return *device_; }
    Communicator& communicator() { return *communicator_; }
    int rank() const { return bootstrap_.rank; }
    int world() const { return bootstrap_.world; }
    double limit_s() const { return options_.setup_limit_s; }
    const std::vector<RankRecord>& records() const { return records_; }

    /// 256 bytes of each rank, from host memory to host memory. Waits.
    template <class Record>
    std::vector<Record> gather(const Record& own) {
        static_assert(sizeof(Record) == record_bytes && std::is_trivially_copyable_v<Record>);
        std::vector<Record> all(static_cast<std::size_t>(world()));
        gather_bytes(&own, all.data());
        return all;
    }
    /// Does the work, then hears of all ranks how it went there: what failed on one is an Error on all. `reaches` is
    /// told to all, too.
    std::vector<StepReport> together(const char* step, const std::function<void(StepReport&)>& work);
    /// Memory of the device on every rank, or an Error on every rank.
    std::unique_ptr<GroupMemory> allocate(std::size_t bytes);
    /// Of the stream: what follows comes after what all ranks' streams held before.
    void barrier(Stream stream);

   private:
    static constexpr std::size_t record_bytes = 256;
    void gather_bytes(const void* own, void* all);
    void compare(const MailboxLayout& layout, int kind);

    NcclBootstrap bootstrap_;
    NcclOptions options_;
    std::unique_ptr<GroupDevice> device_;
    NcclApi api_;
    std::optional<GroupMemory> memory_;  ///< [world + 1][record_bytes], and as much for barriers
    std::unique_ptr<Communicator> communicator_;
    std::vector<RankRecord> records_;
};

}  // namespace sparsemla::detail
