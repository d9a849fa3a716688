// A cache of random records on a GPU, far larger than its L2, and an order that reads all of them before any again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "harness/gpu.h"
#include "harness/random.h"
#include "sparsemla/records.h"

namespace sparsemla::harness {

/// E4M3 codes of either sign, from 0 to 2 in magnitude: no NaN, and scores that a softmax has some use for.
void fill_with_e4m3(std::span<std::byte> bytes, Random random);

class RecordPool {
   public:
    /// In the record's default form; `records` is a multiple of the page size, 64. What repeats in the bytes is at
    /// least 64 MiB apart, or 16384 records where they have scales.
    RecordPool(Device device, Record record, std::int64_t records);

    Record record() const { return record_; }
    CacheView cache() const;
    /// The slots of the next records. The order is a random one of all records, again and again.
    void take(std::span<std::int32_t> slots);

   private:
    Device device_;
    Record record_;
    GpuBuffer buffer_;
    std::vector<std::int32_t> order_;
    std::size_t next_ = 0;
};

}  // namespace sparsemla::harness
