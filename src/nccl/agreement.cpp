#include "nccl/agreement.h"

#include <functional>

#include "nccl/api.h"
#include "nccl/meeting.h"

namespace sparsemla::detail {

namespace {

constexpr std::uint64_t record_magic = 0x736D6C61'72616E6B;

std::uint64_t hash_of_order(const std::vector<int>& members) {
    std::string text;
    for (const int member : members) text += std::to_string(member) + ' ';
    return hash_of(text);
}

std::string layout_text(const RankRecord& record) {
    return std::to_string(record.rows) + " rows, " + std::to_string(record.heads) + " heads (" +
           std::to_string(record.padded_heads) + " padded), a query of " + std::to_string(record.d_qk) + ' ' +
           std::string(name(static_cast<DType>(record.query_dtype))) + ", layout " +
           std::to_string(record.fingerprint % 1000000);
}

std::string version_text(const RankRecord& record) {
    return std::string("sparsemla ") + record.library_version.data() + ", NCCL " +
           nccl_version_text(record.nccl_version);
}

/// Ranks whose value is not that of rank 0.
Disagreement compare(const std::vector<RankRecord>& records, const std::string& argument,
                     const std::function<bool(const RankRecord&)>& same,
                     const std::function<std::string(const RankRecord&)>& text) {
    Disagreement result{.argument = argument, .required = text(records.front()) + ", as rank 0 has", .received = ""};
    for (std::size_t rank = 1; rank < records.size(); ++rank)
        if (!same(records[rank]))
            result.received += (result.received.empty() ? "" : "; ") + std::string("rank ") + std::to_string(rank) +
                               " with " + text(records[rank]);
    return result;
}

/// Members of the group's order that are not where it says.
Disagreement misplaced(const std::vector<RankRecord>& records, const std::vector<int>& members) {
    Disagreement result{
        .argument = "members", .required = "each rank in its place of the group's order", .received = ""};
    if (members.empty()) return result;
    for (std::size_t rank = 0; rank < records.size(); ++rank)
        if (records[rank].member != members[rank])
            result.received += (result.received.empty() ? "" : "; ") + std::string("rank ") + std::to_string(rank) +
                               " is member " + std::to_string(records[rank].member) + ", not " +
                               std::to_string(members[rank]);
    return result;
}

Disagreement shared_device(const std::vector<RankRecord>& records) {
    Disagreement result{.argument = "device", .required = "a GPU of its own for every rank", .received = ""};
    for (std::size_t rank = 0; rank < records.size() && result.received.empty(); ++rank)
        for (std::size_t other = 0; other < rank && result.received.empty(); ++other)
            if (records[rank].device == records[other].device)
                result.received = "ranks " + std::to_string(other) + " and " + std::to_string(rank) + " on " +
                                  records[rank].device.data() + " of " + records[rank].host.data();
    return result;
}

}  // namespace

RankRecord record_of(const MailboxLayout& layout, int rank, const NcclOptions& options, int nccl_version,
                     const std::string& host, const std::string& device) {
    RankRecord record{.magic = record_magic,
                      .fingerprint = layout.fingerprint(),
                      .order = hash_of_order(options.members),
                      .rank = rank,
                      .world = layout.world,
                      .nccl_version = nccl_version,
                      .member = options.member,
                      .rows = static_cast<std::int32_t>(layout.rows),
                      .heads = static_cast<std::int32_t>(layout.heads),
                      .padded_heads = static_cast<std::int32_t>(layout.padded_heads),
                      .d_qk = static_cast<std::int32_t>(layout.d_qk),
                      .query_dtype = static_cast<std::int32_t>(layout.query_dtype)};
    put_text(record.library_version, SPARSEMLA_VERSION);
    put_text(record.host, host);
    put_text(record.device, device);
    return record;
}

Disagreement disagreement(const std::vector<RankRecord>& records, const std::vector<int>& members) {
    const RankRecord& first = records.front();
    const Disagreement checks[] = {
        compare(
            records, "library", [](const RankRecord& r) { return r.magic == record_magic; },
            [](const RankRecord& r) { return std::string(r.magic == record_magic ? "a" : "no") + " known record"; }),
        compare(
            records, "versions",
            [&](const RankRecord& r) {
                return r.library_version == first.library_version && r.nccl_version == first.nccl_version;
            },
            version_text),
        compare(
            records, "kind", [&](const RankRecord& r) { return r.kind == first.kind; },
            [](const RankRecord& r) { return std::string(r.kind == 0 ? "NcclGroup" : "NcclExchange"); }),
        compare(
            records, "shape",
            [&](const RankRecord& r) { return r.fingerprint == first.fingerprint && r.world == first.world; },
            layout_text),
        compare(
            records, "members", [&](const RankRecord& r) { return r.order == first.order; },
            [](const RankRecord& r) { return "order " + std::to_string(r.order % 1000000); }),
        misplaced(records, members),
        shared_device(records)};
    for (const Disagreement& check : checks)
        if (!check.received.empty()) return check;
    return {};
}

std::string unreachable_text(const std::vector<std::uint32_t>& reaches, const std::vector<RankRecord>& records) {
    std::string text;
    for (std::size_t rank = 0; rank < records.size(); ++rank) {
        std::vector<int> out_of_reach;
        for (std::size_t other = 0; other < records.size(); ++other)
            if ((reaches[rank] >> other & 1) == 0) out_of_reach.push_back(static_cast<int>(other));
        if (out_of_reach.empty()) continue;
        text += (text.empty() ? "" : "; ") + std::string("rank ") + std::to_string(rank) + " (" +
                records[rank].host.data() + ") does not reach rank" + (out_of_reach.size() == 1 ? " " : "s ") +
                ranks_text(out_of_reach);
    }
    return text;
}

std::string problems_text(const std::vector<StepReport>& reports) {
    std::string text;
    for (std::size_t rank = 0; rank < reports.size(); ++rank)
        if (reports[rank].failed != 0)
            text += (text.empty() ? "" : "; ") + std::string("rank ") + std::to_string(rank) + ": " +
                    reports[rank].problem.data();
    return text;
}

}  // namespace sparsemla::detail
