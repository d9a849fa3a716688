#include "tools/verdict.h"

#include <fmt/format.h>

namespace sparsemla::tool {

std::string place(const harness::Verdict& verdict) {
    return fmt::format("{},{},{}", verdict.row, verdict.head, verdict.dim);
}

std::string verdict_word(bool pass) { return pass ? "PASS" : "FAIL"; }

Json verdict_json(const harness::Verdict& verdict) {
    return {{"pass", verdict.pass},
            {"worst_ratio", json_number(verdict.worst_ratio)},
            {"worst",
             {{"row", verdict.row},
              {"head", verdict.head},
              {"dim", verdict.dim},
              {"got", json_number(verdict.got)},
              {"expected", json_number(verdict.expected)},
              {"bound", json_number(verdict.bound)}}},
            {"rms", json_number(verdict.rms)},
            {"rms_ratio", json_number(verdict.worst_rms_ratio)},
            {"lse_error", json_number(verdict.lse_error)},
            {"lse_ratio", json_number(verdict.lse_ratio)},
            {"problem", verdict.problem}};
}

Json verdict_json(const std::optional<harness::Verdict>& verdict) { return verdict ? verdict_json(*verdict) : Json(); }

}  // namespace sparsemla::tool
