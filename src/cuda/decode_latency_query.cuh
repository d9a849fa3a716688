// A CTA's query heads on their way to shared memory, where wgmma reads them as B.
#pragma once

#include "cuda/decode_latency_mailbox.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/copies.cuh"

namespace sparsemla::detail::latency {

/// The query's heads as halves, kGroups groups of 16 heads by kWarps warps, of which this is number `worker`. Two lanes
/// take 32 dimensions of a head; within 16 of them, pairs 0 2 4 6 come before pairs 1 3 5 7, as a lane of ldmatrix
/// holds four bytes of a record. Where records are not plain, an E4M3 query becomes BF16, which holds it.
template <class T, int kWarps, int kGroups>
struct QueryLoader {
    static constexpr int jobs_of_heads = T::d_qk / 32;                    ///< of 16 heads, one warp's work each
    static constexpr int rounds = (jobs_of_heads + kWarps - 1) / kWarps;  ///< of one group of 16 heads
    static constexpr int words = T::query_half == Half::f16 ? 1 : 2;      ///< of 16 bytes
    static constexpr int groups = kGroups;

    uint4 loaded[groups][rounds][words];

    /// Where this lane's head of a group starts for it, null past the row's heads.
    __device__ static const uint4* pointer(const Params& params, const Place<T>& at, int worker, int group) {
        const int head = at.first_head + 16 * group + at.lane / 2;
        if (head >= params.heads) return nullptr;
        const std::byte* heads = params.query + at.row * params.query_row_stride_bytes;
        return reinterpret_cast<const uint4*>(heads + head * params.query_head_stride_bytes) +
               (2 * worker + at.lane % 2) * words_of(params);
    }

    /// Of 16 dimensions, of the caller's query.
    __device__ static int words_of(const Params& params) {
        return !T::record.is_plain() && params.query_is_e4m3 ? 1 : words;
    }

    __device__ void load(const Params& params, int worker, const uint4* const (&from)[groups]) {
        const int step = kWarps * 2 * words_of(params);
#pragma unroll
        for (int group = 0; group < groups; ++group)
#pragma unroll
            for (int round = 0; round < rounds; ++round)
#pragma unroll
                for (int i = 0; i < words; ++i) {
                    const bool exists =
                        from[group] != nullptr && round * kWarps + worker < jobs_of_heads && i < words_of(params);
                    const uint4* at = from[group] + round * step + i;
                    if constexpr (T::dcp)
                        loaded[group][round][i] = load_peer_if(exists, at);
                    else
                        loaded[group][round][i] = load_global_if(exists, at);
                }
    }

    /// From a mailbox: asks until everything has arrived, or the limit has passed; what is missing is NaN then. Not
    /// before the records are asked for, which take longer: these registers would be missing there.
    __device__ void receive(const Params& params, const Place<T>& at, int worker) {
        const MailboxView& mailbox = mailbox_of<T>(params);
        const uint4* from[groups];
#pragma unroll
        for (int group = 0; group < groups; ++group) {
            from[group] = pointer(params, at, worker, group);
            if (from[group] != nullptr) from[group] += parity_words<T>(params, at.exchange);
        }
        WaitLimit limit;
        for (;;) {
            load(params, worker, from);
            const int missing = missing_group();
            if (missing < 0 || at.exchange.failed) return;
            if (!limit.passed(mailbox)) continue;
            const int head = at.first_head + 16 * missing + at.lane / 2;
            return fail(mailbox, DcpStage::decode, mailbox.owner_of_head(head), at.row, at.exchange.number);
        }
    }

    /// To shared memory as groups `first_group` .. of the CTA's heads.
    __device__ void store(const Params& params, const Place<T>& at, int worker, int first_group) const {
        const bool from_e4m3 = words_of(params) < words;
        const SharedAddress to = at.query() + (2 * worker + at.lane % 2) * T::query_step_bytes;
#pragma unroll
        for (int group = 0; group < groups; ++group)
#pragma unroll
            for (int round = 0; round < rounds; ++round) {
                if (round * kWarps + worker >= jobs_of_heads) break;
                const int head = 16 * (first_group + group) + at.lane / 2;
                uint4 low, high;
                if (from_e4m3)
                    split_codes(loaded[group][round][0], low, high);
                else
                    split_pairs(loaded[group][round], low, high);
                const SharedAddress step = to + round * kWarps * 2 * T::query_step_bytes;
                store_shared(step + T::QueryTile::byte(head, 0), low);
                store_shared(step + T::QueryTile::byte(head, 1), high);
            }
    }

   private:
    /// One of which something has not arrived, or -1.
    __device__ int missing_group() const {
        int missing = -1;
#pragma unroll
        for (int group = 0; group < groups; ++group)
#pragma unroll
            for (const auto& round : loaded[group])
#pragma unroll
                for (const uint4& word : round)
                    if (!has_arrived(word)) missing = group;
        return missing;
    }

    __device__ static void split_codes(const uint4& from, uint4& low, uint4& high) {
        const TwoPairs x = e4m3x4_to_bf16(from.x), y = e4m3x4_to_bf16(from.y);
        const TwoPairs z = e4m3x4_to_bf16(from.z), w = e4m3x4_to_bf16(from.w);
        low = {x.low, y.low, z.low, w.low};
        high = {x.high, y.high, z.high, w.high};
    }

    __device__ static void split_pairs(const uint4 (&from)[words], uint4& low, uint4& high) {
        if constexpr (T::query_half == Half::f16) {
            const TwoPairs x = e4m3x4_to_f16(from[0].x), y = e4m3x4_to_f16(from[0].y);
            const TwoPairs z = e4m3x4_to_f16(from[0].z), w = e4m3x4_to_f16(from[0].w);
            low = {x.low, y.low, z.low, w.low};
            high = {x.high, y.high, z.high, w.high};
        } else {
            low = {from[0].x, from[0].z, from[1].x, from[1].z};
            high = {from[0].y, from[0].w, from[1].y, from[1].w};
        }
    }
};

}  // namespace sparsemla::detail::latency
