#include "dcp_decode.h"

#include <string>

#include "gpu.h"
#include "indices_check.h"

namespace sparsemla::detail {

namespace {

constexpr std::size_t alignment_bytes = 64;

std::size_t aligned(std::int64_t bytes) {
    return (static_cast<std::size_t>(bytes) + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
}

[[noreturn]] void refuse(std::string_view argument, const std::string& required, const std::string& received) {
    throw Error(ErrorKind::invalid_argument, std::string(argument), required, received);
}

}  // namespace

ExchangeMemory exchange_memory(const Problem& problem) {
    const std::int64_t heads = problem.rows * problem.heads;
    return {.query_bytes = aligned(heads * d_qk(problem) * size_bytes(problem.query_dtype)),
            .out_bytes = aligned(heads * bytes_of_values),
            .lse_bytes = aligned(heads * 4)};
}

std::size_t exchange_bytes(const Problem& problem) {
    // The first piece begins at a multiple, too.
    return problem.dcp ? exchange_memory(problem).bytes() + alignment_bytes : 0;
}

MailboxView check_mailbox(const Plan& plan, const DecodeArgs& args) {
    const Problem& problem = plan.problem;
    if (args.mailbox == nullptr) refuse("mailbox", "a mailbox, as the problem is one of dcp", "nothing");
    const Mailbox& mailbox = *args.mailbox;
    const MailboxView view = view_of(mailbox);
    if (mailbox.layout.heads != problem.heads)
        refuse("mailbox", std::to_string(problem.heads) + " heads of all ranks, as planned",
               std::to_string(mailbox.layout.heads));
    if (mailbox.layout.query_dtype != problem.query_dtype || mailbox.layout.d_qk != d_qk(problem))
        refuse("mailbox",
               "a query of " + std::to_string(d_qk(problem)) + ' ' + std::string(name(problem.query_dtype)) +
                   ", as planned",
               std::to_string(mailbox.layout.d_qk) + ' ' + std::string(name(mailbox.layout.query_dtype)));
    if (args.rows > mailbox.layout.rows)
        refuse("rows", "0 .. " + std::to_string(mailbox.layout.rows) + ", the mailbox's capacity",
               std::to_string(args.rows));
    if (!(mailbox.device == problem.device))
        refuse("mailbox", "memory on " + to_string(problem.device), to_string(mailbox.device));
    return view;
}

void decode_between_calls(const Kernel& kernel, DecodeParams params, Stream stream) {
    const Plan& plan = *params.plan;
    const Problem& problem = plan.problem;
    const ExchangeMemory memory = exchange_memory(problem);
    const std::size_t converted = problem.device.kind == Device::Kind::cpu ? converted_bytes(problem) : 0;
    const std::size_t end = (plan.workspace_bytes - converted) / alignment_bytes * alignment_bytes;
    std::byte* query = params.workspace + end - memory.bytes();
    std::byte* out = query + memory.query_bytes;
    auto* lse = reinterpret_cast<float*>(out + memory.out_bytes);

    const std::int64_t head_elements = params.d_qk, row_elements = params.heads * head_elements;
    const std::int64_t element_bytes = size_bytes(params.query_dtype);
    params.query = query;
    params.query_row_stride = row_elements;
    params.query_head_stride = head_elements;
    params.out = out;
    params.out_dtype = DType::bf16;
    params.out_row_stride = params.heads * value_dims;
    params.out_head_stride = value_dims;
    params.lse = lse;
    params.lse_row_stride = params.heads;
    params.lse_head_stride = 1;
    params.lse_base = LseBase::two;

    const ReceiveQueryParams receive{.mailbox = *params.mailbox,
                                     .rows = params.rows,
                                     .out = query,
                                     .out_row_stride_bytes = row_elements * element_bytes,
                                     .out_head_stride_bytes = head_elements * element_bytes};
    const PushParams push{.mailbox = *params.mailbox,
                          .rows = params.rows,
                          .out = out,
                          .out_row_stride = params.out_row_stride,
                          .out_head_stride = params.out_head_stride,
                          .lse = lse,
                          .lse_row_stride = params.lse_row_stride,
                          .lse_head_stride = 1};
    const bool on_gpu = problem.device.kind == Device::Kind::cuda;
    const int index = problem.device.index;
    on_gpu ? receive_query_gpu(receive, index, stream) : receive_query_cpu(receive);
    kernel.decode(params, stream);
    on_gpu ? push_gpu(push, index, stream) : push_cpu(push);
}

}  // namespace sparsemla::detail
