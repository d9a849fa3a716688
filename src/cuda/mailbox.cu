// What goes into mailboxes on a GPU: a rank's query heads to all ranks (gather_query), results to the heads' owners
// (push); and the query out of one, for kernels that read a tensor (receive_query). A thread has 16 bytes.
#include <algorithm>

#include "cuda/device/convert.cuh"
#include "cuda/launch.h"
#include "cuda/mailbox_wait.cuh"
#include "cuda/verbs.h"
#include "gpu.h"

namespace sparsemla::detail {

namespace {

using namespace device;

constexpr int threads = 256;
constexpr int piece_bytes = 16;
constexpr int pieces_of_values = static_cast<int>(bytes_of_values / piece_bytes);

/// NaN of any payload becomes one that is not armed_word.
__device__ std::uint32_t canonical_bf16x2(std::uint32_t words) {
    const std::uint32_t above = __vcmpgtu2(words & 0x7FFF7FFF, 0x7F807F80);
    return (words & ~above) | (above & 0x7FFF7FFF);
}
__device__ std::uint32_t canonical_e4m3x4(std::uint32_t words) {
    const std::uint32_t nan = __vcmpeq4(words & 0x7F7F7F7F, 0x7F7F7F7F);
    return (words & ~nan) | (nan & 0x7F7F7F7F);
}

__device__ std::uint32_t quantise_bf16x2(std::uint32_t pair, float q_scale) {
    const float low = __fdiv_rn(__uint_as_float(pair << 16), q_scale);
    const float high = __fdiv_rn(__uint_as_float(pair & 0xFFFF0000), q_scale);
    return f32x2_to_e4m3x2(low, high);
}

/// 16 bytes of a head as the mailbox holds it: 16 dimensions of E4M3 or 8 of BF16.
__device__ uint4 stored_piece(const GatherQueryParams& params, const std::byte* head, int piece) {
    const auto* words = reinterpret_cast<const uint4*>(head);
    if (params.from == params.to) {
        uint4 x = load_global(words + piece);
        const bool halves = params.to == DType::bf16;
        x.x = halves ? canonical_bf16x2(x.x) : canonical_e4m3x4(x.x);
        x.y = halves ? canonical_bf16x2(x.y) : canonical_e4m3x4(x.y);
        x.z = halves ? canonical_bf16x2(x.z) : canonical_e4m3x4(x.z);
        x.w = halves ? canonical_bf16x2(x.w) : canonical_e4m3x4(x.w);
        return x;
    }
    const uint4 a = load_global(words + 2 * piece), b = load_global(words + 2 * piece + 1);
    const auto four = [&](std::uint32_t low, std::uint32_t high) {
        const std::uint32_t codes = quantise_bf16x2(low, params.q_scale) | quantise_bf16x2(high, params.q_scale) << 16;
        return canonical_e4m3x4(codes);
    };
    return {four(a.x, a.y), four(a.z, a.w), four(b.x, b.y), four(b.z, b.w)};
}

__global__ void __launch_bounds__(threads) gather(const __grid_constant__ GatherQueryParams params) {
    const MailboxView& mailbox = params.mailbox;
    const int pieces = mailbox.query_head_bytes / piece_bytes;
    const int number = static_cast<int>(blockIdx.x * threads + threadIdx.x);
    const int head = number / pieces, piece = number % pieces;
    const std::int64_t row = blockIdx.y;
    const bool exists = head < mailbox.own_heads;
    const std::byte* from = params.query + row * params.query_row_stride_bytes + head * params.query_head_stride_bytes;
    launch_dependent_grids();
    wait_for_prerequisite_grids();
    delay(mailbox, DcpStage::gather, static_cast<int>(blockIdx.x + blockIdx.y * gridDim.x));
    const uint4 words = exists ? stored_piece(params, from, piece) : uint4{};
    const ExchangeState state(mailbox);
    if (state.failed != 0 || !exists) return;
    const std::int64_t to =
        mailbox.query_byte(state.next, row, mailbox.head_offset[mailbox.rank] + head) + piece * piece_bytes;
    // Ranks begin with different peers.
    for (int i = 1; i <= mailbox.world; ++i) store_peer(mailbox.peers[(mailbox.rank + i) % mailbox.world] + to, words);
}

__global__ void __launch_bounds__(threads) receive(const __grid_constant__ ReceiveQueryParams params) {
    const MailboxView& mailbox = params.mailbox;
    const int pieces = mailbox.query_head_bytes / piece_bytes;
    const int number = static_cast<int>(blockIdx.x * threads + threadIdx.x);
    const int head = number / pieces, piece = number % pieces;
    const std::int64_t row = blockIdx.y;
    launch_dependent_grids();
    wait_for_prerequisite_grids();
    const ExchangeState state(mailbox);
    delay(mailbox, DcpStage::decode, static_cast<int>(blockIdx.x + blockIdx.y * gridDim.x));
    if (head >= mailbox.heads) return;
    const auto* from = reinterpret_cast<const uint4*>(own_mailbox(mailbox) + mailbox.query_byte(state.next, row, head));
    uint4 words = armed_words();  // NaN: what a failed exchange gives
    WaitLimit limit;
    if (state.failed == 0 && !wait_for(mailbox, from + piece, words, limit))
        fail(mailbox, DcpStage::decode, mailbox.owner_of_head(head), row, state.next);
    std::byte* to = params.out + row * params.out_row_stride_bytes + head * params.out_head_stride_bytes;
    reinterpret_cast<uint4*>(to)[piece] = words;
}

/// The lse of a head as it travels: base 2, one NaN.
__device__ float stored_lse(const PushParams& params, std::int64_t row, int head) {
    if (params.counts != nullptr && params.counts[row * params.counts_stride] <= 0) return -INFINITY;
    const float lse = params.lse[row * params.lse_row_stride + head * params.lse_head_stride];
    if (isnan(lse)) return __uint_as_float(nan_word);
    return params.lse_base == LseBase::two ? lse : __fmul_rn(lse, 1.44269504F);
}

/// 8 dimensions of a head as they travel.
__device__ uint4 stored_values(const PushParams& params, std::int64_t row, int head, int piece) {
    const std::int64_t element = row * params.out_row_stride + head * params.out_head_stride + 8 * piece;
    std::uint32_t words[4];
    if (params.out_dtype == DType::f32) {
        const float* values = static_cast<const float*>(params.out) + element;
        for (int i = 0; i < 4; ++i) words[i] = f32x2_to_bf16x2(values[2 * i], values[2 * i + 1]);
    } else {
        const std::uint16_t* values = static_cast<const std::uint16_t*>(params.out) + element;
        if (reinterpret_cast<std::uintptr_t>(values) % 16 == 0) {
            const uint4 all = *reinterpret_cast<const uint4*>(values);
            words[0] = all.x;
            words[1] = all.y;
            words[2] = all.z;
            words[3] = all.w;
        } else {
            for (int i = 0; i < 4; ++i) words[i] = values[2 * i] | static_cast<std::uint32_t>(values[2 * i + 1]) << 16;
        }
    }
    return {canonical_bf16x2(words[0]), canonical_bf16x2(words[1]), canonical_bf16x2(words[2]),
            canonical_bf16x2(words[3])};
}

__global__ void __launch_bounds__(threads) push_results(const __grid_constant__ PushParams params) {
    const MailboxView& mailbox = params.mailbox;
    const int number = static_cast<int>(blockIdx.x * threads + threadIdx.x);
    const int head = number / pieces_of_values, piece = number % pieces_of_values;
    const int cta = static_cast<int>(blockIdx.x + blockIdx.y * gridDim.x);
    const std::int64_t row = blockIdx.y;
    const int owner = mailbox.owner_of_head(min(head, mailbox.heads - 1));
    const int of_owner = head - mailbox.head_offset[owner];
    std::byte* peer = mailbox.peers[owner];
    launch_dependent_grids();
    wait_for_prerequisite_grids();
    const ExchangeState state(mailbox);
    delay(mailbox, DcpStage::push, cta);
    if (state.failed != 0) return;
    if (number == 0 && row == 0) mailbox.control->current = state.next;
    if (head >= mailbox.heads) return;
    const float lse = stored_lse(params, row, head);
    if (lse != -INFINITY)
        store_peer(peer + mailbox.values_byte(state.next, mailbox.rank, row, of_owner) + piece * piece_bytes,
                   stored_values(params, row, head, piece));
    if (piece == 0) store_peer(peer + mailbox.lse_byte(state.next, mailbox.rank, row, of_owner), __float_as_uint(lse));
}

/// A row of `pieces` threads for every row.
template <class Params>
void launch_rows(void (*kernel)(Params), const Params& params, std::int64_t pieces, int device, Stream stream,
                 const char* name) {
    const CurrentDevice current(device);
    launch(kernel,
           {.grid = dim3(static_cast<unsigned>((pieces + threads - 1) / threads), static_cast<unsigned>(params.rows)),
            .threads = threads,
            .stream = static_cast<cudaStream_t>(stream.handle)},
           name, params);
}

}  // namespace

void gather_query_gpu(const GatherQueryParams& params, int device, Stream stream) {
    launch_rows(gather, params, params.mailbox.own_heads * (params.mailbox.query_head_bytes / piece_bytes), device,
                stream, "gather_query");
}

void receive_query_gpu(const ReceiveQueryParams& params, int device, Stream stream) {
    launch_rows(receive, params, params.mailbox.heads * (params.mailbox.query_head_bytes / piece_bytes), device, stream,
                "receive_query");
}

void push_gpu(const PushParams& params, int device, Stream stream) {
    launch_rows(push_results, params, std::int64_t{params.mailbox.heads} * pieces_of_values, device, stream, "push");
}

void reset_gpu(const MailboxView& mailbox, std::int64_t bytes, int device, Stream stream) {
    const CurrentDevice current(device);
    auto* handle = static_cast<cudaStream_t>(stream.handle);
    check_cuda(cudaMemsetAsync(mailbox.peers[mailbox.rank], 0xFF, static_cast<std::size_t>(bytes), handle), "reset");
    check_cuda(cudaMemsetAsync(mailbox.control, 0, mailbox_control_bytes, handle), "reset");
}

MailboxControl control_gpu(const MailboxView& mailbox, int device, Stream stream) {
    const CurrentDevice current(device);
    auto* handle = static_cast<cudaStream_t>(stream.handle);
    MailboxControl control{};
    check_cuda(cudaMemcpyAsync(&control, mailbox.control, sizeof control, cudaMemcpyDeviceToHost, handle), "status");
    check_cuda(cudaStreamSynchronize(handle), "status");
    return control;
}

void* allocate_gpu(std::size_t bytes, int device) {
    const CurrentDevice current(device);
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
}

void free_gpu(void* memory, int device) {
    const CurrentDevice current(device);
    cudaFree(memory);
}

void prepare_mailbox() {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, gather), "gather_query");
    check_cuda(cudaFuncGetAttributes(&attributes, receive), "receive_query");
    check_cuda(cudaFuncGetAttributes(&attributes, push_results), "push");
}

}  // namespace sparsemla::detail
