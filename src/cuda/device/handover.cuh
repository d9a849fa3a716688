// Between CTAs of one grid, through global memory: flags that say what is there, and loads that see it.
#pragma once

#include <cstdint>

namespace sparsemla::device {

// Release: what this thread wrote, and what others wrote before a barrier (of the CTA, or an mbarrier's phase) that it
// has passed, is there for who sees the flag.
__device__ inline void raise_flag(std::uint32_t* flag) {
    asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}

// The same for a counter: one more.
__device__ inline void count_arrival(std::uint32_t* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// One more, where nothing but the number matters; returns what was there.
__device__ inline std::uint32_t count_relaxed(std::uint32_t* counter) {
    std::uint32_t before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Until the flag or counter is at least `value`. For a whole warp: one lane looks. As long as it takes: what is waited
// for is another CTA of the same grid, which runs already or starts next.
__device__ inline void wait_for_flag(const std::uint32_t* flag, std::uint32_t value, int lane) {
    if (lane == 0) {
        std::uint32_t seen;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        while (seen < value);
    }
    __syncwarp();
}

// Loads of what other CTAs of the grid have written: past the L1, which may hold older bytes.
__device__ inline float4 load_from_grid(const float4* from) {
    float4 value;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "l"(from)
                 : "memory");
    return value;
}
__device__ inline float2 load_from_grid(const float2* from) {
    float2 value;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(from) : "memory");
    return value;
}

}  // namespace sparsemla::device
