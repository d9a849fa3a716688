// Tensors, devices, streams and the one exception type of the library.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace sparsemla {

enum class DType : std::uint8_t { u8, i32, i64, f8_e4m3, bf16, f16, f32, f64 };

constexpr std::int64_t size_bytes(DType dtype) {
    switch (dtype) {
        case DType::u8:
        case DType::f8_e4m3: return 1;
        case DType::bf16:
        case DType::f16: return 2;
        case DType::i32:
        case DType::f32: return 4;
        case DType::i64:
        case DType::f64: return 8;
    }
    return 0;
}

/// "u8", "i32", "f8_e4m3", ... as error messages and the tool print them.
std::string_view name(DType dtype);

struct Device {
    enum class Kind : std::uint8_t { cpu, cuda };
    Kind kind = Kind::cpu;
    int index = 0;

    friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu" or "cuda:N".
std::string to_string(Device device);

/// The stream that a call is ordered on: a cudaStream_t, null for the legacy default stream.
/// CPU calls ignore it and return when the result is complete.
struct Stream {
    void* handle = nullptr;
};

/// A non-owning view of strided memory with DLPack's fields. Strides count elements, not bytes. The stride
/// of a dimension of size 1 is never looked at. A view of rank 0 stands for an optional tensor not given.
template <class Void>
struct BasicTensor {
    static constexpr int max_rank = 4;

    Void* data = nullptr;
    DType dtype = DType::u8;
    Device device{};
    int rank = 0;
    std::array<std::int64_t, max_rank> shape{};
    std::array<std::int64_t, max_rank> strides{};

    constexpr bool present() const { return rank != 0; }

    constexpr std::int64_t elements() const {
        std::int64_t n = 1;
        for (int i = 0; i < rank; ++i) n *= shape[i];
        return n;
    }

    /// Every writable view can be read.
    constexpr operator BasicTensor<const void>() const { return {data, dtype, device, rank, shape, strides}; }
};

using Tensor = BasicTensor<void>;
using ConstTensor = BasicTensor<const void>;

/// A dense (row-major, no gaps) view of `shape` over `data`.
template <class T>
constexpr auto dense(T* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {}) {
    using Void = std::conditional_t<std::is_const_v<T>, const void, void>;
    BasicTensor<Void> tensor{data, dtype, device, static_cast<int>(shape.size()), {}, {}};
    std::int64_t stride = 1;
    int i = 0;
    for (std::int64_t extent : shape) tensor.shape[i++] = extent;
    while (i-- > 0) {
        tensor.strides[i] = stride;
        stride *= tensor.shape[i];
    }
    return tensor;
}

/// Columns [first, first + columns) of a rank-2 view: how one list of slots serves two sources.
template <class Void>
constexpr BasicTensor<Void> columns(BasicTensor<Void> list, std::int64_t first, std::int64_t count) {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    if (list.data != nullptr)
        list.data = static_cast<Byte*>(list.data) + first * list.strides[1] * size_bytes(list.dtype);
    list.shape[1] = count;
    return list;
}

enum class ErrorKind : std::uint8_t {
    invalid_argument,  ///< an argument is malformed; nothing ran
    unsupported,       ///< a well-formed request that this kernel, build or device does not serve
    malformed_file,    ///< a case file breaks its format
    io,                ///< the operating system refused to read or write
    device,            ///< a GPU call failed
};

/// The only exception the library throws. `what()` reads "argument: need REQUIRED, got RECEIVED".
class Error : public std::runtime_error {
   public:
    Error(ErrorKind kind, std::string argument, std::string_view required, std::string_view received);

    ErrorKind kind() const noexcept { return kind_; }
    /// The name of the argument (or file, or tensor in a file) at fault.
    const std::string& argument() const noexcept { return argument_; }

   private:
    ErrorKind kind_;
    std::string argument_;
};

}  // namespace sparsemla
