// The seam between the API and the kernels: plain parameter structs, and one entry per kernel. No CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "sparsemla/decode.h"
#include "sparsemla/indices.h"

namespace sparsemla::detail {

struct MailboxView;

/// A validated source. Strides are in elements of their tensor.
struct SourceParams {
    CacheView cache;
    const std::int32_t* slots = nullptr;
    std::int64_t slots_row_stride = 0;
    const std::int32_t* counts = nullptr;  ///< null: every column
    std::int64_t counts_stride = 0;
    std::int64_t width = 0;
    std::int64_t count_offset = 0;
    Scale k_scale;
};

/// A validated call of convert_indices.
struct ConvertParams {
    const std::int32_t* token_ids = nullptr;
    std::int64_t ids_row_stride = 0;
    const std::int32_t* block_table = nullptr;
    std::int64_t table_row_stride = 0;
    const std::int32_t* request_of_row = nullptr;
    std::int64_t request_stride = 0;
    const std::int32_t* lengths = nullptr;  ///< null: no limit
    std::int64_t lengths_stride = 0;
    std::int32_t* slots = nullptr;
    std::int64_t slots_row_stride = 0;
    std::int32_t* counts = nullptr;
    std::int64_t counts_stride = 0;
    std::int64_t rows = 0, width = 0, requests = 0, max_pages = 0;
    std::int64_t pages = 0, page_size = 0, slots_per_page = 0;
    Sharding sharding;
};

/// A validated call of decode: every pointer and stride resolved, every limit checked. Strides are in elements.
struct DecodeParams {
    std::int64_t rows = 0;
    std::int64_t heads = 0;
    std::int64_t d_qk = 0;

    const void* query = nullptr;
    DType query_dtype = DType::f8_e4m3;
    std::int64_t query_row_stride = 0;
    std::int64_t query_head_stride = 0;

    SourceParams sources[2];
    int num_sources = 0;
    ConvertParams indices;  ///< token ids instead of source 0's slots and counts, where the problem is one from ids

    const float* sinks = nullptr;  ///< null: no sink term
    std::int64_t sinks_stride = 0;
    float softmax_scale = 1.0F;
    Scale q_scale;
    float out_scale = 1.0F;

    void* out = nullptr;
    DType out_dtype = DType::bf16;
    std::int64_t out_row_stride = 0;
    std::int64_t out_head_stride = 0;
    float* lse = nullptr;  ///< null: not wanted
    std::int64_t lse_row_stride = 0;
    std::int64_t lse_head_stride = 0;
    LseBase lse_base = LseBase::natural;

    const MailboxView* mailbox = nullptr;  ///< of a dcp problem: where the query comes from and results go

    const Plan* plan = nullptr;
    std::byte* workspace = nullptr;
    std::byte* state = nullptr;
};

/// What a kernel makes of a problem it takes.
struct KernelPlan {
    Schedule schedule;
    std::size_t workspace_bytes = 0;
    std::size_t state_bytes = 0;
    std::optional<Tiling> tiling{};
    std::string note{};      ///< joins the plan's reason
    double expected_us = 0;  ///< Plan::expected_us
    bool fuses_exchange = false;
};

/// One kernel: a name, what it takes, and its launcher.
struct Kernel {
    std::string_view name;
    Device::Kind device = Device::Kind::cpu;
    std::string_view summary;      ///< completes "NAME: ..."
    bool on_request_only = false;  ///< never chosen unless forced by name
    /// Nothing, or the reason: one sentence with the parameter and the allowed set. Device kind is already checked.
    std::optional<std::string> (*refuse)(const Problem&, const DeviceSpec&, const PlanOptions&) = nullptr;
    KernelPlan (*plan)(const Problem&, const DeviceSpec&, const PlanOptions&) = nullptr;
    void (*prepare)(const Plan&, Memory state, Stream) = nullptr;
    void (*decode)(const DecodeParams&, Stream) = nullptr;
};

/// All kernels of this build in order of preference.
std::span<const Kernel* const> kernels();

/// The instruction set that the `cpu` kernel uses here: "AVX3", "NEON".
std::string cpu_instruction_set();

extern const Kernel reference_kernel;  // cpu/reference.cpp
extern const Kernel cpu_kernel;        // cpu/decode.cpp
extern const Kernel latency_kernel;    // latency_plan.cpp
extern const Kernel balanced_kernel;   // balanced_plan.cpp
extern const Kernel wide_kernel;       // wide_plan.cpp

/// Rows of elements beside each other. Strides are in elements.
struct ConstMatrix {
    const void* data = nullptr;
    DType dtype = DType::f32;
    std::int64_t row_stride = 0;
};
struct Matrix {
    void* data = nullptr;
    DType dtype = DType::f32;
    std::int64_t row_stride = 0;
};

/// Slots of records, i32 or i64.
struct SlotList {
    const void* data = nullptr;
    bool is_64_bit = false;
    std::int64_t stride = 0;
};

/// Validated calls of pack, unpack and quantize_query.
struct PackParams {
    MutableCacheView cache;
    ConstMatrix latent, rope;  ///< what RecordLayout::main and rope hold
    SlotList slots;
    std::int64_t n = 0;
    PackOptions options;
};
struct UnpackParams {
    CacheView cache;
    SlotList slots;
    Matrix out;
    std::int64_t n = 0;
};
struct QuantizeParams {
    const void* in = nullptr;
    DType dtype = DType::bf16;
    std::byte* out = nullptr;
    std::int64_t rows = 0, heads = 0, dims = 0;
    std::int64_t in_row_stride = 0, in_head_stride = 0, out_row_stride = 0, out_head_stride = 0;
    float q_scale = 1;
};

/// A validated call of merge_topk. Strides are in elements.
struct MergeTopkParams {
    const float* scores = nullptr;
    std::int64_t scores_source_stride = 0, scores_row_stride = 0;
    const std::int32_t* ids = nullptr;
    std::int64_t ids_source_stride = 0, ids_row_stride = 0;
    const std::int32_t* source_counts = nullptr;  ///< null: every column
    std::int64_t counts_source_stride = 0, counts_row_stride = 0;
    std::int64_t sources = 0, width = 0;
    bool to_slots = false;
    /// rows, k as its width, sharding, and where list and counts go. To slots: the whole conversion, whose token ids
    /// are the list itself.
    ConvertParams conversion;
};

void convert_indices_cpu(const ConvertParams& params);
void merge_topk_cpu(const MergeTopkParams& params);
void merge_cpu(const MergeArgs& args);

}  // namespace sparsemla::detail
