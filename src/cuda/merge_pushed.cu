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
constexpr int query_pieces_of_cta = query_pieces_of_thread * threads;

struct PushedParams {
    MailboxView mailbox;
    const float* sinks;
    std::int64_t sinks_stride;
    MergedOut to;
    std::int32_t rows;
    std::int32_t merging_ctas;         ///< the first ones; the others free the query's pieces
    std::int32_t freeing_ctas_of_row;  ///< of those
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

/// A (row, head) of this rank, by a warp. Code is short and has few branches: a kernel this small spends its time on
/// waiting for instructions, too.
struct PushedHead {
    const PushedParams& params;
    const MailboxView& mailbox;
    std::int64_t row;
    int head;
    int lane;
    std::uint32_t exchange = 0;              ///< once it is known
    uint4* values = nullptr;                 ///< of source 0 in the exchange, this lane's 16 bytes of the first half
    PushedValues incoming[sources_at_once];  ///< zeros of a source that does not count

    __device__ std::uint32_t* lse_piece(std::uint32_t of_exchange) const {
        return reinterpret_cast<std::uint32_t*>(own_mailbox(mailbox) + mailbox.lse_byte(of_exchange, lane, row, head));
    }
    __device__ std::int64_t values_of_source() const {  // from one to the next
        return std::int64_t{mailbox.rows} * mailbox.most_heads * (bytes_of_values / 16);
    }
    __device__ void enter(std::uint32_t of_exchange) {
        exchange = of_exchange;
        values = reinterpret_cast<uint4*>(own_mailbox(mailbox) + mailbox.values_byte(exchange, 0, row, head)) + lane;
    }

    /// Of source `lane`, -inf where there is none; `word` is what it held. False where one has not come in time.
    __device__ bool wait_for_lse(std::uint32_t word, WaitLimit& limit, float& lse) const {
        const bool came = wait_for(mailbox, lse_piece(exchange), word, limit);
        if (!came) fail(mailbox, DcpStage::merge, lane, row, exchange);
        lse = __uint_as_float(word);
        return __all_sync(all_lanes, came);
    }

    /// Of sources first .. that count, all under way at once.
    __device__ void ask_for_values(unsigned contributing, int first) {
#pragma unroll
        for (int i = 0; i < sources_at_once; ++i) {
            const bool counts = (contributing >> (first + i) & 1) != 0;
            const uint4* from = values + (first + i) * values_of_source();
            incoming[i].halves[0] = load_peer_if(counts, from);
            incoming[i].halves[1] = load_peer_if(counts, from + 32);
        }
    }
    __device__ bool wait_for_values(unsigned contributing, int first, WaitLimit& limit) {
        for (;;) {
            int missing = -1;
#pragma unroll
            for (int i = 0; i < sources_at_once; ++i)
                if (!has_arrived(incoming[i].halves[0]) || !has_arrived(incoming[i].halves[1])) missing = first + i;
            if (__all_sync(all_lanes, missing < 0)) return true;
            if (__any_sync(all_lanes, limit.passed(mailbox))) {
                if (missing >= 0) fail(mailbox, DcpStage::merge, missing, row, exchange);
                return false;
            }
            ask_for_values(contributing, first);
        }
    }

    /// Values of all sources in their order; the first ones have been asked for. False where some have not come in
    /// time.
    __device__ bool sum_values(const HeadWeights& weights, WaitLimit& limit, HeadSums& sums) {
        for (int first = 0;;) {
            if (!wait_for_values(weights.contributing, first, limit)) return false;
#pragma unroll
            for (int i = 0; i < sources_at_once; ++i) {
                float spread[dims_of_lane];
                incoming[i].spread(spread);
                sums.add(weights.weight(first + i), spread);
            }
            first += sources_at_once;
            if (first >= mailbox.world) return true;
            ask_for_values(weights.contributing, first);
        }
    }

    __device__ void free(const HeadWeights& weights) const {
#pragma unroll 1
        for (int source = 0; source < mailbox.world; ++source) {
            if (!weights.counts(source)) continue;
            store_peer(values + source * values_of_source(), armed_words());
            store_peer(values + source * values_of_source() + 32, armed_words());
        }
        if (lane < mailbox.world) store_peer(lse_piece(exchange), armed_word);
    }

    /// By each lane its dimensions.
    __device__ void store(const float (&sums)[dims_of_lane]) const {
        const std::int64_t to = params.to.element(row, head) + 8 * lane;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* eight = sums + 8 * half;
            const std::int64_t element = to + 256 * half;
            if (params.to.in_vectors && !params.to.is_f32) {
                *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(params.to.out) + element) = {
                    f32x2_to_bf16x2(eight[0], eight[1]), f32x2_to_bf16x2(eight[2], eight[3]),
                    f32x2_to_bf16x2(eight[4], eight[5]), f32x2_to_bf16x2(eight[6], eight[7])};
                continue;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) params.to.store(element + i, eight[i]);
        }
    }
};

/// Each load as soon as its address is known (the lse of both parities before the exchange's number is); what can be
/// found without the values, while they are on their way.
__device__ void merge_pushed_head(PushedHead& pushed) {
    const PushedParams& params = pushed.params;
    const MailboxView& mailbox = pushed.mailbox;
    const bool has_lse = pushed.lane < mailbox.world;
    const std::uint32_t even = has_lse ? load_peer(pushed.lse_piece(0)) : __float_as_uint(-INFINITY);
    const std::uint32_t odd = has_lse ? load_peer(pushed.lse_piece(1)) : __float_as_uint(-INFINITY);
    const bool has_sink = params.sinks != nullptr;
    const float sink = has_sink ? params.sinks[pushed.head * params.sinks_stride] : 0;
    const ExchangeState state(mailbox);
    pushed.enter(state.current);
    WaitLimit limit;
    HeadSums sums;
    float lse = -INFINITY;
    const bool failed = __any_sync(all_lanes, state.failed != 0);  // another CTA may set it between two lanes' looks
    bool came = !failed && pushed.wait_for_lse(state.current % 2 == 0 ? even : odd, limit, lse);
    pushed.ask_for_values(came ? __ballot_sync(all_lanes, lse != -INFINITY) : 0, 0);
    const HeadWeights weights(lse, mailbox.world, LseBase::two, has_sink, sink);
    float merged_lse = weights.merged_lse(LseBase::two, params.to.lse_base);
    sums.begin(weights);
    came = came && pushed.sum_values(weights, limit, sums);
    if (!came) merged_lse = merged_nan();
    if (!came || !weights.summary.defined)
        for (float& sum : sums.of) sum = merged_nan();
    pushed.store(sums.of);
    if (pushed.lane == 0) params.to.write_lse(pushed.row, pushed.head, merged_lse);
    if (came) pushed.free(weights);
}

/// Pieces of a row's query, which decode has read, or never will: those that it did not wait for may still be on their
/// way. By one of the CTAs that have the row.
__device__ void free_query(const PushedParams& params, const ExchangeState& state, int row, int cta_of_row) {
    const MailboxView& mailbox = params.mailbox;
    const int pieces = mailbox.query_head_bytes / 16, of_row = mailbox.heads * pieces;
    const int first = cta_of_row * query_pieces_of_cta + static_cast<int>(threadIdx.x);
    auto* from = reinterpret_cast<uint4*>(own_mailbox(mailbox) + mailbox.query_byte(state.current, row, 0)) + first;
    WaitLimit limit;
    for (;;) {
        int missing = -1;
#pragma unroll
        for (int i = 0; i < query_pieces_of_thread; ++i)
            if (first + i * threads < of_row && !has_arrived(load_peer(from + i * threads)))
                missing = first + i * threads;
        if (missing < 0) break;
        if (limit.passed(mailbox))
            return fail(mailbox, DcpStage::merge, mailbox.owner_of_head(missing / pieces), row, state.current);
    }
#pragma unroll
    for (int i = 0; i < query_pieces_of_thread; ++i)
        if (first + i * threads < of_row) store_peer(from + i * threads, armed_words());
}

__global__ void __launch_bounds__(threads) merge_mailbox(const __grid_constant__ PushedParams params) {
    const MailboxView& mailbox = params.mailbox;
    const int cta = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    launch_dependent_grids();
    wait_for_prerequisite_grids();
    delay(mailbox, DcpStage::merge, cta);
    if (cta >= params.merging_ctas) {
        const ExchangeState state(mailbox);
        const int number = cta - params.merging_ctas, row = number / params.freeing_ctas_of_row;
        if (state.failed == 0) free_query(params, state, row, number - row * params.freeing_ctas_of_row);
        return;
    }
    if (cta == 0 && thread == 0) {
        const ExchangeState state(mailbox);
        if (state.failed == 0) mailbox.control->next = state.current + 1;
    }
    const int number = cta * warps + thread / 32;
    if (number >= params.rows * mailbox.own_heads) return;
    PushedHead pushed{.params = params,
                      .mailbox = mailbox,
                      .row = number / mailbox.own_heads,
                      .head = number % mailbox.own_heads,
                      .lane = thread % 32};
    merge_pushed_head(pushed);
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
        .freeing_ctas_of_row = 0};
    const std::int64_t heads = call.rows * call.mailbox.own_heads;
    const int pieces_of_row = call.mailbox.heads * (call.mailbox.query_head_bytes / 16);
    params.merging_ctas = static_cast<std::int32_t>((heads + warps - 1) / warps);
    params.freeing_ctas_of_row = (pieces_of_row + query_pieces_of_cta - 1) / query_pieces_of_cta;
    const std::int64_t freeing_ctas = call.query_gathered ? call.rows * params.freeing_ctas_of_row : 0;
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
