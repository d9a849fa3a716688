// The two ways in which ranks meet by themselves, and what they share.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sparsemla/nccl_bootstrap.h"

namespace sparsemla::detail {

/// A limit on a wait of several steps.
class Deadline {
   public:
    explicit Deadline(double limit_s)
        : limit_s_(limit_s),
          end_(std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                      std::chrono::duration<double>(limit_s))) {}

    bool passed() const { return std::chrono::steady_clock::now() >= end_; }
    double limit_s() const { return limit_s_; }
    /// That are left, 0 .. most.
    int milliseconds(int most) const;
    /// "within 30 s".
    std::string text() const;

   private:
    double limit_s_;
    std::chrono::steady_clock::time_point end_;
};

void pause_ms(int milliseconds);

std::uint64_t hash_of(std::string_view text);

/// "2", "2 and 5", "2, 3 and 5".
std::string ranks_text(const std::vector<int>& ranks);

NcclId meet_by_tcp(const NcclBootstrap& bootstrap, const TcpMeeting& meeting, const std::function<NcclId()>& make_id);
NcclId meet_by_file(const NcclBootstrap& bootstrap, const FileMeeting& meeting, const std::function<NcclId()>& make_id);
void remove_meeting_file(const FileMeeting& meeting) noexcept;

}  // namespace sparsemla::detail
