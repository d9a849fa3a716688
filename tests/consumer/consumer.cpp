// Packs two records and averages them: a query of zeros weighs all records alike.
#include <sparsemla/decode.h>

#include <cstdio>
#include <memory>
#include <new>

using namespace sparsemla;

namespace {

constexpr Record record = Record::fp8_576;
constexpr std::int64_t d = layout_of(record).d_qk();
constexpr std::align_val_t alignment{64};

alignas(16) std::byte cache_memory[2 * layout_of(record).record_bytes];
alignas(16) std::uint8_t query[d];
float values[2][d];
float out[value_dims];

struct Deleter {
    void operator()(void* memory) const { ::operator delete(memory, alignment); }
};

}  // namespace

int main() {
    std::int32_t slots[2] = {0, 1};
    for (int i = 0; i < value_dims; ++i) values[1][i] = 1;
    const MutableCacheView cache{.record = record, .data = cache_memory, .pages = 1, .page_size = 2};
    pack(cache, dense(&values[0][0], DType::f32, {2, d}), dense(slots, DType::i32, {2}));

    Problem problem;
    problem.rows = 1;
    problem.heads = 1;
    problem.sources = {{.record = record, .width = 2}};
    problem.lse = false;
    problem.out_dtype = DType::f32;
    const Plan plan = make_plan(problem, query_device({}));
    prepare(plan, {});
    const std::unique_ptr<void, Deleter> workspace(::operator new(plan.workspace_bytes, alignment));

    DecodeArgs args;
    args.rows = 1;
    args.query = dense(query, DType::f8_e4m3, {1, 1, d});
    args.sources[0] = {.cache = cache, .slots = dense(slots, DType::i32, {1, 2}), .counts = {}};
    args.out = dense(out, DType::f32, {1, 1, value_dims});
    args.workspace = {workspace.get(), plan.workspace_bytes};
    decode(plan, args);
    std::printf("sparsemla %s: %g\n", build_info().version.c_str(), static_cast<double>(out[0]));
}
