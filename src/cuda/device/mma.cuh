// wgmma, FP32 sums, sm_90a only. 64 keys or latent dimensions on M, from registers, and heads on N, from shared memory;
// or 64 heads on M, and keys (scores) or dimensions (values) on N.
#pragma once

#include "cuda/device/barriers.cuh"

namespace sparsemla::device {

enum class Half : std::uint8_t { f16, bf16 };

/// 16 x 16 of the 64 rows of A: rows g and g + 8 of the warp's 16, two columns of each half, g = lane / 4.
using FragmentA = std::uint32_t[4];

/// A tile of B in shared memory: rows (heads) of `kRowBytes` along K, groups of 8 rows one after the other. 16-byte
/// pieces of a row are exchanged by the row's number, as TMA's swizzles do.
template <int kRowBytes>
struct SwizzledTile {
    static_assert(kRowBytes == 32 || kRowBytes == 128);
    static constexpr std::uint64_t mode = kRowBytes == 128 ? 1 : 3;
    static constexpr int alignment_bytes = 8 * kRowBytes;

    /// What wgmma takes. Advancing by bytes (within a row, or to another tile) adds bytes / 16.
    __device__ static std::uint64_t descriptor(SharedAddress address) {
        return (mode << 62) | (std::uint64_t{8 * kRowBytes / 16} << 32) | (std::uint64_t{1} << 16) | (address >> 4);
    }
    /// Byte of 16-byte piece `piece` of row `row`.
    __device__ static std::uint32_t byte(std::uint32_t row, std::uint32_t piece) {
        const std::uint32_t exchange = kRowBytes == 128 ? row & 7 : (row >> 2) & 1;
        return row * kRowBytes + ((piece ^ exchange) * 16);
    }
};

/// Rows (heads or keys) of halves in blocks of 64 dimensions, the layout of TMA's 128-byte swizzle: block by block, of
/// a block row by row. As what is multiplied along its dimensions, and as values, whose rows are multiplied.
template <int kRows>
struct BlockTile {
    static_assert(kRows % 8 == 0);
    static constexpr int block_bytes = kRows * 128;
    static constexpr int alignment_bytes = 1024;

    /// 16 dimensions of all rows: the first ones, and how much further those from `dim` (a multiple of 16) on are.
    __device__ static std::uint64_t rows(SharedAddress tile) { return SwizzledTile<128>::descriptor(tile); }
    /// The upper 32 bits of that, which no address changes.
    __device__ static constexpr std::uint32_t upper_word() {
        return static_cast<std::uint32_t>(SwizzledTile<128>::mode << 30) | 8 * 128 / 16;
    }
    __device__ static constexpr std::uint64_t rows_from(int dim) {
        return static_cast<std::uint64_t>((dim / 64 * block_bytes + dim % 64 * 2) / 16);
    }
    /// 16 rows, all dimensions that the instruction takes: the first ones, and how much further those from `dim` (a
    /// multiple of 64) and `row` (of 16) on are.
    __device__ static std::uint64_t values(SharedAddress tile) {
        return (SwizzledTile<128>::mode << 62) | (std::uint64_t{1024 / 16} << 32) |
               (std::uint64_t{block_bytes / 16} << 16) | (tile >> 4);
    }
    __device__ static constexpr std::uint64_t values_from(int dim, int row) {
        return static_cast<std::uint64_t>((dim / 64 * block_bytes + row * 128) / 16);
    }
    /// Byte of 16-byte piece `piece` (8 dimensions) of a row.
    __device__ static std::uint32_t byte(std::uint32_t row, std::uint32_t piece) {
        return piece / 8 * block_bytes + SwizzledTile<128>::byte(row, piece % 8);
    }
};

// Keeps the compiler from computing these operands between the wgmma that use them, which would serialise those.
template <int kRegisters>
__device__ inline void pin(float (&registers)[kRegisters]) {
#pragma unroll
    for (float& value : registers) asm volatile("" : "+f"(value)::"memory");
}
__device__ inline void pin(FragmentA& fragment) {
#pragma unroll
    for (std::uint32_t& value : fragment) asm volatile("" : "+r"(value)::"memory");
}

// Orders this thread's register accesses before the wgmma that follow.
__device__ inline void fence_mma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_mma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most kPending groups of this warpgroup are under way.
template <int kPending>
__device__ inline void wait_for_mma() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d (+)= a * b^T, K = 16, for 8 heads.
template <Half kHalf>
__device__ inline void mma_async(float (&d)[4], const FragmentA& a, std::uint64_t b, int accumulate) {
    static_assert(kHalf == Half::f16, "nobody needs 8 heads of BF16");
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
        "{%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, %8, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
        : "memory");
}

// d (+)= a * b^T, K = 16. d: for each 8 heads, rows g and g + 8 of the warp's 16 and heads 2t, 2t + 1 (t = lane % 4).
template <Half kHalf>
__device__ inline void mma_async(float (&d)[8], const FragmentA& a, std::uint64_t b, int accumulate) {
    if constexpr (kHalf == Half::f16) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %13, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7}, "
            "{%8, %9, %10, %11}, %12, p, 1, 1, 0;\n"
            "}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
            : "memory");
    } else {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %13, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7}, "
            "{%8, %9, %10, %11}, %12, p, 1, 1, 0;\n"
            "}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
            : "memory");
    }
}

template <Half kHalf>
__device__ inline void mma_async(float (&d)[16], const FragmentA& a, std::uint64_t b, int accumulate) {
    if constexpr (kHalf == Half::f16) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %21, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
            "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n"
            "}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
            : "memory");
    } else {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %21, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
            "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n"
            "}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
            : "memory");
    }
}

__device__ inline std::uint32_t lower_word(std::uint64_t descriptor) { return static_cast<std::uint32_t>(descriptor); }

// d (+)= a * b^T, K = 16, of 64 heads and 32 keys, both in shared memory: lower words of their descriptors, which have
// the same upper one. d: for each 8 keys, heads g and g + 8 of the warp's 16 and keys 2t, 2t + 1.
template <Half kHalf, std::uint32_t kUpper>
__device__ inline void mma_async_shared(float (&d)[16], std::uint32_t a, std::uint32_t b, int accumulate) {
    if constexpr (kHalf == Half::f16) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            ".reg .b64 a, b;\n"
            "setp.ne.b32 p, %18, 0;\n"
            "mov.b64 a, {%16, %19};\n"
            "mov.b64 b, {%17, %19};\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, "
            "%8, %9, %10, %11, %12, %13, %14, %15}, "
            "a, b, p, 1, 1, 0, 0;\n"
            "}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
            : "r"(a), "r"(b), "r"(accumulate), "n"(kUpper)
            : "memory");
    } else {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            ".reg .b64 a, b;\n"
            "setp.ne.b32 p, %18, 0;\n"
            "mov.b64 a, {%16, %19};\n"
            "mov.b64 b, {%17, %19};\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, "
            "%8, %9, %10, %11, %12, %13, %14, %15}, "
            "a, b, p, 1, 1, 0, 0;\n"
            "}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
            : "r"(a), "r"(b), "r"(accumulate), "n"(kUpper)
            : "memory");
    }
}

// d (+)= a * b, K = 16, of 64 heads and 64 dimensions; b: BlockTile::values. d: for each 8 dimensions, heads g
// and g + 8 of the warp's 16 and dimensions 2t, 2t + 1.
template <Half kHalf>
__device__ inline void mma_async_values(float (&d)[32], const FragmentA& a, std::uint64_t b, int accumulate) {
    if constexpr (kHalf == Half::f16) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %37, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, "
            "%8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31}, "
            "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n"
            "}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
            : "memory");
    } else {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %37, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, "
            "%8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, "
            "%24, %25, %26, %27, %28, %29, %30, %31}, "
            "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n"
            "}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
            : "memory");
    }
}

}  // namespace sparsemla::device
