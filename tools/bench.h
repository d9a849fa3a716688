// bench's options, and what it does with them on a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "harness/decode_timer.h"
#include "tools/flags.h"

namespace sparsemla::tool {

/// Suites that need a GPU: decode as it runs in a model.
inline constexpr const char* latency_suite = "latency";
inline constexpr const char* records_suite = "records";
inline constexpr const char* dcp_suite = "dcp";  ///< exchanges of ranks in lockstep

struct BenchFlags {
    std::string suite = "speed";
    std::string filter;
    RunFlags run;
    std::int64_t repeat = 0;  ///< 0: the suite's own number
    bool json = false;
    std::string json_path;  ///< with `json`; "": stdout
    bool csv = false;
    std::string plot;
    // Suites latency and records.
    std::int64_t calls = 64;
    std::string baseline;
    // --sweep.
    bool sweep = false;
    double minutes = 6;
    std::int64_t layouts = 8;  ///< of a point
    std::string resume;
    std::string table;
};

/// --suite latency or records on a GPU.
Status run_latency_suite(const BenchFlags& flags, const DeviceSpec& gpu, const harness::TimerSizes& sizes = {});

/// --suite dcp on a GPU.
Status run_dcp_suite(const BenchFlags& flags, const DeviceSpec& gpu, const harness::TimerSizes& sizes = {});

/// --sweep on a GPU.
Status run_sweep(const BenchFlags& flags, const DeviceSpec& gpu, const harness::TimerSizes& sizes = {});

}  // namespace sparsemla::tool
