// What a function of the C interface makes of exceptions: statuses, and the text of sparsemla_last_error().
#pragma once

#include <string_view>

#include "sparsemla/sparsemla.h"

namespace sparsemla::detail {

/// Of this thread, in fixed memory: saying what went wrong must not fail itself. Long texts are cut.
void set_last_error(std::string_view message) noexcept;

/// The status of the exception being handled, whose text becomes the last error.
sparsemla_status status_of_exception() noexcept;

/// Runs the body of a C function; nothing that it throws leaves.
template <class Body>
sparsemla_status guarded(const Body& body) noexcept {
    try {
        body();
        return SPARSEMLA_OK;
    } catch (...) {
        return status_of_exception();
    }
}

}  // namespace sparsemla::detail
