// Records to numbers. Every value is a product of at most two stored numbers, which float64 holds exactly.
#include <array>

#include "check.h"
#include "cpu/codec.h"
#include "cpu/slot_list.h"

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

template <class T>
void unpack_rows(const CacheView& cache, const ConstTensor& slots, const Tensor& out) {
    const int dims = cache.layout().d_qk();
    std::array<double, detail::max_d_qk> values;
    for (std::int64_t i = 0; i < slots.shape[0]; ++i) {
        const std::int64_t slot = detail::slot_at(slots, i);
        T* row = static_cast<T*>(out.data) + (i == 0 ? 0 : i * out.strides[0]);
        if (!cache.holds(slot)) {
            std::fill_n(row, dims, T{0});
            continue;
        }
        detail::dequantise(cache, slot, values.data());
        for (int d = 0; d < dims; ++d) row[d] = static_cast<T>(values[d]);
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

void unpack(const CacheView& cache, ConstTensor slots, Tensor out) {
    using detail::Extent;
    detail::check_cpu_cache(cache, "cache");
    detail::check_slot_list(slots);
    detail::check_tensor(out,
                         {.argument = "out",
                          .dtypes = {DType::f32, DType::f64},
                          .shape = {Extent::exactly(slots.shape[0]), Extent::exactly(cache.layout().d_qk(), "d_qk")}});
    detail::Regions inputs = detail::regions_of(cache, "cache");
    inputs.push_back(detail::region_of(slots, "slots"));
    detail::check_no_overlap({detail::region_of(out, "out")}, inputs);
    if (out.dtype == DType::f32)
        unpack_rows<float>(cache, slots, out);
    else
        unpack_rows<double>(cache, slots, out);
}

}  // namespace sparsemla
