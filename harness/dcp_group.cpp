#include "harness/dcp_group.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "harness/rank_threads.h"
#include "sparsemla/formats.h"

namespace sparsemla::harness {
namespace {

std::size_t bytes_of(const ConstTensor& tensor) {
    return static_cast<std::size_t>(tensor.elements() * size_bytes(tensor.dtype));
}

/// Rows first .. of a tensor whose first dimension is rows.
template <class Void>
BasicTensor<Void> rows_from(BasicTensor<Void> tensor, std::int64_t first) {
    using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
    if (!tensor.present()) return tensor;
    tensor.data = static_cast<Byte*>(tensor.data) + first * tensor.strides[0] * size_bytes(tensor.dtype);
    tensor.shape[0] -= first;
    return tensor;
}

std::vector<std::int64_t> extents(const ConstTensor& tensor) {
    return {tensor.shape.begin(), tensor.shape.begin() + tensor.rank};
}

/// A dense copy of heads first .. first + n of a query, as BF16 where asked for.
OwnedTensor heads_of(const ConstTensor& query, std::int64_t rows, std::int64_t first, std::int64_t n, bool as_bf16) {
    const std::int64_t dims = query.shape[2];
    const DType dtype = as_bf16 ? DType::bf16 : query.dtype;
    OwnedTensor copy = make_owned(dtype, {rows, n, dims});
    for (std::int64_t row = 0; row < rows; ++row)
        for (std::int64_t head = 0; head < n; ++head) {
            const std::int64_t from = row * query.strides[0] + (first + head) * query.strides[1];
            const auto* source = static_cast<const std::byte*>(query.data) + from * size_bytes(query.dtype);
            std::byte* to = copy.bytes.get() + (row * n + head) * dims * size_bytes(dtype);
            if (dtype == query.dtype) {
                std::memcpy(to, source, static_cast<std::size_t>(dims * size_bytes(dtype)));
                continue;
            }
            for (std::int64_t d = 0; d < dims; ++d)
                reinterpret_cast<std::uint16_t*>(to)[d] =
                    float_to_bf16(e4m3_to_float(static_cast<std::uint8_t>(source[d])));
        }
    return copy;
}

OwnedTensor sinks_of(const ConstTensor& sinks, std::int64_t first, std::int64_t n) {
    OwnedTensor copy = make_owned(DType::f32, {n});
    for (std::int64_t head = 0; head < n; ++head)
        reinterpret_cast<float*>(copy.bytes.get())[head] =
            static_cast<const float*>(sinks.data)[(first + head) * sinks.strides[0]];
    return copy;
}

DcpShape shape_of(const CaseStep& whole, const DcpGroupOptions& options) {
    return {.rows = whole.rows,
            .head_offset = options.sharing.head_offset,
            .query_dtype = whole.query.dtype,
            .d_qk = whole.query.shape[2]};
}

Problem problem_of(const CaseStep& whole, const Shard& part, const DcpGroupOptions& options) {
    Problem problem = part.step(whole).problem(options.device.device);
    problem.sinks = false;
    problem.lse_base = LseBase::two;
    problem.dcp = !options.by_calls;
    return problem;
}

/// The wishes that lead to the plan's schedule without an exchange.
PlanOptions same_schedule(const Plan& plan, PlanOptions wishes) {
    wishes.kernel = plan.schedule.kernel;
    wishes.p_format = plan.schedule.p_format;
    if (plan.schedule.kernel != "reference") wishes.p_scale = plan.schedule.p_scale;
    wishes.splits = plan.schedule.splits;
    return wishes;
}

/// Whether n values are the wanted bits, or NaN where NaN is wanted: which NaN, arithmetic leaves open. The NaN of all
/// ones is not one of those: it is what results hold before they are written.
template <class Bits>
bool same_values(const std::byte* got, const std::byte* wanted, std::int64_t n) {
    constexpr auto magnitude = static_cast<Bits>(~Bits{0} >> 1);
    constexpr auto infinity = static_cast<Bits>(sizeof(Bits) == 2 ? 0x7F80 : 0x7F800000);
    const auto is_nan = [&](Bits bits) { return (bits & magnitude) > infinity; };
    const auto* a = reinterpret_cast<const Bits*>(got);
    const auto* b = reinterpret_cast<const Bits*>(wanted);
    return std::equal(a, a + n, b, [&](Bits x, Bits y) {
        return x == y || (is_nan(x) && is_nan(y) && x != static_cast<Bits>(~Bits{0}));
    });
}

}  // namespace

DeviceTensor::DeviceTensor(const ConstTensor& host, Device device)
    : DeviceTensor(host.dtype, extents(host), 0, device) {
    std::memcpy(host_.bytes.get(), host.data, bytes_of(host));
    if (buffer_) buffer_->upload(host_.bytes.get(), host_.size_bytes);
}

DeviceTensor::DeviceTensor(DType dtype, std::vector<std::int64_t> shape, int byte, Device device)
    : host_(make_owned(dtype, std::move(shape))), view_(host_.view()) {
    if (device.kind == Device::Kind::cuda) {
        buffer_.emplace(device, std::max<std::size_t>(host_.size_bytes, 1), GpuBufferOptions{.alignment_bytes = 256});
        view_.data = buffer_->data();
    }
    view_.device = device;
    fill(byte);
}

const OwnedTensor& DeviceTensor::fetch() {
    if (buffer_ && host_.size_bytes != 0) buffer_->download(host_.bytes.get(), host_.size_bytes);
    return host_;
}

void DeviceTensor::fill(int byte) {
    if (host_.size_bytes == 0) return;
    std::memset(host_.bytes.get(), byte, host_.size_bytes);
    if (buffer_) buffer_->upload(host_.bytes.get(), host_.size_bytes);
}

DcpRank::DcpRank(const CaseStep& whole, const Shard& shard, const DcpGroupOptions& options, const Plan& plan,
                 Mailbox& mailbox)
    : options_(options), plan_(plan), mailbox_(mailbox), own_heads_(mailbox.layout.heads_of(mailbox.peers.rank)) {
    const Device device = options.device.device;
    const auto place = [&](const ConstTensor& host) -> Tensor { return inputs_.emplace_back(host, device).view(); };
    const std::int64_t first = mailbox.layout.head_offset[mailbox.peers.rank];
    const bool as_bf16 = options.bf16_query && whole.query.dtype == DType::f8_e4m3;
    query_ = DeviceTensor(heads_of(whole.query, whole.rows, first, own_heads_, as_bf16).view(), device);
    if (whole.sinks.present()) sinks_ = DeviceTensor(sinks_of(whole.sinks, first, own_heads_).view(), device);
    const CaseStep step = shard.step(whole);
    args_ = step.args();
    args_.query = {};
    inputs_.reserve(8);
    for (std::size_t i = 0; i < shard.sources.size(); ++i) {
        const Shard::Source& source = shard.sources[i];
        args_.sources[i].cache.data = static_cast<const std::byte*>(place(source.cache.view()).data);
        if (source.rope.size_bytes != 0)
            args_.sources[i].cache.rope = static_cast<const std::byte*>(place(source.rope.view()).data);
        args_.sources[i].cache.device = device;
        args_.sources[i].slots = place(source.slots.view());
        args_.sources[i].counts = place(source.counts.view());
    }
    outputs_ = {DeviceTensor(options.out_dtype, {whole.rows, own_heads_, value_dims}, 0xFF, device),
                DeviceTensor(DType::f32, {whole.rows, own_heads_}, 0xFF, device)};
    workspace_ = DeviceTensor(DType::u8, {static_cast<std::int64_t>(plan.workspace_bytes)}, 0xFF, device);
    state_ = DeviceTensor(DType::u8, {static_cast<std::int64_t>(plan.state_bytes)}, 0xFF, device);
    args_.workspace = workspace_.memory();
    args_.state = state_.memory();
    if (options.by_calls) {
        received_ = DeviceTensor(whole.query.dtype, {whole.rows, whole.heads, whole.query.shape[2]}, 0xFF, device);
        partial_out_ = DeviceTensor(DType::bf16, {whole.rows, whole.heads, value_dims}, 0xFF, device);
        partial_lse_ = DeviceTensor(DType::f32, {whole.rows, whole.heads}, 0xFF, device);
        args_.query = received_.view();
        args_.out = partial_out_.view();
        args_.lse = partial_lse_.view();
    }
    prepare(plan, args_.state);
}

DcpOutputs DcpRank::make_outputs() const {
    const auto like = [&](const DeviceTensor& tensor) {
        return DeviceTensor(tensor.view().dtype, extents(tensor.view()), 0xFF, options_.device.device);
    };
    return {like(outputs_.out), like(outputs_.lse)};
}

DcpInputs DcpRank::inputs() const {
    DcpInputs inputs{.gather = {query_.memory()}, .decode = {}, .merge = {}};
    for (const DeviceTensor& tensor : inputs_) inputs.decode.push_back(tensor.memory());
    if (sinks_.view().present()) inputs.merge.push_back(sinks_.memory());
    return inputs;
}

void DcpRank::gather(const DcpWindow& window, Stream stream) {
    gather_query(mailbox_, {.rows = window.rows, .query = rows_from(query_.view(), window.first_row)}, stream);
}

DecodeArgs DcpRank::decode_args(const DcpWindow& window) const {
    DecodeArgs args = args_;
    args.rows = window.rows;
    for (std::size_t i = 0; i < plan_.problem.sources.size(); ++i) {
        args.sources[i].slots = rows_from(args.sources[i].slots, window.first_row);
        args.sources[i].counts = rows_from(args.sources[i].counts, window.first_row);
    }
    return args;
}

void DcpRank::decode(const DcpWindow& window, Stream stream) {
    DecodeArgs args = decode_args(window);
    if (!options_.by_calls) {
        args.mailbox = &mailbox_;
        return sparsemla::decode(plan_, args, stream);
    }
    receive_query(mailbox_, window.rows, received_.view(), stream);
    sparsemla::decode(plan_, args, stream);
    push(mailbox_, {.rows = window.rows, .out = partial_out_.view(), .lse = partial_lse_.view()}, stream);
}

void DcpRank::merge_to(const DcpOutputs& outputs, const DcpWindow& window, Stream stream) {
    merge_pushed(mailbox_,
                 {.rows = window.rows,
                  .sinks = sinks_.view(),
                  .out = outputs.out.view(),
                  .lse = outputs.lse.view(),
                  .lse_base = options_.lse_base},
                 stream);
}

namespace {

/// Each rank's partial results from a plain decode of the same schedule, in host memory.
DcpExpectation expectation_of(const CaseStep& whole, const std::vector<Shard>& shards, const DcpGroupOptions& options,
                              const Plan& plan) {
    const Device device = options.device.device;
    std::vector<OwnedTensor> outs, lses;
    std::vector<Partial> partials;
    for (const Shard& part : shards) {
        const CaseStep step = part.step(whole);
        Problem problem = plan.problem;
        problem.dcp = false;
        problem.lse = true;
        const Plan plain = make_plan(problem, options.device, same_schedule(plan, options.plan));
        DecodeArgs args = step.args();
        DeviceTensor query(step.query, device);
        std::vector<DeviceTensor> inputs;
        for (std::size_t i = 0; i < part.sources.size(); ++i) {
            const auto place = [&](const OwnedTensor& host) { return inputs.emplace_back(host.view(), device).view(); };
            args.sources[i].cache.data = static_cast<const std::byte*>(place(part.sources[i].cache).data);
            if (part.sources[i].rope.size_bytes != 0)
                args.sources[i].cache.rope = static_cast<const std::byte*>(place(part.sources[i].rope).data);
            args.sources[i].cache.device = device;
            args.sources[i].slots = place(part.sources[i].slots);
            args.sources[i].counts = place(part.sources[i].counts);
        }
        DeviceTensor out(DType::bf16, {whole.rows, whole.heads, value_dims}, 0xFF, device);
        DeviceTensor lse(DType::f32, {whole.rows, whole.heads}, 0xFF, device);
        DeviceTensor workspace(DType::u8, {static_cast<std::int64_t>(plain.workspace_bytes)}, 0xFF, device);
        DeviceTensor state(DType::u8, {static_cast<std::int64_t>(plain.state_bytes)}, 0xFF, device);
        args.query = query.view();
        args.out = out.view();
        args.lse = lse.view();
        args.workspace = workspace.memory();
        args.state = state.memory();
        prepare(plain, args.state);
        decode(plain, args);
        outs.push_back(out.fetch());
        lses.push_back(lse.fetch());
        partials.push_back({.out = outs.back().view(), .lse = lses.back().view()});
    }
    DcpExpectation expectation{make_owned(options.out_dtype, {whole.rows, whole.heads, value_dims}),
                               make_owned(DType::f32, {whole.rows, whole.heads})};
    merge({.rows = whole.rows,
           .heads = whole.heads,
           .partials = partials,
           .partial_base = LseBase::two,
           .sinks = whole.sinks,
           .out = expectation.out.view(),
           .lse = expectation.lse.view(),
           .lse_base = options.lse_base});
    return expectation;
}

}  // namespace

DcpGroup::DcpGroup(const CaseStep& whole, const DcpGroupOptions& options)
    : whole_(whole),
      options_(options),
      shards_(shard(whole, options.sharing)),
      loopback_(std::make_unique<LoopbackGroup>(shape_of(whole, options), options.device.device)) {
    plan_ = make_plan(problem_of(whole, shards_.front(), options_), options_.device, options_.plan);
    if (options_.device.device.kind == Device::Kind::cuda) stream_.emplace(options_.device.device);
    for (int number = 0; number < world(); ++number) {
        mailbox(number).wait_limit_s = options_.wait_limit_s;
        ranks_.push_back(std::make_unique<DcpRank>(whole, shards_[static_cast<std::size_t>(number)], options_, plan_,
                                                   mailbox(number)));
    }
    expectation_ = expectation_of(whole, shards_, options_, plan_);
}

std::string DcpGroup::difference(int number, const DcpWindow& window, DcpOutputs* of) {
    const MailboxLayout& layout = mailbox(number).layout;
    const std::int64_t first_head = layout.head_offset[static_cast<std::size_t>(number)];
    const std::int64_t own_heads = layout.heads_of(number);
    const std::int64_t head_bytes = value_dims * size_bytes(options_.out_dtype);
    DcpOutputs& outputs = of != nullptr ? *of : rank(number).outputs();
    const std::byte* out = outputs.out.fetch().bytes.get();
    const std::byte* lse = outputs.lse.fetch().bytes.get();
    for (std::int64_t row = 0; row < window.rows; ++row)
        for (std::int64_t head = 0; head < own_heads; ++head) {
            const std::int64_t got = row * own_heads + head;
            const std::int64_t wanted = (window.first_row + row) * whole_.heads + first_head + head;
            const std::byte* wanted_out = expectation_.out.bytes.get() + wanted * head_bytes;
            const bool same_out = options_.out_dtype == DType::f32
                                      ? same_values<std::uint32_t>(out + got * head_bytes, wanted_out, value_dims)
                                      : same_values<std::uint16_t>(out + got * head_bytes, wanted_out, value_dims);
            const bool same_lse =
                same_values<std::uint32_t>(lse + got * 4, expectation_.lse.bytes.get() + wanted * 4, 1);
            if (!same_out || !same_lse)
                return "rank " + std::to_string(number) + ", row " + std::to_string(row) + " (" +
                       std::to_string(window.first_row + row) + " of the step), head " + std::to_string(head) + ": " +
                       (same_out ? "lse" : "out") + " is not that of the merged partial results; " +
                       status(mailbox(number)).text();
        }
    return "";
}

DcpExpectation DcpGroup::results(const DcpWindow& window) {
    DcpExpectation all{make_owned(options_.out_dtype, {window.rows, whole_.heads, value_dims}),
                       make_owned(DType::f32, {window.rows, whole_.heads})};
    const std::int64_t head_bytes = value_dims * size_bytes(options_.out_dtype);
    for (int number = 0; number < world(); ++number) {
        const MailboxLayout& layout = mailbox(number).layout;
        const std::int64_t first = layout.head_offset[static_cast<std::size_t>(number)], own = layout.heads_of(number);
        const std::byte* out = rank(number).out().bytes.get();
        const std::byte* lse = rank(number).lse().bytes.get();
        for (std::int64_t row = 0; row < window.rows; ++row) {
            const std::int64_t to = row * whole_.heads + first, from = row * own;
            std::memcpy(all.out.bytes.get() + to * head_bytes, out + from * head_bytes,
                        static_cast<std::size_t>(own * head_bytes));
            std::memcpy(all.lse.bytes.get() + to * 4, lse + from * 4, static_cast<std::size_t>(own * 4));
        }
    }
    return all;
}

void DcpGroup::lockstep(const DcpWindow& window, Stream stream, const DcpResults* to) {
    for (auto& each : ranks_) each->gather(window, stream);
    for (auto& each : ranks_) each->decode(window, stream);
    for (std::size_t i = 0; i < ranks_.size(); ++i)
        ranks_[i]->merge_to(to != nullptr ? to->at(i) : ranks_[i]->outputs(), window, stream);
}

std::string DcpGroup::run(std::span<const DcpWindow> windows) {
    if (!stream_) return run_threads(windows);
    for (std::size_t i = 0; i < windows.size(); ++i) {
        for (auto& each : ranks_) each->poison();
        lockstep(windows[i], stream_->stream());
        stream_->synchronize();
        for (int number = 0; number < world(); ++number)
            if (std::string text = difference(number, windows[i]); !text.empty())
                return "exchange " + std::to_string(i) + " of this run: " + text;
    }
    return "";
}

std::string DcpGroup::run_threads(std::span<const DcpWindow> windows, const DcpConcurrency& how) {
    std::mutex mutex;
    std::string first_difference;
    std::atomic<bool> stop{false};
    on_rank_threads(world(), [&](int number) {
        DcpRank& each = rank(number);
        for (std::size_t i = 0; i < windows.size() && !stop; ++i) {
            each.poison();
            if (how.before) how.before(number, i);
            each.gather(windows[i]);
            each.decode(windows[i]);
            each.merge(windows[i]);
            const std::string text = difference(number, windows[i]);
            if (text.empty()) continue;
            stop = true;
            const std::scoped_lock lock(mutex);
            if (first_difference.empty()) first_difference = "exchange " + std::to_string(i) + " of this run: " + text;
        }
    });
    return first_difference;
}

}  // namespace sparsemla::harness
