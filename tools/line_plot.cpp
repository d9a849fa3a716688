#include "tools/line_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/svg.h"

namespace sparsemla::tool {
namespace {

constexpr double left = 78, top = 66, plot_width = 560, plot_height = 380, bottom = 58;

/// A logarithmic axis from one position on the page to another.
struct LogAxis {
    double low = 1, high = 10;  ///< values at `begin` and `end`
    double begin = 0, end = 1;

    double at(double value) const {
        return begin + (end - begin) * (std::log(value) - std::log(low)) / (std::log(high) - std::log(low));
    }
};

struct Axes {
    LogAxis x, y;
};

/// With a tenth of air on every side.
Axes axes_for(const LinePlot& plot) {
    double least_x = 1e300, most_x = 0, least_y = 1e300, most_y = 0;
    for (const Line& line : plot.lines)
        for (const LinePoint& point : line.points) {
            least_x = std::min(least_x, point.x);
            most_x = std::max(most_x, point.x);
            least_y = std::min(least_y, point.low_s);
            most_y = std::max(most_y, point.high_s);
        }
    if (most_x == 0) least_x = most_x = 1, least_y = most_y = 1e-6;
    return {.x = {.low = least_x / 1.1, .high = most_x * 1.1, .begin = left, .end = left + plot_width},
            .y = {.low = least_y / 1.1, .high = most_y * 1.1, .begin = top + plot_height, .end = top}};
}

/// Powers of two below, powers of ten and their 2 and 5 times at the side.
std::string grid(const Axes& axes) {
    const char* grey = "#dddddd";
    const char* style = "fill=\"#555555\"";
    std::string drawn;
    for (double x = std::exp2(std::ceil(std::log2(axes.x.low))); x <= axes.x.high; x *= 2) {
        drawn += svg::line(axes.x.at(x), top, axes.x.at(x), top + plot_height, grey, 1);
        drawn += svg::text(axes.x.at(x), top + plot_height + 18, "middle", style, fmt::format("{:g}", x));
    }
    for (int decade = static_cast<int>(std::floor(std::log10(axes.y.low))); decade <= 0; ++decade)
        for (const double step : {1.0, 2.0, 5.0}) {
            const double seconds = step * std::pow(10.0, decade);
            if (seconds < axes.y.low || seconds > axes.y.high) continue;
            drawn += svg::line(left, axes.y.at(seconds), left + plot_width, axes.y.at(seconds), grey, 1);
            drawn += svg::text(left - 8, axes.y.at(seconds) + 4, "end", style, svg::tick_label(step, decade));
        }
    return drawn;
}

std::string draw_line(const Line& line, const Axes& axes, const std::string& colour) {
    std::string drawn;
    for (std::size_t i = 0; i < line.points.size(); ++i) {
        const LinePoint& point = line.points[i];
        const double x = axes.x.at(point.x);
        if (i > 0)
            drawn += svg::line(axes.x.at(line.points[i - 1].x), axes.y.at(line.points[i - 1].mid_s), x,
                               axes.y.at(point.mid_s), colour, 1.6, line.dashed);
        drawn += svg::line(x, axes.y.at(point.low_s), x, axes.y.at(point.high_s), colour, 2);
        drawn += svg::circle(x, axes.y.at(point.mid_s), line.dashed ? 2 : 3.5, colour);
    }
    return drawn;
}

}  // namespace

std::string to_svg(const LinePlot& plot) {
    std::size_t longest = 0;
    for (const Line& line : plot.lines) longest = std::max(longest, line.name.size());
    const double legend_x = left + plot_width + 20;
    const double width = legend_x + 30 + svg::character_width * static_cast<double>(longest);
    const double height = std::max(top + plot_height + bottom, top + 20 * static_cast<double>(plot.lines.size()) + 20);
    const Axes axes = axes_for(plot);
    std::string drawn = svg::begin(width, height);
    drawn += svg::text(16, 24, "start", "font-size=\"16\" font-weight=\"bold\"", plot.title);
    drawn += svg::text(16, 44, "start", "fill=\"#555555\"", plot.subtitle);
    drawn += grid(axes);
    drawn += svg::text(left + plot_width / 2, top + plot_height + 42, "middle", "", plot.x_label);
    std::size_t colour = svg::colours.size() - 1;
    double y = top + 6;
    for (const Line& line : plot.lines) {
        if (!line.dashed) colour = (colour + 1) % svg::colours.size();
        drawn += draw_line(line, axes, svg::colours[colour]);
        drawn += svg::line(legend_x, y, legend_x + 20, y, svg::colours[colour], 2, line.dashed);
        drawn += svg::text(legend_x + 26, y + 4, "start", "", line.name);
        y += 20;
    }
    return drawn + "</svg>\n";
}

}  // namespace sparsemla::tool
