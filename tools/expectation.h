// The answers that a case file carries, as something to compare with.
#pragma once

#include <optional>
#include <string>

#include "harness/oracle.h"
#include "harness/tolerance.h"
#include "sparsemla/case_file.h"

namespace sparsemla::tool {

/// What `expected.out` and `expected.lse` say, in the place of the oracle's own results; nothing for a file without.
/// A file with only one of the two keeps the oracle's other.
std::optional<harness::Oracle> expectation_of(const harness::Oracle& oracle, const Case& file);

/// What a kernel of `accuracy` may differ from the file by: the kernel's own losses and the file's, which is granted
/// FP32 arithmetic and one rounding to its dtype.
harness::Accuracy against_file(harness::Accuracy accuracy, const harness::Oracle& oracle, const Case& file);

/// Empty, or the first element where unpacking differs from `expected.dequantised` by more than one FP32 rounding.
/// Nothing if the file has no such tensor.
std::optional<std::string> check_dequantised(const Case& file, const CaseStep& step);

}  // namespace sparsemla::tool
