// decode_latency: a cluster of S CTAs for each (row, tile of heads); chunk j of the row's lists belongs to CTA j % S.
//   gather    slots -> records in shared memory (cp.async, or a bulk copy a record); query heads -> halves
//   scores    K * Q^T by wgmma: 64 keys (a block) on M from registers, heads on N; a warpgroup half of the dimensions
//   softmax   a warp some heads: the halves' sum, maximum, P = p_scale * 2^(s - max) in its format
//   values    V^T * P by wgmma: a warpgroup's 256 dimensions (128 where a chunk has two blocks) on M, heads on N
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

__device__ inline int divide_by_splits(const Params& params, int number) {
    if (params.splits == 1) return number;
    return static_cast<int>(__umulhi(number, params.split_multiplier) >> params.split_shift);
}

/// Barriers whose numbers of arrivals no parameter changes: before any parameter is needed.
template <class T>
__device__ void init_barriers(const Place<T>& at) {
    if (threadIdx.x != 0) return;
    init_mbarrier(at.stats_barrier(), 1);
    init_mbarrier(at.outputs_barrier(), 1);
    init_mbarrier(at.slices_barrier(), arrivals_of_gather * helper_warps);
    init_mbarrier(at.first_barrier(), (arrivals_of_gather + 1) * T::warps);  // and each warp's part of the query
#pragma unroll
    for (int i = 0; i < max_stages; ++i) init_mbarrier(at.full(i), arrivals_of_gather * helper_warps);
    fence_mbarrier_init();
}

/// Who this CTA and this thread are.
template <class T>
__device__ void find_place(const Params& params, Place<T>& at) {
    at.stages = at.base + params.stages_offset;
    // Of the CTA's number in the grid and in the cluster; the special registers of clusters are slow divisions.
    at.splits = params.splits;
    at.tiles = params.tiles;
    const auto rank = static_cast<int>(cta_of_cluster());
    at.tile = divide_by_splits(params, rank);
    at.split = rank - at.tile * at.splits;
    at.row = divide_by_splits(params, static_cast<int>(blockIdx.x));
    at.first_head = static_cast<int>(blockIdx.y) * T::heads;
    at.warp = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 32), 0);  // uniform, and known to be
    at.lane = static_cast<int>(threadIdx.x % 32);
    // Here, before the dependency wait, and not once more after it.
    asm volatile(""
                 : "+r"(at.row), "+r"(at.split), "+r"(at.splits), "+r"(at.tile), "+r"(at.tiles), "+r"(at.first_head));
}

/// The other barriers, and arrival at the cluster: a peer's memory may be touched once the cluster has been waited for.
template <class T>
__device__ void set_up(const Params& params, const Place<T>& at) {
    if (threadIdx.x == 32 * T::warps) {
#pragma unroll
        for (int i = 0; i < max_stages; ++i) init_mbarrier(at.empty(i), T::warps * at.tiles);
        fence_mbarrier_init();
    }
    arrive_at_cluster();
    if (params.trigger == Trigger::start) launch_dependent_grids();
}

/// A peer's memory may be touched from here on. Once for each thread: where tiles share copies, before the first of
/// them; otherwise late, when nobody is still on the way. Not while loads are: it drops what the L1 waits for.
template <class T>
__device__ void join_cluster(const Place<T>& at, bool before_copies) {
    if (before_copies == (at.tiles > 1)) wait_for_cluster();
}

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

/// What the helpers gather: the blocks of all chunks of this CTA but the first, as stages become free. Slots are loaded
/// a block ahead. Returns the number of this CTA's blocks.
template <class T>
__device__ int gather_more(const Params& params, const Place<T>& at, const Columns& columns) {
    using P = Part<T, false>;
    int number = columns.next(at.split);
    if (!columns.has(number)) return 0;
    Turn stage, full;
    for (int i = 0; i < T::blocks; ++i) stage.advance(params.stages);
    int gathered = T::blocks;  // of the first chunk
    number = columns.next(number + at.splits);
    int of_block = 0;
    int slots[P::passes];
    if (columns.has(number)) load_slots<P>(params, at, number, 0, slots);
    while (columns.has(number)) {
        if (gathered >= params.stages) wait_until_empty(at, stage);
        gather_part<P>(params, at, columns, slots, number, of_block, stage.number, at.full(full.number));
        //@@ gathered
        stage.advance(params.stages);
        full.advance(params.stages);
        ++gathered;
        if (++of_block == T::blocks) {
            of_block = 0;
            number = columns.next(number + at.splits);
        }
        if (columns.has(number)) load_slots<P>(params, at, number, of_block, slots);
    }
    return gathered;
}

/// Peers that share copies arrive at the `empty` barriers of `blocks` blocks: this CTA must not end before the last
/// ones.
template <class T>
__device__ void wait_for_peers_to_leave(const Params& params, const Place<T>& at, int blocks) {
    if (at.tiles == 1) return;
    for (int i = max(0, blocks - params.stages); i < blocks; ++i)
        wait_mbarrier(at.empty(i % params.stages), static_cast<std::uint32_t>(i / params.stages) & 1);
}

/// visit.operator()<splits>().
template <class Visit>
__device__ void with_splits(int splits, const Visit& visit) {
    if (splits == 2) return visit.template operator()<2>();
    if (splits == 4) return visit.template operator()<4>();
    visit.template operator()<8>();
}

/// A CTA's sums over its chunks.
template <class T>
struct Partial {
    Running running[T::heads_of_warp];  ///< of heads heads_of_warp * warp ..
    Outputs<T> outputs;                 ///< times p_scale, without k_scale of the source of the last chunk
    Factors factors;                    ///< of that source
};

/// The products of values that a warp has of a chunk: of each unit one for each block.
template <class T>
struct ValueJobs {
    static constexpr int count = T::units_of_warp * T::blocks;
    static_assert(count == 4);
    __device__ static constexpr int unit(int job) { return job / T::blocks; }
    __device__ static constexpr int block(int job) { return job % T::blocks; }
};

template <class T>
__device__ void load_job(const Place<T>& at, const Stages<T>& stages, int job, FragmentA (&values)[2][4]) {
    load_values(at, stages[ValueJobs<T>::block(job)], at.unit(ValueJobs<T>::unit(job)), values[job % 2]);
}

/// scores and softmax of one chunk; leaves the values of the warp's first two jobs in registers, if they are needed.
template <class T>
__device__ void weigh_chunk(const Params& params, const Place<T>& at, const Stages<T>& stages, Partial<T>& partial,
                            bool needs_values, FragmentA (&values)[2][4]) {
    constexpr bool both_meanwhile = T::heads == 16 && T::blocks == 1;  // otherwise too few registers are left
    {
        float scores[T::heads / 2];
        // Constant indices: an array that is indexed at run time lies in memory.
        compute_scores(at, at.block_of_group() == 0 ? stages[0] : stages[T::blocks - 1], scores, [&] {
            if (!needs_values) return;
            load_job(at, stages, 0, values);
            if (both_meanwhile) load_job(at, stages, 1, values);
        });
        //@ scores
        store_scores(at, scores);
    }
    sync_multipliers<T>();
    //@ stored
    softmax(params, at, partial.factors.score, stages, partial.running);
    //@ softmax
    fence_async_proxy();
    if (!both_meanwhile && needs_values) load_job(at, stages, 1, values);
    sync_multipliers<T>();  // P is there
    //@ values
}

/// This warp reads the stage no more: lane t tells tile t's CTA, whose copies may be the next to fill it.
template <class T>
__device__ void leave_stage(const Place<T>& at, int stage) {
    __syncwarp();
    if (at.tiles == 1) {
        if (at.lane == 0) arrive(at.empty(stage));
    } else if (at.lane < at.tiles) {
        arrive_at_peer(map_to_cta(at.empty(stage), at.split + at.lane * at.splits));
    }
}

/// values of one chunk: job after job, two under way; done(i) once unit i's sums are in registers.
template <class T, class Done>
__device__ void add_values(const Place<T>& at, const Stages<T>& stages, bool first, Outputs<T>& outputs,
                           FragmentA (&values)[2][4], const Done& done) {
    using Jobs = ValueJobs<T>;
    const auto start = [&](int job) {
        const int unit = Jobs::unit(job), block = Jobs::block(job);
        if (block == 0) pin(outputs[unit]);
        start_unit<T>(at.p(block), outputs[unit], values[job % 2], first && block == 0);
    };
#pragma unroll
    for (int job = 0; job < 2; ++job) start(job);
#pragma unroll
    for (int job = 0; job < Jobs::count; ++job) {
        const int unit = Jobs::unit(job);
        const bool ends_unit = Jobs::block(job) + 1 == T::blocks;
        if (job + 1 < Jobs::count)
            wait_for_mma<1>();
        else
            wait_for_mma<0>();
        if (ends_unit) pin(outputs[unit]);
        if (job + 2 < Jobs::count) {
            load_job(at, stages, job + 2, values);
            if (Jobs::unit(job + 2) + 1 == T::units_of_warp) leave_stage(at, stages[Jobs::block(job + 2)]);
            start(job + 2);
        }
        if (ends_unit) done(unit);
    }
}

/// All chunks of this CTA but for the values of the last one, which is in `stages` then.
template <class T>
__device__ void add_chunks(const Params& params, const Place<T>& at, const Columns& columns, Partial<T>& partial,
                           FragmentA (&values)[2][4], Stages<T>& stages, bool& first) {
    int number = columns.next(at.split);
    bool second = T::two_sources && columns.is_second(number);
    partial.factors = second ? factors_of(params, params.sources[1]) : factors_of(params, params.sources[0]);
    Turn stage, full;
    wait_mbarrier(at.first_barrier(), 0);
    for (;;) {
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
#pragma unroll
        for (int& of_block : stages) {
            of_block = stage.number;
            stage.advance(params.stages);
        }
        weigh_chunk(params, at, stages, partial, !columns.weights_travel, values);
        if (!first) rescale_outputs<T>(at, partial.outputs, source_factor);
        number = columns.next(number + at.splits);
        if (!columns.has(number)) break;
        add_values<T>(at, stages, first, partial.outputs, values, [](int) {});
        first = false;
#pragma unroll
        for (int i = 0; i < T::blocks; ++i, full.advance(params.stages))
            wait_mbarrier(at.full(full.number), full.parity);
    }
    publish_sums<T>(at, partial.running);
}

/// merge of outputs, once this CTA has sent what it has.
template <class T>
__device__ void write_together(const Params& params, const Place<T>& at, const Columns& columns) {
    //@ sent
    if (params.trigger == Trigger::end) launch_dependent_grids();
    take<T>(Handover::weights);
    //@ weighed
    wait_mbarrier(at.outputs_barrier(), 0);
    __syncwarp();
    //@ arrived
    // Many splits leave a CTA few units: half a quad for each warp then. As many loads under way as registers allow.
    constexpr bool few_registers = T::blocks > 1;
    if (at.splits > 8)
        merge_units<T, 1, 1, few_registers ? 8 : 16>(params, at, columns.split_mask);
    else if (at.splits > 4)
        merge_units<T, 2, few_registers ? 1 : 2, 8>(params, at, columns.split_mask);
    else
        merge_units<T, 2, few_registers ? 2 : 4, 4>(params, at, columns.split_mask);
    //@ merged
    if (params.transport == Transport::bulk) {
        // A CTA's shared memory is the source of copies until its peers have them.
        arrive_at_cluster();
        wait_for_cluster();
    }
}

/// The last chunk's values and the exchange of outputs: each unit is sent while the next ones are multiplied.
template <class T>
__device__ void send_outputs(const Params& params, const Place<T>& at, const Stages<T>& stages, bool first,
                             Partial<T>& partial, FragmentA (&values)[2][4]) {
    const bool stores = params.transport != Transport::bulk;
    add_values<T>(at, stages, first, partial.outputs, values, [&](int i) {
        if (stores) send_unit<T>(params, at, at.unit(i), partial.outputs[i]);
    });
    //@ summed
    if (!stores) copy_outputs<T>(params, at, partial.outputs);
}

/// Values over all columns and merge, while the helpers exchange weights.
template <class T, int kSplits>
__device__ void write_by_weights(const Params& params, const Place<T>& at, const Columns& columns) {
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
    take<T>(Handover::weights);
    //@ multiplied
    product.store(params, at, columns.split_mask);
    //@ written
}

/// Before the dependency wait: addresses.
template <class T>
__device__ Inputs<T> find_inputs(const Params& params, const Place<T>& at) {
    Inputs<T> inputs;
    inputs.counts[0] = count_of_row(params.sources[0], at.row);
    inputs.counts[1] = T::two_sources ? count_of_row(params.sources[1], at.row) : nullptr;
    inputs.slot = at.multiplies()
                      ? slot_pointer(params, at, at.split,
                                     block_keys * Part<T, true>::block_of(at) + Part<T, true>::column(at, 0))
                      : nullptr;
    asm volatile("" : "+l"(inputs.counts[0]), "+l"(inputs.counts[1]), "+l"(inputs.slot));
#pragma unroll
    for (int group = 0; group < QueryLoader<T>::groups; ++group) {
        inputs.query[group] = at.multiplies() ? QueryLoader<T>::pointer(params, at, group) : nullptr;
        asm volatile("" : "+l"(inputs.query[group]));
    }
    return inputs;
}

/// The first chunk's records, and the query's heads as halves: `first_barrier` ends when both are there.
template <class T>
__device__ void bring_inputs(const Params& params, const Place<T>& at, const Columns& columns, int slot,
                             const QueryLoader<T>& query) {
    using P = Part<T, true>;
    static_assert(P::passes == 1);
    const int number = columns.next(at.split);
    int slots[1] = {slot};
    const int of_block = P::block_of(at);
    if (number != at.split) load_slots<P>(params, at, number, of_block, slots);
    gather_part<P>(params, at, columns, slots, number, of_block, of_block, at.first_barrier());
    //@ gathering
    query.store(at);
    fence_async_proxy();
    __syncwarp();
    if (at.lane == 0) arrive(at.first_barrier());
    join_cluster(at, false);
    //@ query
}

/// What the warps that multiply do.
template <class T>
__device__ void multiply(const Params& params, const Place<T>& at, const Columns& columns, int slot,
                         const QueryLoader<T>& query) {
    if (columns.split_mask == 0) return write_empty<T>(params, at);
    const bool sends = columns.has_split(at.split);
    const int senders = columns.num_splits();
    Partial<T> partial;
    FragmentA values[2][4];
    bool first = true;
    Stages<T> stages;
    if (sends) {
        bring_inputs(params, at, columns, slot, query);
        add_chunks(params, at, columns, partial, values, stages, first);
    } else {
        if (params.trigger == Trigger::loaded) launch_dependent_grids();
        join_cluster(at, false);
    }
    if constexpr (T::blocks == 1) {
        if (columns.weights_travel)
            return with_splits(at.splits, [&]<int kSplits>() { write_by_weights<T, kSplits>(params, at, columns); });
    }
    if (senders == 1) {
        add_values<T>(at, stages, first, partial.outputs, values, [](int) {});
        take<T>(Handover::weights);
        store_outputs<T>(params, at, partial.outputs);
        //@ alone
        return;
    }
    if (sends) send_outputs(params, at, stages, first, partial, values);
    write_together<T>(params, at, columns);
}

/// What the other warps do: gather what is not the first chunk, and find what each split is worth.
template <class T>
__device__ void help(const Params& params, const Place<T>& at, const Columns& columns) {
    if (columns.split_mask == 0) return;
    const bool together = columns.num_splits() > 1;
    if (at.helper() == 0 && at.lane == 0 && together)
        expect_partials(params, at, columns.weights_travel,
                        columns.num_splits() - (columns.has_split(at.split) ? 1 : 0));
    __syncwarp();
    join_cluster(at, false);
    if (columns.weights_travel) {
        // Bulk copies of the first chunk come later if these are under way beside them, and are needed before.
        if (params.gather == Gather::bulk && columns.has_split(at.split)) wait_mbarrier(at.first_barrier(), 0);
        __syncwarp();
        if constexpr (T::blocks == 1)
            with_splits(at.splits, [&]<int kSplits>() { gather_slices<T, kSplits>(params, at, columns); });
    }
    const int blocks = gather_more(params, at, columns);
    Statistics<T> statistics(params, at, columns);
    if (columns.has_split(at.split)) {
        take<T>(Handover::sums);
        //@@ sums
        if (columns.weights_travel) send_weights<T>(at);
        //@@ sent_weights
        statistics.send(at, together);
    }
    if (together) wait_mbarrier(at.stats_barrier(), 0);
    __syncwarp();
    //@@ stats
    statistics.weigh(params, at, columns);
    bring<T>(Handover::weights);
    //@@ helped
    if (!together || at.split == 0) statistics.write_lses(params, at);
    if (!columns.weights_travel) wait_for_peers_to_leave(params, at, blocks);  // otherwise nobody tells
}

template <class T>
__global__ void __launch_bounds__(T::threads, 1) decode(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    //@ entered
    Place<T> at;
    at.base = shared_address(shared);
    asm volatile("" : "+r"(at.base));  // computed once: in a cluster the address costs a special register
    init_barriers(at);
    find_place(params, at);
    set_up(params, at);
    const Inputs<T> inputs = find_inputs(params, at);
    __syncthreads();  // the barriers are there
    //@ start
    wait_for_prerequisite_grids();
    //@ waited
    join_cluster(at, true);
    const int slot = load_slot(inputs.slot);
    QueryLoader<T> query;
    query.load(at, inputs.query);
    const Columns columns = columns_of_row(params, inputs, at.lane, at.split);
    if (!columns.concern(at.split)) return;
    //@ counts
    if (at.multiplies()) {
        if (T::heads > 16) take_registers<216>();  // 8 warps of 216 and 4 of 72 are what 12 of 168 are
        multiply(params, at, columns, slot, query);
    } else {
        if (T::heads > 16) keep_registers<72>();
        help(params, at, columns);
    }
}

/// Calls visit(kernel) with the instantiation for these values. Throws Error (unsupported) where there is none.
template <class Visit>
void with_kernel(const Variant& variant, const Visit& visit) {
    const auto with_query = [&]<int kHeads, int kChunk, int kDqk, bool kTwoSources>() {
        variant.bf16_query ? visit(decode<Tile<kHeads, kDqk, Half::bf16, kTwoSources, kChunk>>)
                           : visit(decode<Tile<kHeads, kDqk, Half::f16, kTwoSources, kChunk>>);
    };
    const auto with_sources = [&]<int kHeads, int kChunk, int kDqk>() {
        variant.two_sources ? with_query.template operator()<kHeads, kChunk, kDqk, true>()
                            : with_query.template operator()<kHeads, kChunk, kDqk, false>();
    };
    const auto with_tile = [&]<int kHeads, int kChunk>() {
        variant.d_qk == 576 ? with_sources.template operator()<kHeads, kChunk, 576>()
                            : with_sources.template operator()<kHeads, kChunk, 512>();
    };
    if (variant.heads == 16 && variant.chunk == 64) return with_tile.template operator()<16, 64>();
    if (variant.heads == 16 && variant.chunk == 128) return with_tile.template operator()<16, 128>();
    if (variant.heads == 32 && variant.chunk == 64) return with_tile.template operator()<32, 64>();
    throw Error(ErrorKind::unsupported, "tile_heads and chunk", "16 and 64, 16 and 128, or 32 and 64 in this build",
                std::to_string(variant.heads) + " and " + std::to_string(variant.chunk));
}

}  // namespace

void prepare_kernel(const Variant& variant, std::size_t shared_bytes) {
    with_kernel(variant, [&](auto* kernel) { allow_launches(kernel, shared_bytes, "decode_latency"); });
}

void launch_kernel(const Variant& variant, const LaunchConfig& config, const Params& params) {
    with_kernel(variant, [&](auto* kernel) { launch(kernel, config, "decode_latency", params); });
}

}  // namespace sparsemla::detail::latency
