#include "c_api_error.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

#include "sparsemla/tensor.h"

namespace sparsemla::detail {

namespace {

thread_local char last_error[4096] = "";

sparsemla_status status_of(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::invalid_argument: return SPARSEMLA_INVALID_ARGUMENT;
        case ErrorKind::unsupported: return SPARSEMLA_UNSUPPORTED;
        case ErrorKind::malformed_file: return SPARSEMLA_MALFORMED_FILE;
        case ErrorKind::io: return SPARSEMLA_IO;
        case ErrorKind::device: return SPARSEMLA_DEVICE;
    }
    return SPARSEMLA_INTERNAL;
}

}  // namespace

void set_last_error(std::string_view message) noexcept {
    std::size_t length = std::min(message.size(), sizeof last_error - 1);
    // Cut between characters: bytes 10xxxxxx continue one.
    if (length < message.size())
        while (length > 0 && (static_cast<unsigned char>(message[length]) & 0xC0) == 0x80) --length;
    std::memcpy(last_error, message.data(), length);
    last_error[length] = '\0';
}

sparsemla_status status_of_exception() noexcept {
    try {
        throw;
    } catch (const Error& error) {
        set_last_error(error.what());
        return status_of(error.kind());
    } catch (const std::bad_alloc&) {
        set_last_error("out of host memory");
        return SPARSEMLA_OUT_OF_MEMORY;
    } catch (const std::exception& error) {
        set_last_error(error.what());
        return SPARSEMLA_INTERNAL;
    } catch (...) {
        set_last_error("an exception of an unknown type");
        return SPARSEMLA_INTERNAL;
    }
}

}  // namespace sparsemla::detail

extern "C" const char* sparsemla_last_error(void) { return sparsemla::detail::last_error; }
