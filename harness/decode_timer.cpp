#include "harness/decode_timer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include "harness/gpu.h"
#include "harness/gpu_probes.h"
#include "harness/record_pool.h"
#include "sparsemla/formats.h"

namespace sparsemla::harness {
namespace {

constexpr int untimed_replays = 2;
constexpr std::size_t alignment_bytes = 256;

std::size_t aligned(std::size_t bytes) { return (bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes; }

/// A buffer that is replaced by a larger one when that is needed.
class GrowingBuffer {
   public:
    void reserve(Device device, std::size_t bytes) {
        if (buffer_.data() != nullptr && buffer_.bytes() >= bytes) return;
        buffer_ = GpuBuffer();  // before the next one is there
        buffer_ = GpuBuffer(device, std::max<std::size_t>(bytes, alignment_bytes));
    }
    GpuBuffer& get() { return buffer_; }
    const GpuBuffer& get() const { return buffer_; }
    std::byte* data() const { return buffer_.data(); }

   private:
    GpuBuffer buffer_;
};

/// Where a step's inputs lie in one block of memory. What is used first was written last.
struct InputLayout {
    std::size_t list_bytes = 0;             ///< of one call
    std::array<std::size_t, 2> slots = {};  ///< of each source, in the call's list
    std::size_t counts = 0;                 ///< of each source, i32 [rows] one after the other
    std::size_t requests = 0;               ///< of each row: 0
    std::size_t block_table = 0;            ///< of one request: page i is block i
    std::size_t sinks = 0;
    std::size_t query = 0;
    std::size_t bytes = 0;
};

/// Values of the size of fill_with_e4m3's.
void fill_with_bf16(std::span<std::uint16_t> halves, Random random) {
    for (std::uint16_t& half : halves) half = float_to_bf16(static_cast<float>(random.normal()));
}

InputLayout layout_of_inputs(const ChainShape& shape, std::int64_t d_qk, int lists, std::int64_t pages) {
    const auto rows = static_cast<std::size_t>(shape.rows);
    const auto heads = static_cast<std::size_t>(shape.heads);
    InputLayout layout;
    for (std::size_t i = 0; i < shape.sources.size(); ++i) {
        layout.slots[i] = layout.list_bytes;
        layout.list_bytes += aligned(rows * static_cast<std::size_t>(shape.sources[i].width) * sizeof(std::int32_t));
    }
    layout.counts = static_cast<std::size_t>(lists) * layout.list_bytes;
    layout.requests = layout.counts + aligned(2 * rows * sizeof(std::int32_t));
    layout.block_table = layout.requests + aligned(rows * sizeof(std::int32_t));
    const bool converts = shape.conversion != Conversion::none;
    layout.sinks =
        layout.block_table + (converts ? aligned(static_cast<std::size_t>(pages) * sizeof(std::int32_t)) : 0);
    layout.query = layout.sinks + aligned(heads * sizeof(float));
    layout.bytes =
        layout.query + aligned(rows * heads * static_cast<std::size_t>(d_qk * size_bytes(shape.query_dtype)));
    return layout;
}

template <class T>
std::span<T> part(std::vector<std::byte>& block, std::size_t offset, std::int64_t elements) {
    return {reinterpret_cast<T*>(block.data() + offset), static_cast<std::size_t>(elements)};
}

/// Microseconds of a replay right behind another one: while that runs, the host asks for the timed one, so that no gap
/// is timed.
double time_busy_us(const GpuGraph& graph, const GpuStream& stream) {
    graph.replay(stream.stream());
    return graph.time_us(stream);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
struct DecodeTimer::Parts {
    Parts(Device of, const TimerSizes& wanted) : device(of), sizes(wanted), stream(of) {}

    Device device;
    TimerSizes sizes;
    GpuStream stream;
    GpuBuffer evictor;  ///< made on first use
    std::map<Record, RecordPool> pools;

    ChainShape shape;
    std::int64_t d_qk = 0;
    int calls = 0;
    InputLayout layout;
    GrowingBuffer original;  ///< of the inputs
    GrowingBuffer inputs;
    GrowingBuffer out;
    GrowingBuffer lse;
    GrowingBuffer workspace;
    GrowingBuffer state;
    GrowingBuffer converted;  ///< slots, then counts, of the call that runs
    Memory workspace_memory{};
    Memory state_memory{};

    RecordPool& pool(Record record) {
        const auto found = pools.find(record);
        if (found != pools.end()) return found->second;
        return pools.try_emplace(record, device, record, sizes.records).first->second;
    }
    std::size_t list_offset(int call) const { return static_cast<std::size_t>(calls - call) * layout.list_bytes; }
    std::int64_t lse_elements() const { return shape.rows * shape.heads; }

    Sharding sharding() const { return {.world = shape.world, .rank = shape.world / 2}; }
    std::size_t slots_bytes() const {
        return aligned(static_cast<std::size_t>(shape.rows * shape.sources[0].width) * sizeof(std::int32_t));
    }
    ConstTensor list(int call, std::size_t source) const {
        return dense(inputs.data() + list_offset(call) + layout.slots[source], DType::i32,
                     {shape.rows, shape.sources[source].width}, device);
    }

    void make_lists(std::vector<std::byte>& block);
    void make_ids(std::span<std::int32_t> list, std::int64_t row, Random& random) const;
    void make_inputs(std::vector<std::byte>& block);
    void poison_outputs();
    void expect_written() const;
    void prepare_plan(const Plan& plan);
    void write_inputs() const { copy_on(device, stream.stream(), inputs.data(), original.data(), layout.bytes); }
    void evict();
};

void DecodeTimer::Parts::make_lists(std::vector<std::byte>& block) {
    Random random(5);
    for (int call = 0; call <= calls; ++call)
        for (std::size_t i = 0; i < shape.sources.size(); ++i) {
            const ChainSource& source = shape.sources[i];
            const std::span<std::int32_t> list =
                part<std::int32_t>(block, list_offset(call) + layout.slots[i], shape.rows * source.width);
            std::fill(list.begin(), list.end(), -1);
            for (std::int64_t row = 0; row < shape.rows; ++row)
                pool(source.record)
                    .take(list.subspan(static_cast<std::size_t>(row * source.width),
                                       static_cast<std::size_t>(source.count(row))));
            if (i > 0 || shape.conversion == Conversion::none) continue;
            for (std::int64_t row = 0; row < shape.rows; ++row)
                make_ids(
                    list.subspan(static_cast<std::size_t>(row * source.width), static_cast<std::size_t>(source.width)),
                    row, random);
        }
}

/// The row's slots as token ids, among those of other ranks.
void DecodeTimer::Parts::make_ids(std::span<std::int32_t> list, std::int64_t row, Random& random) const {
    const auto kept = static_cast<std::size_t>(shape.sources[0].count(row));
    for (std::size_t i = 0; i < list.size(); ++i) {
        const auto token = static_cast<std::int32_t>(random.below(1U << 20)) * static_cast<std::int32_t>(shape.world);
        list[i] = i < kept          ? static_cast<std::int32_t>(global_of(list[i], sharding()))
                  : shape.world > 1 ? token + static_cast<std::int32_t>((sharding().rank + 1) % shape.world)
                                    : -1;
    }
    for (std::size_t i = list.size(); shape.world > 1 && i > 1; --i) std::swap(list[i - 1], list[random.below(i)]);
}

void DecodeTimer::Parts::make_inputs(std::vector<std::byte>& block) {
    make_lists(block);
    for (std::size_t i = 0; i < shape.sources.size(); ++i) {
        const std::size_t offset = layout.counts + i * static_cast<std::size_t>(shape.rows) * sizeof(std::int32_t);
        const std::span<std::int32_t> counts = part<std::int32_t>(block, offset, shape.rows);
        for (std::int64_t row = 0; row < shape.rows; ++row)
            counts[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(shape.sources[i].count(row));
    }
    if (shape.conversion != Conversion::none) {
        const std::span<std::int32_t> table =
            part<std::int32_t>(block, layout.block_table, pool(shape.sources[0].record).cache().pages);
        std::iota(table.begin(), table.end(), 0);
    }
    const std::span<float> sinks = part<float>(block, layout.sinks, shape.heads);
    for (std::size_t head = 0; head < sinks.size(); ++head) sinks[head] = 0.125F * static_cast<float>(head % 16);
    const std::int64_t elements = shape.rows * shape.heads * d_qk;
    if (shape.query_dtype == DType::bf16)
        fill_with_bf16(part<std::uint16_t>(block, layout.query, elements), Random(3));
    else
        fill_with_e4m3(part<std::byte>(block, layout.query, elements), Random(3));
}

/// All bits one are NaN in both outputs.
void DecodeTimer::Parts::poison_outputs() {
    out.get().fill(0xFF);
    lse.get().fill(0xFF);
}

void DecodeTimer::Parts::expect_written() const {
    const auto fail = [](const std::string& what) {
        throw Error(ErrorKind::device, "decode", "finite outputs of every row", what);
    };
    std::vector<float> lse_values(static_cast<std::size_t>(lse_elements()));
    lse.get().download(lse_values.data(), lse_values.size() * sizeof(float));
    for (std::size_t i = 0; i < lse_values.size(); ++i)
        if (!std::isfinite(lse_values[i]))
            fail("lse " + std::to_string(lse_values[i]) + " at element " + std::to_string(i));
    // Of the last row: outputs of many rows are large.
    std::vector<std::uint16_t> out_values(static_cast<std::size_t>(shape.heads * value_dims));
    const std::size_t row_bytes = out_values.size() * sizeof(std::uint16_t);
    out.get().download(out_values.data(), row_bytes, static_cast<std::size_t>(shape.rows - 1) * row_bytes);
    for (std::size_t i = 0; i < out_values.size(); ++i)
        if (!std::isfinite(bf16_to_float(out_values[i])))
            fail("out at element " + std::to_string(i) + " of the last row");
}

void DecodeTimer::Parts::prepare_plan(const Plan& plan) {
    if (plan.problem.rows != shape.rows || plan.problem.heads != shape.heads || !(plan.problem.device == device))
        throw Error(ErrorKind::invalid_argument, "plan", "one of the loaded step", "another problem's");
    workspace.reserve(device, plan.workspace_bytes);
    state.reserve(device, plan.state_bytes);
    workspace_memory = plan.workspace_bytes == 0 ? Memory{} : Memory{workspace.data(), plan.workspace_bytes};
    state_memory = plan.state_bytes == 0 ? Memory{} : Memory{state.data(), plan.state_bytes};
    prepare(plan, state_memory, stream.stream());
    write_inputs();
    stream.synchronize();
    poison_outputs();
}

void DecodeTimer::Parts::evict() {
    if (evictor.data() == nullptr) {
        evictor = GpuBuffer(device, sizes.evict_bytes);
        evictor.fill(0);
    }
    read_on(device, stream.stream(), evictor.data(), evictor.bytes());
}

// ---------------------------------------------------------------------------------------------------------------------
DecodeTimer::DecodeTimer(Device device, const TimerSizes& sizes) : parts_(std::make_unique<Parts>(device, sizes)) {}
DecodeTimer::DecodeTimer(DecodeTimer&&) noexcept = default;
DecodeTimer& DecodeTimer::operator=(DecodeTimer&&) noexcept = default;
DecodeTimer::~DecodeTimer() = default;

GpuLimits DecodeTimer::measure_limits() const {
    const Parts& parts = *parts_;
    constexpr int repeats = 11, empties = 200;
    GpuBuffer from(parts.device, parts.sizes.copy_bytes);
    const GpuBuffer to(parts.device, parts.sizes.copy_bytes);
    from.fill(0x55);
    const GpuGraph chain(parts.stream, [&](Stream stream) {
        for (int i = 0; i < empties; ++i) empty_on(parts.device, stream);
    });
    std::vector<double> copies_us, launches_us;
    const auto copy = [&](Stream stream) { copy_on(parts.device, stream, to.data(), from.data(), from.bytes()); };
    for (int i = -untimed_replays; i < repeats; ++i) {
        copy(parts.stream.stream());
        const double copy_us = parts.stream.time_us(copy);
        const double launch_us = time_busy_us(chain, parts.stream) / empties;
        if (i < 0) continue;
        copies_us.push_back(copy_us);
        launches_us.push_back(launch_us);
    }
    return {.copy_bytes_per_s = 2e6 * static_cast<double>(from.bytes()) / spread_of(copies_us).median,
            .empty_launch_us = spread_of(launches_us).median};
}

void DecodeTimer::load(const ChainShape& shape, int calls) {
    Parts& parts = *parts_;
    const Problem problem = shape.problem(parts.device);
    parts.shape = shape;
    parts.d_qk = d_qk(problem);
    parts.calls = calls;
    parts.layout = layout_of_inputs(shape, parts.d_qk, calls + 1, parts.pool(shape.sources[0].record).cache().pages);
    std::vector<std::byte> block(parts.layout.bytes);
    parts.make_inputs(block);
    parts.stream.synchronize();
    parts.original.reserve(parts.device, block.size());
    parts.inputs.reserve(parts.device, block.size());
    parts.original.get().upload(block.data(), block.size());
    const auto elements = static_cast<std::size_t>(parts.lse_elements());
    parts.out.reserve(parts.device, elements * value_dims * sizeof(std::uint16_t));
    parts.lse.reserve(parts.device, elements * sizeof(float));
    if (shape.conversion == Conversion::before)
        parts.converted.reserve(parts.device,
                                parts.slots_bytes() + static_cast<std::size_t>(shape.rows) * sizeof(std::int32_t));
}

ConvertArgs DecodeTimer::indices(int call) const {
    Parts& parts = *parts_;
    const ChainShape& shape = parts.shape;
    const CacheView cache = parts.pool(shape.sources[0].record).cache();
    std::byte* const inputs = parts.inputs.data();
    ConvertArgs args{
        .token_ids = parts.list(call, 0),
        .block_table = dense(inputs + parts.layout.block_table, DType::i32, {1, cache.pages}, parts.device),
        .request_of_row = dense(inputs + parts.layout.requests, DType::i32, {shape.rows}, parts.device),
        .lengths = {},
        .cache = cache,
        .sharding = parts.sharding(),
        .slots = {},
        .counts = {}};
    if (shape.conversion == Conversion::within) return args;
    args.slots = dense(parts.converted.data(), DType::i32, {shape.rows, shape.sources[0].width}, parts.device);
    args.counts = dense(parts.converted.data() + parts.slots_bytes(), DType::i32, {shape.rows}, parts.device);
    return args;
}

DecodeArgs DecodeTimer::args(int call) const {
    Parts& parts = *parts_;
    const ChainShape& shape = parts.shape;
    const Device device = parts.device;
    std::byte* const inputs = parts.inputs.data();
    DecodeArgs args;
    args.rows = shape.rows;
    args.query = dense(inputs + parts.layout.query, shape.query_dtype, {shape.rows, shape.heads, parts.d_qk}, device);
    for (std::size_t i = 0; i < shape.sources.size(); ++i) {
        const std::size_t counts_bytes = static_cast<std::size_t>(shape.rows) * sizeof(std::int32_t);
        args.sources[i].cache = parts.pool(shape.sources[i].record).cache();
        args.sources[i].slots = parts.list(call, i);
        args.sources[i].counts =
            dense(inputs + parts.layout.counts + i * counts_bytes, DType::i32, {shape.rows}, device);
    }
    if (shape.conversion != Conversion::none) {
        const ConvertArgs converted = indices(call);
        if (shape.conversion == Conversion::within) args.indices = converted;
        args.sources[0].slots = converted.slots;
        args.sources[0].counts = converted.counts;
    }
    if (shape.sinks) args.sinks = dense(inputs + parts.layout.sinks, DType::f32, {shape.heads}, device);
    args.softmax_scale = 1.0F / 24;
    args.out = dense(parts.out.data(), DType::bf16, {shape.rows, shape.heads, value_dims}, device);
    args.lse = dense(parts.lse.data(), DType::f32, {shape.rows, shape.heads}, device);
    args.workspace = parts.workspace_memory;
    args.state = parts.state_memory;
    return args;
}

void DecodeTimer::step(const Plan& plan, int call, Stream stream) const {
    if (parts_->shape.conversion == Conversion::before) convert_indices(indices(call), stream);
    decode(plan, args(call), stream);
}

Spread DecodeTimer::cold(const Plan& plan, int repeats) {
    Parts& parts = *parts_;
    parts.prepare_plan(plan);
    const GpuGraph chain(parts.stream, [&](Stream stream) {
        for (int call = 0; call < parts.calls; ++call) step(plan, call, stream);
    });
    std::vector<double> sample;
    for (int i = -untimed_replays; i < repeats; ++i) {
        // The device is busy with these while the host asks for the timed replay.
        parts.evict();
        parts.write_inputs();
        step(plan, parts.calls, parts.stream.stream());
        const double us = chain.time_us(parts.stream) / parts.calls;
        if (i >= 0) sample.push_back(us);
    }
    parts.expect_written();
    return spread_of(std::move(sample));
}

Spread DecodeTimer::warm(const Plan& plan, int calls, int repeats) {
    Parts& parts = *parts_;
    parts.prepare_plan(plan);
    const GpuGraph chain(parts.stream, [&](Stream stream) {
        for (int call = 0; call < calls; ++call) step(plan, 0, stream);
    });
    std::vector<double> sample;
    for (int i = -untimed_replays; i < repeats; ++i) {
        const double us = time_busy_us(chain, parts.stream) / calls;
        if (i >= 0) sample.push_back(us);
    }
    parts.expect_written();
    return spread_of(std::move(sample));
}

}  // namespace sparsemla::harness
