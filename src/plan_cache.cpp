#include <algorithm>
#include <deque>
#include <tuple>

#include "check.h"
#include "sparsemla/engine.h"

namespace sparsemla {

namespace {

constexpr std::size_t memory_alignment_bytes = 64;

auto key(const SourceProblem& source) {
    return std::tuple(source.record, source.form, source.split_rope, source.width, source.count_offset);
}

bool same(const Problem& a, const Problem& b) {
    auto fields = [](const Problem& p) {
        return std::tuple(p.rows, p.heads, p.query_dtype, p.from_ids, p.sinks, p.lse, p.lse_base, p.out_dtype,
                          p.device.kind, p.device.index);
    };
    return fields(a) == fields(b) &&
           std::equal(a.sources.begin(), a.sources.end(), b.sources.begin(), b.sources.end(),
                      [](const SourceProblem& x, const SourceProblem& y) { return key(x) == key(y); });
}

bool same(const PlanOptions& a, const PlanOptions& b) {
    auto fields = [](const PlanOptions& o) {
        return std::tuple(o.kernel, o.p_format, o.p_scale, o.anchor, o.splits, o.columns, o.chunk, o.usual_columns,
                          o.tile_heads, o.stages, o.cluster_tiles, o.gather, o.transport, o.trigger,
                          o.allow_unverified);
    };
    return fields(a) == fields(b);
}

bool same(const DeviceSpec& a, const DeviceSpec& b) {
    auto fields = [](const DeviceSpec& s) {
        return std::tuple(s.device.kind, s.device.index, s.name, s.threads, s.capability, s.sms, s.shared_memory_bytes,
                          s.l2_bytes, s.resident_clusters);
    };
    return fields(a) == fields(b);
}

}  // namespace

struct PlanCache::Impl {
    struct Entry {
        PlanOptions options;
        Plan plan;
    };
    std::deque<Entry> entries;  // a deque: references to plans stay valid
    Memory workspace{};
    Memory state{};
    std::unique_ptr<std::byte[]> owned;  // of a CPU cache that was given no memory
    bool prepared = false;

    std::size_t largest(std::size_t Plan::*bytes) const {
        std::size_t most = 0;
        for (const Entry& entry : entries) most = std::max(most, entry.plan.*bytes);
        return most;
    }

    bool on_cpu() const {
        return std::all_of(entries.begin(), entries.end(),
                           [](const Entry& e) { return e.plan.problem.device.kind == Device::Kind::cpu; });
    }

    /// One host block: workspace, then state, both aligned.
    void allocate(std::size_t workspace_bytes, std::size_t state_bytes) {
        auto round_up = [](std::size_t bytes) {
            return (bytes + memory_alignment_bytes - 1) / memory_alignment_bytes * memory_alignment_bytes;
        };
        const std::size_t total = round_up(workspace_bytes) + round_up(state_bytes) + memory_alignment_bytes;
        owned = std::make_unique_for_overwrite<std::byte[]>(total);
        const auto address = reinterpret_cast<std::uintptr_t>(owned.get());
        std::byte* base = owned.get() + (round_up(address) - address);
        workspace = {base, workspace_bytes};
        state = {base + round_up(workspace_bytes), state_bytes};
    }
};

PlanCache::PlanCache() : impl_(std::make_unique<Impl>()) {}
PlanCache::~PlanCache() = default;

const Plan& PlanCache::plan(const Problem& problem, const DeviceSpec& device, const PlanOptions& options) {
    for (const Impl::Entry& entry : impl_->entries)
        if (same(entry.plan.problem, problem) && same(entry.plan.device, device) && same(entry.options, options))
            return entry.plan;
    impl_->entries.push_back({options, make_plan(problem, device, options)});
    impl_->prepared = false;
    return impl_->entries.back().plan;
}

std::size_t PlanCache::plans() const { return impl_->entries.size(); }
std::size_t PlanCache::workspace_bytes() const { return impl_->largest(&Plan::workspace_bytes); }
std::size_t PlanCache::state_bytes() const { return impl_->largest(&Plan::state_bytes); }

void PlanCache::set_memory(Memory workspace, Memory state) {
    auto check = [](std::string_view argument, const Memory& memory, std::size_t bytes) {
        if (bytes == 0 || (memory.data != nullptr && memory.bytes >= bytes)) return;
        throw Error(ErrorKind::invalid_argument, std::string(argument), std::to_string(bytes) + " bytes",
                    memory.data == nullptr ? "nothing" : std::to_string(memory.bytes) + " bytes");
    };
    check("workspace", workspace, workspace_bytes());
    check("state", state, state_bytes());
    impl_->workspace = workspace;
    impl_->state = state;
    impl_->owned.reset();
    impl_->prepared = false;
}

void PlanCache::prepare(Stream stream) {
    const bool enough = impl_->workspace.bytes >= workspace_bytes() && impl_->state.bytes >= state_bytes();
    if (!enough) {
        const bool given = impl_->workspace.data != nullptr && impl_->owned == nullptr;
        if (given || !impl_->on_cpu())
            throw Error(ErrorKind::invalid_argument, "workspace",
                        "set_memory with " + std::to_string(workspace_bytes()) + " and " +
                            std::to_string(state_bytes()) + " bytes",
                        std::to_string(impl_->workspace.bytes) + " and " + std::to_string(impl_->state.bytes));
        impl_->allocate(workspace_bytes(), state_bytes());
    }
    for (const Impl::Entry& entry : impl_->entries) sparsemla::prepare(entry.plan, impl_->state, stream);
    impl_->prepared = true;
}

bool PlanCache::prepared() const { return impl_->prepared; }
Memory PlanCache::workspace() const { return impl_->workspace; }
Memory PlanCache::state() const { return impl_->state; }

}  // namespace sparsemla
