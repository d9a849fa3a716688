// How the tool shows a comparison with the oracle or with a file's answers.
#pragma once

#include <optional>
#include <string>

#include "harness/tolerance.h"
#include "tools/output.h"

namespace sparsemla::tool {

/// "row,head,dim" of the worst element.
std::string place(const harness::Verdict& verdict);
std::string verdict_word(bool pass);  ///< "PASS", "FAIL"

Json verdict_json(const harness::Verdict& verdict);
Json verdict_json(const std::optional<harness::Verdict>& verdict);  ///< null for none

}  // namespace sparsemla::tool
