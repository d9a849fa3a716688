// Cycles of decode_latency's stages on a GPU, of its last chunk, while the kernel runs in a graph of dependent decodes.
// The kernel is a copy whose stage marks read the clock (stamp_stages.py), which costs it a few per cent.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "harness/generate.h"
#include "harness/gpu.h"
#include "harness/gpu_step.h"
#include "sparsemla/case_file.h"
#include "sparsemla/decode.h"

namespace sparsemla::detail::latency {
// Of the stamped copy.
extern const char* const stage_names[];
extern const int num_stages;
void set_stamps(long long* of_sms);
}  // namespace sparsemla::detail::latency

namespace {

using namespace sparsemla;

constexpr std::size_t stamps_of_cta = 32;
constexpr std::size_t ctas_of_sm = 128;  ///< places, by the time that the CTA began at
constexpr int decodes = 64;

struct Flags {
    std::int64_t rows = 5, heads = 96, width = 2048, active = 256;
    int splits = 0, tile_heads = 0, stages = 0, cluster_tiles = 0;
    std::string gather, transport, trigger, query = "f8_e4m3", record = STAMPED_PLAIN ? "fp8" : "fp8_ds_mla";
};

Flags parse(int argc, char** argv) {
    Flags flags;
    CLI::App app{"Cycles of decode_latency's stages"};
    app.add_option("--rows", flags.rows);
    app.add_option("--heads", flags.heads);
    app.add_option("--width", flags.width);
    app.add_option("--active", flags.active);
    app.add_option("--splits", flags.splits);
    app.add_option("--tile-heads", flags.tile_heads);
    app.add_option("--stages", flags.stages);
    app.add_option("--cluster-tiles", flags.cluster_tiles);
    app.add_option("--gather", flags.gather)->check(CLI::IsMember({"copies", "bulk"}));
    app.add_option("--transport", flags.transport)->check(CLI::IsMember({"stores", "bulk", "weights"}));
    app.add_option("--trigger", flags.trigger)->check(CLI::IsMember({"start", "loaded", "end"}));
    app.add_option("--query", flags.query)->check(CLI::IsMember({"f8_e4m3", "bf16"}));
    app.add_option("--record", flags.record,
                   STAMPED_PLAIN ? "fp8, the only one; bench_stage_cycles_forms takes the others"
                                 : "any but fp8, which bench_stage_cycles takes");
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        std::exit(app.exit(error));
    }
    return flags;
}

std::optional<int> wish(int value) { return value == 0 ? std::nullopt : std::optional(value); }

PlanOptions options_of(const Flags& flags) {
    PlanOptions options;
    options.kernel = "decode_latency";
    options.splits = wish(flags.splits);
    options.tile_heads = wish(flags.tile_heads);
    options.stages = wish(flags.stages);
    options.cluster_tiles = wish(flags.cluster_tiles);
    options.gather = find_gather(flags.gather);
    options.transport = find_transport(flags.transport);
    options.trigger = find_trigger(flags.trigger);
    options.usual_columns = flags.active;
    return options;
}

Case case_of(const Flags& flags) {
    harness::Recipe recipe;
    recipe.rows = flags.rows;
    recipe.heads = flags.heads;
    recipe.query_dtype = flags.query == "bf16" ? DType::bf16 : DType::f8_e4m3;
    const bool plain = flags.record == "fp8";
    if (plain != bool{STAMPED_PLAIN})
        throw Error(ErrorKind::invalid_argument, "--record", "one whose kernel has stamps here", flags.record);
    const RecordLayout& layout = plain ? layout_of(Record::fp8_576) : find_layout(flags.record, 0);
    recipe.sources = {{.record = layout.record, .form = layout.default_form(), .width = flags.width}};
    recipe.counts = harness::CountsRecipe::list;
    recipe.counts_list.assign(static_cast<std::size_t>(flags.rows), static_cast<std::int32_t>(flags.active));
    recipe.absent = 0;
    recipe.expected = false;
    return harness::generate(recipe);
}

/// The CTAs of one SM that left stamps, in the order of their beginnings.
std::vector<const long long*> ctas_in_order(const std::vector<long long>& stamps, std::size_t sm, std::size_t entered) {
    std::vector<const long long*> ctas;
    for (std::size_t i = 0; i < ctas_of_sm; ++i) {
        const long long* const cta = stamps.data() + (sm * ctas_of_sm + i) * stamps_of_cta;
        if (cta[entered] != 0) ctas.push_back(cta);
    }
    std::ranges::sort(ctas, {}, [&](const long long* cta) { return cta[entered]; });
    return ctas;
}

/// Median over the CTAs, each with the one before it on its SM (or null); -1 where there are none. cycles(before, cta)
/// is empty for a CTA that did not come by.
template <class Cycles>
double median_cycles(const std::vector<long long>& stamps, std::size_t entered, const Cycles& cycles) {
    std::vector<double> all;
    for (std::size_t sm = 0; sm * ctas_of_sm * stamps_of_cta < stamps.size(); ++sm) {
        const long long* before = nullptr;
        for (const long long* const cta : ctas_in_order(stamps, sm, entered)) {
            const std::optional<long long> value = cycles(before, cta);
            if (value && std::abs(*value) < 100'000) all.push_back(static_cast<double>(*value));
            before = cta;
        }
    }
    if (all.empty()) return -1;
    std::ranges::nth_element(all, all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2));
    return all[all.size() / 2];
}

std::optional<long long> between(long long from, long long to) {
    return from == 0 || to == 0 ? std::nullopt : std::optional(to - from);
}

std::size_t stage_of(const std::string& name) {
    namespace latency = sparsemla::detail::latency;
    const auto* const begin = latency::stage_names;
    return static_cast<std::size_t>(std::find(begin, begin + latency::num_stages, name) - begin);
}

void print(const std::vector<long long>& stamps) {
    namespace latency = sparsemla::detail::latency;
    struct Stage {
        double cycles;
        const char* name;
    };
    std::vector<Stage> stages;
    const std::size_t origin = stage_of("waited");
    const std::size_t entered = stage_of("entered");
    const auto num_stages = static_cast<std::size_t>(latency::num_stages);
    for (std::size_t i = 0; i < num_stages; ++i) {
        const double cycles = median_cycles(stamps, entered, [&](const long long*, const long long* cta) {
            // What an earlier CTA left in the shared memory is older than this one's start.
            return cta[i] < cta[entered] ? std::nullopt : between(cta[origin], cta[i]);
        });
        if (cycles != -1) stages.push_back({cycles, latency::stage_names[i]});
    }
    std::ranges::sort(stages, {}, &Stage::cycles);
    fmt::print("{:12} {:>8} {:>8}\n", "stage", "cycles", "of it");
    double before = stages.empty() ? 0 : stages.front().cycles;
    for (const Stage& stage : stages) {
        fmt::print("{:12} {:8.0f} {:8.0f}\n", stage.name, stage.cycles, stage.cycles - before);
        before = stage.cycles;
    }
    const auto last = [&](const long long* cta) { return *std::max_element(cta, cta + num_stages); };
    for (const char* stage : {"entered", "waited"})
        fmt::print("from a decode's last stage to '{}' of the next one on the same SM: {:.0f} cycles\n", stage,
                   median_cycles(stamps, entered, [&](const long long* earlier, const long long* cta) {
                       return earlier == nullptr ? std::nullopt : between(last(earlier), cta[stage_of(stage)]);
                   }));
}

void run(const Flags& flags) {
    const Device device{Device::Kind::cuda, 0};
    Case file = case_of(flags);
    CaseStep step = case_step(file);
    Problem problem = step.problem();
    problem.device = device;
    DeviceSpec gpu = query_device(device);
    gpu.shared_memory_bytes -= 1024;  // where the stamps lie, up to the kernel's alignment
    const Plan plan = make_plan(problem, gpu, options_of(flags));
    DecodeArgs args = step.args();
    std::vector<std::byte> out(static_cast<std::size_t>(flags.rows * flags.heads * value_dims * 2));
    std::vector<float> lse(static_cast<std::size_t>(flags.rows * flags.heads));
    args.out = dense(out.data(), DType::bf16, {flags.rows, flags.heads, value_dims});
    args.lse = dense(lse.data(), DType::f32, {flags.rows, flags.heads});
    const harness::GpuStep placed(plan, args);
    const auto sms = static_cast<std::size_t>(gpu.sms);
    const std::size_t bytes = sms * ctas_of_sm * stamps_of_cta * sizeof(long long);
    harness::GpuBuffer stamps(device, bytes);
    stamps.fill(0);
    sparsemla::detail::latency::set_stamps(reinterpret_cast<long long*>(stamps.data()));
    prepare(plan, placed.args().state);
    const harness::GpuGraph graph(placed.stream(), [&](Stream stream) {
        for (int i = 0; i < decodes; ++i) decode(plan, placed.args(), stream);
    });
    graph.time_us(placed.stream());
    const double us = graph.time_us(placed.stream()) / decodes;
    std::vector<long long> host(sms * ctas_of_sm * stamps_of_cta);
    stamps.download(host.data(), host.size() * sizeof(long long));
    fmt::print("{}\n{}\n{:.2f} us a decode, with the stamps\n", to_string(plan.schedule), to_string(*plan.tiling), us);
    print(host);
}

}  // namespace

int main(int argc, char** argv) {
    try {
        run(parse(argc, argv));
    } catch (const sparsemla::Error& error) {
        fmt::print(stderr, "stage_cycles: {}\n", error.what());
        return 1;
    }
    return 0;
}
