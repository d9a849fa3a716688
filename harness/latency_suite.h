// The decode steps whose latency on a GPU is measured: what users run at small batches, the same from token ids, large
// batches for comparison,
// and the neighbourhood of every boundary of the plan's choices.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness/decode_timer.h"

namespace sparsemla::harness {

struct LatencyShape {
    std::string name;  ///< "goal/fp8_576/h96/r5/256of2048": group / records / heads / rows / active columns of width
    ChainShape shape;
    double goal_us = 0;     ///< what the project wants, cold; 0: nothing stated
    double gb300_us = 0;    ///< what another kernel takes on a GB300 (the seeds' figure); 0: unknown
    std::string series;     ///< shapes of a series differ in one number only; "": of none
    std::int64_t step = 0;  ///< that number
};

/// "fp8_576/h16/r8/2048", "fp8_512+fp8_512/h16/r6/128+512/sinks".
std::string label(const ChainShape& shape);

/// Waves of clusters in which a plan's full rows run; 0 for a plan without a tiling.
std::int64_t waves(const Plan& plan);

/// Records that a baseline has, with BF16 queries and its sizes, flat fp8 beside them, and the goals of other records.
std::vector<LatencyShape> records_suite();

/// The series over rows goes around the boundaries of the plans that the device gets with these options.
std::vector<LatencyShape> latency_suite(const DeviceSpec& device, const PlanOptions& options);

/// Two steps of a series, one apart.
struct CliffPair {
    std::size_t before = 0;  ///< index of step n
    std::size_t after = 0;   ///< of step n + 1
};
std::vector<CliffPair> cliff_pairs(const std::vector<LatencyShape>& shapes);

/// No cliff: t(n) <= 1.05 t(n + 1), and t(n + 1) <= 1.25 t(n).
inline constexpr double largest_fall = 1.05;
inline constexpr double largest_rise = 1.25;

}  // namespace sparsemla::harness
