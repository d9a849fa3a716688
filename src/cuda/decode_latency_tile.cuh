// What one CTA of decode_latency is: its tile of heads, its shared memory, and who each thread is in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/decode_latency.h"
#include "cuda/device/barriers.cuh"
#include "cuda/device/mma.cuh"
#include "latency_layout.h"

namespace sparsemla::detail::latency {

using namespace sparsemla::device;

/// Shared memory that is small and not overlaid.
template <int kHeads>
struct SmallShared {
    std::uint64_t stats_barrier;
    std::uint64_t outputs_barrier;
    std::uint64_t slices_barrier;                  ///< the slices of the other splits' records are there
    std::uint64_t first_barrier;                   ///< the first chunk and the query as halves are there
    std::uint64_t sums_barrier;                    ///< P, maxima and sums are there, for the helpers
    std::uint64_t weights_barrier;                 ///< what each split is worth is there, for the warps that multiply
    std::uint64_t full[max_stages];                ///< of the chunks after the first: i, i + stages .. is there
    std::uint64_t empty[max_stages];               ///< nobody reads the stage any more
    std::uint8_t present[max_stages][chunk_keys];  ///< of the stage's chunk: 1 where the column names a record
    float sums[kHeads][32];                        ///< of P before rounding, each lane's share
    float maxima[kHeads];
    float2 stats[max_splits][kHeads];  ///< of each split: maximum (log2), sum
    float weight[max_splits][kHeads];  ///< of each split's sums in the output
    float keep[kHeads];                ///< what older sums are worth after this chunk raised the maximum
};

/// kForm: how records lie in a stage. kQuery: of the query in shared memory; where records are not plain it is BF16,
/// whatever the caller's query is. kSplits: 1, the CTA has its row alone; 2, 4 or 8, as many exchange P where they can
/// (Transport::weights); 0, any number exchange partial outputs. A kernel for each: code that is not needed costs time
/// too, between what is. kFromIds: slots of source 0 come from token ids.
/// kDcp: the query comes from a mailbox, and results go to others.
template <int kHeads, StageForm kForm, Half kQuery, bool kTwoSources, int kSplits, bool kFromIds = false,
          bool kDcp = false>
struct Tile {
    static constexpr bool alone = kSplits == 1;
    static constexpr bool exchanges_weights = kSplits > 1;
    static constexpr int splits = kSplits;
    static constexpr bool two_sources = kTwoSources;
    static constexpr bool from_ids = kFromIds;
    static constexpr bool dcp = kDcp;
    static constexpr int heads = kHeads;
    static constexpr int units_of_warp = units / multiplying_warps;
    static constexpr bool units_take_turns = true;
    static constexpr StageForm form = kForm;
    static constexpr StageLayout record = stage_layout(kForm);
    static constexpr int d_qk = record.d_qk;
    static constexpr Half query_half = kQuery;
    static constexpr Half value_half = record.codes == 0 ? Half::bf16 : Half::f16;  ///< of P, too
    static constexpr int pitch = record.pitch;
    static constexpr int stage_bytes = sparsemla::detail::stage_bytes(kForm);
    static constexpr int heads_of_warp = kHeads / multiplying_warps;
    static constexpr int quads = kHeads / 8;
    static constexpr int steps = d_qk / 16 / 2;  ///< K steps of a warpgroup in K * Q^T: half of the dimensions
    static constexpr int queries = 1;            ///< in shared memory
    static constexpr int query_step_bytes = kHeads * 32;
    static constexpr int query_bytes = d_qk / 16 * query_step_bytes;
    static constexpr int weights_bytes = kHeads * chunk_keys * 2;  ///< one tile of P of a chunk
    static constexpr SharedLayout layout = shared_layout({.heads = kHeads, .form = kForm});
    using QueryTile = SwizzledTile<32>;
    using WeightTile = SwizzledTile<128>;
    using Small = SmallShared<kHeads>;
    static_assert(sizeof(Small) + (kDcp ? kHeads * 8 : 0) <= small_shared_bytes(kHeads));
    static_assert(d_qk % 32 == 0 && kHeads % 16 == 0 && (kSplits <= 1 || can_exchange_weights(kSplits)));
    static_assert(record.is_plain() || (kQuery == Half::bf16 && kTwoSources && kSplits <= 1));
    static_assert(layout.weights % WeightTile::alignment_bytes == 0 && layout.query % QueryTile::alignment_bytes == 0);
};

/// What a thread knows of the exchange of a rank of dcp, once the kernel's inputs may be read.
struct Exchange {
    std::uint32_t number;
    bool failed;  ///< a wait has passed the limit: no more is waited for, nothing pushed, and what was not there is NaN
};
struct NoExchange {};

/// Who this thread is and where its CTA's memory lies.
template <class T>
struct Place {
    SharedAddress base;  ///< of the CTA's shared memory: T::Small, then T::layout
    SharedAddress stages;
    int row;
    int first_head;
    int split;
    int splits;  ///< of the row
    int tile;    ///< of heads in the cluster: the CTAs of other tiles take the same records
    int tiles;   ///< of the cluster
    int warp, lane;
    int query_number;  ///< of the CTA's T::queries queries, the one in use
    [[no_unique_address]] std::conditional_t<T::dcp, Exchange, NoExchange> exchange;

    __device__ bool multiplies() const { return warp < multiplying_warps; }
    __device__ int helper() const { return warp - multiplying_warps; }

    /// The number in the cluster of the CTA that has this split of this tile.
    __device__ int cta(int of_split) const { return of_split + tile * splits; }
    __device__ int warpgroup() const { return warp / 4; }
    __device__ int warp_of_group() const { return warp % 4; }
    /// The unit of the output that this warp holds in its i-th wgmma. CTAs of a cluster take turns, so that they do not
    /// all send to the same peers at the same time.
    __device__ int unit(int i) const {
        const int turn = T::units_take_turns ? (i + split) % T::units_of_warp : i;
        return warpgroup() * 4 * T::units_of_warp + 4 * turn + warp_of_group();
    }

    __device__ SharedAddress stats_barrier() const { return base + offsetof(typename T::Small, stats_barrier); }
    __device__ SharedAddress outputs_barrier() const { return base + offsetof(typename T::Small, outputs_barrier); }
    __device__ SharedAddress slices_barrier() const { return base + offsetof(typename T::Small, slices_barrier); }
    __device__ SharedAddress first_barrier() const { return base + offsetof(typename T::Small, first_barrier); }
    __device__ SharedAddress sums_barrier() const { return base + offsetof(typename T::Small, sums_barrier); }
    __device__ SharedAddress weights_barrier() const { return base + offsetof(typename T::Small, weights_barrier); }
    __device__ SharedAddress full(int i) const { return base + offsetof(typename T::Small, full) + i * 8; }
    __device__ SharedAddress empty(int stage) const { return base + offsetof(typename T::Small, empty) + stage * 8; }
    __device__ SharedAddress present(int stage) const {
        return base + offsetof(typename T::Small, present) + stage * chunk_keys;
    }
    __device__ SharedAddress sums(int head, int lane_of_head) const {
        return base + offsetof(typename T::Small, sums) + (head * 32 + lane_of_head) * 4;
    }
    __device__ SharedAddress maximum(int head) const { return base + offsetof(typename T::Small, maxima) + head * 4; }
    __device__ SharedAddress stats(int of_split, int head) const {
        return base + offsetof(typename T::Small, stats) + (of_split * T::heads + head) * 8;
    }
    __device__ SharedAddress weight(int of_split, int head) const {
        return base + offsetof(typename T::Small, weight) + (of_split * T::heads + head) * 4;
    }
    /// Of a head: where its results go, a 64-bit address, or 0 (HeadOwner). Behind T::Small.
    __device__ SharedAddress peer(int head) const { return base + sizeof(typename T::Small) + head * 8; }
    __device__ SharedAddress keep(int head) const { return base + offsetof(typename T::Small, keep) + head * 4; }
    __device__ SharedAddress score(int half, int head, int key) const {
        return base + T::layout.scores + ((half * T::heads + head) * score_pitch + key) * 4;
    }
    __device__ SharedAddress weights() const { return base + T::layout.weights; }  ///< P
    /// P for unit(i).
    __device__ SharedAddress weights_of_unit(int i) const {
        if constexpr (T::record.has_groups())
            return weights() + unit(i) / (128 / unit_dims) * T::weights_bytes;
        else
            return weights();
    }
    /// Where record `key` of a stage begins.
    __device__ SharedAddress record(int stage, int key) const {
        return stages + stage * T::stage_bytes + key * T::pitch;
    }
    /// The FP16 scales of a block of 16 dimensions, and what they are relative to.
    __device__ SharedAddress scale_table(int stage, int block) const {
        return record(stage, chunk_keys) + block * scale_table_pitch;
    }
    __device__ SharedAddress block_anchor(int stage, int block) const {
        return scale_table(stage, value_blocks) + block * 8;
    }
    __device__ SharedAddress query() const {
        return base + T::layout.query + (T::queries == 1 ? 0 : query_number * T::query_bytes);
    }
};

/// Transport::weights: how a cluster of CTAs shares out the 512 dimensions. Each warpgroup has blocks of 64, of
/// all heads or, where the CTA has but one block, of half of them.
template <class T>
struct Slices {
    static_assert(T::exchanges_weights);
    static constexpr int dims = 512 / T::splits;
    static constexpr int units_here = dims / unit_dims;
    static constexpr int dim_blocks = dims > 64 ? dims / 64 / 2 : 1;
    static constexpr bool halves_heads = dims == 64;
    static constexpr int heads = halves_heads ? T::heads / 2 : T::heads;
    static constexpr int quads = heads / 8;
    static constexpr int pitch = slice_pitch(T::splits);
    static constexpr int slice_bytes = chunk_keys * pitch;  ///< of one split

    /// Of this CTA's dimensions, the unit that a warp holds of its block `dim_block`.
    __device__ static int unit(const Place<T>& at, int dim_block) {
        return (halves_heads ? 0 : at.warpgroup() * 4 * dim_blocks) + 4 * dim_block + at.warp_of_group();
    }
    __device__ static int first_head(const Place<T>& at) { return halves_heads ? at.warpgroup() * heads : 0; }
    /// Where the slice of another split's first record lies.
    __device__ static SharedAddress slice(const Place<T>& at, int split) {
        return at.stages + T::stage_bytes + (split - (split > at.split ? 1 : 0)) * slice_bytes;
    }
};

/// Of the warps that multiply.
__device__ inline void sync_multipliers() { sync_threads(1, 32 * multiplying_warps); }

/// From one side to the other, once in a kernel: the warps that bring something arrive, those that need it wait.
__device__ inline void bring(SharedAddress handover, int lane) {
    __syncwarp();
    arrive_as_warp(handover, lane);
}
__device__ inline void take(SharedAddress handover) {
    wait_mbarrier(handover, 0);
    __syncwarp();
}

}  // namespace sparsemla::detail::latency
