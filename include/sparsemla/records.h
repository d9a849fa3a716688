// Cache records: the nine byte layouts as data, views of paged caches, pack and unpack.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "sparsemla/tensor.h"

namespace sparsemla {

/// Names a byte layout, never a dtype.
enum class Record : std::uint8_t {
    bf16,
    fp8_576,
    fp8_512,
    fp8_ds_mla,
    fp8_ds_mla_norope,
    fp8_v4,
    fp8_v41,
    nvfp4_v41,
    nvfp4_ds_mla,
};

/// Where a record's scales live: with its values (`contiguous`), or behind the values of the whole page (`planar`).
enum class RecordForm : std::uint8_t { contiguous, planar };

enum class ValueEncoding : std::uint8_t { bf16, e4m3, e2m1 };
enum class ScaleEncoding : std::uint8_t { none, f32, ue8m0, e4m3 };

/// How a writer chooses a group's scale (records.h's table of formulas is in docs/numerics.md).
enum class ScaleRule : std::uint8_t {
    none,           ///< the layout has no scales; flat fp8 divides by the source's k_scale
    amax_f32,       ///< max(amax / 448, FLT_MIN), or on request the power of two above max(amax / 448, 1e-4)
    amax_pow2_1e4,  ///< 2^ceil(log2(max(amax / 448, 1e-4)))
    amax_pow2,      ///< 2^clamp(ceil(log2(amax / 448)), -127, 127), 2^-127 for amax = 0
    amax_e4m3,      ///< e4m3, nearest even, of clamp(amax / 6, 2^-9, 448)
    amax_e4m3_up,   ///< the same, rounded up
};

/// A run of consecutive dimensions stored in one encoding. e2m1 packs two dimensions a byte, even one low.
struct RecordRun {
    ValueEncoding encoding = ValueEncoding::e4m3;
    int first_dim = 0;
    int dims = 0;
    int offset_bytes = 0;  ///< from the start of the record's data

    constexpr int bytes() const {
        return encoding == ValueEncoding::bf16 ? 2 * dims : encoding == ValueEncoding::e4m3 ? dims : dims / 2;
    }
};

/// One layout. `main` holds the scaled values; `rope` (dims may be 0) is stored unscaled.
/// d_qk = main.dims + rope.dims; the value vector is always dimensions [0, 512).
struct RecordLayout {
    Record record;
    std::string_view name;  ///< as in case files; flat fp8 is told apart by record_bytes
    int record_bytes;       ///< data and scales together
    int data_bytes;         ///< planar: bytes of one token in the page's first plane
    int scale_bytes;        ///< planar: bytes of one token in the page's second plane
    RecordRun main;
    RecordRun rope;
    ScaleEncoding scale_encoding;
    ScaleRule scale_rule;
    int group_dims;          ///< dimensions of `main` that share a scale
    int scale_offset_bytes;  ///< contiguous: from the start of the record
    bool permuted_scales;    ///< group b's scale at scale_offset + 8 * (b & 3) + (b >> 2)
    bool has_planar;
    bool has_contiguous;
    bool takes_k_scale;  ///< a per-tensor scale other than 1 is allowed
    bool may_split;      ///< latent and rope may be two tensors

    constexpr int d_qk() const { return main.dims + rope.dims; }
    constexpr int groups() const { return group_dims == 0 ? 0 : main.dims / group_dims; }
    constexpr int scale_size() const { return scale_encoding == ScaleEncoding::f32 ? 4 : 1; }
    /// Position of group b's scale, counted in scales.
    constexpr int scale_index(int group) const { return permuted_scales ? 8 * (group & 3) + (group >> 2) : group; }
    constexpr RecordForm default_form() const { return has_planar ? RecordForm::planar : RecordForm::contiguous; }
};

inline constexpr int value_dims = 512;  ///< d_v of every record

inline constexpr std::array<RecordLayout, 9> record_layouts = {{
    {.record = Record::bf16,
     .name = "bf16",
     .record_bytes = 1152,
     .data_bytes = 1152,
     .scale_bytes = 0,
     .main = {ValueEncoding::bf16, 0, 512, 0},
     .rope = {ValueEncoding::bf16, 512, 64, 1024},
     .scale_encoding = ScaleEncoding::none,
     .scale_rule = ScaleRule::none,
     .group_dims = 0,
     .scale_offset_bytes = 0,
     .permuted_scales = false,
     .has_planar = false,
     .has_contiguous = true,
     .takes_k_scale = false,
     .may_split = true},
    {.record = Record::fp8_576,
     .name = "fp8",
     .record_bytes = 576,
     .data_bytes = 576,
     .scale_bytes = 0,
     .main = {ValueEncoding::e4m3, 0, 512, 0},
     .rope = {ValueEncoding::e4m3, 512, 64, 512},
     .scale_encoding = ScaleEncoding::none,
     .scale_rule = ScaleRule::none,
     .group_dims = 0,
     .scale_offset_bytes = 0,
     .permuted_scales = false,
     .has_planar = false,
     .has_contiguous = true,
     .takes_k_scale = true,
     .may_split = false},
    {.record = Record::fp8_512,
     .name = "fp8",
     .record_bytes = 512,
     .data_bytes = 512,
     .scale_bytes = 0,
     .main = {ValueEncoding::e4m3, 0, 512, 0},
     .rope = {ValueEncoding::e4m3, 512, 0, 512},
     .scale_encoding = ScaleEncoding::none,
     .scale_rule = ScaleRule::none,
     .group_dims = 0,
     .scale_offset_bytes = 0,
     .permuted_scales = false,
     .has_planar = false,
     .has_contiguous = true,
     .takes_k_scale = true,
     .may_split = false},
    {.record = Record::fp8_ds_mla,
     .name = "fp8_ds_mla",
     .record_bytes = 656,
     .data_bytes = 656,
     .scale_bytes = 0,
     .main = {ValueEncoding::e4m3, 0, 512, 0},
     .rope = {ValueEncoding::bf16, 512, 64, 528},
     .scale_encoding = ScaleEncoding::f32,
     .scale_rule = ScaleRule::amax_f32,
     .group_dims = 128,
     .scale_offset_bytes = 512,
     .permuted_scales = false,
     .has_planar = false,
     .has_contiguous = true,
     .takes_k_scale = false,
     .may_split = false},
    {.record = Record::fp8_ds_mla_norope,
     .name = "fp8_ds_mla_norope",
     .record_bytes = 528,
     .data_bytes = 528,
     .scale_bytes = 0,
     .main = {ValueEncoding::e4m3, 0, 512, 0},
     .rope = {ValueEncoding::bf16, 512, 0, 528},
     .scale_encoding = ScaleEncoding::f32,
     .scale_rule = ScaleRule::amax_f32,
     .group_dims = 128,
     .scale_offset_bytes = 512,
     .permuted_scales = false,
     .has_planar = false,
     .has_contiguous = true,
     .takes_k_scale = false,
     .may_split = false},
    {.record = Record::fp8_v4,
     .name = "fp8_v4",
     .record_bytes = 584,
     .data_bytes = 576,
     .scale_bytes = 8,
     .main = {ValueEncoding::e4m3, 0, 448, 0},
     .rope = {ValueEncoding::bf16, 448, 64, 448},
     .scale_encoding = ScaleEncoding::ue8m0,
     .scale_rule = ScaleRule::amax_pow2_1e4,
     .group_dims = 64,
     .scale_offset_bytes = 576,
     .permuted_scales = false,
     .has_planar = true,
     .has_contiguous = false,
     .takes_k_scale = false,
     .may_split = false},
    {.record = Record::fp8_v41,
     .name = "fp8_v41",
     .record_bytes = 528,
     .data_bytes = 512,
     .scale_bytes = 16,
     .main = {ValueEncoding::e4m3, 0, 512, 0},
     .rope = {ValueEncoding::e4m3, 512, 0, 512},
     .scale_encoding = ScaleEncoding::ue8m0,
     .scale_rule = ScaleRule::amax_pow2,
     .group_dims = 32,
     .scale_offset_bytes = 512,
     .permuted_scales = false,
     .has_planar = true,
     .has_contiguous = true,
     .takes_k_scale = false,
     .may_split = false},
    {.record = Record::nvfp4_v41,
     .name = "nvfp4_v41",
     .record_bytes = 288,
     .data_bytes = 256,
     .scale_bytes = 32,
     .main = {ValueEncoding::e2m1, 0, 512, 0},
     .rope = {ValueEncoding::e4m3, 512, 0, 256},
     .scale_encoding = ScaleEncoding::e4m3,
     .scale_rule = ScaleRule::amax_e4m3,
     .group_dims = 16,
     .scale_offset_bytes = 256,
     .permuted_scales = false,
     .has_planar = true,
     .has_contiguous = true,
     .takes_k_scale = false,
     .may_split = false},
    {.record = Record::nvfp4_ds_mla,
     .name = "nvfp4_ds_mla",
     .record_bytes = 352,
     .data_bytes = 352,
     .scale_bytes = 0,
     .main = {ValueEncoding::e2m1, 0, 512, 0},
     .rope = {ValueEncoding::e4m3, 512, 64, 256},
     .scale_encoding = ScaleEncoding::e4m3,
     .scale_rule = ScaleRule::amax_e4m3_up,
     .group_dims = 16,
     .scale_offset_bytes = 320,
     .permuted_scales = true,
     .has_planar = false,
     .has_contiguous = true,
     .takes_k_scale = false,
     .may_split = false},
}};

namespace detail {

/// The runs and the scales of a layout fill record_bytes without gap (but for fp8_v4's pad byte) or overlap.
constexpr bool consistent(const RecordLayout& layout) {
    const int scales = layout.groups() * layout.scale_size();
    const int used = layout.main.bytes() + layout.rope.bytes() + scales;
    const int pad = layout.record_bytes - used;
    return (pad == 0 || (layout.record == Record::fp8_v4 && pad == 1)) &&
           layout.data_bytes + layout.scale_bytes == layout.record_bytes && layout.d_qk() >= value_dims &&
           layout.rope.first_dim == layout.main.dims && layout.record_bytes % 8 == 0 &&
           (!layout.has_planar || layout.scale_offset_bytes == layout.data_bytes);
}

constexpr bool layouts_consistent() {
    for (std::size_t i = 0; i < record_layouts.size(); ++i)
        if (static_cast<std::size_t>(record_layouts[i].record) != i || !consistent(record_layouts[i])) return false;
    return true;
}
static_assert(layouts_consistent());

}  // namespace detail

constexpr const RecordLayout& layout_of(Record record) { return record_layouts[static_cast<std::size_t>(record)]; }

/// The layout of a case file's `record` and `record_bytes` (0: the name alone must decide).
/// Throws Error naming the known layouts.
const RecordLayout& find_layout(std::string_view name, std::int64_t record_bytes);

/// "fp8 (576 bytes)": a name for people, unambiguous for flat fp8.
std::string to_string(Record record);

/// A paged cache of one record format, in memory that the caller owns. Record of slot s:
///   contiguous  at s * record_bytes, whatever the page size; pages are slots_per_page records apart
///   planar      page p = s / page_size, offset o = s % page_size: data at p * page_stride_bytes + o * data_bytes,
///               scales at p * page_stride_bytes + page_size * data_bytes + o * scale_bytes
/// Slots whose offset in the page is >= page_size lie in the gap between pages and are absent.
template <class Byte>
struct BasicCacheView {
    Record record = Record::fp8_576;
    RecordForm form = RecordForm::contiguous;
    Byte* data = nullptr;                ///< 16-byte aligned
    Byte* rope = nullptr;                ///< bf16 split in two tensors: [slots, 64]; `data` is then [slots, 512]
    std::int64_t pages = 0;              ///< block ids 0 .. pages - 1
    std::int64_t page_size = 64;         ///< tokens a page holds
    std::int64_t slots_per_page = 0;     ///< 0: page_size. Contiguous records only
    std::int64_t page_stride_bytes = 0;  ///< 0: dense. Planar: a multiple of 16 (8 for odd page sizes); contiguous:
                                         ///< 0 or slots_per_page * record_bytes
    Device device{};

    constexpr const RecordLayout& layout() const { return layout_of(record); }
    constexpr std::int64_t slot_step() const { return slots_per_page == 0 ? page_size : slots_per_page; }
    constexpr std::int64_t stride_bytes() const {
        return page_stride_bytes != 0 ? page_stride_bytes : slot_step() * layout().record_bytes;
    }
    /// One past the largest slot; 0 for an empty cache.
    constexpr std::int64_t num_slots() const { return pages == 0 ? 0 : (pages - 1) * slot_step() + page_size; }
    /// Whether the slot holds a record: in range and not in a gap.
    constexpr bool holds(std::int64_t slot) const {
        return slot >= 0 && slot < num_slots() && slot % slot_step() < page_size;
    }

    constexpr operator BasicCacheView<const std::byte>() const {
        return {record, form, data, rope, pages, page_size, slots_per_page, page_stride_bytes, device};
    }
};

using CacheView = BasicCacheView<const std::byte>;
using MutableCacheView = BasicCacheView<std::byte>;

/// Throws Error (naming `argument`) unless the view is one that decode, pack and unpack take: known form, aligned,
/// page stride of whole records (contiguous) or large enough (planar), num_slots <= 2^31 - 1. The page stride of a
/// single page is not looked at.
void validate(const CacheView& cache, std::string_view argument);

/// Bytes from `data` to one past the last record's last byte: what a caller must have allocated.
std::int64_t cache_bytes(const CacheView& cache);

/// Where the pieces of one record lie. `scales` is null for layouts without scales.
template <class Byte>
struct BasicRecordPointers {
    Byte* data = nullptr;
    Byte* rope = nullptr;
    Byte* scales = nullptr;
};
using RecordPointers = BasicRecordPointers<const std::byte>;

/// The pieces of the record of a slot that the cache holds. 64-bit throughout.
template <class Byte>
constexpr BasicRecordPointers<Byte> locate(const BasicCacheView<Byte>& cache, std::int64_t slot) {
    const RecordLayout& layout = cache.layout();
    if (cache.form == RecordForm::planar) {
        Byte* page = cache.data + (slot / cache.page_size) * cache.stride_bytes();
        const std::int64_t offset = slot % cache.page_size;
        Byte* data = page + offset * layout.data_bytes;
        return {data, data + layout.rope.offset_bytes,
                page + cache.page_size * layout.data_bytes + offset * layout.scale_bytes};
    }
    if (cache.rope != nullptr)
        return {cache.data + slot * layout.main.bytes(), cache.rope + slot * layout.rope.bytes(), nullptr};
    Byte* data = cache.data + slot * layout.record_bytes;
    Byte* scales = layout.scale_encoding == ScaleEncoding::none ? nullptr : data + layout.scale_offset_bytes;
    return {data, data + layout.rope.offset_bytes, scales};
}

struct PackOptions {
    float k_scale = 1.0F;              ///< flat fp8: stored value = x / k_scale. Must be 1 for every other record
    bool power_of_two_scales = false;  ///< fp8_ds_mla and its norope form: scales rounded up to a power of two.
                                       ///< Refused for every other record
};

/// Quantises `values` f32 or bf16 [n, d_qk] into the records of `slots` i32 or i64 [n] (negative: skipped; a slot the
/// cache does not hold: Error, before anything is written). Exact and deterministic: the bytes are a function of the
/// values alone, and of equal slots the last wins (on a GPU: any, or parts of several). NaN gives the NaN code (for
/// e2m1, which has none, of the group's scale, over zero codes), infinity saturates (bf16 holds it); neither takes part
/// in a group's amax. Does not allocate. All on one device; on a GPU, where slots cannot be looked at, those that the
/// cache does not hold are skipped, and it is one kernel in `stream` that waits for the grid before it (programmatic
/// dependency).
void pack(const MutableCacheView& cache, ConstTensor values, ConstTensor slots, const PackOptions& options = {},
          Stream stream = {});
/// The same from two tensors: latent [n, main.dims] and rope [n, rope.dims] of the record's layout (absent where
/// rope.dims is 0), as attention layers have them.
void pack(const MutableCacheView& cache, ConstTensor latent, ConstTensor rope, ConstTensor slots,
          const PackOptions& options = {}, Stream stream = {});

/// Dequantises the records of `slots` i32 or i64 [n] into `out` f32, f64 or bf16 [n, d_qk], without k_scale. f64 is
/// exact; f32 and bf16 are one rounding of it. Slots the cache does not hold give zeros. Does not allocate. All on one
/// device; on a GPU as pack.
void unpack(const CacheView& cache, ConstTensor slots, Tensor out, Stream stream = {});

/// Query quantiser: e4m3 of x / q_scale (float32 division, nearest even, saturating; NaN gives 0x7F).
/// `in` bf16 or f32 [rows, heads, d], `out` f8_e4m3 of the same shape; strides free, last dimension dense. On a GPU as
/// pack.
void quantize_query(ConstTensor in, float q_scale, Tensor out, Stream stream = {});

}  // namespace sparsemla
