// What tests tell and ask the fake NCCL (fake_nccl.cpp).
#pragma once

#include <cstdint>

namespace sparsemla::test {

struct FakeNcclFaults {
    int version = 22902;
    int team = 0;             ///< ranks that reach each other are so many in a row; 0: all
    int null_memory = 0;      ///< that allocation succeeds and is null; counts from 1
    int no_memory = 0;        ///< that allocation fails
    int null_window = -1;     ///< of that rank
    int foreign_window = -1;  ///< that rank's window is not in memory of the device
    int register_error = -1;  ///< of that rank
    int async_error = -1;     ///< of that rank, from its second call on
    int swapped = -1;         ///< that rank's addresses lead to other ranks
};

struct FakeNcclState {
    int comms = 0, windows = 0, memory = 0;  ///< that live
    int aborts = 0, allocations = 0;
    int violations = 0;  ///< 1: a communicator ended before its window; 2: memory freed under a window
};

}  // namespace sparsemla::test
