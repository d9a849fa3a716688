// Partial results of one (row, head), merged by a warp: lane i knows the lse of partial i; each lane sums 16 of the 512
// dimensions. The arithmetic is merge_math.h's, with the GPU's operations.
#pragma once

#include "cuda/device/barriers.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/reduce.cuh"
#include "merge_math.h"

namespace sparsemla::detail {

/// Not fused by the compiler. On the host, where nvcc compiles the formulas too, nothing calls them.
struct RoundedOperations {
#ifdef __CUDA_ARCH__
    __device__ static float add(float a, float b) { return __fadd_rn(a, b); }
    __device__ static float multiply(float a, float b) { return __fmul_rn(a, b); }
    __device__ static float divide(float a, float b) { return __fdiv_rn(a, b); }
    __device__ static double add(double a, double b) { return __dadd_rn(a, b); }
    __device__ static double multiply(double a, double b) { return __dmul_rn(a, b); }
    __device__ static double divide(double a, double b) { return __ddiv_rn(a, b); }
#else
    template <class T>
    static T add(T a, T b) {
        return a + b;
    }
    template <class T>
    static T multiply(T a, T b) {
        return a * b;
    }
    template <class T>
    static T divide(T a, T b) {
        return a / b;
    }
#endif
};

/// What the lse of a head's partials say, of which lane i knows that of partial i, -inf where there is none. What a
/// lane can find by itself it finds while the others do; sums are those of MergeMath, in its order: a partial without
/// columns adds 0, which changes nothing.
struct HeadWeights {
    using Math = MergeMath<RoundedOperations>;

    unsigned contributing;  ///< bit i: partial i counts
    float own_weight;       ///< of partial `lane`; 0 where it does not count, -0 where another one passes unchanged
    MergeSummary summary;
    bool passes;  ///< the values of partial summary.last, unchanged

    /// With `has_sink` its sink, of natural base. Of at most 32 partials.
    __device__ HeadWeights(float lse, int partials, LseBase base, bool has_sink, float sink) {
        contributing = __ballot_sync(device::all_lanes, lse != -INFINITY);
        summary.defined = __all_sync(device::all_lanes, lse < INFINITY);  // false for NaN
        summary.contributors = __popc(contributing);
        summary.last = 31 - __clz(static_cast<int>(contributing));
        summary.peak = device::warp_max(lse);
        const float power = lse == -INFINITY ? 0.0F : Math::power(base, Math::add(lse, -summary.peak));
        for (int i = 0; i < partials; ++i)
            summary.sum = Math::add(summary.sum, __shfl_sync(device::all_lanes, power, i));
        const MergeSoftmax softmax = has_sink ? Math::softmax(summary, base, sink) : Math::softmax(summary);
        own_weight = has_sink ? Math::weight(base, lse, softmax) : RoundedOperations::divide(power, softmax.total);
        passes = summary.defined && Math::passes_through(summary, softmax);
        if (lse == -INFINITY) own_weight = passes ? -0.0F : 0.0F;
    }
    __device__ bool counts(int partial) const { return (contributing >> partial & 1) != 0; }
    __device__ float weight(int partial) const { return __shfl_sync(device::all_lanes, own_weight, partial); }
    __device__ float merged_lse(LseBase from, LseBase to) const { return Math::lse(summary, from, to); }
};

inline constexpr int dims_of_lane = 16;

/// A lane's sums.
struct HeadSums {
    float of[dims_of_lane] = {};

    /// Before the first values. Values 0 of a partial that does not count may be added: they change nothing. -0 + x is
    /// x for every x, -0 too.
    __device__ void begin(const HeadWeights& weights) {
#pragma unroll
        for (float& sum : of) sum = weights.passes ? -0.0F : 0.0F;
    }

    __device__ void add(float weight, const float (&values)[dims_of_lane]) {
#pragma unroll
        for (int i = 0; i < dims_of_lane; ++i) of[i] = __fadd_rn(of[i], __fmul_rn(weight, values[i]));
    }
};

__device__ inline float bf16_low(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float bf16_high(std::uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000); }

/// Of results that are not defined, or have not come.
__device__ inline float merged_nan() { return __uint_as_float(0x7FC00000); }

/// Where results of a head go.
struct MergedOut {
    void* out;
    float* lse;  ///< null: not wanted
    std::int64_t row_stride, head_stride, lse_row_stride, lse_head_stride;
    LseBase lse_base;
    bool is_f32;
    bool in_vectors = false;  ///< 16 bytes at a time

    __device__ std::int64_t element(std::int64_t row, int head) const { return row * row_stride + head * head_stride; }
    __device__ void write_lse(std::int64_t row, int head, float value) const {
        if (lse != nullptr) lse[row * lse_row_stride + head * lse_head_stride] = value;
    }
    __device__ void store(std::int64_t to, float value) const {
        if (is_f32)
            static_cast<float*>(out)[to] = value;
        else
            static_cast<std::uint16_t*>(out)[to] = static_cast<std::uint16_t>(device::f32x2_to_bf16x2(value, 0));
    }
};

}  // namespace sparsemla::detail
