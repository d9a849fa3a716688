// K16, K17, and lists through conversion: global and local, logical and stored positions; widths of lists and tables.
#include <numeric>

#include "sparsemla/indices.h"
#include "tests/step_expect.h"

namespace sparsemla::test {
namespace {

/// The tensors of one conversion, owned.
struct Conversion {
    std::vector<std::int32_t> ids, table, request_of_row, slots, counts;
    std::int64_t rows = 0, width = 0, requests = 0, max_pages = 0;

    Conversion(const std::vector<std::vector<std::int32_t>>& id_rows,
               const std::vector<std::vector<std::int32_t>>& tables)
        : rows(std::ssize(id_rows)),
          width(std::ssize(id_rows[0])),
          requests(std::ssize(tables)),
          max_pages(std::ssize(tables[0])) {
        for (const auto& row : id_rows) ids.insert(ids.end(), row.begin(), row.end());
        for (const auto& request : tables) table.insert(table.end(), request.begin(), request.end());
        request_of_row.assign(static_cast<std::size_t>(rows), 0);
        slots.assign(ids.size(), 12345);
        counts.assign(static_cast<std::size_t>(rows), 12345);
    }
    ConvertArgs args(const CacheView& cache, const Sharding& sharding = {}) {
        return {.token_ids = dense(std::as_const(ids).data(), DType::i32, {rows, width}),
                .block_table = dense(std::as_const(table).data(), DType::i32, {requests, max_pages}),
                .request_of_row = dense(std::as_const(request_of_row).data(), DType::i32, {rows}),
                .cache = cache,
                .sharding = sharding,
                .slots = dense(slots.data(), DType::i32, {rows, width}),
                .counts = dense(counts.data(), DType::i32, {rows})};
    }
};

/// A cache whose histogram is written by token: the record of the token at local position l of a rank has its mark at
/// dimension global_of(l) % 512.
void histogram_by_token(Step& step, const std::vector<std::int32_t>& table, const Sharding& sharding,
                        std::int32_t tokens) {
    const MutableCacheView& cache = step.cache();
    for (std::int32_t token = 0; token < tokens; ++token) {
        if (owner_of(token, sharding.world, sharding.interleave) != sharding.rank) continue;
        const std::int64_t local = local_of(token, sharding.world, sharding.interleave);
        const std::int64_t block = table[static_cast<std::size_t>(local / cache.page_size)];
        const auto slot = static_cast<std::int32_t>(block * cache.slot_step() + local % cache.page_size);
        step.record(slot, [&](int d) { return d == token % value_dims ? Step::mark : 0.0F; });
    }
}

/// A decode of converted lists.
Result run(Step& step, Conversion& conversion, const std::string& kernel, const Sharding& sharding = {}) {
    convert_indices(conversion.args(step.cache(), sharding));
    step.args.sources[0].slots = dense(conversion.slots.data(), DType::i32, {conversion.rows, conversion.width});
    step.args.sources[0].counts = dense(conversion.counts.data(), DType::i32, {conversion.rows});
    return step.run({.kernel = kernel});
}

// ---------------------------------------------------------------------------------------------------------------------
class K16_IndexDomainMixedUp : public EveryRecord {
   protected:
    /// One rank's step for `rows` rows over all of 0 .. tokens - 1.
    Step step_of(std::int64_t rows, std::int64_t width, std::int64_t page_size, std::int64_t pages) const {
        SourceSpec spec{.layout = layout(), .width = width, .pages = pages, .page_size = page_size};
        if (layout().form == RecordForm::contiguous) spec.slots_per_page = page_size * 3 / 2;
        return Step({.rows = rows, .heads = 2, .sources = {spec}, .out_dtype = DType::f32});
    }
};

// B048, B053: pages larger than what a request stores in them: the page arithmetic happens once, in convert.
TEST_P(K16_IndexDomainMixedUp, B048_B053_StridedPages) {
    Step step = step_of(2, 4, 64, 10);
    const std::vector<std::int32_t> table = {5, 0, 9};
    histogram_by_token(step, table, {}, 192);
    Conversion conversion({{0, 63, 64, 130}, {191, 128, 127, 500}}, {table});
    const Result result = run(step, conversion, kernel());
    const auto step_slots = static_cast<std::int32_t>(step.cache().slot_step());
    EXPECT_EQ(conversion.slots, (std::vector<std::int32_t>{5 * step_slots, 5 * step_slots + 63, 0, 9 * step_slots + 2,
                                                           9 * step_slots + 63, 9 * step_slots, 63, -1}));
    expect_histogram(result, 0, {0, 63, 64, 130});
    expect_histogram(result, 1, {191, 128, 127});
}

// B049: every rank reads the local records of its own tokens; over all ranks every token is read exactly once.
TEST_P(K16_IndexDomainMixedUp, B049_EveryTokenOnceOverTheRanks) {
    constexpr std::int32_t tokens = 64;
    for (const std::int64_t world : {1, 2, 4})
        for (const std::int64_t interleave : {1, 4, 16}) {
            std::vector<double> seen(value_dims, 0.0);
            for (std::int64_t rank = 0; rank < world; ++rank) {
                const Sharding sharding{.world = world, .rank = rank, .interleave = interleave};
                const std::vector<std::int32_t> table = {6, 1, 4, 3};
                Step step = step_of(1, tokens, 16, 7);
                histogram_by_token(step, table, sharding, tokens);
                Conversion conversion({slot_range(0, tokens)}, {table});
                const Result result = run(step, conversion, kernel(), sharding);
                ASSERT_EQ(conversion.counts[0], local_length(tokens, sharding));
                for (int d = 0; d < value_dims; ++d)
                    seen[static_cast<std::size_t>(d)] +=
                        double{result.out(0, 0, d)} / Step::mark * conversion.counts[0];
            }
            for (std::size_t d = 0; d < value_dims; ++d)
                ASSERT_NEAR(seen[d], d < tokens ? 1.0 : 0.0, 1e-4 + weight_rounding())
                    << "token " << d << ", world " << world;
        }
}

// B054, B055: the verify rows of one request see one token more each; so do the counts summed over the ranks.
TEST_P(K16_IndexDomainMixedUp, B054_B055_VerifyRows) {
    constexpr std::int64_t world = 4;
    constexpr std::int32_t length = 100;
    constexpr std::int32_t rows = 4;
    std::vector<std::vector<std::int32_t>> visible;
    for (std::int32_t row = 0; row < rows; ++row) {
        visible.push_back(slot_range(0, length - rows + 1 + row));
        visible.back().resize(length, -1);
    }
    std::vector<std::int64_t> totals(rows, 0);
    std::vector<std::vector<int>> owners(rows, std::vector<int>(length, 0));
    for (std::int64_t rank = 0; rank < world; ++rank) {
        const Sharding sharding{.world = world, .rank = rank, .interleave = 1};
        const std::vector<std::int32_t> table = {2, 0};
        Step step = step_of(rows, length, 16, 3);
        histogram_by_token(step, table, sharding, length);
        Conversion conversion(visible, {table});
        const Result result = run(step, conversion, kernel(), sharding);
        for (std::size_t row = 0; row < rows; ++row) {
            totals[row] += conversion.counts[row];
            for (int d = 0; d < length; ++d)
                owners[row][static_cast<std::size_t>(d)] +=
                    result.out(static_cast<std::int64_t>(row), 0, d) != 0 ? 1 : 0;
        }
    }
    for (std::size_t row = 0; row < rows; ++row) {
        const std::int64_t expected = length - rows + 1 + static_cast<std::int64_t>(row);
        EXPECT_EQ(totals[row], expected);
        for (std::int64_t d = 0; d < length; ++d)
            EXPECT_EQ(owners[row][static_cast<std::size_t>(d)], d < expected ? 1 : 0)
                << "row " << row << ", token " << d;
    }
}

// B044: ids that are no tokens leave no column behind, least of all record 0.
TEST_P(K16_IndexDomainMixedUp, B044_InvalidIdsLeaveNoColumn) {
    Step step = step_of(2, 4, 64, 2);
    const std::vector<std::int32_t> table = {1, 0};
    histogram_by_token(step, table, {}, 128);
    step.record(0, [](int) { return e4m3_max; });  // what an id turned into slot 0 would read
    Conversion conversion({{-1, 5, -1, 7}, {-1, -1, INT32_MIN, INT32_MAX}}, {table});
    const Result result = run(step, conversion, kernel());
    EXPECT_EQ(conversion.counts, (std::vector<std::int32_t>{2, 0}));
    expect_histogram(result, 0, {5, 7});
    expect_empty_row(result, 1);
}

INSTANTIATE_TEST_SUITE_P(All, K16_IndexDomainMixedUp, testing::ValuesIn(kernels_and_layouts()), test_name);

// B054, B056: the closed form of a rank's length, over the rows of a verify step.
TEST(K16_IndexDomainMixedUp_LocalLengths, B054_B056_ClosedForm) {
    const auto local = [](std::int64_t length, std::int64_t world, std::int64_t rank, std::int64_t interleave) {
        return local_length(length, {.world = world, .rank = rank, .interleave = interleave});
    };
    for (const std::int64_t rank : {0, 1})
        for (const std::int64_t length : {8, 9, 10})
            EXPECT_EQ(local(length, 2, rank, 1), rank == 1 ? length / 2 : (length + 1) / 2);
    for (std::int64_t world = 1; world <= 8; ++world)
        for (const std::int64_t interleave : {1, 2, 4, 16, 64})
            for (std::int64_t length = 0; length <= 3 * world * interleave + 1;
                 length += interleave > 4 && length > 2 ? interleave - 1 : 1) {
                std::int64_t sum = 0;
                for (std::int64_t rank = 0; rank < world; ++rank) {
                    std::int64_t owned = 0;
                    for (std::int64_t token = 0; token < length; ++token)
                        owned += owner_of(token, world, interleave) == rank ? 1 : 0;
                    ASSERT_EQ(local(length, world, rank, interleave), owned)
                        << "length " << length << ", world " << world << ", interleave " << interleave;
                    sum += owned;
                }
                ASSERT_EQ(sum, length);
            }
}

// ---------------------------------------------------------------------------------------------------------------------
class K17_TableOrBufferWidthOff : public EveryRecord {};

// B041: the first source's width is a parameter; the columns on both sides of it read their own cache.
TEST_P(K17_TableOrBufferWidthOff, B041_FirstWidthIsAParameter) {
    constexpr std::int64_t width = 300;
    for (const std::int64_t first : {0, 1, 64, 127, 128, 129, 256, 300}) {
        Step step({.rows = 2,
                   .heads = 2,
                   .sources = {{.layout = layout(), .width = first},
                               {.layout = layout(), .width = width - first, .count_offset = first}}});
        step.histogram(0);
        step.histogram(1, 256);
        std::vector<std::int32_t> list(2 * width);
        for (std::size_t i = 0; i < list.size(); ++i) list[i] = static_cast<std::int32_t>(i % width % 256);
        const std::vector<std::int32_t> counts = {static_cast<std::int32_t>(first + 1), width};
        const ConstTensor both = dense(std::as_const(list).data(), DType::i32, {2, width});
        for (const std::size_t source : {0, 1}) {
            step.args.sources[source].slots =
                columns(both, source == 0 ? 0 : first, source == 0 ? first : width - first);
            step.args.sources[source].counts = dense(counts.data(), DType::i32, {2});
        }
        const Result result = step.run({.kernel = kernel()});
        for (std::size_t row = 0; row < 2; ++row) {
            std::vector<std::int32_t> read;
            for (std::int64_t column = 0; column < std::min<std::int64_t>(counts[row], width); ++column)
                read.push_back(static_cast<std::int32_t>(column % 256 + (column < first ? 0 : 256)));
            ASSERT_NO_FATAL_FAILURE(expect_histogram(result, static_cast<std::int64_t>(row), read))
                << "first " << first;
        }
    }
}

// B041, B057: a list of another width than planned is refused by name.
TEST_P(K17_TableOrBufferWidthOff, B041_B057_OtherWidthsAreRefused) {
    Step step(
        {.rows = 1,
         .heads = 2,
         .sources = {{.layout = layout(), .width = 128}, {.layout = layout(), .width = 512, .count_offset = 128}}});
    for (const std::size_t source : {0, 1})
        for (const std::int64_t width : {std::int64_t{0}, std::int64_t{127}, std::int64_t{129}, std::int64_t{256}}) {
            const DecodeArgs args = step.args;
            step.args.sources[source].slots.shape[1] = width;
            step.poison_outputs();
            try {
                step.run({.kernel = kernel()});
                FAIL() << "width " << width << " was accepted";
            } catch (const Error& error) {
                EXPECT_EQ(error.argument(), source == 0 ? "slots" : "extra_slots") << error.what();
            }
            EXPECT_TRUE(step.outputs_untouched());
            step.args = args;
        }
}

// B051: lengths around whole pages, times ranks: the last token is found with a table of ceil(length / page) columns.
TEST_P(K17_TableOrBufferWidthOff, B051_LastTokenOfTheLastPage) {
    constexpr std::int64_t page_size = 16;
    for (const std::int64_t world : {1, 3})
        for (const std::int64_t pages : {1, 2, 5})
            for (const std::int64_t around : {-1, 0, 1}) {
                const std::int64_t length = pages * world * page_size + around;
                const Sharding sharding{.world = world, .rank = owner_of(length - 1, world, 1), .interleave = 1};
                const std::int64_t table_width = (local_length(length, sharding) + page_size - 1) / page_size;
                std::vector<std::int32_t> table(static_cast<std::size_t>(table_width));
                std::iota(table.rbegin(), table.rend(), 0);
                Step step(
                    {.rows = 1,
                     .heads = 1,
                     .sources = {{.layout = layout(), .width = 2, .pages = table_width, .page_size = page_size}}});
                histogram_by_token(step, table, sharding, static_cast<std::int32_t>(length));
                const auto last = static_cast<std::int32_t>(length - 1);
                // The next page's first token of this rank lies past the table, and past the length.
                Conversion conversion({{last, static_cast<std::int32_t>(last + page_size * world)}}, {table});
                const Result result = run(step, conversion, kernel(), sharding);
                ASSERT_EQ(conversion.counts[0], 1) << "length " << length << ", world " << world;
                ASSERT_NO_FATAL_FAILURE(expect_histogram(result, 0, {last}));
            }
}

// B057: a table as wide as the global context and one as wide as the local share give the same.
TEST_P(K17_TableOrBufferWidthOff, B057_GlobalAndLocalTableWidth) {
    const Sharding sharding{.world = 2, .rank = 1, .interleave = 4};
    constexpr std::int32_t tokens = 128;
    const std::vector<std::int32_t> local = {3, 0, 2, 1};
    std::vector<std::int32_t> global = local;
    global.resize(8, -1);
    std::vector<Result> results;
    std::vector<std::vector<std::int32_t>> slots;
    for (const auto& table : {local, global}) {
        Step step(
            {.rows = 1, .heads = 1, .sources = {{.layout = layout(), .width = tokens, .pages = 4, .page_size = 16}}});
        histogram_by_token(step, local, sharding, tokens);
        Conversion conversion({slot_range(0, tokens)}, {table});
        results.push_back(run(step, conversion, kernel(), sharding));
        slots.push_back(conversion.slots);
        std::vector<std::int32_t> owned;
        for (std::int32_t token = 0; token < tokens; ++token)
            if (token / 4 % 2 == 1) owned.push_back(token);
        ASSERT_NO_FATAL_FAILURE(expect_histogram(results.back(), 0, owned));
    }
    EXPECT_EQ(slots[0], slots[1]);
    EXPECT_TRUE(same_bits(results[0], 0, results[1], 0));
}

INSTANTIATE_TEST_SUITE_P(All, K17_TableOrBufferWidthOff, testing::ValuesIn(kernels_and_layouts()), test_name);

// ---------------------------------------------------------------------------------------------------------------------
// Faults of lists and tables that conversion must keep from decode.
class K12_K13_K14_ConvertedLists : public EveryKernel {
   protected:
    static Step step_of(std::int64_t rows, std::int64_t width, std::int64_t pages, std::int64_t page_size) {
        return Step({.rows = rows, .heads = 1, .sources = {{.width = width, .pages = pages, .page_size = page_size}}});
    }
};

// B045: ids past the table; the last request's row of the table ends at unmapped memory.
TEST_P(K12_K13_K14_ConvertedLists, B045_IdsPastTheTable) {
    Step step = step_of(1, 5, 4, 64);
    const std::vector<std::int32_t> table = {3, 1, 0, 2};
    histogram_by_token(step, table, {}, 256);
    Fenced fenced(table.size() * 4, 4);
    std::copy(table.begin(), table.end(), fenced.as<std::int32_t>());
    Conversion conversion({{256, 255, 257, INT32_MAX, 0}}, {table});
    ConvertArgs args = conversion.args(step.cache());
    args.block_table = dense(fenced.as<const std::int32_t>(), DType::i32, {1, 4});
    convert_indices(args);
    EXPECT_EQ(conversion.counts[0], 2);
    step.args.sources[0].slots = args.slots;
    step.args.sources[0].counts = args.counts;
    expect_histogram(step.run({.kernel = kernel()}), 0, {255, 0});
}

// B046: unsorted, repeated and invalid ids: order and duplicates stay, the rest goes.
TEST_P(K12_K13_K14_ConvertedLists, B046_DegenerateList) {
    constexpr std::int32_t width = 2048;
    Step step = step_of(1, width, 8, 64);
    const std::vector<std::int32_t> table = {7, 0, 6, 1, 5, 2, 4, 3};
    histogram_by_token(step, table, {}, 512);
    std::vector<std::int32_t> ids, kept;
    for (std::int32_t i = 0; i < width; ++i) {
        const bool invalid = i % 16 < 7;  // scattered
        const std::int32_t bad[] = {-1, -1, INT32_MAX, -1, INT32_MIN, 512, -1};
        ids.push_back(invalid ? bad[i % 16] : i * 331 % 512);
        if (!invalid) kept.push_back(ids.back());
    }
    Conversion conversion({ids}, {table});
    const Result result = run(step, conversion, kernel());
    ASSERT_EQ(conversion.counts[0], std::ssize(kept));
    for (std::size_t i = 0; i < kept.size(); ++i) {
        const auto token = static_cast<std::size_t>(kept[i]);
        ASSERT_EQ(conversion.slots[i], table[token / 64] * 64 + kept[i] % 64) << "column " << i;
    }
    expect_histogram(result, 0, kept);
}

// B052: the table is a row slice and a column slice of a padded allocation.
TEST_P(K12_K13_K14_ConvertedLists, B052_TableCutFromALargerOne) {
    constexpr std::int64_t requests = 3;
    constexpr std::int64_t used = 17;
    constexpr std::int64_t row_stride = 512;
    for (const std::int64_t first : {0, 3}) {
        Step step = step_of(requests, 2, requests * used, 16);
        std::vector<std::int32_t> big(requests * row_stride, 0);
        for (std::int64_t r = 0; r < requests; ++r)
            for (std::int64_t page = 0; page < used; ++page)
                big[static_cast<std::size_t>(r * row_stride + first + page)] =
                    static_cast<std::int32_t>(page * requests + r);
        step.histogram();
        constexpr std::int32_t last = used * 16 - 1;
        Conversion conversion({{last, 0}, {last, 0}, {last, 0}}, {std::vector<std::int32_t>(used)});
        for (std::int32_t r = 0; r < requests; ++r) conversion.request_of_row[static_cast<std::size_t>(r)] = r;
        ConvertArgs args = conversion.args(step.cache());
        args.block_table = columns(dense(std::as_const(big).data(), DType::i32, {requests, row_stride}), first, used);
        convert_indices(args);
        step.args.sources[0].slots = args.slots;
        step.args.sources[0].counts = args.counts;
        const Result result = step.run({.kernel = kernel()});
        for (std::int32_t r = 0; r < requests; ++r)
            expect_histogram(result, r, {static_cast<std::int32_t>((used - 1) * requests + r) * 16 + 15, r * 16});
    }
}

INSTANTIATE_TEST_SUITE_P(All, K12_K13_K14_ConvertedLists, testing::ValuesIn(tested_kernels()), kernel_test_name);

}  // namespace
}  // namespace sparsemla::test
