// Argument checks shared by all verbs: shapes, dtypes, devices, strides, alignment and overlap of memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "few.h"
#include "sparsemla/records.h"
#include "sparsemla/tensor.h"

namespace sparsemla::detail {

/// What a dimension must be. `what` names it in messages ("rows").
struct Extent {
    enum class Kind : std::uint8_t { any, exactly, at_least };
    Kind kind = Kind::any;
    std::int64_t value = 0;
    std::string_view what;

    static constexpr Extent any(std::string_view what) { return {Kind::any, 0, what}; }
    static constexpr Extent exactly(std::int64_t value, std::string_view what = "") {
        return {Kind::exactly, value, what};
    }
    static constexpr Extent at_least(std::int64_t value, std::string_view what = "") {
        return {Kind::at_least, value, what};
    }
    bool accepts(std::int64_t extent) const;
};

struct TensorRule {
    std::string_view argument;
    Few<DType, 4> dtypes;
    Few<Extent, 4> shape;
    Device device{};
    bool dense_last = true;            ///< stride 1 in the last dimension
    std::int64_t alignment_bytes = 0;  ///< of the base and of every other stride; 0: that of the dtype
};

/// "bf16 [4, 16, 576] on cpu", or "nothing".
std::string describe(const ConstTensor& tensor);

/// Throws Error(invalid_argument) unless the tensor is present and as the rule says: dtype, device, rank, extents, a
/// data pointer, no negative stride, last dimension dense, aligned, and all its bytes addressable in 64 bits.
void check_tensor(const ConstTensor& tensor, const TensorRule& rule);

/// A number as messages show it: "1e-30", "0.5".
std::string to_text(float value);

/// Throws Error(invalid_argument) "argument: need a positive finite number, got ...".
void check_positive_finite(float value, std::string_view argument);
void check_finite(float value, std::string_view argument);

std::string join(const std::vector<std::string>& parts, std::string_view separator, std::string_view last_separator);

/// Some memory as runs of bytes repeated along up to three strides.
struct Region {
    struct Step {
        std::int64_t count = 1;
        std::int64_t stride_bytes = 0;
    };
    const std::byte* base = nullptr;
    std::int64_t run_bytes = 0;  ///< 0: nothing
    std::array<Step, 3> steps{};
    std::string_view argument;  ///< for messages
};

/// All that a call of decode reads, or writes: query, sinks, and cache, rope, slots and counts of two sources, or what
/// slots are converted from.
using Regions = Few<Region, 12>;

/// The bytes of a tensor whose leading dimensions are cut to `leading` (as many as given).
Region region_of(const ConstTensor& tensor, std::string_view argument,
                 std::initializer_list<std::int64_t> leading = {});
/// The pages of a cache (gaps between pages excluded): one region, or two where latent and rope are split.
Regions regions_of(const CacheView& cache, std::string_view argument);
Region region_of(const void* data, std::size_t bytes, std::string_view argument);

/// Exact: gaps between strides do not count as overlap.
bool overlaps(const Region& a, const Region& b);

/// Throws Error(invalid_argument) if an output shares a byte with an input or another output, or if an output's own
/// elements do. Cost is small unless bounding ranges interleave.
void check_no_overlap(const Regions& outputs, const Regions& inputs);

}  // namespace sparsemla::detail
