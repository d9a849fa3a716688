// Faults that the tolerance is there to find: none passes, in whatever format P is.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "harness/oracle.h"
#include "harness/tolerance.h"
#include "tests/tolerance_subject.h"

namespace sparsemla::harness {
namespace {

void expect_fail_in_all_formats(const Subject& subject, const CaseStep& faulty, const char* fault) {
    for (const PFormat format : all_formats) {
        const Verdict verdict = subject.judge_as(faulty, format);
        EXPECT_FALSE(verdict.pass) << fault << " passes with p_" << name(format);
        EXPECT_FALSE(verdict.problem.empty());
    }
}

/// The column of row 0 with the largest weight in head 0: the result without it differs most.
std::size_t heaviest_column(const Subject& subject, Case& file) {
    auto* slots = reinterpret_cast<std::int32_t*>(file.tensors.at("slots").bytes.get());
    std::size_t heaviest = 0;
    double largest = -1;
    for (std::size_t c = 0; c < static_cast<std::size_t>(subject.oracle.width); ++c) {
        const std::int32_t slot = std::exchange(slots[c], -1);
        CaseStep step = case_step(file);
        step.heads = 1;
        step.rows = 1;
        step.query.shape[1] = 1;
        const double change = std::fabs(compute_oracle(step).lse[0] - subject.oracle.lse[0]);
        slots[c] = slot;
        if (change > largest) {
            largest = change;
            heaviest = c;
        }
    }
    return heaviest;
}

TEST(ToleranceFault, OneKeyDropped) {
    Recipe recipe = plain_recipe();
    recipe.sources[0].width = 65;
    Subject subject(recipe);
    const std::size_t column = heaviest_column(subject, subject.file);
    subject.data<std::int32_t>("slots")[column] = -1;
    expect_fail_in_all_formats(subject, subject.step(), "a dropped key");
}

TEST(ToleranceFault, TwoHeadsSwapped) {
    const Subject subject(plain_recipe());
    for (const PFormat format : all_formats) {
        Result result(subject.oracle);
        for (std::int64_t d = 0; d < value_dims; ++d) std::swap(result.at(1, 2, d), result.at(1, 3, d));
        const Verdict verdict = judge(subject.oracle, result, accuracy_for(format));
        EXPECT_FALSE(verdict.pass);
        EXPECT_EQ(verdict.row, 1);
        EXPECT_TRUE(verdict.head == 2 || verdict.head == 3) << verdict.head;
    }
}

TEST(ToleranceFault, LseInTheOtherBase) {
    const Subject subject(plain_recipe());
    Result result(subject.oracle);
    for (double& lse : result.lse) lse *= 1.4426950408889634;
    for (const PFormat format : all_formats) {
        const Verdict verdict = judge(subject.oracle, result, accuracy_for(format));
        EXPECT_FALSE(verdict.pass);
        EXPECT_NE(verdict.problem.find("lse"), std::string::npos) << verdict.problem;
    }
}

TEST(ToleranceFault, LseWithTheSink) {
    Recipe recipe = plain_recipe();
    recipe.sinks = true;
    const Subject subject(recipe);
    const float* sinks = static_cast<const float*>(subject.step().sinks.data);
    Result result(subject.oracle);
    for (std::size_t cell = 0; cell < result.lse.size(); ++cell)
        result.lse[cell] = std::log(std::exp(result.lse[cell]) +
                                    std::exp(double{sinks[cell % static_cast<std::size_t>(recipe.heads)]}));
    for (const PFormat format : all_formats) EXPECT_FALSE(judge(subject.oracle, result, accuracy_for(format)).pass);
}

TEST(ToleranceFault, ExponentWithoutLog2E) {
    const Subject subject(plain_recipe());
    CaseStep faulty = subject.step();
    faulty.softmax_scale *= 0.6931472F;
    expect_fail_in_all_formats(subject, faulty, "2^s in place of e^s");
}

TEST(ToleranceFault, SinkTwiceOrNever) {
    Recipe recipe = plain_recipe();
    recipe.sinks = true;
    const Subject subject(recipe);
    CaseStep faulty = subject.step();
    std::vector<float> doubled(static_cast<const float*>(faulty.sinks.data),
                               static_cast<const float*>(faulty.sinks.data) + recipe.heads);
    for (float& sink : doubled) sink += 0.6931472F;
    faulty.sinks = dense(std::as_const(doubled).data(), DType::f32, {recipe.heads});
    expect_fail_in_all_formats(subject, faulty, "a sink applied twice");
    faulty.sinks = {};
    expect_fail_in_all_formats(subject, faulty, "a sink left out");
}

TEST(ToleranceFault, ShiftedByOneSlot) {
    Subject subject(plain_recipe());
    const std::int64_t num_slots = subject.step().sources[0].cache.num_slots();
    auto* slots = subject.data<std::int32_t>("slots");
    // To the next slot that holds a record: one that nobody names would give NaN, which is easier to see.
    const std::vector<std::int32_t> named(slots, slots + 2 * subject.oracle.width);
    for (std::size_t i = 0; i < named.size(); ++i) do
            slots[i] = static_cast<std::int32_t>((slots[i] + 1) % num_slots);
        while (std::find(named.begin(), named.end(), slots[i]) == named.end());
    expect_fail_in_all_formats(subject, subject.step(), "the neighbouring slot");
}

TEST(ToleranceFault, ScaleOfTheNeighbouringGroup) {
    for (const Record record : {Record::fp8_ds_mla, Record::nvfp4_ds_mla}) {
        Recipe recipe = plain_recipe();
        recipe.sources[0].record = record;
        Subject subject(recipe);
        const RecordLayout& layout = layout_of(record);
        auto* bytes = subject.data<std::uint8_t>("cache");
        const std::int64_t num_slots = subject.step().sources[0].cache.num_slots();
        for (std::int64_t slot = 0; slot < num_slots; ++slot) {
            std::uint8_t* scales = bytes + slot * layout.record_bytes + layout.scale_offset_bytes;
            std::rotate(scales, scales + layout.scale_size(), scales + layout.groups() * layout.scale_size());
        }
        expect_fail_in_all_formats(subject, subject.step(), "the neighbouring group's scale");
    }
}

TEST(ToleranceFault, ScaleLeftOutOfTheValues) {
    Recipe recipe = plain_recipe();
    recipe.sources[0].record = Record::fp8_576;
    const Subject subject(recipe);
    const float k_scale = subject.step().sources[0].k_scale;
    ASSERT_GT(std::fabs(k_scale - 1), 0.1F);
    Result result(subject.oracle);
    for (double& value : result.out) value /= double{k_scale};
    for (const PFormat format : all_formats) EXPECT_FALSE(judge(subject.oracle, result, accuracy_for(format)).pass);
}

TEST(ToleranceFault, EverythingOnePercentLarger) {
    const Subject subject(plain_recipe());
    Result result(subject.oracle);
    for (double& value : result.out) value *= 1.01;
    for (const PFormat format : {PFormat::f16, PFormat::f64})
        EXPECT_FALSE(judge(subject.oracle, result, accuracy_for(format)).pass);
}

}  // namespace
}  // namespace sparsemla::harness
