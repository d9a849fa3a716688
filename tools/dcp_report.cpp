#include "tools/dcp_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "tools/table.h"
#include "tools/verdict.h"

namespace sparsemla::tool {
namespace {

bool lockstep(const DcpReport& report) { return report.plan.device.device.kind == Device::Kind::cuda; }

std::string heads_of(const DcpReport& report) {
    std::string text;
    for (const DcpRankReport& rank : report.ranks) text += (text.empty() ? "" : " + ") + std::to_string(rank.heads);
    return text;
}

std::string owner_rule(const DcpReport& report) {
    const std::size_t world = report.ranks.size();
    if (report.interleave == 1) return fmt::format("slot s belongs to rank s % {}", world);
    return fmt::format("slot s belongs to rank (s / {}) % {}", report.interleave, world);
}

std::string device_of(const DcpReport& report) {
    const DeviceSpec& device = report.plan.device;
    std::string text = fmt::format("{} ({})", to_string(device.device), device.name);
    if (!lockstep(report)) text += fmt::format(", {} a rank", plural(device.threads, "thread"));
    return text;
}

std::string exchange_of(const DcpReport& report) {
    if (report.by_calls) return "by calls: receive_query, decode, push";
    return report.plan.fuses_exchange ? "fused: decode's kernel waits for the query and pushes the results"
                                      : "not fused: decode receives the query before its kernel and pushes after it";
}

std::string mailbox_of(const MailboxLayout& mailbox) {
    return fmt::format("{} a rank: query {}, values {}, lse {}", format_bytes(mailbox.bytes),
                       format_bytes(2 * mailbox.query_parity_bytes), format_bytes(2 * mailbox.values_parity_bytes),
                       format_bytes(2 * mailbox.lses_parity_bytes));
}

std::string facts_of(const DcpReport& report, const DcpFlags& flags) {
    Facts facts;
    facts.add("step", report.step);
    facts.add("ranks", fmt::format("{} by {}, {} heads, interleave {}: {}", report.ranks.size(), flags.provider,
                                   heads_of(report), report.interleave, owner_rule(report)));
    facts.add("device", device_of(report));
    facts.add("kernel", report.plan.schedule.kernel + ": " + report.plan.reason);
    facts.add("schedule", to_string(report.plan.schedule));
    if (report.plan.tiling) facts.add("tiling", to_string(*report.plan.tiling));
    facts.add("exchange", exchange_of(report));
    facts.add("mailbox", mailbox_of(report.mailbox));
    if (!flags.late.empty()) facts.add("late", printable(flags.late) + " us");
    for (const std::string& note : report.notes) facts.add("note", printable(note));
    return facts.text();
}

void add_verdict(Table& table, const std::string& against, const harness::Verdict& verdict) {
    table.add_row({against, format_ratio(verdict.worst_ratio), place(verdict), format_small(verdict.rms),
                   format_small(verdict.lse_error), format_ratio(verdict.lse_ratio), verdict_word(verdict.pass)});
    if (!verdict.problem.empty()) table.add_note(verdict.problem);
}

std::string checks_of(const DcpReport& report) {
    Table table({{"against", Align::left},
                 {"out/bound"},
                 {"at row,head,dim"},
                 {"rms"},
                 {"lse error"},
                 {"lse/bound"},
                 {"", Align::left}});
    add_verdict(table, "float64", report.oracle);
    if (report.file) add_verdict(table, "expected.*", *report.file);
    const std::string exchanges = plural(report.exchanges, "exchange");
    return table.text() +
           (report.difference.empty()
                ? fmt::format("  {}, all bit-identical to the merged partial results  PASS\n", exchanges)
                : fmt::format("  {} to run, not all bit-identical to the merged partial results  FAIL\n    {}\n",
                              exchanges, report.difference));
}

std::string us_text(double us) { return us == 0 ? "" : format_seconds(1e-6 * us); }

void add_times(Table& table, std::string rank, std::string heads, std::string columns, const harness::DcpTimes& times) {
    table.add_row({std::move(rank), std::move(heads), std::move(columns), us_text(times.gather_us),
                   us_text(times.decode_us), us_text(times.merge_us), us_text(times.step_us)});
}

std::string ranks_of(const DcpReport& report) {
    Table table(
        {{"rank"}, {"heads"}, {"columns min/mean/max"}, {"gather"}, {"decode + push"}, {"merge"}, {"whole step"}});
    for (std::size_t rank = 0; rank < report.ranks.size(); ++rank) {
        const DcpRankReport& of_rank = report.ranks[rank];
        add_times(
            table, std::to_string(rank),
            fmt::format("{} .. {}", of_rank.first_head, of_rank.first_head + of_rank.heads - 1),
            fmt::format("{}/{}/{}", of_rank.least_columns, format_number(of_rank.mean_columns), of_rank.most_columns),
            of_rank.median);
    }
    if (report.timed != 0) add_times(table, "slowest", "", "", report.slowest);
    return table.text();
}

std::string meaning_of_times(const DcpReport& report) {
    if (report.timed == 0) return "  not timed, as the results are wrong\n";
    std::string text = fmt::format("  medians over {} of all {}; slowest: of the rank that took longest in each\n",
                                   plural(report.timed, "more exchange"), plural(report.rows, "row"));
    if (lockstep(report))
        return text +
               "  between events on one stream; lockstep runs one rank after the other, so a stage's time is of one\n"
               "  rank alone, without waiting, and a whole step is the sum of its stages\n";
    const int cores = query_device({}).threads;
    text += "  wall clock of a thread for each rank, which includes waiting for other ranks";
    if (static_cast<int>(report.ranks.size()) > cores)
        text += fmt::format("; {} ranks share {}", report.ranks.size(), plural(cores, "core"));
    return text + "\n";
}

Json times_json(const harness::DcpTimes& times) {
    return {{"gather_us", times.gather_us},
            {"decode_push_us", times.decode_us},
            {"merge_us", times.merge_us},
            {"step_us", times.step_us}};
}

}  // namespace

std::string text_of(const DcpReport& report, const DcpFlags& flags) {
    return printable(flags.path) + "\n" + facts_of(report, flags) + "\n" + checks_of(report) + "\n" + ranks_of(report) +
           meaning_of_times(report);
}

Json to_json(const DcpReport& report, const DcpFlags& flags) {
    Json json;
    json["path"] = flags.path;
    json["status"] = report.pass() ? "pass" : "fail";
    json["step"] = report.step;
    json["provider"] = flags.provider;
    json["interleave"] = report.interleave;
    json["by_calls"] = report.by_calls;
    json["device"] = to_string(report.plan.device.device);
    json["kernel"] = report.plan.schedule.kernel;
    json["schedule"] = to_string(report.plan.schedule);
    json["fused"] = report.plan.fuses_exchange;
    json["mailbox_bytes"] = report.mailbox.bytes;
    json["float64"] = verdict_json(report.oracle);
    json["expected"] = verdict_json(report.file);
    json["exchanges"] = report.exchanges;
    json["difference"] = report.difference.empty() ? Json() : Json(report.difference);
    json["lockstep"] = lockstep(report);
    json["timed_exchanges"] = report.timed;
    json["slowest"] = report.timed == 0 ? Json() : times_json(report.slowest);
    json["ranks"] = Json::array();
    for (std::size_t rank = 0; rank < report.ranks.size(); ++rank) {
        const DcpRankReport& of_rank = report.ranks[rank];
        json["ranks"].push_back(
            {{"rank", rank},
             {"first_head", of_rank.first_head},
             {"heads", of_rank.heads},
             {"columns",
              {{"min", of_rank.least_columns}, {"mean", of_rank.mean_columns}, {"max", of_rank.most_columns}}},
             {"median", report.timed == 0 ? Json() : times_json(of_rank.median)}});
    }
    return json;
}

}  // namespace sparsemla::tool
