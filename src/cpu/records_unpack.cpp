// Records to numbers. Every value is a product of at most two stored numbers, which float64 holds exactly.
#include <array>

#include "check.h"
#include "cpu/codec.h"
#include "cpu/slot_list.h"
#include "gpu.h"

namespace sparsemla {

namespace {

using detail::load;

/// All e4m3 codes decoded once: the definition in formats.h costs a call of ldexp.
const std::array<double, 256>& e4m3_values() {
    static const std::array<double, 256> values = [] {
        std::array<double, 256> table{};
        for (int code = 0; code < 256; ++code) table[code] = e4m3_to_float(static_cast<std::uint8_t>(code));
        return table;
    }();
    return values;
}

void decode_run(const RecordRun& run, const std::byte* bytes, double* values) {
    switch (run.encoding) {
        case ValueEncoding::bf16:
            for (int i = 0; i < run.dims; ++i) values[i] = bf16_to_float(load<std::uint16_t>(bytes + 2 * i));
            break;
        case ValueEncoding::e4m3: {
            const auto& table = e4m3_values();
            for (int i = 0; i < run.dims; ++i) values[i] = table[load<std::uint8_t>(bytes + i)];
            break;
        }
        case ValueEncoding::e2m1:
            for (int i = 0; i < run.dims; ++i) {
                const auto pair = load<std::uint8_t>(bytes + i / 2);
                values[i] = e2m1_to_float(i % 2 == 0 ? pair & 15 : pair >> 4);
            }
            break;
    }
}

void store_value(float* to, double value) { *to = static_cast<float>(value); }
void store_value(double* to, double value) { *to = value; }
void store_value(std::uint16_t* to, double value) { *to = double_to_bf16(value); }

template <class T>
void unpack_rows(const detail::UnpackParams& params) {
    const int dims = params.cache.layout().d_qk();
    std::array<double, detail::max_d_qk> values;
    for (std::int64_t i = 0; i < params.n; ++i) {
        const std::int64_t slot = detail::slot_at(params.slots, i);
        T* row = static_cast<T*>(params.out.data) + (i == 0 ? 0 : i * params.out.row_stride);
        if (!params.cache.holds(slot)) {
            std::fill_n(row, dims, T{0});
            continue;
        }
        detail::dequantise(params.cache, slot, values.data());
        for (int d = 0; d < dims; ++d) store_value(row + d, values[d]);
    }
}

}  // namespace

void detail::dequantise(const CacheView& cache, std::int64_t slot, double* values) {
    const RecordLayout& layout = cache.layout();
    const RecordPointers record = locate(cache, slot);
    decode_run(layout.main, record.data, values + layout.main.first_dim);
    decode_run(layout.rope, record.rope, values + layout.rope.first_dim);
    for (int group = 0; group < layout.groups(); ++group) {
        const double scale = scale_of_group(layout, record.scales, group);
        double* first = values + group * layout.group_dims;
        for (int i = 0; i < layout.group_dims; ++i) first[i] *= scale;
    }
}

void unpack(const CacheView& cache, ConstTensor slots, Tensor out, Stream stream) {
    using detail::Extent;
    validate(cache, "cache");
    const detail::SlotList list = detail::checked_slots(slots, cache.device);
    const std::int64_t n = slots.shape[0];
    detail::check_tensor(out, {.argument = "out",
                               .dtypes = {DType::f32, DType::f64, DType::bf16},
                               .shape = {Extent::exactly(n), Extent::exactly(cache.layout().d_qk(), "d_qk")},
                               .device = cache.device});
    detail::Regions inputs = detail::regions_of(cache, "cache");
    inputs.push_back(detail::region_of(slots, "slots"));
    detail::check_no_overlap({detail::region_of(out, "out")}, inputs);
    const detail::UnpackParams params{
        .cache = cache, .slots = list, .out = {out.data, out.dtype, out.strides[0]}, .n = n};
    if (cache.device.kind != Device::Kind::cpu)
        detail::unpack_gpu(params, stream);
    else if (out.dtype == DType::f32)
        unpack_rows<float>(params);
    else if (out.dtype == DType::f64)
        unpack_rows<double>(params);
    else
        unpack_rows<std::uint16_t>(params);
}

}  // namespace sparsemla
