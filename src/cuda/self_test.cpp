// Phases: a step whose records and query follow a rule, the plan's kernel on it, the same in float64, comparison.
#include "cuda/self_test.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "balanced_plan.h"
#include "cuda/runtime.h"
#include "latency_plan.h"
#include "sparsemla/formats.h"

namespace sparsemla::detail {

namespace {

constexpr int heads = 3;
constexpr float poison = -77.0F;

using Launch = void (*)(const DecodeParams&, Stream);

/// decode_balanced and decode_wide: three splits of two chunks of each source, for a CTA each, or for two CTAs that cut
/// one of them. decode_latency is made for the splits of Transport::weights; of others two, as more need more shared
/// memory in some tilings.
int splits_of(const Plan& plan) {
    if (shares_chunks_out(plan)) return 3;
    return plan.tiling->transport == Transport::weights ? plan.schedule.splits : std::min(plan.schedule.splits, 2);
}

/// Sources with columns, the first ones: one split's one chunk is of one source.
int sources_of(const Plan& plan) {
    return has_one_chunk(plan) && splits_of(plan) == 1 ? 1 : static_cast<int>(plan.problem.sources.size());
}

/// Active columns of each of them for which a split has one chunk at most, or of two sources one each.
std::int64_t few_columns(const Plan& plan) { return splits_of(plan) * plan.schedule.chunk / sources_of(plan) - 5; }

/// Columns of each source's list: a split has one chunk at most, or more.
std::int64_t columns_of(const Plan& plan) {
    if (shares_chunks_out(plan)) return 2 * splits_of(plan) * plan.schedule.chunk - 5;
    return has_one_chunk(plan) ? few_columns(plan) : (splits_of(plan) + 1) * plan.schedule.chunk - 5;
}

/// The plan's kernel and tiling for the check's step.
Plan plan_of_check(const Plan& plan) {
    Plan check = plan;
    check.problem.rows = 1;
    check.problem.heads = heads;
    check.problem.out_dtype = DType::f32;
    check.problem.dcp = check.fuses_exchange = false;
    check.problem.lse = true;
    check.problem.lse_base = LseBase::natural;
    for (int i = 0; SourceProblem & source : check.problem.sources) {
        source.width = i++ < sources_of(plan) ? columns_of(plan) : 0;
        source.count_offset = 0;
    }
    check.schedule.splits = splits_of(plan);
    if (shares_chunks_out(plan)) {
        check.device.sms = balanced_shape(plan).one_split_each ? splits_of(plan) : 2;
        check.workspace_bytes = balanced_workspace(check).bytes;
        check.state_bytes = balanced_state_bytes(check);
    }
    // A scale whose half the format of P holds too: the check's weights are 1 and 2.
    check.schedule.p_scale = plan.schedule.p_format == PFormat::e4m3 ? 448.0F : 32768.0F;
    return check;
}

/// `unit` in dimension c % 512, and for every third column in the last dimension, the only one of the query. The
/// weights are 1 and 2 then, which every format of P holds; and every record holds the unit, up to the rounding of a
/// float32 scale.
constexpr float unit = 1.5F, query_unit = 2.0F;
constexpr float softmax_scale = 0.693147181F / (unit * query_unit);

float record_value(std::int64_t column, int dim, int d_qk) {
    if (dim == d_qk - 1 && column % 3 == 0) return unit;
    return dim == column % value_dims ? unit : 0.0F;
}

struct Expected {
    std::vector<double> out = std::vector<double>(value_dims, 0.0);
    double lse = 0;
};

/// Of the last `active` of `columns` records.
Expected expected_of(std::int64_t columns, std::int64_t active, int sources, int d_qk) {
    Expected expected;
    double sum = 0;
    for (std::int64_t c = columns - active; c < columns; ++c) {
        const double weight = sources * std::exp2(record_value(c, d_qk - 1, d_qk) / unit);
        sum += weight;
        for (int d = 0; d < value_dims; ++d)
            expected.out[static_cast<std::size_t>(d)] += weight * record_value(c, d, d_qk);
    }
    for (double& value : expected.out) value /= sum;
    expected.lse = std::log(sum);
    return expected;
}

class DeviceCopy {
   public:
    DeviceCopy(const void* host, std::size_t bytes, cudaStream_t stream) : memory_(bytes) {
        check_cuda(cudaMemcpyAsync(memory_.get(), host, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
    }
    template <class T>
    T* as() const {
        return static_cast<T*>(memory_.get());
    }

   private:
    DeviceMemory memory_;
};

template <class Value>
DeviceCopy copy_of(const std::vector<Value>& values, cudaStream_t stream) {
    return {values.data(), values.size() * sizeof(Value), stream};
}

void compare(const std::vector<float>& out, const std::vector<float>& lse, const Expected& expected,
             const std::string& kernel) {
    const auto fail = [&](const std::string& what, double wanted, double got) {
        throw Error(ErrorKind::device, "self-test of " + kernel, what + " = " + std::to_string(wanted),
                    std::to_string(got));
    };
    for (int head = 0; head < heads; ++head) {
        const float got = lse[static_cast<std::size_t>(head)];
        if (!(std::abs(got - expected.lse) <= 1e-4)) fail("lse of head " + std::to_string(head), expected.lse, got);
        for (std::size_t d = 0; d < value_dims; ++d) {
            const float value = out[static_cast<std::size_t>(head) * value_dims + d];
            if (!(std::abs(value - expected.out[d]) <= 0x1p-8 * expected.out[d] + 1e-6))
                fail("head " + std::to_string(head) + ", dimension " + std::to_string(d), expected.out[d], value);
        }
    }
}

/// What the step reads, and its outputs.
struct Step {
    std::vector<std::vector<std::byte>> records;  ///< of each source, a page
    std::vector<std::int32_t> slots;              ///< [columns], the last record first
    std::vector<std::uint8_t> query;              ///< [heads, d_qk], E4M3 or BF16
    std::vector<float> out = std::vector<float>(heads * value_dims, poison);
    std::vector<float> lse = std::vector<float>(heads, poison);
};

/// One page of the source's records. Of BF16 in two tensors, in one: their kernel is the same.
MutableCacheView page_of(const SourceProblem& source, std::int64_t columns) {
    MutableCacheView cache;
    cache.record = source.record;
    cache.form = source.form;
    cache.pages = 1;
    cache.page_size = columns;
    return cache;
}

Step make_step(const Problem& problem, std::int64_t columns) {
    const int d = static_cast<int>(d_qk(problem));
    Step step;
    std::vector<float> values;
    for (std::int64_t c = 0; c < columns; ++c) {
        step.slots.push_back(static_cast<std::int32_t>(columns - 1 - c));
        for (int dim = 0; dim < d; ++dim) values.push_back(record_value(columns - 1 - c, dim, d));
    }
    for (const SourceProblem& source : problem.sources) {
        MutableCacheView cache = page_of(source, columns);
        step.records.emplace_back(static_cast<std::size_t>(cache_bytes(cache)));
        cache.data = step.records.back().data();
        pack(cache, dense(values.data(), DType::f32, {columns, d}), dense(step.slots.data(), DType::i32, {columns}));
    }
    for (int i = 0; i < heads * d; ++i) {
        const float value = i % d == d - 1 ? query_unit : 0.0F;
        if (problem.query_dtype == DType::f8_e4m3) {
            step.query.push_back(float_to_e4m3(value));
            continue;
        }
        const std::uint16_t bits = float_to_bf16(value);
        step.query.push_back(static_cast<std::uint8_t>(bits & 0xFF));
        step.query.push_back(static_cast<std::uint8_t>(bits >> 8));
    }
    return step;
}

/// The list as token ids of the only rank, whose only page is block 0: as many of them as columns are active.
std::vector<std::int32_t> ids_of(const Step& step, std::int64_t active) {
    std::vector<std::int32_t> ids = step.slots;
    std::fill(ids.begin() + active, ids.end(), -1);
    return ids;
}

void set_indices(DecodeParams& call, const DeviceCopy& ids, const DeviceCopy& zero) {
    const SourceParams& source = call.sources[0];
    call.indices = {.token_ids = ids.as<std::int32_t>(),
                    .ids_row_stride = source.width,
                    .block_table = zero.as<std::int32_t>(),
                    .table_row_stride = 1,
                    .request_of_row = zero.as<std::int32_t>(),
                    .request_stride = 1,
                    .rows = 1,
                    .width = source.width,
                    .requests = 1,
                    .max_pages = 1,
                    .pages = 1,
                    .page_size = source.cache.page_size,
                    .slots_per_page = source.cache.page_size,
                    .sharding = {}};
}

void set_sources(DecodeParams& call, const Plan& check, const std::deque<DeviceCopy>& records, const DeviceCopy& slots,
                 const DeviceCopy& count) {
    call.num_sources = static_cast<int>(check.problem.sources.size());
    for (int i = 0; i < call.num_sources; ++i) {
        const SourceProblem& planned = check.problem.sources[static_cast<std::size_t>(i)];
        SourceParams& source = call.sources[i];
        source.cache = page_of(planned, check.problem.sources[0].width);
        source.cache.data = records[static_cast<std::size_t>(i)].as<std::byte>();
        source.slots = slots.as<std::int32_t>();
        source.slots_row_stride = planned.width;
        source.counts = count.as<std::int32_t>();
        source.counts_stride = 1;
        source.width = planned.width;
    }
}

/// Launches the step with `active` columns and brings its outputs back.
void run_step(const Plan& check, std::int64_t active, Step& step, Launch launch) {
    const OwnedStream stream;
    std::deque<DeviceCopy> records;
    for (const auto& page : step.records) records.emplace_back(page.data(), page.size(), stream.get());
    const DeviceCopy slots = copy_of(step.slots, stream.get());
    const DeviceCopy count = copy_of(std::vector<std::int32_t>{static_cast<std::int32_t>(active)}, stream.get());
    const DeviceCopy ids = copy_of(ids_of(step, active), stream.get());
    const DeviceCopy zero = copy_of(std::vector<std::int32_t>{0}, stream.get());
    const DeviceCopy query = copy_of(step.query, stream.get());
    const DeviceCopy out = copy_of(step.out, stream.get());
    const DeviceCopy lse = copy_of(step.lse, stream.get());
    const DeviceMemory workspace(std::max<std::size_t>(check.workspace_bytes, 1));
    const DeviceCopy state =
        copy_of(std::vector<std::uint8_t>(std::max<std::size_t>(check.state_bytes, 1)), stream.get());
    DecodeParams call;
    call.rows = 1;
    call.heads = heads;
    call.d_qk = d_qk(check.problem);
    call.query = query.as<std::byte>();
    call.query_dtype = check.problem.query_dtype;
    call.query_row_stride = heads * call.d_qk;
    call.query_head_stride = call.d_qk;
    set_sources(call, check, records, slots, count);
    if (check.problem.from_ids) set_indices(call, ids, zero);
    call.out = out.as<float>();
    call.out_dtype = DType::f32;
    call.out_row_stride = std::int64_t{heads} * value_dims;
    call.out_head_stride = value_dims;
    call.lse = lse.as<float>();
    call.lse_row_stride = heads;
    call.lse_head_stride = 1;
    call.softmax_scale = softmax_scale;
    call.plan = &check;
    call.workspace = static_cast<std::byte*>(workspace.get());
    call.state = state.as<std::byte>();
    launch(call, {stream.get()});
    check_cuda(cudaMemcpyAsync(step.out.data(), call.out, step.out.size() * sizeof(float), cudaMemcpyDeviceToHost,
                               stream.get()),
               "cudaMemcpyAsync");
    check_cuda(cudaMemcpyAsync(step.lse.data(), call.lse, step.lse.size() * sizeof(float), cudaMemcpyDeviceToHost,
                               stream.get()),
               "cudaMemcpyAsync");
    std::vector<std::uint8_t> state_after(check.state_bytes);
    check_cuda(
        cudaMemcpyAsync(state_after.data(), call.state, state_after.size(), cudaMemcpyDeviceToHost, stream.get()),
        "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream.get()), "self-test of a kernel");
    if (std::ranges::any_of(state_after, [](std::uint8_t byte) { return byte != 0; }))
        throw Error(ErrorKind::device, "self-test of " + check.schedule.kernel, "a state of zeros after the call",
                    "others");
}

void run_check(const Plan& plan, std::int64_t active, Launch launch) {
    const Plan check = plan_of_check(plan);
    Step step = make_step(check.problem, columns_of(plan));
    run_step(check, active, step, launch);
    compare(step.out, step.lse,
            expected_of(columns_of(plan), active, sources_of(plan), static_cast<int>(d_qk(check.problem))),
            to_string(check.schedule) + " (" + to_string(*check.tiling) + ")");
}

std::string records_of(const Problem& problem) {
    std::string text;
    for (const SourceProblem& source : problem.sources)
        text += to_string(source.record) + (source.form == RecordForm::planar ? " planar + " : " + ");
    return text;
}

}  // namespace

void self_test(const Plan& plan, Launch launch) {
    static std::mutex mutex;
    static std::set<std::string> passed;
    const std::string key = plan.schedule.kernel + " " + std::to_string(plan.device.device.index) + " " +
                            std::string(name(plan.problem.query_dtype)) + " " +
                            std::string(name(plan.schedule.p_format)) + " " + records_of(plan.problem) +
                            (shares_chunks_out(plan) ? (balanced_shape(plan).one_split_each ? " each " : " shared ")
                             : has_one_chunk(plan)   ? " one "
                                                     : " more ") +
                            (plan.problem.from_ids ? "ids " : "") + std::to_string(plan.schedule.chunk) + " " +
                            std::to_string(splits_of(plan)) + " " + to_string(*plan.tiling);
    const std::lock_guard lock(mutex);
    if (passed.contains(key)) return;
    run_check(plan, few_columns(plan), launch);
    if (columns_of(plan) != few_columns(plan)) run_check(plan, columns_of(plan), launch);
    passed.insert(key);
}

}  // namespace sparsemla::detail
