// Host memory and its image on a GPU: what gpu_step.h is made of.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "harness/gpu.h"
#include "sparsemla/records.h"

namespace sparsemla::harness {

/// Something that a call reads or writes.
struct MirrorPart {
    std::string name;
    const std::byte* begin = nullptr;
    std::size_t bytes = 0;
    bool output = false;
    GpuPlacement placement = GpuPlacement::plain;
    std::vector<ByteRange> elements{};  ///< from `begin`; what to copy where not all is copied
    std::optional<int>
        sparse_fill{};  ///< only the elements' granules, the first and the last get memory, filled with it
};

/// The tensor's bytes from its first element to its last. One without elements has none.
MirrorPart part_of(const ConstTensor& tensor, std::string name, GpuPlacement placement, bool output = false);

/// The bytes of a cache, and of its rope where that lies apart. `slots`: only these records travel.
std::vector<MirrorPart> parts_of(const CacheView& cache, const std::string& name, GpuPlacement placement,
                                 const std::vector<std::int32_t>* slots, int fill_byte);

/// A run of host memory and the buffer that holds its image, at the same address modulo the alignment.
class MirrorBlock {
   public:
    /// Each part begins inside the ones before it; ascending.
    MirrorBlock(Device device, std::vector<MirrorPart> parts);

    bool output() const { return output_; }
    /// Where the image of an address lies; null for one outside.
    std::byte* image_of(const void* address) const;

    void upload();
    void download() const;  ///< into the host memory
    /// "", or the part that holds the first byte that differs from the host's.
    std::string difference() const;

   private:
    std::string part_at(std::size_t offset) const;

    std::vector<MirrorPart> parts_;
    const std::byte* begin_ = nullptr;
    std::size_t bytes_ = 0;
    bool output_ = false;
    std::vector<ByteRange> copied_;  ///< from `begin_`: all of it, or elements only
    std::size_t lead_ = 0;           ///< bytes of the buffer before the image
    GpuBuffer buffer_;
};

/// Parts that share bytes share a block.
std::vector<MirrorBlock> mirror(Device device, std::vector<MirrorPart> parts);

}  // namespace sparsemla::harness
