// What ranks of a group tell each other once, and what they must agree on. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "sparsemla/mailbox.h"
#include "sparsemla/nccl_group.h"

namespace sparsemla::detail {

/// Of one rank, as it travels. Texts end with 0.
struct RankRecord {
    std::uint64_t magic = 0;
    std::uint64_t fingerprint = 0;  ///< MailboxLayout
    std::uint64_t order = 0;        ///< of NcclOptions::members
    std::int32_t rank = 0, world = 0;
    std::int32_t nccl_version = 0;
    std::int32_t member = -1;
    std::int32_t rows = 0, heads = 0, padded_heads = 0, d_qk = 0, query_dtype = 0;
    std::int32_t kind = 0;  ///< NcclGroup, NcclExchange
    std::int32_t unused[2] = {};
    std::array<char, 16> library_version{};
    std::array<char, 96> host{};
    std::array<char, 72> device{};
};
static_assert(sizeof(RankRecord) == 256);

/// `host` and `device` name this rank's machine and GPU.
RankRecord record_of(const MailboxLayout& layout, int rank, const NcclOptions& options, int nccl_version,
                     const std::string& host, const std::string& device);

struct Disagreement {
    std::string argument, required, received;  ///< of an Error; received empty: there is none
};

/// The first thing that ranks disagree on, with all that differ from rank 0; the same on every rank.
Disagreement disagreement(const std::vector<RankRecord>& records, const std::vector<int>& members);

/// Ranks that are out of reach of each other: reaches[i] are the ranks whose memory rank i can address. "" or "rank 0
/// (host a) reaches rank 1, not ranks 2 and 3".
std::string unreachable_text(const std::vector<std::uint32_t>& reaches, const std::vector<RankRecord>& records);

/// What rank i tells of one step: its problem, if it has one.
struct StepReport {
    std::int32_t failed = 0;  ///< 1 + ErrorKind
    std::uint32_t reaches = 0;
    std::array<char, 248> problem{};
};
static_assert(sizeof(StepReport) == 256);

/// "" or "rank 2: ...; rank 3: ...".
std::string problems_text(const std::vector<StepReport>& reports);

template <std::size_t n>
void put_text(std::array<char, n>& to, const std::string& text) {
    to.fill('\0');
    text.copy(to.data(), n - 1);
}

}  // namespace sparsemla::detail
