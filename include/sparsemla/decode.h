// Sparse MLA decode: the problem, the plan that fixes how it runs, the call, and the merge of partial results.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sparsemla/device.h"
#include "sparsemla/indices.h"
#include "sparsemla/records.h"
#include "sparsemla/tensor.h"

namespace sparsemla {

struct Mailbox;  // mailbox.h

inline constexpr std::int64_t max_heads = 128;

enum class LseBase : std::uint8_t { natural, two };

/// The format in which softmax weights P enter P*V (docs/numerics.md).
enum class PFormat : std::uint8_t { e4m3, f16, bf16, f64 };

/// What the exponent of P is relative to.
enum class Anchor : std::uint8_t {
    split_running_max,  ///< the maximum of the split's chunks so far; older sums are rescaled when it rises
    chunk_max,          ///< each chunk's own maximum
    row_max,            ///< the maximum over all splits of the row (of the cluster)
};

/// Which columns of a row belong to split s of S: of its n active ones, or (round_robin) by their place in the lists.
enum class ColumnRule : std::uint8_t {
    blocks,       ///< [s * b, (s + 1) * b) with b = ceil(ceil(n / S) / chunk) * chunk
    interleaved,  ///< s, s + S, s + 2S, ...
    /// Chunks s, s + S, s + 2S, ... of the lists, each source cut from its column 0 and source 1's chunks numbered
    /// after the ceil(width / chunk) of source 0: what a count leaves out moves no other column.
    round_robin
};

std::string_view name(LseBase base);
std::string_view name(PFormat format);
std::string_view name(Anchor anchor);
std::string_view name(ColumnRule rule);
std::optional<PFormat> find_p_format(std::string_view name);  ///< "e4m3", "f16", "bf16", "f64" (with or without "p_")
std::optional<Anchor> find_anchor(std::string_view name);
std::optional<ColumnRule> find_column_rule(std::string_view name);

/// One cache of the problem. What is fixed at planning time; addresses and scales come with DecodeArgs.
struct SourceProblem {
    Record record = Record::fp8_576;
    RecordForm form = RecordForm::contiguous;
    bool split_rope = false;  ///< bf16 only: latent and rope are two tensors
    std::int64_t width = 0;   ///< columns of the slots list
    /// Column c is active when c < clamp(counts[row] - count_offset, 0, width): one count over two sources' columns.
    std::int64_t count_offset = 0;
};

/// A family of decode steps that one plan serves.
struct Problem {
    std::int64_t rows = 0;   ///< capacity: the plan serves every number of rows up to it, with the same bits
    std::int64_t heads = 0;  ///< 1 .. 128; 0 is a no-op
    DType query_dtype = DType::f8_e4m3;    ///< f8_e4m3 or bf16
    std::vector<SourceProblem> sources{};  ///< one or two, of equal d_qk
    /// Source 0's list is token ids (DecodeArgs::indices) that decode itself converts: no other launch, and the bits
    /// of convert_indices followed by decode of the same schedule. Its count_offset is 0. Of the GPU kernels
    /// decode_latency does it, where 4 bytes a column fit its shared memory; CPU kernels need 4 * rows * (1 + width)
    /// bytes more of workspace.
    bool from_ids = false;
    /// One rank of decode context parallelism (mailbox.h, docs/dcp.md): the query of all ranks' heads comes from
    /// DecodeArgs::mailbox, and results go to the heads' owners. No query, out, lse and sinks (those are
    /// merge_pushed's); out_dtype is bf16; lse and lse_base are not looked at. decode_latency does it in its one
    /// launch, other GPU kernels with one before and one after (Plan::fuses_exchange).
    bool dcp = false;
    bool sinks = false;
    bool lse = true;
    LseBase lse_base = LseBase::natural;
    DType out_dtype = DType::bf16;  ///< bf16, or f32 for partials that the caller merges
    Device device{};
};

/// d_qk of the sources: 576 or 512.
std::int64_t d_qk(const Problem& problem);

/// All that fixes a row's bits, besides the row's inputs and the kernel's own arithmetic (contract 9 of
/// docs/design.md).
struct Schedule {
    std::string kernel;
    PFormat p_format = PFormat::f16;
    float p_scale = 1.0F;  ///< P is stored as p_scale * 2^(s - anchor)
    Anchor anchor = Anchor::split_running_max;
    int splits = 1;
    ColumnRule columns = ColumnRule::blocks;
    int chunk = 64;  ///< columns per chunk; chunks of a split run in ascending order
    std::int64_t row_capacity = 0;

    friend bool operator==(const Schedule&, const Schedule&) = default;
};

/// One line: "cpu p_f16*32768 anchor=split_running_max splits=8 columns=blocks chunk=64 order=ascending rows<=8".
std::string to_string(const Schedule& schedule);

/// What the CTAs of a GPU cluster exchange, and how.
enum class Transport : std::uint8_t {
    stores,  ///< partial outputs: every thread stores its own into the shared memory of the CTA that merges them, or,
             ///< where there are no clusters (decode_balanced, decode_wide), into the workspace
    bulk,    ///< partial outputs: staged in shared memory, then one bulk copy for each CTA
    weights  ///< P, where no split of the row has more than one chunk: each CTA then computes its own dimensions over
             ///< all of the row's columns. Other rows as `stores`. For 2, 4 or 8 splits
};

/// How records come from the cache to a CTA's shared memory.
enum class Gather : std::uint8_t {
    copies,  ///< 16 bytes a thread
    bulk     ///< a copy a record; the CTAs of a cluster that hold other heads of the row share each copy
};

/// When a GPU kernel lets the next one of its stream start (programmatic dependent launch). The next one waits for this
/// one's end before it reads anything, if it was written for that; otherwise it starts after this one's end.
enum class Trigger : std::uint8_t {
    start,
    loaded,  ///< once the first records are in shared memory; kernels without clusters: once all copies are under way
    end      ///< once the warps that multiply have nothing more to send; a row of one split: at its end
};

std::string_view name(Transport transport);
std::string_view name(Gather gather);
std::string_view name(Trigger trigger);
std::optional<Transport> find_transport(std::string_view name);
std::optional<Gather> find_gather(std::string_view name);
std::optional<Trigger> find_trigger(std::string_view name);

/// How a GPU kernel is laid out over the device: choices for speed that never change a bit.
struct Tiling {
    int heads = 0;          ///< of a CTA
    int stages = 0;         ///< chunks of 64 columns (decode_wide: steps of 32) that shared memory has room for
    int cluster_tiles = 1;  ///< tiles of heads in a cluster; more than 1 share the records that each gathers (bulk)
    Gather gather = Gather::copies;
    Transport transport = Transport::stores;
    Trigger trigger = Trigger::loaded;

    friend bool operator==(const Tiling&, const Tiling&) = default;
};

/// "heads=16 stages=1 cluster_tiles=1 gather=copies transport=stores trigger=loaded".
std::string to_string(const Tiling& tiling);

/// Wishes of the caller; what is not given, the plan chooses.
struct PlanOptions {
    std::string kernel{};  ///< forced by name; refused by name if it cannot
    std::optional<PFormat> p_format{};
    std::optional<float> p_scale{};
    std::optional<Anchor> anchor{};
    std::optional<int> splits{};
    std::optional<ColumnRule> columns{};
    std::optional<int> chunk{};
    /// Active columns that rows usually have, of all sources: what a GPU kernel's plan is to be fast for, where that is
    /// much less than the widths (a rank that owns an eighth of a context). At least 1. Not a limit: any count is
    /// right.
    std::optional<std::int64_t> usual_columns{};
    std::optional<int> tile_heads{};  ///< Tiling's fields, GPU kernels only
    std::optional<int> stages{};
    std::optional<int> cluster_tiles{};
    std::optional<Gather> gather{};
    std::optional<Transport> transport{};
    std::optional<Trigger> trigger{};
    bool allow_unverified =
        false;  ///< offer GPU kernels on architectures where nobody has run them; no effect on a CPU
};

/// Why a kernel does not run a problem: one sentence with the parameter and the allowed set.
struct Refusal {
    std::string kernel;
    std::string reason;
};

namespace detail {
struct Kernel;
}

/// How a problem runs: the chosen kernel, its schedule, the memory it needs, and why the others were not chosen.
struct Plan {
    Problem problem;
    DeviceSpec device;
    Schedule schedule;
    std::optional<Tiling> tiling;     ///< of a GPU kernel
    double expected_us = 0;           ///< a GPU kernel's estimate, which plans compare; 0: none
    std::size_t workspace_bytes = 0;  ///< scratch, contents irrelevant between calls; 64-byte aligned
    std::size_t state_bytes = 0;      ///< zeroed once by prepare, restored by every call
    bool fuses_exchange = false;      ///< of a dcp problem: the kernel itself waits for the query and pushes
    std::string reason;               ///< why this kernel
    std::vector<Refusal> declined;    ///< every other kernel, in order of preference
    const detail::Kernel* kernel = nullptr;

    /// Several lines for people: problem, schedule, memory, reasons.
    std::string describe() const;
};

/// Names of all kernels in this build, in order of preference.
std::vector<std::string> kernel_names();

/// A pure function of its arguments. Throws Error (unsupported, invalid_argument) with every kernel's refusal.
Plan make_plan(const Problem& problem, const DeviceSpec& device, const PlanOptions& options = {});

/// The refusal that make_plan would throw, or nothing. `options.kernel` asks about one kernel.
std::optional<std::string> refusal(const Problem& problem, const DeviceSpec& device, const PlanOptions& options = {});
inline bool supports(const Problem& problem, const DeviceSpec& device, const PlanOptions& options = {}) {
    return !refusal(problem, device, options).has_value();
}

/// A per-tensor factor: a host value, or a pointer to a float on the problem's device that is read by the call.
/// Host values must be positive and finite.
struct Scale {
    float value = 1.0F;
    const float* pointer = nullptr;
};

/// Caller-owned memory on the problem's device; null where none is needed.
struct Memory {
    void* data = nullptr;
    std::size_t bytes = 0;
};

struct SourceArgs {
    CacheView cache{};
    /// i32 [>= rows, width], row stride free, columns dense, 4-byte aligned; negative = absent. Neither this nor counts
    /// of source 0 where problem.from_ids.
    ConstTensor slots{};
    ConstTensor counts{};  ///< i32 [>= rows], optional (all columns), stride free; < 0 is 0, > width is width
    Scale k_scale{};       ///< flat fp8 only; factor on this source's scores and values
};

/// One call. Inputs may hold more than `rows` rows; only [rows, heads] of the outputs is written.
struct DecodeArgs {
    std::int64_t rows = 0;
    ConstTensor query{};  ///< [>= rows, >= heads, d_qk]; rows and heads strided, each head 16-byte aligned and dense
    const Mailbox* mailbox =
        nullptr;  ///< iff problem.dcp, in place of query, out, lse and sinks; of its heads and query
    std::array<SourceArgs, 2> sources{};
    /// Iff problem.from_ids: token_ids i32 [>= rows, width of source 0], block_table i32 [requests, max_pages],
    /// request_of_row i32 [>= rows], lengths i32 [>= requests] (optional) and sharding, as convert_indices takes them.
    /// Its cache is sources[0].cache, whatever it says; it has no slots and counts (Error "indices.slots"), nor has
    /// sources[0]: decode keeps them to itself.
    ConvertArgs indices{};
    ConstTensor sinks{};         ///< f32 [>= heads], iff problem.sinks
    float softmax_scale = 1.0F;  ///< positive and finite
    Scale q_scale{};
    float out_scale = 1.0F;  ///< finite
    Tensor out{};            ///< bf16 or f32 [>= rows, >= heads, 512], last dimension dense
    Tensor lse{};            ///< f32 [>= rows, >= heads], any strides (a transposed view too), iff problem.lse
    Memory workspace{};  ///< plan.workspace_bytes or more, 64-byte aligned, on the device; not in use by another call
    Memory state{};      ///< plan.state_bytes or more, 64-byte aligned, prepared; not in use by another call
    /// Refuse what would be treated as absent or clamped: slots >= num_slots or in a gap, and counts outside
    /// [0, count_offset + width] (of the last source, where both sources look at the same counts). Token ids that name
    /// nothing are no error. Reads the lists on the host; CPU problems only.
    bool validate = false;
};

/// Loads what the plan's first call would load, and zeroes its state. Once per plan and state, outside graph capture.
void prepare(const Plan& plan, Memory state, Stream stream = {});

/// For row r, head h over the active columns c of all sources (column active: c < clamp(counts[r] - count_offset, 0,
/// width), slot held by the cache):
///     s_c = softmax_scale * q_scale * k_scale * (q . k_c)       m = max_c s_c      l = sum_c exp(s_c - m)
///     out = out_scale * sum_c exp(s_c - m) * k_scale * v_c / (l + exp(sink - m))   lse = m + ln(l), without the sink
/// No active column: out = +0, lse = -inf. Throws Error before anything is written. Allocates and synchronises nothing
/// on a GPU; a CPU call returns when the result is complete, and runs its threads in oneTBB.
void decode(const Plan& plan, const DecodeArgs& args, Stream stream = {});

/// One of the N partial results of the same rows and heads.
struct Partial {
    ConstTensor out{};     ///< f32 or bf16 [>= rows, >= heads, 512]
    ConstTensor lse{};     ///< f32 [>= rows, >= heads]
    ConstTensor counts{};  ///< i32 [>= rows], optional: a count <= 0 drops the row of this partial, whatever its lse
};

struct MergeArgs {
    std::int64_t rows = 0;
    std::int64_t heads = 0;
    std::span<const Partial> partials{};
    LseBase partial_base = LseBase::natural;  ///< of every partial's lse
    bool plus_inf_is_empty = false;  ///< a foreign partial's lse +inf means "no columns"; otherwise it gives NaN
    ConstTensor sinks{};             ///< f32 [>= heads], optional: applied here, once
    Tensor out{};                    ///< bf16 or f32 [>= rows, >= heads, 512]
    Tensor lse{};                    ///< f32 [>= rows, >= heads], optional; excludes the sink
    LseBase lse_base = LseBase::natural;
};

/// w_i = exp(lse_i - max), out = sum(w_i out_i) / (sum w_i + exp(sink - max)), lse = max + ln(sum w_i), in FP32 and in
/// the order given. A partial of lse -inf or of count 0 contributes nothing and its payload is not read; if exactly one
/// contributes and there is no sink, its values pass unchanged. All empty: +0, -inf. Does not allocate. An output may
/// not overlap any input.
void merge(const MergeArgs& args, Stream stream = {});

}  // namespace sparsemla
