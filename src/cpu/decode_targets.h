// The SIMD targets that the decode kernel is compiled for. Included before any header of Highway.
#pragma once

// Register tiles are arrays of vectors, which vectors of unknown length cannot be. CPUs that have those have NEON too,
// or are served by the portable target.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
