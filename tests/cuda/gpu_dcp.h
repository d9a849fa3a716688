// Exchanges of ranks on one GPU: waits that end soon, results beside the ranks' own, exchanges in graphs.
#pragma once

#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/cuda/gpu_calls.h"
#include "tests/dcp.h"

namespace sparsemla::test {

/// Streams that share a hardware queue wait for each other, which ranks at the same time may not. Read by the driver
/// when it starts.
inline const int hardware_queues = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);

class GpuDcp : public OnGpu {
   protected:
    static Device gpu() { return tested_device().device; }
};

/// No wait of these tests is right to take long: what hangs fails after this.
inline void limit_waits(harness::DcpGroup& group, double seconds = 2) {
    for (int rank = 0; rank < group.world(); ++rank) group.mailbox(rank).wait_limit_s = seconds;
}

class LimitedStep : public DcpStep {
   public:
    explicit LimitedStep(const DcpSpec& spec, double seconds = 2) : DcpStep(spec) { limit_waits(group(), seconds); }
};

inline void fill(harness::DcpResults& results, int byte) {
    for (harness::DcpOutputs& outputs : results) outputs.fill(byte);
}

/// "", or what differs first from what the window must give.
inline std::string difference(harness::DcpGroup& group, const harness::DcpWindow& window, harness::DcpResults& of) {
    for (int rank = 0; rank < group.world(); ++rank)
        if (std::string text = group.difference(rank, window, &of[static_cast<std::size_t>(rank)]); !text.empty())
            return text;
    return "";
}

inline bool same_bytes(harness::DeviceTensor& a, harness::DeviceTensor& b) {
    const OwnedTensor &x = a.fetch(), &y = b.fetch();
    return x.size_bytes == y.size_bytes && std::memcmp(x.bytes.get(), y.bytes.get(), x.size_bytes) == 0;
}

/// Every byte of the results' memory, rows of no exchange too.
inline bool same_bytes(harness::DcpResults& a, harness::DcpResults& b) {
    for (std::size_t rank = 0; rank < a.size(); ++rank)
        if (!same_bytes(a[rank].out, b[rank].out) || !same_bytes(a[rank].lse, b[rank].lse)) return false;
    return true;
}

/// A row in which every rank owns records: each of them waits there for all the others.
inline std::int64_t row_of_all_ranks(DcpStep& step) {
    for (std::int64_t row = 0; row < step.step().rows; ++row) {
        bool all = true;
        for (const harness::Shard& shard : step.group().shards())
            all = all && reinterpret_cast<const std::int32_t*>(shard.sources[0].counts.bytes.get())[row] > 0;
        if (all) return row;
    }
    ADD_FAILURE() << "the test needs a row in which every rank owns records: " << step.text();
    return 0;
}

/// Number of exchanges that every rank counts; fails where they count different ones, or one has failed.
inline std::uint32_t exchanges_of(harness::DcpGroup& group) {
    const MailboxStatus first = status(group.mailbox(0));
    for (int rank = 0; rank < group.world(); ++rank) {
        const MailboxStatus other = status(group.mailbox(rank));
        EXPECT_FALSE(other.failed) << "rank " << rank << ": " << other.text();
        EXPECT_EQ(other.exchanges, first.exchanges) << "rank " << rank;
    }
    return first.exchanges;
}

/// Exchanges of all ranks captured together, stage by stage, each with results of its own.
class CapturedExchanges {
   public:
    CapturedExchanges(harness::DcpGroup& group, const harness::GpuStream& stream,
                      std::vector<harness::DcpWindow> windows)
        : group_(group), windows_(std::move(windows)) {
        while (results_.size() < windows_.size()) results_.push_back(group.make_results());
        graph_.emplace(stream, [&](Stream on) {
            for (std::size_t i = 0; i < windows_.size(); ++i) group_.lockstep(windows_[i], on, &results_[i]);
        });
    }

    const harness::GpuGraph& graph() const { return *graph_; }
    const std::vector<harness::DcpWindow>& windows() const { return windows_; }

    void poison() {
        for (harness::DcpResults& each : results_) fill(each, 0xFF);
    }
    /// After a replay that has ended.
    std::string difference() {
        for (std::size_t i = 0; i < windows_.size(); ++i)
            if (std::string text = test::difference(group_, windows_[i], results_[i]); !text.empty())
                return "exchange " + std::to_string(i) + " of " + std::to_string(windows_.size()) +
                       " in the graph: " + text;
        return "";
    }
    std::string replay(const harness::GpuStream& stream) {
        poison();
        graph_->replay(stream.stream());
        stream.synchronize();
        return difference();
    }

   private:
    harness::DcpGroup& group_;
    std::vector<harness::DcpWindow> windows_;
    std::vector<harness::DcpResults> results_;
    std::optional<harness::GpuGraph> graph_;
};

/// Whether one of the exchanges to come begins at the row of one of the two before it: what a rank took from an
/// exchange too old would be right then.
inline bool repeats_rows(const std::vector<harness::DcpWindow>& before, const std::vector<harness::DcpWindow>& next) {
    std::vector<std::int64_t> rows;
    for (std::size_t i = before.size() < 2 ? 0 : before.size() - 2; i < before.size(); ++i)
        rows.push_back(before[i].first_row);
    for (const harness::DcpWindow& window : next) {
        for (std::size_t i = rows.size() < 2 ? 0 : rows.size() - 2; i < rows.size(); ++i)
            if (rows[i] == window.first_row) return true;
        rows.push_back(window.first_row);
    }
    return false;
}

/// Windows of at most so many rows, of a step of at least four, none of which repeats rows.
inline std::vector<harness::DcpWindow> small_windows(const DcpStep& step, int count, std::int64_t most_rows,
                                                     std::uint64_t seed) {
    harness::Random random(seed);
    std::vector<harness::DcpWindow> windows;
    while (static_cast<int>(windows.size()) < count) {
        const std::int64_t first = random.below(step.step().rows);
        const std::int64_t rows = 1 + random.below(std::min(most_rows, step.step().rows - first));
        if (!repeats_rows(windows, {{first, rows}})) windows.push_back({first, rows});
    }
    return windows;
}

}  // namespace sparsemla::test
