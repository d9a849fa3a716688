// The kernel decode_balanced: many rows in one launch, a CTA on every SM. The chunks of all rows are shared out evenly,
// whatever the rows' counts (decode_balanced_walk.cuh); what a CTA does with a chunk is decode_latency's work: the same
// scores, softmax and values, summed over a split's chunks in ascending order.
//   helpers              slots -> records in a ring of stages, one chunk after the other across pieces; the next
//                        piece's query heads -> halves
//   warps that multiply  scores, softmax, values; then the sums of a piece: handed over, written, or sent as a partial
//                        output; at last, of each split that this CTA ended, a share of the row's merge
// A split that lies in two CTAs is summed in one go: the second CTA takes the first one's registers over and goes on.
// So bits do not depend on where CTAs begin and end, and are those of decode_latency with as many splits.
// CTAs wait for others of the grid, at most for the next 16 and the one before: docs/design.md says why that ends.
#pragma once

#include "cuda/decode_balanced_sums.cuh"
#include "cuda/decode_latency_records.cuh"
#include "cuda/decode_latency_setup.cuh"

namespace sparsemla::detail::balanced {

namespace {

/// Barriers of a CTA, before the dependency wait.
template <class T>
__device__ void set_up_barriers(const Place<T>& at) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < max_stages; ++i) {
            init_mbarrier(at.full(i), arrivals_of_gather * helper_warps);
            init_mbarrier(at.empty(i), arrivals_of_warp * multiplying_warps);
        }
        for (int i = 0; i < queries; ++i) {
            init_mbarrier(piece_full(at, i), arrivals_of_warp * helper_warps);
            init_mbarrier(piece_empty(at, i), arrivals_of_warp * multiplying_warps);
        }
        init_mbarrier(sums_stored(at), arrivals_of_warp * multiplying_warps);
        fence_mbarrier_init();
    }
}

/// Tells the next CTA that this one's sums are in memory, by one of the helpers: their work can wait for the stores.
template <class T>
__device__ void tell_next_cta(const Params& params, const Place<T>& at) {
    if (at.helper() != 0) return;
    wait_mbarrier(sums_stored(at), 0);
    if (at.lane == 0) raise_flag(params.handed_over + blockIdx.x);
    __syncwarp();
}

/// A piece and, but for the first one, its query, for the warps that multiply.
template <class T>
__device__ void announce(const Params& params, Place<T>& at, BalancedShared<T::heads>& shared, const Piece& piece,
                         Turn& turn, bool with_query) {
    wait_mbarrier(piece_empty(at, turn.number), turn.parity ^ 1);
    at.query_number = turn.number;
    if (with_query) {
#pragma unroll 1
        for (int group = 0; group < T::heads / 16; ++group) {
            using Query = QueryLoader<T, helper_warps, 1>;
            Query query;
            const uint4* const from[1] = {Query::pointer(params.call, at, at.helper(), group)};
            query.load(params.call, at.helper(), from);
            query.store(params.call, at, at.helper(), group);
        }
    }
    if (at.helper() == 0 && at.lane == 0) shared.pieces[turn.number] = piece;
    fence_async_proxy();
    __syncwarp();
    arrive_as_warp(piece_full(at, turn.number), at.lane);
    turn.advance(queries);
}

/// What the helpers do: all that the pieces need, as room becomes free. Slots are loaded a chunk ahead.
template <class T>
__device__ void feed(const Params& params, Place<T>& at, BalancedShared<T::heads>& shared) {
    using P = Part<false>;
    Walk<T> walk(params, shared.share);
    Piece piece;
    if (!walk.next(piece)) return;
    Columns columns = enter(params, at, piece);
    Turn stage, turn;
    int number = number_of(params, columns, at.split, piece.begin);
    int slots[P::passes];
    load_slots<P>(params.call, at, number, slots);
    bool begins = true;
    int gathered = 0;
    // A piece that is handed over comes first. The next stages become free only once this CTA has gone on, which may
    // wait for the CTA before: first its own sums must be on their way, or CTAs would wait for each other in a chain.
    int flag_due = piece.ends_split() ? -1 : piece.end - piece.begin + params.call.stages;
    for (int i = piece.begin;;) {
        if (gathered == flag_due) tell_next_cta(params, at);
        wait_until_empty(at, stage);
        gather_chunk<P>(params.call, at, columns, slots, number, stage.number, at.full(stage.number));
        stage.advance(params.call.stages);
        if (begins) announce(params, at, shared, piece, turn, gathered > 0);  // while the records are on their way
        ++gathered;
        begins = ++i == piece.end;
        if (begins) {
            if (!walk.next(piece)) break;
            columns = enter(params, at, piece);
            i = piece.begin;
        }
        number = number_of(params, columns, at.split, i);
        load_slots<P>(params.call, at, number, slots);
    }
    if (gathered <= flag_due) tell_next_cta(params, at);
}

/// Sets score_factor and p_scale to what they are before the piece's first chunk: of the source of the chunk before it,
/// if there is one. Returns whether that is the second source.
template <class T>
__device__ bool begin_sums(const Params& params, const Place<T>& at, const Columns& columns, const Piece& piece,
                           Partial<T>& partial) {
    const int number = number_of(params, columns, at.split, max(piece.begin - 1, 0));
    const bool second = T::two_sources && columns.is_second(number);
    const Factors factors = factors_of(params.call, params.call.sources[second ? 1 : 0]);
    partial.score_factor = factors.score;
    partial.p_scale = params.call.p_scale;
    if (second && at.split < columns.first_end &&
        change_of_source(factors_of(params.call, params.call.sources[0]).values, factors.values).second_vanishes)
        partial.p_scale = 0;
    return second;
}

/// The chunks of a piece; done(i) once the sums of a warp's unit i are complete.
template <class T, class Done>
__device__ void add_piece(const Params& params, const Place<T>& at, const Columns& columns, const Piece& piece,
                          Partial<T>& partial, Turn& stage, const Done& done) {
    ValuesAhead ahead;
    bool second = begin_sums(params, at, columns, piece, partial);
    bool first = !piece.goes_on();
    for (int i = piece.begin;;) {
        float source_factor = 1.0F;
        if (T::two_sources && columns.is_second(number_of(params, columns, at.split, i)) != second) {
            second = true;
            const Factors factors = factors_of(params.call, params.call.sources[1]);
            const SourceChange change =
                change_of_source(factors_of(params.call, params.call.sources[0]).values, factors.values);
            source_factor = change.older;
            partial.score_factor = factors.score;
            if (change.second_vanishes) partial.p_scale = 0;
        }
        wait_mbarrier(at.full(stage.number), stage.parity);
        __syncwarp();
        weigh_chunk(params.call, at, stage.number, partial, true, ahead);
        if (!first) rescale_outputs<T>(at, partial.outputs, source_factor, partial.anchors);
        if (++i == piece.end) break;
        add_values(at, stage.number, first, partial, ahead, [](int) {});
        first = false;
        stage.advance(params.call.stages);
    }
    // The query is read no more.
    arrive_as_warp(piece_empty(at, at.query_number), at.lane);
    add_values(at, stage.number, first, partial, ahead, done);
    stage.advance(params.call.stages);
}

/// The first piece's query, by the warps that multiply: they have nothing else to do yet.
template <class T>
__device__ void bring_first_query(const Params& params, Place<T>& at, const Share& share) {
    Piece piece;
    if (!Walk<T>(params, share).next(piece)) return;
    enter(params, at, piece);
    at.query_number = 0;
    FirstQuery<T> query;
    const uint4* from[FirstQuery<T>::groups];
#pragma unroll
    for (int group = 0; group < FirstQuery<T>::groups; ++group)
        from[group] = FirstQuery<T>::pointer(params.call, at, at.warp, group);
    query.load(params.call, at.warp, from);
    query.store(params.call, at, at.warp, 0);
    fence_async_proxy();
    sync_multipliers();
}

/// The merges of all rows of which this CTA has ended one of several splits. Walks the share once more: pieces are not
/// kept. That of its last piece, if there is one,
/// comes first: what it holds of it is in shared memory.
template <class T>
__device__ void merge(const Params& params, Place<T>& at, const Share& share, const Piece& last) {
    Walk<T> walk(params, share);
    bool is_last = true;
    for (Piece piece = last; is_last || walk.next(piece); is_last = false) {
        if (!is_last && piece.row == last.row && piece.tile == last.tile && piece.split == last.split) continue;
        if (!piece.ends_split()) continue;
        const Columns columns = enter(params, at, piece);
        if (columns.num_splits() == 1) continue;
        if (!is_last) sync_multipliers();  // the weights of the merge before are not read any more
        merge_items(params, at, columns, is_last);
    }
}

/// What the warps that multiply do with the CTA's chunks, and with the sums of each piece.
template <class T>
__device__ void multiply(const Params& params, Place<T>& at, BalancedShared<T::heads>& shared) {
    bring_first_query(params, at, shared.share);
    Turn stage, turn;
    Partial<T> partial;
    Piece piece;
    bool merges = false;
    for (int left = shared.share.chunks; left > 0;) {
        wait_mbarrier(piece_full(at, turn.number), turn.parity);
        piece = shared.pieces[turn.number];
        __syncwarp();
        at.query_number = turn.number;
        turn.advance(queries);
        left -= piece.end - piece.begin;
        const Columns columns = enter(params, at, piece);
        const bool hands_over = !piece.ends_split(), writes = !hands_over && columns.num_splits() == 1;
        // What this CTA merges of its own split need not go to memory, if it can wait for the others now.
        const std::uint32_t staying = left == 0 ? items_to_merge<T>(columns, piece.split) : 0;
        for (Running& running : partial.running) running = {};
        partial.anchors = {};
        if (piece.goes_on()) take_over(params, at, partial);
        add_piece(params, at, columns, piece, partial, stage, [&](int i) {
            if (!hands_over) partial.anchors.finish(params.call, at, i, partial.outputs[i]);
            if (hands_over)
                hand_unit_over<T>(params, i, partial.outputs[i]);
            else if (!writes)
                send_unit_to_memory<T>(params, at, i, partial.outputs[i], staying);
        });
        if (hands_over) {
            hand_running_over(params, at, partial);
        } else if (writes) {
            write_row(params, at, columns, partial);
        } else {
            send_stats(params, at, partial);
            merges = true;
        }
    }
    if (merges) merge(params, at, shared.share, piece);
}

/// Rows without columns, by the helpers.
template <class T>
__device__ void write_empty_rows(const Params& params, Place<T>& at) {
    for (int row = static_cast<int>(blockIdx.x); row < params.rows; row += static_cast<int>(gridDim.x)) {
        if (columns_of<T>(params, row).chunks() > 0) continue;
        at.row = row;
        for (at.first_head = 0; at.first_head < params.call.heads; at.first_head += T::heads)
            write_empty(params.call, at, at.helper(), helper_warps);
    }
}

template <class T>
__global__ void __launch_bounds__(threads, 1) decode(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = small_shared<T>(memory);
    Place<T> at;
    at.base = shared_address(memory);
    at.stages = at.base + T::layout.stages;
    at.splits = params.call.splits;
    at.tile = 0;
    at.tiles = 1;
    at.warp = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 32), 0);  // uniform, and known to be
    at.lane = static_cast<int>(threadIdx.x % 32);
    set_up_barriers(at);
    if (params.call.trigger == Trigger::start) launch_dependent_grids();
    __syncthreads();  // the barriers are there
    wait_for_prerequisite_grids();
    find_share(params, at, shared);
    if (at.multiplies()) {
        take_registers<T::multiplier_registers>();
        multiply(params, at, shared);
        if (params.call.trigger == Trigger::end) launch_dependent_grids();
    } else {
        keep_registers<T::helper_registers>();
        feed(params, at, shared);
        if (params.call.trigger == Trigger::loaded) launch_dependent_grids();
        write_empty_rows(params, at);
    }
}

}  // namespace

}  // namespace sparsemla::detail::balanced
