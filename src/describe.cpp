// Names and texts of problems, schedules and plans, and the way back from names.
#include <array>
#include <sstream>

#include "sparsemla/decode.h"

namespace sparsemla {

namespace {

template <class Enum, std::size_t n>
using Names = std::array<std::pair<Enum, std::string_view>, n>;

constexpr Names<PFormat, 4> p_formats{
    {{PFormat::e4m3, "p_e4m3"}, {PFormat::f16, "p_f16"}, {PFormat::bf16, "p_bf16"}, {PFormat::f64, "p_f64"}}};
constexpr Names<Anchor, 3> anchors{
    {{Anchor::split_running_max, "split_running_max"}, {Anchor::chunk_max, "chunk_max"}, {Anchor::row_max, "row_max"}}};
constexpr Names<ColumnRule, 3> column_rules{{{ColumnRule::blocks, "blocks"},
                                             {ColumnRule::interleaved, "interleaved"},
                                             {ColumnRule::round_robin, "round_robin"}}};

constexpr Names<Transport, 3> transports{
    {{Transport::stores, "stores"}, {Transport::bulk, "bulk"}, {Transport::weights, "weights"}}};
constexpr Names<Gather, 2> gathers{{{Gather::copies, "copies"}, {Gather::bulk, "bulk"}}};
constexpr Names<Trigger, 3> triggers{{{Trigger::start, "start"}, {Trigger::loaded, "loaded"}, {Trigger::end, "end"}}};

template <class Enum, std::size_t n>
std::string_view name_in(const Names<Enum, n>& names, Enum value) {
    for (const auto& [key, text] : names)
        if (key == value) return text;
    return "unknown";
}

template <class Enum, std::size_t n>
std::optional<Enum> find_in(const Names<Enum, n>& names, std::string_view text) {
    for (const auto& [key, known] : names)
        if (known == text) return key;
    return std::nullopt;
}

std::string source_line(const SourceProblem& source) {
    std::ostringstream text;
    text << to_string(source.record);
    if (source.form == RecordForm::planar) text << " planar";
    if (source.split_rope) text << " split latent and rope";
    text << ", width " << source.width;
    if (source.count_offset != 0) text << ", count_offset " << source.count_offset;
    return text.str();
}

}  // namespace

std::string_view name(LseBase base) { return base == LseBase::natural ? "natural" : "log2"; }
std::string_view name(PFormat format) { return name_in(p_formats, format); }
std::string_view name(Anchor anchor) { return name_in(anchors, anchor); }
std::string_view name(ColumnRule rule) { return name_in(column_rules, rule); }
std::string_view name(Transport transport) { return name_in(transports, transport); }
std::string_view name(Gather gather) { return name_in(gathers, gather); }
std::string_view name(Trigger trigger) { return name_in(triggers, trigger); }

std::optional<PFormat> find_p_format(std::string_view name) {
    if (const auto format = find_in(p_formats, name)) return format;
    return find_in(p_formats, "p_" + std::string(name));
}
std::optional<Anchor> find_anchor(std::string_view name) { return find_in(anchors, name); }
std::optional<ColumnRule> find_column_rule(std::string_view name) { return find_in(column_rules, name); }
std::optional<Transport> find_transport(std::string_view name) { return find_in(transports, name); }
std::optional<Gather> find_gather(std::string_view name) { return find_in(gathers, name); }
std::optional<Trigger> find_trigger(std::string_view name) { return find_in(triggers, name); }

std::string to_string(const Schedule& schedule) {
    std::ostringstream text;
    text << schedule.kernel << ' ' << name(schedule.p_format) << '*' << schedule.p_scale
         << " anchor=" << name(schedule.anchor) << " splits=" << schedule.splits
         << " columns=" << name(schedule.columns) << " chunk=" << schedule.chunk
         << " order=ascending rows<=" << schedule.row_capacity;
    return text.str();
}

std::string to_string(const Tiling& tiling) {
    std::ostringstream text;
    text << "heads=" << tiling.heads << " stages=" << tiling.stages << " cluster_tiles=" << tiling.cluster_tiles
         << " gather=" << name(tiling.gather) << " transport=" << name(tiling.transport)
         << " trigger=" << name(tiling.trigger);
    return text.str();
}

std::string Plan::describe() const {
    std::ostringstream text;
    text << "problem    rows <= " << problem.rows << ", heads " << problem.heads << ", query "
         << sparsemla::name(problem.query_dtype) << ", out " << sparsemla::name(problem.out_dtype) << ", lse "
         << (problem.lse ? sparsemla::name(problem.lse_base) : "none") << (problem.sinks ? ", sinks" : "") << '\n';
    if (problem.dcp)
        text << "dcp        query from a mailbox, results to their owners: "
             << (fuses_exchange ? "in the kernel" : "by calls before and after the kernel") << '\n';
    for (std::size_t i = 0; i < problem.sources.size(); ++i)
        text << "source " << i << "   " << source_line(problem.sources[i])
             << (i == 0 && problem.from_ids ? ", from token ids" : "") << '\n';
    text << "device     " << to_string(device.device) << " (" << device.name;
    if (device.device.kind == Device::Kind::cpu) text << ", threads " << device.threads;
    text << ")\n"
         << "kernel     " << schedule.kernel << "\n"
         << "           " << reason << '\n'
         << "schedule   " << to_string(schedule) << '\n';
    if (tiling) text << "tiling     " << to_string(*tiling) << '\n';
    text << "memory     workspace " << workspace_bytes << " bytes, state " << state_bytes << " bytes\n";
    for (std::size_t i = 0; i < declined.size(); ++i)
        text << (i == 0 ? "declined   " : "           ") << declined[i].kernel << ": " << declined[i].reason << '\n';
    return text.str();
}

}  // namespace sparsemla
