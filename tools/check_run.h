// One case through every kernel and P format, against float64 and against the answers in the file.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "harness/tolerance.h"
#include "tools/flags.h"
#include "tools/output.h"

namespace sparsemla::tool {

struct CheckFlags {
    RunFlags run;
    bool rms = false;  ///< the RMS rule too
};

/// One kernel with one P format.
struct CheckedRun {
    std::string device;
    std::string kernel;
    std::string p_format;
    std::string schedule;
    double seconds = 0;
    harness::Verdict oracle;
    std::optional<harness::Verdict> file;  ///< against expected.*

    bool pass() const { return oracle.pass && (!file || file->pass); }
};

struct CheckedCase {
    std::string path;
    Status status = Status::bad_input;
    std::string error;  ///< why the case could not be checked; the rest is then empty
    std::string step;
    std::int64_t active_columns = 0;
    std::vector<std::string> notes;
    std::vector<CheckedRun> runs;
    std::vector<Refusal> declined;
    std::optional<harness::Verdict> file;    ///< expected.* against float64
    std::optional<std::string> dequantised;  ///< "" or what is wrong with expected.dequantised
    std::optional<harness::Verdict> peer;  ///< peer.out against float64, in units of the p_e4m3 bound: never a failure
};

/// Throws Error for a file that is no case, or a case that no kernel takes.
CheckedCase check_case(const std::string& path, const CheckFlags& flags, Progress& progress);

}  // namespace sparsemla::tool
