// The steps of a chunk, as a warp that multiplies takes them one after the other: scores, softmax, values. Comments
// `//@ name` as in decode_latency.cu.
#pragma once

#include "cuda/decode_latency_ring.cuh"
#include "cuda/decode_latency_statistics.cuh"

namespace sparsemla::detail::latency {

/// A CTA's sums over its chunks.
template <class T>
struct Partial {
    Running running[T::heads_of_warp];  ///< of heads heads_of_warp * warp ..
    Outputs<T> outputs;                 ///< times p_scale, without k_scale (SourceChange says of which source)
    Anchors<T> anchors;                 ///< that the outputs are in units of
    float score_factor;                 ///< of the last chunk's source
    float p_scale;                      ///< of the last chunk: 0 where SourceChange says so
};

/// A warp's values of a chunk on their way to the tensor cores: as halves of two units, as bytes of the next two.
struct ValuesAhead {
    FragmentA values[2][4];
    ValueBytes bytes[2];
};

/// scores and softmax of one chunk; leaves the warp's values `ahead`, if they are needed.
template <class T>
__device__ void weigh_chunk(const Params& params, const Place<T>& at, int stage, Partial<T>& partial, bool needs_values,
                            ValuesAhead& ahead) {
    static_assert(T::units_of_warp == 4);
    // Values become halves beside the last scores; but those of blocks wait for the table of scales, and two sums of
    // many heads leave no registers for them.
    constexpr bool later = T::record.has_blocks() || (T::record.has_groups() && T::heads > 16);
    const auto prepare = [&] {
        if (!needs_values) return;
        for (int i = 0; i < 2; ++i) prepare_values(at, stage, i, ahead.bytes[i], partial.anchors, ahead.values[i]);
    };
    // Scales are found beside the last scores, too; the table of blocks later with 32 heads, where it would spill.
    WeightStore<T> weights;
    {
        float scores[T::heads / 2];
        compute_scores(at, stage, scores, [&] {
            weights.find_scales(at, stage, partial.anchors);
            if constexpr (T::record.has_blocks() && T::heads == 16) store_scale_table(at, stage, partial.anchors);
            if (!needs_values) return;
            for (int i = 0; i < 2; ++i) fetch_values(at, stage, i, ahead.bytes[i]);
            if constexpr (!later) prepare();
        });
        //@ scores
        store_scores(at, scores);
    }
    if constexpr (T::record.has_blocks() && T::heads > 16) store_scale_table(at, stage, partial.anchors);
    sync_multipliers();
    //@ stored
    const float p_scale = T::two_sources ? partial.p_scale : params.p_scale;
    partial.anchors.take(at, stage, weights.older);
    softmax(params, at, partial.score_factor, p_scale, stage, weights, partial.running);
    //@ softmax
    fence_async_proxy();
    if constexpr (later) prepare();
    if (needs_values)
        for (int i = 0; i < 2; ++i) fetch_values(at, stage, 2 + i, ahead.bytes[i]);
    sync_multipliers();  // P is there
    //@ values
}

/// values of one chunk: unit after unit, two under way; done(i) once unit i's sums are in registers. The last two are
/// left under way: until then neither their sums nor their values may be touched.
template <class T, class Done>
__device__ void start_values(const Place<T>& at, int stage, bool first, Partial<T>& partial, ValuesAhead& ahead,
                             const Done& done) {
    Outputs<T>& outputs = partial.outputs;
    const auto start = [&](int i) {
        pin(outputs[i]);
        start_unit<T>(at.weights_of_unit(i), outputs[i], ahead.values[i % 2], first);
    };
    start(0);
    start(1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        wait_for_mma<1>();
        pin(outputs[i]);
        prepare_values(at, stage, i + 2, ahead.bytes[i], partial.anchors, ahead.values[i]);
        if (i == 1) leave_stage(at, stage);
        start(i + 2);
        done(i);
    }
}

/// The same until all of them are done.
template <class T, class Done>
__device__ void add_values(const Place<T>& at, int stage, bool first, Partial<T>& partial, ValuesAhead& ahead,
                           const Done& done) {
    constexpr int count = T::units_of_warp;
    start_values(at, stage, first, partial, ahead, done);
    wait_for_mma<1>();
    pin(partial.outputs[count - 2]);
    done(count - 2);
    wait_for_mma<0>();
    pin(partial.outputs[count - 1]);
    done(count - 1);
}

}  // namespace sparsemla::detail::latency
