// The safetensors format: what the reader accepts and refuses, and that a write is whole or nothing.
#include "safetensors.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace sparsemla {
namespace {

namespace fs = std::filesystem;

std::string little_endian(std::uint64_t value) {
    std::string out;
    for (int i = 0; i < 8; ++i) out += static_cast<char>(value >> (8 * i));
    return out;
}

std::string file_of(const std::string& json, const std::string& data) {
    return little_endian(json.size()) + json + data;
}

Case parse(const std::string& file) {
    // A copy of its own size, so that the sanitizer sees a read past the end.
    const std::vector<char> exact(file.begin(), file.end());
    return detail::parse_safetensors(std::as_bytes(std::span(exact)), "f.safetensors");
}

/// The error's text, which must be of `kind`; empty if nothing was thrown.
template <class Function>
std::string error_of(ErrorKind kind, Function function) {
    try {
        function();
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), kind) << error.what();
        return error.what();
    }
    return "";
}

std::string refusal_of(const std::string& file) {
    return error_of(ErrorKind::malformed_file, [&] { parse(file); });
}

testing::AssertionResult contains(const std::string& text, const std::string& part) {
    if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "'" << text << "' does not contain '" << part << "'";
}

void expect_equal(const Case& a, const Case& b) {
    EXPECT_EQ(a.metadata, b.metadata);
    ASSERT_EQ(a.tensors.size(), b.tensors.size());
    for (const auto& [name, tensor] : a.tensors) {
        const OwnedTensor* other = b.find(name);
        ASSERT_NE(other, nullptr) << name;
        EXPECT_EQ(tensor.dtype_name, other->dtype_name) << name;
        EXPECT_EQ(tensor.shape, other->shape) << name;
        ASSERT_EQ(tensor.size_bytes, other->size_bytes) << name;
        EXPECT_EQ(std::memcmp(tensor.bytes.get(), other->bytes.get(), tensor.size_bytes), 0) << name;
    }
}

/// Odd sizes, odd names, dtypes that the library does not know, nothing of a case.
Case odd_case() {
    Case c;
    const auto add = [&](const char* name, const char* dtype, std::vector<std::int64_t> shape, std::int64_t bytes) {
        OwnedTensor tensor{dtype, std::move(shape), detail::allocate_bytes(bytes, name), 0};
        tensor.size_bytes = static_cast<std::size_t>(bytes);
        for (std::int64_t i = 0; i < bytes; ++i) tensor.bytes[i] = static_cast<std::byte>(7 * i + bytes);
        c.tensors.emplace(name, std::move(tensor));
    };
    add("bytes", "U8", {3, 1}, 3);
    add("quarter bytes \"\\\n", "F4", {2, 3}, 3);
    add("wide", "F64", {5}, 40);
    add("scalar", "F32", {}, 4);
    add("empty", "I32", {4, 0}, 0);
    add("\xC3\xA9", "F6_E2M3", {4}, 3);
    c.metadata = {{"key\t", "value \x01 \"\\/"}, {"", "\xF0\x9F\x98\x80"}};
    return c;
}

class Folder : public testing::Test {
   protected:
    void SetUp() override {
        std::string name = (fs::temp_directory_path() / "sparsemla-XXXXXX").string();
        ASSERT_NE(::mkdtemp(name.data()), nullptr);
        folder_ = name;
    }
    void TearDown() override {
        fs::permissions(folder_, fs::perms::owner_all);
        fs::remove_all(folder_);
    }
    std::string path(const std::string& name) const { return (folder_ / name).string(); }
    std::size_t entries() const {
        return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
    }
    static std::string bytes_of(const std::string& name) {
        std::ifstream in(name, std::ios::binary);
        return {std::istreambuf_iterator<char>(in), {}};
    }

    fs::path folder_;
};
using SafetensorsWrite = Folder;
using SafetensorsRead = Folder;

TEST(SafetensorsHeader, AcceptsWhatTheFormatAllows) {
    const std::string json =
        "{ \"b\" : {\"data_offsets\":[2,4],\t\"shape\":[ 1 , 1 ],\"dtype\":\"I16\"},\n"
        "\"__metadata__\":{\"k\\u00e9\\ud83d\\ude00\\n\":\"v\"},"
        "\"none\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[2,2]},"
        "\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
        "\"four\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[4,5]}}   ";
    const Case c = parse(file_of(json, "abcde"));
    ASSERT_EQ(c.tensors.size(), 4U);
    EXPECT_EQ(std::memcmp(c.find("b")->bytes.get(), "cd", 2), 0);
    EXPECT_EQ(std::memcmp(c.find("a")->bytes.get(), "ab", 2), 0);
    EXPECT_EQ(c.find("none")->size_bytes, 0U);
    EXPECT_NE(c.find("none")->bytes, nullptr);
    EXPECT_EQ(c.metadata, (std::map<std::string, std::string>{{"k\xC3\xA9\xF0\x9F\x98\x80\n", "v"}}));
    for (const auto& [name, tensor] : c.tensors)
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.bytes.get()) % 64, 0U) << name;
    EXPECT_TRUE(parse(file_of("{}", "")).tensors.empty());
}

TEST(SafetensorsHeader, RefusesEveryTruncation) {
    const std::string file =
        file_of("{\"__metadata__\":{\"k\":\"v\"},\"a\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}",
                std::string(16, 'x'));
    EXPECT_EQ(parse(file).tensors.size(), 1U);
    for (std::size_t length = 0; length < file.size(); ++length)
        EXPECT_TRUE(contains(refusal_of(file.substr(0, length)), "f.safetensors")) << "cut to " << length << " bytes";
    EXPECT_TRUE(contains(refusal_of(file + "x"), "16 bytes of tensors in 17"));
}

TEST(SafetensorsHeader, RefusesLengthsPastTheFile) {
    for (const std::uint64_t length : {std::uint64_t{3}, std::uint64_t{100'000'001}, std::uint64_t{1} << 63,
                                       std::numeric_limits<std::uint64_t>::max()})
        EXPECT_TRUE(contains(refusal_of(little_endian(length) + "{}"), std::to_string(length))) << length;
}

/// One tensor's line with a part replaced.
std::string with_shape(const std::string& shape, const std::string& offsets, const std::string& dtype = "U8") {
    return "{\"a\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}";
}

TEST(SafetensorsHeader, RefusesBadJson) {
    const std::string tensor = "{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}";
    const std::pair<std::string, std::string> headers[] = {
        {"", "starts with '{'"},
        {" {}", "starts with '{'"},
        {"[]", "starts with '{'"},
        {"{", "end of the header"},
        {"{}x", "nothing but spaces"},
        {"{}" + std::string(1, '\0'), "nothing but spaces"},
        {"{\"a\":" + tensor + ",}", "need '\"'"},
        {"{\"a\" " + tensor + "}", "need ':'"},
        {"{\"a\":3}", "need '{'"},
        {"{\"a\":null}", "need '{'"},
        {"{\"a\":" + tensor + " \"b\":" + tensor + "}", "need '}'"},
        {"{\"a\":" + tensor + ",\"a\":" + tensor + "}", "each name once"},
        {"{\"\\u0061\":" + tensor + ",\"a\":" + tensor + "}", "each name once"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", "each name once"},
        {"{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", "each metadata key once"},
        {"{\"__metadata__\":{\"k\":1}}", "a string as metadata value"},
        {"{\"__metadata__\":{\"k\":{\"k\":\"v\"}}}", "a string as metadata value"},
        {"{\"__metadata__\":[]}", "need '{'"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", "'dtype' once"},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,2]}}", "the key 'dtype'"},
        {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,2]}}", "the key 'shape'"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2]}}", "the key 'data_offsets'"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2],\"x\":1}}", "got 'x'"},
        {"{\"a\":{\"dtype\":8,\"shape\":[2],\"data_offsets\":[0,2]}}", "need '\"'"},
        {"{\"a\x01\":" + tensor + "}", "control characters"},
        {"{\"a\\x\":" + tensor + "}", "an escape that JSON knows"},
        {"{\"a\\", "an escape that JSON knows"},
        {"{\"a\\u12g4\":" + tensor + "}", "four hexadecimal digits"},
        {"{\"a\\ud800\":" + tensor + "}", "unpaired surrogate"},
        {"{\"a\\ud800\\u0041\":" + tensor + "}", "unpaired surrogate"},
        {"{\"a\\udc00\":" + tensor + "}", "unpaired surrogate"},
        {"{\"a\xC0\xAF\":" + tensor + "}", "UTF-8"},
        {"{\"a\xED\xA0\x80\":" + tensor + "}", "UTF-8"},
        {"{\"a\xF4\x90\x80\x80\":" + tensor + "}", "UTF-8"},
        {"{\"a\xE2\x82", "UTF-8"},
        {with_shape("[-2]", "[0,2]"), "non-negative integer"},
        {with_shape("[+2]", "[0,2]"), "non-negative integer"},
        {with_shape("[2.0]", "[0,2]"), "non-negative integer"},
        {with_shape("[2e0]", "[0,2]"), "non-negative integer"},
        {with_shape("[02]", "[0,2]"), "leading zeros"},
        {with_shape("[9223372036854775808]", "[0,2]"), "below 2^63"},
        {with_shape("[[2]]", "[0,2]"), "non-negative integer"},
        {with_shape("[2,]", "[0,2]"), "non-negative integer"},
        {with_shape("[2}", "[0,2]"), "need ']'"},
        {with_shape("[\"2\"]", "[0,2]"), "non-negative integer"},
        {with_shape("2", "[0,2]"), "need '['"},
        {with_shape("[2]", "[0]"), "two data_offsets"},
        {with_shape("[2]", "[0,2,2]"), "two data_offsets"},
    };
    for (const auto& [json, part] : headers) EXPECT_TRUE(contains(refusal_of(file_of(json, "xy")), part)) << json;
    // Deep nesting is refused at its first bracket, not by the stack's end.
    EXPECT_NE(refusal_of(file_of("{\"a\":" + std::string(1'000'000, '['), "")), "");
}

TEST(SafetensorsHeader, RefusesOffsetsThatDoNotTile) {
    const auto two = [](const std::string& first, const std::string& second) {
        return "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":" + first +
               "},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":" + second + "}}";
    };
    const std::pair<std::string, std::string> headers[] = {
        {two("[0,2]", "[1,3]"), "no overlap"},
        {two("[0,2]", "[0,2]"), "no overlap"},
        {two("[1,3]", "[3,5]"), "at byte 0"},
        {two("[0,2]", "[3,5]"), "no holes"},
        {two("[0,2]", "[2,6]"), "within the 4 bytes"},
        {two("[0,2]", "[9223372036854775805,9223372036854775807]"), "no holes"},
        {with_shape("[4]", "[4,0]"), "do not fall"},
        {with_shape("[3]", "[0,4]"), "3 bytes for U8 [3]"},
        {with_shape("[4]", "[0,4]", "I32"), "16 bytes for I32 [4]"},
        {with_shape("[4]", "[0,4]", "U7"), "whose size is known, got 'U7'"},
        {with_shape("[4]", "[0,4]", "u8"), "whose size is known"},
        {with_shape("[9]", "[0,4]", "F4"), "whole bytes"},
        {with_shape("[1152921504606846976]", "[0,4]"), "below 2^63"},
        {with_shape("[1152921504606846976,64]", "[0,4]"), "below 2^63"},
        {with_shape("[4294967296,4294967296]", "[0,4]"), "below 2^63"},
        {with_shape("[4294967296,4294967296,0]", "[0,0]"), "below 2^63"},
        {with_shape("[288230376151711744]", "[0,288230376151711744]"), "within the 4 bytes"},
        {with_shape("[2]", "[0,2]"), "to the end of the file"},
        {"{}", "to the end of the file"},
    };
    for (const auto& [json, part] : headers) EXPECT_TRUE(contains(refusal_of(file_of(json, "abcd")), part)) << json;
}

TEST(SafetensorsHeader, MessagesCarryNoControlCharacters) {
    const std::string text = refusal_of(file_of("{\"\\u001b[2J" + std::string(500, 'n') + "\":{}}", ""));
    EXPECT_TRUE(contains(text, "'\\x1b[2J"));
    EXPECT_LT(text.size(), 300U);
}

TEST_F(SafetensorsRead, TakesRegularFilesOnly) {
    const auto read = [](const std::string& name) {
        return error_of(ErrorKind::io, [&] { detail::read_safetensors(name); });
    };
    EXPECT_TRUE(contains(read(folder_.string()), "a directory"));
    EXPECT_TRUE(contains(read("/dev/zero"), "a special file"));
    EXPECT_TRUE(contains(read(path("none")), path("none") + ": need a file that can be read, got open: "));
    ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
    EXPECT_TRUE(contains(read(path("fifo")), "a special file"));
}

TEST_F(SafetensorsWrite, LosesNothingAndIsDeterministic) {
    const Case c = odd_case();
    save_case(c, path("a"));
    const Case back = detail::read_safetensors(path("a"));
    expect_equal(c, back);
    EXPECT_EQ(back.path, path("a"));
    save_case(back, path("b"));
    EXPECT_EQ(bytes_of(path("a")), bytes_of(path("b")));
    EXPECT_EQ(entries(), 2U);

    // Wider elements first, so that every tensor is aligned to its elements.
    const std::string file = bytes_of(path("a"));
    EXPECT_EQ(static_cast<unsigned char>(file[0]) % 8, 0);
    EXPECT_LT(file.find("\"wide\""), file.find("\"empty\""));
    EXPECT_LT(file.find("\"scalar\""), file.find("\"bytes\""));
    EXPECT_LT(file.find("\"bytes\""), file.find("\"quarter"));
}

TEST_F(SafetensorsWrite, AFailedWriteLeavesTheOldFile) {
    Case c = odd_case();
    save_case(c, path("a"));
    const std::string before = bytes_of(path("a"));
    c.tensors.insert_or_assign("large", make_owned(DType::u8, {1 << 20}));

    rlimit old{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
    rlimit small = old;
    small.rlim_cur = 1 << 16;
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
    const std::string text = error_of(ErrorKind::io, [&] { save_case(c, path("a")); });
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
    EXPECT_EQ(text, path("a") + ": need a file that can be written, got write: " + std::strerror(EFBIG));
    EXPECT_EQ(bytes_of(path("a")), before);
    EXPECT_EQ(entries(), 1U);
    sigset_t blocked;
    ASSERT_EQ(pthread_sigmask(SIG_BLOCK, nullptr, &blocked), 0);
    EXPECT_EQ(sigismember(&blocked, SIGXFSZ), 0);
    save_case(c, path("a"));
    expect_equal(c, detail::read_safetensors(path("a")));
}

TEST_F(SafetensorsWrite, RefusesPlacesThatCannotHoldAFile) {
    const auto save = [](const std::string& name) {
        return error_of(ErrorKind::io, [&] { save_case(odd_case(), name); });
    };
    EXPECT_TRUE(contains(save(path("none/a")), path("none/a") + ": need a file that can be written, got create"));
    EXPECT_TRUE(contains(save(path("none/a")), std::strerror(ENOENT)));
    EXPECT_TRUE(contains(save(folder_.string()), "a directory"));
    EXPECT_TRUE(contains(save("/dev/full"), "a special file"));
    EXPECT_TRUE(fs::is_character_file("/dev/full"));
    EXPECT_NE(save(""), "");
    EXPECT_EQ(entries(), 0U);
    fs::create_symlink(path("none"), path("dangling"));
    EXPECT_TRUE(contains(save(path("dangling")), "follow the link"));
}

TEST_F(SafetensorsWrite, FollowsLinksAndStepsOverLeftovers) {
    fs::create_directory(path("real"));
    save_case(Case{}, path("real/a"));
    fs::create_symlink(path("real/a"), path("link"));
    std::ofstream(path("real/a.") + std::to_string(::getpid()) + "-0.tmp") << "left behind";
    save_case(odd_case(), path("link"));
    EXPECT_TRUE(fs::is_symlink(path("link")));
    expect_equal(odd_case(), detail::read_safetensors(path("real/a")));
}

TEST_F(SafetensorsWrite, NeedsAWritableFolder) {
    if (::geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
    fs::permissions(folder_, fs::perms::owner_read | fs::perms::owner_exec);
    const std::string text = error_of(ErrorKind::io, [&] { save_case(odd_case(), path("a")); });
    EXPECT_TRUE(contains(text, std::strerror(EACCES)));
}

TEST_F(SafetensorsWrite, RefusesTensorsThatNoFileCanHold) {
    const auto save = [&](const std::string& name, OwnedTensor tensor) {
        Case c;
        c.tensors.emplace(name, std::move(tensor));
        return error_of(ErrorKind::invalid_argument, [&] { save_case(c, path("a")); });
    };
    const OwnedTensor good = make_owned(DType::i32, {2});
    OwnedTensor bad = good;
    bad.size_bytes = 7;
    EXPECT_TRUE(contains(save("t", bad), "as many bytes as its dtype and shape say"));
    bad = good;
    bad.bytes = nullptr;
    EXPECT_TRUE(contains(save("t", bad), "as many bytes"));
    bad = good;
    bad.dtype_name = "I33";
    EXPECT_TRUE(contains(save("t", bad), "as many bytes"));
    EXPECT_TRUE(contains(save("__metadata__", good), "reserve"));
    EXPECT_TRUE(contains(save("\xFF", good), "UTF-8"));
    EXPECT_EQ(entries(), 0U);
}

}  // namespace
}  // namespace sparsemla
