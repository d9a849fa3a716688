// Exchanges of ranks as tests build them: generated steps, windows of their rows, and what every exchange must give.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "harness/dcp_group.h"
#include "harness/dcp_windows.h"
#include "harness/generate.h"
#include "harness/tolerance.h"
#include "tests/device.h"

namespace sparsemla::test {

struct DcpSpec {
    std::int64_t rows = 6;
    std::vector<std::int64_t> head_offset{0, 3, 5};
    std::int64_t interleave = 1;
    std::int64_t width = 40;
    Record record = Record::fp8_576;
    DType query_dtype = DType::f8_e4m3;
    bool sinks = false;
    bool second_source = false;
    bool by_calls = false;
    bool bf16_query = false;
    LseBase lse_base = LseBase::natural;
    DType out_dtype = DType::bf16;
    PlanOptions plan{};
    std::uint64_t seed = 1;
};

inline DeviceSpec dcp_device() {
    DeviceSpec device = tested_device();
    if (!on_gpu()) device.threads = 1;  // ranks are threads
    return device;
}

/// A step and the ranks that share it. Its counts are ragged, so that ranks own nothing of some rows.
class DcpStep {
   public:
    explicit DcpStep(const DcpSpec& spec) : case_(harness::generate(recipe(spec))), step_(case_step(case_)) {
        harness::DcpGroupOptions options{.sharing = {.interleave = spec.interleave, .head_offset = spec.head_offset},
                                         .device = dcp_device(),
                                         .plan = spec.plan,
                                         .by_calls = spec.by_calls,
                                         .bf16_query = spec.bf16_query,
                                         .lse_base = spec.lse_base,
                                         .out_dtype = spec.out_dtype};
        group_ = std::make_unique<harness::DcpGroup>(step_, options);
        lse_base_ = spec.lse_base;
        text_ = "seed " + std::to_string(spec.seed) + ", " + std::to_string(group_->world()) + " ranks, interleave " +
                std::to_string(spec.interleave) + ", " + to_string(spec.record) + ", " +
                to_string(group_->plan().schedule);
    }

    harness::DcpGroup& group() { return *group_; }
    const CaseStep& step() const { return step_; }
    const std::string& text() const { return text_; }

    std::vector<harness::DcpWindow> windows(int count, std::uint64_t seed = 7) const {
        return harness::dcp_windows(step_.rows, count, seed);
    }

    void expect_run(int exchanges, std::uint64_t seed = 7) {
        EXPECT_EQ(group_->run(windows(exchanges, seed)), "") << text_;
    }

    /// One exchange of all rows against the float64 oracle, within the bound of numerics.md for DCP.
    void expect_oracle() {
        const harness::DcpWindow all{0, step_.rows};
        ASSERT_EQ(group_->run({&all, 1}), "") << text_;
        const harness::DcpExpectation results = group_->results(all);
        const harness::Oracle oracle = harness::dcp_oracle(step_, group_->shards());
        const harness::Verdict verdict = harness::compare(oracle, results.out.view(), results.lse.view(), lse_base_,
                                                          harness::accuracy_of(group_->plan().schedule), false);
        EXPECT_TRUE(verdict.pass) << text_ << ": " << verdict.problem;
    }

   private:
    static harness::Recipe recipe(const DcpSpec& spec) {
        const RecordForm form = layout_of(spec.record).default_form();
        harness::Recipe recipe;
        recipe.rows = spec.rows;
        recipe.heads = spec.head_offset.back();
        recipe.query_dtype = spec.query_dtype;
        recipe.sources = {{.record = spec.record, .form = form, .width = spec.width}};
        recipe.counts = harness::CountsRecipe::ragged;
        recipe.sinks = spec.sinks;
        recipe.seed = spec.seed;
        recipe.expected = false;
        if (spec.second_source)
            recipe.sources.push_back({.record = spec.record, .form = form, .width = spec.width / 2});
        return recipe;
    }

    Case case_;
    CaseStep step_;
    std::unique_ptr<harness::DcpGroup> group_;
    LseBase lse_base_;
    std::string text_;
};

inline std::vector<std::int64_t> equal_heads(int world, std::int64_t heads) {
    std::vector<std::int64_t> offset;
    for (int rank = 0; rank <= world; ++rank) offset.push_back(rank * heads);
    return offset;
}

/// SPARSEMLA_DCP_STEPS, or otherwise `few`.
inline int wanted_exchanges(int few) {
    return std::max(1, std::atoi(environment("SPARSEMLA_DCP_STEPS", std::to_string(few).c_str()).c_str()));
}

}  // namespace sparsemla::test
