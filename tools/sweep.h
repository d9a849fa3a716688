// The sweep over problems and layouts that the plan's table of measured layouts is made from: which points, which
// layouts of each, the log of what was measured, and the table as text.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "harness/decode_timer.h"
#include "sparsemla/decode.h"

namespace sparsemla::tool {

/// A problem with full lists, as the table knows it.
struct SweepPoint {
    Record record = Record::fp8_576;
    std::int64_t sources = 1;
    std::int64_t rows = 1;
    std::int64_t heads = 16;
    std::int64_t chunks = 1;  ///< over all sources

    harness::ChainShape shape() const;
    std::string text() const;  ///< "fp8 (576 bytes) x 1, 4 rows, 16 heads, 8 chunks"
};

/// All points, small batches first.
std::vector<SweepPoint> sweep_points();

/// Plans of the point with the layouts that the kernel takes, in order of the time that the planner expects, at most
/// `limit`. Of those with equal splits and heads of a CTA: the two best guesses at stages, and records shared by
/// tiles of heads. `options` fixes what it names.
std::vector<Plan> sweep_plans(const SweepPoint& point, const DeviceSpec& device, const PlanOptions& options,
                              std::size_t limit);

/// A row of the table, or one that lost.
struct SweepResult {
    std::string gpu;
    std::string record;  ///< of the first source: "fp8_576"
    std::int64_t sources = 0;
    std::int64_t rows = 0;
    std::int64_t heads = 0;
    std::int64_t chunks = 0;  ///< of 64 columns
    std::int64_t splits = 0;
    std::int64_t tile_heads = 0;
    std::int64_t stages = 0;
    std::int64_t cluster_tiles = 1;
    std::string gather;
    double us = 0;

    std::string layout_key() const;  ///< all but the time
};
SweepResult result_of(const SweepPoint& point, const Plan& plan, double us);

/// Results on disk, a JSON object in each line. A line is written as soon as it is measured; one that a killed run left
/// unfinished at the end is dropped.
class SweepLog {
   public:
    /// `path` may be empty: nothing is read or written. A file that is not there is begun. Throws Error (io,
    /// malformed_file).
    explicit SweepLog(std::string path);

    const std::vector<SweepResult>& results() const { return results_; }
    bool holds(const SweepResult& layout) const { return keys_.count(layout.layout_key()) != 0; }
    void add(const SweepResult& result);

   private:
    void keep(const SweepResult& result);

    std::string path_;
    std::vector<SweepResult> results_;
    std::set<std::string> keys_;
};

/// src/tuning_table.inc: the fastest layout of every point.
std::string tuning_table_text(const std::vector<SweepResult>& results);

}  // namespace sparsemla::tool
