// What the latency suite measured, as a table, a JSON document and a plot.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "harness/latency_suite.h"
#include "tools/baseline.h"
#include "tools/conditions.h"
#include "tools/line_plot.h"
#include "tools/output.h"

namespace sparsemla::tool {

struct LatencyTiming {
    harness::LatencyShape shape;
    std::optional<Plan> plan;
    std::string refusal;   ///< why there is no plan; nothing is timed then
    harness::Spread cold;  ///< microseconds a call, and so is warm
    harness::Spread warm;
};

struct LatencyReport {
    std::string suite = "latency";
    Conditions conditions;
    std::int64_t calls = 0;    ///< of a graph
    std::int64_t repeats = 0;  ///< timed replays
    std::vector<LatencyTiming> timings;
    std::string baseline_path;  ///< "": none
    std::vector<BaselineRow> baseline;
};

/// The least time that the limits allow, and which of them sets it: memory, arithmetic or launch.
struct Floor {
    double us = 0;
    std::string by;
};
Floor floor_of(const harness::ChainShape& shape, const harness::GpuLimits& limits);

std::string text_of(const LatencyReport& report);
Json to_json(const LatencyReport& report);
/// Cold times against rows, a line for each number of heads and list; the baseline's dashed.
LinePlot plot_of(const LatencyReport& report);

}  // namespace sparsemla::tool
