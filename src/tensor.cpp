#include "sparsemla/tensor.h"

namespace sparsemla {

std::string_view name(DType dtype) {
    switch (dtype) {
        case DType::u8: return "u8";
        case DType::i32: return "i32";
        case DType::i64: return "i64";
        case DType::f8_e4m3: return "f8_e4m3";
        case DType::bf16: return "bf16";
        case DType::f16: return "f16";
        case DType::f32: return "f32";
        case DType::f64: return "f64";
    }
    return "unknown";
}

std::string to_string(Device device) {
    return device.kind == Device::Kind::cpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

namespace {

std::string compose(const std::string& argument, std::string_view required, std::string_view received) {
    std::string text = argument + ": need ";
    text += required;
    if (!received.empty()) {
        text += ", got ";
        text += received;
    }
    return text;
}

}  // namespace

Error::Error(ErrorKind kind, std::string argument, std::string_view required, std::string_view received)
    : std::runtime_error(compose(argument, required, received)), kind_(kind), argument_(std::move(argument)) {}

}  // namespace sparsemla
