// cuda/device/exchange.cuh and the barriers of clusters: stores and bulk copies into other CTAs' shared memory, whose
// arrival mbarriers count in bytes, in clusters of every size that decode_latency uses most.
#include <algorithm>

#include "cuda/device/copies.cuh"
#include "cuda/device/exchange.cuh"
#include "tests/cuda/on_device.h"

namespace sparsemla::test {
namespace {

using device::SharedAddress;

constexpr int max_cluster = 16;
constexpr int threads = 128;
constexpr int phases = 5;  // an odd number: parities 0 1 0 1 0

class ExchangeDevice : public OnDevice, public testing::WithParamInterface<int> {
   protected:
    unsigned cluster() const { return static_cast<unsigned>(GetParam()); }

    /// Three clusters of the kernel, or a skip where the GPU holds none of the size.
    template <class... Args>
    void run_clusters(void (*kernel)(Args...), std::size_t shared_bytes, const std::type_identity_t<Args>&... args) {
        detail::allow_launches(kernel, shared_bytes, "a kernel of the tests");
        run(kernel,
            {.grid = dim3(clusters * cluster()),
             .cluster = cluster(),
             .threads = threads,
             .shared_bytes = shared_bytes},
            args...);
    }

    static constexpr unsigned clusters = 3;
};

/// What thread `thread` of CTA `from` sends to CTA `to` in a phase.
__host__ __device__ inline float message(int cluster, int from, int to, int thread, int phase) {
    return static_cast<float>((((cluster * 16 + from) * 16 + to) * phases + phase) * threads + thread);
}

/// This CTA's number in its cluster: clusters are runs of CTAs along x.
__device__ inline int number_in_cluster(int cluster) { return static_cast<int>(blockIdx.x) % cluster; }

/// An inbox of 16 bytes of each thread of each CTA, and the barrier that counts what comes.
struct Inbox {
    float4 values[max_cluster][threads];
    std::uint64_t barrier;
};

__device__ inline void start_inbox(Inbox& inbox) {
    if (threadIdx.x == 0) {
        device::init_mbarrier(device::shared_address(&inbox.barrier), 1);
        device::fence_mbarrier_init();
    }
    __syncwarp();
    device::arrive_at_cluster();
    device::wait_for_cluster();
}

/// Announces the phase's bytes, before or after the first of them come.
__device__ inline void expect(Inbox& inbox, std::uint32_t bytes) {
    if (threadIdx.x == 0) device::arrive_expecting(device::shared_address(&inbox.barrier), bytes);
}

/// Counts what differs from message() once the phase has ended, and ends it for the whole cluster.
template <class Matches>
__device__ void receive(Inbox& inbox, int cluster, int phase, std::uint32_t* failures, const Matches& matches) {
    const int cta = number_in_cluster(cluster);
    device::wait_mbarrier(device::shared_address(&inbox.barrier), phase % 2);
    for (int from = 0; from < cluster; ++from)
        if (from != cta && !matches(inbox.values[from][threadIdx.x], from)) atomicAdd(failures, 1U);
    __syncthreads();  // the next phase overwrites what all threads have read by now
    device::arrive_at_cluster();
    device::wait_for_cluster();
}

/// Every thread to every other CTA: 16 bytes, or 8 of them.
template <bool kSixteen>
__global__ void stores_kernel(int cluster, std::uint32_t* failures) {
    extern __shared__ __align__(128) unsigned char shared[];
    Inbox& inbox = *reinterpret_cast<Inbox*>(shared);
    const int cta = number_in_cluster(cluster), thread = static_cast<int>(threadIdx.x);
    const int index = static_cast<int>(device::cluster_of_grid_x());
    start_inbox(inbox);
    for (int phase = 0; phase < phases; ++phase) {
        if (phase % 2 == 0) expect(inbox, (cluster - 1) * threads * (kSixteen ? 16 : 8));
        const SharedAddress slot = device::shared_address(&inbox.values[cta][thread]);
        const SharedAddress barrier = device::shared_address(&inbox.barrier);
        for (int i = 1; i < cluster; ++i) {
            const int to = (cta + i) % cluster;
            const float value = message(index, cta, to, thread, phase);
            if constexpr (kSixteen)
                device::store_async(device::map_to_cta(slot, to), value, -value, value + 0.5F, 2.0F,
                                    device::map_to_cta(barrier, to));
            else
                device::store_async(device::map_to_cta(slot, to), value, -value, device::map_to_cta(barrier, to));
        }
        if (phase % 2 != 0) expect(inbox, (cluster - 1) * threads * (kSixteen ? 16 : 8));
        receive(inbox, cluster, phase, failures, [&](const float4& got, int from) {
            const float value = message(index, from, cta, thread, phase);
            return got.x == value && got.y == -value && (!kSixteen || (got.z == value + 0.5F && got.w == 2.0F));
        });
    }
}

/// Staged in this CTA's shared memory, then one bulk copy to each other CTA, of a length of its own.
__global__ void bulk_kernel(int cluster, std::uint32_t* failures) {
    extern __shared__ __align__(128) unsigned char shared[];
    Inbox& inbox = *reinterpret_cast<Inbox*>(shared);
    Inbox& staged = *(&inbox + 1);
    const int cta = number_in_cluster(cluster), thread = static_cast<int>(threadIdx.x);
    const int index = static_cast<int>(device::cluster_of_grid_x());
    const auto bytes_to = [](int to) { return static_cast<std::uint32_t>(threads - 7 * to) * 16; };
    start_inbox(inbox);
    for (int phase = 0; phase < phases; ++phase) {
        expect(inbox, (cluster - 1) * bytes_to(cta));
        for (int to = 0; to < cluster; ++to)
            staged.values[to][thread] = {message(index, cta, to, thread, phase), 1.0F, 2.0F, 3.0F};
        device::fence_async_proxy();
        __syncthreads();
        if (thread < cluster && thread != cta)
            device::copy_bulk_to_cta(device::map_to_cta(device::shared_address(inbox.values[cta]), thread),
                                     device::shared_address(staged.values[thread]), bytes_to(thread),
                                     device::map_to_cta(device::shared_address(&inbox.barrier), thread));
        // The phase's end is also the end of reading `staged`: the cluster barrier follows all arrivals.
        receive(inbox, cluster, phase, failures, [&](const float4& got, int from) {
            if (thread * 16 >= static_cast<int>(bytes_to(cta))) return true;
            return got.x == message(index, from, cta, thread, phase) && got.y == 1.0F && got.w == 3.0F;
        });
    }
}

TEST_P(ExchangeDevice, SixteenBytesOfEveryThreadToEveryCta) {
    const DeviceArray<std::uint32_t> failures(std::vector<std::uint32_t>{0});
    run_clusters(stores_kernel<true>, sizeof(Inbox), GetParam(), failures.data());
    EXPECT_EQ(failures.values()[0], 0U);
}

TEST_P(ExchangeDevice, EightBytesOfEveryThreadToEveryCta) {
    const DeviceArray<std::uint32_t> failures(std::vector<std::uint32_t>{0});
    run_clusters(stores_kernel<false>, sizeof(Inbox), GetParam(), failures.data());
    EXPECT_EQ(failures.values()[0], 0U);
}

TEST_P(ExchangeDevice, BulkCopiesToEveryCta) {
    const DeviceArray<std::uint32_t> failures(std::vector<std::uint32_t>{0});
    run_clusters(bulk_kernel, 2 * sizeof(Inbox), GetParam(), failures.data());
    EXPECT_EQ(failures.values()[0], 0U);
}

// ---------------------------------------------------------------------------------------------------------------------
/// The copy engine brings each CTA's share of some bytes to all CTAs whose bit is set, at the same place; every CTA's
/// barrier counts what comes to it.
__global__ void multicast_kernel(int cluster, std::uint32_t ctas, const uint4* from, std::uint32_t* failures) {
    extern __shared__ __align__(128) unsigned char shared[];
    Inbox& inbox = *reinterpret_cast<Inbox*>(shared);
    const int cta = number_in_cluster(cluster), thread = static_cast<int>(threadIdx.x);
    constexpr std::uint32_t bytes = threads * 16;
    for (int share = 0; share < cluster; ++share) inbox.values[share][thread] = {0, 0, 0, 0};
    device::fence_async_proxy();
    __syncthreads();
    start_inbox(inbox);
    const bool takes_part = (ctas >> cta & 1) != 0;
    const SharedAddress barrier = device::shared_address(&inbox.barrier);
    if (takes_part) expect(inbox, cluster * bytes);
    if (thread == 0)
        device::copy_bulk_multicast(device::shared_address(inbox.values[cta]), from + cta * threads, bytes, barrier,
                                    static_cast<std::uint16_t>(ctas));
    if (takes_part) device::wait_mbarrier(barrier, 0);
    for (int share = 0; share < cluster && takes_part; ++share) {
        const uint4 expected = from[share * threads + thread];
        const float4 got = inbox.values[share][thread];
        if (__float_as_uint(got.x) != expected.x || __float_as_uint(got.w) != expected.w) atomicAdd(failures, 1U);
    }
    __syncthreads();
    device::arrive_at_cluster();
    device::wait_for_cluster();
    for (int share = 0; share < cluster && !takes_part; ++share)
        if (inbox.values[share][thread].x != 0) atomicAdd(failures, 1U);
}

TEST_P(ExchangeDevice, SharedCopiesReachThoseWhoseBitIsSet) {
    std::vector<uint4> data(max_cluster * threads);
    for (std::size_t i = 0; i < data.size(); ++i) {
        const auto word = static_cast<std::uint32_t>(i * 2654435761U | 1);
        data[i] = {word, word + 1, word + 2, word + 3};
    }
    const DeviceArray<uint4> from(data);
    const std::uint32_t all = (1U << cluster()) - 1;
    for (const std::uint32_t ctas : {all, all & 0x5555U, 1U << (cluster() - 1)}) {
        const DeviceArray<std::uint32_t> failures(std::vector<std::uint32_t>{0});
        run_clusters(multicast_kernel, sizeof(Inbox), GetParam(), ctas, from.data(), failures.data());
        EXPECT_EQ(failures.values()[0], 0U) << std::hex << ctas;
    }
}

/// Every CTA says at every other one's barrier that it has written: a stage may be overwritten once all have.
__global__ void arrivals_kernel(int cluster, std::uint32_t* written, std::uint32_t* failures) {
    __shared__ std::uint64_t memory;
    const int cta = number_in_cluster(cluster), thread = static_cast<int>(threadIdx.x);
    const int first = static_cast<int>(device::cluster_of_grid_x()) * cluster;
    const SharedAddress barrier = device::shared_address(&memory);
    if (thread == 0) {
        device::init_mbarrier(barrier, cluster);
        device::fence_mbarrier_init();
    }
    __syncwarp();
    device::arrive_at_cluster();
    device::wait_for_cluster();
    for (std::uint32_t phase = 0; phase < 4; ++phase) {
        if (thread == 0) {
            spin(20000LL * ((cta * 7 + static_cast<int>(phase)) % cluster));
            written[first + cta] = phase + 1;
            __threadfence();
            for (int to = 0; to < cluster; ++to) device::arrive_at_peer(device::map_to_cta(barrier, to));
        }
        device::wait_mbarrier(barrier, phase % 2);
        for (int from = 0; from < cluster; ++from) {
            const std::uint32_t seen = *static_cast<volatile std::uint32_t*>(written + first + from);
            if (seen < phase + 1) atomicAdd(failures, 1U);
        }
        // An arrival for the next phase must not be counted in this one anywhere.
        __syncthreads();
        device::arrive_at_cluster();
        device::wait_for_cluster();
    }
}

TEST_P(ExchangeDevice, ArrivalsAtPeersAreCounted) {
    const DeviceArray<std::uint32_t> written(std::vector<std::uint32_t>(clusters * cluster(), 0));
    const DeviceArray<std::uint32_t> failures(std::vector<std::uint32_t>{0});
    run_clusters(arrivals_kernel, 0, GetParam(), written.data(), failures.data());
    EXPECT_EQ(failures.values()[0], 0U);
    EXPECT_EQ(written.values(), std::vector<std::uint32_t>(clusters * cluster(), 4));
}

/// CTAs arrive at very different times; nobody may pass before the last one. Counts who did.
__global__ void barrier_kernel(int cluster, std::uint32_t* arrived, std::uint32_t* failures) {
    const int cta = number_in_cluster(cluster);
    std::uint32_t* const mine = arrived + device::cluster_of_grid_x();
    for (int round = 1; round <= 4; ++round) {
        spin(20000LL * ((cta * 5 + round) % cluster));
        if (threadIdx.x == 0) {
            atomicAdd(mine, 1U);
            __threadfence();
        }
        __syncthreads();
        device::arrive_at_cluster();
        device::wait_for_cluster();
        const std::uint32_t seen = atomicAdd(mine, 0U);
        if (seen < static_cast<std::uint32_t>(round * cluster)) atomicAdd(failures, 1U);
        __syncthreads();  // all have looked before anyone counts for the next round
        device::arrive_at_cluster();
        device::wait_for_cluster();
    }
}

TEST_P(ExchangeDevice, NobodyPassesAClusterBarrierEarly) {
    const DeviceArray<std::uint32_t> arrived(std::vector<std::uint32_t>(clusters, 0));
    const DeviceArray<std::uint32_t> failures(std::vector<std::uint32_t>{0});
    run_clusters(barrier_kernel, 0, GetParam(), arrived.data(), failures.data());
    EXPECT_EQ(failures.values()[0], 0U);
    EXPECT_EQ(arrived.values(), std::vector<std::uint32_t>(clusters, 4 * cluster()));
}

struct Place {
    std::uint32_t x, y, cluster, block_x, block_y, number;
};

/// Each CTA writes its number in the grid to CTA 0's shared memory, at its own number in the cluster.
__global__ void place_kernel(Place* places, int cluster_x) {
    __shared__ __align__(16) float4 inbox[max_cluster];
    __shared__ std::uint64_t memory;
    const std::uint32_t x = device::cta_of_cluster_x(), y = device::cta_of_cluster_y();
    const SharedAddress barrier = device::shared_address(&memory);
    const std::uint32_t number = x + y * cluster_x;
    if (threadIdx.x == 0) {
        device::init_mbarrier(barrier, 1);
        device::fence_mbarrier_init();
        device::arrive_expecting(barrier, 16);
    }
    __syncwarp();
    device::arrive_at_cluster();
    device::wait_for_cluster();
    // To the CTA of the same number: map_to_cta's numbers are x + y * cluster_x.
    if (threadIdx.x == 0) {
        device::store_async(device::map_to_cta(device::shared_address(inbox), number), static_cast<float>(number), 0, 0,
                            0, device::map_to_cta(barrier, number));
        device::wait_mbarrier(barrier, 0);
        places[blockIdx.y * gridDim.x + blockIdx.x] = {x,          y,          device::cluster_of_grid_x(),
                                                       blockIdx.x, blockIdx.y, static_cast<std::uint32_t>(inbox[0].x)};
    }
    __syncwarp();
    device::arrive_at_cluster();
    device::wait_for_cluster();
}

TEST_P(ExchangeDevice, ClustersOfTwoDimensions) {
    for (unsigned along_y = 1; along_y <= cluster(); ++along_y) {
        if (cluster() % along_y != 0) continue;
        const unsigned along_x = cluster() / along_y;
        const dim3 grid(3 * along_x, 2 * along_y);
        const DeviceArray<Place> places(grid.x * grid.y);
        detail::allow_launches(place_kernel, 0, "place_kernel");
        run(place_kernel, {.grid = grid, .cluster = dim3(along_x, along_y), .threads = 32}, places.data(),
            static_cast<int>(along_x));
        for (const Place& place : places.values()) {
            EXPECT_EQ(place.x, place.block_x % along_x);
            EXPECT_EQ(place.y, place.block_y % along_y);
            EXPECT_EQ(place.cluster, place.block_x / along_x);
            EXPECT_EQ(place.number, place.x + place.y * along_x);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Clusters, ExchangeDevice, testing::Values(2, 3, 4, 8, 16),
                         [](const auto& info) { return "Of" + std::to_string(info.param); });

// ---------------------------------------------------------------------------------------------------------------------
class BarrierDevice : public OnDevice {};

/// Phases of an mbarrier as one CTA sees them: [before, without its bytes, after them] of two phases.
__global__ void phases_kernel(std::uint32_t* seen) {
    __shared__ __align__(16) float4 inbox;
    __shared__ std::uint64_t memory;
    const SharedAddress barrier = device::shared_address(&memory);
    device::init_mbarrier(barrier, 1);
    device::fence_mbarrier_init();
    for (std::uint32_t phase = 0; phase < 2; ++phase) {
        *seen++ = device::mbarrier_phase_ended(barrier, phase) ? 1 : 0;
        device::arrive_expecting(barrier, 16);
        // The store depends on the answer: the question may wait, and must not see bytes of a store behind it.
        const bool without_bytes = device::mbarrier_phase_ended(barrier, phase);
        *seen++ = without_bytes ? 1 : 0;
        if (!without_bytes)
            device::store_async(device::map_to_cta(device::shared_address(&inbox), 0), 1, 2, 3, 4,
                                device::map_to_cta(barrier, 0));
        device::wait_mbarrier(barrier, phase);
        *seen++ = device::mbarrier_phase_ended(barrier, phase) ? 1 : 0;
        *seen++ = inbox.w == 4 ? 1 : 0;
        inbox.w = 0;
    }
}

TEST_F(BarrierDevice, APhaseEndsWithItsBytes) {
    const DeviceArray<std::uint32_t> seen(8);
    run(phases_kernel, {.threads = 1}, seen.data());
    EXPECT_EQ(seen.values(), (std::vector<std::uint32_t>{0, 0, 1, 1, 0, 0, 1, 1}));
}

/// [one arrival short, complete].
__global__ void many_arrivals_kernel(std::uint32_t* seen) {
    __shared__ std::uint64_t memory;
    const SharedAddress barrier = device::shared_address(&memory);
    device::init_mbarrier(barrier, 34);
    device::arrive(barrier);
    device::arrive(barrier, 32);
    const bool early = device::mbarrier_phase_ended(barrier, 0);
    seen[0] = early ? 1 : 0;
    if (!early) device::arrive(barrier);  // depends on the answer, as above
    device::wait_mbarrier(barrier, 0);
    seen[1] = 1;
}

TEST_F(BarrierDevice, ArrivalsCountAsManyAsTheySay) {
    const DeviceArray<std::uint32_t> seen(2);
    run(many_arrivals_kernel, {.threads = 1}, seen.data());
    EXPECT_EQ(seen.values(), (std::vector<std::uint32_t>{0, 1}));
}

}  // namespace
}  // namespace sparsemla::test
