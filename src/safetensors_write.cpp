// Writing safetensors files, whole or not at all: a temporary beside the target, flushed, then renamed.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <tuple>

#include "safetensors.h"

namespace sparsemla::detail {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void cannot_write(const std::string& path, std::string_view operation, const std::string& reason) {
    throw Error(ErrorKind::io, path, "a file that can be written", std::string(operation) + ": " + reason);
}

[[noreturn]] void cannot_write(const std::string& path, std::string_view operation) {
    cannot_write(path, operation, std::generic_category().message(errno));
}

/// Writing past RLIMIT_FSIZE raises SIGXFSZ, which would end the process; held back, the write fails with EFBIG.
class SizeSignalHeld {
   public:
    SizeSignalHeld() {
        sigset_t pending;
        sigemptyset(&set_);
        sigaddset(&set_, SIGXFSZ);
        sigpending(&pending);
        was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
        pthread_sigmask(SIG_BLOCK, &set_, &before_);
    }
    ~SizeSignalHeld() {
        const int error = errno;
        const timespec no_wait{};
        if (!was_pending_) sigtimedwait(&set_, nullptr, &no_wait);
        pthread_sigmask(SIG_SETMASK, &before_, nullptr);
        errno = error;
    }
    SizeSignalHeld(const SizeSignalHeld&) = delete;
    SizeSignalHeld& operator=(const SizeSignalHeld&) = delete;

   private:
    sigset_t set_{};
    sigset_t before_{};
    bool was_pending_ = false;
};

/// The file that takes the target's place on commit, or vanishes.
class TemporaryFile {
   public:
    TemporaryFile(std::string target, const std::string& path) : path_(path), target_(std::move(target)) {
        constexpr int attempts = 100;  // names left behind by killed processes of the same id are stepped over
        for (int i = 0; i < attempts && descriptor_ < 0; ++i) {
            name_ = target_ + "." + std::to_string(::getpid()) + "-" + std::to_string(i) + ".tmp";
            descriptor_ = ::open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
            if (descriptor_ < 0 && errno != EEXIST) break;
        }
        if (descriptor_ < 0) cannot_write(path_, "create " + name_);
    }
    ~TemporaryFile() {
        if (descriptor_ >= 0) ::close(descriptor_);
        if (!committed_) ::unlink(name_.c_str());
    }
    TemporaryFile(const TemporaryFile&) = delete;
    TemporaryFile& operator=(const TemporaryFile&) = delete;

    void write(const void* data, std::size_t bytes) {
        const auto* from = static_cast<const char*>(data);
        while (bytes > 0) {
            const ssize_t put = ::write(descriptor_, from, bytes);
            if (put < 0 && errno == EINTR) continue;
            if (put < 0) cannot_write(path_, "write");
            from += put;
            bytes -= static_cast<std::size_t>(put);
        }
    }

    void commit() {
        if (::fsync(descriptor_) != 0) cannot_write(path_, "fsync");
        const int closed = ::close(descriptor_);
        descriptor_ = -1;
        if (closed != 0) cannot_write(path_, "close");
        if (::rename(name_.c_str(), target_.c_str()) != 0) cannot_write(path_, "rename");
        committed_ = true;
    }

   private:
    const std::string& path_;
    std::string target_;
    std::string name_;
    int descriptor_ = -1;
    bool committed_ = false;
};

/// The file to replace: what a symbolic link points to. A rename would destroy anything but a regular file.
std::string find_target(const std::string& path) {
    std::error_code error;
    if (fs::is_symlink(fs::symlink_status(path, error))) {
        const fs::path target = fs::canonical(path, error);
        if (error) cannot_write(path, "follow the link", error.message());
        return find_target(target.string());
    }
    const fs::file_status status = fs::status(path, error);
    if (fs::exists(status) && !fs::is_regular_file(status))
        throw Error(ErrorKind::io, path, "a regular file or a new name",
                    fs::is_directory(status) ? "a directory" : "a special file");
    return path;
}

void check_text(std::string_view text, const std::string& path) {
    if (!is_utf8(text)) throw Error(ErrorKind::invalid_argument, path, "names and metadata in UTF-8", in_quotes(text));
}

SafetensorsHeader plan_header(const Case& c, const std::string& path) {
    SafetensorsHeader header{.entries = {}, .metadata = c.metadata};
    for (const auto& [key, value] : c.metadata) {
        check_text(key, path);
        check_text(value, path);
    }
    for (const auto& [name, tensor] : c.tensors) {
        check_text(name, path);
        const std::string argument = path + ": " + in_quotes(name);
        if (name == metadata_key)
            throw Error(ErrorKind::invalid_argument, argument, "a tensor name that the format does not reserve", "it");
        const std::optional<std::int64_t> size_bytes = dense_bytes(tensor.dtype_name, tensor.shape);
        if (!size_bytes || static_cast<std::uint64_t>(*size_bytes) != tensor.size_bytes ||
            (tensor.size_bytes != 0 && tensor.bytes == nullptr))
            throw Error(ErrorKind::invalid_argument, argument, "as many bytes as its dtype and shape say",
                        describe(tensor.dtype_name, tensor.shape) + " in " + std::to_string(tensor.size_bytes));
        header.entries.push_back({name, tensor.dtype_name, tensor.shape, 0, *size_bytes});
    }
    std::sort(header.entries.begin(), header.entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
        const int bits_a = bits_per_element(a.dtype_name);
        const int bits_b = bits_per_element(b.dtype_name);
        return std::tie(bits_b, a.name) < std::tie(bits_a, b.name);
    });
    std::int64_t end_bytes = 0;
    for (TensorEntry& entry : header.entries) {
        entry.begin_bytes += end_bytes;
        entry.end_bytes += end_bytes;
        end_bytes = entry.end_bytes;
    }
    return header;
}

}  // namespace

void write_safetensors(const Case& c, const std::string& path) {
    const SafetensorsHeader header = plan_header(c, path);
    const std::string json = format_header(header);
    if (json.size() > static_cast<std::size_t>(max_header_bytes))
        throw Error(ErrorKind::invalid_argument, path, "names and metadata that fit a header of 100 MB",
                    std::to_string(json.size()) + " bytes");
    std::string length;
    for (int i = 0; i < 8; ++i) length += static_cast<char>(static_cast<std::uint64_t>(json.size()) >> (8 * i));

    TemporaryFile file(find_target(path), path);
    {
        const SizeSignalHeld held;
        file.write(length.data(), length.size());
        file.write(json.data(), json.size());
        for (const TensorEntry& entry : header.entries) {
            const OwnedTensor& tensor = c.tensors.at(entry.name);
            file.write(tensor.bytes.get(), tensor.size_bytes);
        }
    }
    file.commit();
}

}  // namespace sparsemla::detail
