// From a case file to results: load, convert, plan, buffers, decode.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "harness/gpu_step.h"
#include "sparsemla/case_file.h"
#include "sparsemla/decode.h"

namespace sparsemla::tool {

/// A case with its slots, converted from token ids where it has those, and the step it poses.
struct LoadedStep {
    Case file;
    CaseStep step;
    std::optional<ConvertArgs> indices{};  ///< where the slots come from token ids
};
LoadedStep load_step(const std::string& path);
LoadedStep step_of(Case file);

/// The problem that the step poses; from_ids: decode converts the token ids. Throws Error where the case has none.
Problem problem_of(const LoadedStep& loaded, bool from_ids);

/// Active columns of each row, over all sources: those before the count whose slot the cache holds.
std::vector<std::int64_t> active_columns(const CaseStep& step);
/// Bytes of the records that a call must read at least once: active columns times their record's bytes.
std::int64_t record_bytes_read(const CaseStep& step);

/// "8 rows x 16 heads, fp8 (576 bytes) x 2,048 columns + fp8 (512 bytes) x 128 columns, sinks"
std::string describe(const Problem& problem);

/// The buffers of one step under one plan, on the plan's device. Outputs start as NaN, so that what a kernel leaves
/// unwritten shows.
class Runner {
   public:
    /// The step must outlive the runner. The plan is of its problem, or of the same one from token ids.
    Runner(const LoadedStep& loaded, Plan plan);

    /// One decode. Returns the seconds it took: on a GPU, between two events around it on its stream.
    double run();

    const Plan& plan() const { return plan_; }
    const OwnedTensor& out() const { return out_; }
    const OwnedTensor& lse() const { return lse_; }

   private:
    Plan plan_;
    OwnedTensor out_;
    OwnedTensor lse_;
    OwnedTensor workspace_;
    OwnedTensor state_;
    DecodeArgs args_;                        ///< in host memory
    std::unique_ptr<harness::GpuStep> gpu_;  ///< their mirror, for a GPU
};

}  // namespace sparsemla::tool
