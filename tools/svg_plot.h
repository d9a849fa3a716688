// A dot plot as SVG: one line per measurement, median with its spread on a logarithmic axis of time.
#pragma once

#include <string>
#include <vector>

namespace sparsemla::tool {

struct PlotPoint {
    std::string label;                           ///< left of the line
    std::string series;                          ///< what the colour stands for
    double low_s = 0, median_s = 0, high_s = 0;  ///< positive
    double limit_s = 0;                          ///< the least time the machine's limits allow; 0: unknown
};

struct Plot {
    std::string title;
    std::string subtitle;
    std::vector<PlotPoint> points;
};

std::string to_svg(const Plot& plot);

}  // namespace sparsemla::tool
