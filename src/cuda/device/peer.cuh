// Memory that other GPUs write and read: words that are whole by themselves, at the scope of the system.
#pragma once

#include <cstdint>

namespace sparsemla::device {

// Whole in each of its words of 4 bytes, not more. Neither waits for, nor orders, anything else.
__device__ inline void store_peer(void* to, std::uint32_t value) {
    asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ inline void store_peer(void* to, const uint4& value) {
    asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

// Without a branch.
__device__ inline void store_peer_if(bool condition, void* to, std::uint32_t value) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p st.relaxed.sys.global.b32 [%0], %1;\n"
        "}" ::"l"(to),
        "r"(value), "r"(static_cast<std::uint32_t>(condition))
        : "memory");
}

__device__ inline std::uint32_t load_peer(const std::uint32_t* from) {
    std::uint32_t value;
    asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ inline uint4 load_peer(const uint4* from) {
    uint4 value;
    asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from)
                 : "memory");
    return value;
}

// Zeros otherwise, and nothing is read; without a branch.
__device__ inline uint4 load_peer_if(bool condition, const uint4* from) {
    uint4 value = {0, 0, 0, 0};
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %5, 0;\n"
        "@p ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
        : "l"(from), "r"(static_cast<std::uint32_t>(condition))
        : "memory");
    return value;
}

// Nanoseconds, the same clock on every SM; it advances in steps of up to a microsecond.
__device__ inline std::uint64_t clock_ns() {
    std::uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

}  // namespace sparsemla::device
