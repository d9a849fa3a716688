#include "tools/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "sparsemla/tensor.h"

namespace sparsemla::tool {
namespace {

/// Below the narrowest usual terminal: a line that wraps cannot be taken back.
constexpr std::size_t progress_width = 78;

/// Whether a terminal could take the byte for a command: C0 controls, DEL, and in UTF-8 the C1 controls.
bool is_control(std::string_view text, std::size_t at) {
    const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
    const bool leads_c1 = byte(at) == 0xC2 && byte(at + 1) >= 0x80 && byte(at + 1) < 0xA0;
    return byte(at) < 0x20 || byte(at) == 0x7F || leads_c1;
}

}  // namespace

void print(std::string_view text) {
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) throw OutputFailure{errno};
}

void print_line(std::string_view text) {
    print(text);
    print("\n");
}

std::string json_text(const Json& document) {
    return document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

void print_json(const Json& document) { print(json_text(document)); }

void flush_output() {
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) throw OutputFailure{errno};
}

void print_error(std::string_view message) {
    std::fflush(stdout);
    const std::string line = fmt::format("sparsemla: error: {}\n", printable(message));
    std::fwrite(line.data(), 1, line.size(), stderr);
}

std::string printable(std::string_view text) {
    while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
    std::string result;
    result.reserve(text.size());
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] == '\n')
            result += "; ";
        else if (is_control(text, i))
            result += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[i]));
        else
            result += text[i];
    }
    return result;
}

Json json_number(double value) {
    if (std::isnan(value)) return "nan";
    if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
    return value;
}

std::string format_count(std::int64_t value) {
    std::string digits = std::to_string(value);
    const std::size_t first = value < 0 ? 1 : 0;
    for (std::size_t end = digits.size(); end > first + 3;) {
        end -= 3;
        digits.insert(end, 1, ',');
    }
    return digits;
}

std::string format_bytes(std::int64_t bytes) {
    constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    auto value = static_cast<double>(bytes);
    int unit = 0;
    while (value >= 1023.95 && unit < 6) {
        value /= 1024;
        ++unit;
    }
    return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

std::string format_seconds(double seconds) {
    constexpr const char* units[] = {"ns", "us", "ms", "s"};
    double value = seconds * 1e9;
    int unit = 0;
    while (value >= 999.5 && unit < 3) {
        value /= 1000;
        ++unit;
    }
    const int decimals = value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
    return fmt::format("{:.{}f} {}", value, decimals, units[unit]);
}

std::string format_number(double value) {
    // The sign of a NaN says nothing.
    return std::isnan(value) ? "nan" : fmt::format("{:.4g}", value);
}

std::string format_ratio(double value) { return value < 1000 ? fmt::format("{:.3f}", value) : format_number(value); }

std::string format_small(double value) { return value == 0 ? "0" : fmt::format("{:.1e}", value); }

std::string plural(std::int64_t count, std::string_view noun) {
    return fmt::format("{} {}{}", format_count(count), noun, count == 1 ? "" : "s");
}

namespace {

[[noreturn]] void fail_io(const std::string& path, std::string_view required, int error) {
    throw Error(ErrorKind::io, path, required, std::strerror(error));
}

/// 0, or the errno of the step that failed.
int write_all(int file, std::string_view content) {
    while (!content.empty()) {
        const ssize_t written = ::write(file, content.data(), content.size());
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return written < 0 ? errno : ENOSPC;
        content.remove_prefix(static_cast<std::size_t>(written));
    }
    return ::fsync(file) == 0 || errno == EINVAL ? 0 : errno;
}

}  // namespace

void check_output_path(const std::string& path) {
    constexpr std::string_view required = "a file that exists or a new one in an existing directory";
    struct stat status {};
    if (::stat(path.c_str(), &status) == 0) {
        if (S_ISREG(status.st_mode)) return;
        throw Error(ErrorKind::io, path, required, S_ISDIR(status.st_mode) ? "a directory" : "a device or pipe");
    }
    const std::size_t slash = path.rfind('/');
    const std::string directory = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
    if (path.empty()) throw Error(ErrorKind::io, "output path", required, "an empty name");
    if (slash + 1 == path.size()) throw Error(ErrorKind::io, path, required, "a name that ends with /");
    if (::stat(directory.c_str(), &status) != 0) fail_io(path, required, errno);
    if (!S_ISDIR(status.st_mode)) fail_io(path, required, ENOTDIR);
    if (::access(directory.c_str(), W_OK | X_OK) != 0) fail_io(path, required, errno);
}

void write_file(const std::string& path, std::string_view content) {
    check_output_path(path);
    std::string temporary = path + ".XXXXXX";
    const int file = ::mkstemp(temporary.data());
    if (file < 0) fail_io(path, "a path that can be written", errno);
    int error = write_all(file, content);
    const mode_t mask = ::umask(0);
    ::umask(mask);
    if (error == 0 && ::fchmod(file, 0666 & ~mask) != 0) error = errno;
    if (::close(file) != 0 && error == 0) error = errno;
    if (error == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
    if (error == 0) return;
    ::unlink(temporary.c_str());
    fail_io(path, "a path that can be written", error);
}

Progress::Progress() : interactive_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() { clear(); }

void Progress::show(std::string_view text) {
    if (!interactive_) return;
    // Erase to the end of the line, so that a shorter text leaves nothing of a longer one.
    fmt::print(stderr, "\r{}\x1b[K", printable(text).substr(0, progress_width));
    std::fflush(stderr);
    shown_ = true;
}

void Progress::clear() {
    if (!shown_) return;
    std::fputs("\r\x1b[K", stderr);
    std::fflush(stderr);
    shown_ = false;
}

}  // namespace sparsemla::tool
