// Device code that is not Hopper's alone, for the families that follow: it compiles, nobody runs it. Every function of
// cuda/device but mma.cuh is used once.
#include "cuda/device/barriers.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/copies.cuh"
#include "cuda/device/exchange.cuh"
#include "cuda/device/reduce.cuh"

namespace sparsemla::device {

__global__ void use_convert(const std::uint32_t* codes, const float2* floats, std::uint32_t* out) {
    const TwoPairs halves = e4m3x4_to_f16(*codes), words = e4m3x4_to_bf16(*codes);
    out[0] = halves.low ^ halves.high ^ words.low ^ words.high;
    out[1] = f32x2_to_e4m3x2(floats->x, floats->y);
    out[2] = f32x2_to_f16x2(floats->x, floats->y) ^ f32x2_to_bf16x2(floats->x, floats->y);
    out[3] = f32x2_to_e4m3_as_f16x2(floats->x, floats->y) ^ transpose_byte_pairs(*codes);
    out[4] = __float_as_uint(exp2_approximate(floats->x) + reciprocal_approximate(floats->y));
    out[5] = __float_as_uint(log2_approximate(floats->x));
}

__global__ void use_reduce(const float* values, float* out) {
    out[threadIdx.x] = warp_max(values[threadIdx.x]) + warp_sum(values[threadIdx.x]);
}

__global__ void use_copies(const uint4* from, const std::int32_t* word, std::uint32_t* out) {
    __shared__ __align__(128) uint4 shared[64];
    __shared__ std::uint64_t memory;
    const SharedAddress base = shared_address(shared), barrier = shared_address(&memory);
    if (threadIdx.x == 0) init_mbarrier(barrier, 64);
    sync_threads(1, 32);
    wait_for_prerequisite_grids();
    launch_dependent_grids();
    copy_16_async(base + threadIdx.x * 16, from, load_global(word) < 0);
    arrive_after_copies(barrier);
    arrive(barrier);
    wait_mbarrier(barrier, 0);
    store_shared(base + 512, load_global(from));
    store_shared(base + 528, 1.0F, 2.0F, 3.0F, 4.0F);
    store_shared(base + 544, 1.0F, 2.0F);
    store_shared(base + 552, std::uint32_t{5});
    store_shared(base + 556, 6.0F);
    store_shared_8(base + 560, load_shared_16(base));
    if (threadIdx.x == 0) {
        arrive_expecting(barrier, 64);
        copy_bulk_async(base + 640, from, 64, barrier);
    }
    __syncwarp();
    std::uint32_t four[4], two[2], transposed[4];
    load_matrices(four, base + threadIdx.x * 16);
    load_matrices(two, base + threadIdx.x * 16);
    load_matrices_transposed(transposed, base + threadIdx.x * 16);
    const float4 floats = load_shared<float4>(base + 528);
    const float2 pair = load_shared<float2>(base + 544);
    out[threadIdx.x] =
        four[threadIdx.x % 4] ^ two[threadIdx.x % 2] ^ transposed[threadIdx.x % 4] ^ __float_as_uint(floats.x + pair.y);
}

__global__ void use_exchange(float* out) {
    __shared__ __align__(128) float4 inbox[2];
    __shared__ std::uint64_t memory;
    const SharedAddress barrier = shared_address(&memory), to = shared_address(inbox);
    if (threadIdx.x == 0) {
        init_mbarrier(barrier, 1);
        fence_mbarrier_init();
        arrive_expecting(barrier, 16 + 8 + 16);
    }
    fence_async_proxy();
    __syncthreads();
    arrive_at_cluster();
    wait_for_cluster();
    const std::uint32_t peer = cta_of_cluster_x() ^ 1;
    if (threadIdx.x == 0) {
        store_async(map_to_cta(to, peer), 1, 2, 3, 4, map_to_cta(barrier, peer));
        store_async(map_to_cta(to, peer), 1, 2, map_to_cta(barrier, peer));
        copy_bulk_to_cta(map_to_cta(to, peer), to + 16, 16, map_to_cta(barrier, peer));
    }
    if (cta_of_cluster_y() == 0) {
        arrive_at_peer(map_to_cta(barrier, peer));
#if __CUDA_ARCH__ < 1200  // the only one that sm_120f lacks
        copy_bulk_multicast(to, out, 16, barrier, 3);
#endif
    }
    wait_mbarrier(barrier, 0);
    out[threadIdx.x] = inbox[0].x + static_cast<float>(cluster_of_grid_x());
}

}  // namespace sparsemla::device
