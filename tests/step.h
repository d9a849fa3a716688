// A decode step built by hand: every tensor in fenced memory of its own, absent data poisoned, outputs watched.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "harness/oracle.h"
#include "harness/tolerance.h"
#include "sparsemla/decode.h"
#include "sparsemla/formats.h"
#include "tests/device.h"
#include "tests/fenced.h"
#include "tests/layouts.h"
#include "tests/result.h"

namespace sparsemla::test {

inline constexpr float infinity = std::numeric_limits<float>::infinity();
inline constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

struct SourceSpec {
    Layout layout{};
    std::int64_t width = 64;
    std::int64_t count_offset = 0;
    std::int64_t pages = 8;
    std::int64_t page_size = 64;
    std::int64_t slots_per_page = 0;
    std::int64_t page_stride_bytes = 0;
    bool counts = true;
    bool poisoned = true;                ///< records start as NaN; false leaves zeros, and a large cache uncommitted
    Against fence = Against::end;        ///< which end of the cache touches memory that nobody may read
    std::int64_t slots_row_padding = 5;  ///< columns between two rows of the list, all naming the last slot
};

struct StepSpec {
    std::int64_t rows = 1;
    std::int64_t heads = 1;
    DType query_dtype = DType::f8_e4m3;
    std::vector<SourceSpec> sources{SourceSpec{}};
    bool sinks = false;
    bool lse = true;
    LseBase lse_base = LseBase::natural;
    DType out_dtype = DType::bf16;
};

inline DeviceSpec cpu_spec(int threads = 2) {
    DeviceSpec spec = query_device({});
    spec.threads = threads;
    return spec;
}

class Step {
   public:
    static constexpr std::int64_t extra_rows = 2;   ///< that every tensor holds beyond `rows`
    static constexpr std::int64_t extra_heads = 3;  ///< likewise

    explicit Step(const StepSpec& spec) : rows_(spec.rows), heads_(spec.heads) {
        problem = {.rows = spec.rows,
                   .heads = spec.heads,
                   .query_dtype = spec.query_dtype,
                   .sources = {},
                   .sinks = spec.sinks,
                   .lse = spec.lse,
                   .lse_base = spec.lse_base,
                   .out_dtype = spec.out_dtype,
                   .device = tested_device().device};
        for (std::size_t i = 0; i < spec.sources.size(); ++i) make_source(i, spec.sources[i]);
        args.rows = spec.rows;
        make_query();
        make_sinks();
        make_outputs();
    }

    Problem problem;
    DecodeArgs args;  ///< all but workspace and state; free to change, as long as outputs stay inside their memory
    DeviceSpec device = on_gpu() ? tested_device() : cpu_spec();

    const MutableCacheView& cache(std::size_t source = 0) const { return sources_[source].cache; }
    const Fenced& cache_memory(std::size_t source = 0) const { return sources_[source].cache_memory; }
    const Fenced& query_memory() const { return query_memory_; }
    const Fenced& out_memory() const { return out_memory_; }
    const Fenced& lse_memory() const { return lse_memory_; }

    /// The row's list: these slots, then -1. The count becomes the number of slots.
    void list(std::int64_t row, const std::vector<std::int32_t>& slots, std::size_t source = 0) {
        SourceMemory& memory = sources_[source];
        std::int32_t* columns = memory.slots.as<std::int32_t>() + row * args.sources[source].slots.strides[0];
        std::fill_n(columns, problem.sources[source].width, -1);
        std::copy(slots.begin(), slots.end(), columns);
        count(row, problem.sources[source].count_offset + static_cast<std::int64_t>(slots.size()), source);
    }
    void count(std::int64_t row, std::int64_t count, std::size_t source = 0) {
        if (sources_[source].counts.size() != 0)
            sources_[source].counts.as<std::int32_t>()[row] = static_cast<std::int32_t>(count);
    }
    std::int32_t& slot(std::int64_t row, std::int64_t column, std::size_t source = 0) {
        return sources_[source].slots.as<std::int32_t>()[row * args.sources[source].slots.strides[0] + column];
    }

    /// Sets the query of one head; dimensions not given are 0.
    template <class ValueOf>
    void query(std::int64_t row, std::int64_t head, ValueOf value_of) {
        const std::int64_t first = row * args.query.strides[0] + head * args.query.strides[1];
        for (int d = 0; d < d_qk(problem); ++d)
            if (problem.query_dtype == DType::bf16)
                query_memory_.as<std::uint16_t>()[first + d] = float_to_bf16(value_of(d));
            else
                query_memory_.as<std::uint8_t>()[first + d] = float_to_e4m3(value_of(d));
    }
    /// The same query for every row and head.
    template <class ValueOf>
    void query(ValueOf value_of) {
        for (std::int64_t row = 0; row < rows_; ++row)
            for (std::int64_t head = 0; head < heads_; ++head) query(row, head, std::ref(value_of));
    }
    float& sink(std::int64_t head) { return sinks_memory_.as<float>()[head]; }

    /// Packs one record; the value of dimension d is value_of(d).
    template <class ValueOf>
    void record(std::int32_t slot, ValueOf value_of, std::size_t source = 0, const PackOptions& options = {}) {
        std::vector<float> values(static_cast<std::size_t>(d_qk(problem)));
        for (std::size_t d = 0; d < values.size(); ++d) values[d] = value_of(static_cast<int>(d));
        pack(cache(source), dense(values.data(), DType::f32, {1, d_qk(problem)}), dense(&slot, DType::i32, {1}),
             options);
        touch(slot, source);
    }
    /// Makes the record of every slot NaN wherever its encoding has one.
    void poison(std::int32_t slot, std::size_t source = 0, int byte = 0xFF) {
        const RecordLayout& layout = cache(source).layout();
        const auto at = locate(cache(source), slot);
        std::memset(at.data, byte, static_cast<std::size_t>(layout.main.bytes()));
        if (layout.rope.dims != 0) std::memset(at.rope, byte, static_cast<std::size_t>(layout.rope.bytes()));
        if (at.scales != nullptr)
            std::memset(at.scales, byte, static_cast<std::size_t>(layout.groups() * layout.scale_size()));
        touch(slot, source);
    }

    /// A histogram cache: the record of slot s holds `mark` at dimension (s + shift) % 512 and zeros elsewhere. With
    /// q = 0 the output times the number of columns is a histogram of the slots read.
    static constexpr float mark = 1.5F;  // exact in every record
    void histogram(std::size_t source = 0, std::int64_t shift = 0) {
        for (std::int64_t s = 0; s < cache(source).num_slots(); ++s)
            if (cache(source).holds(s)) histogram_record(static_cast<std::int32_t>(s), source, shift);
    }
    void histogram_record(std::int32_t slot, std::size_t source = 0, std::int64_t shift = 0) {
        record(
            slot, [&](int d) { return d == (slot + shift) % value_dims ? mark : 0.0F; }, source);
    }

    /// Whether a kernel takes this step; every step is one for the CPU's kernels.
    bool taken_by(const std::string& kernel) const { return supports(problem, device, {.kernel = kernel}); }
    /// Ends the test as skipped where a GPU kernel refuses.
    Plan plan(const PlanOptions& options = {}) const { return plan_or_skip(problem, device, options); }
    Result run(const PlanOptions& options = {}) { return run(plan(options)); }

    /// One call on the plan's device with fresh, filled workspace and poisoned outputs; inputs are read-only while it
    /// runs. Fails the test where an element of [rows, heads] was not written, or anything else was.
    Result run(const Plan& plan, int workspace_byte = 0xFF) {
        poison_outputs();
        const ReadOnlyInputs guard(*this);
        place(plan, workspace_byte).decode(plan);
        return collect(plan);
    }
    /// The arguments where the plan's device takes them.
    DeviceCall place(const Plan& plan, int workspace_byte = 0xFF) const {
        harness::GpuStepOptions options{.surroundings = {out_memory_.surroundings(), lse_memory_.surroundings()},
                                        .workspace_byte = workspace_byte};
        for (std::size_t i = 0; i < sources_.size(); ++i) {
            options.caches[i] = placement(sources_[i].fence);
            if (args.sources[i].cache.data == sources_[i].cache.data) options.sparse[i] = sources_[i].sparse;
        }
        return {plan, args, options};
    }

    void poison_outputs() {
        for (const Fenced* memory : {&out_memory_, &lse_memory_})
            for (std::size_t i = 0; i < memory->size() / 2; ++i) memory->as<std::uint16_t>()[i] = canary;
    }
    /// Whether both outputs are as poison_outputs left them.
    bool outputs_untouched() const {
        for (const Fenced* memory : {&out_memory_, &lse_memory_}) {
            const std::span words(memory->as<std::uint16_t>(), memory->size() / 2);
            if (!memory->slack_intact() || !std::ranges::all_of(words, [](auto word) { return word == canary; }))
                return false;
        }
        return true;
    }

    /// What the outputs hold, which are poison again afterwards.
    Result collect(const Plan& plan) {
        Result result{.rows = args.rows,
                      .heads = heads_,
                      .out_dtype = problem.out_dtype,
                      .out_bits = {},
                      .lse_bits = {},
                      .schedule = plan.schedule};
        result.out_bits.resize(static_cast<std::size_t>(args.rows * heads_ * value_dims));
        std::uint32_t* bits = result.out_bits.data();
        std::int64_t unwritten = 0;
        for (std::int64_t row = 0; row < args.rows; ++row)
            for (std::int64_t head = 0; head < heads_; ++head) {
                const std::int64_t first = row * args.out.strides[0] + head * args.out.strides[1];
                for (std::int64_t i = first; i < first + value_dims; ++i)
                    *bits++ = problem.out_dtype == DType::bf16 ? take<std::uint16_t>(args.out, i, unwritten)
                                                               : take<std::uint32_t>(args.out, i, unwritten);
                if (problem.lse)
                    result.lse_bits.push_back(take<std::uint32_t>(
                        args.lse, row * args.lse.strides[0] + head * args.lse.strides[1], unwritten));
            }
        EXPECT_EQ(unwritten, 0) << "elements of out or lse were not written by " << to_string(plan.schedule);
        EXPECT_TRUE(outputs_untouched()) << "written outside [rows, heads] by " << to_string(plan.schedule);
        return result;
    }

    /// The step as the oracle takes it.
    CaseStep case_step() const {
        CaseStep step{.sources = {},
                      .query = args.query,
                      .sinks = args.sinks,
                      .softmax_scale = args.softmax_scale,
                      .q_scale = args.q_scale.value,
                      .out_scale = args.out_scale,
                      .lse_base = problem.lse_base,
                      .rows = args.rows,
                      .heads = heads_};
        for (std::size_t i = 0; i < sources_.size(); ++i)
            step.sources.push_back({args.sources[i].cache, args.sources[i].slots, args.sources[i].counts,
                                    problem.sources[i].count_offset, args.sources[i].k_scale.value});
        return step;
    }

   private:
    static constexpr std::uint16_t canary = 0xFFA5;  // twice in a row a NaN of f32 too; no output ever holds it

    struct SourceMemory {
        Fenced cache_memory, rope_memory, slots, counts;
        MutableCacheView cache;
        Against fence = Against::end;
        std::optional<harness::SparseCache> sparse{};  ///< of a cache left as zeros: the records written so far
    };

    void touch(std::int32_t slot, std::size_t source) {
        if (sources_[source].sparse) sources_[source].sparse->slots.push_back(slot);
    }

    void make_source(std::size_t i, const SourceSpec& spec) {
        SourceMemory& memory = sources_.emplace_back();
        memory.cache = {.record = spec.layout.record,
                        .form = spec.layout.form,
                        .data = nullptr,
                        .rope = nullptr,
                        .pages = spec.pages,
                        .page_size = spec.page_size,
                        .slots_per_page = spec.slots_per_page,
                        .page_stride_bytes = spec.page_stride_bytes,
                        .device = {}};
        const RecordLayout& layout = spec.layout.bytes();
        const std::int64_t num_slots = memory.cache.num_slots();
        // cache_bytes reads `rope` only as a flag.
        const std::int64_t bytes = spec.layout.split_rope ? num_slots * layout.main.bytes() : cache_bytes(memory.cache);
        memory.cache_memory = Fenced(static_cast<std::size_t>(bytes), 16, spec.fence);
        memory.cache.data = memory.cache_memory.data();
        if (spec.layout.split_rope) {
            memory.rope_memory = Fenced(static_cast<std::size_t>(num_slots * layout.rope.bytes()), 16, spec.fence);
            memory.cache.rope = memory.rope_memory.data();
        }
        memory.fence = spec.fence;
        if (!spec.poisoned) memory.sparse.emplace();
        if (spec.poisoned) {
            memory.cache_memory.fill(0xFF);
            memory.rope_memory.fill(0xFF);
        }
        make_lists(i, spec);
        problem.sources.push_back(
            {spec.layout.record, spec.layout.form, spec.layout.split_rope, spec.width, spec.count_offset});
    }

    void make_lists(std::size_t i, const SourceSpec& spec) {
        SourceMemory& memory = sources_[i];
        SourceArgs& source = args.sources[i];
        const std::int64_t stride = spec.width + spec.slots_row_padding;
        const std::int64_t rows = rows_ + extra_rows;
        memory.slots = Fenced(static_cast<std::size_t>(rows * stride * 4), 4);
        std::fill_n(memory.slots.as<std::int32_t>(), rows * stride,
                    static_cast<std::int32_t>(memory.cache.num_slots() - 1));
        source.cache = memory.cache;
        source.slots = dense(memory.slots.data(), DType::i32, {rows, spec.width});
        source.slots.strides[0] = stride;
        if (spec.counts) {
            memory.counts = Fenced(static_cast<std::size_t>(rows * 4), 4);
            source.counts = dense(memory.counts.data(), DType::i32, {rows});
        }
        for (std::int64_t row = 0; row < rows_; ++row) {
            std::fill_n(memory.slots.as<std::int32_t>() + row * stride, spec.width, -1);
            if (spec.counts)
                memory.counts.as<std::int32_t>()[row] = static_cast<std::int32_t>(spec.count_offset + spec.width);
        }
    }

    /// Zero, but NaN in the rows and heads that do not take part and between heads.
    void make_query() {
        const std::int64_t element = size_bytes(problem.query_dtype);
        const std::int64_t head_stride = d_qk(problem) + 16;
        const std::int64_t row_stride = (heads_ + extra_heads) * head_stride;
        query_memory_ = Fenced(static_cast<std::size_t>((rows_ + extra_rows) * row_stride * element));
        query_memory_.fill(0xFF);
        args.query =
            dense(query_memory_.data(), problem.query_dtype, {rows_ + extra_rows, heads_ + extra_heads, d_qk(problem)});
        args.query.strides = {row_stride, head_stride, 1, 0};
        for (std::int64_t row = 0; row < rows_; ++row)
            for (std::int64_t head = 0; head < heads_; ++head)
                std::memset(query_memory_.data() + (row * row_stride + head * head_stride) * element, 0,
                            static_cast<std::size_t>(d_qk(problem) * element));
    }

    void make_sinks() {
        if (!problem.sinks) return;
        sinks_memory_ = Fenced(static_cast<std::size_t>(heads_ + extra_heads) * sizeof(float), 4);
        std::fill_n(sinks_memory_.as<float>(), heads_ + extra_heads, not_a_number);
        std::fill_n(sinks_memory_.as<float>(), heads_, 0.0F);
        args.sinks = dense(sinks_memory_.data(), DType::f32, {heads_ + extra_heads});
    }

    void make_outputs() {
        const std::int64_t rows = rows_ + extra_rows;
        const std::int64_t heads = heads_ + extra_heads;
        const std::int64_t head_stride = value_dims + 8;
        out_memory_ = Fenced(static_cast<std::size_t>(rows * heads * head_stride * size_bytes(problem.out_dtype)), 4);
        args.out = dense(out_memory_.data(), problem.out_dtype, {rows, heads, value_dims});
        args.out.strides = {heads * head_stride, head_stride, 1, 0};
        if (!problem.lse) return;
        lse_memory_ = Fenced(static_cast<std::size_t>(rows * heads) * sizeof(float), 4);
        args.lse = dense(lse_memory_.data(), DType::f32, {rows, heads});
    }

    /// While it lives, a write to an input ends the program.
    class ReadOnlyInputs {
       public:
        explicit ReadOnlyInputs(Step& step) : step_(step) { step_.inputs_writable(false); }
        ~ReadOnlyInputs() { step_.inputs_writable(true); }
        ReadOnlyInputs(const ReadOnlyInputs&) = delete;
        ReadOnlyInputs& operator=(const ReadOnlyInputs&) = delete;

       private:
        Step& step_;
    };

    void inputs_writable(bool yes) {
        query_memory_.writable(yes);
        sinks_memory_.writable(yes);
        for (SourceMemory& source : sources_)
            for (Fenced* memory : {&source.cache_memory, &source.rope_memory, &source.slots, &source.counts})
                memory->writable(yes);
    }

    /// Reads an element and puts the canary back, so that afterwards the whole memory must hold canaries.
    template <class T>
    static std::uint32_t take(const Tensor& tensor, std::int64_t index, std::int64_t& unwritten) {
        constexpr T poison = sizeof(T) == 2 ? canary : static_cast<T>(canary * 0x10001U);
        const T bits = std::exchange(static_cast<T*>(tensor.data)[index], poison);
        unwritten += bits == poison ? 1 : 0;
        return bits;
    }

    std::int64_t rows_ = 0;
    std::int64_t heads_ = 0;
    std::vector<SourceMemory> sources_;
    Fenced query_memory_, sinks_memory_, out_memory_, lse_memory_;
};

}  // namespace sparsemla::test
