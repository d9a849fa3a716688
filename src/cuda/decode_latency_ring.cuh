// decode_latency's ring of stages: who may fill one, and who has read it.
#pragma once

#include "cuda/decode_latency_tile.cuh"
#include "cuda/device/exchange.cuh"

namespace sparsemla::detail::latency {

/// Numbers 0 .. n - 1 in turn, and the phase of their barriers.
struct Turn {
    int number = 0;
    std::uint32_t parity = 0;

    __device__ void advance(int n) {
        if (++number < n) return;
        number = 0;
        parity ^= 1;
    }
};

/// The stage's last use is over, in every CTA that its records go to.
template <class T>
__device__ void wait_until_empty(const Place<T>& at, const Turn& stage) {
    wait_mbarrier(at.empty(stage.number), stage.parity ^ 1);
    fence_async_proxy();  // zeros of absent records before, bulk copies after
}

/// This warp reads the stage no more: lane t tells tile t's CTA, whose copies may be the next to fill it.
template <class T>
__device__ void leave_stage(const Place<T>& at, int stage) {
    __syncwarp();
    if (at.tiles == 1) {
        arrive_as_warp(at.empty(stage), at.lane);
    } else if (at.lane < at.tiles) {
        arrive_at_peer(map_to_cta(at.empty(stage), at.split + at.lane * at.splits));
    }
}

/// Peers that share copies arrive at the `empty` barriers of `chunks` chunks: this CTA must not end before the last
/// ones.
template <class T>
__device__ void wait_for_peers_to_leave(const Params& params, const Place<T>& at, int chunks) {
    if (at.tiles == 1) return;
    for (int i = max(0, chunks - params.stages); i < chunks; ++i)
        wait_mbarrier(at.empty(i % params.stages), static_cast<std::uint32_t>(i / params.stages) & 1);
}

}  // namespace sparsemla::detail::latency
