// The JSON header of a safetensors file: a strict reader of exactly its grammar, and the writer.
#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "safetensors.h"

namespace sparsemla::detail {

namespace {

/// Length of the UTF-8 sequence that starts at `at`, 0 if it is not one (overlong, surrogate, past U+10FFFF, cut off).
std::size_t utf8_length(std::string_view text, std::size_t at) {
    const auto byte = [&](std::size_t i) -> unsigned { return static_cast<unsigned char>(text[at + i]); };
    const unsigned lead = byte(0);
    if (lead < 0x80) return 1;
    if (lead < 0xC2 || lead > 0xF4) return 0;
    const std::size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    if (text.size() - at < length) return 0;
    for (std::size_t i = 1; i < length; ++i)
        if ((byte(i) & 0xC0) != 0x80) return 0;
    if (lead == 0xE0 && byte(1) < 0xA0) return 0;
    if (lead == 0xED && byte(1) > 0x9F) return 0;
    if (lead == 0xF0 && byte(1) < 0x90) return 0;
    if (lead == 0xF4 && byte(1) > 0x8F) return 0;
    return length;
}

void append_utf8(std::string& out, std::uint32_t code) {
    const auto put = [&](std::uint32_t byte) { out += static_cast<char>(byte); };
    if (code < 0x80) {
        put(code);
    } else if (code < 0x800) {
        put(0xC0 | (code >> 6));
        put(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
        put(0xE0 | (code >> 12));
        put(0x80 | ((code >> 6) & 0x3F));
        put(0x80 | (code & 0x3F));
    } else {
        put(0xF0 | (code >> 18));
        put(0x80 | ((code >> 12) & 0x3F));
        put(0x80 | ((code >> 6) & 0x3F));
        put(0x80 | (code & 0x3F));
    }
}

bool is_high_surrogate(std::uint32_t code) { return code >= 0xD800 && code < 0xDC00; }
bool is_low_surrogate(std::uint32_t code) { return code >= 0xDC00 && code < 0xE000; }

class HeaderParser {
   public:
    HeaderParser(std::string_view text, const std::string& file) : text_(text), file_(file) {}

    SafetensorsHeader parse() {
        SafetensorsHeader header;
        std::set<std::string> seen;
        if (peek() != '{') fail("a JSON object that starts with '{'");
        object([&](std::string key) {
            if (!seen.insert(key).second) fail_name(key, "each name once");
            if (key == metadata_key)
                metadata(header.metadata);
            else
                header.entries.push_back(entry(std::move(key)));
        });
        skip_space();
        if (at_ != text_.size()) fail("nothing but spaces after the header's object");
        return header;
    }

   private:
    void metadata(std::map<std::string, std::string>& into) {
        object([&](std::string key) {
            if (peek() != '"') fail_name(key, "a string as metadata value");
            std::string value = string();
            const auto [where, fresh] = into.emplace(std::move(key), std::move(value));
            if (!fresh) fail_name(where->first, "each metadata key once");
        });
    }

    TensorEntry entry(std::string name) {
        TensorEntry entry{.name = std::move(name), .dtype_name = {}, .shape = {}};
        std::vector<std::int64_t> offsets;
        bool has_dtype = false;
        bool has_shape = false;
        bool has_offsets = false;
        const auto once = [&](bool& seen, const std::string& key) {
            if (std::exchange(seen, true)) fail_name(entry.name, "the key " + in_quotes(key) + " once");
        };
        object([&](const std::string& key) {
            if (key == "dtype") {
                once(has_dtype, key);
                entry.dtype_name = string();
            } else if (key == "shape") {
                once(has_shape, key);
                entry.shape = integers();
            } else if (key == "data_offsets") {
                once(has_offsets, key);
                offsets = integers();
            } else {
                fail_name(entry.name, "no key but dtype, shape and data_offsets", in_quotes(key));
            }
        });
        if (!has_dtype) fail_name(entry.name, "the key 'dtype'", "none");
        if (!has_shape) fail_name(entry.name, "the key 'shape'", "none");
        if (!has_offsets) fail_name(entry.name, "the key 'data_offsets'", "none");
        if (offsets.size() != 2) fail_name(entry.name, "two data_offsets", std::to_string(offsets.size()));
        entry.begin_bytes = offsets[0];
        entry.end_bytes = offsets[1];
        return entry;
    }

    template <class Member>
    void object(Member member) {
        expect('{');
        skip_space();
        if (accept('}')) return;
        do {
            skip_space();
            std::string key = string();
            skip_space();
            expect(':');
            skip_space();
            member(std::move(key));
            skip_space();
        } while (accept(','));
        expect('}');
    }

    std::vector<std::int64_t> integers() {
        std::vector<std::int64_t> values;
        expect('[');
        skip_space();
        if (accept(']')) return values;
        do {
            skip_space();
            values.push_back(integer());
            skip_space();
        } while (accept(','));
        expect(']');
        return values;
    }

    std::int64_t integer() {
        constexpr std::int64_t max = std::numeric_limits<std::int64_t>::max();
        constexpr std::string_view required = "a non-negative integer below 2^63";
        if (peek() < '0' || peek() > '9') fail(required);
        const std::size_t start = at_;
        std::int64_t value = 0;
        while (peek() >= '0' && peek() <= '9') {
            const int digit = peek() - '0';
            if (value > (max - digit) / 10) fail(required);
            value = value * 10 + digit;
            ++at_;
        }
        if (text_[start] == '0' && at_ - start > 1) fail("an integer without leading zeros");
        if (peek() == '.' || peek() == 'e' || peek() == 'E') fail(required);
        return value;
    }

    std::string string() {
        expect('"');
        std::string out;
        while (true) {
            if (at_ == text_.size()) fail("the closing quote of a string");
            const char c = text_[at_];
            if (static_cast<unsigned char>(c) < 0x20) fail("control characters in strings to be escaped");
            ++at_;
            if (c == '"') return out;
            if (c == '\\')
                escape(out);
            else
                out += c;
        }
    }

    void escape(std::string& out) {
        constexpr std::string_view names = "\"\\/bfnrt";
        constexpr std::string_view values = "\"\\/\b\f\n\r\t";
        if (accept('u')) {
            std::uint32_t code = hex4();
            if (is_low_surrogate(code)) fail("no unpaired surrogate in a string");
            if (is_high_surrogate(code)) {
                if (!accept('\\') || !accept('u')) fail("no unpaired surrogate in a string");
                const std::uint32_t low = hex4();
                if (!is_low_surrogate(low)) fail("no unpaired surrogate in a string");
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            }
            append_utf8(out, code);
            return;
        }
        const std::size_t which = at_ < text_.size() ? names.find(text_[at_]) : std::string_view::npos;
        if (which == std::string_view::npos) fail("an escape that JSON knows");
        out += values[which];
        ++at_;
    }

    std::uint32_t hex4() {
        std::uint32_t code = 0;
        for (int i = 0; i < 4; ++i) {
            const char c = peek();
            const int digit = c >= '0' && c <= '9'   ? c - '0'
                              : c >= 'a' && c <= 'f' ? c - 'a' + 10
                              : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                     : -1;
            if (digit < 0) fail("four hexadecimal digits");
            code = code * 16 + static_cast<std::uint32_t>(digit);
            ++at_;
        }
        return code;
    }

    /// The next character, or NUL (which no rule of the grammar accepts) at the end.
    char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

    bool accept(char c) {
        if (at_ == text_.size() || text_[at_] != c) return false;
        ++at_;
        return true;
    }

    void expect(char c) {
        if (!accept(c)) fail(in_quotes({&c, 1}));
    }

    void skip_space() {
        while (at_ < text_.size() && std::string_view(" \t\n\r").find(text_[at_]) != std::string_view::npos) ++at_;
    }

    [[noreturn]] void fail(std::string_view required) const {
        const std::string received = at_ < text_.size() ? in_quotes(text_.substr(at_, 1)) : "the end of the header";
        throw Error(ErrorKind::malformed_file, file_ + ": header", std::string(required),
                    received + " at byte " + std::to_string(at_));
    }

    [[noreturn]] void fail_name(std::string_view name, std::string_view required,
                                std::string_view received = "another") const {
        throw Error(ErrorKind::malformed_file, file_ + ": header: " + in_quotes(name), required, received);
    }

    std::string_view text_;
    const std::string& file_;
    std::size_t at_ = 0;
};

void append_json_string(std::string& out, std::string_view text) {
    constexpr std::string_view hex = "0123456789abcdef";
    out += '"';
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (byte < 0x20) {
            out += "\\u00";
            out += hex[byte >> 4];
            out += hex[byte & 15];
        } else {
            out += c;
        }
    }
    out += '"';
}

template <class Range>
std::string join(const Range& values, std::string_view separator) {
    std::string out;
    for (const std::int64_t value : values) {
        if (!out.empty()) out += separator;
        out += std::to_string(value);
    }
    return out;
}

}  // namespace

bool is_utf8(std::string_view text) {
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t length = utf8_length(text, at);
        if (length == 0) return false;
        at += length;
    }
    return true;
}

std::string in_quotes(std::string_view text) {
    constexpr std::size_t max_length = 80;
    constexpr std::string_view hex = "0123456789abcdef";
    std::string out = "'";
    for (const char c : text.substr(0, max_length)) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte < 0x20 || byte >= 0x7F) {
            out += "\\x";
            out += hex[byte >> 4];
            out += hex[byte & 15];
        } else {
            out += c;
        }
    }
    out += text.size() > max_length ? "...'" : "'";
    return out;
}

std::string describe(std::string_view dtype_name, std::span<const std::int64_t> shape) {
    constexpr std::size_t max_rank = 8;
    std::string out(dtype_name);
    out += " [" + join(shape.first(std::min(shape.size(), max_rank)), ", ");
    out += shape.size() > max_rank ? ", ...]" : "]";
    return out;
}

SafetensorsHeader parse_header(std::string_view json, const std::string& file) {
    if (!is_utf8(json)) throw Error(ErrorKind::malformed_file, file + ": header", "UTF-8 text", "other bytes");
    return HeaderParser(json, file).parse();
}

std::string format_header(const SafetensorsHeader& header) {
    std::string out = "{";
    if (!header.metadata.empty()) {
        append_json_string(out, metadata_key);
        out += ":{";
        for (const auto& [key, value] : header.metadata) {
            if (out.back() != '{') out += ',';
            append_json_string(out, key);
            out += ':';
            append_json_string(out, value);
        }
        out += '}';
    }
    for (const TensorEntry& entry : header.entries) {
        if (out.size() > 1) out += ',';
        append_json_string(out, entry.name);
        out += ":{\"dtype\":";
        append_json_string(out, entry.dtype_name);
        out += ",\"shape\":[" + join(entry.shape, ",") + "],\"data_offsets\":[" + std::to_string(entry.begin_bytes) +
               "," + std::to_string(entry.end_bytes) + "]}";
    }
    out += '}';
    out.resize((out.size() + 7) / 8 * 8, ' ');
    return out;
}

}  // namespace sparsemla::detail
