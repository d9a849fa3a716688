// What the tool writes for people and programs: text on stdout that must arrive, numbers with units, JSON, files.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace sparsemla::tool {

/// Objects keep the order in which keys were added, so documents compare line by line.
using Json = nlohmann::ordered_json;

/// stdout refused what was written to it; `error` is errno's value.
struct OutputFailure {
    int error = 0;
};

/// Writes to stdout. Throws OutputFailure.
void print(std::string_view text);
/// One line, also to stdout.
void print_line(std::string_view text);
/// An indented document and a newline. Text that is not UTF-8 gets replacement characters.
std::string json_text(const Json& document);
/// The same to stdout.
void print_json(const Json& document);
/// Hands everything printed so far to the operating system. Throws OutputFailure.
void flush_output();

/// "sparsemla: error: MESSAGE" as one line on stderr.
void print_error(std::string_view message);

/// The text on one line, with control characters escaped: names from files must not steer a terminal.
std::string printable(std::string_view text);

/// A JSON number, or "nan", "inf", "-inf" for what JSON has no number for.
Json json_number(double value);

std::string format_count(std::int64_t value);                   ///< "1,234,567"
std::string format_bytes(std::int64_t bytes);                   ///< "512 B", "1.3 MiB"
std::string format_seconds(double seconds);                     ///< "12.3 us", "4.56 ms"
std::string format_number(double value);                        ///< four significant digits, "inf", "nan"
std::string format_ratio(double value);                         ///< "0.123"
std::string format_small(double value);                         ///< an error: "1.2e-04", "0"
std::string plural(std::int64_t count, std::string_view noun);  ///< "1 row", "8 rows"

/// Throws Error (io) unless a file can be put at `path`: its directory is there, and what is there now is a file.
/// Long work calls this before it starts.
void check_output_path(const std::string& path);

/// Writes a text file whole or not at all: a temporary beside `path`, flushed, then renamed. Throws Error (io).
void write_file(const std::string& path, std::string_view content);

/// One line on stderr that rewrites itself during long work; silent unless stderr is a terminal.
class Progress {
   public:
    Progress();
    ~Progress();
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    void show(std::string_view text);
    void clear();

   private:
    bool interactive_;
    bool shown_ = false;
};

}  // namespace sparsemla::tool
