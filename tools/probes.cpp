#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tools/probes.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// Highway compiles what follows once per instruction set.

HWY_BEFORE_NAMESPACE();
namespace sparsemla::tool {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Enough independent chains to hide the latency of an FMA (4 to 5 cycles, two a cycle) without spilling registers.
constexpr int chains = 12;

/// FP32 operations per call.
double fma_operations(long iterations) {
    const hn::ScalableTag<float> d;
    return 2.0 * chains * static_cast<double>(hn::Lanes(d)) * static_cast<double>(iterations);
}

float run_fma(long iterations) {
    const hn::ScalableTag<float> d;
    const auto factor = hn::Set(d, 0.999F);
    const auto term = hn::Set(d, 0.001F);
    // One variable per chain: an array of scalable vectors is not a type on every instruction set.
    auto a = hn::Zero(d), b = a, c = a, e = a, f = a, g = a, h = a, i = a, j = a, k = a, l = a, m = a;
    for (long n = 0; n < iterations; ++n) {
        a = hn::MulAdd(a, factor, term);
        b = hn::MulAdd(b, factor, term);
        c = hn::MulAdd(c, factor, term);
        e = hn::MulAdd(e, factor, term);
        f = hn::MulAdd(f, factor, term);
        g = hn::MulAdd(g, factor, term);
        h = hn::MulAdd(h, factor, term);
        i = hn::MulAdd(i, factor, term);
        j = hn::MulAdd(j, factor, term);
        k = hn::MulAdd(k, factor, term);
        l = hn::MulAdd(l, factor, term);
        m = hn::MulAdd(m, factor, term);
    }
    const auto left = hn::Add(hn::Add(hn::Add(a, b), hn::Add(c, e)), hn::Add(f, g));
    const auto right = hn::Add(hn::Add(hn::Add(h, i), hn::Add(j, k)), hn::Add(l, m));
    return hn::GetLane(hn::SumOfLanes(d, hn::Add(left, right)));
}

/// Reads `count` floats, a multiple of four vectors, from aligned memory.
float run_read(const float* data, size_t count) {
    const hn::ScalableTag<float> d;
    const size_t lanes = hn::Lanes(d);
    auto a = hn::Zero(d), b = a, c = a, e = a;
    for (size_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
        a = hn::Add(a, hn::Load(d, data + i));
        b = hn::Add(b, hn::Load(d, data + i + lanes));
        c = hn::Add(c, hn::Load(d, data + i + 2 * lanes));
        e = hn::Add(e, hn::Load(d, data + i + 3 * lanes));
    }
    return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(a, b), hn::Add(c, e))));
}

}  // namespace HWY_NAMESPACE
}  // namespace sparsemla::tool
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <hwy/aligned_allocator.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

#include "tools/probes.h"

namespace sparsemla::tool {

HWY_EXPORT(fma_operations);
HWY_EXPORT(run_fma);
HWY_EXPORT(run_read);

namespace {

/// Short attempts and many: only one needs to find all threads undisturbed.
constexpr int fma_attempts = 25;
constexpr int read_attempts = 8;
constexpr long fma_iterations = 1'000'000;
constexpr std::size_t buffer_floats = std::size_t{64} << 20;

/// Keeps the probes' results alive, so that no compiler drops the loops.
std::atomic<float> sink{0};

/// Seconds from a common start until every thread has done work(thread).
template <class Work>
double together(int threads, Work&& work) {
    std::atomic<int> waiting{threads};
    std::vector<std::chrono::steady_clock::time_point> ends(static_cast<std::size_t>(threads));
    std::vector<std::thread> crew;
    std::atomic<bool> go{false};
    for (int t = 0; t < threads; ++t)
        crew.emplace_back([&, t] {
            --waiting;
            while (!go) std::this_thread::yield();
            work(t);
            ends[static_cast<std::size_t>(t)] = std::chrono::steady_clock::now();
        });
    while (waiting != 0) std::this_thread::yield();
    const auto start = std::chrono::steady_clock::now();
    go = true;
    for (std::thread& thread : crew) thread.join();
    return std::chrono::duration<double>(*std::max_element(ends.begin(), ends.end()) - start).count();
}

double measure_fma(int threads) {
    double best = 0;
    for (int attempt = 0; attempt < fma_attempts; ++attempt) {
        const double seconds = together(threads, [](int) { sink = HWY_DYNAMIC_DISPATCH(run_fma)(fma_iterations); });
        best = std::max(best, HWY_DYNAMIC_DISPATCH(fma_operations)(fma_iterations) * threads / seconds);
    }
    return best;
}

double measure_read(int threads) {
    // Whole pages per thread, so that every share is aligned for any vector.
    const std::size_t share = buffer_floats / static_cast<std::size_t>(threads) / 1024 * 1024;
    const auto buffer = hwy::AllocateAligned<float>(share * static_cast<std::size_t>(threads));
    if (buffer == nullptr) return 0;
    const auto part = [&](int t) { return buffer.get() + static_cast<std::size_t>(t) * share; };
    together(threads, [&](int t) { std::fill_n(part(t), share, 1.0F); });
    double best = 0;
    for (int attempt = 0; attempt < read_attempts; ++attempt) {
        const double seconds = together(threads, [&](int t) { sink = HWY_DYNAMIC_DISPATCH(run_read)(part(t), share); });
        best = std::max(best, static_cast<double>(share * sizeof(float)) * threads / seconds);
    }
    return best;
}

}  // namespace

MachineLimits measure_limits(int threads) {
    return {.fma_flops_per_s = measure_fma(threads), .read_bytes_per_s = measure_read(threads), .threads = threads};
}

}  // namespace sparsemla::tool

#endif  // HWY_ONCE
