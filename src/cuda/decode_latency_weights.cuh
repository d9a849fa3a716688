// Transport::weights of decode_latency: P to all CTAs of a row, and there the products of some dimensions over the
// columns of all splits.
#pragma once

#include "cuda/decode_latency_output.cuh"

namespace sparsemla::detail::latency {

/// Transport `weights`: this CTA's P to all others of the row, by the helpers.
template <class T>
__device__ void send_weights(const Place<T>& at) {
    constexpr int step = 32 * helper_warps * 16;
    static_assert(T::weights_bytes % step == 0);
    constexpr int pieces = T::weights_bytes / step;  // of a thread
    const int first = (32 * at.helper() + at.lane) * 16;
    float4 p[pieces];
#pragma unroll
    for (int i = 0; i < pieces; ++i) p[i] = load_shared<float4>(at.weights() + first + i * step);
    const SharedAddress to = at.base + T::layout.inbox + at.split * T::weights_bytes + first;
    const SharedAddress barrier = at.outputs_barrier();
#pragma unroll
    for (int distance = 1; distance < T::splits; ++distance) {
        const int cta = at.cta((at.split + distance) % T::splits);
        const SharedAddress inbox = map_to_cta(to, cta), arrived = map_to_cta(barrier, cta);
#pragma unroll
        for (int i = 0; i < pieces; ++i) store_async(inbox + i * step, p[i].x, p[i].y, p[i].z, p[i].w, arrived);
    }
}

/// Transport `weights`: this CTA's dimensions over the columns of all splits. A job is a split and a block.
template <class T>
struct SlicesProduct {
    using S = Slices<T>;
    static constexpr int jobs = T::splits * S::dim_blocks;
    static constexpr int loaded = 4;  ///< under way at a time
    static_assert(loaded <= jobs);

    FragmentA values[loaded][4];
    float outputs[jobs][S::heads / 2];

    __device__ void fetch(const Place<T>& at, int job, ValueBytes& bytes) const {
        const int split = job / S::dim_blocks;
        const int unit = S::unit(at, job % S::dim_blocks);
        const bool own = split == at.split;
        bytes.fetch((own ? at.stages + at.split * S::dims : S::slice(at, split)) + unit * unit_dims,
                    own ? T::pitch : S::pitch, at.lane);
    }

    __device__ void start(const Place<T>& at, int job) {
        const int split = job / S::dim_blocks;
        const SharedAddress weights =
            at.base + (split == at.split ? T::layout.weights : T::layout.inbox + split * T::weights_bytes);
        pin(outputs[job]);
        start_unit<T>(weights + S::first_head(at) * chunk_keys * 2, outputs[job], values[job % loaded], true);
    }

    __device__ void load_first(const Place<T>& at) {
        ValueBytes bytes[loaded];
#pragma unroll
        for (int job = 0; job < loaded; ++job) fetch(at, job, bytes[job]);
#pragma unroll
        for (int job = 0; job < loaded; ++job) bytes[job].to_halves(values[job]);
    }

    /// Once P of all splits is there.
    __device__ void start_all(const Place<T>& at) {
#pragma unroll
        for (int job = 0; job < loaded; ++job) start(at, job);
        constexpr int more = jobs - loaded;
        if constexpr (more > 0) {
            ValueBytes bytes[2];
            fetch(at, loaded, bytes[0]);
#pragma unroll
            for (int i = 0; i < more; ++i) {
                if (i + 1 < more) fetch(at, loaded + i + 1, bytes[(i + 1) % 2]);
                wait_for_mma<loaded - 1>();
                bytes[i % 2].to_halves(values[(loaded + i) % loaded]);
                start(at, loaded + i);
            }
        }
    }

    /// In split order. Splits without columns left garbage.
    __device__ void store(const Params& params, const Place<T>& at, std::uint32_t split_mask) {
        wait_for_mma<0>();
#pragma unroll
        for (float(&sums)[S::heads / 2] : outputs) pin(sums);
        const int first_head = S::first_head(at);
        float4 sums[S::dim_blocks][S::quads] = {};
#pragma unroll
        for (int block = 0; block < S::dim_blocks; ++block)
#pragma unroll
            for (int quad = 0; quad < S::quads; ++quad) {
                float4& sum = sums[block][quad];
#pragma unroll
                for (int split = 0; split < T::splits; ++split) {
                    if ((split_mask >> split & 1) == 0) continue;
                    const float2 weight =
                        load_shared<float2>(at.weight(split, first_head + 8 * quad + 2 * (at.lane % 4)));
                    const float* part = outputs[split * S::dim_blocks + block] + 4 * quad;
                    sum.x += weight.x * part[0];
                    sum.y += weight.y * part[1];
                    sum.z += weight.x * part[2];
                    sum.w += weight.y * part[3];
                }
            }
        const Destination<T> to(params, at);
        store_all<T>(params, [&]<bool kPairs>() {
#pragma unroll
            for (int block = 0; block < S::dim_blocks; ++block)
#pragma unroll
                for (int quad = 0; quad < S::quads; ++quad)
                    store_quad<kPairs>(params, to, at.split * S::units_here + S::unit(at, block), first_head / 8 + quad,
                                       sums[block][quad]);
        });
    }
};

}  // namespace sparsemla::detail::latency
