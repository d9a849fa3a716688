// Every record with either query, shared out over one to three ranks: the exchange in one kernel, by separate calls and
// around each kernel that does not exchange by itself, all within the bound of the float64 oracle, and with the same
// bits where the schedule is the same.
#include "tests/cuda/gpu_dcp.h"

namespace sparsemla::test {
namespace {

class GpuDcpRecords : public GpuDcp, public testing::WithParamInterface<Record> {};

/// The step on the tested device with these wishes, if its kernels take it.
std::optional<std::string> refusal_of(const DcpSpec& spec) {
    Problem problem{.rows = spec.rows,
                    .heads = spec.head_offset.back(),
                    .query_dtype = spec.query_dtype,
                    .sources = {},
                    .dcp = !spec.by_calls,
                    .device = tested_device().device};
    problem.sources.push_back(
        {.record = spec.record, .form = layout_of(spec.record).default_form(), .width = spec.width});
    if (spec.second_source) {
        problem.sources.push_back(problem.sources.front());
        problem.sources.back().width = spec.width / 2;
    }
    return refusal(problem, tested_device(), spec.plan);
}

bool same_bytes(const OwnedTensor& a, const OwnedTensor& b) {
    return a.size_bytes == b.size_bytes && std::memcmp(a.bytes.get(), b.bytes.get(), a.size_bytes) == 0;
}
bool same_bytes(const harness::DcpExpectation& a, const harness::DcpExpectation& b) {
    return same_bytes(a.out, b.out) && same_bytes(a.lse, b.lse);
}

/// Exchanges of several windows, each the bits of its merged partial results, and one of all rows against the oracle.
void expect_exact(DcpStep& step, std::uint64_t seed) {
    step.expect_run(5, seed);
    step.expect_oracle();
}

void expect_all_forms(DcpSpec spec) {
    ASSERT_EQ(refusal_of(spec), std::nullopt) << to_string(spec.record);
    LimitedStep fused(spec);
    const Schedule schedule = fused.group().plan().schedule;
    expect_exact(fused, spec.seed);
    if (testing::Test::HasFailure()) return;

    spec.plan = {.kernel = "decode_latency",
                 .p_format = schedule.p_format,
                 .p_scale = schedule.p_scale,
                 .splits = schedule.splits};
    spec.by_calls = true;
    LimitedStep by_calls(spec);
    EXPECT_EQ(by_calls.group().plan().schedule, schedule) << by_calls.text();
    expect_exact(by_calls, spec.seed + 1);
    EXPECT_TRUE(same_bytes(by_calls.group().expectation(), fused.group().expectation())) << by_calls.text();

    for (const char* kernel : {"decode_balanced", "decode_wide"})
        for (const bool calls : {false, true}) {
            spec.plan.kernel = kernel;
            spec.by_calls = calls;
            if (const auto refused = refusal_of(spec)) {
                ADD_FAILURE() << *refused;
                continue;
            }
            LimitedStep composed(spec);
            EXPECT_FALSE(composed.group().plan().fuses_exchange) << composed.text();
            EXPECT_EQ(composed.group().plan().schedule.kernel, kernel);
            expect_exact(composed, spec.seed + 2);
            // The arithmetic of decode_balanced is decode_latency's.
            Schedule same = schedule;
            same.kernel = kernel;
            if (kernel == std::string("decode_balanced") && composed.group().plan().schedule == same) {
                EXPECT_TRUE(same_bytes(composed.group().expectation(), fused.group().expectation()))
                    << composed.text() << "\n  and " << fused.text();
            }
        }
}

TEST_P(GpuDcpRecords, EveryFormOfExchange) {
    struct Sharing {
        std::vector<std::int64_t> head_offset;
        bool second_source;
    };
    const Record record = GetParam();
    std::uint64_t seed = 300 + 20 * static_cast<std::uint64_t>(record);
    for (const DType query : {DType::f8_e4m3, DType::bf16})
        for (const auto& [offset, second] :
             {Sharing{{0, 7}, false}, Sharing{{0, 9, 20}, true}, Sharing{{0, 2, 3, 6}, false}}) {
            const DcpSpec spec{.rows = 5,
                               .head_offset = offset,
                               .interleave = second ? 16 : 1,
                               .width = second ? 200 : 150,
                               .record = record,
                               .query_dtype = query,
                               .sinks = second,
                               .second_source = second,
                               .plan = {.kernel = "decode_latency"},
                               .seed = ++seed};
            ASSERT_NO_FATAL_FAILURE(expect_all_forms(spec));
            if (HasFailure()) return;
        }
}

std::vector<Record> all_records() {
    std::vector<Record> records;
    for (const RecordLayout& layout : record_layouts) records.push_back(layout.record);
    return records;
}

std::string name_of(const testing::TestParamInfo<Record>& info) {
    const RecordLayout& layout = layout_of(info.param);
    return std::string(layout.name) + "_" + std::to_string(layout.record_bytes);
}

INSTANTIATE_TEST_SUITE_P(Records, GpuDcpRecords, testing::ValuesIn(all_records()), name_of);

}  // namespace
}  // namespace sparsemla::test
