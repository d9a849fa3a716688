#include "tools/baseline.h"

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <sstream>

#include "tools/flags.h"

namespace sparsemla::tool {
namespace {

constexpr std::array<const char*, 7> column_names = {"fmt", "heads", "rows", "slots", "extra", "cold_us", "warm_us"};

std::vector<std::string> cells_of(const std::string& line) {
    std::vector<std::string> cells;
    std::istringstream stream(line);
    for (std::string cell; std::getline(stream, cell, '\t');) cells.push_back(cell);
    return cells;
}

/// One line with its place, for messages.
struct Line {
    const std::string& path;
    std::size_t number;
    std::vector<std::string> cells;

    [[noreturn]] void fail(const std::string& required, const std::string& received) const {
        throw Error(ErrorKind::malformed_file, fmt::format("{}, line {}", path, number), required, received);
    }
    template <class Number>
    Number value(std::size_t column, const char* name) const {
        const std::string text = column < cells.size() ? cells[column] : "";
        Number result{};
        const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), result);
        if (error != std::errc() || rest != text.data() + text.size() || result < 0)
            fail(fmt::format("a number of 0 or more for {}", name), in_quotes(text));
        return result;
    }
};

/// Where each of column_names stands.
std::array<std::size_t, column_names.size()> places_of(const Line& header) {
    std::array<std::size_t, column_names.size()> places{};
    for (std::size_t i = 0; i < column_names.size(); ++i) {
        std::size_t at = 0;
        while (at < header.cells.size() && header.cells[at] != column_names[i]) ++at;
        if (at == header.cells.size())
            header.fail(fmt::format("the tab-separated columns {}", fmt::join(column_names, ", ")),
                        fmt::format("none named {}", column_names[i]));
        places[i] = at;
    }
    return places;
}

bool is_one_of(Record record, Record flat, Record own) { return record == flat || record == own; }

BaselineRow row_of(const Line& line, const std::array<std::size_t, column_names.size()>& places) {
    const auto integer = [&](std::size_t i) { return line.value<std::int64_t>(places[i], column_names[i]); };
    if (places[0] >= line.cells.size()) line.fail("a word for fmt", "nothing");
    return {.fmt = line.cells[places[0]],
            .heads = integer(1),
            .rows = integer(2),
            .slots = integer(3),
            .extra = integer(4),
            .cold_us = line.value<double>(places[5], column_names[5]),
            .warm_us = line.value<double>(places[6], column_names[6])};
}

}  // namespace

std::vector<BaselineRow> read_baseline(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw Error(ErrorKind::io, path, "a file that can be read", std::strerror(errno));
    std::vector<BaselineRow> rows;
    std::optional<std::array<std::size_t, column_names.size()>> places;
    std::size_t number = 0;
    for (std::string text; std::getline(file, text);) {
        ++number;
        if (text.empty() || text.front() == '#') continue;
        const Line line{path, number, cells_of(text)};
        if (places)
            rows.push_back(row_of(line, *places));
        else
            places = places_of(line);
    }
    if (!places) throw Error(ErrorKind::malformed_file, path, "a line of column names", "no line");
    return rows;
}

bool same_lists(const BaselineRow& row, const harness::ChainShape& shape) {
    if (row.heads != shape.heads || shape.sources.front().active != row.slots) return false;
    if (!shape.sources.front().counts.empty()) return false;  // its rows are alike
    if (shape.sources.size() == 1)
        return row.fmt == "v32" && is_one_of(shape.sources.front().record, Record::fp8_576, Record::fp8_ds_mla) &&
               row.extra == 0;
    return row.fmt == "model1" && is_one_of(shape.sources.front().record, Record::fp8_512, Record::fp8_v4) &&
           shape.sources.back().active == row.extra;
}

std::optional<BaselineRow> find_baseline(const std::vector<BaselineRow>& rows, const harness::ChainShape& shape) {
    for (const BaselineRow& row : rows)
        if (row.rows == shape.rows && same_lists(row, shape)) return row;
    return std::nullopt;
}

}  // namespace sparsemla::tool
