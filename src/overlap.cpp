// Which bytes do strided views share? Exact for nested strides, without looking at every byte.
#include <algorithm>
#include <limits>

#include "check.h"

namespace sparsemla::detail {

namespace {

using Address = std::int64_t;  // user-space addresses fit

Address address(const Region& region) { return static_cast<Address>(reinterpret_cast<std::uintptr_t>(region.base)); }

/// Steps by falling stride, repeated bytes (stride 0) dropped, dense inner steps folded into the run.
Region normalised(Region region) {
    for (Region::Step& step : region.steps) {
        if (step.count == 0) region.run_bytes = 0;
        if (step.stride_bytes == 0 || step.count <= 1) step = {};
    }
    std::sort(region.steps.begin(), region.steps.end(),
              [](const auto& a, const auto& b) { return a.stride_bytes > b.stride_bytes; });
    for (int i = 2; i >= 0; --i) {
        Region::Step& step = region.steps[i];
        if (step.count == 1) continue;
        if (step.stride_bytes != region.run_bytes) break;
        region.run_bytes *= step.count;
        step = {};
    }
    return region;
}

/// Bytes from the first to past the last, over the steps from `level` on.
std::int64_t span(const Region& region, int level = 0) {
    std::int64_t bytes = region.run_bytes;
    for (int i = level; i < 3; ++i) bytes += (region.steps[i].count - 1) * region.steps[i].stride_bytes;
    return bytes;
}

/// Whether the region, moved to `base` and cut to the steps from `level` on, holds a byte of [low, high).
bool hits(const Region& region, Address base, int level, Address low, Address high) {
    if (low >= base + span(region, level) || high <= base) return false;
    if (level == 3) return true;
    const auto [count, stride_bytes] = region.steps[level];
    if (count == 1) return hits(region, base, level + 1, low, high);
    const std::int64_t inner = span(region, level + 1);
    const std::int64_t first = std::max<std::int64_t>(0, (low - base - inner) / stride_bytes);
    const std::int64_t last = std::min(count - 1, (high - 1 - base) / stride_bytes);
    for (std::int64_t i = first; i <= last; ++i)
        if (hits(region, base + i * stride_bytes, level + 1, low, high)) return true;
    return false;
}

/// Whether elements of the region may share a byte: a step repeats bytes, or is shorter than what it steps over.
/// Strides that interleave without nesting count as shared; no output needs them.
bool overlaps_itself(const Region& region) {
    for (const Region::Step& step : region.steps)
        if (step.count > 1 && step.stride_bytes == 0) return true;
    const Region sorted = normalised(region);
    for (int i = 0; i < 3; ++i)
        if (sorted.steps[i].count > 1 && sorted.steps[i].stride_bytes < span(sorted, i + 1)) return true;
    return false;
}

}  // namespace

Region region_of(const ConstTensor& tensor, std::string_view argument, std::initializer_list<std::int64_t> leading) {
    Region region{.base = static_cast<const std::byte*>(tensor.data),
                  .run_bytes = size_bytes(tensor.dtype),
                  .steps = {},
                  .argument = argument};
    const auto* end = tensor.shape.begin() + tensor.rank;
    if (!tensor.present() || std::find(tensor.shape.begin(), end, 0) != end) {
        region.run_bytes = 0;  // the strides of a tensor without elements mean nothing
        return region;
    }
    const auto* cut = leading.begin();
    int step = 0;
    for (int i = 0; i < tensor.rank; ++i) {
        const std::int64_t count = cut != leading.end() ? std::min(*cut++, tensor.shape[i]) : tensor.shape[i];
        const std::int64_t stride_bytes = count > 1 ? tensor.strides[i] * size_bytes(tensor.dtype) : 0;
        if (count == 0) region.run_bytes = 0;
        if (i + 1 == tensor.rank && (stride_bytes == region.run_bytes || count <= 1))
            region.run_bytes *= count;
        else if (count != 1)
            region.steps[step++] = {count, stride_bytes};
    }
    return region;
}

Regions regions_of(const CacheView& cache, std::string_view argument) {
    const RecordLayout& layout = cache.layout();
    auto pages_of = [&](const std::byte* base, std::int64_t record_bytes, std::int64_t stride_bytes) {
        return Region{.base = base,
                      .run_bytes = base == nullptr ? 0 : cache.page_size * record_bytes,
                      .steps = {{{cache.pages, stride_bytes}, {}, {}}},
                      .argument = argument};
    };
    if (cache.rope == nullptr) return {pages_of(cache.data, layout.record_bytes, cache.stride_bytes())};
    return {pages_of(cache.data, layout.main.bytes(), cache.slot_step() * layout.main.bytes()),
            pages_of(cache.rope, layout.rope.bytes(), cache.slot_step() * layout.rope.bytes())};
}

Region region_of(const void* data, std::size_t bytes, std::string_view argument) {
    return {.base = static_cast<const std::byte*>(data),
            .run_bytes = data == nullptr ? 0 : static_cast<std::int64_t>(bytes),
            .steps = {},
            .argument = argument};
}

bool overlaps(const Region& first, const Region& second) {
    const Region a = normalised(first);
    const Region b = normalised(second);
    if (a.run_bytes == 0 || b.run_bytes == 0) return false;
    if (address(a) >= address(b) + span(b) || address(b) >= address(a) + span(a)) return false;
    for (std::int64_t i = 0; i < a.steps[0].count; ++i)
        for (std::int64_t j = 0; j < a.steps[1].count; ++j)
            for (std::int64_t k = 0; k < a.steps[2].count; ++k) {
                const Address low = address(a) + i * a.steps[0].stride_bytes + j * a.steps[1].stride_bytes +
                                    k * a.steps[2].stride_bytes;
                if (hits(b, address(b), 0, low, low + a.run_bytes)) return true;
            }
    return false;
}

void check_no_overlap(const Regions& outputs, const Regions& inputs) {
    auto refuse = [](const Region& output, std::string_view other) {
        throw Error(ErrorKind::invalid_argument, std::string(output.argument), "memory of its own",
                    "memory shared with " + std::string(other));
    };
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (overlaps_itself(outputs[i])) refuse(outputs[i], "other elements of itself");
        for (std::size_t j = 0; j < i; ++j)
            if (overlaps(outputs[i], outputs[j])) refuse(outputs[i], outputs[j].argument);
        for (const Region& input : inputs)
            if (overlaps(outputs[i], input)) refuse(outputs[i], input.argument);
    }
}

}  // namespace sparsemla::detail
