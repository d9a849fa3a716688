// A line plot as SVG: microseconds against a count, both on logarithmic axes.
#pragma once

#include <string>
#include <vector>

namespace sparsemla::tool {

struct LinePoint {
    double x = 0;                             ///< positive
    double low_s = 0, mid_s = 0, high_s = 0;  ///< positive
};

struct Line {
    std::string name;
    std::vector<LinePoint> points;  ///< ascending by x
    bool dashed = false;
};

struct LinePlot {
    std::string title;
    std::string subtitle;
    std::string x_label;
    std::vector<Line> lines;  ///< a dashed line has the colour of the one before it
};

std::string to_svg(const LinePlot& plot);

}  // namespace sparsemla::tool
