// A cache of a single record, for tests of what its bytes say.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sparsemla/records.h"
#include "tests/step.h"
#include "tests/textbook_record.h"

namespace sparsemla::test {

class OneRecord {
   public:
    explicit OneRecord(const Layout& form) : form_(form) {}

    Record record() const { return form_.record; }

    /// The record's bytes after packing these values; all of them held 0xA5 before.
    std::vector<std::uint8_t> pack(ConstTensor values, const PackOptions& options = {}) {
        std::fill(std::begin(bytes_), std::end(bytes_), std::uint8_t{0xA5});
        const std::int32_t slot = 0;
        sparsemla::pack(view(), values, dense(&slot, DType::i32, {1}), options);
        return {bytes_, bytes_ + layout().record_bytes};
    }
    std::vector<std::uint8_t> pack(const std::vector<float>& values, const PackOptions& options = {}) {
        return pack(dense(values.data(), DType::f32, {1, layout().d_qk()}), options);
    }

    void set(const RecordBytes& record) {
        const std::vector<std::uint8_t> together = record.together();
        std::copy(together.begin(), together.end(), bytes_);
    }

    std::vector<double> unpack(DType dtype = DType::f64) {
        std::vector<double> exact(layout().d_qk(), -777.0);
        std::vector<float> rounded(layout().d_qk(), -777.0F);
        const std::int64_t slot = 0;
        const Tensor out = dtype == DType::f64 ? dense(exact.data(), dtype, {1, layout().d_qk()})
                                               : dense(rounded.data(), dtype, {1, layout().d_qk()});
        sparsemla::unpack(view(), dense(&slot, DType::i64, {1}), out);
        if (dtype == DType::f32) exact.assign(rounded.begin(), rounded.end());
        return exact;
    }

   private:
    const RecordLayout& layout() const { return layout_of(form_.record); }

    /// A page of one token: its planes follow each other, so that every form has the bytes data, scales.
    MutableCacheView view() {
        auto* data = reinterpret_cast<std::byte*>(bytes_);
        return {.record = form_.record,
                .form = form_.form,
                .data = data,
                .rope = form_.split_rope ? data + layout().main.bytes() : nullptr,
                .pages = 1,
                .page_size = 1};
    }

    Layout form_;
    alignas(16) std::uint8_t bytes_[2048] = {};
};

}  // namespace sparsemla::test
