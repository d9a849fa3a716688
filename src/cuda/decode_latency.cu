// decode_latency: a cluster of S CTAs for each (row, tile of heads); chunk j of the row's lists belongs to CTA j % S.
//   gather    slots -> records in shared memory (cp.async); query heads -> halves
//   scores    K * Q^T by wgmma: 64 keys on M from registers, heads on N; each warpgroup half of the dimensions
//   softmax   a warp some heads: the halves' sum, maximum, P = p_scale * 2^(s - max) in its format
//   values    V^T * P by wgmma: a warpgroup's 256 dimensions on M, heads on N
//   exchange  maxima and sums to all CTAs, partial outputs to the CTA that merges those dimensions
//   merge     in split order, one rounding
// E4M3 codes become halves, which hold them exactly: products are exact and sums FP32.
#include "cuda/decode_latency_merge.cuh"
#include "cuda/launch.h"

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
    at.split = static_cast<int>(cta_of_cluster());
    at.warp = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 32), 0);  // uniform, and known to be
    at.lane = static_cast<int>(threadIdx.x % 32);
    at.splits = params.splits;
    asm volatile("" : "+r"(at.splits));
    return at;
}

/// Brings every line of the parameters into the constant cache at once; used one by one, each miss would be waited for.
__device__ inline void prefetch(const Params& params) {
    constexpr int line_words = 16;
    constexpr int lines = (sizeof(Params) + 4 * line_words - 1) / (4 * line_words);
    const int line = min(static_cast<int>(threadIdx.x), lines - 1);
    const auto word = min(line * line_words, static_cast<int>(sizeof(Params) / 4 - 1));
    asm volatile("" ::"r"(reinterpret_cast<const std::uint32_t*>(&params)[word]));
}

/// Before the dependency wait: nothing here reads global memory.
template <class T>
__device__ void set_up(const Params& params, const Place<T>& at) {
    if (threadIdx.x == 0) {
        init_mbarrier(at.stats_barrier(), 1);
        init_mbarrier(at.outputs_barrier(), 1);
        fence_mbarrier_init();
    }
    if (params.trigger == Trigger::start) launch_dependent_grids();
}

/// The chunks of a CTA on their way to shared memory: slots one chunk ahead of the copies, copies `stages` chunks ahead
/// of their use. Every step commits one group of copies, an empty one at the end of the lists.
template <class T>
class Gather {
   public:
    __device__ Gather(const Params& params, const Place<T>& at) : params_(params), at_(at) {}

    /// Takes a slot that was loaded before the counts were known; a guess that they prove wrong costs a second load.
    __device__ void guess(int number, const std::int32_t* pointer) {
        loaded_number_ = number;
        slot_ = load_slot(pointer);
    }
    __device__ void start(const Columns& columns) { next_ = columns.next(at_.split); }

    __device__ void step(const Columns& columns, int stage) {
        if (columns.has(next_)) {
            if (loaded_number_ != next_) guess(next_, slot_pointer(params_, at_, next_));
            gather_chunk(params_, at_, columns, slot_, next_, stage);
            next_ = columns.next(next_ + at_.splits);
            if (columns.has(next_)) guess(next_, slot_pointer(params_, at_, next_));
        }
        commit_copies();
    }

   private:
    const Params& params_;
    const Place<T>& at_;
    int next_ = 0;
    int loaded_number_ = -1;
    int slot_ = -1;
};

/// Until the oldest of `stages` groups of copies has come.
__device__ inline void wait_for_stage(int stages) {
    switch (stages) {
        case 1: wait_for_copies<0>(); break;
        case 2: wait_for_copies<1>(); break;
        case 3: wait_for_copies<2>(); break;
        default: wait_for_copies<3>(); break;
    }
    __syncthreads();
}

/// A CTA's sums over its chunks.
template <class T>
struct Partial {
    Running running[T::heads_of_warp];  ///< of heads heads_of_warp * warp ..
    Outputs<T> outputs;                 ///< times p_scale, without k_scale of the source of the last chunk
    Factors factors;                    ///< of that source
};

/// scores and softmax of one chunk; leaves the values of the warp's first two units in registers.
template <class T>
__device__ void weigh_chunk(const Params& params, const Place<T>& at, int stage, Partial<T>& partial,
                            FragmentA (&values)[2][4]) {
    {
        float scores[T::heads / 2];
        compute_scores(at, stage, scores, [&] { load_values(at, stage, at.unit(0), values[0]); });
        //@ scores
        store_scores(at, scores);
    }
    __syncthreads();
    //@ stored
    softmax(params, at, partial.factors.score, stage, partial.running);
    //@ softmax
    fence_async_proxy();
    load_values(at, stage, at.unit(1), values[1]);
    __syncthreads();  // P is there
    //@ values
}

/// values of one chunk: one unit after the other, done(i) once unit i's sums are in registers.
template <class T, class Done>
__device__ void add_values(const Place<T>& at, int stage, bool first, Outputs<T>& outputs, FragmentA (&values)[2][4],
                           const Done& done) {
#pragma unroll
    for (int i = 0; i < units_of_warp; ++i) {
        pin(outputs[i]);
        start_values<T>(at, outputs[i], values[i % 2], first);
        if (i == 0) continue;
        wait_for_mma<1>();
        pin(outputs[i - 1]);
        if (i + 1 < units_of_warp) load_values(at, stage, at.unit(i + 1), values[(i + 1) % 2]);
        done(i - 1);
    }
    wait_for_mma<0>();
    pin(outputs[units_of_warp - 1]);
    done(units_of_warp - 1);
}

/// All chunks of this CTA but for the values of the last one; returns its stage.
template <class T>
__device__ int add_chunks(const Params& params, const Place<T>& at, const Columns& columns, Gather<T>& gather,
                          Partial<T>& partial, FragmentA (&values)[2][4], bool& first) {
    int number = columns.next(at.split);
    bool second = T::two_sources && columns.is_second(number);
    partial.factors = second ? factors_of(params, params.sources[1]) : factors_of(params, params.sources[0]);
    for (int stage = 0;; stage = stage + 1 == params.stages ? 0 : stage + 1) {
        wait_for_stage(params.stages);
        //@ loaded
        if (params.trigger == Trigger::loaded) launch_dependent_grids();
        float source_factor = 1.0F;
        if (T::two_sources && columns.is_second(number) != second) {
            second = true;
            const Factors factors = factors_of(params, params.sources[1]);
            source_factor = partial.factors.values * reciprocal_approximate(factors.values);
            partial.factors = factors;
        }
        weigh_chunk(params, at, stage, partial, values);
        if (!first) rescale_outputs<T>(at, partial.outputs, source_factor);
        number = columns.next(number + at.splits);
        if (!columns.has(number)) return stage;
        add_values<T>(at, stage, first, partial.outputs, values, [](int) {});
        first = false;
        __syncthreads();  // nobody reads the stage any more
        gather.step(columns, stage);
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
    __syncthreads();
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
    __syncthreads();
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
    arrive_at_cluster();  // nobody here reads query or scores any more
    sum_lanes<T>(partial.running);
    const bool stores = params.transport == Transport::stores;
    add_values<T>(at, stage, first, partial.outputs, values, [&](int i) {
        if (i == 0) {
            wait_for_cluster();
            //@ cluster
            send_stats<T>(params, at, partial.running);
        }
        if (stores) send_unit<T>(params, at, at.unit(i), partial.outputs[i]);
    });
    //@ summed
    if (!stores) copy_outputs<T>(params, at, partial.outputs);
}

/// Before the dependency wait: addresses, and every line of the parameters into the constant cache.
template <class T>
__device__ Inputs<T> find_inputs(const Params& params, const Place<T>& at) {
    Inputs<T> inputs;
    inputs.counts[0] = count_of_row(params.sources[0], at.row);
    inputs.counts[1] = T::two_sources ? count_of_row(params.sources[1], at.row) : nullptr;
    inputs.slot = slot_pointer(params, at, at.split);
    inputs.query = QueryLoader<T>::pointer(params, at, 0);
    asm volatile("" : "+l"(inputs.counts[0]), "+l"(inputs.counts[1]), "+l"(inputs.slot), "+l"(inputs.query));
    asm volatile("" ::"l"(params.out), "l"(params.sinks), "r"(params.units_of_cta), "l"(params.lse_head_stride));
    return inputs;
}

template <class T>
__global__ void __launch_bounds__(threads, 1) decode(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    prefetch(params);
    const Place<T> at = place_of<T>(params, shared);
    set_up(params, at);
    const Inputs<T> inputs = find_inputs(params, at);
    //@ start
    wait_for_prerequisite_grids();
    //@ waited

    Gather<T> gather(params, at);
    gather.guess(at.split, inputs.slot);
    QueryLoader<T> query;
    query.load(at, inputs.query);
    const Columns columns = columns_of_row(params, inputs, at.lane, at.split);
    const int senders = __popc(columns.splits);
    const bool sends = (columns.splits >> at.split & 1) != 0;
    const bool alone = senders <= 1;
    if (alone && !sends && !(senders == 0 && at.split == 0)) return;
    //@ counts

    gather.start(columns);
    for (int stage = 0; stage < params.stages; ++stage) gather.step(columns, stage);
    //@ issued
    query.store(at, 0);
#pragma unroll 1
    for (int group = 1; group < T::heads / 16; ++group) {
        query.load(at, QueryLoader<T>::pointer(params, at, group));
        query.store(at, group);
    }
    fence_async_proxy();
    if (threadIdx.x == 0 && !alone) expect_partials(params, at, senders - (sends ? 1 : 0));
    //@ query

    if (senders == 0) return write_empty<T>(params, at);
    if (!sends) {
        arrive_at_cluster();
        wait_for_cluster();
        return write_together<T>(params, at, columns);
    }
    Partial<T> partial;
    FragmentA values[2][4];
    bool first = true;
    const int stage = add_chunks(params, at, columns, gather, partial, values, first);
    if (alone) {
        add_values<T>(at, stage, first, partial.outputs, values, [](int) {});
        write_alone(params, at, columns, partial);
    } else {
        exchange(params, at, stage, first, partial, values);
        write_together<T>(params, at, columns);
    }
}

/// Calls visit(kernel) with the instantiation for these values; false where there is none.
template <class Visit>
bool with_kernel(const Variant& variant, const Visit& visit) {
    const auto with_query = [&]<int kHeads, int kDqk, bool kTwoSources>() {
        variant.bf16_query ? visit(decode<Tile<kHeads, kDqk, Half::bf16, kTwoSources>>)
                           : visit(decode<Tile<kHeads, kDqk, Half::f16, kTwoSources>>);
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
        case 16: with_heads.template operator()<16>(); return true;
        case 32: with_heads.template operator()<32>(); return true;
        case 64: with_heads.template operator()<64>(); return true;
        default: return false;
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
