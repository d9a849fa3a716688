// Groups whose ranks are threads, of a fake NCCL in host memory: set-up, what may go wrong in it on any rank, exchanges
// through the mailboxes it maps, exchanges by collectives. On GPUs: tests/cuda/nccl_test.cpp.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "harness/random.h"
#include "nccl/exchange_layout.h"
#include "nccl/window.h"
#include "tests/dcp.h"
#include "tests/fake_nccl.h"
#include "tests/host_group_device.h"
#include "tests/nccl_ranks.h"

namespace sparsemla::test {
namespace {

/// The fake, beside this program.
std::string fake_library() {
    static const std::string path = [] {
        Dl_info info{};
        // Anything of this program.
        dladdr(reinterpret_cast<void*>(+[] {}), &info);
        const std::string self = info.dli_fname == nullptr ? "" : info.dli_fname;
        const std::size_t end = self.rfind('/');
        return (end == std::string::npos ? "./" : self.substr(0, end + 1)) + "libfake_nccl.so";
    }();
    return path;
}

template <class Function>
Function* fake_function(const char* name) {
    void* library = dlopen(fake_library().c_str(), RTLD_NOW);
    EXPECT_NE(library, nullptr) << dlerror();
    return reinterpret_cast<Function*>(dlsym(library, name));
}
void set_faults(const FakeNcclFaults& faults) { fake_function<void(const FakeNcclFaults*)>("fake_nccl_set")(&faults); }
FakeNcclState fake_state() {
    FakeNcclState state;
    fake_function<void(FakeNcclState*)>("fake_nccl_state")(&state);
    return state;
}
void expect_all_closed(int aborts = 0) {
    const FakeNcclState state = fake_state();
    EXPECT_EQ(state.comms, 0);
    EXPECT_EQ(state.windows, 0);
    EXPECT_EQ(state.memory, 0);
    EXPECT_EQ(state.violations, 0);
    EXPECT_EQ(state.aborts, aborts);
}

struct RankSetUp {
    DcpShape shape;
    NcclBootstrap bootstrap;
    NcclOptions options;
    std::string identity;
};

std::vector<RankSetUp> set_ups(const DcpShape& shape, double limit_s = 20) {
    const int world = static_cast<int>(shape.head_offset.size()) - 1;
    const NcclId id = new_nccl_id(fake_library());
    std::vector<RankSetUp> all;
    for (int rank = 0; rank < world; ++rank)
        all.push_back({shape,
                       {.rank = rank, .world = world, .meeting = id},
                       {.library = fake_library(), .setup_limit_s = limit_s},
                       "device " + std::to_string(rank)});
    return all;
}

/// The Error of each rank's thread, or "".
template <class Group>
std::vector<std::string> run_ranks(const std::vector<RankSetUp>& ranks, const std::function<void(Group&)>& work = {}) {
    std::vector<std::string> errors(ranks.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < ranks.size(); ++i)
        threads.emplace_back([&, i] {
            try {
                Group group(ranks[i].shape, std::make_unique<HostGroupDevice>(ranks[i].identity), ranks[i].bootstrap,
                            ranks[i].options);
                if (work) work(group);
                group.barrier({});
            } catch (const Error& error) {
                errors[i] = error.what();
            }
        });
    for (std::thread& thread : threads) thread.join();
    return errors;
}

void expect_has(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}
void expect_every(const std::vector<std::string>& errors, const std::string& part) {
    for (const std::string& error : errors) expect_has(error, part);
}

// The window of 2.28 is read where it lies; from 2.29 on NCCL is asked.
TEST(NcclGroup, ExchangesThroughItsMailboxesGiveTheBitsOfTheMergedPartials) {
    for (const int version : {22809, 22902, 23203}) {
        for (const std::vector<std::int64_t>& heads : {std::vector<std::int64_t>{0, 5}, {0, 3, 5}, {0, 1, 4, 6}}) {
            set_faults({.version = version});
            DcpStep step({.head_offset = heads, .sinks = true, .seed = 3});
            const std::vector<harness::DcpWindow> windows = step.windows(100);
            const auto errors =
                run_ranks<NcclGroup>(set_ups(shape_of(step.group(), step.step())), [&](NcclGroup& group) {
                    group.mailbox().wait_limit_s = 20;
                    EXPECT_EQ(run_by_mailbox(group, step.group(), step.step(), windows), "");
                    EXPECT_EQ(status(group.mailbox()).exchanges, 100U);
                    group.reset();
                    EXPECT_EQ(status(group.mailbox()).exchanges, 0U);
                    EXPECT_EQ(run_by_mailbox(group, step.group(), step.step(), {{0, 2}}), "");
                });
            for (const std::string& error : errors) EXPECT_EQ(error, "") << version;
            expect_all_closed();
        }
    }
}

TEST(NcclGroup, DescribesItself) {
    set_faults({});
    const auto errors = run_ranks<NcclGroup>(set_ups(equal_shares(2, 3, 4)), [](NcclGroup& group) {
        expect_has(group.describe(), "rank " + std::to_string(group.rank()) + " of 2 on cpu, NCCL 2.29.2");
        EXPECT_EQ(group.world(), 2);
        const MailboxLayout& layout = group.mailbox().layout;
        EXPECT_EQ(layout, mailbox_layout(equal_shares(2, 3, 4)));
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(NcclExchange, ExchangesByCollectivesGiveTheBitsOfTheMergedPartials) {
    struct Case {
        std::vector<std::int64_t> heads;
        DcpSpec spec;
    };
    const DcpSpec plain{.sinks = true, .by_calls = true};
    const DcpSpec bf16{.record = Record::bf16, .query_dtype = DType::bf16, .by_calls = true, .out_dtype = DType::f32};
    const DcpSpec two{.second_source = true, .by_calls = true, .lse_base = LseBase::two, .seed = 9};
    for (const DcpSpec& spec : {plain, bf16, two})
        for (const std::vector<std::int64_t>& heads :
             {std::vector<std::int64_t>{0, 5}, {0, 3, 5}, {0, 2, 4}, {0, 1, 4, 6}, {0, 1, 2, 3, 4, 5, 6, 7, 8}}) {
            set_faults({.team = 1});  // no rank reaches another
            DcpSpec of_heads = spec;
            of_heads.head_offset = heads;
            DcpStep step(of_heads);
            const std::vector<harness::DcpWindow> windows = step.windows(12);
            const auto errors =
                run_ranks<NcclExchange>(set_ups(shape_of(step.group(), step.step())), [&](NcclExchange& exchange) {
                    EXPECT_EQ(run_by_collectives(exchange, step.group(), step.step(), windows), "") << step.text();
                });
            for (const std::string& error : errors) EXPECT_EQ(error, "");
            expect_all_closed();
        }
}

// A BF16 query becomes the codes that gather_query of a mailbox makes of it.
TEST(NcclExchange, QuantisesTheQueryAsMailboxesDo) {
    const DcpShape shape{.rows = 3, .head_offset = {0, 2, 5}, .query_dtype = DType::f8_e4m3, .d_qk = 576};
    OwnedTensor query = make_owned(DType::bf16, {3, 5, 576});
    harness::Random random(4);
    for (std::int64_t i = 0; i < 3 * 5 * 576; ++i)
        reinterpret_cast<std::uint16_t*>(query.bytes.get())[i] = static_cast<std::uint16_t>(random.below(65536));
    const auto own = [&](int rank) {
        Tensor heads = query.view();
        heads.data = static_cast<std::uint16_t*>(heads.data) + shape.head_offset[static_cast<std::size_t>(rank)] * 576;
        heads.shape[1] = rank == 0 ? 2 : 3;
        return heads;
    };
    LoopbackGroup loopback(shape, {});
    OwnedTensor wanted = make_owned(DType::f8_e4m3, {3, 5, 576});
    for (int rank : {0, 1}) gather_query(loopback.mailbox(rank), {.rows = 3, .query = own(rank), .q_scale = 0.37F});
    receive_query(loopback.mailbox(0), 3, wanted.view());
    set_faults({});
    const auto errors = run_ranks<NcclExchange>(set_ups(shape), [&](NcclExchange& exchange) {
        OwnedTensor got = make_owned(DType::f8_e4m3, {3, 5, 576});
        exchange.gather_query({.rows = 3, .query = own(exchange.rank()), .q_scale = 0.37F});
        exchange.receive_query(3, got.view());
        EXPECT_EQ(std::memcmp(got.bytes.get(), wanted.bytes.get(), 3 * 5 * 576), 0) << "rank " << exchange.rank();
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(NcclExchange, RefusesWhatAMailboxRefuses) {
    set_faults({});
    const auto errors = run_ranks<NcclExchange>(set_ups(equal_shares(1, 2, 4)), [](NcclExchange& exchange) {
        const auto refusal = [](const std::function<void()>& call) -> std::string {
            try {
                call();
            } catch (const Error& error) {
                return error.what();
            }
            return "";
        };
        OwnedTensor query = make_owned(DType::f8_e4m3, {4, 2, 576});
        expect_has(refusal([&] { exchange.gather_query({.rows = 5, .query = query.view()}); }), "rows");
        expect_has(refusal([&] { exchange.gather_query({.rows = 4}); }), "query");
        expect_has(refusal([&] { exchange.gather_query({.rows = 4, .query = query.view(), .q_scale = 2}); }),
                   "q_scale");
        OwnedTensor out = make_owned(DType::bf16, {4, 2, 576});
        expect_has(refusal([&] { exchange.receive_query(4, out.view()); }), "out");
        const Problem problem{.rows = 4, .heads = 2, .sources = {{.record = Record::fp8_576, .width = 8}}};
        const Plan plan = make_plan(problem, query_device({}));
        expect_has(refusal([&] { exchange.decode(plan, {.rows = 4}); }), "NcclExchange::problem");
        Problem wider = NcclExchange::problem(problem);
        wider.heads = 3;
        const Plan of_three = make_plan(wider, query_device({}));
        expect_has(refusal([&] { exchange.decode(of_three, {.rows = 4}); }), "2 heads");
        exchange.gather_query({.rows = 0});
        exchange.merge_pushed({.rows = 0});
    });
    EXPECT_EQ(errors.front(), "");
    expect_all_closed();
}

// The padded all-gather: every head of every rank has one place, and the heads of all ranks leave no gap.
TEST(NcclExchange, HeadsOfThePaddedAllGatherAreWhereTheQueryNeedsThem) {
    for (const std::vector<std::int64_t>& heads :
         {std::vector<std::int64_t>{0, 12, 24}, {0, 1, 8}, {0, 5, 6, 20, 22}, {0, 96}})
        for (const std::int64_t rows : {1, 3, 7})
            for (int rank = 0; rank + 1 < static_cast<int>(heads.size()); ++rank) {
                const MailboxLayout shape = mailbox_layout({.rows = 7, .head_offset = heads});
                const detail::ExchangeLayout layout = detail::exchange_layout(shape, rank);
                const std::int64_t head = 576 * rows;
                std::int64_t end = layout.query;
                for (int from = 0; from < shape.world; ++from) {
                    const detail::Block part = layout.gathered_part(from, rows);
                    EXPECT_EQ(part.bytes, shape.most_heads * head);
                    EXPECT_EQ(part.at, layout.gathered + from * shape.most_heads * head);
                    EXPECT_EQ(layout.gathered_heads(from, rows).at, part.at);
                    EXPECT_EQ(layout.query_heads(from, rows).at, end);
                    end += shape.heads_of(from) * head;
                    EXPECT_EQ(layout.sent_out(from, rows).at, layout.out + shape.head_offset[from] * rows * 1024);
                    EXPECT_EQ(layout.received_lse(from, rows).bytes, shape.heads_of(rank) * rows * 4);
                }
                EXPECT_EQ(end, layout.query + shape.heads * head);
                EXPECT_EQ(layout.equal_shares(), layout.query == layout.gathered);
                if (!layout.equal_shares()) {
                    EXPECT_GE(layout.query, layout.gathered_part(shape.world, 7).at);
                }
                EXPECT_LE(layout.query_heads(shape.world - 1, 7).at + layout.query_heads(shape.world - 1, 7).bytes,
                          layout.out);
                EXPECT_LE(layout.received_lse(shape.world, 7).at, layout.bytes);
                // What one rank sends is what the other expects.
                for (int other = 0; other < shape.world; ++other)
                    EXPECT_EQ(layout.sent_out(other, rows).bytes,
                              detail::exchange_layout(shape, other).received_out(rank, rows).bytes);
            }
}

// B077, and what else ranks may see differently: an Error on every rank that names who differs.
TEST(K28_PeerSetUp, RanksThatDisagreeAreNamedOnEveryRank) {
    set_faults({});
    const DcpShape shape = equal_shares(3, 2, 4);
    auto ranks = set_ups(shape);
    ranks[1].shape.rows = 5;
    expect_every(run_ranks<NcclGroup>(ranks), "rank 1 with 5 rows");
    ranks = set_ups(shape);
    ranks[2].shape.head_offset = {0, 2, 3, 6};
    expect_every(run_ranks<NcclExchange>(ranks), "rank 2 with 4 rows, 6 heads");
    ranks = set_ups(shape);
    ranks[2].shape.query_dtype = DType::bf16;
    expect_every(run_ranks<NcclGroup>(ranks), "rank 2 with");
    ranks = set_ups(shape);
    ranks[2].identity = ranks[0].identity;
    expect_every(run_ranks<NcclGroup>(ranks), "ranks 0 and 2 on device 0");
    for (const std::vector<int>& order : {std::vector<int>{0, 2, 1}, {2, 1, 0}}) {
        ranks = set_ups(shape);
        for (int rank = 0; rank < 3; ++rank) ranks[static_cast<std::size_t>(rank)].options.members = order;
        for (int rank = 0; rank < 3; ++rank)
            ranks[static_cast<std::size_t>(rank)].options.member = order[static_cast<std::size_t>(rank)];
        for (const std::string& error : run_ranks<NcclGroup>(ranks)) EXPECT_EQ(error, "");
        ranks = set_ups(shape);
        for (int rank = 0; rank < 3; ++rank) ranks[static_cast<std::size_t>(rank)].options.members = order;
        for (int rank = 0; rank < 3; ++rank) ranks[static_cast<std::size_t>(rank)].options.member = rank;
        expect_every(run_ranks<NcclGroup>(ranks), "is member");
        ranks = set_ups(shape);
        ranks[1].options.members = order;
        expect_every(run_ranks<NcclGroup>(ranks), "members: need order");
    }
    expect_all_closed();
}

// B074: what fails on one rank is an Error on every rank, and nothing stays open.
TEST(K28_PeerSetUp, AFaultOnOneRankIsNamedOnEveryRank) {
    const DcpShape shape = equal_shares(3, 2, 4);
    const auto expect_fault = [&](const FakeNcclFaults& faults, const std::string& text) {
        set_faults(faults);
        const auto errors = run_ranks<NcclGroup>(set_ups(shape));
        expect_every(errors, text);
        expect_all_closed();
    };
    expect_fault({.null_memory = 2}, "success and a null address");
    expect_fault({.no_memory = 1}, "a fake error: said the fake");
    expect_fault({.null_window = 1}, "rank 1: ncclCommWindowRegister: need a window");
    expect_fault({.version = 22803, .null_window = 0}, "rank 0: ncclCommWindowRegister: need a window");
    expect_fault({.version = 22803, .foreign_window = 2}, "rank 2: ncclCommWindowRegister: need a window in memory");
    expect_fault({.swapped = 0}, "rank 0: addresses of an NCCL window: need the memory of rank 0, got that of rank 2");
}

TEST(K28_PeerSetUp, RanksOutOfReachAreNamedWithTheFallBack) {
    for (const int version : {22809, 22902}) {
        set_faults({.version = version, .team = 2});
        const auto errors = run_ranks<NcclGroup>(set_ups(equal_shares(4, 2, 4)));
        expect_every(errors, "does not reach ranks 2 and 3");
        expect_every(errors, "rank 3 (");
        expect_every(errors, "NcclExchange");
        expect_all_closed();
    }
}

// Ranks that stop answering in the middle: a limit, an Error, and communicators aborted.
TEST(K28_PeerSetUp, WaitsOfTheSetUpAreBounded) {
    set_faults({});
    auto ranks = set_ups(equal_shares(3, 2, 4), 0.3);
    ranks.pop_back();
    auto errors = run_ranks<NcclGroup>(ranks);
    expect_every(errors, "ncclCommInitRankConfig of 3 ranks: need success on every rank, within 0.3 s");
    expect_all_closed(2);
    set_faults({.register_error = 1});
    errors = run_ranks<NcclGroup>(set_ups(equal_shares(3, 2, 4), 0.3));
    expect_every(errors, "ncclCommWindowRegister: need success on every rank");
    expect_has(errors[1], "a fake error");
    expect_has(errors[0], "other ranks that have not come");
    expect_all_closed(3);
    set_faults({.async_error = 2});
    errors = run_ranks<NcclGroup>(set_ups(equal_shares(3, 2, 4), 0.3));
    for (const std::string& error : errors) EXPECT_NE(error, "");
    expect_has(errors[2], "a fake error");
    expect_all_closed(3);
}

std::string refusal_of(const NcclOptions& options, const DcpShape& shape = equal_shares(1, 2, 4),
                       const NcclBootstrap& bootstrap = {}) {
    try {
        NcclGroup(shape, std::make_unique<HostGroupDevice>("d"), bootstrap, options);
        return "";
    } catch (const Error& error) {
        return std::string(error.kind() == ErrorKind::unsupported ? "unsupported: " : "") + error.what();
    }
}

TEST(K28_PeerSetUp, LibrariesThatWillNotDoAreNamed) {
    const auto with = [](const std::string& library) { return NcclOptions{.library = library}; };
    expect_has(refusal_of(with("libno_such_nccl.so.2")),
               "unsupported: library libno_such_nccl.so.2: need NCCL 2, 2.28");
    expect_has(refusal_of(with("libc.so.6")), "without ncclGetVersion");
    for (const auto& [version, text] :
         {std::pair{22707, "got 2.27.7"}, {2708, "version code 2708"}, {30000, "got 3.0.0"}}) {
        set_faults({.version = version});
        expect_has(refusal_of(with(fake_library())), text);
    }
    set_faults({});
    EXPECT_THROW(new_nccl_id("libno_such_nccl.so.2"), Error);
}

TEST(K28_PeerSetUp, ImpossibleGroupsAreRefused) {
    const NcclOptions options{.library = fake_library()};
    expect_has(refusal_of(options, equal_shares(2, 2, 4)), "bootstrap.world");
    expect_has(refusal_of(options, equal_shares(1, 2, 0)), "shape.rows");
    NcclOptions other = options;
    other.setup_limit_s = 0;
    expect_has(refusal_of(other), "setup_limit_s");
    other = options;
    other.members = {0, 1};
    expect_has(refusal_of(other), "members");
    for (const Device device : {Device{}, Device{Device::Kind::cuda, 9999}}) {
        try {
            NcclGroup(equal_shares(1, 2, 4), device, {}, options);
            ADD_FAILURE() << to_string(device);
        } catch (const Error& error) {
            EXPECT_EQ(error.argument(), "device");
        }
    }
}

TEST(NcclVersion, IsReadFromItsCode) {
    EXPECT_EQ(detail::nccl_version_text(22809), "2.28.9");
    EXPECT_EQ(detail::nccl_version_text(23203), "2.32.3");
    EXPECT_EQ(detail::nccl_version_text(21005), "2.10.5");
}

TEST(NcclWindow, AddressesOfAWindowOf228) {
    std::byte* base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
    const detail::NcclWindowHead head{
        .host = nullptr, .flat_base = base, .team_rank = 1, .world_rank = 5, .stride_4g = 36, .multicast_offset_4k = 0};
    const detail::NcclTeam team{.ranks = 4, .rank = 1, .stride = 1};
    EXPECT_EQ(detail::peer_base(head, team, 3), nullptr);
    EXPECT_EQ(detail::peer_base(head, team, 4), base);
    EXPECT_EQ(detail::peer_base(head, team, 7), base + (std::uint64_t{3 * 36} << 32));
    EXPECT_EQ(detail::peer_base(head, team, 8), nullptr);
}

}  // namespace
}  // namespace sparsemla::test
