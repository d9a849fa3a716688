// The kernel decode_latency: a cluster of S CTAs for each (row, tile of heads); chunk j of the row's lists belongs to
// CTA j % S.
//   gather    slots -> records in shared memory (cp.async, or a bulk copy a record); query heads -> halves
//   scores    K * Q^T by wgmma: 64 keys on M from registers, heads on N; a warpgroup half of the dimensions
//   softmax   a warp some heads: the halves' sum, maximum, P = p_scale * 2^(s - max) in its format
//   values    V^T * P by wgmma: a warpgroup's 256 dimensions on M, heads on N
//   exchange  maxima and sums to all CTAs, partial outputs to the CTA that merges those dimensions
//   merge     in split order, one rounding
// Where no split of a row has more than one chunk, `exchange` may come before `values` (Transport::weights): P goes to
// all CTAs, and each computes its own dimensions over all columns, from slices of the others' records.
// E4M3 codes become halves, which hold them exactly: products are exact and sums FP32. Comments `//@ name` (and `//@@`
// for the helpers) here and in decode_latency_multiply.cuh mark what bench/stage_cycles.cpp times.
#pragma once

#include "cuda/decode_latency_chunk.cuh"
#include "cuda/decode_latency_merge.cuh"
#include "cuda/decode_latency_multiply.cuh"
#include "cuda/decode_latency_records.cuh"
#include "cuda/decode_latency_ring.cuh"
#include "cuda/decode_latency_setup.cuh"
#include "cuda/decode_latency_statistics.cuh"
#include "cuda/decode_latency_weights.cuh"

namespace sparsemla::detail::latency {

namespace {

/// What the helpers gather: all chunks of this CTA but the first, as stages become free. Slots are loaded a chunk
/// ahead. Returns the number of this CTA's chunks.
template <class T>
__device__ int gather_more(const Params& params, const Place<T>& at, const Columns& columns) {
    using P = Part<false>;
    int number = columns.next(at.split);
    if (!columns.has(number)) return 0;
    Turn stage, full;
    stage.advance(params.stages);
    int gathered = 1;
    number = columns.next(number + at.splits);
    int slots[P::passes];
    if (columns.has(number)) load_slots<P>(params, at, number, slots);
    while (columns.has(number)) {
        if (gathered >= params.stages) wait_until_empty(at, stage);
        gather_chunk<P>(params, at, columns, slots, number, stage.number, at.full(full.number));
        //@@ gathered
        stage.advance(params.stages);
        full.advance(params.stages);
        ++gathered;
        number = columns.next(number + at.splits);
        if (columns.has(number)) load_slots<P>(params, at, number, slots);
    }
    return gathered;
}

/// All chunks of this CTA but for the values of the last one, which is in `stage` then.
template <class T>
__device__ void add_chunks(const Params& params, const Place<T>& at, const Columns& columns, Partial<T>& partial,
                           ValuesAhead& ahead, Turn& stage, bool& first) {
    int number = columns.next(at.split);
    bool second = T::two_sources && columns.is_second(number);
    const Factors factors = second ? factors_of(params, params.sources[1]) : factors_of(params, params.sources[0]);
    partial.score_factor = factors.score;
    partial.p_scale = params.p_scale;
    Turn full;
    wait_mbarrier(at.first_barrier(), 0);
    for (;;) {
        __syncwarp();
        //@ loaded
        if (params.trigger == Trigger::loaded) launch_dependent_grids();
        float source_factor = 1.0F;
        if (T::two_sources && columns.is_second(number) != second) {
            second = true;
            const Factors of_second = factors_of(params, params.sources[1]);
            const SourceChange change = change_of_source(factors.values, of_second.values);
            source_factor = change.older;
            partial.score_factor = of_second.score;
            if (change.second_vanishes) partial.p_scale = 0;
        }
        weigh_chunk(params, at, stage.number, partial, !columns.weights_travel, ahead);
        if (!first) {
            // The products of values of the chunk before ended within compute_scores.
#pragma unroll
            for (float(&sums)[T::heads / 2] : partial.outputs) pin(sums);
            rescale_outputs<T>(at, partial.outputs, source_factor, partial.anchors);
        }
        number = columns.next(number + at.splits);
        if (!columns.has(number)) break;
        start_values(at, stage.number, first, partial, ahead, [](int) {});
        first = false;
        stage.advance(params.stages);
        wait_mbarrier(at.full(full.number), full.parity);
        full.advance(params.stages);
    }
    publish_sums<T>(at, partial.running);
}

/// merge of outputs, once this CTA has sent what it has.
template <class T>
__device__ void write_together(const Params& params, const Place<T>& at, const Columns& columns) {
    //@ sent
    if (params.trigger == Trigger::end) launch_dependent_grids();
    take(at.weights_barrier());
    sync_multipliers();  // this CTA's own sums, of all warps
    //@ weighed
    wait_mbarrier(at.outputs_barrier(), 0);
    __syncwarp();
    //@ arrived
    // Many splits leave a CTA few units: half a quad for each warp then. As many loads under way as registers allow.
    if (at.splits > 8)
        merge_units<T, 1, 1, 16>(params, at, columns.split_mask);
    else if (at.splits > 4)
        merge_units<T, 2, 2, 8>(params, at, columns.split_mask);
    else
        merge_units<T, 2, 4, 4>(params, at, columns.split_mask);
    //@ merged
    if (params.transport == Transport::bulk) {
        // A CTA's shared memory is the source of copies until its peers have them.
        arrive_at_cluster();
        wait_for_cluster();
    }
}

/// The last chunk's values and the exchange of outputs: each unit is sent while the next ones are multiplied.
template <class T>
__device__ void send_outputs(const Params& params, const Place<T>& at, int stage, bool first, Partial<T>& partial,
                             ValuesAhead& ahead) {
    const bool stores = params.transport != Transport::bulk;
    add_values(at, stage, first, partial, ahead, [&](int i) {
        partial.anchors.finish(params, at, i, partial.outputs[i]);
        if (stores) send_unit<T>(params, at, at.unit(i), partial.outputs[i]);
    });
    //@ summed
    if (!stores) copy_outputs<T>(params, at, partial.outputs);
}

/// Values over all columns and merge, while the helpers exchange weights.
template <class T>
__device__ void write_by_weights(const Params& params, const Place<T>& at, const Columns& columns) {
    if (params.trigger == Trigger::end) launch_dependent_grids();
    wait_mbarrier(at.slices_barrier(), 0);
    __syncwarp();
    //@ slices
    SlicesProduct<T> product;
    product.load_first(at);
    wait_mbarrier(at.outputs_barrier(), 0);
    __syncwarp();
    //@ weights
    fence_async_proxy();
    product.start_all(at);
    take(at.weights_barrier());
    //@ multiplied
    product.store(params, at, columns.split_mask);
    //@ written
}

/// The first chunk's records, and the query's heads as halves: `first_barrier` ends when both are there.
template <class T>
__device__ void bring_inputs(const Params& params, const Place<T>& at, const Columns& columns, int slot,
                             FirstQuery<T>& query) {
    using P = Part<true>;
    static_assert(P::passes == 1);
    const int number = columns.next(at.split);
    int slots[1] = {slot};
    if (number != at.split) load_slots<P>(params, at, number, slots);
    gather_chunk<P>(params, at, columns, slots, number, 0, at.first_barrier());
    //@ gathering
    if constexpr (T::dcp) query.receive(params, at, at.warp);
    query.store(params, at, at.warp, 0);
    fence_async_proxy();
    __syncwarp();
    arrive_as_warp(at.first_barrier(), at.lane);
    join_cluster(at, false);
    //@ query
}

/// What the warps that multiply do.
template <class T>
__device__ void multiply(const Params& params, const Place<T>& at, const Columns& columns, int slot,
                         FirstQuery<T>& query) {
    if (columns.split_mask == 0) {
        if constexpr (!T::dcp)
            write_empty<T>(params, at, at.warp, multiplying_warps);
        else if (at.warp == 0)
            push_empty<T>(params, at);
        return;
    }
    const bool sends = columns.has_split(at.split);
    const int senders = columns.num_splits();
    Partial<T> partial;
    ValuesAhead ahead;
    bool first = true;
    Turn stage;
    if (sends) {
        bring_inputs(params, at, columns, slot, query);
        add_chunks(params, at, columns, partial, ahead, stage, first);
    } else {
        if (params.trigger == Trigger::loaded) launch_dependent_grids();
        join_cluster(at, false);
    }
    if constexpr (T::exchanges_weights)
        if (columns.weights_travel) return write_by_weights(params, at, columns);
    if (T::alone || senders == 1) {
        add_values(at, stage.number, first, partial, ahead,
                   [&](int i) { partial.anchors.finish(params, at, i, partial.outputs[i]); });
        take(at.weights_barrier());
        store_outputs<T>(params, at, partial.outputs);
        //@ alone
        return;
    }
    if constexpr (!T::alone) {
        if (sends) send_outputs(params, at, stage.number, first, partial, ahead);
        write_together<T>(params, at, columns);
    }
}

/// What the other warps do: gather what is not the first chunk, and find what each split is worth.
template <class T>
__device__ void help(const Params& params, const Place<T>& at, const Columns& columns) {
    if (columns.split_mask == 0) return;
    const bool together = !T::alone && columns.num_splits() > 1;
    if (at.helper() == 0 && at.lane == 0 && together)
        expect_partials(params, at, columns.weights_travel,
                        columns.num_splits() - (columns.has_split(at.split) ? 1 : 0));
    __syncwarp();
    join_cluster(at, false);
    if constexpr (T::exchanges_weights)
        if (columns.weights_travel) {
            // Bulk copies of the first chunk come later if these are under way beside them, and are needed before.
            if (params.gather == Gather::bulk && columns.has_split(at.split)) wait_mbarrier(at.first_barrier(), 0);
            __syncwarp();
            gather_slices(params, at, columns);
        }
    const int chunks = gather_more(params, at, columns);
    Statistics<T> statistics(params, at, columns);
    if (columns.has_split(at.split)) {
        take(at.sums_barrier());
        //@@ sums
        if constexpr (T::exchanges_weights)
            if (columns.weights_travel) send_weights(at);
        //@@ sent_weights
        statistics.add_up(at);
    }
    if (together) {
        if (columns.has_split(at.split)) statistics.send(at);
        wait_mbarrier(at.stats_barrier(), 0);
        __syncwarp();
        //@@ stats
        statistics.weigh(params, at, columns);
    } else {
        statistics.weigh_alone(params, at, columns);
    }
    bring(at.weights_barrier(), at.lane);
    //@@ helped
    if (!together || at.split == 0) statistics.write_lses(params, at);
    if (!columns.weights_travel) wait_for_peers_to_leave(params, at, chunks);  // otherwise nobody tells
}

template <class T>
using ParamsOf = std::conditional_t<T::dcp, DcpParams, Params>;

template <class T>
__global__ void __launch_bounds__(threads, 1) decode(const __grid_constant__ ParamsOf<T> params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    //@ entered
    Place<T> at;
    at.base = shared_address(shared);
    asm volatile("" : "+r"(at.base));  // computed once: in a cluster the address costs a special register
    init_barriers(at);
    find_place(params, at);
    set_up(params, at);
    const Inputs<T> inputs = find_inputs(params, at);
    ConverterOf<T> converter(params.convert, at.row, at.warp, at.lane);
    __syncthreads();  // the barriers are there
    //@ start
    wait_for_prerequisite_grids();
    //@ waited
    join_cluster(at, true);
    int slot = load_global_if(inputs.slot != nullptr, inputs.slot, -1);
    int first_active = 0;
    if constexpr (T::from_ids) {
        first_active = convert_list(params, at, converter);
        if (at.multiplies() && inputs.slot == nullptr)
            slot = load_slot(params, at, at.split, Part<true>::column(at, 0));
    }
    FirstQuery<T> query;
    if constexpr (T::dcp)
        at.exchange = begin_exchange<T>(params);
    else
        query.load(params, at.warp, inputs.query);
    if constexpr (!T::from_ids) first_active = active_columns(params.sources[0], inputs.counts[0]);
    const int second_active = T::two_sources ? active_columns(params.sources[1], inputs.counts[1]) : 0;
    const Columns columns = columns_of_counts<T>(params, first_active, second_active, at.lane, at.split);
    if (!columns.concern(at.split)) return;
    //@ counts
    if (at.multiplies()) {
        take_registers<216>();  // 8 warps of 216 and 4 of 72 are what 12 of 168 are
        multiply(params, at, columns, slot, query);
    } else {
        keep_registers<72>();
        help(params, at, columns);
    }
}

}  // namespace

}  // namespace sparsemla::detail::latency
