// Loads, stores and copies: global memory, this CTA's shared memory by address, fragments out of it (ldmatrix).
#pragma once

#include "cuda/device/barriers.cuh"

namespace sparsemla::device {

// 16 bytes from global memory to this CTA's shared memory; with `absent` zeros, and nothing is read.
__device__ inline void copy_16_async(SharedAddress to, const void* from, bool absent) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "cp.async.cg.shared.global [%0], [%1], 16, p;\n"
        "}" ::"r"(to),
        "l"(from), "r"(static_cast<std::uint32_t>(absent))
        : "memory");
}

// The same, both addresses kOffset bytes further, which costs nothing.
template <int kOffset>
__device__ inline void copy_16_async_at(SharedAddress to, const void* from, bool absent) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "cp.async.cg.shared.global [%0 + %3], [%1 + %3], 16, p;\n"
        "}" ::"r"(to),
        "l"(from), "r"(static_cast<std::uint32_t>(absent)), "n"(kOffset)
        : "memory");
}

// The same of 8 bytes.
__device__ inline void copy_8_async(SharedAddress to, const void* from, bool absent) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "cp.async.ca.shared.global [%0], [%1], 8, p;\n"
        "}" ::"r"(to),
        "l"(from), "r"(static_cast<std::uint32_t>(absent))
        : "memory");
}

__device__ inline void copy_4_async(SharedAddress to, const void* from, bool absent) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "cp.async.ca.shared.global [%0], [%1], 4, p;\n"
        "}" ::"r"(to),
        "l"(from), "r"(static_cast<std::uint32_t>(absent))
        : "memory");
}

// All of this thread's asynchronous copies of 16, 8 and 4 bytes have come; other threads need a barrier besides.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// This thread's copies since the last commit are a group, which may be empty.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the newest kPending groups have come.
template <int kPending>
__device__ inline void wait_for_copy_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A run of bytes (a multiple of 16, both ends 16-byte aligned) from global memory; its bytes count at `barrier`.
__device__ inline void copy_bulk_async(SharedAddress to, const void* from, std::uint32_t bytes, SharedAddress barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The same to this place in every CTA of the cluster whose bit is set; each one's barrier counts.
__device__ inline void copy_bulk_multicast(SharedAddress to, const void* from, std::uint32_t bytes,
                                           SharedAddress barrier, std::uint16_t ctas) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"(ctas)
        : "memory");
}

// Loads of what an earlier grid may have written: volatile, so that they stay behind the dependency wait.
__device__ inline std::int32_t load_global(const std::int32_t* from) {
    std::int32_t value;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ inline uint4 load_global(const uint4* from) {
    uint4 value;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from)
                 : "memory");
    return value;
}

// The same, or `otherwise` and nothing is read; without a branch, so that several may be under way.
__device__ inline std::int32_t load_global_if(bool condition, const std::int32_t* from, std::int32_t otherwise) {
    std::int32_t value = otherwise;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p ld.global.b32 %0, [%1];\n"
        "}"
        : "+r"(value)
        : "l"(from), "r"(static_cast<std::uint32_t>(condition))
        : "memory");
    return value;
}

// load_global_if of where a < b.
__device__ inline std::int32_t load_global_if_less(std::int32_t a, std::int32_t b, const std::int32_t* from,
                                                   std::int32_t otherwise) {
    std::int32_t value = otherwise;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.lt.s32 p, %2, %3;\n"
        "@p ld.global.b32 %0, [%1];\n"
        "}"
        : "+r"(value)
        : "l"(from), "r"(a), "r"(b)
        : "memory");
    return value;
}

// load_global_if of a generic address: global or shared memory.
__device__ inline std::int32_t load_generic_if(bool condition, const std::int32_t* from, std::int32_t otherwise) {
    std::int32_t value = otherwise;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p ld.b32 %0, [%1];\n"
        "}"
        : "+r"(value)
        : "l"(from), "r"(static_cast<std::uint32_t>(condition))
        : "memory");
    return value;
}

// Zeros otherwise.
__device__ inline uint4 load_global_if(bool condition, const uint4* from) {
    uint4 value = {0, 0, 0, 0};
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %5, 0;\n"
        "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
        : "l"(from), "r"(static_cast<std::uint32_t>(condition))
        : "memory");
    return value;
}
__device__ inline std::uint32_t load_global_if_16(bool condition, const std::byte* from) {
    std::uint32_t value = 0;  // a narrower register would be extended at once, and waited for
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p ld.global.u16 %0, [%1];\n"
        "}"
        : "+r"(value)
        : "l"(from), "r"(static_cast<std::uint32_t>(condition))
        : "memory");
    return value;
}
__device__ inline std::uint32_t load_global_if_32(bool condition, const std::byte* from) {
    const auto* word = reinterpret_cast<const std::int32_t*>(from);
    return static_cast<std::uint32_t>(load_global_if(condition, word, 0));
}

// Without a branch: stores of many outputs follow each other at once.
__device__ inline void store_global_if(bool condition, void* to, std::uint32_t value) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p st.global.b32 [%0], %1;\n"
        "}" ::"l"(to),
        "r"(value), "r"(static_cast<std::uint32_t>(condition))
        : "memory");
}

__device__ inline void store_global_if(bool condition, void* to, const uint4& value) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %5, 0;\n"
        "@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
        "}" ::"l"(to),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(static_cast<std::uint32_t>(condition))
        : "memory");
}
__device__ inline void store_global_if(bool condition, void* to, const uint2& value) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %3, 0;\n"
        "@p st.global.v2.b32 [%0], {%1, %2};\n"
        "}" ::"l"(to),
        "r"(value.x), "r"(value.y), "r"(static_cast<std::uint32_t>(condition))
        : "memory");
}

// 2, 4, 8 and 16 bytes of this CTA's shared memory.
template <class Value>
__device__ Value load_shared(SharedAddress from);
template <>
__device__ inline float2 load_shared(SharedAddress from) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(from) : "memory");
    return value;
}
template <>
__device__ inline float4 load_shared(SharedAddress from) {
    float4 value;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}

template <>
__device__ inline uint2 load_shared(SharedAddress from) {
    uint2 value;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(from) : "memory");
    return value;
}
template <>
__device__ inline uint4 load_shared(SharedAddress from) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}
template <>
__device__ inline std::uint32_t load_shared(SharedAddress from) {
    std::uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return value;
}
template <>
__device__ inline float load_shared(SharedAddress from) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
    return value;
}
template <>
__device__ inline std::uint64_t load_shared(SharedAddress from) {
    std::uint64_t value;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(value) : "r"(from) : "memory");
    return value;
}
template <>
__device__ inline ulonglong2 load_shared(SharedAddress from) {
    ulonglong2 value;
    asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];" : "=l"(value.x), "=l"(value.y) : "r"(from) : "memory");
    return value;
}
__device__ inline std::uint32_t load_shared_16(SharedAddress from) {
    std::uint16_t value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(from) : "memory");
    return value;
}

// 16, 8, 4, 2 and 1 bytes to this CTA's shared memory.
__device__ inline void store_shared(SharedAddress to, const uint4& value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}
__device__ inline void store_shared(SharedAddress to, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
__device__ inline void store_shared(SharedAddress to, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
__device__ inline void store_shared(SharedAddress to, std::uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

__device__ inline void store_shared_64(SharedAddress to, std::uint64_t value) {
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(to), "l"(value) : "memory");
}

// The same where `wanted`, without a branch.
__device__ inline void store_shared_if(bool wanted, SharedAddress to, std::uint32_t value) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %0, 0;\n"
        "@p st.shared.b32 [%1], %2;\n"
        "}" ::"r"(static_cast<std::uint32_t>(wanted)),
        "r"(to), "r"(value)
        : "memory");
}

__device__ inline void store_shared_if(bool wanted, SharedAddress to, float x, float y) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %0, 0;\n"
        "@p st.shared.v2.f32 [%1], {%2, %3};\n"
        "}" ::"r"(static_cast<std::uint32_t>(wanted)),
        "r"(to), "f"(x), "f"(y)
        : "memory");
}

__device__ inline void store_shared(SharedAddress to, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
__device__ inline void store_shared_16(SharedAddress to, std::uint32_t value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(static_cast<std::uint16_t>(value)) : "memory");
}
__device__ inline void store_shared_8(SharedAddress to, std::uint32_t value) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(std::uint32_t (&words)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(row)
                 : "memory");
}

// Two matrices: lanes 0 .. 15 give the rows.
__device__ inline void load_matrices(std::uint32_t (&words)[2], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(row)
                 : "memory");
}

// Four matrices, each transposed: the lane receives two rows of one column.
__device__ inline void load_matrices_transposed(std::uint32_t (&words)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(row)
                 : "memory");
}

}  // namespace sparsemla::device
