#include "sparsemla/engine.h"

#include <algorithm>
#include <sstream>

#include "check.h"

namespace sparsemla {

namespace {

[[noreturn]] void refuse(std::string_view argument, const std::string& required, const std::string& received) {
    throw Error(ErrorKind::invalid_argument, std::string(argument), required, received);
}

void sort_unique(std::vector<std::int64_t>& values) {
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
}

EngineConfig checked(EngineConfig config) {
    if (config.problem.sources.empty()) refuse("sources", "one or two sources", "0");
    if (config.problem.from_ids)
        refuse("problem.from_ids", "false: from_ids of the engine's config asks for it", "true");
    if (config.row_capacities.empty()) refuse("row_capacities", "at least one", "none");
    if (config.widths.empty()) config.widths = {config.problem.sources[0].width};
    sort_unique(config.row_capacities);
    sort_unique(config.widths);
    if (config.row_capacities.front() < 1)
        refuse("row_capacities", "capacities >= 1", std::to_string(config.row_capacities.front()));
    if (config.widths.front() < 0) refuse("widths", "widths >= 0", std::to_string(config.widths.front()));
    return config;
}

/// Options that give another problem the plan's schedule, and its tiling where that is asked for.
PlanOptions options_of(const Plan& plan, bool with_tiling) {
    const Schedule& schedule = plan.schedule;
    PlanOptions options{.kernel = schedule.kernel,
                        .p_format = schedule.p_format,
                        .p_scale = schedule.p_scale,
                        .anchor = schedule.anchor,
                        .splits = schedule.splits,
                        .columns = schedule.columns,
                        .chunk = schedule.chunk};
    if (!plan.tiling || !with_tiling) return options;
    options.tile_heads = plan.tiling->heads;
    options.stages = plan.tiling->stages;
    options.cluster_tiles = plan.tiling->cluster_tiles;
    options.gather = plan.tiling->gather;
    options.transport = plan.tiling->transport;
    options.trigger = plan.tiling->trigger;
    return options;
}

void check_prepared(const PlanCache& plans) {
    if (!plans.prepared()) refuse("plans", "PlanCache::prepare after the last engine was made", "none");
}

}  // namespace

Engine::Engine(EngineConfig config, DeviceSpec device, PlanCache& plans)
    : config_(checked(std::move(config))), device_(std::move(device)), plans_(&plans) {
    for (const std::int64_t rows : config_.row_capacities)
        for (const std::int64_t width : config_.widths) add_entry(rows, width);
}

void Engine::add_entry(std::int64_t rows, std::int64_t width) {
    Problem problem = config_.problem;
    problem.rows = rows;
    problem.sources[0].width = width;
    Entry entry{rows, width, &plans_->plan(problem, device_, config_.options), nullptr, ""};
    problem.from_ids = config_.from_ids;
    // The tiling, which changes no bit, may need more memory than the slots leave, or a kernel that there is not; and a
    // kernel may take no wish about what it has only one of.
    PlanOptions named = config_.options;
    named.kernel = entry.plan->schedule.kernel;
    for (PlanOptions options : {options_of(*entry.plan, true), options_of(*entry.plan, false), named}) {
        if (!config_.from_ids || entry.from_ids != nullptr) break;
        options.usual_columns = config_.options.usual_columns;
        options.allow_unverified = config_.options.allow_unverified;
        if (const std::optional<std::string> refused = refusal(problem, device_, options)) {
            if (entry.refused.empty()) entry.refused = *refused;
        } else if (make_plan(problem, device_, options).schedule == entry.plan->schedule) {
            entry.from_ids = &plans_->plan(problem, device_, options);
        }
    }
    if (!config_.from_ids) entry.refused = "not asked for";
    entries_.push_back(std::move(entry));
}

const Plan& Engine::plan_for(std::int64_t rows, std::int64_t width) const { return *entry_for(rows, width).plan; }

const Plan* Engine::from_ids_plan_for(std::int64_t rows, std::int64_t width) const {
    return entry_for(rows, width).from_ids;
}

const Engine::Entry& Engine::entry_for(std::int64_t rows, std::int64_t width) const {
    const std::int64_t most_rows = config_.row_capacities.back();
    if (rows < 0 || rows > most_rows) refuse("rows", "0 .. " + std::to_string(most_rows), std::to_string(rows));
    for (const Entry& entry : entries_)
        if (entry.rows >= rows && entry.width == width) return entry;
    std::vector<std::string> widths;
    for (const std::int64_t planned : config_.widths) widths.push_back(std::to_string(planned));
    refuse("width", "a planned width: " + detail::join(widths, ", ", " or "), std::to_string(width));
}

void Engine::convert(ConvertArgs args, Stream stream) const {
    args.sharding = config_.sharding;
    convert_indices(args, stream);
}

void Engine::decode(DecodeArgs args, Stream stream) const {
    decode_on(plan_for(args.rows, args.sources[0].slots.shape[1]), std::move(args), stream);
}

void Engine::decode_on(const Plan& plan, DecodeArgs args, Stream stream) const {
    check_prepared(*plans_);
    if (args.workspace.data == nullptr) args.workspace = plans_->workspace();
    if (args.state.data == nullptr) args.state = plans_->state();
    sparsemla::decode(plan, args, stream);
}

void Engine::run(const ConvertArgs& indices, DecodeArgs args, Stream stream) const {
    if (config_.problem.sources[0].count_offset != 0)
        refuse("indices", "a source 0 whose count_offset is 0, as converted counts start at column 0",
               std::to_string(config_.problem.sources[0].count_offset));
    if (indices.token_ids.present()) {
        if (indices.token_ids.shape[0] != args.rows)
            refuse("token_ids", std::to_string(args.rows) + " rows, as many as are decoded",
                   std::to_string(indices.token_ids.shape[0]));
        plan_for(args.rows, indices.token_ids.shape[1]);  // refuses before anything is converted
    }
    check_prepared(*plans_);
    const Plan* plan = indices.token_ids.present() ? from_ids_plan_for(args.rows, indices.token_ids.shape[1]) : nullptr;
    if (plan != nullptr) {
        args.indices = indices;
        args.indices.sharding = config_.sharding;
        args.indices.slots = args.indices.counts = {};
        args.sources[0].slots = args.sources[0].counts = {};
        return decode_on(*plan, std::move(args), stream);
    }
    args.indices = {};
    ConvertArgs conversion = indices;
    conversion.cache = args.sources[0].cache;
    convert(conversion, stream);
    args.sources[0].slots = indices.slots;
    args.sources[0].counts = indices.counts;
    decode(args, stream);
}

std::string Engine::explain() const {
    std::ostringstream text;
    for (const Entry& entry : entries_)
        text << "rows <= " << entry.rows << ", width " << entry.width << '\n'
             << entry.plan->describe() << "token ids  "
             << (entry.from_ids == nullptr ? "converted before: " + entry.refused
                 : entry.from_ids->tiling  ? "converted within decode: " + to_string(*entry.from_ids->tiling)
                                           : std::string("converted within decode"))
             << "\n\n";
    return text.str();
}

}  // namespace sparsemla
