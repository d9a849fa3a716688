#include "harness/gpu_step.h"

#include <algorithm>
#include <utility>

#include "harness/gpu_mirror.h"

namespace sparsemla::harness {
namespace {

constexpr std::size_t memory_alignment_bytes = 64;  // of workspace and state
constexpr std::size_t beside_bytes = 4096;          // watched before each of them
constexpr int beside_byte = 0xA5;

/// Workspace or state: the caller's bytes between bytes that must not change.
class Scratch {
   public:
    Scratch(Device device, std::size_t bytes, GpuPlacement placement, int byte)
        : bytes_(bytes),
          behind_bytes_((memory_alignment_bytes - bytes % memory_alignment_bytes) % memory_alignment_bytes) {
        if (bytes == 0) return;
        buffer_ = GpuBuffer(device, beside_bytes + bytes + behind_bytes_,
                            {.placement = placement, .alignment_bytes = memory_alignment_bytes});
        buffer_.fill(beside_byte, beside_bytes, 0);
        buffer_.fill(beside_byte, behind_bytes_, beside_bytes + bytes);
        fill(byte);
    }

    Memory memory() const { return bytes_ == 0 ? Memory{} : Memory{buffer_.data() + beside_bytes, bytes_}; }
    void fill(int byte) {
        if (bytes_ != 0) buffer_.fill(byte, bytes_, beside_bytes);
    }
    bool is(int byte) const { return bytes_ == 0 || all(byte, bytes_, beside_bytes); }
    bool beside_intact() const {
        return bytes_ == 0 ||
               (all(beside_byte, beside_bytes, 0) && all(beside_byte, behind_bytes_, beside_bytes + bytes_));
    }

   private:
    bool all(int byte, std::size_t bytes, std::size_t offset) const {
        std::vector<std::byte> held(bytes);
        buffer_.download(held.data(), bytes, offset);
        return std::all_of(held.begin(), held.end(), [=](std::byte b) { return b == static_cast<std::byte>(byte); });
    }

    std::size_t bytes_;
    std::size_t behind_bytes_;
    GpuBuffer buffer_;
};

/// What calls `visit` for every tensor of the arguments but the outputs, with its name.
template <class Args, class Visit>
void for_each_input(Args& args, std::size_t sources, const Visit& visit) {
    visit(args.query, "query");
    visit(args.sinks, "sinks");
    for (std::size_t i = 0; i < sources; ++i) {
        visit(args.sources[i].slots, i == 0 ? "slots" : "extra_slots");
        visit(args.sources[i].counts, i == 0 ? "counts" : "extra_counts");
    }
    visit(args.indices.token_ids, "token_ids");
    visit(args.indices.block_table, "block_table");
    visit(args.indices.request_of_row, "request_of_row");
    visit(args.indices.lengths, "lengths");
}

void add_scale(std::vector<MirrorPart>& parts, const Scale& scale, const char* name, GpuPlacement placement) {
    parts.push_back({.name = name,
                     .begin = reinterpret_cast<const std::byte*>(scale.pointer),
                     .bytes = scale.pointer == nullptr ? 0 : sizeof(float),
                     .placement = placement});
}

void add_output(std::vector<MirrorPart>& parts, const Tensor& tensor, const char* name, const GpuStepOptions& options) {
    parts.push_back(part_of(tensor, name, options.others, true));
    const MirrorPart part = parts.back();
    if (part.bytes == 0) return;
    for (const Memory& memory : options.surroundings) {
        const auto* begin = static_cast<const std::byte*>(memory.data);
        if (part.begin < begin || part.begin >= begin + memory.bytes) continue;
        parts.push_back({.name = std::string("beside ") + name,
                         .begin = begin,
                         .bytes = memory.bytes,
                         .output = true,
                         .placement = options.others});
    }
}

std::vector<MirrorPart> parts_of_step(const DecodeArgs& host, std::size_t sources, const GpuStepOptions& options) {
    std::vector<MirrorPart> parts;
    for_each_input(host, sources, [&](const ConstTensor& tensor, const char* name) {
        parts.push_back(part_of(tensor, name, options.others));
    });
    add_scale(parts, host.q_scale, "q_scale", options.others);
    for (std::size_t i = 0; i < sources; ++i) {
        add_scale(parts, host.sources[i].k_scale, i == 0 ? "k_scale" : "extra_k_scale", options.others);
        const std::optional<SparseCache>& sparse = options.sparse[i];
        for (MirrorPart& part : parts_of(host.sources[i].cache, i == 0 ? "cache" : "extra_cache", options.caches[i],
                                         sparse ? &sparse->slots : nullptr, sparse ? sparse->fill_byte : 0))
            parts.push_back(std::move(part));
    }
    add_output(parts, host.out, "out", options);
    add_output(parts, host.lse, "lse", options);
    return parts;
}

}  // namespace

struct GpuStep::Parts {
    DecodeArgs args;
    GpuStream stream;
    std::vector<MirrorBlock> blocks;
    Scratch workspace;
    Scratch state;

    const std::byte* image_of(const void* address) const {
        for (const MirrorBlock& block : blocks)
            if (std::byte* image = block.image_of(address)) return image;
        return nullptr;
    }
    /// Points the arguments at the images; what has no bytes gets a null pointer.
    void redirect(Device device, std::size_t sources) {
        const auto tensor = [&](auto& view) {
            if (!view.present()) return;
            view.data = view.elements() == 0 ? nullptr : const_cast<std::byte*>(image_of(view.data));
            view.device = device;
        };
        const auto scale = [&](Scale& factor) {
            factor.pointer = reinterpret_cast<const float*>(image_of(factor.pointer));
        };
        for_each_input(args, sources, [&](ConstTensor& view, const char*) { tensor(view); });
        tensor(args.out);
        tensor(args.lse);
        scale(args.q_scale);
        for (std::size_t i = 0; i < sources; ++i) {
            SourceArgs& source = args.sources[i];
            scale(source.k_scale);
            source.cache.data = source.cache.pages == 0 ? nullptr : image_of(source.cache.data);
            source.cache.rope = source.cache.pages == 0 ? nullptr : image_of(source.cache.rope);
            source.cache.device = device;
        }
        if (workspace.memory().data != nullptr) args.workspace = workspace.memory();
        if (state.memory().data != nullptr) args.state = state.memory();
    }
};

GpuStep::GpuStep(const Plan& plan, const DecodeArgs& host, const GpuStepOptions& options) {
    const Device device = plan.problem.device;
    const std::size_t sources = plan.problem.sources.size();
    parts_ = std::unique_ptr<Parts>(new Parts{
        .args = host,
        .stream = GpuStream(device),
        .blocks = mirror(device, parts_of_step(host, sources, options)),
        .workspace =
            Scratch(device, options.own_memory ? plan.workspace_bytes : 0, options.others, options.workspace_byte),
        .state = Scratch(device, options.own_memory ? plan.state_bytes : 0, options.others, 0xFF)});
    parts_->args.workspace = parts_->args.state = {};
    parts_->redirect(device, sources);
}
GpuStep::GpuStep(GpuStep&&) noexcept = default;
GpuStep& GpuStep::operator=(GpuStep&&) noexcept = default;
GpuStep::~GpuStep() = default;

const DecodeArgs& GpuStep::args() const { return parts_->args; }
const GpuStream& GpuStep::stream() const { return parts_->stream; }

void GpuStep::upload_outputs() {
    for (MirrorBlock& block : parts_->blocks)
        if (block.output()) block.upload();
}

void GpuStep::download_outputs() {
    parts_->stream.synchronize();
    for (const MirrorBlock& block : parts_->blocks)
        if (block.output()) block.download();
}

std::string GpuStep::changed_input() const {
    parts_->stream.synchronize();
    for (const MirrorBlock& block : parts_->blocks) {
        if (block.output()) continue;
        if (std::string name = block.difference(); !name.empty()) return name;
    }
    return "";
}

void GpuStep::fill_workspace(int byte) { parts_->workspace.fill(byte); }
bool GpuStep::workspace_is(int byte) const { return parts_->workspace.is(byte); }
bool GpuStep::beside_memory_intact() const {
    parts_->stream.synchronize();
    return parts_->workspace.beside_intact() && parts_->state.beside_intact();
}

}  // namespace sparsemla::harness
