// Names of layouts, and which views of a cache are sound.
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "sparsemla/records.h"

namespace sparsemla {

namespace {

constexpr std::int64_t max_slots = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t base_alignment_bytes = 16;

/// Reports a fault of one field of a view.
class Refuser {
   public:
    explicit Refuser(std::string_view argument) : argument_(argument) {}

    [[noreturn]] void operator()(std::string_view field, std::string_view required, std::string_view received) const {
        throw Error(ErrorKind::invalid_argument, std::string(argument_) + "." + std::string(field), required, received);
    }
    void outside(std::string_view field, std::int64_t low, std::int64_t value) const {
        if (value < low || value > max_slots)
            (*this)(field, std::to_string(low) + " .. " + std::to_string(max_slots), std::to_string(value));
    }

   private:
    std::string_view argument_;
};

std::string_view name(RecordForm form) { return form == RecordForm::planar ? "planar" : "contiguous"; }

void check_form(const CacheView& cache, const Refuser& refuse) {
    if (static_cast<std::size_t>(cache.record) >= record_layouts.size())
        refuse("record", "one of the " + std::to_string(record_layouts.size()) + " records of record_layouts",
               "number " + std::to_string(static_cast<int>(cache.record)));
    const RecordLayout& layout = cache.layout();
    const bool known = cache.form == RecordForm::planar || cache.form == RecordForm::contiguous;
    const bool offered = cache.form == RecordForm::planar ? layout.has_planar : layout.has_contiguous;
    if (known && offered) return;
    std::string allowed = layout.has_contiguous ? "contiguous" : "planar";
    if (layout.has_contiguous && layout.has_planar) allowed += " or planar";
    refuse("form", allowed + " for " + to_string(cache.record),
           known ? std::string(name(cache.form)) : "number " + std::to_string(static_cast<int>(cache.form)));
}

/// pages, page_size, slots_per_page, and the slots they make.
void check_slots(const CacheView& cache, const Refuser& refuse) {
    refuse.outside("pages", 0, cache.pages);
    refuse.outside("page_size", 1, cache.page_size);
    if (cache.slots_per_page != 0) {
        refuse.outside("slots_per_page", 0, cache.slots_per_page);
        const bool planar = cache.form == RecordForm::planar;
        if (planar ? cache.slots_per_page != cache.page_size : cache.slots_per_page < cache.page_size)
            refuse("slots_per_page",
                   std::string("0, or ") + (planar ? "" : "at least ") +
                       "page_size = " + std::to_string(cache.page_size) + (planar ? " for planar records" : ""),
                   std::to_string(cache.slots_per_page));
    }
    if (cache.num_slots() > max_slots)
        refuse("pages", "(pages - 1) * slots_per_page + page_size <= " + std::to_string(max_slots),
               std::to_string(cache.num_slots()));
}

void check_planar_stride(const CacheView& cache, const Refuser& refuse) {
    const std::int64_t page_bytes = cache.page_size * cache.layout().record_bytes;
    const std::int64_t alignment = page_bytes % 16 == 0 ? 16 : 8;
    const std::int64_t stride_bytes = cache.stride_bytes();
    if (stride_bytes < page_bytes || stride_bytes % alignment != 0)
        refuse("page_stride_bytes",
               "0, or a multiple of " + std::to_string(alignment) + " that is at least the " +
                   std::to_string(page_bytes) + " bytes of a page",
               std::to_string(stride_bytes));
    if (cache.pages - 1 > (std::numeric_limits<std::int64_t>::max() - page_bytes) / stride_bytes)
        refuse("page_stride_bytes", "pages that end below 2^63 bytes", std::to_string(stride_bytes));
}

void check_contiguous_stride(const CacheView& cache, const Refuser& refuse) {
    const std::int64_t record_bytes = cache.layout().record_bytes;
    const std::int64_t given = cache.page_stride_bytes;
    if (given == 0) return;
    if (cache.rope != nullptr)
        refuse("page_stride_bytes", "0 where latent and rope are two tensors (pass slots_per_page for a gap)",
               std::to_string(given));
    if (given == cache.slot_step() * record_bytes) return;
    const std::string required =
        "0 or slots_per_page * record_bytes = " + std::to_string(cache.slot_step() * record_bytes) +
        " for contiguous records";
    const bool whole_records = given % record_bytes == 0 && given / record_bytes >= cache.page_size;
    refuse("page_stride_bytes", required,
           std::to_string(given) +
               (whole_records ? " (pass slots_per_page = " + std::to_string(given / record_bytes) + ")" : ""));
}

void check_base(const std::byte* base, std::int64_t bytes, std::string_view field, const Refuser& refuse) {
    const auto address = reinterpret_cast<std::uintptr_t>(base);
    if (base == nullptr) refuse(field, "an address for a cache with pages", "a null pointer");
    if (address % base_alignment_bytes != 0)
        refuse(field, std::to_string(base_alignment_bytes) + "-byte alignment",
               "an address " + std::to_string(address % base_alignment_bytes) + " bytes past it");
    if (static_cast<std::uintptr_t>(bytes) > std::numeric_limits<std::uintptr_t>::max() - address)
        refuse(field, "a cache that ends inside the address space", std::to_string(bytes) + " bytes at the address");
}

void check_memory(const CacheView& cache, const Refuser& refuse) {
    if (cache.rope != nullptr && !cache.layout().may_split)
        refuse("rope", "no second tensor for " + to_string(cache.record), "a pointer");
    if (cache.pages == 0) return;
    check_base(cache.data, cache_bytes(cache), "data", refuse);
    if (cache.rope == nullptr) return;
    check_base(cache.rope, cache.num_slots() * cache.layout().rope.bytes(), "rope", refuse);
    const auto regions = detail::regions_of(cache, "rope");
    if (detail::overlaps(regions[0], regions[1])) refuse("rope", "memory of its own", "memory shared with data");
}

std::string known_layouts() {
    std::vector<std::string> names;
    for (const RecordLayout& layout : record_layouts) names.push_back(to_string(layout.record));
    return "one of " + detail::join(names, ", ", ", ");
}

bool name_is_ambiguous(std::string_view name) {
    int layouts = 0;
    for (const RecordLayout& layout : record_layouts) layouts += layout.name == name ? 1 : 0;
    return layouts > 1;
}

}  // namespace

const RecordLayout& find_layout(std::string_view name, std::int64_t record_bytes) {
    const bool undecided = record_bytes == 0 && name_is_ambiguous(name);
    for (const RecordLayout& layout : record_layouts)
        if (!undecided && layout.name == name && (record_bytes == 0 || layout.record_bytes == record_bytes))
            return layout;
    const std::string bytes = record_bytes == 0 ? "no record_bytes" : "record_bytes " + std::to_string(record_bytes);
    throw Error(ErrorKind::invalid_argument, "record", known_layouts(), "'" + std::string(name) + "' with " + bytes);
}

std::string to_string(Record record) {
    const RecordLayout& layout = layout_of(record);
    return std::string(layout.name) + " (" + std::to_string(layout.record_bytes) + " bytes)";
}

void validate(const CacheView& cache, std::string_view argument) {
    const Refuser refuse(argument);
    check_form(cache, refuse);
    check_slots(cache, refuse);
    if (cache.pages > 1) {  // the stride of fewer pages is never used
        if (cache.form == RecordForm::planar)
            check_planar_stride(cache, refuse);
        else
            check_contiguous_stride(cache, refuse);
    }
    check_memory(cache, refuse);
}

std::int64_t cache_bytes(const CacheView& cache) {
    if (cache.pages == 0) return 0;
    const RecordLayout& layout = cache.layout();
    if (cache.form == RecordForm::planar)
        return (cache.pages - 1) * cache.stride_bytes() + cache.page_size * layout.record_bytes;
    return cache.num_slots() * (cache.rope != nullptr ? layout.main.bytes() : layout.record_bytes);
}

}  // namespace sparsemla
