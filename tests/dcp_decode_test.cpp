// decode of a dcp problem: what make_plan and decode refuse, by name and before anything is written; the workspace to
// the byte; the base of what it pushes; token ids.
#include <climits>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "harness/dcp_group.h"
#include "tests/mailboxes.h"

namespace sparsemla::test {
namespace {

using harness::DeviceTensor;

Device other_device() { return on_gpu() ? Device{} : Device{Device::Kind::cuda, 0}; }

/// Two ranks of 2 + 3 heads over flat records of value 1, of which each attends to 8 a row; a query of zeros.
class DcpDecode {
   public:
    static constexpr std::int64_t rows = 3, heads = 5, width = 64;

    explicit DcpDecode(const PlanOptions& options = {}, bool from_ids = false)
        : boxes(shape_of({0, 2, heads}, rows)), plan(plan_or_skip(problem(from_ids), spec(), options)) {
        const Device device = tested_device().device;
        cache_ = {DType::u8, {128 * 576}, 0x38, device};
        std::vector<std::int32_t> slots(static_cast<std::size_t>(rows * width)), counts(rows, 8);
        std::iota(slots.begin(), slots.end(), 0);
        for (std::int32_t& slot : slots) slot %= 128;
        slots_ = {dense(slots.data(), DType::i32, {rows, width}), device};
        counts_ = {dense(counts.data(), DType::i32, {rows}), device};
        for (int rank = 0; rank < 2; ++rank) {
            workspaces.emplace_back(static_cast<std::int64_t>(plan.workspace_bytes), 64);
            states.emplace_back(static_cast<std::int64_t>(plan.state_bytes), 64);
            prepare(plan, states.back().memory(), boxes.stream());
        }
        fill_workspaces();
    }

    static Problem problem(bool from_ids = false) {
        return {.rows = rows,
                .heads = heads,
                .sources = {{.record = Record::fp8_576, .width = width}},
                .from_ids = from_ids,
                .dcp = true,
                .device = tested_device().device};
    }
    static DeviceSpec spec() { return on_gpu() ? tested_device() : query_device({}); }

    DecodeArgs args(int rank) {
        DecodeArgs args{.rows = rows, .mailbox = &boxes[rank]};
        args.sources[0].cache = {.data = static_cast<const std::byte*>(cache_.view().data),
                                 .pages = 2,
                                 .page_size = 64,
                                 .device = tested_device().device};
        args.sources[0].slots = slots_.view();
        args.sources[0].counts = counts_.view();
        args.softmax_scale = 1.0F / 24;
        args.workspace = workspaces[static_cast<std::size_t>(rank)].memory();
        args.state = states[static_cast<std::size_t>(rank)].memory();
        return args;
    }
    void gather() {
        const DeviceTensor query(DType::f8_e4m3, {rows, heads, 576}, 0, tested_device().device);
        for (int rank = 0; rank < 2; ++rank)
            gather_query(boxes[rank], {.rows = rows, .query = query.view()}, boxes.stream());
        boxes.synchronize();
    }
    void fill_workspaces() {
        boxes.synchronize();
        for (DeviceBytes& each : workspaces) each.fill(0x77);
    }
    /// "", or what was written although the call was refused.
    std::string written() {
        boxes.synchronize();
        for (const DeviceBytes& each : workspaces)
            if (each.read() != Bytes(plan.workspace_bytes, 0x77)) return "a workspace";
        for (int rank = 0; rank < 2; ++rank)
            if (boxes.control(rank).read() != Bytes(mailbox_control_bytes, 0)) return "a control";
        return boxes.not_armed();
    }

    Mailboxes boxes;
    Plan plan;
    std::vector<DeviceBytes> workspaces, states;

   private:
    DeviceTensor cache_, slots_, counts_;
};

void expect_refused(const std::string& argument, const std::string& what, const std::function<void()>& call) {
    try {
        call();
        ADD_FAILURE() << argument << ", " << what << ": accepted";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::invalid_argument) << what << ": " << error.what();
        EXPECT_EQ(error.argument(), argument) << what << ": " << error.what();
    }
}

TEST(K30_Arguments, PlansOfDcpProblems) {
    const auto refused = [](const std::string& argument, const std::function<void(Problem&)>& change) {
        Problem problem = DcpDecode::problem();
        change(problem);
        expect_refused(argument, "of a dcp problem", [&] { make_plan(problem, DcpDecode::spec()); });
        EXPECT_FALSE(supports(problem, DcpDecode::spec()));
    };
    refused("sinks", [](Problem& p) { p.sinks = true; });
    refused("out_dtype", [](Problem& p) { p.out_dtype = DType::f32; });
    refused("out_dtype", [](Problem& p) { p.out_dtype = DType::f16; });
    refused("heads", [](Problem& p) { p.heads = 0; });
    refused("heads", [](Problem& p) { p.heads = max_heads + 1; });
    refused("query_dtype", [](Problem& p) { p.query_dtype = DType::f32; });
    refused("lse_base", [](Problem& p) { p.lse_base = static_cast<LseBase>(2); });

    const DcpDecode right;
    EXPECT_NE(right.plan.describe().find("mailbox"), std::string::npos) << right.plan.describe();
    Problem other = DcpDecode::problem();  // neither is looked at
    other.lse = false;
    other.lse_base = LseBase::two;
    EXPECT_EQ(make_plan(other, DcpDecode::spec()).schedule, right.plan.schedule);
}

TEST(K30_Arguments, EveryFaultOfADecodeIsRefusedByNameAndNothingIsWritten) {
    DcpDecode decoding;
    const DcpShape shape = shape_of({0, 2, DcpDecode::heads}, DcpDecode::rows);
    Mailboxes fewer_rows(shape_of({0, 2, DcpDecode::heads}, 2)), fewer_heads(shape_of({0, 2, 4}, 3));
    Mailboxes halves({.rows = 3, .head_offset = shape.head_offset, .query_dtype = DType::bf16});
    Mailboxes narrow({.rows = 3, .head_offset = shape.head_offset, .d_qk = 512});
    Mailbox elsewhere = decoding.boxes[0], broken = decoding.boxes[0], nowhere = decoding.boxes[0];
    elsewhere.device = other_device();
    broken.peers.rank = 2;
    nowhere.control = {};
    const DeviceTensor tensor(DType::bf16, {3, 5, 576}, 0x5A, tested_device().device);
    const DeviceTensor sinks(DType::f32, {5}, 0x5A, tested_device().device);
    struct Fault {
        std::string argument, what;
        std::function<void(DecodeArgs&)> make;
    };
    const std::vector<Fault> faults = {
        {"mailbox", "none", [](DecodeArgs& a) { a.mailbox = nullptr; }},
        {"mailbox", "other heads", [&](DecodeArgs& a) { a.mailbox = &fewer_heads[0]; }},
        {"mailbox", "other dtype of the query", [&](DecodeArgs& a) { a.mailbox = &halves[0]; }},
        {"mailbox", "other dimensions of the query", [&](DecodeArgs& a) { a.mailbox = &narrow[0]; }},
        {"mailbox", "other device", [&](DecodeArgs& a) { a.mailbox = &elsewhere; }},
        {"mailbox.peers.rank", "2 of 2", [&](DecodeArgs& a) { a.mailbox = &broken; }},
        {"mailbox.control", "none", [&](DecodeArgs& a) { a.mailbox = &nowhere; }},
        {"rows", "more than the mailbox's", [&](DecodeArgs& a) { a.mailbox = &fewer_rows[0]; }},
        {"rows", "more than the plan's", [](DecodeArgs& a) { a.rows = 4; }},
        {"rows", "negative", [](DecodeArgs& a) { a.rows = -1; }},
        {"query", "given", [&](DecodeArgs& a) { a.query = tensor.view(); }},
        {"out", "given", [&](DecodeArgs& a) { a.out = tensor.view(); }},
        {"lse", "given", [&](DecodeArgs& a) { a.lse = sinks.view(); }},
        {"sinks", "given", [&](DecodeArgs& a) { a.sinks = sinks.view(); }},
        {"slots", "none", [](DecodeArgs& a) { a.sources[0].slots = {}; }},
        {"workspace", "none", [](DecodeArgs& a) { a.workspace = {}; }},
        {"workspace", "a byte too few", [](DecodeArgs& a) { --a.workspace.bytes; }},
        {"softmax_scale", "0", [](DecodeArgs& a) { a.softmax_scale = 0; }},
    };
    for (const Fault& fault : faults) {
        if (fault.argument == "workspace" && decoding.plan.workspace_bytes == 0) continue;
        DecodeArgs args = decoding.args(0);
        fault.make(args);
        expect_refused(fault.argument, fault.what, [&] { decode(decoding.plan, args, decoding.boxes.stream()); });
        EXPECT_EQ(decoding.written(), "") << fault.argument << ", " << fault.what;
    }
    DecodeArgs none = decoding.args(0);  // no rows: no exchange, and no mailbox is looked for (B060)
    none.rows = 0;
    none.mailbox = nullptr;
    decode(decoding.plan, none, decoding.boxes.stream());
    EXPECT_EQ(decoding.written(), "");

    Problem plain = DcpDecode::problem();
    plain.dcp = false;
    DecodeArgs args = decoding.args(0);
    expect_refused("mailbox", "of a plain problem", [&] { decode(make_plan(plain, DcpDecode::spec()), args); });
    EXPECT_EQ(decoding.written(), "");
}

/// Pushes of both ranks as they lie in rank 0's mailbox: the lse of every row and head, which must be this.
void expect_pushed_lse(DcpDecode& decoding, float expected, const std::string& what) {
    const Bytes bytes = decoding.boxes.memory(0).read();
    for (int source = 0; source < 2; ++source)
        for (std::int64_t row = 0; row < DcpDecode::rows; ++row)
            for (std::int64_t own = 0; own < 2; ++own) {
                float lse = 0;
                std::memcpy(&lse, bytes.data() + decoding.boxes.lse_byte(0, source, row, own), 4);
                EXPECT_NEAR(lse, expected, 1e-5) << what << ", source " << source << ", row " << row;
            }
}

/// The merged result of both ranks in one base.
void expect_merged(DcpDecode& decoding, LseBase base, float expected_lse, const std::string& what) {
    for (int rank = 0; rank < 2; ++rank) {
        const std::int64_t own = decoding.boxes.layout().heads_of(rank);
        const Padded out(DType::bf16, {DcpDecode::rows, own, value_dims}, 0),
            lse(DType::f32, {DcpDecode::rows, own}, 1);
        const Placed out_at(out), lse_at(lse);
        merge_pushed(
            decoding.boxes[rank],
            {.rows = DcpDecode::rows, .sinks = {}, .out = out_at.view(), .lse = lse_at.view(), .lse_base = base},
            decoding.boxes.stream());
        decoding.boxes.synchronize();
        out_at.fetch();
        lse_at.fetch();
        for (std::int64_t row = 0; row < DcpDecode::rows; ++row) {
            EXPECT_NEAR(lse.value(row, own - 1), expected_lse, 1e-5) << what;
            EXPECT_NEAR(out.value(row, own - 1, 511), 1.0F, 0x1p-7F) << what;
        }
    }
    EXPECT_EQ(decoding.boxes.not_armed(), "") << what;
}

// Eight keys of score 0 on each of two ranks: 3.0 travels, whatever the kernel; merged they are ln 16 or 4 (B078,
// B079). Workspaces are of the plan's bytes, between guards (B059).
TEST(K06_LogBase, B078_B079_WhatTravelsIsOfBaseTwo) {
    for (const std::string& kernel : tested_kernels())
        for (LseBase base : {LseBase::natural, LseBase::two}) {
            Problem problem = DcpDecode::problem();
            if (const auto refused = refusal(problem, DcpDecode::spec(), {.kernel = kernel}); refused) {
                EXPECT_TRUE(on_gpu()) << *refused;
                continue;
            }
            DcpDecode decoding({.kernel = kernel});
            decoding.gather();
            for (int rank = 0; rank < 2; ++rank) decode(decoding.plan, decoding.args(rank), decoding.boxes.stream());
            decoding.boxes.synchronize();
            expect_pushed_lse(decoding, 3, kernel);
            expect_merged(decoding, base, base == LseBase::two ? 4 : std::log(16.0F), kernel);
            for (int rank = 0; rank < 2; ++rank) {
                EXPECT_TRUE(decoding.workspaces[static_cast<std::size_t>(rank)].slack_intact()) << kernel;
                EXPECT_TRUE(decoding.states[static_cast<std::size_t>(rank)].slack_intact()) << kernel;
            }
        }
}

// Token ids 0 .. 15 of two ranks: each converts its own eight, which lie in its page 1.
TEST(K16_IndexDomain, DecodeFromTokenIds) {
    DcpDecode decoding({}, true);
    const Device device = tested_device().device;
    std::vector<std::int32_t> ids(DcpDecode::rows * DcpDecode::width, -1), requests(DcpDecode::rows, 0);
    for (std::int64_t row = 0; row < DcpDecode::rows; ++row)
        for (std::int32_t id = 0; id < 16; ++id) ids[static_cast<std::size_t>(row * DcpDecode::width + 15 - id)] = id;
    const std::int32_t page = 1;
    const DeviceTensor token_ids(dense(ids.data(), DType::i32, {DcpDecode::rows, DcpDecode::width}), device);
    const DeviceTensor request_of_row(dense(requests.data(), DType::i32, {DcpDecode::rows}), device);
    const DeviceTensor block_table(dense(&page, DType::i32, {1, 1}), device);
    const auto args_of = [&](int rank) {
        DecodeArgs args = decoding.args(rank);
        args.sources[0].slots = {};
        args.sources[0].counts = {};
        args.indices.token_ids = token_ids.view();
        args.indices.request_of_row = request_of_row.view();
        args.indices.block_table = block_table.view();
        args.indices.sharding = {.world = 2, .rank = rank, .interleave = 1};
        return args;
    };
    DecodeArgs without = args_of(0);
    without.mailbox = nullptr;
    expect_refused("mailbox", "none", [&] { decode(decoding.plan, without, decoding.boxes.stream()); });
    EXPECT_EQ(decoding.written(), "") << "before the ids are converted";
    decoding.gather();
    for (int rank = 0; rank < 2; ++rank) decode(decoding.plan, args_of(rank), decoding.boxes.stream());
    decoding.boxes.synchronize();
    expect_pushed_lse(decoding, 3, "from ids");
    expect_merged(decoding, LseBase::natural, std::log(16.0F), "from ids");
    for (const DeviceBytes& each : decoding.workspaces) EXPECT_TRUE(each.slack_intact());
}

// What an exchange adds to the workspace is query, out and lse of its rows and heads, and nothing that grows faster
// (B059).
TEST(K22_Workspace, B059_GrowsWithRowsAndHeads) {
    for (const std::string& kernel : tested_kernels())
        for (std::int64_t rows : {1, 5, 320, 16384})
            for (std::int64_t heads : {16, 32, 64, 96, 128})
                for (const bool lse : {false, true}) {
                    Problem problem = DcpDecode::problem();
                    problem.rows = rows;
                    problem.heads = heads;
                    problem.lse = lse;
                    if (!supports(problem, DcpDecode::spec(), {.kernel = kernel})) continue;
                    const Plan with = make_plan(problem, DcpDecode::spec(), {.kernel = kernel});
                    problem.dcp = false;
                    const Plan plain = make_plan(problem, DcpDecode::spec(), {.kernel = kernel});
                    const std::int64_t cells = rows * heads, added = static_cast<std::int64_t>(with.workspace_bytes) -
                                                                     static_cast<std::int64_t>(plain.workspace_bytes);
                    const std::string what =
                        kernel + ", rows " + std::to_string(rows) + ", heads " + std::to_string(heads);
                    EXPECT_GE(added, with.fuses_exchange ? 0 : cells * (576 + 1024 + 4)) << what;
                    EXPECT_LE(added, cells * (576 + 1024 + 4) + 4 * 64) << what;
                    problem.dcp = true;
                    problem.rows = 2 * rows;
                    const Plan twice = make_plan(problem, DcpDecode::spec(), {.kernel = kernel});
                    EXPECT_LE(twice.workspace_bytes, 2 * with.workspace_bytes + 1024) << what;
                }
}

}  // namespace
}  // namespace sparsemla::test
