// Stores and bulk copies into the shared memory of other CTAs of the cluster; arrival is counted in bytes there.
#pragma once

#include "cuda/device/barriers.cuh"

namespace sparsemla::device {

// The same place in the shared memory of another CTA of the cluster.
__device__ inline SharedAddress map_to_cta(SharedAddress address, std::uint32_t cta) {
    SharedAddress mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(cta));
    return mapped;
}

// Weak store whose 16 bytes count at `barrier`, of the same CTA as `to`; visible to who waits for that barrier.
__device__ inline void store_async(SharedAddress to, float x, float y, float z, float w, SharedAddress barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier)
        : "memory");
}

// The same with 8 bytes.
__device__ inline void store_async(SharedAddress to, float x, float y, SharedAddress barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "f"(x), "f"(y), "r"(barrier)
                 : "memory");
}

// A run of bytes (a multiple of 16) from this CTA; the source was written before a fence_async_proxy and a barrier.
__device__ inline void copy_bulk_to_cta(SharedAddress to, SharedAddress from, std::uint32_t bytes,
                                        SharedAddress barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "r"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

}  // namespace sparsemla::device
