// Ranks of one process, each on a thread of its own.
#pragma once

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace sparsemla::harness {

/// Calls run(rank) on a thread for each rank and waits for all of them. What one throws is thrown again then.
template <class Run>
void on_rank_threads(int ranks, const Run& run) {
    std::mutex mutex;
    std::exception_ptr first;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank)
        threads.emplace_back([&, rank] {
            try {
                run(rank);
            } catch (...) {
                const std::scoped_lock lock(mutex);
                if (first == nullptr) first = std::current_exception();
            }
        });
    for (std::thread& thread : threads) thread.join();
    if (first != nullptr) std::rethrow_exception(first);
}

}  // namespace sparsemla::harness
