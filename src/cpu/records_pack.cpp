// Numbers to records: the exact, deterministic writer whose bytes GPU writers must equal.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "check.h"
#include "cpu/codec.h"
#include "cpu/slot_list.h"
#include "gpu.h"

namespace sparsemla {

namespace {

using detail::load;
using detail::store;

/// A group's scale: the number to divide by, and the code that stores it.
struct GroupScale {
    float value = 1.0F;
    std::uint32_t code = 0;
};

/// ceil(log2(x)) of a positive finite x, exactly.
int ceil_log2(float x) {
    int exponent = 0;
    const float fraction = std::frexp(x, &exponent);  // x = fraction * 2^exponent, fraction in [0.5, 1)
    return fraction == 0.5F ? exponent - 1 : exponent;
}

GroupScale f32_scale(float value) { return {value, std::bit_cast<std::uint32_t>(value)}; }

GroupScale ue8m0_scale(int exponent) {
    const auto code = static_cast<std::uint8_t>(exponent + 127);
    return {ue8m0_to_float(code), code};
}

GroupScale e4m3_scale(float amax, bool round_up) {
    const float exact = std::clamp(amax / e2m1_max, 0x1p-9F, e4m3_max);
    std::uint8_t code = float_to_e4m3(exact);
    if (round_up && e4m3_to_float(code) < exact) ++code;
    return {e4m3_to_float(code), code};
}

GroupScale choose_scale(ScaleRule rule, float amax, const PackOptions& options) {
    constexpr float smallest_pow2_source = 1e-4F;
    const float exact = amax / e4m3_max;
    switch (rule) {
        case ScaleRule::none: break;
        case ScaleRule::amax_f32:
            if (!options.power_of_two_scales) return f32_scale(std::max(exact, std::numeric_limits<float>::min()));
            return f32_scale(std::ldexp(1.0F, ceil_log2(std::max(exact, smallest_pow2_source))));
        case ScaleRule::amax_pow2_1e4: return ue8m0_scale(ceil_log2(std::max(exact, smallest_pow2_source)));
        case ScaleRule::amax_pow2: return ue8m0_scale(exact == 0 ? -127 : std::clamp(ceil_log2(exact), -127, 127));
        case ScaleRule::amax_e4m3: return e4m3_scale(amax, false);
        case ScaleRule::amax_e4m3_up: return e4m3_scale(amax, true);
    }
    return {};
}

/// Writes dims [first, first + dims) of a run, given as `values`, divided by the scale.
void encode(const RecordRun& run, int first, int dims, const float* values, float scale, std::byte* bytes) {
    switch (run.encoding) {
        case ValueEncoding::bf16:
            for (int i = 0; i < dims; ++i) store(bytes + 2 * (first + i), float_to_bf16(values[i] / scale));
            break;
        case ValueEncoding::e4m3:
            for (int i = 0; i < dims; ++i) store(bytes + first + i, float_to_e4m3(values[i] / scale));
            break;
        case ValueEncoding::e2m1:
            for (int i = 0; i < dims; i += 2) {
                const int even = float_to_e2m1(values[i] / scale);
                const int odd = float_to_e2m1(values[i + 1] / scale);
                store(bytes + (first + i) / 2, static_cast<std::uint8_t>(even | odd << 4));
            }
            break;
    }
}

void store_scale(const RecordLayout& layout, std::uint32_t code, int group, std::byte* scales) {
    std::byte* at = scales + layout.scale_index(group) * layout.scale_size();
    if (layout.scale_encoding == ScaleEncoding::f32)
        store(at, code);
    else
        store(at, static_cast<std::uint8_t>(code));
}

void encode_group(const RecordLayout& layout, int group, const float* values, const PackOptions& options,
                  const BasicRecordPointers<std::byte>& record) {
    constexpr std::uint8_t e4m3_nan = 0x7F;
    const int first = group * layout.group_dims;
    float amax = 0;
    bool has_nan = false;
    for (int i = 0; i < layout.group_dims; ++i) {
        has_nan = has_nan || std::isnan(values[i]);
        if (std::isfinite(values[i])) amax = std::max(amax, std::fabs(values[i]));
    }
    if (has_nan && layout.main.encoding == ValueEncoding::e2m1) {  // no code of e2m1 says NaN: the whole group does
        std::fill_n(record.data + first / 2, layout.group_dims / 2, std::byte{0});
        store_scale(layout, e4m3_nan, group, record.scales);
        return;
    }
    const GroupScale scale = choose_scale(layout.scale_rule, amax, options);
    encode(layout.main, first, layout.group_dims, values, scale.value, record.data);
    store_scale(layout, scale.code, group, record.scales);
}

/// Writes every byte of the record.
void encode_record(const RecordLayout& layout, const float* values, const PackOptions& options,
                   const BasicRecordPointers<std::byte>& record) {
    if (layout.groups() == 0) encode(layout.main, 0, layout.main.dims, values, options.k_scale, record.data);
    for (int group = 0; group < layout.groups(); ++group)
        encode_group(layout, group, values + group * layout.group_dims, options, record);
    encode(layout.rope, 0, layout.rope.dims, values + layout.rope.first_dim, options.k_scale, record.rope);
    const int scales_bytes = layout.groups() * layout.scale_size();
    if (layout.scale_bytes > scales_bytes)
        std::fill_n(record.scales + scales_bytes, layout.scale_bytes - scales_bytes, std::byte{0});
}

/// `dims` values of a row, to `out`.
void load_row(const detail::ConstMatrix& values, std::int64_t row, std::int64_t dims, float* out) {
    const std::int64_t first = row == 0 ? 0 : row * values.row_stride;
    if (values.dtype == DType::f32) {
        std::copy_n(static_cast<const float*>(values.data) + first, dims, out);
    } else {
        const auto* bits = static_cast<const std::uint16_t*>(values.data) + first;
        std::transform(bits, bits + dims, out, bf16_to_float);
    }
}

void check_options(const RecordLayout& layout, const PackOptions& options) {
    detail::check_positive_finite(options.k_scale, "options.k_scale");
    if (!layout.takes_k_scale && options.k_scale != 1.0F)
        throw Error(ErrorKind::invalid_argument, "options.k_scale", "1 for " + to_string(layout.record),
                    std::to_string(options.k_scale));
    if (options.power_of_two_scales && layout.scale_rule != ScaleRule::amax_f32)
        throw Error(ErrorKind::invalid_argument, "options.power_of_two_scales",
                    "false for " + to_string(layout.record) + ", whose writer has no such choice", "true");
}

void check_slots(const MutableCacheView& cache, const detail::SlotList& slots, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t slot = detail::slot_at(slots, i);
        if (slot >= 0 && !cache.holds(slot))
            throw Error(ErrorKind::invalid_argument, "slots[" + std::to_string(i) + "]",
                        "a slot that the cache of " + std::to_string(cache.num_slots()) +
                            " slots holds (not in the gap between pages), or a negative number to skip",
                        std::to_string(slot));
    }
}

void pack_cpu(const detail::PackParams& params) {
    const RecordLayout& layout = params.cache.layout();
    check_slots(params.cache, params.slots, params.n);
    std::array<float, detail::max_d_qk> row;
    for (std::int64_t i = 0; i < params.n; ++i) {
        const std::int64_t slot = detail::slot_at(params.slots, i);
        if (slot < 0) continue;
        load_row(params.latent, i, layout.main.dims, row.data());
        if (layout.rope.dims > 0) load_row(params.rope, i, layout.rope.dims, row.data() + layout.rope.first_dim);
        encode_record(layout, row.data(), params.options, locate(params.cache, slot));
    }
}

void pack_checked(const detail::PackParams& params, Stream stream) {
    if (params.cache.device.kind == Device::Kind::cpu)
        pack_cpu(params);
    else
        detail::pack_gpu(params, stream);
}

detail::ConstMatrix matrix_of(const ConstTensor& tensor) { return {tensor.data, tensor.dtype, tensor.strides[0]}; }

detail::ConstMatrix checked_values(const ConstTensor& values, std::string_view argument, std::int64_t n,
                                   std::string_view columns, std::int64_t dims, Device device) {
    using detail::Extent;
    detail::check_tensor(values, {.argument = argument,
                                  .dtypes = {DType::f32, DType::bf16},
                                  .shape = {Extent::exactly(n), Extent::exactly(dims, columns)},
                                  .device = device});
    return matrix_of(values);
}

}  // namespace

void pack(const MutableCacheView& cache, ConstTensor values, ConstTensor slots, const PackOptions& options,
          Stream stream) {
    validate(cache, "cache");
    const RecordLayout& layout = cache.layout();
    check_options(layout, options);
    const detail::SlotList list = detail::checked_slots(slots, cache.device);
    const std::int64_t n = slots.shape[0];
    const detail::ConstMatrix latent = checked_values(values, "values", n, "d_qk", layout.d_qk(), cache.device);
    detail::check_no_overlap(detail::regions_of(cache, "cache"),
                             {detail::region_of(values, "values"), detail::region_of(slots, "slots")});
    detail::ConstMatrix rope = latent;
    if (rope.data != nullptr)
        rope.data = static_cast<const std::byte*>(rope.data) + layout.rope.first_dim * size_bytes(rope.dtype);
    pack_checked({.cache = cache, .latent = latent, .rope = rope, .slots = list, .n = n, .options = options}, stream);
}

void pack(const MutableCacheView& cache, ConstTensor latent, ConstTensor rope, ConstTensor slots,
          const PackOptions& options, Stream stream) {
    validate(cache, "cache");
    const RecordLayout& layout = cache.layout();
    check_options(layout, options);
    const detail::SlotList list = detail::checked_slots(slots, cache.device);
    const std::int64_t n = slots.shape[0];
    detail::PackParams params{.cache = cache, .latent = {}, .rope = {}, .slots = list, .n = n, .options = options};
    params.latent = checked_values(latent, "latent", n, "latent dimensions", layout.main.dims, cache.device);
    detail::Regions inputs = {detail::region_of(latent, "latent"), detail::region_of(slots, "slots")};
    if (layout.rope.dims > 0) {
        params.rope = checked_values(rope, "rope", n, "rope dimensions", layout.rope.dims, cache.device);
        inputs.push_back(detail::region_of(rope, "rope"));
    } else if (rope.present()) {
        throw Error(ErrorKind::invalid_argument, "rope",
                    "nothing for " + to_string(layout.record) + ", all of which is latent", detail::describe(rope));
    }
    detail::check_no_overlap(detail::regions_of(cache, "cache"), inputs);
    pack_checked(params, stream);
}

}  // namespace sparsemla
