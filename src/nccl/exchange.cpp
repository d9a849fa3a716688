#include "sparsemla/nccl_exchange.h"

#include <array>
#include <cstring>
#include <span>

#include "check.h"
#include "nccl/communicator.h"
#include "nccl/exchange_layout.h"
#include "sparsemla/records.h"

namespace sparsemla {

namespace {

using detail::Block;
using detail::Extent;

constexpr std::int64_t vector_alignment_bytes = 16;

[[noreturn]] void refuse(std::string_view argument, const std::string& required, const std::string& received) {
    throw Error(ErrorKind::invalid_argument, std::string(argument), required, received);
}

/// Rank 0's, to all.
NcclId second_id(detail::GroupRank& rank) {
    const auto reports = rank.together("a second id of NCCL", [&](detail::StepReport& own) {
        if (rank.rank() != 0) return;
        const NcclId id = rank.api().new_id();
        std::memcpy(own.problem.data(), id.bytes.data(), id.bytes.size());
    });
    NcclId id;
    std::memcpy(id.bytes.data(), reports.front().problem.data(), id.bytes.size());
    return id;
}

MailboxLayout layout_with_rows(const DcpShape& shape) {
    const MailboxLayout layout = mailbox_layout(shape);
    if (layout.rows == 0) refuse("shape.rows", "at least 1", "0");
    return layout;
}

/// [rows, heads, dims] of what lies as [head][row][dims].
Tensor by_heads(std::byte* data, DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dims, Device device) {
    return {data, dtype, device, 3, {rows, heads, dims}, {dims, rows * dims, 1}};
}
Tensor by_heads(std::byte* data, std::int64_t rows, std::int64_t heads, Device device) {
    return {data, DType::f32, device, 2, {rows, heads}, {1, rows}};
}

}  // namespace

/// In the order in which they come to be; their ends are the other way round.
struct NcclExchange::Parts {
    Parts(const MailboxLayout& shape, std::unique_ptr<detail::GroupDevice> group_device, const NcclBootstrap& bootstrap,
          const NcclOptions& options)
        : rank(shape, std::move(group_device), bootstrap, options, 1),
          device(rank.device().device()),
          layout(detail::exchange_layout(shape, bootstrap.rank)),
          memory(rank.allocate(static_cast<std::size_t>(layout.bytes))),
          // Blocking: its collectives run in the calling thread, and may be captured like any others.
          data(rank.api(), rank.device(), bootstrap.rank, bootstrap.world, second_id(rank), rank.limit_s(), true) {}

    std::byte* at(const Block& block) const { return memory->data() + block.at; }
    Tensor query(std::int64_t rows) const {
        return by_heads(memory->data() + layout.query, layout.shape.query_dtype, rows, layout.shape.heads,
                        layout.shape.d_qk, device);
    }
    Tensor out(std::int64_t rows) const {
        return by_heads(memory->data() + layout.out, DType::bf16, rows, layout.shape.heads, value_dims, device);
    }
    Tensor lse(std::int64_t rows) const {
        return by_heads(memory->data() + layout.lse, rows, layout.shape.heads, device);
    }
    void check_rows(std::int64_t rows) const {
        if (rows < 0 || rows > layout.shape.rows)
            refuse("rows", "0 .. " + std::to_string(layout.shape.rows) + ", the group's capacity",
                   std::to_string(rows));
    }

    void all_gather(std::int64_t rows, Stream stream);
    void all_to_all(std::int64_t rows, Stream stream);

    detail::GroupRank rank;
    Device device;
    detail::ExchangeLayout layout;
    std::unique_ptr<detail::GroupMemory> memory;
    detail::Communicator data;
};

/// This rank's heads are in their place of `gathered`; all ranks' are in `query` after it.
void NcclExchange::Parts::all_gather(std::int64_t rows, Stream stream) {
    const Block own = layout.gathered_part(rank.rank(), rows);
    data.all_gather(at(own), memory->data() + layout.gathered, static_cast<std::size_t>(own.bytes), stream);
    if (layout.equal_shares()) return;
    for (int from = 0; from < rank.world(); ++from) {
        const Block heads = layout.gathered_heads(from, rows);
        rank.device().copy(at(layout.query_heads(from, rows)), at(heads), static_cast<std::size_t>(heads.bytes),
                           stream);
    }
}

void NcclExchange::Parts::all_to_all(std::int64_t rows, Stream stream) {
    const detail::NcclApi& api = data.api();
    int failed = detail::nccl_success;
    const auto note = [&](int result) {
        if (failed == detail::nccl_success && result != detail::nccl_in_progress) failed = result;
    };
    const auto send = [&](const Block& block, int to) {
        note(api.send(at(block), static_cast<std::size_t>(block.bytes), detail::nccl_uint8, to, data.handle(),
                      stream.handle));
    };
    const auto receive = [&](const Block& block, int from) {
        note(api.recv(at(block), static_cast<std::size_t>(block.bytes), detail::nccl_uint8, from, data.handle(),
                      stream.handle));
    };
    rank.device().with_current([&] {
        note(api.group_start());
        for (int step = 1; step < rank.world(); ++step) {
            const int to = (rank.rank() + step) % rank.world();
            const int from = (rank.rank() + rank.world() - step) % rank.world();
            send(layout.sent_out(to, rows), to);
            send(layout.sent_lse(to, rows), to);
            receive(layout.received_out(from, rows), from);
            receive(layout.received_lse(from, rows), from);
        }
        // Also after a failure: what has begun must end.
        note(api.group_end());
    });
    data.finish(failed, "ncclSend and ncclRecv");
}

NcclExchange::NcclExchange(const DcpShape& shape, Device device, const NcclBootstrap& bootstrap,
                           const NcclOptions& options)
    : NcclExchange(shape, detail::group_device(device), bootstrap, options) {}

NcclExchange::NcclExchange(const DcpShape& shape, std::unique_ptr<detail::GroupDevice> device,
                           const NcclBootstrap& bootstrap, const NcclOptions& options)
    : parts_(std::make_unique<Parts>(layout_with_rows(shape), std::move(device), bootstrap, options)) {
    const Stream stream = parts_->rank.device().stream();
    parts_->rank.together("first exchanges by collectives", [&](detail::StepReport&) {
        for (const std::int64_t rows : {std::int64_t{1}, layout().rows}) {
            parts_->all_gather(rows, stream);
            parts_->all_to_all(rows, stream);
        }
        parts_->data.wait(stream, "first exchanges by collectives");
    });
}

NcclExchange::~NcclExchange() = default;

int NcclExchange::rank() const { return parts_->rank.rank(); }
int NcclExchange::world() const { return parts_->rank.world(); }
const MailboxLayout& NcclExchange::layout() const { return parts_->layout.shape; }

std::string NcclExchange::describe() const {
    return "rank " + std::to_string(rank()) + " of " + std::to_string(world()) + " on " + to_string(parts_->device) +
           ", NCCL " + detail::nccl_version_text(parts_->rank.api().version) + ", by collectives, " +
           std::to_string(parts_->layout.bytes) + " bytes";
}

Problem NcclExchange::problem(Problem dcp) {
    dcp.dcp = false;
    dcp.sinks = false;
    dcp.lse = true;
    dcp.lse_base = LseBase::two;
    dcp.out_dtype = DType::bf16;
    return dcp;
}

void NcclExchange::gather_query(const GatherQueryArgs& args, Stream stream) {
    const detail::ExchangeLayout& layout = parts_->layout;
    const DType to = layout.shape.query_dtype;
    parts_->check_rows(args.rows);
    if (args.rows == 0) return;
    detail::TensorRule rule{
        .argument = "query",
        .dtypes = {DType::bf16},
        .shape = {Extent::at_least(args.rows, "rows"), Extent::at_least(layout.own_heads(), "own heads"),
                  Extent::exactly(layout.shape.d_qk)},
        .device = parts_->device,
        .alignment_bytes = vector_alignment_bytes};
    if (to == DType::f8_e4m3) rule.dtypes.push_back(DType::f8_e4m3);
    detail::check_tensor(args.query, rule);
    detail::check_positive_finite(args.q_scale, "q_scale");
    if (args.query.dtype == to && args.q_scale != 1.0F)
        refuse("q_scale", "1 where nothing is quantised", detail::to_text(args.q_scale));
    std::byte* place = parts_->at(layout.gathered_part(rank(), args.rows));
    ConstTensor query = args.query;
    query.shape[0] = args.rows;
    query.shape[1] = layout.own_heads();
    if (query.dtype != to) {
        quantize_query(query, args.q_scale,
                       by_heads(place, to, args.rows, layout.own_heads(), layout.shape.d_qk, parts_->device), stream);
    } else {
        const std::int64_t bytes = size_bytes(to);
        parts_->rank.device().copy_heads({.from = static_cast<const std::byte*>(query.data),
                                          .to = place,
                                          .rows = args.rows,
                                          .heads = layout.own_heads(),
                                          .head_bytes = layout.head_bytes(),
                                          .from_row_stride = query.strides[0] * bytes,
                                          .from_head_stride = query.strides[1] * bytes,
                                          .to_row_stride = layout.head_bytes(),
                                          .to_head_stride = args.rows * layout.head_bytes()},
                                         stream);
    }
    parts_->all_gather(args.rows, stream);
}

void NcclExchange::receive_query(std::int64_t rows, const Tensor& out, Stream stream) {
    const detail::ExchangeLayout& layout = parts_->layout;
    parts_->check_rows(rows);
    if (rows == 0) return;
    detail::check_tensor(out, {.argument = "out",
                               .dtypes = {layout.shape.query_dtype},
                               .shape = {Extent::at_least(rows, "rows"), Extent::at_least(layout.shape.heads, "heads"),
                                         Extent::exactly(layout.shape.d_qk)},
                               .device = parts_->device,
                               .alignment_bytes = vector_alignment_bytes});
    const std::int64_t bytes = size_bytes(out.dtype);
    parts_->rank.device().copy_heads({.from = static_cast<const std::byte*>(parts_->query(rows).data),
                                      .to = static_cast<std::byte*>(out.data),
                                      .rows = rows,
                                      .heads = layout.shape.heads,
                                      .head_bytes = layout.head_bytes(),
                                      .from_row_stride = layout.head_bytes(),
                                      .from_head_stride = rows * layout.head_bytes(),
                                      .to_row_stride = out.strides[0] * bytes,
                                      .to_head_stride = out.strides[1] * bytes},
                                     stream);
}

void NcclExchange::decode(const Plan& plan, DecodeArgs args, Stream stream) {
    const MailboxLayout& shape = layout();
    const Problem& planned = plan.problem;
    parts_->check_rows(args.rows);
    if (planned.dcp || planned.sinks || !planned.lse || planned.lse_base != LseBase::two ||
        planned.out_dtype != DType::bf16)
        refuse("plan", "one of NcclExchange::problem", "a plan of another problem");
    if (planned.heads != shape.heads || planned.query_dtype != shape.query_dtype || d_qk(planned) != shape.d_qk)
        refuse("plan",
               std::to_string(shape.heads) + " heads and a query of " + std::to_string(shape.d_qk) + ' ' +
                   std::string(name(shape.query_dtype)),
               std::to_string(planned.heads) + " heads and " + std::to_string(d_qk(planned)) + ' ' +
                   std::string(name(planned.query_dtype)));
    if (args.query.present() || args.out.present() || args.lse.present())
        refuse("args", "no query, out and lse, which are the group's", "a tensor");
    if (args.rows == 0) return;
    args.query = parts_->query(args.rows);
    args.out = parts_->out(args.rows);
    args.lse = parts_->lse(args.rows);
    sparsemla::decode(plan, args, stream);
    parts_->all_to_all(args.rows, stream);
}

void NcclExchange::push(const PushArgs& args, Stream stream) {
    parts_->check_rows(args.rows);
    if (args.rows == 0) return;
    // A merge of one passes its values, in the types that travel.
    const std::array<Partial, 1> partial{{{.out = args.out, .lse = args.lse, .counts = args.counts}}};
    merge({.rows = args.rows,
           .heads = layout().heads,
           .partials = partial,
           .partial_base = args.lse_base,
           .out = parts_->out(args.rows),
           .lse = parts_->lse(args.rows),
           .lse_base = LseBase::two},
          stream);
    parts_->all_to_all(args.rows, stream);
}

void NcclExchange::merge_pushed(const MergePushedArgs& args, Stream stream) {
    const detail::ExchangeLayout& layout = parts_->layout;
    const std::int64_t rows = args.rows, heads = layout.own_heads();
    parts_->check_rows(rows);
    if (rows == 0) return;
    std::array<Partial, max_ranks> partials;
    for (int from = 0; from < world(); ++from) {
        const bool own = from == rank();
        const Block out = own ? layout.sent_out(from, rows) : layout.received_out(from, rows);
        const Block lse = own ? layout.sent_lse(from, rows) : layout.received_lse(from, rows);
        partials[static_cast<std::size_t>(from)] = {
            .out = by_heads(parts_->at(out), DType::bf16, rows, heads, value_dims, parts_->device),
            .lse = by_heads(parts_->at(lse), rows, heads, parts_->device)};
    }
    merge({.rows = rows,
           .heads = heads,
           .partials = std::span(partials).first(static_cast<std::size_t>(world())),
           .partial_base = LseBase::two,
           .sinks = args.sinks,
           .out = args.out,
           .lse = args.lse,
           .lse_base = args.lse_base},
          stream);
}

void NcclExchange::barrier(Stream stream) { parts_->rank.barrier(stream); }

void NcclExchange::give_up() noexcept {
    parts_->data.give_up();
    parts_->rank.communicator().give_up();
}

}  // namespace sparsemla
