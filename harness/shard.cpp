#include "harness/shard.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

namespace sparsemla::harness {
namespace {

constexpr std::int64_t page_size = 64;

void copy_record(const CacheView& from, std::int64_t slot, const MutableCacheView& to, std::int64_t local) {
    const RecordLayout& layout = from.layout();
    const auto a = locate(from, slot);
    const auto b = locate(to, local);
    std::memcpy(b.data, a.data, static_cast<std::size_t>(layout.main.bytes()));
    if (layout.rope.dims != 0) std::memcpy(b.rope, a.rope, static_cast<std::size_t>(layout.rope.bytes()));
    if (a.scales != nullptr)
        std::memcpy(b.scales, a.scales, static_cast<std::size_t>(layout.groups() * layout.scale_size()));
}

OwnedTensor filled(DType dtype, std::vector<std::int64_t> shape, int byte) {
    OwnedTensor tensor = make_owned(dtype, std::move(shape));
    if (tensor.size_bytes != 0) std::memset(tensor.bytes.get(), byte, tensor.size_bytes);
    return tensor;
}

std::int64_t active_width(const CaseSource& source, std::int64_t row) {
    const std::int64_t width = source.slots.shape[1];
    if (!source.counts.present()) return width;
    const std::int64_t count = static_cast<const std::int32_t*>(source.counts.data)[row * source.counts.strides[0]];
    return std::clamp<std::int64_t>(count - source.count_offset, 0, width);
}

Shard::Source shard_of(const CaseSource& whole, std::int64_t rows, const Sharding& sharding) {
    const std::int64_t width = whole.slots.shape[1];
    Shard::Source source{.cache = {},
                         .rope = {},
                         .slots = filled(DType::i32, {rows, width}, 0xFF),
                         .counts = make_owned(DType::i32, {rows}),
                         .view = {.record = whole.cache.record, .form = whole.cache.form, .page_size = page_size},
                         .k_scale = whole.k_scale};
    const std::int64_t records = local_length(whole.cache.num_slots(), sharding);
    source.view.pages = (records + page_size - 1) / page_size;
    const RecordLayout& layout = source.view.layout();
    const std::int64_t slots = source.view.num_slots();
    if (whole.cache.rope != nullptr) {
        source.cache = filled(DType::u8, {slots * layout.main.bytes()}, 0xFF);
        source.rope = filled(DType::u8, {slots * layout.rope.bytes()}, 0xFF);
        source.view.rope = source.rope.bytes.get();
    } else {
        source.cache = filled(DType::u8, {cache_bytes(source.view)}, 0xFF);
    }
    source.view.data = source.cache.bytes.get();

    for (std::int64_t row = 0; row < rows; ++row) {
        const auto* list = static_cast<const std::int32_t*>(whole.slots.data) + row * whole.slots.strides[0];
        auto* kept = reinterpret_cast<std::int32_t*>(source.slots.bytes.get()) + row * width;
        std::int32_t count = 0;
        for (std::int64_t column = 0; column < active_width(whole, row); ++column) {
            const std::int64_t slot = list[column];
            if (!whole.cache.holds(slot) || owner_of(slot, sharding.world, sharding.interleave) != sharding.rank)
                continue;
            const std::int64_t local = local_of(slot, sharding.world, sharding.interleave);
            copy_record(whole.cache, slot, source.view, local);
            kept[count++] = static_cast<std::int32_t>(local);
        }
        reinterpret_cast<std::int32_t*>(source.counts.bytes.get())[row] = count;
    }
    return source;
}

}  // namespace

std::vector<std::int64_t> share_heads(std::int64_t heads, int world) {
    if (world < 1 || world > max_ranks || heads < world)
        throw Error(ErrorKind::invalid_argument, "ranks",
                    "1 .. " + std::to_string(std::min<std::int64_t>(heads, max_ranks)) + ", a head for each",
                    std::to_string(world));
    std::vector<std::int64_t> offset{0};
    for (int rank = 0; rank < world; ++rank) offset.push_back(offset.back() + heads / world + (rank < heads % world));
    return offset;
}

CaseStep Shard::step(const CaseStep& whole) const {
    CaseStep step = whole;
    step.sinks = {};
    step.sources.clear();
    for (const Source& source : sources)
        step.sources.push_back({.cache = source.view,
                                .slots = source.slots.view(),
                                .counts = source.counts.view(),
                                .k_scale = source.k_scale});
    return step;
}

std::vector<Shard> shard(const CaseStep& whole, const Sharing& sharing) {
    std::vector<Shard> shards;
    for (int rank = 0; rank < sharing.world(); ++rank) {
        Shard& part = shards.emplace_back();
        for (const CaseSource& source : whole.sources)
            part.sources.push_back(shard_of(
                source, whole.rows, {.world = sharing.world(), .rank = rank, .interleave = sharing.interleave}));
    }
    return shards;
}

Oracle dcp_oracle(const CaseStep& whole, const std::vector<Shard>& shards) {
    Oracle oracle = compute_oracle(whole);
    oracle.pushed_abs.assign(oracle.out.size(), 0);
    const auto* sinks = static_cast<const float*>(whole.sinks.data);
    for (const Shard& part : shards) {
        const Oracle of_rank = compute_oracle(part.step(whole));
        for (std::size_t cell = 0; cell < oracle.lse.size(); ++cell) {
            if (std::isinf(of_rank.lse[cell])) continue;
            double weight = std::exp(of_rank.lse[cell] - oracle.lse[cell]);
            if (whole.sinks.present()) {
                const auto head = static_cast<std::int64_t>(cell) % whole.heads;
                weight /= 1 + std::exp(sinks[head * whole.sinks.strides[0]] - oracle.lse[cell]);
            }
            for (std::size_t i = cell * value_dims; i < (cell + 1) * value_dims; ++i)
                oracle.pushed_abs[i] += weight * std::fabs(of_rank.out[i]);
        }
    }
    return oracle;
}

}  // namespace sparsemla::harness
