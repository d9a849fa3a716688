#include "check.h"
#include "sparsemla/formats.h"
#include "sparsemla/records.h"

namespace sparsemla {

namespace {

using detail::Extent;

float to_float(float value) { return value; }
float to_float(std::uint16_t bits) { return bf16_to_float(bits); }

template <class Value>
void quantise(const ConstTensor& in, float q_scale, const Tensor& out) {
    const std::int64_t dims = in.shape[2];
    if (dims == 0) return;  // the pointers may be null
    for (std::int64_t row = 0; row < in.shape[0]; ++row)
        for (std::int64_t head = 0; head < in.shape[1]; ++head) {
            const auto* values = static_cast<const Value*>(in.data) + row * in.strides[0] + head * in.strides[1];
            auto* codes = static_cast<std::uint8_t*>(out.data) + row * out.strides[0] + head * out.strides[1];
            for (std::int64_t d = 0; d < dims; ++d) codes[d] = float_to_e4m3(to_float(values[d]) / q_scale);
        }
}

}  // namespace

void quantize_query(ConstTensor in, float q_scale, Tensor out) {
    detail::check_on_cpu(in, "in", "quantize_query");
    detail::check_tensor(in, {.argument = "in",
                              .dtypes = {DType::bf16, DType::f32},
                              .shape = {Extent::any("rows"), Extent::any("heads"), Extent::any("d")}});
    detail::check_tensor(out, {.argument = "out",
                               .dtypes = {DType::f8_e4m3},
                               .shape = {Extent::exactly(in.shape[0], "rows"), Extent::exactly(in.shape[1], "heads"),
                                         Extent::exactly(in.shape[2])}});
    detail::check_positive_finite(q_scale, "q_scale");
    detail::check_no_overlap({detail::region_of(out, "out")}, {detail::region_of(in, "in")});
    if (in.dtype == DType::bf16)
        quantise<std::uint16_t>(in, q_scale, out);
    else
        quantise<float>(in, q_scale, out);
}

}  // namespace sparsemla
