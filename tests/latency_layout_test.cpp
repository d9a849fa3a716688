// Where the parts of decode_latency's shared memory lie, and which CTA of a cluster merges what.
#include "latency_layout.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace sparsemla {
namespace {

namespace latency = detail::latency;

constexpr detail::StageForm forms[] = {detail::StageForm::codes_576,   detail::StageForm::codes_512,
                                       detail::StageForm::groups_576,  detail::StageForm::groups_512,
                                       detail::StageForm::blocks_rope, detail::StageForm::blocks_512,
                                       detail::StageForm::blocks_576,  detail::StageForm::wide_576};

TEST(LatencyLayout, UnitsCoverTheOutputAndOwnersFollow) {
    for (int splits = 1; splits <= latency::max_splits; ++splits) {
        const int per_cta = latency::units_of_cta(splits);
        EXPECT_GE(splits * per_cta, latency::units) << splits;
        EXPECT_LT((per_cta - 1) * splits, latency::units) << splits << ": fewer would do";
        const std::uint32_t multiplier =
            (65536U + static_cast<std::uint32_t>(per_cta) - 1) / static_cast<std::uint32_t>(per_cta);
        for (int unit = 0; unit < latency::units; ++unit) {
            EXPECT_EQ(static_cast<std::uint32_t>(unit) * multiplier >> 16, static_cast<std::uint32_t>(unit / per_cta))
                << "unit " << unit << " of " << splits << " splits";
            EXPECT_LT(unit / per_cta, splits);
        }
    }
}

void expect_in_order(const latency::SharedShape& shape) {
    const latency::SharedLayout layout = latency::shared_layout(shape);
    EXPECT_LE(latency::small_shared_bytes(shape.heads), layout.weights);
    EXPECT_LT(layout.weights, layout.query);
    EXPECT_LT(layout.query, layout.stages);
    EXPECT_EQ(layout.weights % 1024, 0U);  // 128-byte swizzle
    EXPECT_EQ(layout.query % 256, 0U);     // 32-byte swizzle
    EXPECT_EQ(layout.inbox % 1024, 0U);    // P of other splits: 128-byte swizzle
    EXPECT_EQ(layout.stages % 16, 0U);
    const int quads = shape.splits * latency::units_of_cta(shape.splits) * shape.heads / 8;
    const auto inbox = shape.splits == 1 ? 0 : static_cast<std::size_t>(quads * latency::quad_bytes);
    EXPECT_LE(layout.inbox + inbox, layout.stages) << "the inbox reaches into the records";
    const std::size_t stage = static_cast<std::size_t>(detail::stage_bytes(shape.form));
    EXPECT_EQ(layout.bytes - layout.stages, shape.stages * stage);
    if (!latency::can_exchange_weights(shape.splits)) return;
    EXPECT_LE(shape.splits * shape.heads * latency::chunk_keys * 2, layout.stages - layout.inbox);
    const std::size_t slices = std::size_t(shape.splits - 1) * latency::chunk_keys * latency::slice_pitch(shape.splits);
    latency::SharedShape exchanging = shape;
    exchanging.exchanges_weights = true;
    EXPECT_EQ(latency::shared_layout(exchanging).bytes, std::max(layout.bytes, layout.stages + stage + slices));
}

TEST(LatencyLayout, PartsOfSharedMemoryLieInOrder) {
    for (const int heads : latency::head_tiles)
        for (const detail::StageForm form : forms)
            for (int splits = 1; splits <= latency::max_splits; ++splits)
                for (int stages = 1; stages <= latency::max_stages; ++stages)
                    expect_in_order({heads, form, splits, stages});
}

}  // namespace
}  // namespace sparsemla
