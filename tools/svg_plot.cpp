#include "tools/svg_plot.h"

#include <algorithm>
#include <cmath>

#include "tools/output.h"
#include "tools/svg.h"

namespace sparsemla::tool {
namespace {

constexpr double row_height = 22, top = 84, bottom = 46, plot_width = 560, right = 110;

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

/// Lines at 1, 2 and 5 times powers of ten; only the powers where those would crowd.
std::string grid(const Axis& axis, double height) {
    std::string drawn;
    const bool few_decades = axis.high - axis.low < 3.5;
    for (int decade = static_cast<int>(std::floor(axis.low)); decade <= std::ceil(axis.high); ++decade)
        for (const double step : {1.0, 2.0, 5.0}) {
            const double seconds = step * std::pow(10.0, decade);
            const double position = std::log10(seconds);
            if (position < axis.low || position > axis.high || (step != 1.0 && !few_decades)) continue;
            drawn += svg::line(axis.at(seconds), top - 6, axis.at(seconds), height - bottom + 4, "#dddddd", 1);
            drawn += svg::text(axis.at(seconds), height - bottom + 20, "middle", "fill=\"#555555\"",
                               svg::tick_label(step, decade));
        }
    return drawn;
}

std::string draw_point(const PlotPoint& point, const Axis& axis, double y, const std::string& colour) {
    std::string drawn;
    if (point.limit_s > 0)
        drawn += svg::line(axis.at(point.limit_s), y - 6, axis.at(point.limit_s), y + 6, "#999999", 2);
    drawn += svg::line(axis.at(point.low_s), y, axis.at(point.high_s), y, colour, 2);
    drawn += svg::circle(axis.at(point.median_s), y, 4.5, colour);
    drawn += svg::text(axis.left + plot_width + 12, y + 4, "start", "", format_seconds(point.median_s));
    return drawn;
}

std::vector<std::string> series_of(const Plot& plot) {
    std::vector<std::string> names;
    for (const PlotPoint& point : plot.points)
        if (std::find(names.begin(), names.end(), point.series) == names.end()) names.push_back(point.series);
    return names;
}

std::string legend(const std::vector<std::string>& series, double left) {
    std::string drawn;
    double x = left;
    for (std::size_t i = 0; i < series.size(); ++i) {
        drawn += svg::circle(x, 62, 4.5, svg::colours[i % svg::colours.size()]);
        drawn += svg::text(x + 10, 66, "start", "", series[i]);
        x += 30 + svg::character_width * static_cast<double>(series[i].size());
    }
    drawn += svg::line(x, 56, x, 68, "#999999", 2);
    return drawn + svg::text(x + 8, 66, "start", "", "machine limit");
}

}  // namespace

std::string to_svg(const Plot& plot) {
    std::size_t longest = 10;
    for (const PlotPoint& point : plot.points) longest = std::max(longest, point.label.size());
    const double left = 24 + svg::character_width * static_cast<double>(longest);
    const double height = top + row_height * static_cast<double>(plot.points.size()) + bottom;
    const Axis axis = axis_for(plot, left);
    const std::vector<std::string> series = series_of(plot);

    std::string drawn = svg::begin(left + plot_width + right, height);
    drawn += svg::text(16, 24, "start", "font-size=\"16\" font-weight=\"bold\"", plot.title);
    drawn += svg::text(16, 42, "start", "fill=\"#555555\"", plot.subtitle);
    drawn += legend(series, 22) + grid(axis, height);
    double y = top + row_height / 2;
    std::string label;
    for (const PlotPoint& point : plot.points) {
        if (point.label != label) drawn += svg::text(axis.left - 10, y + 4, "end", "", point.label);
        label = point.label;
        const auto index =
            static_cast<std::size_t>(std::find(series.begin(), series.end(), point.series) - series.begin());
        drawn += draw_point(point, axis, y, svg::colours[index % svg::colours.size()]);
        y += row_height;
    }
    return drawn + "</svg>\n";
}

}  // namespace sparsemla::tool
