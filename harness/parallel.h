// A loop over all cores.
#pragma once

#include <tbb/parallel_for.h>

#include <cstdint>

namespace sparsemla::harness {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool one_thread = true;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
inline constexpr bool one_thread = true;
#else
inline constexpr bool one_thread = false;
#endif
#else
inline constexpr bool one_thread = false;
#endif

/// body(i) for every i of [0, count), in any order and at the same time; no two may write the same. Under
/// ThreadSanitizer, which is there for the library and does not see the order that an uninstrumented libtbb keeps, one
/// after another.
template <class Body>
void for_each_index(std::int64_t count, const Body& body) {
    if constexpr (one_thread)
        for (std::int64_t i = 0; i < count; ++i) body(i);
    else
        tbb::parallel_for(std::int64_t{0}, count, body);
}

}  // namespace sparsemla::harness
