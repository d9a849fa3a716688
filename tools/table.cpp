#include "tools/table.h"

#include <algorithm>
#include <utility>

namespace sparsemla::tool {
namespace {

/// Characters on the screen, for UTF-8 text without double-width characters.
std::size_t display_width(const std::string& text) {
    return static_cast<std::size_t>(
        std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

void end_line(std::string& text) {
    text.erase(text.find_last_not_of(' ') + 1);
    text += '\n';
}

}  // namespace

void Table::add_row(std::vector<std::string> cells) {
    cells.resize(columns_.size());
    rows_.push_back({std::move(cells), {}});
}

void Table::add_note(std::string text) { rows_.back().notes.push_back(std::move(text)); }

std::vector<std::size_t> Table::widths() const {
    std::vector<std::size_t> result(columns_.size(), 0);
    for (const Row& row : rows_)
        for (std::size_t c = 0; c < columns_.size(); ++c) result[c] = std::max(result[c], display_width(row.cells[c]));
    for (std::size_t c = 0; c < columns_.size(); ++c)
        if (result[c] > 0) result[c] = std::max(result[c], display_width(columns_[c].title));
    return result;
}

std::string Table::text(int indent) const {
    const std::vector<std::size_t> width = widths();
    const std::string margin(static_cast<std::size_t>(indent), ' ');
    std::string result;
    const auto add_line = [&](auto&& cell_of) {
        std::string line = margin;
        for (std::size_t c = 0; c < columns_.size(); ++c) {
            if (width[c] == 0) continue;
            const std::string& cell = cell_of(c);
            const std::string fill(width[c] - display_width(cell), ' ');
            line += columns_[c].align == Align::left ? cell + fill : fill + cell;
            line += "  ";
        }
        end_line(line);
        result += line;
    };
    add_line([&](std::size_t c) -> const std::string& { return columns_[c].title; });
    for (const Row& row : rows_) {
        add_line([&](std::size_t c) -> const std::string& { return row.cells[c]; });
        for (const std::string& note : row.notes) result += margin + "    " + note + "\n";
    }
    return result;
}

std::string Facts::text(int indent) const {
    std::size_t width = 0;
    for (const auto& [name, value] : lines_) width = std::max(width, display_width(name));
    std::string result;
    for (const auto& [name, value] : lines_) {
        std::string line(static_cast<std::size_t>(indent), ' ');
        line += name + std::string(width - display_width(name) + 3, ' ') + value;
        end_line(line);
        result += line;
    }
    return result;
}

}  // namespace sparsemla::tool
