// Memory of a test between two pages that nobody may touch: an access outside it ends the program at once.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "sparsemla/decode.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SPARSEMLA_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SPARSEMLA_TEST_SANITIZED 1
#endif
#endif

namespace sparsemla::test {

#ifdef SPARSEMLA_TEST_SANITIZED
inline constexpr bool sanitized = true;  // whoever maps memory must leave room for its shadow
#else
inline constexpr bool sanitized = false;
#endif

/// Where the bytes lie between the two pages: flush with the page behind them, or with the page before them.
enum class Against : std::uint8_t { end, front };

/// Pages are reserved, not committed: mappings of many GiB cost what is touched. Starts as zeros.
class Fenced {
   public:
    Fenced() = default;
    explicit Fenced(std::size_t bytes, std::size_t alignment_bytes = 16, Against against = Against::end)
        : size_(bytes) {
        inner_bytes_ = (bytes + page_bytes - 1) / page_bytes * page_bytes;
        void* mapped = mmap(nullptr, mapped_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) throw std::runtime_error("Fenced: mmap failed");
        inner_ = static_cast<std::byte*>(mapped) + page_bytes;
        writable(true);
        const std::size_t room = inner_bytes_ - bytes;
        data_ = inner_ + (against == Against::front ? 0 : room / alignment_bytes * alignment_bytes);
        std::fill(inner_, data_, slack);
        std::fill(data_ + bytes, inner_ + inner_bytes_, slack);
    }
    Fenced(Fenced&& other) noexcept { swap(other); }
    Fenced& operator=(Fenced&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Fenced() {
        if (inner_ != nullptr) munmap(inner_ - page_bytes, mapped_bytes());
    }

    std::byte* data() const { return data_; }
    std::size_t size() const { return size_; }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data_);
    }
    Memory memory() const { return {data_, size_}; }
    /// All that lies between the two pages.
    Memory surroundings() const { return {inner_, inner_bytes_}; }

    void fill(int byte) { std::fill_n(data_, size_, static_cast<std::byte>(byte)); }
    /// Whether an access may write: inputs are made read-only while a call runs.
    void writable(bool yes) {
        if (inner_bytes_ == 0) return;
        if (mprotect(inner_, inner_bytes_, yes ? PROT_READ | PROT_WRITE : PROT_READ) != 0)
            throw std::runtime_error("Fenced: mprotect failed");
    }
    /// Whether nothing was written to what is left of the first and last page.
    bool slack_intact() const {
        const auto untouched = [](std::byte b) { return b == slack; };
        return std::all_of(inner_, data_, untouched) && std::all_of(data_ + size_, inner_ + inner_bytes_, untouched);
    }

   private:
    static constexpr std::byte slack{0xFF};
    static inline const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

    std::size_t mapped_bytes() const { return inner_bytes_ + 2 * page_bytes; }
    void swap(Fenced& other) {
        std::swap(inner_, other.inner_);
        std::swap(inner_bytes_, other.inner_bytes_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }

    std::byte* inner_ = nullptr;  // what lies between the two pages
    std::size_t inner_bytes_ = 0;
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace sparsemla::test
