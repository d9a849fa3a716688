// Which arguments merge takes: sizes of zero, strides, and every refusal.
#include <gtest/gtest.h>

#include <climits>
#include <functional>
#include <string>
#include <vector>

#include "tests/merging.h"

namespace sparsemla::test {
namespace {

Merging two_of_two() {
    Merging m(2, 2, 2, {});
    m.fill_random(30, 3, 0);
    m.set_sinks({0.5F, -0.5F});
    m.set_counts(1, {3, 0});
    return m;
}

TEST(K20_ZeroSize, NoRowsOrNoHeadsWritesNothing) {
    for (const bool rows : {true, false}) {
        Merging m = two_of_two();
        (rows ? m.rows : m.heads) = 0;
        m.run("zero");
        EXPECT_TRUE(m.out.rest_intact(0, 0));
        EXPECT_TRUE(m.lse.rest_intact(0, 0));
    }
}

TEST(K20_ZeroSize, LseIsOptional) {
    Merging m = two_of_two();
    Merging with = two_of_two();
    MergeArgs args = m.args();
    args.lse = {};
    merge(args);
    with.run("with lse");
    EXPECT_EQ(m.out.memory(), with.out.memory());
    EXPECT_TRUE(m.lse.rest_intact(0, 0));
}

TEST(K12_Strides, AnyStridesGiveTheSameBits) {
    for (std::int64_t padding : {0, 1, 5, 640})
        for (const bool transposed : {false, true}) {
            Merging m(3, 3, 5, {.padding = padding, .transposed_lse = transposed});
            Merging packed(3, 3, 5, {.padding = 0});
            m.fill_random(31, 5, 0.2);
            packed.fill_random(31, 5, 0.2);
            m.run("padded");
            packed.run("packed");
            for (std::int64_t row = 0; row < 3; ++row)
                for (std::int64_t head = 0; head < 5; ++head) {
                    ASSERT_EQ(m.lse.value(row, head), packed.lse.value(row, head));
                    for (int d = 0; d < value_dims; ++d)
                        ASSERT_EQ(m.out.value(row, head, d), packed.out.value(row, head, d)) << "padding " << padding;
                }
        }
}

TEST(K12_Strides, StridesOfSizeOneDimensionsAreIgnored) {
    std::vector<float> values(value_dims, 2.5F), out(value_dims, -1.0F);
    const std::int32_t count = 4;
    float lse_in = 0.75F, lse_out = -1.0F;
    const float sink = -infinity;
    for (std::int64_t stride : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{LLONG_MAX}, std::int64_t{LLONG_MIN}}) {
        auto wild = [&](auto tensor) {
            for (int i = 0; i < tensor.rank; ++i)
                if (tensor.shape[i] == 1) tensor.strides[i] = stride;
            return tensor;
        };
        const Partial partial{.out = wild(dense(values.data(), DType::f32, {1, 1, value_dims})),
                              .lse = wild(dense(&lse_in, DType::f32, {1, 1})),
                              .counts = wild(dense(&count, DType::i32, {1}))};
        merge({.rows = 1,
               .heads = 1,
               .partials = {&partial, 1},
               .sinks = wild(dense(&sink, DType::f32, {1})),
               .out = wild(dense(out.data(), DType::f32, {1, 1, value_dims})),
               .lse = wild(dense(&lse_out, DType::f32, {1, 1}))});
        EXPECT_EQ(out, values) << stride;
        EXPECT_EQ(lse_out, lse_in) << stride;
    }
}

struct Fault {
    const char* argument;
    std::function<void(MergeArgs&, std::vector<Partial>&)> make;
    ErrorKind kind = ErrorKind::invalid_argument;
};

void* writable(const ConstTensor& tensor) { return const_cast<void*>(tensor.data); }

const std::vector<Fault>& faults() {
    using Partials = std::vector<Partial>;
    static const std::vector<Fault> list = {
        {"rows", [](MergeArgs& a, Partials&) { a.rows = -1; }},
        {"heads", [](MergeArgs& a, Partials&) { a.heads = -1; }},
        {"out", [](MergeArgs& a, Partials&) { a.rows = 4; }},
        {"out", [](MergeArgs& a, Partials&) { a.heads = 4; }},
        {"out", [](MergeArgs& a, Partials&) { a.out = {}; }},
        {"out", [](MergeArgs& a, Partials&) { a.out.dtype = DType::f16; }},
        {"out", [](MergeArgs& a, Partials&) { a.out.data = nullptr; }},
        {"out", [](MergeArgs& a, Partials&) { a.out.shape[2] = 511; }},
        {"out", [](MergeArgs& a, Partials&) { a.out.strides[2] = 2; }},
        {"out", [](MergeArgs& a, Partials&) { a.out.strides[1] = 0; }},
        {"out", [](MergeArgs& a, Partials&) { a.out.strides[1] = 511; }},
        {"out", [](MergeArgs& a, Partials&) { a.out.strides[0] = LLONG_MAX / 2; }},
        {"out", [](MergeArgs& a, Partials&) { a.out.data = static_cast<char*>(a.out.data) + 1; }},
        {"out", [](MergeArgs& a, Partials& p) { a.out.data = writable(p[0].out); }},
        {"out",
         [](MergeArgs& a, Partials& p) {
             a.out.data = writable(p[1].lse);
             a.lse = {};  // may lie in what follows
         }},
        {"lse",
         [](MergeArgs& a, Partials&) {
             a.out.device = {Device::Kind::cuda, 3};
         }},
        {"lse", [](MergeArgs& a, Partials&) { a.lse.dtype = DType::bf16; }},
        {"lse", [](MergeArgs& a, Partials&) { a.lse.shape[1] = 1; }},
        {"lse",
         [](MergeArgs& a, Partials&) {
             a.lse.device = {Device::Kind::cuda, 0};
         }},
        {"lse", [](MergeArgs& a, Partials&) { a.lse.strides[0] = 0; }},
        {"lse", [](MergeArgs& a, Partials&) { a.lse.data = a.out.data; }},
        {"lse", [](MergeArgs& a, Partials& p) { a.lse.data = writable(p[1].counts); }},
        {"lse", [](MergeArgs& a, Partials&) { a.lse.data = writable(a.sinks); }},
        {"sinks", [](MergeArgs& a, Partials&) { a.sinks.shape[0] = 1; }},
        {"sinks", [](MergeArgs& a, Partials&) { a.sinks.dtype = DType::f64; }},
        {"partials[0].out", [](MergeArgs&, Partials& p) { p[0].out = {}; }},
        {"partials[1].out", [](MergeArgs&, Partials& p) { p[1].out.dtype = DType::f8_e4m3; }},
        {"partials[1].out", [](MergeArgs&, Partials& p) { p[1].out.shape[0] = 1; }},
        {"partials[1].out", [](MergeArgs&, Partials& p) { p[1].out.strides[2] = 3; }},
        {"partials[0].lse", [](MergeArgs&, Partials& p) { p[0].lse = {}; }},
        {"partials[1].lse", [](MergeArgs&, Partials& p) { p[1].lse.dtype = DType::f64; }},
        {"partials[1].lse", [](MergeArgs&, Partials& p) { p[1].lse.strides[0] = -2; }},
        {"partials[1].counts", [](MergeArgs&, Partials& p) { p[1].counts.dtype = DType::i64; }},
        {"partials[1].counts", [](MergeArgs&, Partials& p) { p[1].counts.shape[0] = 1; }},
    };
    return list;
}

TEST(K30_Arguments, EveryFaultIsRefusedByNameAndNothingIsWritten) {
    for (std::size_t i = 0; i < faults().size(); ++i) {
        const Merging m = two_of_two();
        std::vector<Partial> partials = m.partials;
        MergeArgs args = m.args();
        faults()[i].make(args, partials);
        args.partials = partials;
        const std::string fault = "fault " + std::to_string(i) + " in " + faults()[i].argument;
        try {
            merge(args);
            ADD_FAILURE() << fault << " was accepted";
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), faults()[i].kind) << fault;
            EXPECT_EQ(error.argument(), faults()[i].argument) << fault << ": " << error.what();
        }
        EXPECT_TRUE(m.out.rest_intact(0, 0)) << fault;
        EXPECT_TRUE(m.lse.rest_intact(0, 0)) << fault;
    }
}

}  // namespace
}  // namespace sparsemla::test
