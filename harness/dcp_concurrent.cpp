// Ranks that run on one GPU at the same time, and wait for one another there.
#include <algorithm>
#include <chrono>
#include <thread>

#include "harness/dcp_group.h"
#include "harness/random.h"

namespace sparsemla::harness {
namespace {

std::int64_t divide_up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

constexpr std::int64_t piece_bytes = 16;  // of a query or of values, that a thread moves

}  // namespace

std::int64_t DcpGrids::of(DcpStage stage) const {
    switch (stage) {
        case DcpStage::none: return 0;
        case DcpStage::gather: return gather;
        case DcpStage::decode: return receive != 0 ? receive : decode;
        case DcpStage::push: return push;
        case DcpStage::merge: return merge;
    }
    return 0;
}

DcpGrids DcpGroup::grids(int number, std::int64_t rows) const {
    const MailboxLayout& layout = loopback_->mailbox(number).layout;
    const std::int64_t own_heads = layout.heads_of(number);
    const std::int64_t query_pieces = layout.d_qk * size_bytes(layout.query_dtype) / piece_bytes;
    constexpr std::int64_t value_pieces = value_dims * 2 / piece_bytes;
    constexpr std::int64_t threads = 256;          // of the kernels in mailbox.cu, a piece each
    constexpr std::int64_t heads_of_merge = 4;     // of a CTA of merge_pushed, a warp each
    constexpr std::int64_t pieces_of_merge = 512;  // of a row's query, of a CTA of it that frees those
    DcpGrids grids{.gather = rows * divide_up(own_heads * query_pieces, threads),
                   .merge = divide_up(rows * own_heads, heads_of_merge) +
                            rows * divide_up(layout.heads * query_pieces, pieces_of_merge)};
    if (!plan_.fuses_exchange) {
        grids.receive = rows * divide_up(layout.heads * query_pieces, threads);
        grids.push = rows * divide_up(layout.heads * value_pieces, threads);
    }
    if (plan_.schedule.kernel != "decode_latency") return grids;
    const Tiling& tiling = *plan_.tiling;
    const std::int64_t tiles = divide_up(divide_up(layout.heads, tiling.heads), tiling.cluster_tiles);
    grids.decode = rows * plan_.schedule.splits * tiles * tiling.cluster_tiles;
    return grids;
}

/// A CTA of decode has an SM for itself, and the small CTAs of the other kernels spread over the SMs before they share
/// one. A kernel starts once all CTAs of the one before it let it: those of gather, receive, push and merge at their
/// own start, so that merge, the next gather and the next decode may all be there before this decode has ended. But
/// that next decode lets nothing start before it reads, when everything before it has ended.
void DcpGroup::check_all_resident(std::int64_t rows) const {
    const auto refuse = [](const std::string& required, const std::string& received) {
        throw Error(ErrorKind::unsupported, "ranks that run at the same time", required, received);
    };
    if (plan_.schedule.kernel != "decode_latency") refuse("kernel decode_latency", plan_.schedule.kernel);
    if (plan_.tiling->trigger == Trigger::start)
        refuse("trigger loaded or end: with start, any number of a rank's kernels may be there and wait", "start");
    // Where half of the SMs are free, some GPC of a Hopper has 8 free ones.
    constexpr int largest_cluster = 8;
    if (const int ctas = plan_.schedule.splits * plan_.tiling->cluster_tiles; ctas > largest_cluster)
        refuse("clusters of at most " + std::to_string(largest_cluster) + " CTAs", std::to_string(ctas));
    std::int64_t all = 0;
    std::string text;
    for (int number = 0; number < world(); ++number) {
        const DcpGrids of = grids(number, rows);
        all += of.gather + of.receive + 2 * of.decode + of.push + of.merge;
        text += (number == 0 ? ": " : "; ") + std::string("rank ") + std::to_string(number) + " " +
                std::to_string(of.gather) + " of gather, " + std::to_string(of.receive) + " of receive, 2 x " +
                std::to_string(of.decode) + " of decode, " + std::to_string(of.push) + " of push, " +
                std::to_string(of.merge) + " of merge";
    }
    const int sms = options_.device.sms;
    if (2 * all > sms)
        refuse("at most " + std::to_string(sms / 2) + " CTAs at a time, half of the " + std::to_string(sms) + " SMs",
               std::to_string(all) + " for exchanges of " + std::to_string(rows) + " rows" + text);
}

DcpResults DcpGroup::make_results() const {
    DcpResults results;
    for (const auto& each : ranks_) results.push_back(each->make_outputs());
    return results;
}

/// A random rank goes on by a few exchanges, until none has any left. Not further ahead of the slowest than allowed: a
/// GPU takes about a thousand launches before it lets the host wait, which then could not submit what they wait for.
void DcpGroup::submit(std::span<const DcpWindow> windows, std::size_t first, const std::vector<DcpResults>& to,
                      const DcpConcurrency& how) {
    Random random(how.seed, {static_cast<std::int64_t>(first)});
    std::vector<std::size_t> next(static_cast<std::size_t>(world()), 0);
    for (;;) {
        const std::size_t slowest = *std::ranges::min_element(next);
        if (slowest == windows.size()) return;
        const auto number = static_cast<std::size_t>(random.below(world()));
        const std::size_t furthest =
            std::min(windows.size(), slowest + static_cast<std::size_t>(std::max(1, how.most_ahead)));
        const auto steps = static_cast<std::size_t>(1 + random.below(std::max(1, how.most_ahead)));
        const Stream stream = rank_streams_[number].stream();
        for (std::size_t i = 0; i < steps && next[number] < furthest; ++i) {
            const std::size_t exchange = next[number]++;
            if (how.before) how.before(static_cast<int>(number), first + exchange);
            ranks_[number]->gather(windows[exchange], stream);
            ranks_[number]->decode(windows[exchange], stream);
            ranks_[number]->merge_to(to[exchange][number], windows[exchange], stream);
        }
        if (random.chance(1.0 / 16)) std::this_thread::sleep_for(std::chrono::microseconds(random.below(300)));
    }
}

std::string DcpGroup::run_concurrent(std::span<const DcpWindow> windows, const DcpConcurrency& how) {
    if (!stream_) return run_threads(windows, how);
    std::int64_t rows = 0;
    for (const DcpWindow& window : windows) rows = std::max(rows, window.rows);
    check_all_resident(rows);
    // One after the other, so that no two share a hardware queue.
    for (int number = static_cast<int>(rank_streams_.size()); number < world(); ++number)
        rank_streams_.emplace_back(options_.device.device);
    const std::size_t at_once = std::min(windows.size(), static_cast<std::size_t>(std::max(1, how.at_once)));
    std::vector<DcpResults> results;
    while (results.size() < at_once) results.push_back(make_results());
    for (std::size_t first = 0; first < windows.size(); first += at_once) {
        const auto batch = windows.subspan(first, std::min(at_once, windows.size() - first));
        for (DcpResults& result : results)
            for (DcpOutputs& outputs : result) outputs.fill(0xFF);
        submit(batch, first, results, how);
        for (const GpuStream& stream : rank_streams_) stream.synchronize();
        for (std::size_t i = 0; i < batch.size(); ++i)
            for (int number = 0; number < world(); ++number)
                if (std::string text = difference(number, batch[i], &results[i][static_cast<std::size_t>(number)]);
                    !text.empty())
                    return "exchange " + std::to_string(first + i) + " of this run: " + text;
    }
    return "";
}

}  // namespace sparsemla::harness
