// merge_pushed on a GPU: what the ranks pushed into this rank's mailbox is waited for, merged and freed, by a warp for
// each (row, head); other CTAs free the query's pieces. docs/dcp.md says why that is when they may be.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/mailbox_wait.cuh"
#include "cuda/merge_head.cuh"
#include "cuda/verbs.h"
#include "gpu.h"

namespace sparsemla::detail {

namespace {

using namespace device;

constexpr int warps = 4;
constexpr int threads = 32 * warps;
constexpr int sources_at_once = 4;  ///< whose values a lane has under way
constexpr int query_pieces_of_thread = 4;

struct PushedParams {
    MailboxView mailbox;
    const float* sinks;
    std::int64_t sinks_stride;
    MergedOut to;
    std::int32_t rows;
    std::int32_t merging_ctas;   ///< the first ones; the others free the query's pieces
    std::int32_t query_threads;  ///< of those
};

/// Dimensions 8 * lane .. of each half of a head.
struct PushedValues {
    uint4 halves[2];

    __device__ void spread(float (&values)[dims_of_lane]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const std::uint32_t words[4] = {halves[half].x, halves[half].y, halves[half].z, halves[half].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[8 * half + 2 * i] = bf16_low(words[i]);
                values[8 * half + 2 * i + 1] = bf16_high(words[i]);
            }
        }
    }
};

/// A (row, head) of this rank, by a warp.
struct PushedHead {
    const PushedParams& params;
    const MailboxView& mailbox;
    std::uint32_t exchange;
    std::int64_t row;
    int head;
    int lane;

    __device__ std::uint32_t* lse_piece() const {
        return reinterpret_cast<std::uint32_t*>(own_mailbox(mailbox) + mailbox.lse_byte(exchange, lane, row, head));
    }
    __device__ uint4* values_piece(int source, int half) const {
        return reinterpret_cast<uint4*>(own_mailbox(mailbox) + mailbox.values_byte(exchange, source, row, head)) +
               32 * half + lane;
    }

    /// Of source `lane`. False where one has not come in time.
    __device__ bool wait_for_lse(WaitLimit& limit, float& lse) const {
        std::uint32_t word = __float_as_uint(-INFINITY);
        bool came = true;
        if (lane < mailbox.world) {
            word = load_peer(lse_piece());
            came = wait_for(mailbox, lse_piece(), word, limit);
            if (!came) fail(mailbox, DcpStage::merge, lane, row, exchange);
        }
        lse = __uint_as_float(word);
        return __all_sync(all_lanes, came);
    }

    /// Of sources first .. that count, all under way at once.
    __device__ bool wait_for_values(const HeadWeights& weights, int first, WaitLimit& limit,
                                    PushedValues (&values)[sources_at_once]) const {
        bool wanted[sources_at_once];
#pragma unroll
        for (int i = 0; i < sources_at_once; ++i) {
            wanted[i] = first + i < mailbox.world && weights.counts(first + i);
            if (!wanted[i]) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half) values[i].halves[half] = load_peer(values_piece(first + i, half));
        }
        bool came = true;
#pragma unroll
        for (int i = 0; i < sources_at_once; ++i) {
            if (!wanted[i] || !came) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                came = came && wait_for(mailbox, values_piece(first + i, half), values[i].halves[half], limit);
            if (!came) fail(mailbox, DcpStage::merge, first + i, row, exchange);
        }
        return __all_sync(all_lanes, came);
    }

    __device__ void free(const HeadWeights& weights) const {
        for (int source = 0; source < mailbox.world; ++source) {
            if (!weights.counts(source)) continue;
            *values_piece(source, 0) = armed_words;
            *values_piece(source, 1) = armed_words;
        }
        if (lane < mailbox.world) *lse_piece() = armed_word;
    }

    __device__ void store(const PushedValues& values) const {
        const std::int64_t to = params.to.element(row, head) + 8 * lane;
        if (!params.to.is_f32 && params.to.in_vectors) {
            auto* out = reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(params.to.out) + to);
            out[0] = values.halves[0];
            out[32] = values.halves[1];
            return;
        }
        float spread[dims_of_lane];
        values.spread(spread);
        store(spread);
    }
    __device__ void store(const float (&sums)[dims_of_lane]) const {
        const std::int64_t to = params.to.element(row, head) + 8 * lane;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                const float* four = sums + 8 * half + i;
                const std::int64_t element = to + 256 * half + i;
                if (params.to.is_f32 && params.to.in_vectors) {
                    *reinterpret_cast<float4*>(static_cast<float*>(params.to.out) + element) = {four[0], four[1],
                                                                                                four[2], four[3]};
                } else if (params.to.in_vectors) {
                    *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(params.to.out) + element) = {
                        f32x2_to_bf16x2(four[0], four[1]), f32x2_to_bf16x2(four[2], four[3])};
                } else {
                    for (int j = 0; j < 4; ++j) params.to.store(element + j, four[j]);
                }
            }
    }
    __device__ void store_nan() const {
        float sums[dims_of_lane];
        for (float& sum : sums) sum = merged_nan();
        store(sums);
        if (lane == 0) params.to.write_lse(row, head, merged_nan());
    }

    /// Values of all sources in their order. False where some have not come in time.
    __device__ bool merge_values(const HeadWeights& weights, WaitLimit& limit) const {
        HeadSums sums;
        for (int first = 0; first < mailbox.world; first += sources_at_once) {
            PushedValues values[sources_at_once];
            if (!wait_for_values(weights, first, limit, values)) return false;
#pragma unroll
            for (int i = 0; i < sources_at_once; ++i) {
                if (first + i >= mailbox.world || !weights.counts(first + i)) continue;
                if (weights.passes) {
                    store(values[i]);
                    return true;
                }
                float spread[dims_of_lane];
                values[i].spread(spread);
                sums.add(weights.weight(first + i), spread);
            }
        }
        if (!weights.summary.defined)
            for (float& sum : sums.of) sum = merged_nan();
        store(sums.of);
        return true;
    }
};

__device__ void merge_pushed_head(const PushedHead& pushed, bool failed) {
    const PushedParams& params = pushed.params;
    const bool has_sink = params.sinks != nullptr;
    const float sink = has_sink ? params.sinks[pushed.head * params.sinks_stride] : 0;
    WaitLimit limit;
    float lse = -INFINITY;
    if (failed || !pushed.wait_for_lse(limit, lse)) return pushed.store_nan();
    const HeadWeights weights(lse, pushed.mailbox.world, LseBase::two, has_sink, sink);
    if (!pushed.merge_values(weights, limit)) return pushed.store_nan();
    if (pushed.lane == 0) params.to.write_lse(pushed.row, pushed.head, weights.merged_lse(params.to.lse_base));
    pushed.free(weights);
}

/// Pieces of the query, which decode has read, or never will: those that it did not wait for may still be on their way.
__device__ void free_query(const PushedParams& params, std::uint32_t exchange, int first) {
    const MailboxView& mailbox = params.mailbox;
    const int pieces = mailbox.query_head_bytes / 16;
    const int of_row = mailbox.heads * pieces, all = params.rows * of_row;
    uint4 words[query_pieces_of_thread];
    uint4* from[query_pieces_of_thread];
#pragma unroll
    for (int i = 0; i < query_pieces_of_thread; ++i) {
        const int number = first + i * params.query_threads;
        const int row = number / of_row, piece = number % of_row;
        from[i] = reinterpret_cast<uint4*>(own_mailbox(mailbox) + mailbox.query_byte(exchange, row, 0)) + piece;
        if (number < all) words[i] = load_peer(from[i]);
    }
    WaitLimit limit;
#pragma unroll
    for (int i = 0; i < query_pieces_of_thread; ++i) {
        const int number = first + i * params.query_threads;
        if (number >= all) break;
        if (!wait_for(mailbox, from[i], words[i], limit))
            return fail(mailbox, DcpStage::merge, mailbox.owner_of_head(number % of_row / pieces), number / of_row,
                        exchange);
        *from[i] = armed_words;
    }
}

__global__ void __launch_bounds__(threads) merge_mailbox(const __grid_constant__ PushedParams params) {
    const MailboxView& mailbox = params.mailbox;
    const int cta = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    launch_dependent_grids();
    wait_for_prerequisite_grids();
    const ExchangeState state(mailbox);
    delay(mailbox, DcpStage::merge, cta);
    if (cta >= params.merging_ctas) {
        if (state.failed == 0) free_query(params, state.current, (cta - params.merging_ctas) * threads + thread);
        return;
    }
    if (cta == 0 && thread == 0 && state.failed == 0) mailbox.control->next = state.current + 1;
    const int number = cta * warps + thread / 32;
    if (number >= params.rows * mailbox.own_heads) return;
    merge_pushed_head({.params = params,
                       .mailbox = mailbox,
                       .exchange = state.current,
                       .row = number / mailbox.own_heads,
                       .head = number % mailbox.own_heads,
                       .lane = thread % 32},
                      state.failed != 0);
}

bool in_vectors(const void* out, DType dtype, std::int64_t row_stride, std::int64_t head_stride) {
    const std::int64_t bytes = size_bytes(dtype);
    return reinterpret_cast<std::uintptr_t>(out) % 16 == 0 && row_stride * bytes % 16 == 0 &&
           head_stride * bytes % 16 == 0;
}

}  // namespace

void merge_pushed_gpu(const MergePushedParams& call, int device, Stream stream) {
    const CurrentDevice current(device);
    PushedParams params{
        .mailbox = call.mailbox,
        .sinks = call.sinks,
        .sinks_stride = call.sinks_stride,
        .to = {.out = call.out,
               .lse = call.lse,
               .row_stride = call.out_row_stride,
               .head_stride = call.out_head_stride,
               .lse_row_stride = call.lse_row_stride,
               .lse_head_stride = call.lse_head_stride,
               .lse_base = call.lse_base,
               .is_f32 = call.out_dtype == DType::f32,
               .in_vectors = in_vectors(call.out, call.out_dtype, call.out_row_stride, call.out_head_stride)},
        .rows = static_cast<std::int32_t>(call.rows),
        .merging_ctas = 0,
        .query_threads = 0};
    const std::int64_t heads = call.rows * call.mailbox.own_heads;
    const std::int64_t pieces =
        call.query_gathered ? call.rows * call.mailbox.heads * (call.mailbox.query_head_bytes / 16) : 0;
    const std::int64_t freeing_ctas =
        (pieces + query_pieces_of_thread * threads - 1) / (query_pieces_of_thread * threads);
    params.merging_ctas = static_cast<std::int32_t>((heads + warps - 1) / warps);
    params.query_threads = static_cast<std::int32_t>(freeing_ctas * threads);
    launch(merge_mailbox,
           {.grid = dim3(static_cast<unsigned>(params.merging_ctas + freeing_ctas)),
            .threads = threads,
            .stream = static_cast<cudaStream_t>(stream.handle)},
           "merge_pushed", params);
}

void prepare_merge_pushed() {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, merge_mailbox), "merge_pushed");
}

}  // namespace sparsemla::detail
