#include "tools/svg_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "tools/output.h"

namespace sparsemla::tool {
namespace {

constexpr double row_height = 22, top = 84, bottom = 46, plot_width = 560, right = 110, character_width = 7.4;

/// Distinguishable with the common colour deficiencies too.
constexpr std::array<const char*, 7> colours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                                "#e69f00", "#56b4e9", "#555555"};

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

/// Maps seconds to horizontal positions.
struct Axis {
    double left = 0;
    double low = 0, high = 1;  ///< log10 of seconds

    double at(double seconds) const { return left + (std::log10(seconds) - low) / (high - low) * plot_width; }
};

Axis axis_for(const Plot& plot, double left) {
    double least = 1e300, most = 0;
    for (const PlotPoint& point : plot.points) {
        least = std::min(least, point.limit_s > 0 ? std::min(point.low_s, point.limit_s) : point.low_s);
        most = std::max(most, point.high_s);
    }
    if (plot.points.empty()) return {left, -6, -3};
    // A twentieth of a decade of air on both sides.
    return {left, std::log10(least) - 0.05, std::max(std::log10(most), std::log10(least) + 0.1) + 0.05};
}

std::string text_at(double x, double y, const char* anchor, const char* style, const std::string& text) {
    return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" {}>{}</text>\n", x, y, anchor, style,
                       escaped(text));
}

std::string line_between(double x1, double y1, double x2, double y2, const std::string& colour, double width) {
    return fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"{:.1f}\"/>\n", x1,
        y1, x2, y2, colour, width);
}

/// "20 us": step * 10^decade seconds.
std::string tick_label(double step, int decade) {
    constexpr std::array<const char*, 4> units = {"ns", "us", "ms", "s"};
    const int thousands = std::clamp((decade + 9) / 3, 0, 3);
    return fmt::format("{:g} {}", step * std::pow(10.0, decade + 9 - 3 * thousands),
                       units[static_cast<std::size_t>(thousands)]);
}

/// Lines at 1, 2 and 5 times powers of ten; only the powers where those would crowd.
std::string grid(const Axis& axis, double height) {
    std::string svg;
    const bool few_decades = axis.high - axis.low < 3.5;
    for (int decade = static_cast<int>(std::floor(axis.low)); decade <= std::ceil(axis.high); ++decade)
        for (const double step : {1.0, 2.0, 5.0}) {
            const double seconds = step * std::pow(10.0, decade);
            const double position = std::log10(seconds);
            if (position < axis.low || position > axis.high || (step != 1.0 && !few_decades)) continue;
            svg += line_between(axis.at(seconds), top - 6, axis.at(seconds), height - bottom + 4, "#dddddd", 1);
            svg +=
                text_at(axis.at(seconds), height - bottom + 20, "middle", "fill=\"#555555\"", tick_label(step, decade));
        }
    return svg;
}

std::string draw_point(const PlotPoint& point, const Axis& axis, double y, const std::string& colour) {
    std::string svg;
    if (point.limit_s > 0)
        svg += line_between(axis.at(point.limit_s), y - 6, axis.at(point.limit_s), y + 6, "#999999", 2);
    svg += line_between(axis.at(point.low_s), y, axis.at(point.high_s), y, colour, 2);
    svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4.5\" fill=\"{}\"/>\n", axis.at(point.median_s), y,
                       colour);
    svg += text_at(axis.left + plot_width + 12, y + 4, "start", "", format_seconds(point.median_s));
    return svg;
}

std::vector<std::string> series_of(const Plot& plot) {
    std::vector<std::string> names;
    for (const PlotPoint& point : plot.points)
        if (std::find(names.begin(), names.end(), point.series) == names.end()) names.push_back(point.series);
    return names;
}

std::string legend(const std::vector<std::string>& series, double left) {
    std::string svg;
    double x = left;
    for (std::size_t i = 0; i < series.size(); ++i) {
        svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"62\" r=\"4.5\" fill=\"{}\"/>\n", x, colours[i % colours.size()]);
        svg += text_at(x + 10, 66, "start", "", series[i]);
        x += 30 + character_width * static_cast<double>(series[i].size());
    }
    svg += line_between(x, 56, x, 68, "#999999", 2);
    return svg + text_at(x + 8, 66, "start", "", "machine limit");
}

}  // namespace

std::string to_svg(const Plot& plot) {
    std::size_t longest = 10;
    for (const PlotPoint& point : plot.points) longest = std::max(longest, point.label.size());
    const double left = 24 + character_width * static_cast<double>(longest);
    const double height = top + row_height * static_cast<double>(plot.points.size()) + bottom;
    const Axis axis = axis_for(plot, left);
    const std::vector<std::string> series = series_of(plot);

    std::string svg = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
        "{1:.0f}\" "
        "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
        left + plot_width + right, height);
    svg += text_at(16, 24, "start", "font-size=\"16\" font-weight=\"bold\"", plot.title);
    svg += text_at(16, 42, "start", "fill=\"#555555\"", plot.subtitle);
    svg += legend(series, 22) + grid(axis, height);
    double y = top + row_height / 2;
    std::string label;
    for (const PlotPoint& point : plot.points) {
        if (point.label != label) svg += text_at(axis.left - 10, y + 4, "end", "", point.label);
        label = point.label;
        const auto index =
            static_cast<std::size_t>(std::find(series.begin(), series.end(), point.series) - series.begin());
        svg += draw_point(point, axis, y, colours[index % colours.size()]);
        y += row_height;
    }
    return svg + "</svg>\n";
}

}  // namespace sparsemla::tool
