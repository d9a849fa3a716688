// Outputs of decode_latency from registers to global memory.
#pragma once

#include <type_traits>

#include "cuda/decode_latency_statistics.cuh"

namespace sparsemla::detail::latency {

/// Calls store.operator()<pairs>(): whether dimensions 2i, 2i + 1 are one aligned word of BF16, or type, strides and
/// alignment allow only single elements. Asked once for all of a warp's outputs: code that is not taken between the
/// stores would be fetched too.
template <class T, class Store>
__device__ void store_all(const Params& params, const Store& store) {
    if (T::dcp || params.out_pairs)
        store.template operator()<true>();
    else
        store.template operator()<false>();
}

/// Dimensions dim, dim + 1 of a head, if it `exists`.
template <bool kPairs>
__device__ void store_pair(const Params& params, bool exists, std::int64_t element, float x, float y) {
    const std::uint32_t halves = f32x2_to_bf16x2(x, y);
    if constexpr (kPairs) {
        store_global_if(exists, params.out + 2 * element, halves);
    } else if (!exists) {
    } else if (params.out_is_f32) {
        float* to = reinterpret_cast<float*>(params.out) + element;
        to[0] = x;
        to[1] = y;
    } else {
        std::uint16_t* to = reinterpret_cast<std::uint16_t*>(params.out) + element;
        to[0] = static_cast<std::uint16_t>(halves);
        to[1] = static_cast<std::uint16_t>(halves >> 16);
    }
}

/// Where a lane's outputs go: heads 2t, 2t + 1 of each 8, dims 2g, 2g + 1 of each 16.
template <class T>
struct TensorDestination {
    std::int64_t element;  ///< of head 2t, dim 2g
    int heads_left;        ///< of the row from head 2t on

    __device__ TensorDestination(const Params& params, const Place<T>& at) {
        const int head = at.first_head + 2 * (at.lane % 4);
        element = at.row * params.out_row_stride + head * params.out_head_stride + 2 * (at.lane / 4);
        heads_left = params.heads - head;
    }
};

/// The same in the mailboxes of the heads' owners.
template <class T>
struct PeerDestination {
    SharedAddress peers;  ///< Place::peer of head 2t
    int dim;              ///< 2g

    __device__ PeerDestination(const Params&, const Place<T>& at)
        : peers(at.peer(2 * (at.lane % 4))), dim(2 * (at.lane / 4)) {}
};

template <class T>
using Destination = std::conditional_t<T::dcp, PeerDestination<T>, TensorDestination<T>>;

/// Four outputs of a lane in a quad: dims 2g, 2g + 1 of heads 2t, 2t + 1.
template <bool kPairs, class T>
__device__ void store_quad(const Params&, const PeerDestination<T>& to, int unit, int quad, const float4& outputs) {
    const ulonglong2 values = load_shared<ulonglong2>(to.peers + 8 * quad * 8);
    push_pair(values.x, unit * unit_dims + to.dim, outputs.x, outputs.z);
    push_pair(values.y, unit * unit_dims + to.dim, outputs.y, outputs.w);
}
template <bool kPairs, class T>
__device__ void store_quad(const Params& params, const TensorDestination<T>& to, int unit, int quad,
                           const float4& outputs) {
    const std::int64_t element = to.element + 8 * quad * params.out_head_stride + unit * unit_dims;
    store_pair<kPairs>(params, 8 * quad < to.heads_left, element, outputs.x, outputs.z);
    store_pair<kPairs>(params, 8 * quad + 1 < to.heads_left, element + params.out_head_stride, outputs.y, outputs.w);
}

/// No split has columns: +0 and -inf, by `workers` warps, of which this is number `worker`.
template <class T>
__device__ void write_empty(const Params& params, const Place<T>& at, int worker, int workers) {
    for (int head = at.first_head + worker; head < min(at.first_head + T::heads, params.heads); head += workers) {
        const std::int64_t element = at.row * params.out_row_stride + head * params.out_head_stride;
        for (int dim = 2 * at.lane; dim < 512; dim += 64) store_pair<false>(params, true, element + dim, 0, 0);
        if (at.lane == 0) write_lse(params, at.row, head, -INFINITY, 0);
    }
}

/// The same for the owners of the heads, who learn only that there is nothing. By one warp.
template <class T>
__device__ void push_empty(const Params& params, const Place<T>& at) {
    if (at.lane < T::heads) push_lse_of(params, at, at.lane, -INFINITY);
}

/// Only one split of the row has columns: its registers are the row's sums.
template <class T>
__device__ void store_outputs(const Params& params, const Place<T>& at, Outputs<T>& outputs) {
    const Destination<T> to(params, at);
#pragma unroll
    for (int j = 0; j < T::quads; ++j) {
        const float2 weight = load_shared<float2>(at.weight(at.split, 8 * j + 2 * (at.lane % 4)));
#pragma unroll
        for (int i = 0; i < T::units_of_warp; ++i) {
            float* sums = outputs[i] + 4 * j;
            sums[0] *= weight.x;
            sums[1] *= weight.y;
            sums[2] *= weight.x;
            sums[3] *= weight.y;
        }
    }
    store_all<T>(params, [&]<bool kPairs>() {
#pragma unroll
        for (int j = 0; j < T::quads; ++j)
#pragma unroll
            for (int i = 0; i < T::units_of_warp; ++i) {
                const float* sums = outputs[i] + 4 * j;
                store_quad<kPairs>(params, to, at.unit(i), j, {sums[0], sums[1], sums[2], sums[3]});
            }
    });
}

}  // namespace sparsemla::detail::latency
