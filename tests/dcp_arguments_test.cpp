// Which arguments the verbs of an exchange take, and every refusal: by name, before anything is written.
#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tests/mailboxes.h"

namespace sparsemla::test {
namespace {

Device other_device() { return on_gpu() ? Device{} : Device{Device::Kind::cuda, 0}; }

/// Rank 1 of three, whose every argument is right: 2 of 7 heads, room for 4 rows, of which there are 3.
class K30_ArgumentValidationGap : public testing::Test {
   protected:
    static constexpr std::int64_t rows = 3, heads = 7, own = 2;

    Mailboxes boxes{shape_of({0, 3, 5, heads}, 4)};
    Padded query{DType::f8_e4m3, {rows + 1, own + 1, 576}, 16},
        received{DType::f8_e4m3, {rows + 1, heads + 1, 576}, 16};
    Padded partial{DType::bf16, {rows + 1, heads + 1, value_dims}, 5},
        partial_lse{DType::f32, {rows + 1, heads + 1}, 3};
    Padded counts{DType::i32, {rows + 1}, 2}, sinks{DType::f32, {own + 1}, 2};
    Padded out{DType::bf16, {rows + 1, own + 1, value_dims}, 7}, lse{DType::f32, {rows + 1, own + 1}, 3, true};
    Placed query_at{query}, received_at{received}, partial_at{partial}, partial_lse_at{partial_lse}, counts_at{counts},
        sinks_at{sinks}, out_at{out}, lse_at{lse};

    Mailbox mailbox = boxes[1];
    GatherQueryArgs gather{.rows = rows, .query = query_at.view()};
    PushArgs pushed{.rows = rows, .out = partial_at.view(), .lse = partial_lse_at.view(), .counts = counts_at.view()};
    MergePushedArgs merged{.rows = rows, .sinks = sinks_at.view(), .out = out_at.view(), .lse = lse_at.view()};
    std::int64_t receive_rows = rows;
    Tensor receive_out = received_at.view();

    using Verb = std::function<void()>;
    Verb gather_verb = [this] { gather_query(mailbox, gather, boxes.stream()); };
    Verb receive_verb = [this] { receive_query(mailbox, receive_rows, receive_out, boxes.stream()); };
    Verb push_verb = [this] { push(mailbox, pushed, boxes.stream()); };
    Verb merge_verb = [this] { merge_pushed(mailbox, merged, boxes.stream()); };
    Verb reset_verb = [this] { reset(mailbox, boxes.stream()); };
    Verb status_verb = [this] { status(mailbox, boxes.stream()); };

    std::string written() {
        boxes.synchronize();
        for (const Placed* each : {&received_at, &out_at, &lse_at}) each->fetch();
        if (!received.rest_intact(0, 0) || !out.rest_intact(0, 0) || !lse.rest_intact(0, 0)) return "an output";
        for (int rank = 0; rank < boxes.world(); ++rank)
            for (std::uint8_t byte : boxes.control(rank).read())
                if (byte != 0) return "a control";
        return boxes.not_armed();
    }
    /// The change makes the call wrong, for as long as the call lasts.
    void refused(const std::string& argument, const std::string& what, const Verb& verb, const Verb& change,
                 ErrorKind kind = ErrorKind::invalid_argument) {
        const auto saved = std::tuple(mailbox, gather, pushed, merged, receive_rows, receive_out);
        change();
        try {
            verb();
            ADD_FAILURE() << argument << ", " << what << ": accepted";
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), kind) << argument << ", " << what << ": " << error.what();
            EXPECT_EQ(error.argument(), argument) << what << ": " << error.what();
            EXPECT_NE(std::string(error.what()).find(": need "), std::string::npos) << error.what();
        }
        EXPECT_EQ(written(), "") << argument << ", " << what;
        std::tie(mailbox, gather, pushed, merged, receive_rows, receive_out) = saved;
    }

    /// What can be wrong with any tensor: `least` has its smallest extents, negative where it must be exactly that.
    template <class T>
    void tensor_refused(const std::string& argument, const Verb& verb, T& tensor, DType other_dtype, bool optional,
                        const std::vector<std::int64_t>& least) {
        const auto wrong = [&](const std::string& what, auto change) {
            refused(argument, what, verb, [&] { change(tensor); });
        };
        const auto last = static_cast<std::size_t>(tensor.rank - 1);
        if (!optional) wrong("absent", [](T& t) { t = {}; });
        wrong("null pointer", [](T& t) { t.data = nullptr; });
        wrong("other dtype", [=](T& t) { t.dtype = other_dtype; });
        wrong("dtype u8", [](T& t) { t.dtype = DType::u8; });
        wrong("other device", [](T& t) { t.device = other_device(); });
        wrong("rank + 1", [](T& t) {
            t.shape[static_cast<std::size_t>(t.rank)] = t.strides[static_cast<std::size_t>(t.rank)] = 1;
            ++t.rank;
        });
        wrong("rank - 1 or 4", [](T& t) { t.rank = t.rank == 1 ? 4 : t.rank - 1; });
        wrong("rank 7", [](T& t) { t.rank = 7; });
        wrong("rank -1", [](T& t) { t.rank = -1; });
        wrong("negative stride", [](T& t) { t.strides[0] = -t.strides[0]; });
        wrong("unaddressable stride", [](T& t) { t.strides[0] = (std::int64_t{1} << 62); });
        for (std::size_t i = 0; i < least.size(); ++i)
            for (std::int64_t extent : {std::abs(least[i]) - 1, std::int64_t{0}, std::int64_t{-1},
                                        least[i] < 0 ? 1 - least[i] : std::int64_t{LLONG_MIN}})
                wrong("extent " + std::to_string(extent) + " in dimension " + std::to_string(i),
                      [=](T& t) { t.shape[i] = extent; });
        if (tensor.rank == 3) {
            wrong("last stride 2", [=](T& t) { t.strides[last] = 2; });
            wrong("last stride 0", [=](T& t) { t.strides[last] = 0; });
        }
        const std::int64_t element = size_bytes(tensor.dtype);
        if (element > 1)
            wrong("misaligned", [=](T& t) {
                using Byte = std::conditional_t<std::is_same_v<T, Tensor>, std::byte, const std::byte>;
                t.data = static_cast<Byte*>(t.data) + element / 2;
            });
    }
    /// Heads of a query are read and written 16 bytes at a time.
    template <class T>
    void vectors_refused(const std::string& argument, const Verb& verb, T& tensor) {
        refused(argument, "base of 8 bytes past 16", verb, [&] {
            using Byte = std::conditional_t<std::is_same_v<T, Tensor>, std::byte, const std::byte>;
            tensor.data = static_cast<Byte*>(tensor.data) + 8;
        });
        for (std::size_t dimension : {0U, 1U})
            refused(argument, "stride of 8 bytes past 16", verb,
                    [&] { tensor.strides[dimension] += 8 / size_bytes(tensor.dtype); });
    }
};

TEST_F(K30_ArgumentValidationGap, Mailbox) {
    const std::vector<std::pair<const char*, Verb>> verbs = {{"gather", gather_verb}, {"receive", receive_verb},
                                                             {"push", push_verb},     {"merge", merge_verb},
                                                             {"reset", reset_verb},   {"status", status_verb}};
    const auto nan = std::nan("");
    for (const auto& [verb_name, verb] : verbs) {
        const auto wrong = [&, name = std::string(verb_name), &call = verb](
                               const std::string& field, const std::string& what, const Verb& change) {
            refused("mailbox." + field, name + ", " + what, call, change);
        };
        wrong("layout", "none", [&] { mailbox.layout = {}; });
        for (std::int32_t world : {0, -1, max_ranks + 1, INT_MAX, INT_MIN})
            wrong("layout", std::to_string(world) + " ranks", [&] { mailbox.layout.world = world; });
        wrong("layout", "no rows", [&] { mailbox.layout = mailbox_layout(shape_of({0, 3, 5, heads}, 0)); });
        for (int rank : {-1, 3, INT_MAX, INT_MIN})
            wrong("peers.rank", std::to_string(rank), [&] { mailbox.peers.rank = rank; });
        for (int rank : {0, 1, 2}) {
            std::byte*& base = mailbox.peers.base[rank];
            const std::string field = "peers.base[" + std::to_string(rank) + "]";
            wrong(field, "null", [&] { base = nullptr; });
            for (int bytes : {1, 4, 8}) wrong(field, "misaligned", [&] { base += bytes; });
        }
        wrong("peers.base[1]", "that of rank 0", [&] { mailbox.peers.base[1] = mailbox.peers.base[0]; });
        wrong("peers.base[2]", "that of rank 1", [&] { mailbox.peers.base[2] = mailbox.peers.base[1]; });
        for (std::int64_t past : {std::int64_t{16}, mailbox.layout.bytes - 16, 16 - mailbox.layout.bytes})
            wrong("peers.base[2]", "memory that rank 1 has in part",
                  [&] { mailbox.peers.base[2] = mailbox.peers.base[1] + past; });
        wrong("control", "none", [&] { mailbox.control = {}; });
        wrong("control", "null", [&] { mailbox.control.data = nullptr; });
        wrong("control", "63 bytes", [&] { mailbox.control.bytes = 63; });
        wrong("control", "misaligned",
              [&] { mailbox.control.data = static_cast<std::byte*>(mailbox.control.data) + 32; });
        wrong("control", "inside a mailbox", [&] {
            auto address = reinterpret_cast<std::uintptr_t>(mailbox.peers.base[0]);
            mailbox.control.data = mailbox.peers.base[0] + (64 - address % 64) % 64;
        });
        for (double limit : {0.0, -1.0, nan, double{INFINITY}, -double{INFINITY}, 1e7})
            wrong("wait_limit_s", std::to_string(limit), [&] { mailbox.wait_limit_s = limit; });
        for (float us : {-1.0F, static_cast<float>(nan), INFINITY, -INFINITY, 1e8F})
            wrong("delay.us", std::to_string(us), [&] { mailbox.delay.us = us; });
    }
}

TEST_F(K30_ArgumentValidationGap, Rows) {
    for (std::int64_t bad : {std::int64_t{-1}, std::int64_t{5}, std::int64_t{LLONG_MAX}, std::int64_t{LLONG_MIN}}) {
        refused("rows", "gather", gather_verb, [&] { gather.rows = bad; });
        refused("rows", "receive", receive_verb, [&] { receive_rows = bad; });
        refused("rows", "push", push_verb, [&] { pushed.rows = bad; });
        refused("rows", "merge", merge_verb, [&] { merged.rows = bad; });
    }
}

TEST_F(K30_ArgumentValidationGap, GatherQuery) {
    tensor_refused("query", gather_verb, gather.query, DType::f32, false, {rows, own, -576});
    vectors_refused("query", gather_verb, gather.query);
    for (float scale : {0.0F, -0.0F, -1.0F, std::nanf(""), INFINITY, -INFINITY})
        refused("q_scale", std::to_string(scale), gather_verb, [&] { gather.q_scale = scale; });
    refused("q_scale", "2 where codes stay as they are", gather_verb, [&] { gather.q_scale = 2; });
}

TEST_F(K30_ArgumentValidationGap, GatherQueryIntoBf16) {
    Mailboxes halves({.rows = 4, .head_offset = {0, 3, 5, heads}, .query_dtype = DType::bf16, .d_qk = 512});
    Padded values(DType::bf16, {rows + 1, own + 1, 512}, 8);
    const Placed values_at(values);
    const Verb verb = [&] { gather_query(halves[1], gather, halves.stream()); };
    refused("query", "codes for a mailbox of BF16", verb, [] {});
    gather.query = values_at.view();
    refused("q_scale", "2 where values stay as they are", verb, [&] { gather.q_scale = 2; });
    vectors_refused("query", verb, gather.query);
    refused("query", "576 dimensions for 512", verb, [&] { gather.query.shape[2] = 576; });
    EXPECT_EQ(halves.not_armed(), "");
}

TEST_F(K30_ArgumentValidationGap, ReceiveQuery) {
    tensor_refused("out", receive_verb, receive_out, DType::bf16, false, {rows, heads, -576});
    vectors_refused("out", receive_verb, receive_out);
    refused("out", "rows on top of each other", receive_verb, [&] { receive_out.strides[0] = 0; });
    refused("out", "heads on top of each other", receive_verb, [&] { receive_out.strides[1] = 560; });
    refused("out", "the mailbox", receive_verb, [&] { receive_out.data = mailbox.peers.base[1]; });
}

TEST_F(K30_ArgumentValidationGap, Push) {
    tensor_refused("out", push_verb, pushed.out, DType::f16, false, {rows, heads, -value_dims});
    tensor_refused("lse", push_verb, pushed.lse, DType::bf16, false, {rows, heads});
    tensor_refused("counts", push_verb, pushed.counts, DType::i64, true, {rows});
}

TEST_F(K30_ArgumentValidationGap, MergePushed) {
    tensor_refused("out", merge_verb, merged.out, DType::f16, false, {rows, own, -value_dims});
    tensor_refused("lse", merge_verb, merged.lse, DType::bf16, true, {rows, own});
    tensor_refused("sinks", merge_verb, merged.sinks, DType::f64, true, {own});
    refused("out", "rows on top of each other", merge_verb, [&] { merged.out.strides[0] = 0; });
    refused("out", "heads on top of each other", merge_verb, [&] { merged.out.strides[1] = 511; });
    refused("out", "the mailbox", merge_verb, [&] { merged.out.data = mailbox.peers.base[1] + 1024; });
    refused("lse", "all in one place", merge_verb, [&] { merged.lse.strides = {0, 0}; });
    refused("lse", "where out is", merge_verb, [&] { merged.lse.data = merged.out.data; });
    refused("lse", "where sinks are", merge_verb, [&] { merged.lse.data = const_cast<void*>(merged.sinks.data); });
}

// B060: no rows are no exchange, whatever else is missing.
TEST_F(K30_ArgumentValidationGap, B060_NoRows) {
    gather_query(mailbox, {}, boxes.stream());
    receive_query(mailbox, 0, {}, boxes.stream());
    push(mailbox, {}, boxes.stream());
    merge_pushed(mailbox, {}, boxes.stream());
    EXPECT_EQ(written(), "");
}

// K20: a mailbox of no rows has nothing to exchange with; groups say so when they are made.
TEST(K20_ZeroSize, NoCapacityNoGroup) {
    try {
        const LoopbackGroup group(equal_shares(2, 3, 0), tested_device().device);
        ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
        EXPECT_EQ(error.argument(), "mailbox.layout") << error.what();
    }
}

// K12: strides of dimensions of size 1 are not looked at.
TEST(K12_Strides, StridesOfSizeOneDimensionsAreIgnored) {
    const auto wild = [](auto tensor, std::int64_t stride) {
        for (std::size_t i = 0; i + 1 < static_cast<std::size_t>(tensor.rank); ++i) tensor.strides[i] = stride;
        return tensor;
    };
    Mailboxes boxes({.rows = 1, .head_offset = {0, 1}, .query_dtype = DType::bf16});
    for (std::int64_t stride : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{LLONG_MAX}, std::int64_t{LLONG_MIN}}) {
        const Padded query(DType::bf16, {1, 1, 576}, 0), received(DType::bf16, {1, 1, 576}, 0);
        const Padded partial(DType::bf16, {1, 1, value_dims}, 0), out(DType::bf16, {1, 1, value_dims}, 0);
        const Padded partial_lse(DType::f32, {1, 1}, 0), lse(DType::f32, {1, 1}, 0);
        for (int d = 0; d < 576; ++d) query.set(static_cast<float>(d), 0, 0, d);
        for (int d = 0; d < value_dims; ++d) partial.set(static_cast<float>(-d), 0, 0, d);
        partial_lse.set(0.25F, 0, 0);
        const Placed query_at(query), received_at(received), partial_at(partial), partial_lse_at(partial_lse),
            out_at(out), lse_at(lse);
        gather_query(boxes[0], {.rows = 1, .query = wild(query_at.view(), stride)}, boxes.stream());
        receive_query(boxes[0], 1, wild(received_at.view(), stride), boxes.stream());
        push(boxes[0], {.rows = 1, .out = wild(partial_at.view(), stride), .lse = wild(partial_lse_at.view(), stride)},
             boxes.stream());
        merge_pushed(boxes[0],
                     {.rows = 1,
                      .out = wild(out_at.view(), stride),
                      .lse = wild(lse_at.view(), stride),
                      .lse_base = LseBase::two},
                     boxes.stream());
        boxes.synchronize();
        for (const Placed* each : {&received_at, &out_at, &lse_at}) each->fetch();
        EXPECT_EQ(received.memory(), query.memory()) << stride;
        EXPECT_EQ(out.memory(), partial.memory()) << stride;
        EXPECT_EQ(lse.value(0, 0), 0.25F) << stride;
        EXPECT_EQ(boxes.not_armed(), "") << stride;
    }
}

}  // namespace
}  // namespace sparsemla::test
