// A short list inside its owner: argument checks run in every call, and a call allocates nothing.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>

namespace sparsemla::detail {

/// At most `capacity` values; what goes past it is a fault of the code, not of its input.
template <class T, std::size_t capacity>
class Few {
   public:
    Few() = default;
    Few(std::initializer_list<T> values) {
        for (const T& value : values) push_back(value);
    }

    void push_back(const T& value) { values_.at(size_++) = value; }
    std::size_t size() const { return size_; }
    const T* begin() const { return values_.data(); }
    const T* end() const { return values_.data() + size_; }
    const T& operator[](std::size_t i) const { return values_[i]; }

   private:
    std::array<T, capacity> values_{};
    std::size_t size_ = 0;
};

}  // namespace sparsemla::detail
