#include "tools/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/output.h"

namespace sparsemla::tool::svg {
namespace {

std::string escaped(const std::string& text) {
    std::string result;
    for (const char c : printable(text)) {
        if (c == '<')
            result += "&lt;";
        else if (c == '>')
            result += "&gt;";
        else if (c == '&')
            result += "&amp;";
        else
            result += c;
    }
    return result;
}

}  // namespace

std::string begin(double width, double height) {
    return fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
        "{1:.0f}\" "
        "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
        width, height);
}

std::string text(double x, double y, const char* anchor, const char* style, const std::string& content) {
    return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" {}>{}</text>\n", x, y, anchor, style,
                       escaped(content));
}

std::string line(double x1, double y1, double x2, double y2, const std::string& colour, double width, bool dashed) {
    return fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"{:.1f}\"{}/>\n", x1,
        y1, x2, y2, colour, width, dashed ? " stroke-dasharray=\"5 4\"" : "");
}

std::string circle(double x, double y, double radius, const std::string& colour) {
    return fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\" fill=\"{}\"/>\n", x, y, radius, colour);
}

std::string tick_label(double step, int decade) {
    constexpr std::array<const char*, 4> units = {"ns", "us", "ms", "s"};
    const int thousands = std::clamp((decade + 9) / 3, 0, 3);
    return fmt::format("{:g} {}", step * std::pow(10.0, decade + 9 - 3 * thousands),
                       units[static_cast<std::size_t>(thousands)]);
}

}  // namespace sparsemla::tool::svg
