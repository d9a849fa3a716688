#include "tools/check_run.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "harness/devices.h"
#include "harness/oracle.h"
#include "tools/expectation.h"
#include "tools/run.h"

namespace sparsemla::tool {
namespace {

/// Plans of every kernel of the devices that takes the problem, in each P format that was asked for; the reasons of the
/// others that belong to these devices.
struct Candidates {
    std::vector<Plan> plans;
    std::vector<Refusal> declined;
};

void add_plans(Candidates& candidates, const Problem& problem, const DeviceSpec& device, const PlanOptions& options,
               bool every_p_format) {
    if (const std::optional<std::string> reason = refusal(problem, device, options)) {
        candidates.declined.push_back({options.kernel, *reason});
        return;
    }
    if (!every_p_format) {
        candidates.plans.push_back(make_plan(problem, device, options));
        return;
    }
    const std::size_t before = candidates.plans.size();
    for (const PFormat format : {PFormat::e4m3, PFormat::f16, PFormat::bf16, PFormat::f64}) {
        PlanOptions wish = options;
        wish.p_format = format;
        if (supports(problem, device, wish)) candidates.plans.push_back(make_plan(problem, device, wish));
    }
    // A kernel may take no wish about P at all.
    if (candidates.plans.size() == before) candidates.plans.push_back(make_plan(problem, device, options));
}

/// The kernels to ask of a device: its own, or the one that was named if it is among them. Of the only device that is
/// asked of it wherever it belongs: the refusal is then the answer.
std::vector<std::string> kernels_to_ask(const DeviceSpec& device, const std::string& named, bool only_device) {
    std::vector<std::string> kernels = harness::kernels_on(device.device.kind);
    if (named.empty()) return kernels;
    if (only_device || std::find(kernels.begin(), kernels.end(), named) != kernels.end()) return {named};
    return {};
}

Candidates candidates_for(Problem problem, const RunFlags& flags) {
    const bool all_kernels = flags.kernel.empty() || flags.kernel == "all";
    const bool every_p_format = flags.p_format == "all" || (flags.p_format.empty() && all_kernels);
    Candidates candidates;
    const std::vector<DeviceSpec> devices = devices_of(flags);
    for (const DeviceSpec& device : devices) {
        problem.device = device.device;
        PlanOptions options = plan_options(flags);
        const std::string named = options.kernel;
        for (const std::string& kernel : kernels_to_ask(device, named, devices.size() == 1)) {
            options.kernel = kernel;
            add_plans(candidates, problem, device, options, every_p_format);
        }
    }
    return candidates;
}

std::string reasons(const std::vector<Refusal>& declined) {
    if (declined.empty()) return "a build without kernels for the device";
    std::string text;
    for (const Refusal& refusal : declined) text += (text.empty() ? "" : "; ") + refusal.reason;
    return text;
}

/// Verdicts of a file's own tensors. `out` and `lse` may be null.
harness::Verdict judge_file(const harness::Oracle& oracle, const OwnedTensor* out, const OwnedTensor* lse, LseBase base,
                            const harness::Accuracy& accuracy) {
    return harness::compare(oracle, out != nullptr ? ConstTensor(out->view()) : ConstTensor{},
                            lse != nullptr ? ConstTensor(lse->view()) : ConstTensor{}, base, accuracy, false);
}

CheckedRun check_plan(const LoadedStep& loaded, const Plan& plan, const harness::Oracle& oracle,
                      const std::optional<harness::Oracle>& expected, bool rms) {
    Runner runner(loaded, plan);
    CheckedRun result{.device = to_string(plan.device.device),
                      .kernel = plan.schedule.kernel,
                      .p_format = std::string(name(plan.schedule.p_format)),
                      .schedule = to_string(plan.schedule),
                      .seconds = runner.run(),
                      .oracle = {},
                      .file = {}};
    const harness::Accuracy accuracy = harness::accuracy_of(plan.schedule);
    const LseBase base = plan.problem.lse_base;
    result.oracle = harness::compare(oracle, runner.out().view(), runner.lse().view(), base, accuracy, rms);
    if (expected)
        result.file = harness::compare(*expected, runner.out().view(), runner.lse().view(), base,
                                       against_file(accuracy, oracle, loaded.file), false);
    return result;
}

void judge_stored_answers(CheckedCase& result, const LoadedStep& loaded, const harness::Oracle& oracle) {
    const Case& file = loaded.file;
    const OwnedTensor* out = file.find("expected.out");
    const OwnedTensor* lse = file.find("expected.lse");
    if (out != nullptr || lse != nullptr)
        result.file = judge_file(oracle, out, lse, loaded.step.lse_base, against_file({}, oracle, file));
    result.dequantised = check_dequantised(file, loaded.step);
    if (const OwnedTensor* peer = file.find("peer.out"))
        result.peer = judge_file(oracle, peer, nullptr, loaded.step.lse_base,
                                 harness::accuracy_of({.kernel = "peer", .p_format = PFormat::e4m3, .p_scale = 448}));
}

bool all_pass(const CheckedCase& result) {
    bool pass = (!result.file || result.file->pass) && (!result.dequantised || result.dequantised->empty());
    for (const CheckedRun& run : result.runs) pass = pass && run.pass();
    return pass;
}

}  // namespace

CheckedCase check_case(const std::string& path, const CheckFlags& flags, Progress& progress) {
    const LoadedStep loaded = load_step(path);
    const Problem problem = problem_of(loaded, flags.run.from_ids);
    Candidates candidates = candidates_for(problem, flags.run);
    if (candidates.plans.empty())
        throw Error(ErrorKind::unsupported, path, "a case that a kernel takes", reasons(candidates.declined));

    CheckedCase result;
    result.path = path;
    result.step = describe(problem);
    result.notes = loaded.file.notes;
    const std::vector<std::int64_t> active = active_columns(loaded.step);
    result.active_columns = std::accumulate(active.begin(), active.end(), std::int64_t{0});
    result.declined = std::move(candidates.declined);
    progress.show(path + ": float64 reference");
    const harness::Oracle oracle = harness::compute_oracle(loaded.step);
    judge_stored_answers(result, loaded, oracle);
    const std::optional<harness::Oracle> expected = expectation_of(oracle, loaded.file);
    for (const Plan& plan : candidates.plans) {
        progress.show(path + ": " + to_string(plan.schedule));
        result.runs.push_back(check_plan(loaded, plan, oracle, expected, flags.rms));
    }
    result.status = all_pass(result) ? Status::ok : Status::check_failed;
    return result;
}

}  // namespace sparsemla::tool
