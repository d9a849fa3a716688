/* The C interface from C11: every NULL, struct sizes of other versions, values out of range, error texts. */
#include "c_api_step.h"

static void test_nulls(void) {
    step* s = make_step();
    const sparsemla_status bad = SPARSEMLA_INVALID_ARGUMENT;
    sparsemla_tensor t = TENSOR(s->slots, SPARSEMLA_I32, 1);
    sparsemla_record_layout layout = {.size = sizeof layout};
    sparsemla_plan* plan = NULL;
    int32_t supported = 0;
    int64_t value = 0;
    expect_refused(sparsemla_query_device(SPARSEMLA_CPU, 0, NULL), bad, "out", "query_device");
    expect_refused(sparsemla_find_record(NULL, 0, &layout), bad, "name", "find_record");
    expect_refused(sparsemla_find_record("bf16", 0, NULL), bad, "out", "find_record");
    expect_refused(sparsemla_cache_bytes(NULL, &value), bad, "cache", "cache_bytes");
    expect_refused(sparsemla_cache_bytes(&s->cache, NULL), bad, "out_bytes", "cache_bytes");
    expect_refused(sparsemla_pack(NULL, &t, &t, NULL, NULL), bad, "cache", "pack");
    expect_refused(sparsemla_pack(&s->cache, NULL, &t, NULL, NULL), bad, "values", "pack");
    expect_refused(sparsemla_pack(&s->cache, &t, NULL, NULL, NULL), bad, "slots", "pack");
    expect_refused(sparsemla_unpack(NULL, &t, &t, NULL), bad, "cache", "unpack");
    expect_refused(sparsemla_unpack(&s->cache, NULL, &t, NULL), bad, "slots", "unpack");
    expect_refused(sparsemla_unpack(&s->cache, &t, NULL, NULL), bad, "out", "unpack");
    expect_refused(sparsemla_quantize_query(NULL, 1, &t, NULL), bad, "in", "quantize_query");
    expect_refused(sparsemla_quantize_query(&t, 1, NULL, NULL), bad, "out", "quantize_query");
    expect_refused(sparsemla_convert_indices(NULL, NULL), bad, "args", "convert_indices");
    expect_refused(sparsemla_local_length(1, 1, 0, 1, NULL), bad, "out_length", "local_length");
    expect_refused(sparsemla_global_id(1, 1, 0, 1, NULL), bad, "out_token", "global_id");
    expect_refused(sparsemla_plan_create(NULL, &s->device, NULL, &plan), bad, "problem", "plan_create");
    expect_refused(sparsemla_plan_create(&s->problem, NULL, NULL, &plan), bad, "device", "plan_create");
    expect_refused(sparsemla_plan_create(&s->problem, &s->device, NULL, NULL), bad, "out_plan", "plan_create");
    expect_refused(sparsemla_supports(NULL, &s->device, NULL, &supported), bad, "problem", "supports");
    expect_refused(sparsemla_supports(&s->problem, NULL, NULL, &supported), bad, "device", "supports");
    expect_refused(sparsemla_supports(&s->problem, &s->device, NULL, NULL), bad, "out_supported", "supports");
    expect_refused(sparsemla_plan_describe(NULL, NULL), bad, "plan", "plan_describe");
    expect_refused(sparsemla_prepare(NULL, NULL, 0, NULL), bad, "plan", "prepare");
    expect_refused(sparsemla_decode(NULL, &s->args, NULL), bad, "plan", "decode");
    expect_refused(sparsemla_merge(NULL, NULL), bad, "args", "merge");
    sparsemla_plan_destroy(NULL);
    s->problem.sources = NULL;
    expect_refused(sparsemla_plan_create(&s->problem, &s->device, NULL, &plan), bad, "sources", "no sources");
    s->problem.sources = &s->source;

    make_plan(s, "reference");
    poison_outputs(s);
    expect_refused(sparsemla_plan_describe(s->plan, NULL), bad, "out", "plan_describe");
    expect_refused(sparsemla_decode(s->plan, NULL, NULL), bad, "args", "decode");
    s->source_args.cache = NULL;
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), bad, "sources[0].cache", "a source without cache");
    s->args.sources = NULL;
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), bad, "sources", "decode without sources");
    sparsemla_merge_args merge = {.size = sizeof merge, .rows = rows, .heads = heads, .num_partials = 1};
    merge.out = s->args.out;
    expect_refused(sparsemla_merge(&merge, NULL), bad, "partials", "merge without partials");
    check(outputs_untouched(s), "refused calls must write nothing");
    free_plan(s);
}

/* A caller of a later version, whose structs are longer; and of one whose structs end after the required fields. */
static void test_sizes(void) {
    step* s = make_step();
    struct {
        sparsemla_plan_options known;
        int64_t later;
    } options = {sparsemla_plan_options_default(), 0};
    struct {
        sparsemla_record_layout known;
        int64_t later;
    } layout = {{.size = sizeof layout}, -1};
    sparsemla_plan_info info = {.size = offsetof(sparsemla_plan_info, description), .chunk = -7};
    sparsemla_plan_options shortest = {.size = sizeof shortest.size, .kernel = "no_such_kernel"};
    sparsemla_plan* plan = NULL;

    options.known.size = sizeof options;
    expect_ok(sparsemla_plan_create(&s->problem, &s->device, &options.known, &plan), "longer options, all 0");
    sparsemla_plan_destroy(plan);
    options.later = 1;
    plan = NULL;
    expect_refused(sparsemla_plan_create(&s->problem, &s->device, &options.known, &plan), SPARSEMLA_INVALID_ARGUMENT,
                   "options.size", "longer options with an unknown field set");
    check(plan == NULL, "a refused plan_create must leave its output alone");
    expect_ok(sparsemla_plan_create(&s->problem, &s->device, &shortest, &plan), "options that end after their size");
    expect_ok(sparsemla_plan_describe(plan, &info), "a shorter plan_info");
    check(info.schedule != NULL && info.chunk == -7 && info.description == NULL,
          "a shorter plan_info is filled as far as it reaches");
    info.size = sizeof info.size;
    expect_refused(sparsemla_plan_describe(plan, &info), SPARSEMLA_INVALID_ARGUMENT, "out.size", "too short an info");
    sparsemla_plan_destroy(plan);
    expect_ok(sparsemla_find_record("bf16", 0, &layout.known), "a longer record_layout");
    check(layout.later == 0 && layout.known.size == sizeof layout, "later fields of an output struct become 0");

    s->problem.size = offsetof(sparsemla_problem, query_dtype);
    s->problem.query_dtype = -1; /* behind the stated end: not looked at */
    expect_ok(sparsemla_plan_create(&s->problem, &s->device, NULL, &plan), "a problem of required fields only");
    sparsemla_plan_destroy(plan);
    s->problem.size = 0;
    expect_refused(sparsemla_plan_create(&s->problem, &s->device, NULL, &plan), SPARSEMLA_INVALID_ARGUMENT,
                   "problem.size", "a problem without its size");
    s->problem = sparsemla_problem_default();
    s->problem.sources = &s->source;
    s->problem.num_sources = 1;
    s->source.size = 4;
    expect_refused(sparsemla_plan_create(&s->problem, &s->device, NULL, &plan), SPARSEMLA_INVALID_ARGUMENT,
                   "sources[0].size", "a source of 4 bytes");
    s->source.size = SIZE_MAX;
    expect_refused(sparsemla_plan_create(&s->problem, &s->device, NULL, &plan), SPARSEMLA_INVALID_ARGUMENT,
                   "sources[0].size", "a source whose size was never set");
    s->source.size = sizeof s->source;
    s->device.size = sizeof s->device - 1;
    expect_refused(sparsemla_plan_create(&s->problem, &s->device, NULL, &plan), SPARSEMLA_INVALID_ARGUMENT,
                   "device.size", "a device spec cut short");
}

static void test_values(void) {
    step* s = make_step();
    const sparsemla_status bad = SPARSEMLA_INVALID_ARGUMENT;
    sparsemla_plan_options options = sparsemla_plan_options_default();
    sparsemla_plan* plan = NULL;
    make_plan(s, "reference");
    poison_outputs(s);
    s->args.query.dtype = 99;
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), bad, "query.dtype", "an unknown dtype");
    s->args.query.dtype = SPARSEMLA_F8_E4M3;
    s->args.query.rank = 5;
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), bad, "query.rank", "rank 5");
    s->args.query.rank = 0;
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), bad, "query", "no query");
    s->args.query.rank = 3;
    s->args.query.device_kind = 2;
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), bad, "query.device_kind", "an unknown device kind");
    s->args.query.device_kind = SPARSEMLA_CPU;
    s->args.validate = 2;
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), bad, "validate", "a flag of 2");
    s->args.validate = 0;
    s->args.softmax_scale = NAN;
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), bad, "softmax_scale", "a scale of NaN");
    s->args.softmax_scale = 1;
    s->args.q_scale.value = 0;
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), bad, "q_scale", "a scale of 0");
    s->args.q_scale.value = 1;
    s->args.rows = rows + 1;
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), bad, "rows", "rows over the capacity");
    check(outputs_untouched(s), "refused calls must write nothing");
    free_plan(s);

    options.p_format = 4;
    expect_refused(sparsemla_plan_create(&s->problem, &s->device, &options, &plan), bad, "p_format", "P format 4");
    options.p_format = SPARSEMLA_CHOOSE;
    options.reserved = 1;
    expect_refused(sparsemla_plan_create(&s->problem, &s->device, &options, &plan), bad, "reserved", "reserved 1");
    s->source.record = 9;
    expect_refused(sparsemla_plan_create(&s->problem, &s->device, NULL, &plan), bad, "sources[0].record", "record 9");
    s->problem.num_sources = 3;
    expect_refused(sparsemla_plan_create(&s->problem, &s->device, NULL, &plan), bad, "num_sources", "three sources");
    expect_refused(sparsemla_query_device(7, 0, &s->device), bad, "device_kind", "device kind 7");
    expect_refused(sparsemla_query_device(SPARSEMLA_CUDA, 1 << 20, &s->device), SPARSEMLA_UNSUPPORTED, "device",
                   "a GPU that no machine has");
}

static void test_column_rules(void) {
    step* s = make_step();
    sparsemla_plan_options options = sparsemla_plan_options_default();
    sparsemla_plan* plan = NULL;
    for (int32_t rule = SPARSEMLA_COLUMNS_BLOCKS; rule <= SPARSEMLA_COLUMNS_ROUND_ROBIN; ++rule) {
        sparsemla_plan_info info = {.size = sizeof info};
        options.column_rule = rule;
        expect_ok(sparsemla_plan_create(&s->problem, &s->device, &options, &plan), "a column rule");
        expect_ok(sparsemla_plan_describe(plan, &info), "its plan");
        check(info.column_rule == rule, "the plan must have the column rule that was asked for");
        check(rule != SPARSEMLA_COLUMNS_ROUND_ROBIN || strstr(info.schedule, "columns=round_robin") != NULL,
              "the schedule must name the rule");
        sparsemla_plan_destroy(plan);
    }
    options.column_rule = SPARSEMLA_COLUMNS_ROUND_ROBIN + 1;
    expect_refused(sparsemla_plan_create(&s->problem, &s->device, &options, &plan), SPARSEMLA_INVALID_ARGUMENT,
                   "column_rule", "a column rule past the last");
}

/* What an H200 says of itself: plans need no GPU. */
static sparsemla_device_spec hopper(void) {
    static const int32_t clusters[16] = {132, 66, 44, 33, 26, 22, 18, 16, 14, 13, 12, 11, 10, 9, 8, 8};
    sparsemla_device_spec device = {.size = sizeof device,
                                    .device_kind = SPARSEMLA_CUDA,
                                    .name = "a Hopper",
                                    .capability = 90,
                                    .sms = 132,
                                    .shared_memory_bytes = 232448,
                                    .l2_bytes = 60 << 20};
    memcpy(device.resident_clusters, clusters, sizeof clusters);
    return device;
}

static void test_tiling_on_a_cpu(void) {
    step* s = make_step();
    sparsemla_plan_info info = {.size = sizeof info, .tile_heads = -1, .trigger = -1};
    sparsemla_plan* plan = NULL;
    expect_ok(sparsemla_plan_create(&s->problem, &s->device, NULL, &plan), "a plan of the CPU");
    expect_ok(sparsemla_plan_describe(plan, &info), "its description");
    check(info.tile_heads == 0 && info.stages == 0 && info.transport == 0 && info.trigger == 0,
          "a plan of the CPU has no tiling");
    check(info.gather == 0 && info.cluster_tiles == 0, "nor the rest of it");
    sparsemla_plan_destroy(plan);
    plan = NULL;
    for (int i = 0; i < 6; ++i) {
        static const char* const names[6] = {"tile_heads", "stages", "cluster_tiles", "transport", "trigger", "gather"};
        sparsemla_plan_options options = sparsemla_plan_options_default();
        int32_t* const fields[6] = {&options.tile_heads, &options.stages,  &options.cluster_tiles,
                                    &options.transport,  &options.trigger, &options.gather};
        *fields[i] = 1;
        expect_refused(sparsemla_plan_create(&s->problem, &s->device, &options, &plan), SPARSEMLA_UNSUPPORTED, names[i],
                       "a GPU's option for a CPU");
        options.size = offsetof(sparsemla_plan_options, tile_heads); /* a caller that knows none of them */
        expect_ok(sparsemla_plan_create(&s->problem, &s->device, &options, &plan), "options that end before");
        sparsemla_plan_destroy(plan);
        plan = NULL;
        options.size = sizeof options;
        for (int value = -1; i >= 3 && value <= 4; value += 5) {
            *fields[i] = value;
            expect_refused(sparsemla_plan_create(&s->problem, &s->device, &options, &plan), SPARSEMLA_INVALID_ARGUMENT,
                           names[i], "a value that the enumeration lacks");
        }
    }
    check(plan == NULL, "a refused plan_create must leave its output alone");
}

static void test_tiling_on_a_gpu(void) {
    step* s = make_step();
    sparsemla_device_spec device = hopper();
    sparsemla_plan_options options = sparsemla_plan_options_default();
    sparsemla_plan_info info = {.size = sizeof info};
    sparsemla_plan* plan = NULL;
    int32_t supported = -1;
    s->problem.device_kind = SPARSEMLA_CUDA;
    expect_ok(sparsemla_supports(&s->problem, &device, NULL, &supported), "supports");
    if (!supported) {
        check(strstr(sparsemla_last_error(), "CUDA") != NULL, "only a build without CUDA refuses this: %s",
              sparsemla_last_error());
        return;
    }
    options.tile_heads = 32;
    options.stages = 2;
    options.transport = SPARSEMLA_TRANSPORT_BULK;
    options.trigger = SPARSEMLA_TRIGGER_END;
    options.gather = SPARSEMLA_GATHER_BULK;
    options.cluster_tiles = 1;
    expect_ok(sparsemla_plan_create(&s->problem, &device, &options, &plan), "a plan of a GPU");
    expect_ok(sparsemla_plan_describe(plan, &info), "its description");
    check(info.tile_heads == 32 && info.stages == 2 && info.transport == SPARSEMLA_TRANSPORT_BULK &&
              info.trigger == SPARSEMLA_TRIGGER_END && info.gather == SPARSEMLA_GATHER_BULK && info.cluster_tiles == 1,
          "the plan must have the tiling that was asked for");
    check(strstr(info.description, "heads=32 stages=2 cluster_tiles=1 gather=bulk transport=bulk trigger=end") != NULL,
          "and say so: %s", info.description);
    sparsemla_plan_destroy(plan);
    plan = NULL;
    options.tile_heads = 17;
    expect_refused(sparsemla_plan_create(&s->problem, &device, &options, &plan), SPARSEMLA_UNSUPPORTED, "tile_heads",
                   "tiles of 17 heads");
}

int main(void) {
    check(sparsemla_last_error()[0] == '\0', "no call failed yet: need an empty text");
    test_nulls();
    test_sizes();
    test_values();
    test_column_rules();
    test_tiling_on_a_cpu();
    test_tiling_on_a_gpu();
    return report();
}
