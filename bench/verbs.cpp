// Microseconds of the verbs besides decode on a GPU: graphs of 64 calls with programmatic edges, median of 11 replays.
//   bench_verbs [cuda:N]
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "harness/gpu.h"
#include "harness/spread.h"
#include "sparsemla/indices.h"
#include "sparsemla/records.h"
#include "sparsemla/topk.h"

namespace {

using namespace sparsemla;
using harness::GpuBuffer;

constexpr int calls = 64, replays = 11;

template <class T>
GpuBuffer upload(Device device, const std::vector<T>& values) {
    GpuBuffer buffer(device, values.size() * sizeof(T));
    buffer.upload(values.data(), values.size() * sizeof(T));
    return buffer;
}

void report(const harness::GpuStream& stream, const std::string& what, const std::function<void(Stream)>& call) {
    call(stream.stream());  // loads the kernel
    stream.synchronize();
    const harness::GpuGraph graph(stream, [&](Stream s) {
        for (int i = 0; i < calls; ++i) call(s);
    });
    std::vector<double> sample;
    for (int i = -2; i < replays; ++i) {
        graph.replay(stream.stream());  // the timed one follows without a gap
        const double us = graph.time_us(stream) / calls;
        if (i >= 0) sample.push_back(us);
    }
    const harness::Spread spread = harness::spread_of(std::move(sample));
    std::printf("%-60s %6.2f us  (p10 %.2f, p90 %.2f)\n", what.c_str(), spread.median, spread.p10, spread.p90);
}

/// 8 ranks, of which this is one; pages of 64.
void convert(const harness::GpuStream& stream, std::int64_t rows, std::int64_t width) {
    const Device device = stream.device();
    constexpr std::int64_t world = 8, pages = 4096, max_pages = 256;
    std::mt19937 bits(1);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * width)),
        table(static_cast<std::size_t>(rows * max_pages));
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(bits() % (max_pages * 64 * world));
    for (std::int32_t& block : table) block = static_cast<std::int32_t>(bits() % pages);
    std::vector<std::int32_t> requests(static_cast<std::size_t>(rows));
    std::iota(requests.begin(), requests.end(), 0);
    const GpuBuffer ids_there = upload(device, ids), table_there = upload(device, table),
                    requests_there = upload(device, requests);
    const GpuBuffer slots(device, ids.size() * 4), counts(device, requests.size() * 4);
    const ConvertArgs args{.token_ids = dense(ids_there.data(), DType::i32, {rows, width}, device),
                           .block_table = dense(table_there.data(), DType::i32, {rows, max_pages}, device),
                           .request_of_row = dense(requests_there.data(), DType::i32, {rows}, device),
                           .lengths = {},
                           .cache = {.pages = pages, .page_size = 64},
                           .sharding = {.world = world, .rank = 3, .interleave = 1},
                           .slots = dense(slots.data(), DType::i32, {rows, width}, device),
                           .counts = dense(counts.data(), DType::i32, {rows}, device)};
    report(stream, "convert_indices, 8 ranks, " + std::to_string(rows) + " rows x " + std::to_string(width),
           [&](Stream s) { convert_indices(args, s); });
}

/// Of `world` ranks, each with k candidates of its own; token ids, this one's part.
void select(const harness::GpuStream& stream, std::int64_t world, std::int64_t rows, std::int64_t k) {
    const Device device = stream.device();
    std::mt19937 bits(3);
    std::normal_distribution<float> normal;
    std::vector<float> scores(static_cast<std::size_t>(world * rows * k));
    std::vector<std::int32_t> ids(scores.size());
    for (float& score : scores) score = normal(bits);
    for (std::size_t i = 0; i < ids.size(); ++i)
        ids[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(bits() % (1 << 17)) * world +
                                           static_cast<std::int64_t>(i) / (rows * k));
    const GpuBuffer scores_there = upload(device, scores), ids_there = upload(device, ids);
    const GpuBuffer list(device, static_cast<std::size_t>(rows * k) * 4),
        counts(device, static_cast<std::size_t>(rows) * 4);
    MergeTopkArgs args{.rows = rows, .k = k};
    args.scores = dense(scores_there.data(), DType::f32, {world, rows, k}, device);
    args.ids = dense(ids_there.data(), DType::i32, {world, rows, k}, device);
    args.sharding = {.world = world, .rank = world / 2, .interleave = 1};
    args.token_ids = dense(list.data(), DType::i32, {rows, k}, device);
    args.counts = dense(counts.data(), DType::i32, {rows}, device);
    report(stream,
           "merge_topk, " + std::to_string(world) + " ranks, " + std::to_string(rows) + " rows x " + std::to_string(k),
           [&](Stream s) { merge_topk(args, s); });
}

void quantize(const harness::GpuStream& stream, std::int64_t rows, std::int64_t heads) {
    const Device device = stream.device();
    const std::vector<std::uint16_t> values(static_cast<std::size_t>(rows * heads * 576), 0x3F80);
    const GpuBuffer in = upload(device, values), out(device, values.size());
    report(stream, "quantize_query, " + std::to_string(rows) + " rows x " + std::to_string(heads) + " heads",
           [&](Stream s) {
               quantize_query(dense(in.data(), DType::bf16, {rows, heads, 576}, device), 1.0F,
                              dense(out.data(), DType::f8_e4m3, {rows, heads, 576}, device), s);
           });
}

void append(const harness::GpuStream& stream, const RecordLayout& layout, std::int64_t n) {
    const Device device = stream.device();
    MutableCacheView cache{
        .record = layout.record, .form = layout.default_form(), .pages = 1024, .page_size = 64, .device = device};
    const GpuBuffer records(device, static_cast<std::size_t>(cache.num_slots() * layout.record_bytes));
    cache.data = records.data();
    std::vector<std::uint16_t> values(static_cast<std::size_t>(n * layout.d_qk()));
    std::mt19937 bits(2);
    for (std::uint16_t& value : values) value = static_cast<std::uint16_t>(0x3F00 + bits() % 256);
    std::vector<std::int64_t> slots(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i * 37 % 65536);
    const GpuBuffer values_there = upload(device, values), slots_there = upload(device, slots);
    report(stream, "pack " + to_string(layout.record) + ", " + std::to_string(n) + " records", [&](Stream s) {
        pack(cache, dense(values_there.data(), DType::bf16, {n, layout.d_qk()}, device),
             dense(slots_there.data(), DType::i64, {n}, device), {}, s);
    });
}

}  // namespace

int main(int argc, char** argv) {
    const std::string name = argc > 1 ? argv[1] : "cuda:0";
    const Device device{Device::Kind::cuda, name.starts_with("cuda:") ? std::stoi(name.substr(5)) : 0};
    const harness::GpuStream stream(device);
    for (const std::int64_t rows : {1, 5, 128})
        for (const std::int64_t width : {512, 2048}) convert(stream, rows, width);
    convert(stream, 5, 16384);
    for (const std::int64_t world : {1, 8, 16})
        for (const std::int64_t rows : {1, 5, 128})
            for (const std::int64_t k : {512, 2048}) select(stream, world, rows, k);
    for (const std::int64_t heads : {16, 128})
        for (const std::int64_t rows : {5, 128}) quantize(stream, rows, heads);
    for (const RecordLayout& layout : record_layouts)
        for (const std::int64_t n : {8, 4096}) append(stream, layout, n);
    return 0;
}
