// Work for measuring a GPU, beside the memory, streams and graphs of gpu.h. gpu_probes.cu serves builds with the CUDA
// part; in the others gpu_none.cpp throws Error(unsupported).
#pragma once

#include <cstddef>

#include "sparsemla/tensor.h"

namespace sparsemla::harness {

/// These three put work on a stream of the device and do not wait.
void copy_on(Device device, Stream stream, void* to, const void* from, std::size_t bytes);
/// Reads memory (16-byte aligned, whole 16 bytes) and writes none: of several times the L2's size, it takes the place
/// of what the L2 held and leaves nothing there that would have to be written back.
void read_on(Device device, Stream stream, const void* from, std::size_t bytes);
/// A kernel of one CTA on every SM that waits for the grid before it and does nothing, launched as decode's kernels
/// are: with a programmatic edge.
void empty_on(Device device, Stream stream);

struct GpuClocks {
    double sm_mhz = 0;          ///< while one CTA spins
    double largest_sm_mhz = 0;  ///< that the device states; 0: unknown
    double largest_memory_mhz = 0;
};

/// Takes some 30 ms.
GpuClocks measure_clocks(Device device);

}  // namespace sparsemla::harness
