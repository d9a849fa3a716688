// Any bytes as a case file: an Error, or a case whose translation into the library's arguments holds together.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "case_fields.h"
#include "sparsemla/case_file.h"

namespace {

using namespace sparsemla;

/// Reads every byte that the view spans, so that a view past its buffer is caught.
void touch(const ConstTensor& tensor) {
    if (!tensor.present()) return;
    const auto* bytes = static_cast<const std::uint8_t*>(tensor.data);
    std::int64_t span_bytes = size_bytes(tensor.dtype);
    for (int i = 0; i < tensor.rank; ++i) {
        if (tensor.shape[i] == 0) return;
        span_bytes += (tensor.shape[i] - 1) * tensor.strides[i] * size_bytes(tensor.dtype);
    }
    volatile std::uint8_t sink = 0;
    for (std::int64_t i = 0; i < span_bytes; ++i) sink = bytes[i];
    static_cast<void>(sink);
}

/// Likewise for the first and last byte of each piece of the first and last record.
void touch(const CacheView& cache) {
    if (cache.num_slots() == 0) return;
    const RecordLayout& layout = cache.layout();
    for (const std::int64_t slot : {std::int64_t{0}, cache.num_slots() - 1}) {
        const RecordPointers record = locate(cache, slot);
        const auto touch_bytes = [](const std::byte* first, std::int64_t bytes) {
            if (bytes > 0) touch(dense(static_cast<const void*>(first), DType::u8, {bytes}));
        };
        touch_bytes(record.data, layout.main.bytes());
        touch_bytes(record.rope, layout.rope.bytes());
        if (record.scales != nullptr) touch_bytes(record.scales, layout.groups() * layout.scale_size());
    }
}

void use(Case c) {
    convert_case(c);
    validate(c);
    const CaseStep step = case_step(c);
    touch(step.query);
    touch(step.sinks);
    for (const CaseSource& source : step.sources) {
        touch(source.cache);
        touch(source.slots);
        touch(source.counts);
    }
    if (step.problem().sources.size() != step.sources.size() || step.args().rows != step.rows) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    try {
        use(sparsemla::detail::parse_case(std::as_bytes(std::span(data, size)), "input"));
    } catch (const sparsemla::Error&) {
        // The one answer to a malformed file.
    }
    return 0;
}
