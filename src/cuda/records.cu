// Cache writers and readers: a warp a record. A lane has 16 dimensions of the record's scaled values, whose groups are
// lanes beside each other, and two of its rope. Bytes are those of the CPU's pack and unpack.
#include <type_traits>

#include "cuda/device/barriers.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/launch.h"
#include "cuda/record_formats.cuh"
#include "cuda/verbs.h"
#include "gpu.h"

namespace sparsemla::detail {

namespace {

using namespace device;

constexpr int warps = 8;
constexpr int lane_dims = 16;

/// Which record, and its parts. False where the slot holds none.
template <Record kRecord, class Byte>
__device__ bool find(const BasicCacheView<Byte>& cache, std::int64_t slot, BasicRecordPointers<Byte>& record) {
    constexpr RecordLayout layout = layout_of(kRecord);
    const std::int64_t step = cache.slot_step(), num_slots = cache.num_slots();
    if (slot < 0 || slot >= num_slots) return false;
    // Both below 2^31.
    const std::int64_t page = static_cast<std::uint32_t>(slot) / static_cast<std::uint32_t>(step);
    const std::int64_t offset = slot - page * step;
    if (offset >= cache.page_size) return false;
    if (cache.form == RecordForm::planar) {
        Byte* begin =
            cache.data + page * (cache.page_stride_bytes != 0 ? cache.page_stride_bytes : step * layout.record_bytes);
        Byte* data = begin + offset * layout.data_bytes;
        record = {data, data + layout.rope.offset_bytes,
                  begin + cache.page_size * layout.data_bytes + offset * layout.scale_bytes};
    } else if (cache.rope != nullptr) {
        record = {cache.data + slot * layout.main.bytes(), cache.rope + slot * layout.rope.bytes(), nullptr};
    } else {
        Byte* data = cache.data + slot * layout.record_bytes;
        record = {data, data + layout.rope.offset_bytes, data + layout.scale_offset_bytes};
    }
    return true;
}

__device__ std::int64_t slot_of(const SlotList& slots, std::int64_t i) {
    return slots.is_64_bit ? static_cast<const std::int64_t*>(slots.data)[i * slots.stride]
                           : static_cast<const std::int32_t*>(slots.data)[i * slots.stride];
}

/// Of BF16 or FP32.
__device__ float load_value(const void* data, DType dtype, std::int64_t element) {
    return dtype == DType::bf16 ? __uint_as_float(std::uint32_t{static_cast<const std::uint16_t*>(data)[element]} << 16)
                                : static_cast<const float*>(data)[element];
}

/// Elements first .. of a row.
template <int kCount>
__device__ void load_row(const ConstMatrix& matrix, std::int64_t row, int first, float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        values[i] = load_value(matrix.data, matrix.dtype, row * matrix.row_stride + first + i);
}

/// Eight bytes at a time: what every record is aligned to.
template <int kBytes>
__device__ void store_bytes(std::byte* to, const std::uint32_t (&words)[kBytes / 4]) {
#pragma unroll
    for (int i = 0; i < kBytes / 8; ++i) reinterpret_cast<uint2*>(to)[i] = {words[2 * i], words[2 * i + 1]};
}

template <ValueEncoding kEncoding>
__device__ void encode_lane(const float (&values)[lane_dims], float scale, std::byte* to) {
    if constexpr (kEncoding == ValueEncoding::bf16) {
        std::uint32_t words[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            words[i] = f32x2_to_bf16x2(__fdiv_rn(values[2 * i], scale), __fdiv_rn(values[2 * i + 1], scale));
        store_bytes<32>(to, words);
    } else if constexpr (kEncoding == ValueEncoding::e4m3) {
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* four = values + 4 * i;
            words[i] = f32x2_to_e4m3x2(__fdiv_rn(four[0], scale), __fdiv_rn(four[1], scale)) |
                       std::uint32_t{f32x2_to_e4m3x2(__fdiv_rn(four[2], scale), __fdiv_rn(four[3], scale))} << 16;
        }
        store_bytes<16>(to, words);
    } else {
        std::uint32_t words[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < lane_dims; ++i) words[i / 8] |= float_to_e2m1(__fdiv_rn(values[i], scale)) << (i % 8 * 4);
        store_bytes<8>(to, words);
    }
}

/// Two dimensions of the rope.
template <ValueEncoding kEncoding>
__device__ void encode_rope(const float (&values)[2], float scale, std::byte* to) {
    const float x = __fdiv_rn(values[0], scale), y = __fdiv_rn(values[1], scale);
    if constexpr (kEncoding == ValueEncoding::bf16)
        *reinterpret_cast<std::uint32_t*>(to) = f32x2_to_bf16x2(x, y);
    else
        *reinterpret_cast<std::uint16_t*>(to) = f32x2_to_e4m3x2(x, y);
}

/// The group's scale, known to all of its lanes; the first one stores it. Returns what to divide by, 0 for a group
/// without codes: a NaN of E2M1, which only the scale can say.
template <Record kRecord>
__device__ float scale_group(const float (&values)[lane_dims], int lane, bool rounds_up, std::byte* scales) {
    constexpr RecordLayout layout = layout_of(kRecord);
    constexpr int lanes = layout.group_dims / lane_dims;
    float amax = 0;
    bool has_nan = false;
#pragma unroll
    for (const float value : values) {
        has_nan = has_nan || isnan(value);
        if (isfinite(value)) amax = fmaxf(amax, fabsf(value));
    }
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(all_lanes, amax, distance));
    GroupScale scale = choose_scale<layout.scale_rule>(amax, rounds_up);
    if (layout.main.encoding == ValueEncoding::e2m1 && has_nan) scale = {0, 0x7F};
    static_assert(layout.main.encoding != ValueEncoding::e2m1 || lanes == 1);
    if (lane % lanes != 0 || lane * lane_dims >= layout.main.dims) return scale.value;
    std::byte* to = scales + layout.scale_index(lane / lanes) * layout.scale_size();
    if constexpr (layout.scale_encoding == ScaleEncoding::f32)
        *reinterpret_cast<std::uint32_t*>(to) = scale.code;
    else
        *to = static_cast<std::byte>(scale.code);
    return scale.value;
}

template <Record kRecord>
__global__ void __launch_bounds__(32 * warps) pack_records(const __grid_constant__ PackParams params) {
    constexpr RecordLayout layout = layout_of(kRecord);
    const std::int64_t number = std::int64_t{blockIdx.x} * warps + threadIdx.x / 32;
    const int lane = static_cast<int>(threadIdx.x % 32);
    launch_dependent_grids();
    wait_for_prerequisite_grids();
    if (number >= params.n) return;
    BasicRecordPointers<std::byte> record;
    if (!find<kRecord>(params.cache, slot_of(params.slots, number), record)) return;
    const bool has_dims = lane * lane_dims < layout.main.dims;
    float values[lane_dims] = {};
    if (has_dims) load_row(params.latent, number, lane * lane_dims, values);
    float scale = params.options.k_scale;
    if constexpr (layout.groups() > 0)
        scale = scale_group<kRecord>(values, lane, params.options.power_of_two_scales, record.scales);
    if (scale == 0) {
#pragma unroll
        for (float& value : values) value = 0;
        scale = 1;
    }
    constexpr int bytes = layout.main.bytes() * lane_dims / layout.main.dims;
    if (has_dims) encode_lane<layout.main.encoding>(values, scale, record.data + lane * bytes);
    if constexpr (layout.rope.dims > 0) {
        static_assert(layout.rope.dims == 2 * 32);
        float rope[2];
        load_row(params.rope, number, 2 * lane, rope);
        encode_rope<layout.rope.encoding>(rope, params.options.k_scale,
                                          record.rope + lane * (layout.rope.bytes() / 32));
    }
    constexpr int used = layout.groups() * layout.scale_size();
    if (lane < layout.scale_bytes - used) record.scales[used + lane] = std::byte{0};
}

/// As a writer's float64 to BF16, in one rounding: to odd at FP32 first.
__device__ inline std::uint16_t double_to_bf16(double x) {
    float rounded = __double2float_rz(x);
    if (static_cast<double>(rounded) != x && isfinite(rounded)) rounded = __uint_as_float(__float_as_uint(rounded) | 1);
    return float_to_bf16(rounded);
}

__device__ void store_value(const Matrix& out, std::int64_t element, double value) {
    if (out.dtype == DType::bf16)
        static_cast<std::uint16_t*>(out.data)[element] = double_to_bf16(value);
    else if (out.dtype == DType::f32)
        static_cast<float*>(out.data)[element] = static_cast<float>(value);
    else
        static_cast<double*>(out.data)[element] = value;
}

/// Value i of a run.
template <ValueEncoding kEncoding>
__device__ float decode_value(const std::byte* bytes, int i) {
    const auto* codes = reinterpret_cast<const std::uint8_t*>(bytes);
    if constexpr (kEncoding == ValueEncoding::bf16)
        return __uint_as_float(std::uint32_t{reinterpret_cast<const std::uint16_t*>(bytes)[i]} << 16);
    else if constexpr (kEncoding == ValueEncoding::e4m3)
        return e4m3_to_float(codes[i]);
    else
        return e2m1_to_float(codes[i / 2] >> (i % 2 * 4) & 15);
}

template <Record kRecord>
__device__ float scale_of_group(const std::byte* scales, int group) {
    constexpr RecordLayout layout = layout_of(kRecord);
    const std::byte* at = scales + layout.scale_index(group) * layout.scale_size();
    if constexpr (layout.scale_encoding == ScaleEncoding::f32)
        return *reinterpret_cast<const float*>(at);
    else if constexpr (layout.scale_encoding == ScaleEncoding::ue8m0)
        return ue8m0_to_float(static_cast<std::uint8_t>(*at));
    else
        return e4m3_to_float(static_cast<std::uint8_t>(*at));
}

template <Record kRecord>
__global__ void __launch_bounds__(32 * warps) unpack_records(const __grid_constant__ UnpackParams params) {
    constexpr RecordLayout layout = layout_of(kRecord);
    const std::int64_t number = std::int64_t{blockIdx.x} * warps + threadIdx.x / 32;
    const int lane = static_cast<int>(threadIdx.x % 32);
    launch_dependent_grids();
    wait_for_prerequisite_grids();
    if (number >= params.n) return;
    BasicRecordPointers<const std::byte> record;
    const bool holds = find<kRecord>(params.cache, slot_of(params.slots, number), record);
    const std::int64_t row = number * params.out.row_stride;
    // Neighbouring lanes write neighbouring values.
#pragma unroll 2
    for (int dim = lane; dim < layout.main.dims; dim += 32) {
        double value = holds ? decode_value<layout.main.encoding>(record.data, dim) : 0;
        if constexpr (layout.groups() > 0)
            if (holds) value *= scale_of_group<kRecord>(record.scales, dim / layout.group_dims);
        store_value(params.out, row + dim, value);
    }
    for (int i = lane; i < layout.rope.dims; i += 32)
        store_value(params.out, row + layout.rope.first_dim + i,
                    holds ? decode_value<layout.rope.encoding>(record.rope, i) : 0);
}

/// A warp a head; kCount elements of a lane, at aligned addresses, or one.
template <int kCount>
__global__ void __launch_bounds__(32 * warps) quantize(const __grid_constant__ QuantizeParams params) {
    const auto ctas_of_row = static_cast<std::uint32_t>((params.heads + warps - 1) / warps);
    const std::int64_t row = blockIdx.x / ctas_of_row;
    const std::int64_t head = std::int64_t{blockIdx.x % ctas_of_row} * warps + threadIdx.x / 32;
    launch_dependent_grids();
    wait_for_prerequisite_grids();
    if (head >= params.heads) return;
    const std::int64_t from = row * params.in_row_stride + head * params.in_head_stride;
    std::byte* to = params.out + row * params.out_row_stride + head * params.out_head_stride;
    for (std::int64_t d = threadIdx.x % 32 * kCount; d < params.dims; d += 32 * kCount) {
        float values[kCount];
        if constexpr (kCount == 8) {
            const uint4 pairs =
                *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(params.in) + from + d);
            const std::uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[2 * i] = __uint_as_float(words[i] << 16);
                values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000);
            }
            std::uint32_t codes[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                codes[i] = f32x2_to_e4m3x2(__fdiv_rn(values[4 * i], params.q_scale),
                                           __fdiv_rn(values[4 * i + 1], params.q_scale)) |
                           std::uint32_t{f32x2_to_e4m3x2(__fdiv_rn(values[4 * i + 2], params.q_scale),
                                                         __fdiv_rn(values[4 * i + 3], params.q_scale))}
                               << 16;
            *reinterpret_cast<uint2*>(to + d) = {codes[0], codes[1]};
        } else {
            values[0] = load_value(params.in, params.dtype, from + d);
            to[d] = static_cast<std::byte>(float_to_e4m3(__fdiv_rn(values[0], params.q_scale)));
        }
    }
}

/// Calls visit.operator()<record>().
template <class Visit>
void with_record(Record record, const Visit& visit) {
    switch (record) {
        case Record::bf16: return visit.template operator()<Record::bf16>();
        case Record::fp8_576: return visit.template operator()<Record::fp8_576>();
        case Record::fp8_512: return visit.template operator()<Record::fp8_512>();
        case Record::fp8_ds_mla: return visit.template operator()<Record::fp8_ds_mla>();
        case Record::fp8_ds_mla_norope: return visit.template operator()<Record::fp8_ds_mla_norope>();
        case Record::fp8_v4: return visit.template operator()<Record::fp8_v4>();
        case Record::fp8_v41: return visit.template operator()<Record::fp8_v41>();
        case Record::nvfp4_v41: return visit.template operator()<Record::nvfp4_v41>();
        case Record::nvfp4_ds_mla: return visit.template operator()<Record::nvfp4_ds_mla>();
    }
}

/// A warp for each of n.
LaunchConfig config_for(std::int64_t n, Stream stream) {
    return {.grid = dim3(static_cast<unsigned>((n + warps - 1) / warps)),
            .threads = 32 * warps,
            .stream = static_cast<cudaStream_t>(stream.handle)};
}

bool is_aligned(const void* pointer, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

/// Eight BF16 at a time, 16 bytes, to eight codes.
bool takes_eight(const QuantizeParams& params) {
    return params.dtype == DType::bf16 && params.dims % 8 == 0 && params.in_row_stride % 8 == 0 &&
           params.in_head_stride % 8 == 0 && params.out_row_stride % 8 == 0 && params.out_head_stride % 8 == 0 &&
           is_aligned(params.in, 16) && is_aligned(params.out, 8);
}

template <class... Args>
void load(void (*kernel)(Args...)) {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
}

}  // namespace

void prepare_records() {
    for (const RecordLayout& layout : record_layouts)
        with_record(layout.record, [&]<Record kRecord>() {
            load(pack_records<kRecord>);
            load(unpack_records<kRecord>);
        });
    load(quantize<8>);
    load(quantize<1>);
}

void pack_gpu(const PackParams& params, Stream stream) {
    if (params.n == 0) return;
    const CurrentDevice current(params.cache.device.index);
    with_record(params.cache.record,
                [&]<Record kRecord>() { launch(pack_records<kRecord>, config_for(params.n, stream), "pack", params); });
}

void unpack_gpu(const UnpackParams& params, Stream stream) {
    if (params.n == 0) return;
    const CurrentDevice current(params.cache.device.index);
    with_record(params.cache.record, [&]<Record kRecord>() {
        launch(unpack_records<kRecord>, config_for(params.n, stream), "unpack", params);
    });
}

void quantize_query_gpu(const QuantizeParams& params, int device, Stream stream) {
    if (params.rows == 0 || params.heads == 0 || params.dims == 0) return;
    const CurrentDevice current(device);
    const std::int64_t whole_ctas = (params.heads + warps - 1) / warps * warps;
    launch(takes_eight(params) ? quantize<8> : quantize<1>, config_for(params.rows * whole_ctas, stream),
           "quantize_query", params);
}

}  // namespace sparsemla::detail
