// decode_latency: a cluster of S CTAs for each (row, tile of heads); chunk j of the row's lists belongs to CTA j % S.
//   gather    slots -> records in shared memory (cp.async, or a bulk copy a record); query heads -> halves
//   scores    K * Q^T by wgmma: 64 keys on M from registers, heads on N; each warpgroup half of the dimensions
//   softmax   a warp some heads: the halves' sum, maximum, P = p_scale * 2^(s - max) in its format
//   values    V^T * P by wgmma: a warpgroup's 256 dimensions on M, heads on N
//   exchange  maxima and sums to all CTAs, partial outputs to the CTA that merges those dimensions
//   merge     in split order, one rounding
// Where no split of a row has more than one chunk, `exchange` may come before `values` (Transport::weights): P goes to
// all CTAs, and each computes its own dimensions over all columns, from slices of the others' records.
// E4M3 codes become halves, which hold them exactly: products are exact and sums FP32. Comments `//@ name` mark stages
// for bench/stage_cycles.cpp.
#include "cuda/decode_latency_chunk.cuh"
#include "cuda/decode_latency_gather.cuh"
#include "cuda/decode_latency_merge.cuh"
#include "cuda/launch.h"

#include <string>

namespace sparsemla::detail::latency {

namespace {

template <class T>
__device__ Place<T> place_of(const Params& params, unsigned char* shared) {
    Place<T> at;
    at.base = shared_address(shared);
    asm volatile("" : "+r"(at.base));  // computed once: in a cluster the address costs a special register
    at.stages = at.base + params.stages_offset;
    at.row = static_cast<int>(cluster_of_grid_x());
    at.first_head = static_cast<int>(blockIdx.y) * T::heads;
    at.split = static_cast<int>(cta_of_cluster_x());
    at.tile = static_cast<int>(cta_of_cluster_y());
    at.tiles = params.tiles;
    at.warp = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 32), 0);  // uniform, and known to be
    at.lane = static_cast<int>(threadIdx.x % 32);
    at.splits = params.splits;
    asm volatile("" : "+r"(at.splits));
    return at;
}

/// Barriers, and arrival at the cluster: before it touches a peer's memory, a thread waits for the cluster
/// (join_cluster).
template <class T>
__device__ void set_up(const Params& params, const Place<T>& at) {
    if (threadIdx.x == 0) {
        init_mbarrier(at.stats_barrier(), 1);
        init_mbarrier(at.outputs_barrier(), 1);
        init_mbarrier(at.slices_barrier(), 33 * T::gatherers);
        for (int stage = 0; stage < params.stages; ++stage) {
            // Of each gather warp one arrival, and those of its lanes' copies.
            init_mbarrier(at.full(stage), (params.gather == Gather::copies ? 33 : 1) * T::gatherers);
            init_mbarrier(at.empty(stage), warps * params.tiles);
        }
        fence_mbarrier_init();
    }
    arrive_at_cluster();
    if (params.trigger == Trigger::start) launch_dependent_grids();
}

/// All barriers of the cluster are there. Once for each thread: where tiles share copies, before the first of them;
/// otherwise late, when nobody is still on the way.
template <class T>
__device__ void join_cluster(const Place<T>& at, bool before_copies) {
    if (before_copies == (at.tiles > 1)) wait_for_cluster();
}

/// Stages in turn: the number of a chunk's stage, and the phase of its barriers.
struct Turn {
    int stage = 0;
    std::uint32_t parity = 0;

    __device__ void advance(int stages) {
        if (++stage < stages) return;
        stage = 0;
        parity ^= 1;
    }
};

/// The stage's last use is over, in every CTA that its records go to.
template <class T>
__device__ void wait_until_empty(const Place<T>& at, const Turn& turn) {
    wait_mbarrier(at.empty(turn.stage), turn.parity ^ 1);
    fence_async_proxy();  // zeros of absent records before, bulk copies after
}

/// visit.operator()<splits>().
template <class Visit>
__device__ void with_splits(int splits, const Visit& visit) {
    if (splits == 2) return visit.template operator()<2>();
    if (splits == 4) return visit.template operator()<4>();
    visit.template operator()<8>();
}

/// What the warps that gather do: all chunks of this CTA, as stages become free. Slots are loaded a chunk ahead; `slot`
/// is that of the first chunk unless the counts say otherwise.
template <class T>
__device__ void gather_chunks(const Params& params, const Place<T>& at, const Columns& columns, int slot) {
    if (!T::one_chunk) join_cluster(at, true);
    Turn turn;
    int gathered = 0;
    int number = columns.next(at.split);
    if (number != at.split && columns.has(number)) slot = load_slot(slot_pointer(params, at, number));
    for (; columns.has(number); ++gathered) {
        if (!T::one_chunk && gathered >= params.stages) wait_until_empty(at, turn);
        gather_chunk(params, at, columns, slot, number, turn.stage);
        //@@ gathering
        if (T::one_chunk) break;
        number = columns.next(number + at.splits);
        if (columns.has(number)) slot = load_slot(slot_pointer(params, at, number));
        turn.advance(params.stages);
    }
    if (columns.weights_travel)
        with_splits(at.splits, [&]<int kSplits>() { gather_slices<T, kSplits>(params, at, columns); });
    // Peers may still arrive at these barriers: this CTA must not end before.
    if (T::one_chunk || params.tiles == 1) return;
    if (gathered < params.stages) turn = {.stage = 0, .parity = 1};
    for (int i = min(gathered, params.stages); i > 0; --i, turn.advance(params.stages)) wait_until_empty(at, turn);
}

/// A CTA's sums over its chunks.
template <class T>
struct Partial {
    Running running[T::heads_of_warp];  ///< of heads heads_of_warp * warp ..
    Outputs<T> outputs;                 ///< times p_scale, without k_scale of the source of the last chunk
    Factors factors;                    ///< of that source
};

/// scores and softmax of one chunk; leaves the values of the warp's first two units in registers, if they are needed.
template <class T>
__device__ void weigh_chunk(const Params& params, const Place<T>& at, int stage, Partial<T>& partial, bool needs_values,
                            FragmentA (&values)[2][4]) {
    constexpr bool both_meanwhile = T::heads == 16;  // more heads leave too few registers
    {
        float scores[T::heads / 2];
        compute_scores(at, stage, scores, [&] {
            if (!needs_values) return;
            load_values(at, stage, at.unit(0), values[0]);
            if (both_meanwhile) load_values(at, stage, at.unit(1), values[1]);
        });
        //@ scores
        store_scores(at, scores);
    }
    sync_multipliers();
    //@ stored
    softmax(params, at, partial.factors.score, stage, partial.running);
    //@ softmax
    fence_async_proxy();
    if (!both_meanwhile && needs_values) load_values(at, stage, at.unit(1), values[1]);
    sync_multipliers();  // P is there
    //@ values
}

/// This warp reads the stage no more: lane t tells tile t's CTA, whose copies may be the next to fill it.
template <class T>
__device__ void leave_stage(const Place<T>& at, int stage) {
    if (T::one_chunk) return;
    __syncwarp();
    if (at.tiles == 1) {
        if (at.lane == 0) arrive(at.empty(stage));
    } else if (at.lane < at.tiles) {
        arrive_at_peer(map_to_cta(at.empty(stage), at.split + at.lane * at.splits));
    }
}

/// values of one chunk: unit after unit, two under way; done(i) once unit i's sums are in registers.
template <class T, class Done>
__device__ void add_values(const Place<T>& at, int stage, bool first, Outputs<T>& outputs, FragmentA (&values)[2][4],
                           const Done& done) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        pin(outputs[i]);
        start_values<T>(at, outputs[i], values[i], first);
    }
#pragma unroll
    for (int i = 0; i < units_of_warp; ++i) {
        if (i + 1 < units_of_warp)
            wait_for_mma<1>();
        else
            wait_for_mma<0>();
        pin(outputs[i]);
        if (i + 2 < units_of_warp) {
            load_values(at, stage, at.unit(i + 2), values[i % 2]);
            if (i + 3 == units_of_warp) leave_stage(at, stage);
            pin(outputs[i + 2]);
            start_values<T>(at, outputs[i + 2], values[i % 2], first);
        }
        done(i);
    }
}

/// All chunks of this CTA but for the values of the last one; returns its stage.
template <class T>
__device__ int add_chunks(const Params& params, const Place<T>& at, const Columns& columns, Partial<T>& partial,
                          FragmentA (&values)[2][4], bool& first) {
    int number = columns.next(at.split);
    bool second = T::two_sources && columns.is_second(number);
    partial.factors = second ? factors_of(params, params.sources[1]) : factors_of(params, params.sources[0]);
    for (Turn turn;; turn.advance(params.stages)) {
        wait_mbarrier(at.full(turn.stage), turn.parity);
        __syncwarp();
        //@ loaded
        if (params.trigger == Trigger::loaded) launch_dependent_grids();
        float source_factor = 1.0F;
        if (T::two_sources && columns.is_second(number) != second) {
            second = true;
            const Factors factors = factors_of(params, params.sources[1]);
            source_factor = partial.factors.values * reciprocal_approximate(factors.values);
            partial.factors = factors;
        }
        weigh_chunk(params, at, turn.stage, partial, !columns.weights_travel, values);
        if (!first) rescale_outputs<T>(at, partial.outputs, source_factor);
        if (T::one_chunk) return turn.stage;
        number = columns.next(number + at.splits);
        if (!columns.has(number)) return turn.stage;
        add_values<T>(at, turn.stage, first, partial.outputs, values, [](int) {});
        first = false;
    }
}

/// The row has one split with columns: no exchange.
template <class T>
__device__ void write_alone(const Params& params, const Place<T>& at, const Columns& columns, Partial<T>& partial) {
    sum_lanes<T>(partial.running);
    if (at.lane < T::heads_of_warp) {
        const float2 stats = stats_of_lane<T>(partial.running, at.lane);
        store_shared(at.stats(at.split, T::heads_of_warp * at.warp + at.lane), stats.x, stats.y);
    }
    __syncwarp();
    weigh_splits(params, at, columns, true);
    sync_multipliers();
    store_outputs<T>(params, at, partial.outputs);
    //@ alone
}

/// merge, once this CTA has sent what it has.
template <class T>
__device__ void write_together(const Params& params, const Place<T>& at, const Columns& columns) {
    //@ sent
    if (params.trigger == Trigger::end) launch_dependent_grids();
    wait_mbarrier(at.stats_barrier(), 0);
    __syncwarp();
    //@ stats
    weigh_splits(params, at, columns, at.split == 0);
    sync_multipliers();
    wait_mbarrier(at.outputs_barrier(), 0);
    //@ arrived
    merge_units<T>(params, at, columns.splits);
    //@ merged
    if (params.transport == Transport::bulk) {
        // A CTA's shared memory is the source of copies until its peers have them.
        arrive_at_cluster();
        wait_for_cluster();
    }
}

/// The last chunk's values and the exchange: each unit is sent while the next ones are multiplied.
template <class T>
__device__ void exchange(const Params& params, const Place<T>& at, int stage, bool first, Partial<T>& partial,
                         FragmentA (&values)[2][4]) {
    const bool stores = params.transport == Transport::stores;
    add_values<T>(at, stage, first, partial.outputs, values, [&](int i) {
        if (i == 0) {
            sum_lanes<T>(partial.running);
            join_cluster(at, false);
            send_stats<T>(params, at, partial.running);
            //@ sent_stats
        }
        if (stores) send_unit<T>(params, at, at.unit(i), partial.outputs[i]);
    });
    //@ summed
    if (!stores) copy_outputs<T>(params, at, partial.outputs);
}

/// exchange, values and merge of Transport::weights. `sends`: this CTA has a chunk, in the first stage.
template <class T, int kSplits>
__device__ void write_by_weights(const Params& params, const Place<T>& at, const Columns& columns, bool sends,
                                 Running (&running)[T::heads_of_warp]) {
    if (sends) {
        send_weights<T, kSplits>(at);
        sum_lanes<T>(running);
        send_stats<T>(params, at, running);
    }
    //@ sent_weights
    if (params.trigger == Trigger::end) launch_dependent_grids();
    wait_mbarrier(at.slices_barrier(), 0);
    __syncwarp();
    //@ slices
    SlicesProduct<T, kSplits> product;
    product.load_first(at);
    wait_mbarrier(at.outputs_barrier(), 0);
    __syncwarp();
    //@ weights
    fence_async_proxy();
    product.start_all(at);
    if (sends) leave_stage(at, 0);
    wait_mbarrier(at.stats_barrier(), 0);
    __syncwarp();
    weigh_splits(params, at, columns, at.split == 0);
    sync_multipliers();
    //@ weighed
    product.store(params, at, columns.splits);
    //@ written
}

/// Before the dependency wait: addresses, and every line of the parameters into the constant cache.
template <class T>
__device__ Inputs<T> find_inputs(const Params& params, const Place<T>& at) {
    Inputs<T> inputs;
    inputs.counts[0] = count_of_row(params.sources[0], at.row);
    inputs.counts[1] = T::two_sources ? count_of_row(params.sources[1], at.row) : nullptr;
    inputs.slot = at.gathers() ? slot_pointer(params, at, at.split) : nullptr;
    inputs.query = at.multiplies() ? QueryLoader<T>::pointer(params, at, 0) : nullptr;
    asm volatile("" : "+l"(inputs.counts[0]), "+l"(inputs.counts[1]), "+l"(inputs.slot), "+l"(inputs.query));
    asm volatile("" ::"l"(params.out), "l"(params.sinks), "r"(params.units_of_cta), "l"(params.lse_head_stride));
    return inputs;
}

/// What the warps that multiply do.
template <class T>
__device__ void multiply(const Params& params, const Place<T>& at, const Columns& columns, QueryLoader<T>& query) {
    if (columns.splits == 0) return write_empty<T>(params, at);
    const bool sends = columns.has_split(at.split);
    const int senders = columns.num_splits();
    if (threadIdx.x == 0 && senders > 1) expect_partials(params, at, columns.weights_travel, senders - (sends ? 1 : 0));
    if (!T::one_chunk) join_cluster(at, true);
    Partial<T> partial;
    FragmentA values[2][4];
    bool first = true;
    int stage = 0;
    if (sends) {
        query.store_all(params, at);
        fence_async_proxy();
        sync_multipliers();  // the query is there
        //@ query
        stage = add_chunks(params, at, columns, partial, values, first);
    }
    if (columns.weights_travel) {
        join_cluster(at, false);
        return with_splits(at.splits, [&]<int kSplits>() {
            write_by_weights<T, kSplits>(params, at, columns, sends, partial.running);
        });
    }
    if (senders == 1) {
        add_values<T>(at, stage, first, partial.outputs, values, [](int) {});
        return write_alone(params, at, columns, partial);
    }
    if (sends)
        exchange(params, at, stage, first, partial, values);
    else
        join_cluster(at, false);
    write_together<T>(params, at, columns);
}

template <class T>
__global__ void __launch_bounds__(threads(T::one_chunk), 1) decode(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Place<T> at = place_of<T>(params, shared);
    set_up(params, at);
    const Inputs<T> inputs = find_inputs(params, at);
    __syncthreads();  // the barriers are there
    //@ start
    wait_for_prerequisite_grids();
    //@ waited
    const int slot = load_slot(inputs.slot);
    QueryLoader<T> query;
    query.load(at, inputs.query);
    const Columns columns = columns_of_row(params, inputs, at.lane, at.split);
    if (!columns.concern(at.split)) return;
    //@ counts
    if constexpr (T::one_chunk) {
        join_cluster(at, true);
        gather_chunks(params, at, columns, slot);
        multiply(params, at, columns, query);
    } else if (at.gathers()) {
        if (T::heads > 16) keep_registers<40>();
        gather_chunks(params, at, columns, slot);
    } else {
        if (T::heads > 16) take_registers<232>();  // 4 warps of 40 and 8 of 232 are what 12 of 168 are
        multiply(params, at, columns, query);
    }
}

/// Calls visit(kernel) with the instantiation for these values. Throws Error (unsupported) where there is none.
template <class Visit>
void with_kernel(const Variant& variant, const Visit& visit) {
    const auto with_chunks = [&]<int kHeads, int kDqk, Half kQuery, bool kTwoSources>() {
        variant.one_chunk ? visit(decode<Tile<kHeads, kDqk, kQuery, kTwoSources, true>>)
                          : visit(decode<Tile<kHeads, kDqk, kQuery, kTwoSources, false>>);
    };
    const auto with_query = [&]<int kHeads, int kDqk, bool kTwoSources>() {
        variant.bf16_query ? with_chunks.template operator()<kHeads, kDqk, Half::bf16, kTwoSources>()
                           : with_chunks.template operator()<kHeads, kDqk, Half::f16, kTwoSources>();
    };
    const auto with_sources = [&]<int kHeads, int kDqk>() {
        variant.two_sources ? with_query.template operator()<kHeads, kDqk, true>()
                            : with_query.template operator()<kHeads, kDqk, false>();
    };
    const auto with_heads = [&]<int kHeads>() {
        variant.d_qk == 576 ? with_sources.template operator()<kHeads, 576>()
                            : with_sources.template operator()<kHeads, 512>();
    };
    switch (variant.heads) {
        case 16: return with_heads.template operator()<16>();
        case 32: return with_heads.template operator()<32>();
        default:
            throw Error(ErrorKind::unsupported, "tile_heads", "16 or 32 in this build", std::to_string(variant.heads));
    }
}

}  // namespace

void prepare_kernel(const Variant& variant, std::size_t shared_bytes) {
    with_kernel(variant, [&](auto* kernel) { allow_launches(kernel, shared_bytes, "decode_latency"); });
}

void launch_kernel(const Variant& variant, const LaunchConfig& config, const Params& params) {
    with_kernel(variant, [&](auto* kernel) { launch(kernel, config, "decode_latency", params); });
}

}  // namespace sparsemla::detail::latency
