// Options that several subcommands share, and validators whose messages say what came and what is allowed.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sparsemla/decode.h"

namespace sparsemla::tool {

/// Exit statuses of every subcommand.
enum class Status : int { ok = 0, check_failed = 1, bad_input = 2 };

/// A subcommand's options, and what runs once they are parsed.
struct Subcommand {
    CLI::App* app = nullptr;
    std::function<Status()> run;
};

/// A quoted and printable form of what the user wrote, for messages.
std::string in_quotes(const std::string& text);

/// Gives the option a decimal integer of [low, high], and help text that says so.
CLI::Option* integer_option(CLI::App& app, const std::string& name, std::int64_t& target, std::int64_t low,
                            std::int64_t high, const std::string& help);
/// The same for a finite number.
CLI::Option* number_option(CLI::App& app, const std::string& name, double& target, double low, double high,
                           const std::string& help);
/// The same for one of a few words.
CLI::Option* word_option(CLI::App& app, const std::string& name, std::string& target,
                         const std::vector<std::string>& words, const std::string& help);

/// An option that names a file to write; an empty name is refused.
CLI::Option* output_option(CLI::App& app, const std::string& name, std::string& target, const std::string& help);

/// "1,5,8-11" as [1, 5, 8, 9, 10, 11]: at most `limit` integers of [0, 2^31 - 1]. Throws Error naming `argument`.
std::vector<std::int64_t> parse_list(const std::string& text, const std::string& argument, std::size_t limit);

/// Where and how to run.
struct RunFlags {
    std::string device = "auto";
    std::string kernel;
    std::string p_format;
    std::int64_t threads = 0;  ///< 0: all
    std::int64_t splits = 0;   ///< this and the rest, when 0 or "": the plan chooses
    std::int64_t chunk = 0;
    double p_scale = 0;
    std::string anchor;
    std::string columns;
    std::string tile_heads;  ///< Tiling's fields, of GPU kernels
    std::int64_t stages = 0;
    std::int64_t cluster_tiles = 0;
    std::int64_t usual_columns = 0;
    std::string gather;
    std::string transport;
    std::string trigger;
    bool allow_unverified = false;
    bool from_ids = false;  ///< of subcommands that offer it
};

/// --from-ids: decode converts token ids itself.
void add_from_ids_flag(CLI::App& app, RunFlags& flags);
/// `all_kernels`: --kernel and --p-format also take "all".
void add_run_flags(CLI::App& app, RunFlags& flags, bool all_kernels);

/// The devices that --device names: one, or for "auto" the usable GPUs and then the CPU. Throws Error (unsupported).
std::vector<DeviceSpec> devices_of(const RunFlags& flags);
/// All flags but --device. "all" counts as no wish.
PlanOptions plan_options(const RunFlags& flags);

/// The options of the schedule and the tiling as the user would write them again: "" or " --splits 4 --stages 2".
std::string schedule_options(const RunFlags& flags);

/// The plan on the first of the devices that has a kernel for the problem. Throws the last device's refusal.
Plan plan_on_first(Problem problem, const std::vector<DeviceSpec>& devices, const PlanOptions& options);

}  // namespace sparsemla::tool
