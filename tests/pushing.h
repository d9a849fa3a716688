// Partial results of every rank, pushed and merged through mailboxes, and what `merge` makes of the same.
#pragma once

#include <bit>
#include <string>
#include <vector>

#include "tests/mailboxes.h"

namespace sparsemla::test {

/// One row and one head more in every buffer than there must be, as in Merging.
struct Pushing {
    Mailboxes boxes;
    std::int64_t rows;
    Merging given;  ///< partial i: what rank i pushes
    std::vector<std::optional<Padded>> counts;
    bool query_gathered = false;
    std::vector<Padded> outs, lses;  ///< of every rank, once run

    Pushing(const DcpShape& shape, std::int64_t rows_, Merging::Options options)
        : boxes(shape),
          rows(rows_),
          given(static_cast<std::size_t>(boxes.world()), rows, boxes.layout().heads, options),
          counts(static_cast<std::size_t>(boxes.world())) {}

    void set_counts(std::size_t rank, const std::vector<std::int32_t>& values) {
        given.set_counts(rank, values);
        counts[rank].emplace(DType::i32, std::vector<std::int64_t>{rows + 1, 1}, given.options.padding);
        for (std::size_t row = 0; row < values.size(); ++row) counts[rank]->at<std::int32_t>(row) = values[row];
    }

    /// What travels: BF16, base 2, one NaN, and -inf where there is nothing.
    Merging travelling() const {
        Merging m(given.outs.size(), rows, given.heads,
                  {.partial_dtype = DType::bf16,
                   .out_dtype = given.options.out_dtype,
                   .partial_base = LseBase::two,
                   .lse_base = given.options.lse_base,
                   .padding = 0});
        for (std::size_t i = 0; i < given.outs.size(); ++i)
            for (std::int64_t row = 0; row < rows; ++row)
                for (std::int64_t head = 0; head < given.heads; ++head) {
                    const bool counted = !counts[i] || counts[i]->at<std::int32_t>(row) > 0;
                    const float lse = given.lses[i].value(row, head);
                    const float factor = given.options.partial_base == LseBase::two ? 1.0F : 1.44269504F;
                    m.lses[i].set(counted ? lse * factor : -infinity, row, head);
                    for (int d = 0; d < value_dims; ++d)
                        m.outs[i].at<std::uint16_t>(row, head, d) = bf16(i, row, head, d);
                }
        if (given.sinks) {
            std::vector<float> sinks;
            for (std::int64_t head = 0; head < given.heads; ++head) sinks.push_back(given.sinks->at<float>(head));
            m.set_sinks(sinks);
        }
        return m;
    }

    /// One exchange without a query.
    void run(const std::string& what) {
        push_all();
        merge_all(what);
        EXPECT_EQ(boxes.not_armed(), "") << what;
    }
    void push_all() {
        std::vector<Placed> inputs;
        inputs.reserve(3 * given.outs.size());
        for (int rank = 0; rank < boxes.world(); ++rank) {
            const auto i = static_cast<std::size_t>(rank);
            PushArgs args{.rows = rows,
                          .out = inputs.emplace_back(given.outs[i]).view(),
                          .lse = inputs.emplace_back(given.lses[i]).view(),
                          .counts = {},
                          .lse_base = given.options.partial_base};
            if (counts[i]) {
                args.counts = inputs.emplace_back(*counts[i]).view();
                args.counts.rank = 1;
            }
            push(boxes[rank], args, boxes.stream());
        }
        boxes.synchronize();
    }
    void merge_all(const std::string& what) {
        outs.clear();
        lses.clear();
        for (int rank = 0; rank < boxes.world(); ++rank) {
            const std::int64_t own = boxes.layout().heads_of(rank), padding = given.options.padding;
            const Padded& out = outs.emplace_back(given.options.out_dtype,
                                                  std::vector<std::int64_t>{rows + 1, own + 1, value_dims}, padding);
            const Padded& lse = lses.emplace_back(DType::f32, std::vector<std::int64_t>{rows + 1, own + 1}, padding,
                                                  given.options.transposed_lse);
            const Placed placed_out(out), placed_lse(lse);
            std::optional<Padded> own_sinks;
            std::optional<Placed> placed_sinks;
            MergePushedArgs args{.rows = rows,
                                 .sinks = {},
                                 .out = placed_out.view(),
                                 .lse = placed_lse.view(),
                                 .lse_base = given.options.lse_base,
                                 .query_gathered = query_gathered};
            if (given.sinks) {
                own_sinks.emplace(DType::f32, std::vector<std::int64_t>{own + 1, 1}, padding);
                for (std::int64_t head = 0; head < own; ++head)
                    own_sinks->at<float>(head) = given.sinks->at<float>(boxes.first_head(rank) + head);
                placed_sinks.emplace(*own_sinks);
                args.sinks = placed_sinks->view();
                args.sinks.rank = 1;
            }
            merge_pushed(boxes[rank], args, boxes.stream());
            boxes.synchronize();
            placed_out.fetch();
            placed_lse.fetch();
            EXPECT_TRUE(out.rest_intact(rows, own)) << what << ": rank " << rank << " wrote beside out";
            EXPECT_TRUE(lse.rest_intact(rows, own)) << what << ": rank " << rank << " wrote beside lse";
        }
    }

    /// Every bit is that of merge over what travels, NaN being NaN.
    void expect_merge(const std::string& what) {
        Merging expected = travelling();
        expected.run(what);
        for (std::int64_t row = 0; row < rows; ++row)
            for (std::int64_t head = 0; head < given.heads; ++head) {
                const auto rank = static_cast<std::size_t>(owner(head));
                const std::int64_t own = head - boxes.first_head(owner(head));
                const std::string where = what + ", row " + std::to_string(row) + ", head " + std::to_string(head);
                ASSERT_TRUE(same(lses[rank].at<float>(row, own), expected.lse.at<float>(row, head)))
                    << where << ": lse " << lses[rank].value(row, own) << ", expected "
                    << expected.lse.value(row, head);
                for (int d = 0; d < value_dims; ++d) {
                    const bool equal =
                        given.options.out_dtype == DType::bf16
                            ? outs[rank].at<std::uint16_t>(row, own, d) == expected.out.at<std::uint16_t>(row, head, d)
                            : same(outs[rank].at<float>(row, own, d), expected.out.at<float>(row, head, d));
                    ASSERT_TRUE(equal) << where << ", dim " << d << ": got " << outs[rank].value(row, own, d)
                                       << ", expected " << expected.out.value(row, head, d);
                }
            }
    }
    void run_and_expect_merge(const std::string& what) {
        run(what);
        expect_merge(what);
    }

    int owner(std::int64_t head) const {
        int rank = 0;
        while (head >= boxes.first_head(rank + 1)) ++rank;
        return rank;
    }
    /// The merged result of a head of all, wherever it lies.
    float out(std::int64_t row, std::int64_t head, int d = 0) const {
        return outs[static_cast<std::size_t>(owner(head))].value(row, head - boxes.first_head(owner(head)), d);
    }
    float lse(std::int64_t row, std::int64_t head) const {
        return lses[static_cast<std::size_t>(owner(head))].value(row, head - boxes.first_head(owner(head)));
    }

    /// The BF16 that rank i's value becomes.
    std::uint16_t bf16(std::size_t i, std::int64_t row, std::int64_t head, int d) const {
        if (given.options.partial_dtype == DType::f32) return float_to_bf16(given.outs[i].at<float>(row, head, d));
        const std::uint16_t bits = given.outs[i].at<std::uint16_t>(row, head, d);
        return (bits & 0x7FFF) > 0x7F80 ? std::uint16_t{0x7FFF} : bits;
    }
    static bool same(float a, float b) {
        return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) || (std::isnan(a) && std::isnan(b));
    }
};

}  // namespace sparsemla::test
