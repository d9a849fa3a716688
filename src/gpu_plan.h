// What the GPU kernels have in common when they plan: what they refuse, and what they read from a problem.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels.h"
#include "stage_layout.h"

namespace sparsemla::detail {

/// "record must be one of ..., got ..."
std::string must_be(std::string_view what, std::string_view allowed, std::string_view received);

/// The same for an optional number outside low .. high; nothing for any other.
std::optional<std::string> refuse_range(std::string_view what, std::optional<int> value, int low, int high);

/// What P may be in a kernel; the first one is the default.
using PFormats = std::vector<PFormat>;

/// Of decode_latency and decode_balanced.
PFormats p_formats_of(const Problem& problem);

/// What no layout could make possible: GPU, records, widths, schedule options, values out of range. Nothing, or the
/// reason.
std::optional<std::string> refuse_on_gpu(const Problem& problem, const DeviceSpec& device, const PlanOptions& options,
                                         const PFormats& formats, std::span<const int> tiles_of_heads, int most_stages);

/// Of a problem and options that are not refused.
Schedule gpu_schedule(const Kernel& kernel, const Problem& problem, const PlanOptions& options, const PFormats& formats,
                      int splits);

/// How the kernels hold the problem's records: one form for all sources.
StageForm form_of(const Problem& problem);

/// How many times as long as with flat fp8 records and an E4M3 query a CTA takes for a chunk: what an H200 took
/// (docs/performance.md, "Records").
double chunk_factor(const Problem& problem);

/// Tiles of `heads` heads that a row of the problem has; at least 1.
int tiles_of(const Problem& problem, int heads);

/// Chunks of 64 columns that hold so many columns.
std::int64_t chunks_of(std::int64_t columns);
/// Of a row's full lists, over all sources; may be 0.
std::int64_t chunks_of(const Problem& problem);
/// Of a row with PlanOptions::usual_columns, at most those of the lists; at least 1.
std::int64_t usual_chunks(const Problem& problem, const PlanOptions& options);

}  // namespace sparsemla::detail
