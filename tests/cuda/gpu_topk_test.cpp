// merge_topk among other work on a GPU: in a capture, behind a kernel that writes its inputs late, with far strides.
// What it selects there is topk_test's with SPARSEMLA_TEST_DEVICE.
#include <climits>
#include <random>

#include "tests/cuda/gpu_calls.h"
#include "tests/topk_merge.h"

namespace sparsemla::test {
namespace {

constexpr double late_us = 300;  // launching a kernel takes a few

class GpuTopk : public OnGpu {
   protected:
    static Device device() { return tested_device().device; }
};

/// Scores, ids and counts on the GPU, other ones of the same shape that a kernel will write there, and the outputs.
struct LateLists {
    LateLists(TopkMerge& now, TopkMerge& later, Device device)
        : args(now.args()),
          scores(device, now.scores_memory),
          ids(device, now.ids_memory),
          counts(device, now.source_counts_memory),
          list(device, now.list_memory),
          kept(device, now.counts_memory),
          later_args(later.args()),
          later_scores(device, later.scores_memory),
          later_ids(device, later.ids_memory),
          later_counts(device, later.source_counts_memory) {
        args.scores = scores(args.scores);
        args.ids = ids(args.ids);
        args.source_counts = counts(args.source_counts);
        args.token_ids = list(args.token_ids);
        args.counts = kept(args.counts);
        writes = {{scores.data(), later_scores.data(), later.scores_memory.size() * sizeof(float)},
                  {ids.data(), later_ids.data(), later.ids_memory.size() * sizeof(std::int32_t)},
                  {counts.data(), later_counts.data(), later.source_counts_memory.size() * sizeof(std::int32_t)}};
    }

    MergeTopkArgs args;
    Mirror scores, ids, counts, list, kept;
    MergeTopkArgs later_args;  ///< makes the memory of the later lists
    Mirror later_scores, later_ids, later_counts;
    std::vector<LateWrite> writes;
};

void expect_outputs(const LateLists& lists, const TopkMerge& m, const std::string& what) {
    const auto [list, counts] = m.expected_memory(m.expected());
    EXPECT_EQ(lists.list.download<std::int32_t>(list.size()), list) << what;
    EXPECT_EQ(lists.kept.download<std::int32_t>(counts.size()), counts) << what;
}

// prepare() of any plan has loaded the kernel; then its first call may be captured. The writer lets the merge start
// long before it writes.
TEST_F(GpuTopk, ALateWriterIsSeenInAGraph) {
    Step step = random_step({.rows = 1, .heads = 16, .widths = {64}}, 1);
    const Plan plan = step.plan({});
    DeviceCall call = step.place(plan);
    std::mt19937_64 bits(71);
    for (const std::int64_t sources : {2, 16}) {
        const TopkSpec spec{.sources = sources, .rows = 5, .width = 2048, .k = 2048};
        TopkMerge now = random_topk(spec, {4, 1, 16}, bits), later = random_topk(spec, {4, 1, 16}, bits);
        const LateLists lists(now, later, device());
        const harness::GpuStream stream(device());
        const harness::GpuGraph merge(stream, [&](Stream s) { merge_topk(lists.args, s); });
        merge.replay(stream.stream());
        stream.synchronize();
        expect_outputs(lists, now, "before");
        const harness::GpuGraph late(stream, [&](Stream s) {
            late_write(lists.writes, late_us, s);
            merge_topk(lists.args, s);
        });
        late.replay(stream.stream());
        stream.synchronize();
        expect_outputs(lists, later, "after");
    }
}

TEST_F(GpuTopk, RepeatedCallsGiveTheSameBits) {
    std::mt19937_64 bits(72);
    for (const Scores scores : {Scores::normal, Scores::few, Scores::equal}) {
        TopkMerge m = random_topk({.rows = 40, .width = 2048, .k = 1024, .scores = scores}, {8, 5, 1}, bits);
        m.run(m.args());
        const Ints first = m.list_memory;
        for (int i = 0; i < 20; ++i) {
            m.run(m.args());
            ASSERT_EQ(m.list_memory, first) << i;
        }
    }
}

TEST_F(GpuTopk, FarStrides) {
    const std::int64_t far = (std::int64_t{1} << 31) + 5;
    harness::GpuBuffer scores(device(), static_cast<std::size_t>(far + 2) * 4);
    harness::GpuBuffer ids(device(), static_cast<std::size_t>(far + 2) * 4), list(device(), 8), counts(device(), 4);
    const std::int32_t four_ids[] = {10, 11, 12, 13};
    const float four_scores[] = {1, 2, 3, 4};
    for (const std::size_t i : {0, 1}) {
        const std::size_t offset = i * static_cast<std::size_t>(far) * 4;
        scores.upload(four_scores + 2 * i, 8, offset);
        ids.upload(four_ids + 2 * i, 8, offset);
    }
    MergeTopkArgs args{.rows = 1, .k = 2};
    args.scores = {scores.data(), DType::f32, device(), 3, {2, 1, 2}, {far, LLONG_MAX, 1}};
    args.ids = {ids.data(), DType::i32, device(), 3, {2, 1, 2}, {far, LLONG_MAX, 1}};
    args.token_ids = dense(list.data(), DType::i32, {1, 2}, device());
    args.counts = dense(counts.data(), DType::i32, {1}, device());
    const harness::GpuStream stream(device());
    merge_topk(args, stream.stream());
    stream.synchronize();
    std::int32_t got[3] = {};
    list.download(got, 8);
    counts.download(got + 2, 4);
    EXPECT_EQ(got[0], 13);
    EXPECT_EQ(got[1], 12);
    EXPECT_EQ(got[2], 2);
}

}  // namespace
}  // namespace sparsemla::test
