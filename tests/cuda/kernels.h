// Kernels that tests put before, beside and behind decode. No CUDA headers: those tests are plain C++.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sparsemla/tensor.h"

namespace sparsemla::test {

/// Bytes of the GPU: to[i] = from[i].
struct LateWrite {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::size_t bytes = 0;
};

/// Lets the grid behind it start at once, spins, and only then copies: at most 8 of them.
void late_write(const std::vector<LateWrite>& writes, double microseconds, Stream stream);

/// The same as a kernel that knows nothing of dependent launches: the grid behind it starts after its end.
void plain_write(const std::vector<LateWrite>& writes, double microseconds, Stream stream);

/// Fills bytes, and lets the grid behind it start before it does.
void late_fill(std::byte* to, int byte, std::size_t bytes, Stream stream);

/// Adds the number of bytes that differ to `count`, on the GPU.
void count_differences(const std::byte* a, const std::byte* b, std::size_t bytes, std::uint32_t* count, Stream stream);

/// One CTA on each of so many SMs with all their shared memory: nothing else that needs some runs there meanwhile.
void occupy(int sms, double microseconds, Stream stream);

/// One small CTA that runs until `release` or until ten seconds have passed.
class Holder {
   public:
    explicit Holder(Stream stream);
    Holder(const Holder&) = delete;
    Holder& operator=(const Holder&) = delete;
    ~Holder();

    void release();
    /// Whether the kernel has ended, because of `release` or of the time.
    bool ended() const;

   private:
    struct Flags;
    Flags* flags_ = nullptr;  ///< host memory that the kernel sees
};

/// Copies between host and GPU; return when they are done.
void upload(void* to, const void* from, std::size_t bytes);
void download(void* to, const void* from, std::size_t bytes);

int current_device();
void set_current_device(int index);
/// The error that the runtime keeps for whoever asks next, "" if there is none. Does not clear it.
const char* kept_error();
/// Whether all work of the stream is done. Does not wait.
bool is_done(Stream stream);

}  // namespace sparsemla::test
