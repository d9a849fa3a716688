#include "harness/dcp_times.h"

#include <barrier>
#include <chrono>
#include <cstddef>
#include <functional>

#include "harness/rank_threads.h"

namespace sparsemla::harness {
namespace {

using Clock = std::chrono::steady_clock;
using Times = std::vector<std::vector<DcpTimes>>;

double us_between(Clock::time_point begin, Clock::time_point end) {
    return std::chrono::duration<double, std::micro>(end - begin).count();
}

DcpTimes timed_exchange(DcpRank& rank, const DcpWindow& window) {
    const Clock::time_point begin = Clock::now();
    rank.gather(window);
    const Clock::time_point gathered = Clock::now();
    rank.decode(window);
    const Clock::time_point decoded = Clock::now();
    rank.merge(window);
    const Clock::time_point end = Clock::now();
    return {us_between(begin, gathered), us_between(gathered, decoded), us_between(decoded, end),
            us_between(begin, end)};
}

Times time_threads(DcpGroup& group, std::span<const DcpWindow> windows) {
    Times times(windows.size(), std::vector<DcpTimes>(static_cast<std::size_t>(group.world())));
    std::barrier<> begin(group.world());
    on_rank_threads(group.world(), [&](int number) {
        // Whoever ends early, by an exception too, is waited for no more.
        struct Leave {
            std::barrier<>& barrier;
            ~Leave() { barrier.arrive_and_drop(); }
        } const leave{begin};
        for (std::size_t i = 0; i < windows.size(); ++i) {
            begin.arrive_and_wait();
            times[i][static_cast<std::size_t>(number)] = timed_exchange(group.rank(number), windows[i]);
        }
    });
    return times;
}

/// An exchange that ends only after a while: what the host puts on the stream meanwhile runs without gaps.
void keep_busy(DcpGroup& group, const DcpWindow& window) {
    constexpr float host_us_of_a_rank = 60;  // three stages of up to three launches, and events
    Mailbox& last = group.mailbox(group.world() - 1);
    const DcpDelay kept = last.delay;
    last.delay = {.stage = DcpStage::merge, .us = host_us_of_a_rank * static_cast<float>(group.world())};
    group.lockstep(window, group.stream().stream());
    last.delay = kept;
}

Times time_lockstep(DcpGroup& group, std::span<const DcpWindow> windows) {
    const auto ranks = static_cast<std::size_t>(group.world());
    Times times;
    for (std::size_t i = 0; i < windows.size(); ++i) {
        const DcpWindow& window = windows[i];
        std::vector<std::function<void(Stream)>> pieces;
        for (const auto stage : {&DcpRank::gather, &DcpRank::decode, &DcpRank::merge})
            for (int number = 0; number < group.world(); ++number)
                pieces.emplace_back([&, stage, number](Stream on) { (group.rank(number).*stage)(window, on); });
        keep_busy(group, windows[i == 0 ? windows.size() - 1 : i - 1]);
        const std::vector<double> us = group.stream().times_us(pieces);
        std::vector<DcpTimes>& of_ranks = times.emplace_back();
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            const double gather = us[rank], decode = us[ranks + rank], merge = us[2 * ranks + rank];
            of_ranks.push_back({gather, decode, merge, gather + decode + merge});
        }
    }
    return times;
}

}  // namespace

std::vector<std::vector<DcpTimes>> time_exchanges(DcpGroup& group, std::span<const DcpWindow> windows) {
    const bool on_gpu = group.plan().device.device.kind == Device::Kind::cuda;
    return on_gpu ? time_lockstep(group, windows) : time_threads(group, windows);
}

}  // namespace sparsemla::harness
