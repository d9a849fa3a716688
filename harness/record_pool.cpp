#include "harness/record_pool.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "harness/gpu_probes.h"

namespace sparsemla::harness {
namespace {

constexpr std::int64_t page_size = 64;
constexpr std::size_t generated_bytes = std::size_t{64} << 20;
constexpr std::int64_t packed_records = 16384;  ///< they take longer

std::vector<std::byte> codes(const RecordLayout& layout, std::size_t bytes) {
    std::vector<std::byte> generated(std::min(bytes, generated_bytes));
    fill_with_e4m3(generated, Random(1, {layout.record_bytes}));
    return generated;
}

/// Pages of normally distributed values.
std::vector<std::byte> packed(const RecordLayout& layout, std::int64_t records) {
    const std::int64_t count = std::min(records, packed_records);
    MutableCacheView cache{
        .record = layout.record, .form = layout.default_form(), .pages = count / page_size, .page_size = page_size};
    std::vector<std::byte> generated(static_cast<std::size_t>(count * layout.record_bytes));
    cache.data = generated.data();
    std::vector<float> values(static_cast<std::size_t>(page_size * layout.d_qk()));
    std::vector<std::int32_t> slots(static_cast<std::size_t>(page_size));
    Random random(1, {layout.record_bytes});
    for (std::int64_t first = 0; first < count; first += page_size) {
        for (float& value : values) value = static_cast<float>(random.normal());
        std::iota(slots.begin(), slots.end(), static_cast<std::int32_t>(first));
        pack(cache, dense(values.data(), DType::f32, {page_size, layout.d_qk()}),
             dense(slots.data(), DType::i32, {page_size}));
    }
    return generated;
}

}  // namespace

void fill_with_e4m3(std::span<std::byte> bytes, Random random) {
    constexpr std::uint64_t magnitudes = 0x41;  // codes 0x00 (0) .. 0x40 (2)
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i, bits >>= 16) {
        if (i % 4 == 0) bits = random.next();
        const std::uint64_t magnitude = ((bits & 0xFFFF) * magnitudes) >> 16;
        bytes[i] = static_cast<std::byte>(magnitude | ((bits & 1) << 7));
    }
}

RecordPool::RecordPool(Device device, Record record, std::int64_t records)
    : device_(device), record_(record), order_(static_cast<std::size_t>(records)) {
    const RecordLayout& layout = layout_of(record);
    if (records < page_size || records % page_size != 0)
        throw Error(ErrorKind::invalid_argument, "record pool", "whole pages of records",
                    std::to_string(records) + " records of " + to_string(record));
    const auto bytes = static_cast<std::size_t>(records * layout.record_bytes);
    buffer_ = GpuBuffer(device, bytes);
    const std::vector<std::byte> generated = layout.takes_k_scale ? codes(layout, bytes) : packed(layout, records);
    buffer_.upload(generated.data(), generated.size());
    const GpuStream stream(device);
    for (std::size_t at = generated.size(); at < bytes; at += generated.size())
        copy_on(device, stream.stream(), buffer_.data() + at, buffer_.data(), std::min(generated.size(), bytes - at));
    stream.synchronize();

    std::iota(order_.begin(), order_.end(), 0);
    Random random(2, {layout.record_bytes});
    for (std::size_t i = order_.size(); i > 1; --i)
        std::swap(order_[i - 1], order_[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
}

CacheView RecordPool::cache() const {
    return {.record = record_,
            .form = layout_of(record_).default_form(),
            .data = buffer_.data(),
            .pages = static_cast<std::int64_t>(order_.size()) / page_size,
            .page_size = page_size,
            .device = device_};
}

void RecordPool::take(std::span<std::int32_t> slots) {
    for (std::int32_t& slot : slots) {
        slot = order_[next_];
        next_ = next_ + 1 == order_.size() ? 0 : next_ + 1;
    }
}

}  // namespace sparsemla::harness
