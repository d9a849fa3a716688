// Reductions over a warp or over each of its groups of lanes: every lane gets the result; the order of additions is
// fixed.
#pragma once

#include <cstdint>

namespace sparsemla::device {

inline constexpr unsigned all_lanes = 0xFFFFFFFFU;

/// Order of floats as order of signed integers: NaN with a clear sign bit is the largest. Its own inverse.
__device__ inline int ordered(int bits) { return bits >= 0 ? bits : bits ^ 0x7FFFFFFF; }

/// A NaN with a clear sign bit wins; one with it set loses against everything.
__device__ inline float warp_max(float value) {
    const int largest = __reduce_max_sync(all_lanes, ordered(__float_as_int(value)));
    return __int_as_float(ordered(largest));
}

/// Over kLanes neighbours, a power of two; lanes l ^ distance meet, the largest distance first.
template <int kLanes = 32>
__device__ float warp_sum(float value) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(all_lanes, value, distance);
    return value;
}

/// Of this lane's value and those of all lanes before it.
__device__ inline int warp_prefix_sum(int value, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(all_lanes, value, distance);
        if (lane >= distance) value += before;
    }
    return value;
}

}  // namespace sparsemla::device
