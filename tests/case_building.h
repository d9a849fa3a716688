// Cases in memory for tests of the case reader, and the words of its refusals.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "sparsemla/case_file.h"

namespace sparsemla {

/// The text of the malformed_file error that validate throws; empty if it accepts the case.
inline std::string refusal_of(const Case& c) {
    try {
        validate(c);
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::malformed_file) << error.what();
        return error.what();
    }
    return "";
}

inline testing::AssertionResult contains(const std::string& text, const std::string& part) {
    if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "'" << text << "' does not contain '" << part << "'";
}

inline void set_ints(Case& c, const std::string& name, std::vector<std::int64_t> shape,
                     const std::vector<std::int32_t>& values) {
    OwnedTensor tensor = make_owned(DType::i32, std::move(shape));
    ASSERT_EQ(tensor.size_bytes, 4 * values.size());
    std::memcpy(tensor.bytes.get(), values.data(), tensor.size_bytes);
    c.tensors.insert_or_assign(name, std::move(tensor));
}

inline std::vector<std::int32_t> ints_of(const ConstTensor& tensor) {
    std::vector<std::int32_t> out(static_cast<std::size_t>(tensor.elements()));
    if (!out.empty()) std::memcpy(out.data(), tensor.data, 4 * out.size());
    return out;
}

inline std::int64_t record_bytes_of(Record record) { return layout_of(record).record_bytes; }

/// 2 rows, 3 heads, 5 columns, 4 pages of 2 records.
inline Case case_of(Record record) {
    const RecordLayout& layout = layout_of(record);
    Case c;
    c.path = "case";
    c.metadata = {{"record", std::string(layout.name)},
                  {"record_bytes", std::to_string(layout.record_bytes)},
                  {"page_size", "2"},
                  {"softmax_scale", "0.125"}};
    c.tensors["query"] = make_owned(DType::bf16, {2, 3, layout.d_qk()});
    c.tensors["cache"] = record == Record::bf16 ? make_owned(DType::bf16, {4, 2, layout.d_qk()})
                                                : make_owned(DType::u8, {4, 2, layout.record_bytes});
    c.tensors["slots"] = make_owned(DType::i32, {2, 5});
    return c;
}

/// The same with a second source and everything optional.
inline Case full_case() {
    Case c = case_of(Record::fp8_512);
    c.metadata.insert({{"extra_record", "nvfp4_v41"}, {"extra_page_size", "2"}, {"k_scale", "0.5"}, {"lse", "log2"}});
    c.tensors["counts"] = make_owned(DType::i32, {2});
    c.tensors["sinks"] = make_owned(DType::f32, {3});
    c.tensors["extra_cache"] = make_owned(DType::u8, {3, 2, record_bytes_of(Record::nvfp4_v41)});
    c.tensors["extra_slots"] = make_owned(DType::i32, {2, 7});
    c.tensors["extra_counts"] = make_owned(DType::i32, {2});
    c.tensors["expected.out"] = make_owned(DType::f32, {2, 3, value_dims});
    c.tensors["expected.lse"] = make_owned(DType::f32, {2, 3});
    c.tensors["expected.dequantised"] = make_owned(DType::f32, {8, 512});
    c.tensors["peer.out"] = make_owned(DType::bf16, {2, 3, value_dims});
    return c;
}

}  // namespace sparsemla
