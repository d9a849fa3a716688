// From a cache tensor's shape and the metadata to the view of a paged cache.
//
// Contiguous records form one run of storage slots, whatever the shape: [slots, record_bytes], [pages, page_size,
// record_bytes], [pages, page_bytes]. A gap between pages (slots_per_page > page_size) is part of the tensor.
// Planar pages are dense, [pages, page_size, record_bytes], or padded, [pages, page_bytes].
#include "case_fields.h"
#include "safetensors.h"

namespace sparsemla::detail {

namespace {

/// One source's cache while it is read.
class CacheReader {
   public:
    CacheReader(const CaseFields& fields, std::string_view prefix, const CaseCache* first)
        : fields_(fields), prefix_(prefix), first_(first) {}

    CaseCache read() {
        read_record();
        read_form();
        read_tensors();
        read_page_size();
        if (cache_.view.form == RecordForm::planar)
            page_planar();
        else
            page_contiguous();
        if (cache_.view.pages > 0 && cache_.view.num_slots() > max_extent)
            fail("cache", "at most 2^31 - 1 slots", std::to_string(cache_.view.num_slots()));
        return cache_;
    }

   private:
    std::string key(std::string_view name) const { return std::string(prefix_) + std::string(name); }
    [[noreturn]] void fail(std::string_view name, std::string_view required, std::string_view received) const {
        fields_.fail(key(name), required, received);
    }
    [[noreturn]] void fail_shape() const {
        const std::string bytes = std::to_string(layout().record_bytes);
        std::string required =
            "U8 [pages, page_size, " + bytes + "], U8 [slots, " + bytes + "] or U8 [pages, page_bytes]";
        if (layout().may_split)
            required += ", BF16 [pages, page_size, " + std::to_string(layout().d_qk()) + "], or BF16 [.., " +
                        std::to_string(layout().main.dims) + "] beside cache_rope BF16 [.., " +
                        std::to_string(layout().rope.dims) + "]";
        fail("cache", required, describe(dtype_name(tensor_.dtype), {tensor_.shape.data(), rank()}));
    }

    const RecordLayout& layout() const { return cache_.view.layout(); }
    std::size_t rank() const { return static_cast<std::size_t>(tensor_.rank); }

    void read_record() {
        const std::string* name = fields_.text(key("record"));
        std::optional<std::int64_t> bytes = fields_.integer(key("record_bytes"), 1, max_extent);
        const bool same_name = first_ != nullptr && (name == nullptr || *name == first_->view.layout().name);
        if (same_name && !bytes) {
            cache_.view.record = first_->view.record;
            return;
        }
        if (name == nullptr) name = fields_.text("record");
        if (name == nullptr) fail("record", "the name of a record: " + known_records(), "none");
        int matches = 0;
        for (const RecordLayout& candidate : record_layouts) {
            if (candidate.name != *name || (bytes && candidate.record_bytes != *bytes)) continue;
            cache_.view.record = candidate.record;
            ++matches;
        }
        const std::string received = in_quotes(*name) + (bytes ? " of " + std::to_string(*bytes) + " bytes" : "");
        if (matches == 0) fail("record", "one of " + known_records(), received);
        if (matches > 1) fail("record_bytes", "the bytes that tell " + known_records() + " apart", "none");
    }

    static std::string known_records() {
        std::string out;
        for (const RecordLayout& candidate : record_layouts) {
            if (!out.empty()) out += ", ";
            out += std::string(candidate.name) + " (" + std::to_string(candidate.record_bytes) + " bytes)";
        }
        return out;
    }

    void read_form() {
        cache_.view.form = layout().default_form();
        const bool own = fields_.has_text(key("layout"));
        const std::string* given = fields_.text(own ? key("layout") : "layout");
        if (given == nullptr) return;
        const bool planar = *given == "planar";
        if (!planar && *given != "contiguous") fail("layout", "planar or contiguous", in_quotes(*given));
        const bool offered = planar ? layout().has_planar : layout().has_contiguous;
        if (offered)
            cache_.view.form = planar ? RecordForm::planar : RecordForm::contiguous;
        else if (own || first_ == nullptr)
            fail("layout", "a layout of " + to_string(cache_.view.record), in_quotes(*given));
    }

    void read_tensors() {
        tensor_ = fields_.any_tensor(key("cache"), "a tensor of records");
        cache_.view.data = static_cast<const std::byte*>(tensor_.data);
        cache_.split_rope = fields_.has_tensor(key("cache_rope"));
        if (cache_.split_rope && !layout().may_split)
            fail("cache_rope", "no such tensor with " + to_string(cache_.view.record), "one");
        const bool typed = tensor_.dtype == DType::bf16 && layout().may_split;
        if ((tensor_.dtype != DType::u8 && !typed) || (cache_.split_rope && !typed)) fail_shape();
        if (tensor_.rank != 2 && tensor_.rank != 3) fail_shape();
        record_extent_ = cache_.split_rope ? layout().main.dims : layout().record_bytes / size_bytes(tensor_.dtype);
        if (!cache_.split_rope) return;

        const Extent rope_dims = Extent::exactly(layout().rope.dims);
        const Extent leading = Extent::exactly(tensor_.shape[0]);
        const ConstTensor rope = tensor_.rank == 2
                                     ? fields_.tensor(key("cache_rope"), {DType::bf16}, {leading, rope_dims})
                                     : fields_.tensor(key("cache_rope"), {DType::bf16},
                                                      {leading, Extent::exactly(tensor_.shape[1]), rope_dims});
        cache_.view.rope = static_cast<const std::byte*>(rope.data);
    }

    void read_page_size() {
        const bool by_shape = tensor_.rank == 3;
        std::optional<std::int64_t> given = fields_.integer(key("page_size"), 1, max_extent);
        if (!given && first_ != nullptr && !by_shape && first_->page_size != 0) given = first_->page_size;
        if (!given && by_shape) {
            if (tensor_.shape[1] < 1 || tensor_.shape[1] > max_extent) fail_shape();
            given = tensor_.shape[1];
        }
        cache_.page_size = given.value_or(0);
        cache_.view.page_size = given.value_or(1);
    }

    /// slots_per_page or page_stride_bytes: the source's own, or source 0's where the two caches are paged alike.
    std::optional<std::int64_t> paging(std::string_view name) const {
        const bool alike = first_ != nullptr && first_->view.record == cache_.view.record &&
                           first_->view.form == cache_.view.form && first_->page_size == cache_.page_size;
        const std::optional<std::int64_t> own = fields_.integer(key(name), 1, max_bytes);
        return own || !alike ? own : fields_.integer(name, 1, max_bytes);
    }

    bool is_flat() const { return tensor_.rank == 2 && tensor_.shape[1] == record_extent_; }

    void page_planar() {
        const std::int64_t page_size = cache_.view.page_size;
        const std::int64_t dense_bytes = page_size * layout().record_bytes;
        if (cache_.page_size == 0) fail("page_size", "the tokens of a page, which fix where its scales lie", "none");
        std::int64_t stride_bytes = dense_bytes;
        cache_.view.pages = tensor_.shape[0];
        if (tensor_.rank == 3) {
            if (tensor_.shape[2] != record_extent_) fail_shape();
            if (tensor_.shape[1] != page_size)
                fail("cache", std::to_string(page_size) + " records a page", std::to_string(tensor_.shape[1]));
        } else if (is_flat()) {
            if (tensor_.shape[0] % page_size != 0)
                fail("cache", "whole pages of " + std::to_string(page_size) + " records",
                     std::to_string(tensor_.shape[0]) + " records");
            cache_.view.pages = tensor_.shape[0] / page_size;
        } else {
            stride_bytes = tensor_.shape[1];
            if (stride_bytes < dense_bytes)
                fail("cache", "pages of at least " + std::to_string(dense_bytes) + " bytes",
                     std::to_string(stride_bytes));
        }
        const std::optional<std::int64_t> given_bytes = paging("page_stride_bytes");
        if (given_bytes && *given_bytes != stride_bytes)
            fail("page_stride_bytes", std::to_string(stride_bytes) + ", the tensor's bytes per page",
                 std::to_string(*given_bytes));
        const std::int64_t alignment_bytes = page_size % 2 == 0 ? 16 : 8;
        if (stride_bytes % alignment_bytes != 0)
            fail("page_stride_bytes",
                 "a multiple of " + std::to_string(alignment_bytes) + " for pages of " + std::to_string(page_size),
                 std::to_string(stride_bytes));
        const std::optional<std::int64_t> slots_per_page = paging("slots_per_page");
        if (slots_per_page && *slots_per_page != page_size)
            fail("slots_per_page", "page_size for planar records", std::to_string(*slots_per_page));
        cache_.view.page_stride_bytes = stride_bytes == dense_bytes ? 0 : stride_bytes;
    }

    /// slots_per_page as the metadata has it, directly or as a page stride.
    std::optional<std::int64_t> given_slots_per_page() const {
        std::optional<std::int64_t> slots = paging("slots_per_page");
        const std::optional<std::int64_t> stride_bytes = paging("page_stride_bytes");
        if (!stride_bytes) return slots;
        const std::int64_t record_bytes = layout().record_bytes;
        if (*stride_bytes % record_bytes != 0)
            fail("page_stride_bytes", "whole records of " + std::to_string(record_bytes) + " bytes",
                 std::to_string(*stride_bytes));
        if (slots && *slots != *stride_bytes / record_bytes)
            fail("page_stride_bytes", "slots_per_page * " + std::to_string(record_bytes),
                 std::to_string(*stride_bytes));
        return *stride_bytes / record_bytes;
    }

    /// Slots from one page to the next by the tensor's shape; nothing for a flat cache.
    std::optional<std::int64_t> shape_slots_per_page() const {
        if (is_flat()) return std::nullopt;
        if (tensor_.rank == 3) {
            if (tensor_.shape[2] != record_extent_) fail_shape();
            return tensor_.shape[1];
        }
        if (cache_.page_size == 0 || cache_.split_rope || tensor_.dtype != DType::u8) fail_shape();
        if (tensor_.shape[1] % layout().record_bytes != 0)
            fail("cache", "pages of whole records of " + std::to_string(layout().record_bytes) + " bytes",
                 std::to_string(tensor_.shape[1]) + " bytes a page");
        return tensor_.shape[1] / layout().record_bytes;
    }

    void page_contiguous() {
        const std::int64_t page_size = cache_.view.page_size;
        const std::optional<std::int64_t> given = given_slots_per_page();
        const std::optional<std::int64_t> by_shape = shape_slots_per_page();
        const bool by_page_bytes = by_shape && tensor_.rank == 2;
        const std::int64_t step = given ? *given : by_page_bytes ? *by_shape : page_size;
        if (step < page_size || step > max_extent)
            fail("slots_per_page", "at least page_size = " + std::to_string(page_size) + " and below 2^31",
                 std::to_string(step));
        if (by_shape && *by_shape != step)
            fail("cache", std::to_string(step) + " records a page", std::to_string(*by_shape));
        cache_.view.slots_per_page = step == page_size ? 0 : step;
        if (by_shape)
            cache_.view.pages = tensor_.shape[0];
        else
            page_flat(tensor_.shape[0], step);
    }

    void page_flat(std::int64_t slots, std::int64_t step) {
        const std::int64_t page_size = cache_.view.page_size;
        const std::int64_t rest = slots % step;
        if (rest == 0 || rest >= page_size) {
            cache_.view.pages = slots / step + (rest == 0 ? 0 : 1);
        } else if (step == page_size) {
            cache_.view.page_size = 1;
            cache_.view.pages = slots;
        } else {
            fail("cache",
                 "a last page of at least page_size = " + std::to_string(page_size) + " of " + std::to_string(step) +
                     " slots",
                 std::to_string(rest));
        }
    }

    /// Byte counts of metadata stay below this, so that arithmetic with them cannot overflow.
    static constexpr std::int64_t max_bytes = std::int64_t{1} << 48;

    const CaseFields& fields_;
    std::string_view prefix_;
    const CaseCache* first_;
    CaseCache cache_;
    ConstTensor tensor_;
    std::int64_t record_extent_ = 0;  ///< of the tensor's last dimension, in its elements
};

}  // namespace

CaseCache case_cache(const CaseFields& fields, std::string_view prefix, const CaseCache* first) {
    return CacheReader(fields, prefix, first).read();
}

}  // namespace sparsemla::detail
