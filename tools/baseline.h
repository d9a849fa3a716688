// What another library takes for the same steps: a table of times, tab-separated.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "harness/decode_timer.h"

namespace sparsemla::tool {

/// Lines that begin with # are comments; the first other line names the columns, these among them in any order.
struct BaselineRow {
    std::string fmt;  ///< "v32": fp8_ds_mla, also beside flat fp8 of 576 bytes; "model1": a window and a compressed
                      ///< cache of fp8_v4, also beside fp8 of 512
    std::int64_t heads = 0;
    std::int64_t rows = 0;
    std::int64_t slots = 0;  ///< active ones of each row; model1: of the window
    std::int64_t extra = 0;  ///< model1: of the compressed cache
    double cold_us = 0;
    double warm_us = 0;
};

/// Throws Error (io, malformed_file).
std::vector<BaselineRow> read_baseline(const std::string& path);

/// The row's kind of step and active columns, at any number of rows.
bool same_lists(const BaselineRow& row, const harness::ChainShape& shape);
/// The row of exactly this step.
std::optional<BaselineRow> find_baseline(const std::vector<BaselineRow>& rows, const harness::ChainShape& shape);

}  // namespace sparsemla::tool
