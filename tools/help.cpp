#include "tools/help.h"

#include <fmt/format.h>

#include <sstream>

namespace sparsemla::tool {
namespace {

constexpr std::size_t line_width = 100;
constexpr std::size_t name_width = 34;

std::string wrapped(const std::string& text, std::size_t width) {
    std::istringstream words(text);
    std::string result, line;
    for (std::string word; words >> word;) {
        if (!line.empty() && line.size() + 1 + word.size() > width) {
            result += line + "\n";
            line.clear();
        }
        line += (line.empty() ? "" : " ") + word;
    }
    return result + line;
}

}  // namespace

HelpFormatter::HelpFormatter() {
    column_width(name_width);
    label("REQUIRED", "(required)");
}

std::string HelpFormatter::make_option_opts(const CLI::Option* option) const {
    if (option->get_type_size() == 0) return "";
    std::string text = " " + option->get_type_name();
    if (!option->get_default_str().empty()) text += "=" + option->get_default_str();
    if (option->get_required()) text += " " + get_label("REQUIRED");
    return text;
}

std::string HelpFormatter::make_option_desc(const CLI::Option* option) const {
    return wrapped(option->get_description(), line_width - name_width);
}

std::string parse_error_text(const CLI::ParseError& error) {
    const std::string text = error.what();
    const std::string option = text.substr(0, text.find(':'));
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ArgumentMismatch))
        return option + (text.find("missing") != std::string::npos ? ": need a value, got none"
                                                                   : ": need it once, got it more often");
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError)) return text + "; --help lists what is";
    return text;
}

}  // namespace sparsemla::tool
