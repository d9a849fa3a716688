// Case files: one decode step in one safetensors file, with everything needed to run it and optionally the answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sparsemla/decode.h"
#include "sparsemla/indices.h"

namespace sparsemla {

/// A dense tensor that owns its bytes (64-byte aligned). `dtype_name` is safetensors' ("F8_E4M3", "I32", ...).
struct OwnedTensor {
    std::string dtype_name;
    std::vector<std::int64_t> shape;
    std::shared_ptr<std::byte[]> bytes;
    std::size_t size_bytes = 0;

    /// A view of a dtype that the library knows, rank <= 4. Throws Error otherwise.
    Tensor view() const;
};

/// A zeroed owned tensor. Throws Error (invalid_argument) for a negative extent or a size that overflows.
OwnedTensor make_owned(DType dtype, std::vector<std::int64_t> shape);

/// The content of a case file, unknown tensors and metadata included, so that saving a loaded case loses nothing.
struct Case {
    std::map<std::string, OwnedTensor> tensors;
    std::map<std::string, std::string> metadata;
    std::vector<std::string> notes;  ///< what a load kept but ignored, one sentence each
    std::string path;

    const OwnedTensor* find(std::string_view tensor) const;
};

/// Reads and checks a file: structure, and the shapes and dtypes of all known tensors against each other and the
/// metadata. Throws one Error (malformed_file or io) naming the file and what is wrong. Never allocates more than the
/// file's size justifies.
Case load_case(const std::string& path);

/// Checks as load_case does, for a case built in memory.
void validate(const Case& c);

/// Writes the file whole or not at all: a temporary beside `path`, flushed, then renamed. Throws Error (io).
void save_case(const Case& c, const std::string& path);

/// One source of a step: its cache, list, counts and factor.
struct CaseSource {
    CacheView cache;
    ConstTensor slots;
    ConstTensor counts;
    std::int64_t count_offset = 0;
    float k_scale = 1.0F;
};

/// A case as the library's own arguments; views into the Case, which must outlive it.
struct CaseStep {
    std::vector<CaseSource> sources;  ///< a single list with `first_width` is cut in two here
    ConstTensor query;
    ConstTensor sinks;
    float softmax_scale = 1.0F;
    float q_scale = 1.0F;
    float out_scale = 1.0F;
    LseBase lse_base = LseBase::natural;
    std::int64_t rows = 0;
    std::int64_t heads = 0;

    /// Problem with this step's rows as capacity, lse on, bf16 out.
    Problem problem(Device device = {}) const;
    /// Arguments but for outputs and memory.
    DecodeArgs args() const;
};

/// A case whose indices are token ids: what convert_indices needs but for its outputs.
std::optional<ConvertArgs> case_indices(const Case& c);

/// The step of a case. A case that has `token_ids` instead of `slots` must be converted first: `convert_case`.
CaseStep case_step(const Case& c);

/// Adds `slots` and `counts` to a case that has `token_ids`; no-op for one that has `slots`.
void convert_case(Case& c);

}  // namespace sparsemla
