// One rank of a step's exchanges through an nccl group or by collectives, on a CPU (fake_nccl.cpp) or a GPU, against
// what the harness's ranks of one process give.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "harness/dcp_group.h"
#include "sparsemla/nccl_exchange.h"

namespace sparsemla::test {

inline DcpShape shape_of(const harness::DcpGroup& reference, const CaseStep& whole) {
    return {.rows = whole.rows,
            .head_offset = reference.options().sharing.head_offset,
            .query_dtype = whole.query.dtype,
            .d_qk = whole.query.shape[2]};
}

/// "", or where a rank's results are not those of the merged partial results.
inline std::string difference(const harness::DcpGroup& reference, const MailboxLayout& layout, int rank,
                              const harness::DcpWindow& window, const OwnedTensor& out, const OwnedTensor& lse) {
    const std::int64_t first = layout.head_offset[static_cast<std::size_t>(rank)], own = layout.heads_of(rank);
    const std::int64_t bytes = value_dims * size_bytes(reference.options().out_dtype);
    for (std::int64_t row = 0; row < window.rows; ++row)
        for (std::int64_t head = 0; head < own; ++head) {
            const std::int64_t got = row * own + head, wanted = (window.first_row + row) * layout.heads + first + head;
            const harness::DcpExpectation& all = reference.expectation();
            const bool same_out = std::memcmp(out.bytes.get() + got * bytes, all.out.bytes.get() + wanted * bytes,
                                              static_cast<std::size_t>(bytes)) == 0;
            const bool same_lse = std::memcmp(lse.bytes.get() + got * 4, all.lse.bytes.get() + wanted * 4, 4) == 0;
            if (!same_out || !same_lse)
                return "rank " + std::to_string(rank) + ", row " + std::to_string(row) + ", head " +
                       std::to_string(head) + ": " + (same_out ? "lse" : "out") + " differs";
        }
    return "";
}

/// A rank that exchanges through mailboxes. The windows must be the same on all ranks.
inline std::string run_by_mailbox(NcclGroup& group, const harness::DcpGroup& reference, const CaseStep& whole,
                                  const std::vector<harness::DcpWindow>& windows, Stream stream = {}) {
    harness::DcpRank rank(whole, reference.shards()[static_cast<std::size_t>(group.rank())], reference.options(),
                          reference.plan(), group.mailbox());
    for (std::size_t i = 0; i < windows.size(); ++i) {
        rank.poison();
        rank.gather(windows[i], stream);
        rank.decode(windows[i], stream);
        rank.merge(windows[i], stream);
        status(group.mailbox(), stream);  // waits
        const std::string text =
            difference(reference, group.mailbox().layout, group.rank(), windows[i], rank.out(), rank.lse());
        if (!text.empty())
            return "exchange " + std::to_string(i) + ": " + text + "; " + status(group.mailbox(), stream).text();
    }
    return "";
}

template <class Void>
BasicTensor<Void> from_row(BasicTensor<Void> tensor, std::int64_t first) {
    using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
    tensor.data = static_cast<Byte*>(tensor.data) + first * tensor.strides[0] * size_bytes(tensor.dtype);
    tensor.shape[0] -= first;
    return tensor;
}

/// A rank that exchanges by collectives, of a reference whose options say by_calls.
class CollectiveRank {
   public:
    CollectiveRank(NcclExchange& exchange, const harness::DcpGroup& reference, const CaseStep& whole)
        : exchange_(exchange), reference_(reference) {
        const Device device = reference.options().device.device;
        const int number = exchange.rank();
        const std::int64_t first = exchange.layout().head_offset[static_cast<std::size_t>(number)];
        const std::int64_t own = exchange.layout().heads_of(number);
        const auto place = [&](const ConstTensor& host) { return inputs_.emplace_back(host, device).view(); };
        inputs_.reserve(16);
        // The heads of all ranks, of which this one has a view: neither dense nor at the begin.
        query_ = place(whole.query);
        query_.data = static_cast<const std::byte*>(query_.data) + first * query_.strides[1] * size_bytes(query_.dtype);
        query_.shape[1] = own;
        if (whole.sinks.present()) {
            sinks_ = place(whole.sinks);
            sinks_.data = static_cast<const float*>(sinks_.data) + first;
            sinks_.shape[0] = own;
        }
        const harness::Shard& shard = reference.shards()[static_cast<std::size_t>(number)];
        args_ = shard.step(whole).args();
        args_.query = {};
        args_.out = {};
        args_.lse = {};
        args_.sinks = {};
        for (std::size_t i = 0; i < shard.sources.size(); ++i) {
            CacheView& cache = args_.sources[i].cache;
            cache.data = static_cast<const std::byte*>(place(shard.sources[i].cache.view()).data);
            if (shard.sources[i].rope.size_bytes != 0)
                cache.rope = static_cast<const std::byte*>(place(shard.sources[i].rope.view()).data);
            cache.device = device;
            args_.sources[i].slots = place(shard.sources[i].slots.view());
            args_.sources[i].counts = place(shard.sources[i].counts.view());
        }
        const Plan& plan = reference.plan();
        workspace_ = {DType::u8, {static_cast<std::int64_t>(plan.workspace_bytes)}, 0xFF, device};
        state_ = {DType::u8, {static_cast<std::int64_t>(plan.state_bytes)}, 0xFF, device};
        args_.workspace = workspace_.memory();
        args_.state = state_.memory();
        prepare(plan, args_.state);
        out_ = {reference.options().out_dtype, {whole.rows, own, value_dims}, 0xFF, device};
        lse_ = {DType::f32, {whole.rows, own}, 0xFF, device};
    }

    /// Every step onto the stream. `pushed`: the results of a decode into tensors of its own are pushed.
    void enqueue(const harness::DcpWindow& window, bool pushed, Stream stream) {
        exchange_.gather_query({.rows = window.rows, .query = from_row(query_, window.first_row)}, stream);
        DecodeArgs args = args_;
        args.rows = window.rows;
        for (std::size_t i = 0; i < reference_.plan().problem.sources.size(); ++i) {
            args.sources[i].slots = from_row(args.sources[i].slots, window.first_row);
            args.sources[i].counts = from_row(args.sources[i].counts, window.first_row);
        }
        if (pushed) {
            if (!received_.view().present()) make_tensors();
            exchange_.receive_query(window.rows, received_.view(), stream);
            args.query = received_.view();
            args.out = partial_out_.view();
            args.lse = partial_lse_.view();
            sparsemla::decode(reference_.plan(), args, stream);
            exchange_.push({.rows = window.rows, .out = args.out, .lse = args.lse}, stream);
        } else {
            exchange_.decode(reference_.plan(), args, stream);
        }
        exchange_.merge_pushed({.rows = window.rows,
                                .sinks = sinks_,
                                .out = out_.view(),
                                .lse = lse_.view(),
                                .lse_base = reference_.options().lse_base},
                               stream);
    }
    void poison() {
        out_.fill(0xFF);
        lse_.fill(0xFF);
    }
    std::string difference_of(const harness::DcpWindow& window) {
        return difference(reference_, exchange_.layout(), exchange_.rank(), window, out_.fetch(), lse_.fetch());
    }
    /// What pushed needs, before a capture.
    void make_tensors() {
        const MailboxLayout& layout = exchange_.layout();
        const Device device = reference_.options().device.device;
        received_ = {layout.query_dtype, {layout.rows, layout.heads, layout.d_qk}, 0xFF, device};
        partial_out_ = {DType::bf16, {layout.rows, layout.heads, value_dims}, 0xFF, device};
        partial_lse_ = {DType::f32, {layout.rows, layout.heads}, 0xFF, device};
    }

   private:
    NcclExchange& exchange_;
    const harness::DcpGroup& reference_;
    DecodeArgs args_;
    ConstTensor query_{}, sinks_{};
    std::vector<harness::DeviceTensor> inputs_;
    harness::DeviceTensor out_, lse_, workspace_, state_, received_, partial_out_, partial_lse_;
};

inline std::string run_by_collectives(NcclExchange& exchange, const harness::DcpGroup& reference, const CaseStep& whole,
                                      const std::vector<harness::DcpWindow>& windows,
                                      const harness::GpuStream* stream = nullptr) {
    CollectiveRank rank(exchange, reference, whole);
    for (std::size_t i = 0; i < windows.size(); ++i) {
        rank.poison();
        rank.enqueue(windows[i], i % 2 == 1, stream == nullptr ? Stream{} : stream->stream());
        if (stream != nullptr) stream->synchronize();
        const std::string text = rank.difference_of(windows[i]);
        if (!text.empty()) return "exchange " + std::to_string(i) + ": " + text;
    }
    return "";
}

}  // namespace sparsemla::test
