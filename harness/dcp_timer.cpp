#include "harness/dcp_timer.h"

#include <functional>
#include <optional>
#include <span>
#include <utility>

#include "harness/dcp_group.h"
#include "harness/gpu.h"
#include "harness/gpu_probes.h"
#include "harness/record_pool.h"
#include "sparsemla/formats.h"

namespace sparsemla::harness {
namespace {

constexpr int untimed_replays = 2;

OwnedTensor random_query(std::int64_t rows, std::int64_t heads, std::int64_t dims) {
    OwnedTensor query = make_owned(DType::bf16, {rows, heads, dims});
    Random random(11);
    for (std::uint16_t& value :
         std::span(reinterpret_cast<std::uint16_t*>(query.bytes.get()), static_cast<std::size_t>(rows * heads * dims)))
        value = float_to_bf16(static_cast<float>(random.normal()));
    return query;
}

}  // namespace

struct DcpTimer::Parts {
    Parts(Device of, const TimerSizes& wanted)
        : device(of), sizes(wanted), stream(of), evictor(of, wanted.evict_bytes) {}

    Device device;
    TimerSizes sizes;
    GpuStream stream;
    GpuBuffer evictor;
    std::optional<RecordPool> pool;
};

namespace {

/// What the ranks of one shape need; the graphs are made of its calls.
class Ranks {
   public:
    Ranks(const DcpTimerShape& shape, const DeviceSpec& device, PlanOptions options, RecordPool& pool, int exchanges)
        : shape_(shape), device_(device.device), group_(dcp_shape(shape), device.device), cache_(pool.cache()) {
        const std::int64_t heads = shape.world * shape.own_heads;
        options.usual_columns = shape.active;
        Problem problem{.rows = shape.rows,
                        .heads = heads,
                        .query_dtype = shape.query_dtype,
                        .sources = {{.record = shape.record, .form = cache_.form, .width = shape.width}},
                        .dcp = true,
                        .lse_base = LseBase::two,
                        .device = device.device};
        dcp_plan = make_plan(problem, device, options);
        problem.dcp = false;
        plain_plan = make_plan(problem, device, options);
        make_lists(pool, exchanges);
        own_query_ = {random_query(shape.rows, shape.own_heads, d_qk(problem)).view(), device_};
        query_ = {shape.query_dtype, {shape.rows, heads, d_qk(problem)}, 0x30, device_};
        out_ = {DType::bf16, {shape.rows, heads, value_dims}, 0, device_};
        lse_ = {DType::f32, {shape.rows, heads}, 0, device_};
        merged_ = {DType::bf16, {shape.rows, shape.own_heads, value_dims}, 0, device_};
        merged_lse_ = {DType::f32, {shape.rows, shape.own_heads}, 0, device_};
        const std::size_t workspace = std::max(dcp_plan.workspace_bytes, plain_plan.workspace_bytes);
        const std::size_t state = std::max(dcp_plan.state_bytes, plain_plan.state_bytes);
        workspace_ = {DType::u8, {static_cast<std::int64_t>(workspace)}, 0, device_};
        state_ = {DType::u8, {static_cast<std::int64_t>(state)}, 0, device_};
        prepare(dcp_plan, state_.memory());
        prepare(plain_plan, state_.memory());
    }

    Plan dcp_plan, plain_plan;

    void reset() { group_.reset(); }
    void gather(Stream stream) {
        each([&](int rank) {
            gather_query(group_.mailbox(rank), {.rows = shape_.rows, .query = own_query_.view()}, stream);
        });
    }
    void decode_plain(int exchange, Stream stream) {
        each([&](int rank) { sparsemla::decode(plain_plan, plain_args(exchange, rank), stream); });
    }
    void decode_push(int exchange, Stream stream) {
        each([&](int rank) {
            DecodeArgs args = common_args(exchange, rank);
            args.mailbox = &group_.mailbox(rank);
            sparsemla::decode(dcp_plan, args, stream);
        });
    }
    void decode_by_calls(int exchange, Stream stream) {
        each([&](int rank) { receive_query(group_.mailbox(rank), shape_.rows, query_.view(), stream); });
        decode_plain(exchange, stream);
        push_results(stream);
    }
    void push_results(Stream stream) {
        each([&](int rank) {
            push(group_.mailbox(rank), {.rows = shape_.rows, .out = out_.view(), .lse = lse_.view()}, stream);
        });
    }
    void merge(Stream stream) {
        each([&](int rank) {
            merge_pushed(group_.mailbox(rank), {.rows = shape_.rows, .out = merged_.view(), .lse = merged_lse_.view()},
                         stream);
        });
    }

   private:
    static DcpShape dcp_shape(const DcpTimerShape& shape) {
        DcpShape result = equal_shares(shape.world, shape.own_heads, shape.rows);
        result.query_dtype = shape.query_dtype;
        result.d_qk = layout_of(shape.record).d_qk();
        return result;
    }
    void each(const std::function<void(int)>& call) {
        for (int rank = 0; rank < shape_.world; ++rank) call(rank);
    }
    /// A list for each exchange and rank, of records that come next.
    void make_lists(RecordPool& pool, int exchanges) {
        OwnedTensor lists = make_owned(DType::i32, {exchanges * shape_.world, shape_.rows, shape_.width});
        auto* slots = reinterpret_cast<std::int32_t*>(lists.bytes.get());
        for (std::int64_t i = 0; i < exchanges * shape_.world * shape_.rows; ++i) {
            const std::span row(slots + i * shape_.width, static_cast<std::size_t>(shape_.width));
            std::fill(row.begin(), row.end(), -1);
            pool.take(row.first(static_cast<std::size_t>(shape_.active)));
        }
        lists_ = {lists.view(), device_};
        OwnedTensor counts = make_owned(DType::i32, {shape_.rows});
        std::fill_n(reinterpret_cast<std::int32_t*>(counts.bytes.get()), shape_.rows,
                    static_cast<std::int32_t>(shape_.active));
        counts_ = {counts.view(), device_};
    }
    DecodeArgs common_args(int exchange, int rank) const {
        DecodeArgs args{.rows = shape_.rows};
        const std::int64_t list = (std::int64_t{exchange} * shape_.world + rank) * shape_.rows * shape_.width;
        args.sources[0].cache = cache_;
        args.sources[0].slots = dense(static_cast<std::int32_t*>(lists_.view().data) + list, DType::i32,
                                      {shape_.rows, shape_.width}, device_);
        args.sources[0].counts = counts_.view();
        args.softmax_scale = 1.0F / 24;
        args.workspace = workspace_.memory();
        args.state = state_.memory();
        return args;
    }
    DecodeArgs plain_args(int exchange, int rank) const {
        DecodeArgs args = common_args(exchange, rank);
        args.query = query_.view();
        args.out = out_.view();
        args.lse = lse_.view();
        return args;
    }

    DcpTimerShape shape_;
    Device device_;
    LoopbackGroup group_;
    CacheView cache_;
    DeviceTensor lists_, counts_, own_query_, query_, out_, lse_, merged_, merged_lse_, workspace_, state_;
};

}  // namespace

DcpTimer::DcpTimer(Device device, const TimerSizes& sizes) : parts_(std::make_unique<Parts>(device, sizes)) {}
DcpTimer::~DcpTimer() = default;

DcpTimes DcpTimer::measure(const DcpTimerShape& shape, const DeviceSpec& device, PlanOptions options, int exchanges,
                           int repeats) {
    if (!parts_->pool || parts_->pool->record() != shape.record) {
        parts_->pool.reset();
        parts_->pool.emplace(device.device, shape.record, parts_->sizes.records);
    }
    Ranks ranks(shape, device, std::move(options), *parts_->pool, exchanges);
    const GpuStream& stream = parts_->stream;
    const auto time = [&](const std::function<void(int, Stream)>& exchange, const std::function<void(Stream)>& before) {
        ranks.reset();
        if (before) before(stream.stream());
        const GpuGraph graph(stream, [&](Stream on) {
            for (int i = 0; i < exchanges; ++i) exchange(i, on);
        });
        std::vector<double> sample;
        for (int i = 0; i < untimed_replays + repeats; ++i) {
            read_on(device.device, stream.stream(), parts_->evictor.data(), parts_->evictor.bytes());
            const double us = graph.time_us(stream) / (exchanges * shape.world);
            if (i >= untimed_replays) sample.push_back(us);
        }
        return spread_of(std::move(sample));
    };
    const auto gathered = [&](Stream on) { ranks.gather(on); };

    DcpTimes times{.schedule = to_string(ranks.dcp_plan.schedule),
                   .tiling = ranks.dcp_plan.tiling ? to_string(*ranks.dcp_plan.tiling) : ""};
    times.decode = time([&](int i, Stream on) { ranks.decode_plain(i, on); }, {});
    times.gather = time([&](int, Stream on) { ranks.gather(on); }, {});
    times.decode_push = time([&](int i, Stream on) { ranks.decode_push(i, on); }, gathered);
    times.step = time(
        [&](int i, Stream on) {
            ranks.gather(on);
            ranks.decode_push(i, on);
            ranks.merge(on);
        },
        {});
    times.by_calls = time(
        [&](int i, Stream on) {
            ranks.gather(on);
            ranks.decode_by_calls(i, on);
            ranks.merge(on);
        },
        {});
    const Spread pushes = time(
        [&](int, Stream on) {
            ranks.gather(on);
            ranks.push_results(on);
        },
        {});
    const Spread merges = time(
        [&](int, Stream on) {
            ranks.gather(on);
            ranks.push_results(on);
            ranks.merge(on);
        },
        {});
    times.merge = {merges.p10 - pushes.p10, merges.median - pushes.median, merges.p90 - pushes.p90};
    return times;
}

std::vector<DcpTimerShape> dcp_suite() {
    std::vector<DcpTimerShape> shapes;
    for (const auto& [world, own_heads] : {std::pair(2, 48), std::pair(8, 12)})
        for (const std::int64_t rows : {1, 5, 10, 20}) {
            DcpTimerShape shape{.world = world, .own_heads = own_heads, .rows = rows};
            shape.name = "dcp/fp8_576/n" + std::to_string(world) + "/h" + std::to_string(own_heads) + "/r" +
                         std::to_string(rows) + "/" + std::to_string(shape.active) + "of" + std::to_string(shape.width);
            shapes.push_back(shape);
        }
    return shapes;
}

}  // namespace sparsemla::harness
