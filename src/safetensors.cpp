// Reading safetensors files: sizes of dtypes, the rule that tensors tile the data, and bytes from a file or memory.
#include "safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <system_error>
#include <tuple>
#include <utility>

namespace sparsemla::detail {

namespace {

struct DtypeBits {
    std::string_view name;
    int bits;
};

constexpr std::array<DtypeBits, 22> known_dtypes = {{
    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"BOOL", 8},        {"U8", 8},   {"I8", 8},
    {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8},     {"I16", 16},        {"U16", 16}, {"F16", 16},
    {"BF16", 16},   {"I32", 32},    {"U32", 32},        {"F32", 32},        {"I64", 64}, {"U64", 64},
    {"F64", 64},    {"C64", 64},    {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
}};

/// Fills `into` with the bytes from `offset_bytes` on, or throws.
using ReadAt = std::function<void(std::int64_t offset_bytes, std::span<std::byte> into)>;

constexpr std::int64_t length_bytes = 8;

[[noreturn]] void malformed(const std::string& argument, std::string_view required, std::string_view received) {
    throw Error(ErrorKind::malformed_file, argument, required, received);
}

std::string count_of(std::int64_t bytes) { return std::to_string(bytes) + " bytes"; }

std::int64_t read_header_length(const ReadAt& read_at, std::int64_t file_bytes, const std::string& path) {
    if (file_bytes < length_bytes) malformed(path, "a header length of 8 bytes", "a file of " + count_of(file_bytes));
    std::array<std::byte, length_bytes> raw{};
    read_at(0, raw);
    std::uint64_t length = 0;
    for (int i = length_bytes - 1; i >= 0; --i) length = length << 8 | static_cast<std::uint64_t>(raw[i]);
    const std::int64_t limit = std::min(file_bytes - length_bytes, max_header_bytes);
    if (length > static_cast<std::uint64_t>(limit))
        malformed(path, "a header of at most " + count_of(limit) + " (the rest of the file, and 100 MB)",
                  "a header length of " + std::to_string(length));
    return static_cast<std::int64_t>(length);
}

/// The format's rule: in order of their offsets the tensors fill the data section without holes or overlap, and each
/// has the size that its dtype and shape give. Sorts the entries by offset.
void check_tiling(std::vector<TensorEntry>& entries, std::int64_t data_bytes, const std::string& path) {
    std::sort(entries.begin(), entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
        return std::tie(a.begin_bytes, a.end_bytes, a.name) < std::tie(b.begin_bytes, b.end_bytes, b.name);
    });
    std::int64_t end_bytes = 0;
    for (const TensorEntry& entry : entries) {
        const std::string argument = path + ": " + in_quotes(entry.name);
        if (bits_per_element(entry.dtype_name) == 0)
            malformed(argument, "a dtype of the format, whose size is known", in_quotes(entry.dtype_name));
        const std::string received =
            "data_offsets [" + std::to_string(entry.begin_bytes) + ", " + std::to_string(entry.end_bytes) + "]";
        if (entry.end_bytes < entry.begin_bytes) malformed(argument, "offsets that do not fall", received);
        if (entry.begin_bytes != end_bytes)
            malformed(argument,
                      "data that begins where the tensor before it ends, at byte " + std::to_string(end_bytes) +
                          " of the data (no holes, no overlap)",
                      received);
        if (entry.end_bytes > data_bytes)
            malformed(argument, "offsets within the " + count_of(data_bytes) + " of data", received);
        const std::optional<std::int64_t> size_bytes = dense_bytes(entry.dtype_name, entry.shape);
        const std::string what = describe(entry.dtype_name, entry.shape);
        if (!size_bytes) malformed(argument, "a shape of whole bytes whose size is below 2^63", what);
        if (*size_bytes != entry.end_bytes - entry.begin_bytes)
            malformed(argument, count_of(*size_bytes) + " for " + what, received);
        end_bytes = entry.end_bytes;
    }
    if (end_bytes != data_bytes)
        malformed(path, "tensors that fill the data to the end of the file",
                  count_of(end_bytes) + " of tensors in " + count_of(data_bytes) + " of data");
}

Case read_with(const ReadAt& read_at, std::int64_t file_bytes, const std::string& path) {
    const std::int64_t header_bytes = read_header_length(read_at, file_bytes, path);
    std::string json(static_cast<std::size_t>(header_bytes), '\0');
    read_at(length_bytes, std::as_writable_bytes(std::span(json)));
    SafetensorsHeader header = parse_header(json, path);
    const std::int64_t data_begin = length_bytes + header_bytes;
    check_tiling(header.entries, file_bytes - data_begin, path);

    Case c;
    c.path = path;
    c.metadata = std::move(header.metadata);
    for (TensorEntry& entry : header.entries) {
        OwnedTensor tensor{std::move(entry.dtype_name), std::move(entry.shape), nullptr, 0};
        const std::int64_t size_bytes = entry.end_bytes - entry.begin_bytes;
        tensor.bytes = allocate_bytes(size_bytes, path + ": " + in_quotes(entry.name));
        tensor.size_bytes = static_cast<std::size_t>(size_bytes);
        read_at(data_begin + entry.begin_bytes, {tensor.bytes.get(), tensor.size_bytes});
        c.tensors.emplace(std::move(entry.name), std::move(tensor));
    }
    return c;
}

[[noreturn]] void cannot_read(const std::string& path, std::string_view operation) {
    throw Error(ErrorKind::io, path, "a file that can be read",
                std::string(operation) + ": " + std::generic_category().message(errno));
}

/// An open descriptor of a regular file, and its size.
class RegularFile {
   public:
    explicit RegularFile(const std::string& path) : path_(path) {
        // Non-blocking, so that opening a FIFO returns and can be refused.
        descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (descriptor_ < 0) cannot_read(path, "open");
        struct stat status {};
        const bool known = ::fstat(descriptor_, &status) == 0;
        if (known && S_ISREG(status.st_mode)) {
            size_bytes_ = status.st_size;
            return;
        }
        const int error = errno;
        ::close(descriptor_);
        errno = error;
        if (!known) cannot_read(path, "fstat");
        throw Error(ErrorKind::io, path, "a regular file", S_ISDIR(status.st_mode) ? "a directory" : "a special file");
    }
    ~RegularFile() { ::close(descriptor_); }
    RegularFile(const RegularFile&) = delete;
    RegularFile& operator=(const RegularFile&) = delete;

    std::int64_t size_bytes() const { return size_bytes_; }

    void read_at(std::int64_t offset_bytes, std::span<std::byte> into) const {
        while (!into.empty()) {
            const ssize_t got = ::pread(descriptor_, into.data(), into.size(), offset_bytes);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) cannot_read(path_, "read");
            if (got == 0) throw Error(ErrorKind::io, path_, "a file that keeps its size", "one that became shorter");
            offset_bytes += got;
            into = into.subspan(static_cast<std::size_t>(got));
        }
    }

   private:
    const std::string& path_;
    int descriptor_ = -1;
    std::int64_t size_bytes_ = 0;
};

}  // namespace

std::string_view dtype_name(DType dtype) {
    switch (dtype) {
        case DType::u8: return "U8";
        case DType::i32: return "I32";
        case DType::i64: return "I64";
        case DType::f8_e4m3: return "F8_E4M3";
        case DType::bf16: return "BF16";
        case DType::f16: return "F16";
        case DType::f32: return "F32";
        case DType::f64: return "F64";
    }
    return "";
}

std::optional<DType> find_dtype(std::string_view text) {
    for (const DType dtype :
         {DType::u8, DType::i32, DType::i64, DType::f8_e4m3, DType::bf16, DType::f16, DType::f32, DType::f64})
        if (dtype_name(dtype) == text) return dtype;
    return std::nullopt;
}

int bits_per_element(std::string_view dtype_name) {
    for (const DtypeBits& dtype : known_dtypes)
        if (dtype.name == dtype_name) return dtype.bits;
    return 0;
}

std::optional<std::int64_t> dense_bytes(std::string_view dtype_name, std::span<const std::int64_t> shape) {
    std::int64_t bits = bits_per_element(dtype_name);
    if (bits == 0) return std::nullopt;
    bool empty = false;
    for (const std::int64_t extent : shape) {
        if (extent < 0) return std::nullopt;
        empty = empty || extent == 0;
        if (extent > 1 && bits > std::numeric_limits<std::int64_t>::max() / extent) return std::nullopt;
        if (extent > 1) bits *= extent;
    }
    if (empty) return 0;
    if (bits % 8 != 0) return std::nullopt;
    return bits / 8;
}

std::shared_ptr<std::byte[]> allocate_bytes(std::int64_t bytes, const std::string& argument) {
    constexpr std::align_val_t alignment{64};
    const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
    auto* memory = static_cast<std::byte*>(::operator new[](size, alignment, std::nothrow));
    if (memory == nullptr) throw Error(ErrorKind::io, argument, count_of(bytes) + " of memory", "none");
    return {memory, [](std::byte* p) { ::operator delete[](p, alignment); }};
}

Case parse_safetensors(std::span<const std::byte> file, const std::string& path) {
    const ReadAt read_at = [&](std::int64_t offset_bytes, std::span<std::byte> into) {
        if (!into.empty()) std::memcpy(into.data(), file.data() + offset_bytes, into.size());
    };
    return read_with(read_at, static_cast<std::int64_t>(file.size()), path);
}

Case read_safetensors(const std::string& path) {
    const RegularFile file(path);
    const ReadAt read_at = [&](std::int64_t offset_bytes, std::span<std::byte> into) {
        file.read_at(offset_bytes, into);
    };
    return read_with(read_at, file.size_bytes(), path);
}

}  // namespace sparsemla::detail
