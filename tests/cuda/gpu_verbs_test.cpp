// The verbs besides decode on a GPU give the bytes of the CPU: conversion of ids, writers and readers of records, the
// query quantiser. What lies beside outputs stays as it was.
#include <optional>
#include <random>

#include "sparsemla/records.h"
#include "tests/conversion.h"
#include "tests/cuda/gpu_calls.h"
#include "tests/mirror.h"

namespace sparsemla::test {
namespace {

class GpuVerbs : public OnGpu {
   protected:
    Device device() const { return tested_device().device; }
    const harness::GpuStream& stream() {
        if (!stream_) stream_.emplace(device());
        return *stream_;
    }

   private:
    std::optional<harness::GpuStream> stream_;
};

TEST_F(GpuVerbs, ConvertIndices) {
    std::mt19937_64 bits(21);
    for (int number = 0; number < 200; ++number) {
        constexpr std::int64_t widths[] = {0, 1, 31, 128, 129, 2047, 2048, 2049, 5000};
        Conversion c = random_conversion(bits, widths[number % 9]);
        const ConvertArgs args = c.args();
        const Mirror ids(device(), c.ids_memory), table(device(), c.table_memory),
            requests(device(), c.requests_memory);
        const Mirror lengths(device(), c.lengths_memory), slots(device(), c.slots_memory),
            counts(device(), c.counts_memory);
        ConvertArgs there = args;
        there.token_ids = ids(args.token_ids);
        there.block_table = table(args.block_table);
        there.request_of_row = requests(args.request_of_row);
        if (c.lengths) there.lengths = lengths(args.lengths);
        there.slots = slots(args.slots);
        there.counts = counts(args.counts);
        convert_indices(there, stream().stream());
        stream().synchronize();
        convert_indices(args);
        ASSERT_EQ(slots.download<std::int32_t>(c.slots_memory.size()), c.slots_memory) << number;
        ASSERT_EQ(counts.download<std::int32_t>(c.counts_memory.size()), c.counts_memory) << number;
    }
}

/// Values of every size, special ones among them.
std::vector<float> awkward_values(std::size_t n, std::mt19937_64& bits) {
    std::vector<float> values(n);
    int exponent = 0;
    for (std::size_t i = 0; i < n; ++i) {
        if (i % 32 == 0) exponent = static_cast<int>(bits() % 3 == 0 ? bits() % 250 : 125 + bits() % 6) - 127;
        const double fraction = static_cast<double>(bits() % 4096) / 2048 - 1;
        values[i] = static_cast<float>(std::ldexp(fraction, exponent));
        switch (bits() % 600) {
            case 0: values[i] = std::numeric_limits<float>::quiet_NaN(); break;
            case 1: values[i] = -std::numeric_limits<float>::infinity(); break;
            case 2: values[i] = std::numeric_limits<float>::max(); break;
            case 3: values[i] = std::numeric_limits<float>::denorm_min(); break;
            case 4: values[i] = -0.0F; break;
            default: break;
        }
    }
    return values;
}

struct Writing {
    RecordForm form;
    std::int64_t page_size;
    bool split_rope, pow2, parts, bf16, slots_64;
};

void expect_same_records(const RecordLayout& layout, const Writing& how, Device device,
                         const harness::GpuStream& stream, std::mt19937_64& bits) {
    const std::int64_t n = 150, pages = 400 / how.page_size + 1, d = layout.d_qk();
    MutableCacheView cache{.record = layout.record, .form = how.form, .pages = pages, .page_size = how.page_size};
    std::vector<std::byte> records(static_cast<std::size_t>(pages * how.page_size * layout.record_bytes) + 64,
                                   std::byte{0x5A});
    std::vector<std::byte> ropes(
        how.split_rope ? static_cast<std::size_t>(pages * how.page_size * layout.rope.bytes()) : 0, std::byte{0x5A});
    cache.data = records.data();
    if (how.split_rope) cache.rope = ropes.data();
    const std::vector<float> floats = awkward_values(static_cast<std::size_t>(n * d), bits);
    std::vector<std::uint16_t> halves;
    for (const float value : floats) halves.push_back(float_to_bf16(value));
    // Each slot once, and some negative ones.
    std::vector<std::int64_t> slots(static_cast<std::size_t>(cache.num_slots()));
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), bits);
    slots.resize(n);
    for (std::size_t i = 0; i < slots.size(); i += 11) slots[i] = -1 - static_cast<std::int64_t>(i);
    const std::vector<std::int32_t> slots_32(slots.begin(), slots.end());
    const Mirror there(device, records), ropes_there(device, ropes), floats_there(device, floats);
    const Mirror halves_there(device, halves), slots_there(device, slots), slots_32_there(device, slots_32);
    const ConstTensor values =
        how.bf16 ? dense(halves.data(), DType::bf16, {n, d}) : dense(floats.data(), DType::f32, {n, d});
    const ConstTensor values_there = how.bf16 ? halves_there(values) : floats_there(values);
    const ConstTensor list =
        how.slots_64 ? dense(slots.data(), DType::i64, {n}) : dense(slots_32.data(), DType::i32, {n});
    const ConstTensor list_there = how.slots_64 ? slots_there(list) : slots_32_there(list);
    MutableCacheView cache_there = cache;
    cache_there.device = device;
    cache_there.data = there.data();
    if (how.split_rope) cache_there.rope = ropes_there.data();
    const PackOptions options{.k_scale = layout.takes_k_scale ? 0.37F : 1.0F, .power_of_two_scales = how.pow2};
    if (how.parts) {
        const auto part = [&](const ConstTensor& from, const RecordRun& run) {
            return run.dims == 0 ? ConstTensor{} : columns(from, run.first_dim, run.dims);
        };
        pack(cache, part(values, layout.main), part(values, layout.rope), list, options);
        pack(cache_there, part(values_there, layout.main), part(values_there, layout.rope), list_there, options,
             stream.stream());
    } else {
        pack(cache, values, list, options);
        pack(cache_there, values_there, list_there, options, stream.stream());
    }
    stream.synchronize();
    ASSERT_EQ(there.download<std::byte>(records.size()), records);
    ASSERT_EQ(ropes_there.download<std::byte>(ropes.size()), ropes);

    for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
        std::vector<std::byte> out(static_cast<std::size_t>(n * d * size_bytes(dtype)), std::byte{0x77});
        const Mirror out_there(device, out);
        const Tensor wanted = dense(out.data(), dtype, {n, d});
        unpack(cache_there, list_there, out_there(wanted), stream.stream());
        stream.synchronize();
        unpack(cache, list, wanted);
        const std::vector<std::byte> got = out_there.download<std::byte>(out.size());
        const auto value_of = [&](const std::vector<std::byte>& bytes, std::int64_t i) {
            if (dtype == DType::f64) return reinterpret_cast<const double*>(bytes.data())[i];
            if (dtype == DType::f32) return double{reinterpret_cast<const float*>(bytes.data())[i]};
            return double{bf16_to_float(reinterpret_cast<const std::uint16_t*>(bytes.data())[i])};
        };
        for (std::int64_t i = 0; i < n * d; ++i) {
            const double want = value_of(out, i), have = value_of(got, i);
            ASSERT_TRUE((std::isnan(want) && std::isnan(have)) ||
                        std::bit_cast<std::uint64_t>(want) == std::bit_cast<std::uint64_t>(have))
                << name(dtype) << " " << i / d << ", " << i % d << ": " << have << " instead of " << want;
        }
    }
}

TEST_F(GpuVerbs, PackAndUnpackEveryRecord) {
    std::mt19937_64 bits(22);
    for (const RecordLayout& layout : record_layouts)
        for (const bool planar : {false, true}) {
            if (planar ? !layout.has_planar : !layout.has_contiguous) continue;
            for (const std::int64_t page_size : {1, 2, 61, 64, 256})
                for (int variant = 0; variant < 4; ++variant) {
                    const Writing how{.form = planar ? RecordForm::planar : RecordForm::contiguous,
                                      .page_size = page_size,
                                      .split_rope = layout.may_split && variant % 2 == 1,
                                      .pow2 = layout.scale_rule == ScaleRule::amax_f32 && variant / 2 == 1,
                                      .parts = variant % 2 == 1,
                                      .bf16 = variant / 2 == 0,
                                      .slots_64 = variant % 3 == 0};
                    SCOPED_TRACE(to_string(layout.record) + (planar ? " planar" : "") + ", pages of " +
                                 std::to_string(page_size) + ", variant " + std::to_string(variant));
                    expect_same_records(layout, how, device(), stream(), bits);
                    if (HasFatalFailure()) return;
                }
        }
}

// A GPU cannot refuse a slot: one that the cache does not hold is skipped.
TEST_F(GpuVerbs, SlotsThatAreNotThere) {
    const std::vector<std::byte> before(3 * 80 * 576, std::byte{0x11});
    const std::vector<float> values(5 * 576, 2.0F);
    const std::vector<std::int64_t> slots = {160 + 64, 64, 79, 1LL << 40, -5};  // past the end, in gaps, far away
    const Mirror records(device(), before), values_there(device(), values), slots_there(device(), slots);
    MutableCacheView cache{
        .record = Record::fp8_576, .pages = 3, .page_size = 64, .slots_per_page = 80, .device = device()};
    cache.data = records.data();
    pack(cache, values_there(dense(values.data(), DType::f32, {5, 576})),
         slots_there(dense(slots.data(), DType::i64, {5})), {}, stream().stream());
    stream().synchronize();
    EXPECT_EQ(records.download<std::byte>(before.size()), before);
}

TEST_F(GpuVerbs, QuantizeQuery) {
    std::mt19937_64 bits(23);
    for (const DType dtype : {DType::bf16, DType::f32})
        for (const std::int64_t dims : {1, 8, 63, 512, 576})
            for (const std::int64_t padding : {0, 3, 8}) {
                const std::int64_t rows = 5, heads = 11, step = dims + padding, row_step = heads * step + padding;
                const std::vector<float> floats = awkward_values(static_cast<std::size_t>(rows * row_step), bits);
                std::vector<std::uint16_t> halves;
                for (const float value : floats) halves.push_back(float_to_bf16(value));
                std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * row_step), 0x55);
                const Mirror floats_there(device(), floats), halves_there(device(), halves),
                    codes_there(device(), codes);
                const auto strided = [&](auto tensor) {
                    tensor.strides = {row_step, step, 1};
                    return tensor;
                };
                const bool bf16 = dtype == DType::bf16;
                const ConstTensor in = strided(bf16 ? ConstTensor(dense(halves.data(), dtype, {rows, heads, dims}))
                                                    : ConstTensor(dense(floats.data(), dtype, {rows, heads, dims})));
                const Tensor out = strided(dense(codes.data(), DType::f8_e4m3, {rows, heads, dims}));
                quantize_query(bf16 ? halves_there(in) : floats_there(in), 0.7F, codes_there(out), stream().stream());
                stream().synchronize();
                quantize_query(in, 0.7F, out);
                ASSERT_EQ(codes_there.download<std::uint8_t>(codes.size()), codes) << dims << " + " << padding;
            }
}

// A step of a model in one graph: append to the cache, convert, decode.
TEST_F(GpuVerbs, AppendConvertAndDecodeInOneGraph) {
    Step step = random_step(
        {.rows = 4, .heads = 16, .record = Record::fp8_ds_mla, .widths = {128}, .query_dtype = DType::bf16}, 5);
    const Plan plan = step.plan({});
    DeviceCall call = step.place(plan);
    prepare(plan, call.args.state, call.stream());
    step.poison_outputs();
    // New records for the first slots, over what was there.
    const CacheView cache = call.args.sources[0].cache;
    const std::vector<float> values(static_cast<std::size_t>(8 * 576), 0.75F);
    const std::vector<std::int32_t> slots = {0, 1, 2, 3, 4, 5, -1, 7};
    const Mirror values_there(device(), values), slots_there(device(), slots);
    const MutableCacheView writable{cache.record,
                                    cache.form,
                                    const_cast<std::byte*>(cache.data),
                                    nullptr,
                                    cache.pages,
                                    cache.page_size,
                                    cache.slots_per_page,
                                    cache.page_stride_bytes,
                                    cache.device};
    const ConstTensor value_tensor = values_there(dense(values.data(), DType::f32, {8, 576}));
    const ConstTensor slot_tensor = slots_there(dense(slots.data(), DType::i32, {8}));
    call.upload_outputs();
    {
        const harness::GpuStream stream(device());
        const harness::GpuGraph graph(stream, [&](Stream s) {
            pack(writable, value_tensor, slot_tensor, {}, s);
            decode(plan, call.args, s);
        });
        graph.replay(stream.stream());
        stream.synchronize();
    }
    call.download_outputs();
    const CacheView host = step.args.sources[0].cache;
    const MutableCacheView host_writable{host.record,
                                         host.form,
                                         const_cast<std::byte*>(host.data),
                                         nullptr,
                                         host.pages,
                                         host.page_size,
                                         host.slots_per_page,
                                         host.page_stride_bytes,
                                         host.device};
    pack(host_writable, dense(values.data(), DType::f32, {8, 576}), dense(slots.data(), DType::i32, {8}));
    expect_oracle(step, step.collect(plan));
}

}  // namespace
}  // namespace sparsemla::test
