// gen: a realistic decode step from a seed, with the right answer in the file.
#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>

#include "tools/output.h"
#include "tools/problem_flags.h"
#include "tools/run.h"
#include "tools/subcommands.h"
#include "tools/table.h"
#include "tools/token_ids.h"

namespace sparsemla::tool {
namespace {

constexpr std::int64_t max_int32 = std::numeric_limits<std::int32_t>::max();

struct GenFlags {
    std::string path;
    ProblemFlags problem;
    std::string counts = "all";
    double absent = 0.02;
    std::int64_t seed = 1;
    bool power_of_two_scales = false;
    bool no_expected = false;
    bool token_ids = false;
    Sharding sharding{};
    bool json = false;
};

/// "5,0,2048": any i32, since a count below 0 or above the width is legal too.
std::vector<std::int32_t> parse_counts(const std::string& text) {
    std::vector<std::int32_t> counts;
    const char* at = text.data();
    const char* const end = at + text.size();
    while (true) {
        std::int32_t count = 0;
        const auto [rest, error] = std::from_chars(at, end, count);
        if (error != std::errc() || (rest != end && *rest != ','))
            throw Error(ErrorKind::invalid_argument, "--counts", "all, ragged, or 32-bit integers such as 5,0,2048",
                        in_quotes(text.substr(0, 60)));
        counts.push_back(count);
        if (rest == end) return counts;
        at = rest + 1;
    }
}

void set_counts(harness::Recipe& recipe, const std::string& counts) {
    if (counts == "all") return;
    recipe.counts = harness::CountsRecipe::ragged;
    if (counts == "ragged") return;
    recipe.counts = harness::CountsRecipe::list;
    recipe.counts_list = parse_counts(counts);
    const auto given = static_cast<std::int64_t>(recipe.counts_list.size());
    if (given != recipe.rows)
        throw Error(ErrorKind::invalid_argument, "--counts",
                    fmt::format("all, ragged, or {}, one per row", plural(recipe.rows, "number")),
                    plural(given, "number"));
}

/// In double: the options allow products beyond 64 bits.
double bytes_needed(const harness::Recipe& recipe) {
    const auto rows = static_cast<double>(recipe.rows);
    const auto heads = static_cast<double>(recipe.heads);
    double bytes = rows * heads * layout_of(recipe.sources[0].record).d_qk() * 2;
    if (recipe.expected) bytes += rows * heads * value_dims * (3.0 * sizeof(double) + sizeof(float));
    for (const harness::SourceRecipe& source : recipe.sources) {
        const auto width = static_cast<double>(source.width);
        const auto step = static_cast<double>(source.slots_per_page != 0 ? source.slots_per_page : source.page_size);
        const double page_bytes =
            std::max(static_cast<double>(source.page_stride_bytes), step * layout_of(source.record).record_bytes);
        const double pages = source.pages != 0 ? static_cast<double>(source.pages)
                                               : 2 * width / static_cast<double>(source.page_size) + 1;
        bytes += pages * page_bytes + rows * width * sizeof(std::int32_t);
    }
    return bytes;
}

void check_memory(const harness::Recipe& recipe) {
    const double available =
        static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGE_SIZE));
    const double needed = bytes_needed(recipe);
    if (needed > available)
        throw Error(ErrorKind::invalid_argument, "--rows, --heads, --width, --pages",
                    fmt::format("a case that fits in this machine's {:.1f} GiB", available / 0x1p30),
                    fmt::format("one of {:.4g} GiB", needed / 0x1p30));
}

void check_sharding(const GenFlags& flags) {
    if (!flags.problem.extra.record.empty())
        throw Error(ErrorKind::invalid_argument, "--token-ids", "a case with one source", "--extra-record");
    if (flags.sharding.rank >= flags.sharding.world)
        throw Error(ErrorKind::invalid_argument, "--rank", fmt::format("a rank below --world {}", flags.sharding.world),
                    std::to_string(flags.sharding.rank));
    if (flags.problem.first.page_size % flags.sharding.interleave != 0)
        throw Error(ErrorKind::invalid_argument, "--interleave",
                    fmt::format("a divisor of --page-size {}", flags.problem.first.page_size),
                    std::to_string(flags.sharding.interleave));
}

Case make_case(const GenFlags& flags) {
    harness::Recipe recipe = recipe_of(flags.problem);
    set_counts(recipe, flags.counts);
    recipe.absent = flags.absent;
    recipe.seed = static_cast<std::uint64_t>(flags.seed);
    recipe.power_of_two_scales = flags.power_of_two_scales;
    recipe.expected = !flags.no_expected;
    const std::int64_t width = recipe.sources[0].width;
    if (flags.token_ids) {
        check_sharding(flags);
        // A rank keeps about its share of a list over all tokens.
        recipe.sources[0].width = (width + flags.sharding.world - 1) / flags.sharding.world;
    }
    check_memory(recipe);
    Case file = harness::generate(recipe);
    if (flags.token_ids)
        to_token_ids(file,
                     {.sharding = flags.sharding, .width = width, .seed = static_cast<std::uint64_t>(flags.seed)});
    return file;
}

std::int64_t total(const std::vector<std::int64_t>& values) {
    std::int64_t sum = 0;
    for (const std::int64_t value : values) sum += value;
    return sum;
}

void print_summary(const GenFlags& flags, const Case& file) {
    const auto size = static_cast<std::int64_t>(std::filesystem::file_size(flags.path));
    const bool expected = file.find("expected.out") != nullptr;
    const LoadedStep loaded = step_of(file);
    const std::int64_t active = total(active_columns(loaded.step));
    if (flags.json) {
        print_json({{"path", flags.path},
                    {"file_bytes", size},
                    {"rows", loaded.step.rows},
                    {"heads", loaded.step.heads},
                    {"active_columns", active},
                    {"seed", flags.seed},
                    {"expected", expected}});
        return;
    }
    Facts facts;
    facts.add("step", describe(loaded.step.problem()));
    if (flags.token_ids)
        facts.add("token ids", fmt::format("of rank {} of {}, interleave {}", flags.sharding.rank, flags.sharding.world,
                                           flags.sharding.interleave));
    facts.add("active", fmt::format("{} over all rows", plural(active, "column")));
    facts.add("expected", expected ? "out and lse, from float64" : "none");
    facts.add("seed", std::to_string(flags.seed));
    print_line(fmt::format("wrote {} ({})", printable(flags.path), format_bytes(size)));
    print(facts.text());
}

Status run_gen(const GenFlags& flags) {
    check_output_path(flags.path);
    Progress progress;
    progress.show("generating " + flags.path);
    const Case file = make_case(flags);
    save_case(file, flags.path);
    progress.clear();
    print_summary(flags, file);
    return Status::ok;
}

void add_token_id_flags(CLI::App& app, GenFlags& flags) {
    const std::string group = "Token ids";
    CLI::Option* ids = app.add_flag("--token-ids", flags.token_ids,
                                    "token ids and a block table instead of slots; counts are of kept ids");
    ids->group(group);
    integer_option(app, "--world", flags.sharding.world, 1, max_int32, "ranks that share the context")
        ->capture_default_str()
        ->group(group)
        ->needs(ids);
    integer_option(app, "--rank", flags.sharding.rank, 0, max_int32, "the rank whose cache this is")
        ->capture_default_str()
        ->group(group)
        ->needs(ids);
    integer_option(app, "--interleave", flags.sharding.interleave, 1, max_int32, "tokens per rank in turn")
        ->capture_default_str()
        ->group(group)
        ->needs(ids);
}

}  // namespace

Subcommand add_gen(CLI::App& parent) {
    CLI::App* app = parent.add_subcommand("gen", "Write a realistic decode step with the right answer");
    auto flags = std::make_shared<GenFlags>();
    app->add_option("OUT", flags->path, "the case file to write")->required()->type_name("FILE");
    add_problem_flags(*app, flags->problem)->required();
    add_geometry_flags(*app, flags->problem);
    app->add_option("--counts", flags->counts, "active columns of each row: all, ragged, or a list such as 5,0,2048")
        ->type_name("LIST")
        ->capture_default_str();
    number_option(*app, "--absent", flags->absent, 0, 1, "share of active columns that are -1")->capture_default_str();
    integer_option(*app, "--seed", flags->seed, 0, std::numeric_limits<std::int64_t>::max(), "same seed, same file")
        ->capture_default_str();
    app->add_flag("--power-of-two-scales", flags->power_of_two_scales,
                  "scales rounded up, for records with f32 scales");
    app->add_flag("--no-expected", flags->no_expected, "leave expected.out and expected.lse out");
    add_token_id_flags(*app, *flags);
    app->add_flag("--json", flags->json,
                  "one JSON document: path, file_bytes, rows, heads, active_columns, seed, expected");
    app->footer(
        "Examples:\n"
        "  sparsemla gen a.safetensors --record fp8 --rows 8 --heads 16 --width 2048 --counts ragged\n"
        "  sparsemla gen b.safetensors --record fp8_v4 --rows 4 --heads 64 --width 128 --page-size 256 \\\n"
        "      --extra-record fp8_v4 --extra-width 512 --sinks\n"
        "  sparsemla gen c.safetensors --record fp8 --rows 4 --heads 96 --width 512 --token-ids --world 8 --rank 3");
    return {app, [flags] { return run_gen(*flags); }};
}

}  // namespace sparsemla::tool
