#include "check.h"
#include "gpu.h"
#include "sparsemla/formats.h"
#include "sparsemla/records.h"

namespace sparsemla {

namespace {

using detail::Extent;

float to_float(float value) { return value; }
float to_float(std::uint16_t bits) { return bf16_to_float(bits); }

template <class Value>
void quantise(const detail::QuantizeParams& params) {
    if (params.dims == 0) return;  // the pointers may be null
    for (std::int64_t row = 0; row < params.rows; ++row)
        for (std::int64_t head = 0; head < params.heads; ++head) {
            const auto* values =
                static_cast<const Value*>(params.in) + row * params.in_row_stride + head * params.in_head_stride;
            std::byte* codes = params.out + row * params.out_row_stride + head * params.out_head_stride;
            for (std::int64_t d = 0; d < params.dims; ++d)
                codes[d] = static_cast<std::byte>(float_to_e4m3(to_float(values[d]) / params.q_scale));
        }
}

}  // namespace

void quantize_query(ConstTensor in, float q_scale, Tensor out, Stream stream) {
    const Device device = in.device;
    detail::check_tensor(in, {.argument = "in",
                              .dtypes = {DType::bf16, DType::f32},
                              .shape = {Extent::any("rows"), Extent::any("heads"), Extent::any("d")},
                              .device = device});
    detail::check_tensor(out, {.argument = "out",
                               .dtypes = {DType::f8_e4m3},
                               .shape = {Extent::exactly(in.shape[0], "rows"), Extent::exactly(in.shape[1], "heads"),
                                         Extent::exactly(in.shape[2])},
                               .device = device});
    detail::check_positive_finite(q_scale, "q_scale");
    detail::check_no_overlap({detail::region_of(out, "out")}, {detail::region_of(in, "in")});
    const detail::QuantizeParams params{.in = in.data,
                                        .dtype = in.dtype,
                                        .out = static_cast<std::byte*>(out.data),
                                        .rows = in.shape[0],
                                        .heads = in.shape[1],
                                        .dims = in.shape[2],
                                        .in_row_stride = in.strides[0],
                                        .in_head_stride = in.strides[1],
                                        .out_row_stride = out.strides[0],
                                        .out_head_stride = out.strides[1],
                                        .q_scale = q_scale};
    if (device.kind != Device::Kind::cpu)
        detail::quantize_query_gpu(params, device.index, stream);
    else if (in.dtype == DType::bf16)
        quantise<std::uint16_t>(params);
    else
        quantise<float>(params);
}

}  // namespace sparsemla
