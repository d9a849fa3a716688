// What the kernels that share a batch's chunks out over the SMs are tested with: grids of any number of CTAs.
#pragma once

#include "tests/cuda/gpu_calls.h"

namespace sparsemla::test {

/// As if the device had so many SMs: the grid has at most as many CTAs.
inline Plan plan_on_grid(const Step& step, const std::string& kernel, int sms, PlanOptions options) {
    DeviceSpec device = step.device;
    device.sms = sms;
    options.kernel = kernel;
    return make_plan(step.problem, device, options);
}

inline Result run(Step& step, const Plan& plan, DeviceCall& call) {
    prepare(plan, call.args.state, call.stream());
    step.poison_outputs();
    call.decode(plan);
    return step.collect(plan);
}

template <class T, std::size_t n>
T pick(const T (&values)[n], std::mt19937_64& bits) {
    return values[bits() % n];
}

/// Fewer rows than the plan's have the same bits, and rows without columns are right: the state is as it was after
/// every call.
inline void expect_fewer_and_empty_rows(const std::string& kernel) {
    Step step = random_step({.rows = 40, .heads = 20, .widths = {300}}, 5);
    const Plan plan = plan_on_grid(step, kernel, 132, {.splits = 2});
    DeviceCall call = step.place(plan);
    const Result all = run(step, plan, call);
    expect_oracle(step, all);
    for (const std::int64_t rows : {39, 7, 1}) {
        step.args.rows = call.args.rows = rows;
        step.poison_outputs();
        call.decode(plan);
        const Result fewer = step.collect(plan);
        for (std::int64_t row = 0; row < rows; ++row)
            for (std::int64_t head = 0; head < 20; ++head) {
                ASSERT_EQ(fewer.lse(row, head), all.lse(row, head)) << rows << " rows, row " << row;
                for (int d = 0; d < value_dims; ++d)
                    ASSERT_EQ(fewer.out(row, head, d), all.out(row, head, d)) << rows << " rows, row " << row;
            }
    }
    for (std::int64_t row = 0; row < 40; ++row) step.count(row, 0);
    step.args.rows = call.args.rows = 40;
    refresh(changing_inputs(step, call.args));
    step.poison_outputs();
    call.upload_outputs();
    decode(plan, call.args, call.stream());
    call.download_outputs();
    expect_oracle(step, step.collect(plan));
}

}  // namespace sparsemla::test
