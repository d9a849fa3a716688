#include "harness/gpu_mirror.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

namespace sparsemla::harness {
namespace {

constexpr std::size_t whole_limit_bytes = std::size_t{256} << 20;
constexpr std::size_t staging_bytes = std::size_t{16} << 20;
constexpr std::size_t plain_alignment_bytes = 256;   // of cudaMalloc
constexpr std::size_t guarded_alignment_bytes = 16;  // what a kernel may ask for: more would keep the guard away
constexpr int gap_byte = 0xFF;                       // NaN, for what a kernel should not look at

std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

std::size_t extent(const ConstTensor& tensor, int dimension) {
    return dimension < tensor.rank ? static_cast<std::size_t>(tensor.shape[static_cast<std::size_t>(dimension)]) : 1;
}

std::size_t stride_bytes(const ConstTensor& tensor, int dimension) {
    if (extent(tensor, dimension) <= 1) return 0;  // the stride of one element is never looked at
    return static_cast<std::size_t>(tensor.strides[static_cast<std::size_t>(dimension)] * size_bytes(tensor.dtype));
}

/// The elements as runs along a dense last dimension.
std::vector<ByteRange> elements_of(const ConstTensor& tensor) {
    const auto element = static_cast<std::size_t>(size_bytes(tensor.dtype));
    const int last = tensor.rank - 1;
    const bool dense_last = stride_bytes(tensor, last) == element;
    std::vector<ByteRange> runs = {{0, dense_last ? extent(tensor, last) * element : element}};
    for (int i = dense_last ? last - 1 : last; i >= 0; --i) {
        const std::size_t inner = runs.size();
        for (std::size_t at = 1; at < extent(tensor, i); ++at)
            for (std::size_t run = 0; run < inner; ++run)
                runs.push_back({runs[run].begin + at * stride_bytes(tensor, i), runs[run].bytes});
    }
    return runs;
}

void append(std::vector<ByteRange>& ranges, const std::byte* base, const std::byte* at, std::size_t bytes) {
    if (bytes != 0) ranges.push_back({static_cast<std::size_t>(at - base), bytes});
}

/// visit(offset, bytes) for pieces of the ranges that fit the staging memory.
template <class Visit>
void for_each_piece(const std::vector<ByteRange>& ranges, const Visit& visit) {
    for (const ByteRange& range : ranges)
        for (std::size_t done = 0; done < range.bytes; done += staging_bytes)
            visit(range.begin + done, std::min(staging_bytes, range.bytes - done));
}

}  // namespace

MirrorPart part_of(const ConstTensor& tensor, std::string name, GpuPlacement placement, bool output) {
    MirrorPart part{.name = std::move(name),
                    .begin = static_cast<const std::byte*>(tensor.data),
                    .output = output,
                    .placement = placement};
    if (!tensor.present() || tensor.elements() == 0) return part;
    part.bytes = static_cast<std::size_t>(size_bytes(tensor.dtype));
    for (int i = 0; i < tensor.rank; ++i) part.bytes += (extent(tensor, i) - 1) * stride_bytes(tensor, i);
    if (part.bytes > whole_limit_bytes) part.elements = elements_of(tensor);
    return part;
}

std::vector<MirrorPart> parts_of(const CacheView& cache, const std::string& name, GpuPlacement placement,
                                 const std::vector<std::int32_t>* slots, int fill_byte) {
    if (cache.pages == 0) return {};
    const RecordLayout& layout = cache.layout();
    MirrorPart data{.name = name,
                    .begin = cache.data,
                    .bytes = static_cast<std::size_t>(cache_bytes(cache)),
                    .placement = placement};
    MirrorPart rope{.name = name + " (rope)", .begin = cache.rope, .placement = placement};
    if (cache.rope != nullptr) rope.bytes = static_cast<std::size_t>(cache.num_slots() * layout.rope.bytes());
    if (slots != nullptr) {
        data.sparse_fill = rope.sparse_fill = fill_byte;
        for (const std::int32_t slot : *slots) {
            const RecordPointers at = locate(cache, slot);
            const bool planar = cache.form == RecordForm::planar;
            append(data.elements, cache.data, at.data,
                   static_cast<std::size_t>(cache.rope != nullptr ? layout.main.bytes()
                                            : planar              ? layout.data_bytes
                                                                  : layout.record_bytes));
            if (planar) append(data.elements, cache.data, at.scales, static_cast<std::size_t>(layout.scale_bytes));
            if (cache.rope != nullptr)
                append(rope.elements, cache.rope, at.rope, static_cast<std::size_t>(layout.rope.bytes()));
        }
    }
    std::vector<MirrorPart> parts = {std::move(data)};
    if (cache.rope != nullptr) parts.push_back(std::move(rope));
    return parts;
}

MirrorBlock::MirrorBlock(Device device, std::vector<MirrorPart> parts)
    : parts_(std::move(parts)), begin_(parts_.front().begin) {
    GpuBufferOptions options;
    std::optional<int> fill;
    bool all_have_elements = true;
    for (const MirrorPart& part : parts_) {
        bytes_ = std::max(bytes_, static_cast<std::size_t>(part.begin - begin_) + part.bytes);
        output_ = output_ || part.output;
        options.placement = std::max(options.placement, part.placement);
        if (part.sparse_fill) fill = part.sparse_fill;
        all_have_elements = all_have_elements && !part.elements.empty();
        for (const ByteRange& range : part.elements)
            copied_.push_back({static_cast<std::size_t>(part.begin - begin_) + range.begin, range.bytes});
    }
    const bool sparse = fill.has_value() && parts_.size() == 1;
    const bool elements_only = sparse || (bytes_ > whole_limit_bytes && all_have_elements);
    if (!elements_only) copied_ = {{0, bytes_}};
    if (sparse && options.placement == GpuPlacement::plain) options.placement = GpuPlacement::against_end;
    options.alignment_bytes =
        options.placement == GpuPlacement::plain ? plain_alignment_bytes : guarded_alignment_bytes;
    lead_ = address(begin_) % options.alignment_bytes;
    if (sparse) {
        options.backed = copied_;
        options.backed.push_back({0, 1});
        options.backed.push_back({bytes_ - 1, 1});
        for (ByteRange& range : options.backed) range.begin += lead_;
    }
    buffer_ = GpuBuffer(device, lead_ + bytes_, options);
    if (elements_only) buffer_.fill(fill.value_or(gap_byte));
    upload();
}

std::byte* MirrorBlock::image_of(const void* pointer) const {
    const std::uintptr_t offset = address(pointer) - address(begin_);  // wraps for one before
    return offset < bytes_ ? buffer_.data() + lead_ + offset : nullptr;
}

void MirrorBlock::upload() {
    for (const ByteRange& range : copied_) buffer_.upload(begin_ + range.begin, range.bytes, lead_ + range.begin);
}

void MirrorBlock::download() const {
    for (const ByteRange& range : copied_)
        buffer_.download(const_cast<std::byte*>(begin_) + range.begin, range.bytes, lead_ + range.begin);
}

std::string MirrorBlock::part_at(std::size_t offset) const {
    for (const MirrorPart& part : parts_)
        if (static_cast<std::size_t>(begin_ + offset - part.begin) < part.bytes) return part.name;
    return parts_.front().name;
}

std::string MirrorBlock::difference() const {
    std::vector<std::byte> staging(std::min(staging_bytes, bytes_));
    std::string name;
    for_each_piece(copied_, [&](std::size_t offset, std::size_t bytes) {
        if (!name.empty()) return;
        buffer_.download(staging.data(), bytes, lead_ + offset);
        const auto [host, image] = std::mismatch(begin_ + offset, begin_ + offset + bytes, staging.begin());
        if (host != begin_ + offset + bytes) name = part_at(static_cast<std::size_t>(host - begin_));
    });
    return name;
}

std::vector<MirrorBlock> mirror(Device device, std::vector<MirrorPart> parts) {
    std::erase_if(parts, [](const MirrorPart& part) { return part.bytes == 0; });
    std::stable_sort(parts.begin(), parts.end(),
                     [](const MirrorPart& a, const MirrorPart& b) { return std::less<>()(a.begin, b.begin); });
    std::vector<MirrorBlock> blocks;
    std::vector<MirrorPart> chain;
    const std::byte* end = nullptr;
    for (MirrorPart& part : parts) {
        if (!chain.empty() && !std::less<>()(part.begin, end)) blocks.emplace_back(device, std::exchange(chain, {}));
        const std::byte* part_end = part.begin + part.bytes;
        end = chain.empty() ? part_end : std::max(end, part_end, std::less<>());
        chain.push_back(std::move(part));
    }
    if (!chain.empty()) blocks.emplace_back(device, std::move(chain));
    return blocks;
}

}  // namespace sparsemla::harness
