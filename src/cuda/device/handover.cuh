// Between CTAs of one grid, through global memory: flags that say what is there, and loads that see it.
#pragma once

#include <cstdint>

namespace sparsemla::device {

// After a CTA barrier behind the writes of other threads: these, and this thread's, are there for who sees the flag.
__device__ inline void set_flag(std::uint32_t* flag, std::uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// The same, one more; returns what was there. It also sees what those who added before had written.
__device__ inline std::uint32_t add_to_flag(std::uint32_t* flag) {
    std::uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(flag) : "memory");
    return before;
}

// The same where nothing but the number matters.
__device__ inline std::uint32_t add_to_flag_relaxed(std::uint32_t* flag) {
    std::uint32_t before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(flag) : "memory");
    return before;
}

// Until the flag is at least `value`. For a whole warp: one lane looks.
__device__ inline void wait_for_flag(const std::uint32_t* flag, std::uint32_t value, int lane) {
    if (lane == 0) {
        std::uint32_t seen;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        while (seen < value);
    }
    __syncwarp();
}

// Loads of what other CTAs of the grid have written: past the L1, which may hold older bytes.
__device__ inline float4 load_from_peers(const float4* from) {
    float4 value;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "l"(from)
                 : "memory");
    return value;
}
__device__ inline float2 load_from_peers(const float2* from) {
    float2 value;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(from) : "memory");
    return value;
}

}  // namespace sparsemla::device
