// Tables for people: columns as wide as their widest cell, numbers to the right.
#pragma once

#include <string>
#include <vector>

namespace sparsemla::tool {

enum class Align { left, right };

class Table {
   public:
    struct Column {
        std::string title;
        Align align = Align::right;
    };

    explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

    void add_row(std::vector<std::string> cells);
    /// Free text below the row added last, outside the columns.
    void add_note(std::string text);
    bool empty() const { return rows_.empty(); }

    /// Title line and rows, every line indented and ended by a newline. Columns without a single cell are left out.
    std::string text(int indent = 2) const;

   private:
    struct Row {
        std::vector<std::string> cells;
        std::vector<std::string> notes;
    };
    std::vector<std::size_t> widths() const;

    std::vector<Column> columns_;
    std::vector<Row> rows_;
};

/// Lines of "name   value" with the values aligned.
class Facts {
   public:
    void add(std::string name, std::string value) { lines_.emplace_back(std::move(name), std::move(value)); }
    std::string text(int indent = 2) const;

   private:
    std::vector<std::pair<std::string, std::string>> lines_;
};

}  // namespace sparsemla::tool
