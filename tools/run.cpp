#include "tools/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "tools/output.h"

namespace sparsemla::tool {
namespace {

OwnedTensor poisoned(DType dtype, std::vector<std::int64_t> shape) {
    OwnedTensor tensor = make_owned(dtype, std::move(shape));
    if (tensor.size_bytes != 0) std::memset(tensor.bytes.get(), 0xFF, tensor.size_bytes);
    return tensor;
}

Memory memory_of(const OwnedTensor& tensor) { return {tensor.bytes.get(), tensor.size_bytes}; }

std::int64_t active_in(const CaseSource& source, std::int64_t row) {
    const std::int64_t width = source.slots.shape[1];
    std::int64_t count = width;
    if (source.counts.present()) {
        const auto* counts = static_cast<const std::int32_t*>(source.counts.data);
        count = std::clamp<std::int64_t>(counts[row * source.counts.strides[0]] - source.count_offset, 0, width);
    }
    const std::int32_t* slots = static_cast<const std::int32_t*>(source.slots.data) + row * source.slots.strides[0];
    std::int64_t active = 0;
    for (std::int64_t c = 0; c < count; ++c) active += source.cache.holds(slots[c]) ? 1 : 0;
    return active;
}

}  // namespace

LoadedStep load_step(const std::string& path) { return step_of(load_case(path)); }

LoadedStep step_of(Case file) {
    LoadedStep loaded{.file = std::move(file), .step = {}};
    const bool has_slots = loaded.file.find("slots") != nullptr;
    convert_case(loaded.file);
    loaded.step = case_step(loaded.file);
    if (!has_slots) loaded.indices = case_indices(loaded.file);
    return loaded;
}

Problem problem_of(const LoadedStep& loaded, bool from_ids) {
    Problem problem = loaded.step.problem();
    if (from_ids && !loaded.indices)
        throw Error(ErrorKind::invalid_argument, "--from-ids", "a case with token_ids and without slots", "slots");
    problem.from_ids = from_ids;
    return problem;
}

std::vector<std::int64_t> active_columns(const CaseStep& step) {
    std::vector<std::int64_t> active(static_cast<std::size_t>(step.rows), 0);
    for (std::int64_t row = 0; row < step.rows; ++row)
        for (const CaseSource& source : step.sources) active[static_cast<std::size_t>(row)] += active_in(source, row);
    return active;
}

std::int64_t record_bytes_read(const CaseStep& step) {
    std::int64_t bytes = 0;
    for (const CaseSource& source : step.sources)
        for (std::int64_t row = 0; row < step.rows; ++row)
            bytes += active_in(source, row) * source.cache.layout().record_bytes;
    return bytes;
}

std::string describe(const Problem& problem) {
    std::string text = fmt::format("{} x {}", plural(problem.rows, "row"), plural(problem.heads, "head"));
    for (std::size_t i = 0; i < problem.sources.size(); ++i) {
        const SourceProblem& source = problem.sources[i];
        text +=
            fmt::format("{}{} x {}", i == 0 ? ", " : " + ", to_string(source.record), plural(source.width, "column"));
    }
    text += fmt::format(", {} query", name(problem.query_dtype));
    if (problem.sinks) text += ", sinks";
    if (problem.from_ids) text += ", from token ids";
    return text;
}

Runner::Runner(const LoadedStep& loaded, Plan plan) : plan_(std::move(plan)), args_(loaded.step.args()) {
    const CaseStep& step = loaded.step;
    if (plan_.problem.from_ids) {
        args_.indices = loaded.indices.value();
        args_.sources[0].slots = args_.sources[0].counts = {};
    }
    out_ = poisoned(plan_.problem.out_dtype, {step.rows, step.heads, value_dims});
    lse_ = poisoned(DType::f32, {step.rows, step.heads});
    args_.out = out_.view();
    args_.lse = lse_.view();
    if (plan_.device.device.kind != Device::Kind::cpu) {
        gpu_ = std::make_unique<harness::GpuStep>(plan_, args_);
        prepare(plan_, gpu_->args().state, gpu_->stream().stream());
        gpu_->stream().synchronize();
        return;
    }
    workspace_ = poisoned(DType::u8, {static_cast<std::int64_t>(plan_.workspace_bytes)});
    state_ = poisoned(DType::u8, {static_cast<std::int64_t>(plan_.state_bytes)});
    args_.workspace = memory_of(workspace_);
    args_.state = memory_of(state_);
    prepare(plan_, args_.state);
}

double Runner::run() {
    if (gpu_ != nullptr) {
        const double us = gpu_->stream().time_us([&](Stream stream) { decode(plan_, gpu_->args(), stream); });
        gpu_->download_outputs();
        return 1e-6 * us;
    }
    const auto start = std::chrono::steady_clock::now();
    decode(plan_, args_);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace sparsemla::tool
