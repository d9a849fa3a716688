#include "tools/flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>

#include "tools/output.h"

namespace sparsemla::tool {
namespace {

constexpr std::int64_t max_int32 = std::numeric_limits<std::int32_t>::max();

template <class Number>
std::optional<Number> parse_number(const std::string& text) {
    Number value{};
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || rest != end) return std::nullopt;
    return value;
}

std::string alternatives(const std::vector<std::string>& words) {
    std::string text;
    for (std::size_t i = 0; i < words.size(); ++i)
        text += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
    return text;
}

/// The device a word names; nothing for "auto". Throws Error for any other word.
std::optional<Device> parse_device(const std::string& text) {
    if (text == "auto") return std::nullopt;
    if (text == "cpu") return Device{};
    if (text.rfind("cuda:", 0) == 0) {
        const std::optional<int> index = parse_number<int>(text.substr(5));
        if (index && *index >= 0) return Device{Device::Kind::cuda, *index};
    }
    throw Error(ErrorKind::invalid_argument, "--device", "cpu, auto or cuda:N", in_quotes(text));
}

/// Plans print "p_f16" for what the option calls "f16".
std::string drop_p_prefix(std::string& text) {
    if (text.rfind("p_", 0) == 0) text.erase(0, 2);
    return {};
}

void add_schedule_flags(CLI::App& app, RunFlags& flags) {
    const std::string group = "Schedule, where the plan shall not choose";
    integer_option(app, "--splits", flags.splits, 1, max_int32, "shares of a row's columns")->group(group);
    integer_option(app, "--chunk", flags.chunk, 1, max_int32, "columns per chunk")->group(group);
    number_option(app, "--p-scale", flags.p_scale, 0x1p-100, 0x1p100, "factor that P is stored times")->group(group);
    word_option(app, "--anchor", flags.anchor,
                {std::string(name(Anchor::split_running_max)), std::string(name(Anchor::chunk_max)),
                 std::string(name(Anchor::row_max))},
                "what the exponents of P are relative to")
        ->group(group);
    word_option(app, "--columns", flags.columns,
                {std::string(name(ColumnRule::blocks)), std::string(name(ColumnRule::interleaved)),
                 std::string(name(ColumnRule::round_robin))},
                "which columns a split takes")
        ->group(group);
}

void add_tiling_flags(CLI::App& app, RunFlags& flags) {
    const std::string group = "Tiling of a GPU kernel, where the plan shall not choose; never changes a bit";
    word_option(app, "--tile-heads", flags.tile_heads, {"16", "32", "64"}, "heads of a CTA")->group(group);
    integer_option(app, "--stages", flags.stages, 1, 4,
                   "chunks of 64 columns (decode_wide: 32) that shared memory has room for")
        ->group(group);
    integer_option(app, "--usual-columns", flags.usual_columns, 1, std::numeric_limits<std::int32_t>::max(),
                   "active columns of most rows: what the plan is to be fast for")
        ->group(group);
    integer_option(app, "--cluster-tiles", flags.cluster_tiles, 1, 8, "tiles of heads in a cluster")->group(group);
    word_option(app, "--gather", flags.gather, {std::string(name(Gather::copies)), std::string(name(Gather::bulk))},
                "how records come to shared memory")
        ->group(group);
    word_option(app, "--transport", flags.transport,
                {std::string(name(Transport::stores)), std::string(name(Transport::bulk)),
                 std::string(name(Transport::weights))},
                "what the CTAs of a cluster exchange, and how")
        ->group(group);
    word_option(
        app, "--trigger", flags.trigger,
        {std::string(name(Trigger::start)), std::string(name(Trigger::loaded)), std::string(name(Trigger::end))},
        "when the next kernel of the stream may start")
        ->group(group);
}

}  // namespace

std::string in_quotes(const std::string& text) { return "'" + printable(text) + "'"; }

CLI::Option* integer_option(CLI::App& app, const std::string& name, std::int64_t& target, std::int64_t low,
                            std::int64_t high, const std::string& help) {
    const auto validate = [low, high](std::string& text) {
        const std::optional<std::int64_t> value = parse_number<std::int64_t>(text);
        if (!value || *value < low || *value > high)
            return fmt::format("need an integer from {} to {}, got {}", low, high, in_quotes(text));
        text = std::to_string(*value);
        return std::string();
    };
    return app.add_option(name, target, help)->transform(CLI::Validator(validate, "", "integer"))->type_name("INT");
}

CLI::Option* number_option(CLI::App& app, const std::string& name, double& target, double low, double high,
                           const std::string& help) {
    const auto validate = [low, high](std::string& text) {
        const std::optional<double> value = parse_number<double>(text);
        if (!value || !(*value >= low && *value <= high))
            return fmt::format("need a number from {} to {}, got {}", low, high, in_quotes(text));
        return std::string();
    };
    return app.add_option(name, target, help)->check(CLI::Validator(validate, "", "number"))->type_name("NUMBER");
}

CLI::Option* word_option(CLI::App& app, const std::string& name, std::string& target,
                         const std::vector<std::string>& words, const std::string& help) {
    const auto validate = [words](std::string& text) {
        for (const std::string& word : words)
            if (text == word) return std::string();
        return fmt::format("need {}, got {}", alternatives(words), in_quotes(text));
    };
    return app.add_option(name, target, help + ": " + alternatives(words))
        ->check(CLI::Validator(validate, "", "word"))
        ->type_name("NAME");
}

CLI::Option* output_option(CLI::App& app, const std::string& name, std::string& target, const std::string& help) {
    return app.add_option(name, target, help)
        ->type_name("FILE")
        ->check(CLI::Validator(
            [](std::string& path) { return path.empty() ? std::string("need a file name, got \"\"") : std::string(); },
            ""));
}

std::vector<std::int64_t> parse_list(const std::string& text, const std::string& argument, std::size_t limit) {
    const auto fail = [&](std::string_view required) {
        throw Error(ErrorKind::invalid_argument, argument, required, in_quotes(text.substr(0, 60)));
    };
    std::vector<std::int64_t> values;
    for (std::size_t begin = 0; begin <= text.size();) {
        const std::size_t end = std::min(text.find(',', begin), text.size());
        const std::string item = text.substr(begin, end - begin);
        const std::size_t dash = item.find('-');
        const auto first = parse_number<std::int64_t>(item.substr(0, dash));
        const auto last = dash == std::string::npos ? first : parse_number<std::int64_t>(item.substr(dash + 1));
        if (!first || !last || *first < 0 || *last < *first || *last > max_int32)
            fail("numbers and ranges from 0 up, such as 0,5,8-11");
        if (static_cast<std::uint64_t>(*last - *first) >= limit - values.size())
            fail(fmt::format("at most {} numbers", limit));
        for (std::int64_t value = *first; value <= *last; ++value) values.push_back(value);
        begin = end + 1;
    }
    return values;
}

void add_run_flags(CLI::App& app, RunFlags& flags, bool all_kernels) {
    const auto words = [all_kernels](std::vector<std::string> names) {
        if (all_kernels) names.emplace_back("all");
        return names;
    };
    app.add_option("--device", flags.device, "cpu, cuda:N, or auto: the first GPU with a kernel, else the CPU")
        ->type_name("NAME")
        ->capture_default_str();
    word_option(app, "--kernel", flags.kernel, words(kernel_names()), "force a kernel");
    word_option(app, "--p-format", flags.p_format, words({"e4m3", "f16", "bf16", "f64"}),
                "format of the softmax weights P")
        ->transform(CLI::Validator(drop_p_prefix, "", "prefix"));
    integer_option(app, "--threads", flags.threads, 1, 4096,
                   "threads of a CPU kernel; never changes a bit (default: all)");
    app.add_flag("--allow-unverified", flags.allow_unverified,
                 "offer GPU kernels that nobody ran on this architecture");
    add_schedule_flags(app, flags);
    add_tiling_flags(app, flags);
}

void add_from_ids_flag(CLI::App& app, RunFlags& flags) {
    app.add_flag("--from-ids", flags.from_ids,
                 "decode converts token ids to slots itself, instead of a conversion before");
}

std::vector<DeviceSpec> devices_of(const RunFlags& flags) {
    const std::optional<Device> device = parse_device(flags.device);
    std::vector<DeviceSpec> specs;
    if (device) {
        specs.push_back(query_device(*device));
    } else {
        for (const DeviceReport& report : list_devices())
            if (report.usable && report.spec.device.kind == Device::Kind::cuda) specs.push_back(report.spec);
        specs.push_back(query_device(Device{}));
    }
    if (flags.threads != 0)
        for (DeviceSpec& spec : specs)
            if (spec.device.kind == Device::Kind::cpu) spec.threads = static_cast<int>(flags.threads);
    return specs;
}

PlanOptions plan_options(const RunFlags& flags) {
    PlanOptions options;
    if (flags.kernel != "all") options.kernel = flags.kernel;
    if (!flags.p_format.empty() && flags.p_format != "all") options.p_format = find_p_format(flags.p_format);
    if (flags.splits != 0) options.splits = static_cast<int>(flags.splits);
    if (flags.chunk != 0) options.chunk = static_cast<int>(flags.chunk);
    if (flags.p_scale != 0) options.p_scale = static_cast<float>(flags.p_scale);
    if (!flags.anchor.empty()) options.anchor = find_anchor(flags.anchor);
    if (!flags.columns.empty()) options.columns = find_column_rule(flags.columns);
    if (!flags.tile_heads.empty()) options.tile_heads = std::stoi(flags.tile_heads);
    if (flags.stages != 0) options.stages = static_cast<int>(flags.stages);
    if (flags.cluster_tiles != 0) options.cluster_tiles = static_cast<int>(flags.cluster_tiles);
    if (flags.usual_columns != 0) options.usual_columns = flags.usual_columns;
    if (!flags.gather.empty()) options.gather = find_gather(flags.gather);
    if (!flags.transport.empty()) options.transport = find_transport(flags.transport);
    if (!flags.trigger.empty()) options.trigger = find_trigger(flags.trigger);
    options.allow_unverified = flags.allow_unverified;
    return options;
}

std::string schedule_options(const RunFlags& flags) {
    std::string text;
    if (flags.splits != 0) text += fmt::format(" --splits {}", flags.splits);
    if (flags.chunk != 0) text += fmt::format(" --chunk {}", flags.chunk);
    if (flags.p_scale != 0) text += fmt::format(" --p-scale {}", flags.p_scale);
    if (!flags.anchor.empty()) text += " --anchor " + flags.anchor;
    if (!flags.columns.empty()) text += " --columns " + flags.columns;
    if (!flags.tile_heads.empty()) text += " --tile-heads " + flags.tile_heads;
    if (flags.stages != 0) text += fmt::format(" --stages {}", flags.stages);
    if (flags.cluster_tiles != 0) text += fmt::format(" --cluster-tiles {}", flags.cluster_tiles);
    if (flags.usual_columns != 0) text += fmt::format(" --usual-columns {}", flags.usual_columns);
    if (!flags.gather.empty()) text += " --gather " + flags.gather;
    if (!flags.transport.empty()) text += " --transport " + flags.transport;
    if (!flags.trigger.empty()) text += " --trigger " + flags.trigger;
    return text;
}

Plan plan_on_first(Problem problem, const std::vector<DeviceSpec>& devices, const PlanOptions& options) {
    for (std::size_t i = 0; i + 1 < devices.size(); ++i) {
        problem.device = devices[i].device;
        if (supports(problem, devices[i], options)) return make_plan(problem, devices[i], options);
    }
    problem.device = devices.back().device;
    return make_plan(problem, devices.back(), options);
}

}  // namespace sparsemla::tool
