// From a checked call to decode_latency's parameters and its launch.
#include "cuda/decode_latency_launch.h"

#include <limits>

#include "cuda/divider.h"
#include "cuda/launch.h"
#include "cuda/self_test.h"
#include "cuda/verbs.h"
#include "gpu.h"
#include "latency_layout.h"
#include "latency_plan.h"

namespace sparsemla::detail {

namespace {

using namespace latency;

constexpr double log2_e = 1.4426950408889634;

Variant variant_of(const Plan& plan) {
    const bool fixed = plan.schedule.splits == 1 || plan.tiling->transport == Transport::weights;
    return {.heads = plan.tiling->heads,
            .form = stage_form(plan.problem.sources[0].record),
            .bf16_query = plan.problem.query_dtype == DType::bf16,
            .two_sources = plan.problem.sources.size() == 2,
            .fixed_splits = fixed ? plan.schedule.splits : 0,
            .from_ids = plan.problem.from_ids,
            .dcp = plan.fuses_exchange};
}

SourceView view_of(const SourceParams& source, const DecodeParams& call) {
    const CacheView& cache = source.cache;
    const RecordLayout& layout = cache.layout();
    const bool gaps = cache.slot_step() > cache.page_size, planar = cache.form == RecordForm::planar;
    // Contiguous without gaps: one page that holds every slot.
    const bool pages = gaps || planar;
    const std::int64_t slots_per_page = pages ? cache.slot_step() : std::numeric_limits<std::int32_t>::max();
    const Divider divider(slots_per_page);
    return {.record = cache.record,
            .planar = planar,
            .records = static_cast<const std::byte*>(cache.data),
            .rope = cache.rope,
            .page_stride_bytes = cache.stride_bytes(),
            .scales_of_page = planar ? cache.page_size * layout.data_bytes : layout.scale_offset_bytes,
            .data_bytes = planar                  ? layout.data_bytes
                          : cache.rope != nullptr ? layout.main.bytes()
                                                  : layout.record_bytes,
            .scale_bytes = planar ? layout.scale_bytes : layout.rope.bytes(),
            .slots = source.slots,
            .counts = source.counts,
            .slots_row_stride = source.slots_row_stride,
            .counts_stride = source.counts_stride,
            .count_offset = source.count_offset,
            .width = static_cast<std::int32_t>(source.width),
            .chunks = static_cast<std::int32_t>((source.width + chunk_keys - 1) / chunk_keys),
            .num_slots = static_cast<std::int32_t>(cache.num_slots()),
            .slots_per_page = static_cast<std::int32_t>(slots_per_page),
            .page_multiplier = divider.multiplier,
            .page_shift = divider.shift,
            .page_size = static_cast<std::int32_t>(pages ? cache.page_size : slots_per_page),
            .score_factor = static_cast<float>(call.softmax_scale * log2_e * call.q_scale.value * source.k_scale.value),
            .k_scale = source.k_scale.value,
            .k_scale_pointer = source.k_scale.pointer};
}

/// Planar records of odd page sizes may begin between two pieces of 16 bytes.
bool is_narrow(const CacheView& cache) { return cache.form == RecordForm::planar && cache.stride_bytes() % 16 != 0; }

/// BF16 outputs that lie so that `n` dimensions from a multiple of n on are aligned together.
bool has_aligned_outputs(const DecodeParams& call, int n) {
    return call.out_dtype == DType::bf16 && reinterpret_cast<std::uintptr_t>(call.out) % (2 * n) == 0 &&
           call.out_row_stride % n == 0 && call.out_head_stride % n == 0;
}

void set_sources(Params& params, const DecodeParams& call) {
    for (int i = 0; i < call.num_sources; ++i) {
        params.sources[i] = view_of(call.sources[i], call);
        params.gaps = params.gaps || params.sources[i].slots_per_page > params.sources[i].page_size;
        params.narrow_copies = params.narrow_copies || is_narrow(call.sources[i].cache);
        params.scale_pointers = params.scale_pointers || call.sources[i].k_scale.pointer != nullptr;
    }
    params.second_begin_split = params.sources[0].chunks % params.splits;
}

void set_outputs(Params& params, const DecodeParams& call) {
    params.out_scale = call.out_scale;
    params.sinks = call.sinks;
    params.sinks_stride = call.sinks_stride;
    params.out = static_cast<std::byte*>(call.out);
    params.out_row_stride = call.out_row_stride;
    params.out_head_stride = call.out_head_stride;
    params.out_is_f32 = call.out_dtype == DType::f32;
    params.out_pairs = has_aligned_outputs(call, 2);
    params.out_octets = has_aligned_outputs(call, 8);
    params.lse = call.lse;
    params.lse_row_stride = call.lse_row_stride;
    params.lse_head_stride = call.lse_head_stride;
    params.lse_natural = call.lse_base == LseBase::natural;
}

}  // namespace

Params latency::params_of(const DecodeParams& call) {
    const Plan& plan = *call.plan;
    const Schedule& schedule = plan.schedule;
    const std::int64_t query_bytes = size_bytes(call.query_dtype);
    Params params{};
    params.heads = static_cast<std::int32_t>(call.heads);
    params.splits = schedule.splits;
    // One split: divided by 2^31 - 1 instead; the kernel does not divide then.
    const Divider splits(schedule.splits > 1 ? schedule.splits : std::numeric_limits<std::int32_t>::max());
    params.split_multiplier = splits.multiplier;
    params.split_shift = splits.shift;
    params.units_of_cta = units_of_cta(schedule.splits);
    params.owner_multiplier = static_cast<std::uint32_t>((65536 + params.units_of_cta - 1) / params.units_of_cta);
    params.stages = plan.tiling->stages;
    params.trigger = plan.tiling->trigger;
    params.transport = plan.tiling->transport;
    params.gather = plan.tiling->gather;
    params.tiles = plan.tiling->cluster_tiles;
    for (int tile = 0; tile < params.tiles; ++tile) params.sharing_ctas |= 1U << (tile * params.splits);
    params.query = static_cast<const std::byte*>(call.query);
    params.query_row_stride_bytes = call.query_row_stride * query_bytes;
    params.query_head_stride_bytes = call.query_head_stride * query_bytes;
    params.query_is_e4m3 = call.query_dtype == DType::f8_e4m3;
    params.score_scale = static_cast<float>(call.softmax_scale * log2_e);
    params.q_scale = call.q_scale.value;
    params.q_scale_pointer = call.q_scale.pointer;
    params.scale_pointers = call.q_scale.pointer != nullptr;
    params.p_is_e4m3 = schedule.p_format == PFormat::e4m3;
    params.p_scale = schedule.p_scale;
    params.inverse_p_scale = 1.0F / schedule.p_scale;
    set_sources(params, call);
    set_outputs(params, call);
    return params;
}

void prepare_latency(const Plan& plan) {
    const CurrentDevice current(plan.device.device.index);
    // All that the device has: another plan of the same kernel may need more than this one.
    Variant variant = variant_of(plan);
    prepare_kernel(variant, static_cast<std::size_t>(plan.device.shared_memory_bytes));
    // The self-test runs the kernel that reads and writes tensors.
    variant.dcp = false;
    if (plan.fuses_exchange) prepare_kernel(variant, static_cast<std::size_t>(plan.device.shared_memory_bytes));
    prepare_verbs();
    self_test(plan, launch_latency);
}

void launch_latency(const DecodeParams& call, Stream stream) {
    const CurrentDevice current(call.plan->device.device.index);
    const LaunchShape shape = latency_launch(*call.plan, call.rows);
    DcpParams params{params_of(call), {}};
    const SharedLayout memory = latency_memory(*call.plan);
    params.stages_offset = static_cast<std::uint32_t>(memory.stages);
    if (call.plan->problem.from_ids) params.convert = convert_view(call.indices);
    params.converted_offset = static_cast<std::uint32_t>(memory.converted);
    const LaunchConfig config = {
        .grid = dim3(static_cast<unsigned>(shape.grid_x), static_cast<unsigned>(shape.grid_y)),
        .cluster = dim3(static_cast<unsigned>(shape.cluster), static_cast<unsigned>(shape.cluster_tiles)),
        .threads = static_cast<unsigned>(shape.threads),
        .shared_bytes = shape.shared_bytes,
        .stream = static_cast<cudaStream_t>(stream.handle)};
    const Variant variant = variant_of(*call.plan);
    if (!variant.dcp) return launch_kernel(variant, config, params);
    params.mailbox = *call.mailbox;
    params.query = params.mailbox.peers[params.mailbox.rank];
    params.query_row_stride_bytes = params.mailbox.query_row_bytes;
    params.query_head_stride_bytes = params.mailbox.query_head_bytes;
    launch_dcp_kernel(variant, config, params);
}

}  // namespace sparsemla::detail
