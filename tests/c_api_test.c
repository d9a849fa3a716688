/* The C interface from C11: the numbers of whole steps, merge, records, indices. */
#include "c_api_step.h"

static void test_decode(const char* kernel, double bound) {
    step* s = make_step();
    make_plan(s, kernel);
    poison_outputs(s);
    expect_ok(sparsemla_decode(s->plan, &s->args, NULL), kernel);
    expect_step(s, bound);
    free_plan(s);
}

/* Row 0 in two partials, one record each, gives what one call gives. */
static void test_merge(void) {
    static float outs[2][rows * padded_heads * d_v];
    static float lses[2][rows * padded_heads];
    const int32_t slots[2][rows * width] = {{1, -1, -1, -1, -1, -1}, {-1, -1, 0, -1, -1, -1}};
    step* s = make_step();
    sparsemla_partial partials[2];
    make_plan(s, "reference");
    for (int i = 0; i < 2; ++i) {
        memcpy(s->slots, slots[i], sizeof s->slots);
        s->args.out.data = outs[i];
        s->args.lse.data = lses[i];
        expect_ok(sparsemla_decode(s->plan, &s->args, NULL), "decode of a partial");
        partials[i] = (sparsemla_partial){.size = sizeof partials[i], .out = s->args.out, .lse = s->args.lse};
    }
    poison_outputs(s);
    sparsemla_merge_args args = {
        .size = sizeof args, .rows = rows, .heads = heads, .partials = partials, .num_partials = 2};
    args.out = TENSOR(s->out, SPARSEMLA_F32, rows, padded_heads, d_v);
    args.lse = TENSOR(s->lse, SPARSEMLA_F32, rows, padded_heads);
    expect_ok(sparsemla_merge(&args, NULL), "merge");
    expect_step(s, 1e-6);
    args.num_partials = -1;
    expect_refused(sparsemla_merge(&args, NULL), SPARSEMLA_INVALID_ARGUMENT, "num_partials", "merge of -1 partials");
    free_plan(s);
}

static void test_two_sources(void) {
    step* s = make_step();
    sparsemla_source_problem sources[2] = {s->source, s->source};
    sparsemla_source_args source_args[2] = {s->source_args, s->source_args};
    sources[0].width = 1;
    sources[1].width = 2;
    sources[1].count_offset = 1;
    s->problem.sources = sources;
    s->problem.num_sources = 2;
    /* The list of three columns, cut in two: a strided view each, one count over both. */
    source_args[0].slots.shape[1] = 1;
    source_args[1].slots.shape[1] = 2;
    source_args[1].slots.data = s->slots + 1;
    s->args.sources = source_args;
    make_plan(s, "reference");
    poison_outputs(s);
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), SPARSEMLA_INVALID_ARGUMENT, "num_sources",
                   "one source for a plan of two");
    check(outputs_untouched(s), "a refused call must write nothing");
    s->args.num_sources = 2;
    expect_ok(sparsemla_decode(s->plan, &s->args, NULL), "decode of two sources");
    expect_step(s, 1e-6);
    free_plan(s);
}

static void test_records(void) {
    step* s = make_step();
    static float out[3 * d_qk];
    int64_t slots[3] = {1, 3, 0};
    int64_t bytes = 0;
    sparsemla_record_layout layout = {.size = sizeof layout};
    const sparsemla_tensor slot_view = TENSOR(slots, SPARSEMLA_I64, 3);
    const sparsemla_tensor out_view = TENSOR(out, SPARSEMLA_F32, 3, d_qk);
    expect_ok(sparsemla_find_record("fp8", d_qk, &layout), "find_record");
    check(layout.record == SPARSEMLA_RECORD_FP8_576 && layout.record_bytes == d_qk && layout.d_qk == d_qk &&
              layout.d_v == d_v && layout.takes_k_scale == 1 && strcmp(layout.name, "fp8") == 0,
          "the layout of fp8 with 576 bytes");
    expect_ok(sparsemla_find_record("nvfp4_v41", 0, &layout), "find_record by name alone");
    check(layout.record == SPARSEMLA_RECORD_NVFP4_V41 && layout.has_planar && layout.has_contiguous &&
              layout.data_bytes + layout.scale_bytes == layout.record_bytes,
          "the layout of nvfp4_v41");
    expect_refused(sparsemla_find_record("fp9", 0, &layout), SPARSEMLA_INVALID_ARGUMENT, "fp9", "an unknown record");
    expect_ok(sparsemla_cache_bytes(&s->cache, &bytes), "cache_bytes");
    check(bytes == sizeof s->cache_memory, "cache_bytes: need %d, got %d", (int)sizeof s->cache_memory, (int)bytes);
    slots[1] = num_records; /* not held: zeros */
    expect_ok(sparsemla_unpack(&s->cache, &slot_view, &out_view, NULL), "unpack");
    check(out[0] == 1 && out[d_v] == 1 && out[d_v + 1] == 0, "record 1 unpacked");
    check(out[d_qk] == 0, "a slot that the cache does not hold unpacks to 0");
    check(out[2 * d_qk] == -1 && out[2 * d_qk + d_v] == 0, "record 0 unpacked");
}

static void test_indices(void) {
    step* s = make_step();
    const int32_t expected[2][4] = {{5, 4, -1, -1}, {7, -1, -1, -1}};
    const int32_t expected_counts[2] = {2, 1};
    int32_t ids[2][4] = {{3, 2, -1, 9}, {7, 0, 1, 1}};
    int32_t table[2][2] = {{0, 2}, {1, 3}};
    int32_t request[2] = {1, 1};
    int32_t slots[2][4];
    int32_t counts[2];
    int64_t value = 0;
    sparsemla_convert_args args = sparsemla_convert_args_default();
    s->cache.pages = 4;
    s->cache.page_size = 4;
    s->cache.data = NULL;
    args.token_ids = TENSOR(ids, SPARSEMLA_I32, 2, 4);
    args.block_table = TENSOR(table, SPARSEMLA_I32, 2, 2);
    args.request_of_row = TENSOR(request, SPARSEMLA_I32, 2);
    args.cache = &s->cache;
    args.slots = TENSOR(slots, SPARSEMLA_I32, 2, 4);
    args.counts = TENSOR(counts, SPARSEMLA_I32, 2);
    /* Rank 1 of 2, two tokens in turn: it holds 2, 3, 6, 7, 10, 11, ... at positions 0, 1, 2, ... */
    args.world = 2;
    args.rank = 1;
    args.interleave = 2;
    expect_ok(sparsemla_convert_indices(&args, NULL), "convert_indices");
    for (int r = 0; r < 2; ++r) {
        check(counts[r] == expected_counts[r], "counts[%d]: need %d, got %d", r, expected_counts[r], counts[r]);
        for (int c = 0; c < 4; ++c)
            check(slots[r][c] == expected[r][c], "slots[%d][%d]: need %d, got %d", r, c, expected[r][c], slots[r][c]);
    }
    args.rank = 2;
    expect_refused(sparsemla_convert_indices(&args, NULL), SPARSEMLA_INVALID_ARGUMENT, "rank", "rank 2 of 2");
    expect_ok(sparsemla_local_length(7, 2, 1, 2, &value), "local_length");
    check(value == 3, "local_length(7): need 3 (tokens 2, 3, 6), got %d", (int)value);
    expect_ok(sparsemla_global_id(2, 2, 1, 2, &value), "global_id");
    check(value == 6, "global_id(2): need 6, got %d", (int)value);
    expect_refused(sparsemla_local_length(7, 0, 0, 1, &value), SPARSEMLA_INVALID_ARGUMENT, "world", "world 0");
    expect_refused(sparsemla_local_length(7, 2, -1, 1, &value), SPARSEMLA_INVALID_ARGUMENT, "rank", "rank -1");
    expect_refused(sparsemla_local_length(7, 2, 0, 0, &value), SPARSEMLA_INVALID_ARGUMENT, "interleave", "turn 0");
    expect_refused(sparsemla_global_id(INT64_MAX, 2, 0, 1, &value), SPARSEMLA_INVALID_ARGUMENT, "local", "overflow");
    expect_refused(sparsemla_global_id(-1, 2, 0, 1, &value), SPARSEMLA_INVALID_ARGUMENT, "local", "local -1");
}

/* The step's rows from token ids of one request: of rank 0 of 2 one token each in turn, so that ids 2 and 0 are records
 * 1 and 0. */
static void test_decode_from_ids(const char* kernel, double bound) {
    step* s = make_step();
    int32_t ids[rows][width] = {{2, 1, 0}, {5, -3, 99}};
    int32_t table[1] = {0};
    int32_t request[rows] = {0, 0};
    sparsemla_convert_args indices = sparsemla_convert_args_default();
    indices.token_ids = TENSOR(ids, SPARSEMLA_I32, rows, width);
    indices.block_table = TENSOR(table, SPARSEMLA_I32, 1, 1);
    indices.request_of_row = TENSOR(request, SPARSEMLA_I32, rows);
    indices.world = 2;
    s->problem.from_ids = 1;
    make_plan(s, kernel);
    poison_outputs(s);
    s->args.indices = &indices;
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), SPARSEMLA_INVALID_ARGUMENT, "slots", "ids and slots");
    memset(&s->source_args.slots, 0, sizeof s->source_args.slots);
    memset(&s->source_args.counts, 0, sizeof s->source_args.counts);
    s->args.indices = NULL;
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), SPARSEMLA_INVALID_ARGUMENT, "token_ids", "no ids");
    check(outputs_untouched(s), "refused calls write nothing");
    s->args.indices = &indices;
    expect_ok(sparsemla_decode(s->plan, &s->args, NULL), kernel);
    expect_step(s, bound);
    free_plan(s);
}

static void test_supports(void) {
    step* s = make_step();
    sparsemla_plan_options options = sparsemla_plan_options_default();
    sparsemla_plan* plan = NULL;
    int32_t supported = -1;
    expect_ok(sparsemla_supports(&s->problem, &s->device, NULL, &supported), "supports");
    check(supported == 1, "supports: need 1, got %d", supported);
    s->problem.heads = 129;
    expect_ok(sparsemla_supports(&s->problem, &s->device, NULL, &supported), "supports of 129 heads");
    check(supported == 0, "supports of 129 heads: need 0, got %d", supported);
    check(strstr(sparsemla_last_error(), "heads") != NULL, "the refusal must name heads: %s", sparsemla_last_error());
    check(sparsemla_plan_create(&s->problem, &s->device, NULL, &plan) != SPARSEMLA_OK && plan == NULL,
          "what supports refuses, plan_create refuses");
    s->problem.heads = heads;
    options.kernel = "no_such_kernel";
    expect_refused(sparsemla_plan_create(&s->problem, &s->device, &options, &plan), SPARSEMLA_INVALID_ARGUMENT,
                   "no_such_kernel", "an unknown kernel");
}

int main(void) {
    check(strcmp(sparsemla_version(), SPARSEMLA_EXPECTED_VERSION) == 0, "version: got %s", sparsemla_version());
    test_decode("reference", 1e-6);
    test_decode("cpu", 0.5 * 0x1p-8);
    test_merge();
    test_two_sources();
    test_records();
    test_indices();
    test_decode_from_ids("reference", 1e-6);
    test_decode_from_ids("cpu", 0.5 * 0x1p-8);
    test_supports();
    return report();
}
