// A step in host memory, mirrored to a GPU: the arguments there, and the outputs back.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "harness/gpu.h"
#include "sparsemla/decode.h"

namespace sparsemla::harness {

/// A cache of which the GPU gets a few records, so that host memory that nobody touched is not read. The granules of
/// the first and last bytes and of these records are backed by memory and filled; an access elsewhere is a fault.
struct SparseCache {
    int fill_byte = 0;
    std::vector<std::int32_t> slots{};  ///< whose records are copied; the cache must hold them
};

struct GpuStepOptions {
    std::array<GpuPlacement, 2> caches{};       ///< of each source
    GpuPlacement others = GpuPlacement::plain;  ///< of everything else, workspace and state included
    std::array<std::optional<SparseCache>, 2> sparse{};
    /// Host memory that is mirrored whole where an output lies in it: what a kernel writes beside the output comes
    /// back.
    std::vector<Memory> surroundings{};
    bool own_memory = true;     ///< workspace and state of the plan's sizes; otherwise none
    int workspace_byte = 0xFF;  ///< what the workspace holds at first
};

/// The arguments must be ones that decode takes, but for their device. Every tensor keeps its strides, its address
/// modulo 16 and all its bytes, those between strides included; tensors that share memory share it on the GPU too. Of a
/// span over 256 MiB only the elements travel. Scales by pointer are mirrored.
class GpuStep {
   public:
    GpuStep(const Plan& plan, const DecodeArgs& host, const GpuStepOptions& options = {});
    GpuStep(GpuStep&&) noexcept;
    GpuStep& operator=(GpuStep&&) noexcept;
    ~GpuStep();

    const DecodeArgs& args() const;  ///< on the plan's device
    const GpuStream& stream() const;

    void upload_outputs();    ///< what the host's outputs hold now, with what surrounds them
    void download_outputs();  ///< waits for the stream
    /// "", or which input's bytes on the GPU are no longer the host's.
    std::string changed_input() const;

    void fill_workspace(int byte);
    bool workspace_is(int byte) const;  ///< whether all its bytes are this
    bool beside_memory_intact() const;  ///< whether the bytes around workspace and state are as they were

   private:
    struct Parts;
    std::unique_ptr<Parts> parts_;
};

}  // namespace sparsemla::harness
