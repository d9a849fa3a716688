#include "tools/dcp_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <utility>

#include "harness/dcp_windows.h"
#include "harness/oracle.h"
#include "harness/spread.h"
#include "tools/expectation.h"

namespace sparsemla::tool {
namespace {

constexpr std::uint64_t seed_of_windows = 7;

harness::Sharing sharing_of(const CaseStep& step, const DcpFlags& flags) {
    harness::Sharing sharing{.interleave = flags.interleave, .head_offset = {0}};
    if (flags.heads.empty()) {
        sharing.head_offset = harness::share_heads(step.heads, static_cast<int>(flags.ranks));
        return sharing;
    }
    const std::vector<std::int64_t> heads = parse_list(flags.heads, "--heads", max_ranks);
    for (const std::int64_t of_rank : heads) sharing.head_offset.push_back(sharing.head_offset.back() + of_rank);
    if (static_cast<std::int64_t>(heads.size()) != flags.ranks || std::ranges::count(heads, 0) != 0 ||
        sharing.head_offset.back() != step.heads)
        throw Error(ErrorKind::invalid_argument, "--heads",
                    fmt::format("{} from 1 up that add up to the case's {}", plural(flags.ranks, "number"), step.heads),
                    in_quotes(flags.heads));
    return sharing;
}

template <class Number>
bool parse_all(std::string_view text, Number& value) {
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && rest == text.data() + text.size();
}

std::optional<LateRank> late_rank(const DcpFlags& flags) {
    if (flags.late.empty()) return std::nullopt;
    constexpr float most_us = 1e7F;
    const std::string_view text = flags.late;
    const std::size_t first = text.find(':'), last = text.rfind(':');
    LateRank late;
    bool good = first != last && parse_all(text.substr(0, first), late.rank) && late.rank >= 0 &&
                late.rank < flags.ranks && parse_all(text.substr(last + 1), late.delay.us) && late.delay.us >= 0 &&
                late.delay.us <= most_us;
    for (const DcpStage stage : {DcpStage::gather, DcpStage::decode, DcpStage::push, DcpStage::merge})
        if (good && text.substr(first + 1, last - first - 1) == name(stage)) late.delay.stage = stage;
    good = good && late.delay.stage != DcpStage::none;
    if (!good)
        throw Error(ErrorKind::invalid_argument, "--late",
                    fmt::format("RANK:STAGE:MICROSECONDS, a rank of 0 .. {}, gather, decode, push or merge, and 0 .. "
                                "10000000",
                                flags.ranks - 1),
                    in_quotes(flags.late));
    return late;
}

/// Where the ranks run: the first device that --device allows and that takes the problem. Ranks on a CPU share its
/// threads.
DeviceSpec device_for(const CaseStep& step, const DcpFlags& flags) {
    Problem problem = step.problem();
    problem.sinks = false;
    problem.lse_base = LseBase::two;
    problem.dcp = !flags.by_calls;
    DeviceSpec device = plan_on_first(problem, devices_of(flags.run), plan_options(flags.run)).device;
    if (device.device.kind == Device::Kind::cpu && flags.run.threads == 0)
        device.threads = std::max(1, device.threads / static_cast<int>(flags.ranks));
    return device;
}

/// Every rank that waited in vain, the first wait of the protocol's order first: the others follow from it.
void expect_nobody_missing(harness::DcpGroup& group, double limit_s) {
    std::vector<std::pair<int, MailboxStatus>> failed;
    for (int rank = 0; rank < group.world(); ++rank)
        if (const MailboxStatus state = status(group.mailbox(rank)); state.failed) failed.emplace_back(rank, state);
    if (failed.empty()) return;
    std::ranges::stable_sort(failed, {},
                             [](const auto& entry) { return std::pair(entry.second.exchange, entry.second.stage); });
    std::string text;
    for (const auto& [rank, state] : failed)
        text += fmt::format("{}rank {}: {}", text.empty() ? "" : "; ", rank, state.text());
    throw Error(ErrorKind::invalid_argument, "--wait-limit", fmt::format("every rank within {} s", limit_s), text);
}

DcpRankReport rank_report(harness::DcpGroup& group, int rank, std::int64_t rows) {
    const MailboxLayout& layout = group.mailbox(rank).layout;
    std::vector<std::int64_t> owned(static_cast<std::size_t>(rows), 0);
    for (const harness::Shard::Source& source : group.shards()[static_cast<std::size_t>(rank)].sources)
        for (std::size_t row = 0; row < owned.size(); ++row)
            owned[row] += reinterpret_cast<const std::int32_t*>(source.counts.bytes.get())[row];
    const auto [least, most] = std::ranges::minmax(owned);
    const auto all = static_cast<double>(std::accumulate(owned.begin(), owned.end(), std::int64_t{0}));
    return {.first_head = layout.head_offset[static_cast<std::size_t>(rank)],
            .heads = layout.heads_of(rank),
            .least_columns = least,
            .most_columns = most,
            .mean_columns = all / static_cast<double>(rows)};
}

/// One exchange of all rows, whose results are judged, then others of rows that change.
void check_exchanges(DcpReport& report, harness::DcpGroup& group, const LoadedStep& loaded, const DcpFlags& flags,
                     Progress& progress) {
    const CaseStep& step = loaded.step;
    const harness::DcpWindow all{0, step.rows};
    progress.show("exchanging");
    report.difference = group.run({&all, 1});
    expect_nobody_missing(group, flags.wait_limit_s);
    const harness::DcpExpectation results = group.results(all);
    if (report.difference.empty()) {
        report.difference =
            group.run(harness::dcp_windows(step.rows, static_cast<int>(flags.steps) - 1, seed_of_windows));
        expect_nobody_missing(group, flags.wait_limit_s);
    }
    report.exchanges = flags.steps;
    progress.show("float64 reference");
    const harness::Oracle oracle = harness::dcp_oracle(step, group.shards());
    const harness::Accuracy accuracy = harness::accuracy_of(group.plan().schedule);
    const auto judge = [&](const harness::Oracle& expected, const harness::Accuracy& allowed) {
        return harness::compare(expected, results.out.view(), results.lse.view(), step.lse_base, allowed, false);
    };
    report.oracle = judge(oracle, accuracy);
    if (const std::optional<harness::Oracle> expected = expectation_of(oracle, loaded.file))
        report.file = judge(*expected, against_file(accuracy, oracle, loaded.file));
}

/// Medians over exchanges of all rows.
void time_stages(DcpReport& report, harness::DcpGroup& group, const DcpFlags& flags) {
    const std::vector<harness::DcpWindow> windows(static_cast<std::size_t>(flags.steps), {0, report.rows});
    const std::vector<std::vector<harness::DcpTimes>> times = harness::time_exchanges(group, windows);
    expect_nobody_missing(group, flags.wait_limit_s);
    report.timed = flags.steps;
    using Field = double harness::DcpTimes::*;
    const auto median = [&](const auto& of_exchange) {
        std::vector<double> sample;
        for (const std::vector<harness::DcpTimes>& exchange : times) sample.push_back(of_exchange(exchange));
        return harness::spread_of(std::move(sample)).median;
    };
    for (const Field field : {&harness::DcpTimes::gather_us, &harness::DcpTimes::decode_us,
                              &harness::DcpTimes::merge_us, &harness::DcpTimes::step_us}) {
        for (std::size_t rank = 0; rank < report.ranks.size(); ++rank)
            report.ranks[rank].median.*field = median([&](const auto& ranks) { return ranks[rank].*field; });
        report.slowest.*field = median([&](const auto& ranks) { return std::ranges::max(ranks, {}, field).*field; });
    }
}

}  // namespace

DcpReport run_loopback(const LoadedStep& loaded, const DcpFlags& flags, Progress& progress) {
    const CaseStep& step = loaded.step;
    const std::optional<LateRank> late = late_rank(flags);
    const harness::DcpGroupOptions options{.sharing = sharing_of(step, flags),
                                           .device = device_for(step, flags),
                                           .plan = plan_options(flags.run),
                                           .by_calls = flags.by_calls,
                                           .lse_base = step.lse_base,
                                           .wait_limit_s = flags.wait_limit_s};
    progress.show("sharing the case out");
    harness::DcpGroup group(step, options);
    if (late) group.mailbox(late->rank).delay = late->delay;

    DcpReport report;
    report.step = describe(step.problem());
    report.notes = loaded.file.notes;
    report.interleave = flags.interleave;
    report.by_calls = flags.by_calls;
    report.rows = step.rows;
    report.plan = group.plan();
    report.mailbox = group.mailbox(0).layout;
    for (int rank = 0; rank < group.world(); ++rank) report.ranks.push_back(rank_report(group, rank, step.rows));
    check_exchanges(report, group, loaded, flags, progress);
    if (report.pass()) {
        progress.show("timing the stages");
        time_stages(report, group, flags);
    }
    return report;
}

}  // namespace sparsemla::tool
