// Parallel loops over oneTBB, with the happens-before edges that ThreadSanitizer cannot see in an uninstrumented
// libtbb.
#pragma once

#include <tbb/blocked_range.h>
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_THREAD__)
#define SPARSEMLA_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SPARSEMLA_TSAN 1
#endif
#endif

#ifdef SPARSEMLA_TSAN
extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#define SPARSEMLA_TSAN_IGNORES __attribute__((no_sanitize("thread"), noinline))
#else
#define SPARSEMLA_TSAN_IGNORES
#endif

namespace sparsemla::detail {

/// A moment of a loop that threads pass in order: everything before `leave` happens before everything after `enter`.
class Gate {
   public:
    void leave() {
#ifdef SPARSEMLA_TSAN
        __tsan_release(&token_);
#endif
    }
    void enter() {
#ifdef SPARSEMLA_TSAN
        __tsan_acquire(&token_);
#endif
    }

   private:
    [[maybe_unused]] char token_ = 0;
};

/// What the tasks of a loop run: `work` between two gates. Its own fields are read before the first gate, which only
/// oneTBB's order covers.
template <class Work>
struct GatedWork {
    Gate* start;
    Gate* finish;
    const Work* work;

    SPARSEMLA_TSAN_IGNORES void operator()(const tbb::blocked_range<std::int64_t>& range) const {
        start->enter();
        (*work)(range);
        finish->leave();
    }
};

/// A fixed number of threads that run loops. Made per call: it owns no thread, oneTBB's pool does.
class ThreadTeam {
   public:
    /// No more threads than oneTBB may use: it would print a warning.
    explicit ThreadTeam(int threads) : threads_(std::min(threads, allowed_threads())), arena_(threads_) {}

    /// Calls `loops`, which calls for_each any number of times.
    template <class Loops>
    void run(const Loops& loops) {
        if (threads_ == 1)
            loops();
        else
            arena_.execute(loops);
    }

    /// Within run: body(index, thread) for every index of [0, count), thread in [0, threads); no two calls that run at
    /// the same time share a thread number. Returns when all are done. Which thread runs an index is not determined.
    template <class Body>
    void for_each(std::int64_t count, const Body& body) {
        if (threads_ == 1 || count <= 1) {
            for (std::int64_t i = 0; i < count; ++i) body(i, 0);
            return;
        }
        const auto work = [&](const tbb::blocked_range<std::int64_t>& range) {
            const int thread = tbb::this_task_arena::current_thread_index();
            for (std::int64_t i = range.begin(); i != range.end(); ++i) body(i, thread);
        };
        Gate start;
        Gate finish;
        start.leave();
        tbb::parallel_for(tbb::blocked_range<std::int64_t>(0, count, 1),
                          GatedWork<decltype(work)>{&start, &finish, &work}, tbb::simple_partitioner());
        finish.enter();
    }

   private:
    static int allowed_threads() {
        return static_cast<int>(std::min<std::size_t>(
            tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism), 1 << 16));
    }

    int threads_;
    tbb::task_arena arena_;
};

}  // namespace sparsemla::detail
