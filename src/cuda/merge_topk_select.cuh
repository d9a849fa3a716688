// Selection of a row's k first keys by one CTA, and their order. All functions are called by all its threads, and end
// with a barrier after which what they say is in shared memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/convert_row.cuh"
#include "topk_key.h"

namespace sparsemla::detail::topk {

using namespace device;

inline constexpr int warps = 32, threads = 32 * warps;
inline constexpr int digit_bits = 11, digits = 1 << digit_bits;  ///< two bins a thread
inline constexpr int capacity = 4096, keys_of_thread = capacity / threads;
static_assert(digits == 2 * threads && capacity % threads == 0);

struct Selection {
    std::uint64_t keys[capacity];
    std::uint32_t bins[digits];
    int sums[warps];  ///< of the warps' bins
    int digit;        ///< of the k-th key; -1: there are fewer than k
    int before;       ///< keys with a smaller one
    int with;         ///< keys with the same
    int kept;
};

/// Where the lists of all sources are.
struct Candidates {
    const std::int32_t* score_bits;
    const std::int32_t* ids;
    const std::int32_t* counts;  ///< null: every column
    std::int64_t scores_source_stride, scores_row_stride, ids_source_stride, ids_row_stride;
    std::int64_t counts_source_stride, counts_row_stride;
    std::int32_t columns, width;  ///< of all sources, of one
    Divider by_width;

    /// use(key) by whole warps for every column, absent_key for an absent one.
    template <class Use>
    __device__ void for_each(std::int64_t row, const Use& use) const {
        constexpr int at_a_time = 4;
        const auto end = static_cast<std::uint32_t>(columns);
        for (std::uint32_t begin = 0; begin < end; begin += at_a_time * threads) {
            std::uint64_t key[at_a_time];
#pragma unroll
            for (int i = 0; i < at_a_time; ++i) key[i] = key_of(row, begin + i * threads + threadIdx.x);
#pragma unroll
            for (int i = 0; i < at_a_time; ++i) use(key[i]);
        }
    }

   private:
    /// Three loads that do not wait for each other.
    __device__ std::uint64_t key_of(std::int64_t row, std::uint32_t number) const {
        const bool exists = number < static_cast<std::uint32_t>(columns);
        const std::uint32_t source = divide(number, by_width);
        const auto column = static_cast<std::int32_t>(number - source * static_cast<std::uint32_t>(width));
        const std::int32_t count = load_global_if(
            exists && counts != nullptr, counts + source * counts_source_stride + row * counts_row_stride, width);
        const std::int32_t id =
            load_global_if(exists, ids + source * ids_source_stride + row * ids_row_stride + column, -1);
        const std::int32_t bits =
            load_global_if(exists, score_bits + source * scores_source_stride + row * scores_row_stride + column, 0);
        return id >= 0 && column < count ? topk_key(static_cast<std::uint32_t>(bits), id) : absent_key;
    }
};

/// What is known of the k-th key: its bits from `shift` on. All threads hold the same.
class Threshold {
   public:
    __device__ Threshold(int k, int columns) : k_(k), left_(k), with_(columns) {}

    /// Whether the selected keys are known: all up to last(), and copies() of the key behind it.
    __device__ bool known() const { return left_ >= with_ || shift_ == 0; }
    /// How many keys there are up to last().
    __device__ int reach() const { return k_ - left_ + with_; }
    /// Behind it no key is selected but copies. No key is zero, as no score is above +inf.
    __device__ std::uint64_t last() const {
        if (shift_ == 64) return absent_key - 1;
        if (copies() != 0) return prefix_ - 1;
        return std::min((prefix_ << shift_) + ((std::uint64_t{1} << shift_) - 1), absent_key - 1);
    }
    /// Where more candidates are equal to the k-th key than are selected: how many are.
    __device__ int copies() const { return shift_ == 0 && left_ < with_ ? left_ : 0; }
    __device__ std::uint64_t copied_key() const { return prefix_; }

    /// How many keys with the known prefix are selected.
    __device__ int left() const { return left_; }
    __device__ int next_shift() const { return std::max(shift_ - digit_bits, 0); }
    /// The digit from next_shift() on, or -1 of keys that have another prefix or are absent.
    __device__ int digit_of(std::uint64_t key) const {
        if (key == absent_key || (shift_ < 64 && key >> shift_ != prefix_)) return -1;
        return static_cast<int>(key >> next_shift()) & ((1 << (shift_ - next_shift())) - 1);
    }
    /// What narrow() found.
    __device__ void take(const Selection& found) {
        if (found.digit < 0) {
            with_ = left_;
            return;
        }
        prefix_ = (shift_ < 64 ? prefix_ << (shift_ - next_shift()) : 0) | static_cast<std::uint64_t>(found.digit);
        shift_ = next_shift();
        left_ -= found.before;
        with_ = found.with;
    }

   private:
    std::uint64_t prefix_ = 0;
    int shift_ = 64;
    int k_;
    int left_;  ///< of the keys with this prefix, how many are selected
    int with_;  ///< how many have it; at first at most that many
};

/// Counts a digit of every lane, if it is one. Lanes that agree, as those of equal scores do, count at once.
__device__ inline void count_digit(std::uint32_t* bins, int digit) {
    int agree;
    __match_all_sync(all_lanes, digit, &agree);
    if (digit < 0) return;
    if (!agree)
        atomicAdd(&bins[digit], 1U);
    else if (threadIdx.x % 32 == 0)
        atomicAdd(&bins[digit], 32U);
}

/// The next digit of the k-th key. for_each(use) calls use(key), whole warps at a time.
template <class ForEach>
__device__ void narrow(Selection& shared, Threshold& threshold, const ForEach& for_each) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    shared.bins[thread] = shared.bins[thread + threads] = 0;
    if (thread == 0) shared.digit = -1;
    __syncthreads();
    for_each([&](std::uint64_t key) { count_digit(shared.bins, threshold.digit_of(key)); });
    __syncthreads();
    const int first = static_cast<int>(shared.bins[2 * thread]), second = static_cast<int>(shared.bins[2 * thread + 1]);
    const int up_to_here = warp_prefix_sum(first + second, lane);
    if (lane == 31) shared.sums[warp] = up_to_here;
    __syncthreads();
    const int before_warp = __reduce_add_sync(all_lanes, lane < warp ? shared.sums[lane] : 0);
    const int before = before_warp + up_to_here - first - second, left = threshold.left();
    const bool in_first = before < left && left <= before + first;
    if (in_first || (before + first < left && left <= before + first + second)) {
        shared.digit = 2 * thread + (in_first ? 0 : 1);
        shared.before = in_first ? before : before + first;
        shared.with = in_first ? first : second;
    }
    __syncthreads();
    threshold.take(shared);
    __syncthreads();
}

/// Appends the keys of those lanes that keep theirs, in any order.
__device__ inline void append(Selection& shared, bool keeps, std::uint64_t key) {
    const std::uint32_t lane = threadIdx.x % 32, keeping = __ballot_sync(all_lanes, keeps);
    int to = 0;
    if (lane == 0 && keeping != 0) to = atomicAdd(&shared.kept, __popc(keeping));
    to = __shfl_sync(all_lanes, to, 0) + __popc(keeping & ((1U << lane) - 1));
    if (keeps) shared.keys[to] = key;
}

/// All keys up to the threshold's last one. Returns their number, at most `capacity`.
template <class ForEach>
__device__ int gather(Selection& shared, const Threshold& threshold, const ForEach& for_each) {
    if (threadIdx.x == 0) shared.kept = 0;
    __syncthreads();
    const std::uint64_t last = threshold.last();
    for_each([&](std::uint64_t key) { append(shared, key <= last, key); });
    __syncthreads();
    return shared.kept;
}

template <class Use>
__device__ void for_each_gathered(const Selection& shared, int gathered, const Use& use) {
#pragma unroll
    for (int i = 0; i < keys_of_thread; ++i) {
        const int number = i * threads + static_cast<int>(threadIdx.x);
        use(number < gathered ? shared.keys[number] : absent_key);
    }
}

/// Leaves what is selected and own(key) of the gathered keys, in any order. Returns its number, at most k.
template <class Own>
__device__ int keep(Selection& shared, const Threshold& threshold, int gathered, const Own& own) {
    std::uint64_t key[keys_of_thread];
    int i = 0;
    for_each_gathered(shared, gathered, [&](std::uint64_t one) { key[i++] = one; });
    __syncthreads();
    if (threadIdx.x == 0) shared.kept = 0;
    __syncthreads();
    const std::uint64_t last = threshold.last();
    for (const std::uint64_t one : key) append(shared, one <= last && own(one), one);
    __syncthreads();
    int kept = shared.kept;
    const int copies = threshold.copies();
    if (copies != 0 && own(threshold.copied_key())) {
        for (int copy = static_cast<int>(threadIdx.x); copy < copies; copy += threads)
            shared.keys[kept + copy] = threshold.copied_key();
        kept += copies;
        __syncthreads();
    }
    return kept;
}

/// Bitonic, of the next power of two. Up to a distance of 32 the 64 keys that a warp compares are its own.
__device__ inline void sort(Selection& shared, int n) {
    const int thread = static_cast<int>(threadIdx.x);
    const int padded = n <= 1 ? n : 1 << (32 - __clz(n - 1));
    for (int i = n + thread; i < padded; i += threads) shared.keys[i] = absent_key;
    __syncthreads();
    for (int size = 2; size <= padded; size *= 2)
        for (int distance = size / 2; distance > 0; distance /= 2) {
            for (int pair = thread; pair < padded / 2; pair += threads) {
                const int low = 2 * pair - (pair & (distance - 1)), high = low + distance;
                const std::uint64_t a = shared.keys[low], b = shared.keys[high];
                if ((a > b) == ((low & size) == 0)) {
                    shared.keys[low] = b;
                    shared.keys[high] = a;
                }
            }
            const int next_distance = distance > 1 ? distance / 2 : size;
            if (distance > 32 || next_distance > 32)
                __syncthreads();
            else
                __syncwarp();
        }
    __syncthreads();
}

}  // namespace sparsemla::detail::topk
