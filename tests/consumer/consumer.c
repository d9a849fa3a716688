/* Packs two records and averages them: a query of zeros weighs all records alike. */
#include <sparsemla/sparsemla.h>
#include <sparsemla/sparsemla_dcp.h>
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>

enum { d_qk = 576, d_v = 512, records = 2 };

static void must(sparsemla_status status) {
    if (status == SPARSEMLA_OK) return;
    fprintf(stderr, "%s\n", sparsemla_last_error());
    exit(1);
}

/* The second header, linked too. */
static void lay_out_a_mailbox(void) {
    const int64_t head_offset[] = {0, 1};
    sparsemla_dcp_shape shape = sparsemla_dcp_shape_default();
    sparsemla_mailbox_layout layout = {.size = sizeof layout};
    shape.rows = 1;
    shape.head_offset = head_offset;
    shape.world = 1;
    must(sparsemla_mailbox_layout_of(&shape, &layout));
    if (layout.heads != 1) exit(1);
}

int main(void) {
    static alignas(64) unsigned char cache_bytes[records * d_qk];
    static alignas(16) unsigned char query[d_qk];
    static float values[records][d_qk];
    static float out[d_v];
    int32_t slots[records] = {0, 1};
    float lse = 0;
    for (int i = 0; i < d_v; ++i) values[1][i] = 1;

    sparsemla_cache cache = {
        .size = sizeof cache, .record = SPARSEMLA_RECORD_FP8_576, .pages = 1, .page_size = records};
    cache.data = cache_bytes;
    sparsemla_tensor value_view = {values, SPARSEMLA_F32, SPARSEMLA_CPU, 0, 2, {records, d_qk}, {d_qk, 1}};
    sparsemla_tensor pack_slots = {slots, SPARSEMLA_I32, SPARSEMLA_CPU, 0, 1, {records}, {1}};
    must(sparsemla_pack(&cache, &value_view, &pack_slots, NULL, NULL));

    sparsemla_source_problem source = {.size = sizeof source, .record = SPARSEMLA_RECORD_FP8_576, .width = records};
    sparsemla_problem problem = sparsemla_problem_default();
    problem.rows = 1;
    problem.heads = 1;
    problem.out_dtype = SPARSEMLA_F32;
    problem.sources = &source;
    problem.num_sources = 1;
    sparsemla_device_spec device = {.size = sizeof device};
    must(sparsemla_query_device(SPARSEMLA_CPU, 0, &device));
    sparsemla_plan* plan = NULL;
    must(sparsemla_plan_create(&problem, &device, NULL, &plan));
    sparsemla_plan_info info = {.size = sizeof info};
    must(sparsemla_plan_describe(plan, &info));

    sparsemla_source_args source_args = sparsemla_source_args_default();
    source_args.cache = &cache;
    source_args.slots = (sparsemla_tensor){slots, SPARSEMLA_I32, SPARSEMLA_CPU, 0, 2, {1, records}, {records, 1}};
    sparsemla_decode_args args = sparsemla_decode_args_default();
    args.rows = 1;
    args.sources = &source_args;
    args.num_sources = 1;
    args.query = (sparsemla_tensor){query, SPARSEMLA_F8_E4M3, SPARSEMLA_CPU, 0, 3, {1, 1, d_qk}, {d_qk, d_qk, 1}};
    args.out = (sparsemla_tensor){out, SPARSEMLA_F32, SPARSEMLA_CPU, 0, 3, {1, 1, d_v}, {d_v, d_v, 1}};
    args.lse = (sparsemla_tensor){&lse, SPARSEMLA_F32, SPARSEMLA_CPU, 0, 2, {1, 1}, {1, 1}};
    args.workspace_bytes = info.workspace_bytes;
    args.workspace = aligned_alloc(64, (info.workspace_bytes + 64) / 64 * 64);
    must(sparsemla_prepare(plan, NULL, 0, NULL));
    must(sparsemla_decode(plan, &args, NULL));
    printf("sparsemla %s: %g\n", sparsemla_version(), (double)out[0]);
    free(args.workspace);
    sparsemla_plan_destroy(plan);
    lay_out_a_mailbox();
    return 0;
}
