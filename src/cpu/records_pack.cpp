// Numbers to records: the exact, deterministic writer whose bytes GPU writers must equal.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "check.h"
#include "cpu/codec.h"
#include "cpu/slot_list.h"

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

void load_row(const ConstTensor& values, std::int64_t row, std::int64_t dims, float* out) {
    const std::int64_t first = row == 0 ? 0 : row * values.strides[0];
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

}  // namespace

void pack(const MutableCacheView& cache, ConstTensor values, ConstTensor slots, const PackOptions& options) {
    using detail::Extent;
    detail::check_cpu_cache(cache, "cache");
    const RecordLayout& layout = cache.layout();
    check_options(layout, options);
    detail::check_slot_list(slots);
    const std::int64_t n = slots.shape[0];
    detail::check_tensor(values, {.argument = "values",
                                  .dtypes = {DType::f32, DType::bf16},
                                  .shape = {Extent::exactly(n), Extent::exactly(layout.d_qk(), "d_qk")}});
    detail::check_no_overlap(detail::regions_of(cache, "cache"),
                             {detail::region_of(values, "values"), detail::region_of(slots, "slots")});
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t slot = detail::slot_at(slots, i);
        if (slot >= 0 && !cache.holds(slot))
            throw Error(ErrorKind::invalid_argument, "slots[" + std::to_string(i) + "]",
                        "a slot that the cache of " + std::to_string(cache.num_slots()) +
                            " slots holds (not in the gap between pages), or a negative number to skip",
                        std::to_string(slot));
    }

    std::array<float, detail::max_d_qk> row;
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t slot = detail::slot_at(slots, i);
        if (slot < 0) continue;
        load_row(values, i, layout.d_qk(), row.data());
        encode_record(layout, row.data(), options, locate(cache, slot));
    }
}

}  // namespace sparsemla
