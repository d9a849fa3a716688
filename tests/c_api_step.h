/* One decode step with known results, and checks, for the tests of the C interface. */
#ifndef SPARSEMLA_TESTS_C_API_STEP_H
#define SPARSEMLA_TESTS_C_API_STEP_H

#include <math.h>
#include <stdalign.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sparsemla/sparsemla.h"

enum { d_qk = 576, d_v = 512, num_records = 4, rows = 2, heads = 3, padded_heads = 4, width = 3, guard = 16 };

static int checks_failed = 0;
static int checks_run = 0;

static inline void check(int holds, const char* format, ...) {
    va_list list;
    ++checks_run;
    if (holds) return;
    ++checks_failed;
    va_start(list, format);
    printf("FAILED: ");
    vprintf(format, list);
    printf("\n");
    va_end(list);
}

static inline void expect_ok(sparsemla_status status, const char* what) {
    check(status == SPARSEMLA_OK, "%s: need status 0, got %d: %s", what, (int)status, sparsemla_last_error());
}

/* A failing call must give the status and a text that names `argument`. */
static inline void expect_refused(sparsemla_status status, sparsemla_status needed, const char* argument,
                                  const char* what) {
    const char* text = sparsemla_last_error();
    check(status == needed, "%s: need status %d, got %d: %s", what, (int)needed, (int)status, text);
    check(strstr(text, argument) != NULL, "%s: the error must name '%s', got: %s", what, argument, text);
}

static inline void expect_near(double got, double expected, double bound, const char* what) {
    check(fabs(got - expected) <= bound, "%s: need %.9g within %.3g, got %.9g", what, expected, bound, got);
}

static inline sparsemla_tensor tensor(void* data, int32_t dtype, int32_t rank, const int64_t* shape) {
    sparsemla_tensor t;
    int64_t stride = 1;
    memset(&t, 0, sizeof t);
    t.data = data;
    t.dtype = dtype;
    t.rank = rank;
    for (int32_t i = rank; i-- > 0;) {
        t.shape[i] = shape[i];
        t.strides[i] = stride;
        stride *= shape[i];
    }
    return t;
}

#define TENSOR(data, dtype, ...) \
    tensor(data, dtype, (int32_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[]){__VA_ARGS__})

/* One step over four flat fp8 records. Row 0 sees records 1 and 0, row 1 none. Record 0 scores 0 and holds -1; record 1
 * scores ln 3 on head 0 through the first rope column and holds +1: weights 1/4 and 3/4, out 0.5, lse ln 4. The other
 * heads' queries are 0: out 0, lse ln 2. Records 2 and 3 hold NaN codes and are named by nobody. */
typedef struct step {
    alignas(64) unsigned char cache_memory[num_records * d_qk];
    alignas(16) unsigned char query[rows * padded_heads * d_qk];
    int32_t slots[rows * width];
    int32_t counts[rows];
    float out[rows * padded_heads * d_v + guard];
    float lse[rows * padded_heads + guard];
    sparsemla_cache cache;
    sparsemla_source_problem source;
    sparsemla_problem problem;
    sparsemla_device_spec device;
    sparsemla_source_args source_args;
    sparsemla_decode_args args;
    sparsemla_plan* plan;
    void* workspace;
} step;

static const float poison = -12345.0F;

static inline void pack_records(step* s) {
    static float values[2 * d_qk];
    int32_t slots[2] = {0, 1};
    memset(values, 0, sizeof values);
    for (int i = 0; i < d_v; ++i) {
        values[i] = -1;
        values[d_qk + i] = 1;
    }
    values[d_qk + d_v] = 1;
    memset(s->cache_memory, 0x7F, sizeof s->cache_memory);
    const sparsemla_tensor value_view = TENSOR(values, SPARSEMLA_F32, 2, d_qk);
    const sparsemla_tensor slot_view = TENSOR(slots, SPARSEMLA_I32, 2);
    expect_ok(sparsemla_pack(&s->cache, &value_view, &slot_view, NULL, NULL), "pack");
}

static inline void make_query(step* s) {
    static float values[rows * padded_heads * d_qk];
    memset(values, 0, sizeof values);
    values[d_v] = 1;
    values[(padded_heads - 1) * d_qk] = NAN; /* a padded head's garbage reaches nobody */
    const sparsemla_tensor in = TENSOR(values, SPARSEMLA_F32, rows, padded_heads, d_qk);
    const sparsemla_tensor out = TENSOR(s->query, SPARSEMLA_F8_E4M3, rows, padded_heads, d_qk);
    expect_ok(sparsemla_quantize_query(&in, 1.0F, &out, NULL), "quantize_query");
}

static inline step* make_step(void) {
    static step memory;
    step* s = &memory;
    const int32_t slots[rows * width] = {1, -1, 0, 2, 3, 2};
    const int32_t counts[rows] = {3, 0};
    memset(s, 0, sizeof *s);
    memcpy(s->slots, slots, sizeof slots);
    memcpy(s->counts, counts, sizeof counts);
    s->cache = (sparsemla_cache){.size = sizeof s->cache,
                                 .record = SPARSEMLA_RECORD_FP8_576,
                                 .data = s->cache_memory,
                                 .pages = 1,
                                 .page_size = num_records};
    pack_records(s);
    make_query(s);
    s->source =
        (sparsemla_source_problem){.size = sizeof s->source, .record = SPARSEMLA_RECORD_FP8_576, .width = width};
    s->problem = sparsemla_problem_default();
    s->problem.rows = rows;
    s->problem.heads = heads;
    s->problem.out_dtype = SPARSEMLA_F32;
    s->problem.sources = &s->source;
    s->problem.num_sources = 1;
    s->device.size = sizeof s->device;
    expect_ok(sparsemla_query_device(SPARSEMLA_CPU, 0, &s->device), "query_device");
    s->source_args = sparsemla_source_args_default();
    s->source_args.cache = &s->cache;
    s->source_args.slots = TENSOR(s->slots, SPARSEMLA_I32, rows, width);
    s->source_args.counts = TENSOR(s->counts, SPARSEMLA_I32, rows);
    s->args = sparsemla_decode_args_default();
    s->args.rows = rows;
    s->args.sources = &s->source_args;
    s->args.num_sources = 1;
    s->args.softmax_scale = logf(3.0F);
    s->args.query = TENSOR(s->query, SPARSEMLA_F8_E4M3, rows, padded_heads, d_qk);
    s->args.out = TENSOR(s->out, SPARSEMLA_F32, rows, padded_heads, d_v);
    s->args.lse = TENSOR(s->lse, SPARSEMLA_F32, rows, padded_heads);
    return s;
}

static inline void make_plan(step* s, const char* kernel) {
    sparsemla_plan_options options = sparsemla_plan_options_default();
    sparsemla_plan_info info = {.size = sizeof info};
    options.kernel = kernel;
    s->plan = NULL;
    expect_ok(sparsemla_plan_create(&s->problem, &s->device, &options, &s->plan), "plan_create");
    expect_ok(sparsemla_plan_describe(s->plan, &info), "plan_describe");
    check(strcmp(info.kernel, kernel) == 0, "kernel: need %s, got %s", kernel, info.kernel);
    check(strstr(info.schedule, kernel) != NULL, "the schedule must name its kernel: %s", info.schedule);
    check(strlen(info.description) > strlen(info.schedule), "the description must say more than the schedule");
    check(info.row_capacity == rows, "row_capacity: need %d, got %d", rows, (int)info.row_capacity);
    s->args.workspace_bytes = info.workspace_bytes;
    s->args.workspace = s->workspace = aligned_alloc(64, (info.workspace_bytes + 64) / 64 * 64);
    expect_ok(sparsemla_prepare(s->plan, NULL, 0, NULL), "prepare");
}

static inline void free_plan(step* s) {
    sparsemla_plan_destroy(s->plan);
    free(s->workspace);
}

static inline void poison_outputs(step* s) {
    for (size_t i = 0; i < sizeof s->out / sizeof s->out[0]; ++i) s->out[i] = poison;
    for (size_t i = 0; i < sizeof s->lse / sizeof s->lse[0]; ++i) s->lse[i] = poison;
}

static inline int outputs_untouched(const step* s) {
    for (size_t i = 0; i < sizeof s->out / sizeof s->out[0]; ++i)
        if (s->out[i] != poison) return 0;
    for (size_t i = 0; i < sizeof s->lse / sizeof s->lse[0]; ++i)
        if (s->lse[i] != poison) return 0;
    return 1;
}

static inline void expect_step(const step* s, double bound) {
    for (int r = 0; r < rows; ++r)
        for (int h = 0; h < padded_heads; ++h) {
            const double written = r == 0 && h == 0 ? 0.5 : 0.0;
            const double lse = r == 0 ? (h == 0 ? log(4.0) : log(2.0)) : -INFINITY;
            const float* out = s->out + (r * padded_heads + h) * d_v;
            const float got_lse = s->lse[r * padded_heads + h];
            for (int i = 0; i < d_v; ++i)
                if (h < heads)
                    expect_near(out[i], written, r == 0 ? bound : 0.0, "out");
                else
                    check(out[i] == poison, "padded head, row %d: need it untouched, got %g", r, (double)out[i]);
            if (h >= heads)
                check(got_lse == poison, "padded lse, row %d: need it untouched, got %g", r, (double)got_lse);
            else if (r == 1)
                check(isinf(got_lse) && got_lse < 0, "lse of an empty row: need -inf, got %g", (double)got_lse);
            else
                expect_near(got_lse, lse, 1e-5, "lse");
        }
    for (int i = 0; i < guard; ++i) {
        check(s->out[rows * padded_heads * d_v + i] == poison, "guard behind out, element %d", i);
        check(s->lse[rows * padded_heads + i] == poison, "guard behind lse, element %d", i);
    }
}

static inline int report(void) {
    printf("%d passed, %d failed\n", checks_run - checks_failed, checks_failed);
    return checks_failed == 0 ? 0 : 1;
}

#endif
