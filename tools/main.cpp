// The command-line tool: parses, runs one subcommand, and turns every failure into one line and an exit status.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "sparsemla/device.h"
#include "tools/help.h"
#include "tools/output.h"
#include "tools/subcommands.h"

namespace sparsemla::tool {
namespace {

constexpr const char* description =
    "sparsemla: sparse MLA decode. A case is one safetensors file that holds one decode step.";

constexpr const char* examples =
    "Examples:\n"
    "  sparsemla env                                     what this machine offers\n"
    "  sparsemla gen step.safetensors --record fp8 --rows 8 --heads 16 --width 2048\n"
    "  sparsemla check step.safetensors                  every kernel against float64\n"
    "  sparsemla decode step.safetensors -o result.safetensors\n"
    "  sparsemla plan --record fp8_ds_mla --rows 4 --heads 128 --width 2048\n"
    "Exit status: 0 success, 1 a check failed, 2 bad input, usage, or output that could not be written.";

/// A descriptor that is closed at start would be given to the next file opened, and messages would land there.
void occupy_standard_descriptors() {
    for (int descriptor = 0; descriptor <= 2; ++descriptor)
        if (::fcntl(descriptor, F_GETFD) == -1 && errno == EBADF) {
            // Read-only for outputs: writing to what the caller closed stays an error.
            const int opened = ::open("/dev/null", descriptor == 0 ? O_WRONLY : O_RDONLY);
            if (opened != descriptor && opened >= 0) ::close(opened);
        }
}

Status usage_error(const std::string& message) {
    print_error(message);
    return Status::bad_input;
}

/// The message of a parse error. The parser's own text for an unknown command does not name it.
std::string parse_message(const CLI::ParseError& error, const std::vector<Subcommand>& subcommands, int argc,
                          char** argv) {
    if (error.get_exit_code() != static_cast<int>(CLI::ExitCodes::RequiredError)) return parse_error_text(error);
    std::string names;
    for (const Subcommand& subcommand : subcommands) {
        if (subcommand.app->parsed()) return parse_error_text(error);
        names += (names.empty() ? "" : ", ") + subcommand.app->get_name();
    }
    return fmt::format("command: need one of {}, got {}", names, argc > 1 ? in_quotes(argv[1]) : "nothing");
}

/// The parser leaves two empty lines between groups of options.
std::string compact(std::string help) {
    for (std::size_t at = 0; (at = help.find("\n\n\n", at)) != std::string::npos;) help.erase(at, 1);
    return help;
}

Status parse_and_run(int argc, char** argv) {
    CLI::App app(description, "sparsemla");
    app.footer(examples);
    app.require_subcommand(1);
    app.set_version_flag("--version", "sparsemla " + build_info().version);
    app.formatter(std::make_shared<HelpFormatter>());
    std::vector<Subcommand> subcommands;
    for (const auto add :
         {add_env, add_support, add_gen, add_decode, add_check, add_plan, add_convert, add_info, add_bench, add_dcp})
        subcommands.push_back(add(app));
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForVersion& version) {
        print_line(version.what());
        return Status::ok;
    } catch (const CLI::CallForAllHelp&) {
        print(compact(app.help("", CLI::AppFormatMode::All)));
        return Status::ok;
    } catch (const CLI::CallForHelp&) {
        print(compact(app.help()));
        return Status::ok;
    } catch (const CLI::ParseError& error) {
        return usage_error(parse_message(error, subcommands, argc, argv));
    }
    for (const Subcommand& subcommand : subcommands)
        if (subcommand.app->parsed()) return subcommand.run();
    return usage_error("command: need one");
}

Status guarded(int argc, char** argv) {
    try {
        const Status status = parse_and_run(argc, argv);
        flush_output();
        return status;
    } catch (const OutputFailure& failure) {
        // A reader that has seen enough, such as head, is no error worth a message.
        if (failure.error == EPIPE) return Status::bad_input;
        return usage_error(fmt::format("standard output: need a place that takes what is written, got {}",
                                       std::strerror(failure.error)));
    } catch (const std::bad_alloc&) {
        return usage_error("memory: need less than this machine has, got a request for more");
    } catch (const std::exception& error) {
        return usage_error(error.what());
    } catch (...) {
        return usage_error("internal: an exception of unknown type");
    }
}

}  // namespace
}  // namespace sparsemla::tool

int main(int argc, char** argv) {
    sparsemla::tool::occupy_standard_descriptors();
    std::signal(SIGXFSZ, SIG_IGN);  // a file past the size limit is a failed write, not the end of the process
    return static_cast<int>(sparsemla::tool::guarded(argc, argv));
}
