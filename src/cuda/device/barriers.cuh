// Barriers: of a CTA, of a cluster, in shared memory (mbarrier), and between dependent grids.
#pragma once

#include <cstdint>

namespace sparsemla::device {

/// An address in the shared state space, of this CTA or (through map_to_cta) of another one of the cluster.
using SharedAddress = std::uint32_t;

__device__ inline SharedAddress shared_address(const void* pointer) {
    return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// Some whole warps of the CTA, `threads` in all. Barrier 0 is __syncthreads.
__device__ inline void sync_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Registers of each thread of this warpgroup from here on: fewer are given back, more are waited for. sm_90a only.
template <int kRegisters>
__device__ inline void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Before this, nothing that an earlier grid wrote may be read, and nothing written that it may still read.
__device__ inline void wait_for_prerequisite_grids() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next grid start: it still waits for the end of this one before it reads.
__device__ inline void launch_dependent_grids() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Relaxed: orders no memory by itself. It is enough for mbarriers (fence_mbarrier_init) and after a CTA barrier that
// follows this thread's last use of what peers will overwrite. Each thread arrives once before it waits.
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

/// Where this CTA stands in its cluster, and the cluster in the grid, along x and y. The CTA's number in the cluster
/// is x + y * (CTAs of the cluster along x).
__device__ inline std::uint32_t cta_of_cluster_x() {
    std::uint32_t index;
    asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(index));
    return index;
}
__device__ inline std::uint32_t cta_of_cluster_y() {
    std::uint32_t index;
    asm("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(index));
    return index;
}
__device__ inline std::uint32_t cta_of_cluster() {
    std::uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline std::uint32_t cluster_of_grid_x() {
    std::uint32_t index;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
    return index;
}

__device__ inline void init_mbarrier(SharedAddress barrier, std::uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to the cluster, once its threads have passed a cluster barrier.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival that also announces bytes: the phase ends when they have come.
__device__ inline void arrive_expecting(SharedAddress barrier, std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Release: what this thread wrote before is visible to who waits for the phase.
__device__ inline void arrive(SharedAddress barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// As many arrivals at once.
__device__ inline void arrive(SharedAddress barrier, std::uint32_t arrivals) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// The same at a barrier of another CTA of the cluster (map_to_cta), which must not have ended.
__device__ inline void arrive_at_peer(SharedAddress barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Build option SPARSEMLA_RACECHECK: every lane arrives where otherwise one does for its warp. compute-sanitizer's
/// racecheck follows nothing else.
#ifdef SPARSEMLA_RACECHECK
inline constexpr bool every_lane_arrives = true;
#else
inline constexpr bool every_lane_arrives = false;
#endif
inline constexpr int arrivals_of_warp = every_lane_arrives ? 32 : 1;

// Of a warp whose lanes have met (__syncwarp): arrivals_of_warp.
__device__ inline void arrive_as_warp(SharedAddress barrier, int lane) {
    if (every_lane_arrives || lane == 0) arrive(barrier);
}

// An arrival of this thread, counted in the barrier's number, once all its copy_16_async so far have come.
__device__ inline void arrive_after_copies(SharedAddress barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Bytes that other CTAs have sent to this CTA's shared memory are visible once their phase has ended.
__device__ inline bool mbarrier_phase_ended(SharedAddress barrier, std::uint32_t parity) {
    std::uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

__device__ inline void wait_mbarrier(SharedAddress barrier, std::uint32_t parity) {
    while (!mbarrier_phase_ended(barrier, parity)) {
    }
}

// Ordinary writes to shared memory before this are visible to the tensor cores and the copy engine after a barrier.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace sparsemla::device
