// What dcp found, for people and for programs.
#pragma once

#include <string>

#include "tools/dcp_run.h"

namespace sparsemla::tool {

std::string text_of(const DcpReport& report, const DcpFlags& flags);
Json to_json(const DcpReport& report, const DcpFlags& flags);

}  // namespace sparsemla::tool
