/* Ranks that share the step's heads, and their exchanges, for the tests of the C interface. All of them in one thread:
 * a stage of every rank, then the next stage. */
#ifndef SPARSEMLA_TESTS_C_API_RANKS_H
#define SPARSEMLA_TESTS_C_API_RANKS_H

#include "c_api_step.h"
#include "sparsemla/sparsemla_dcp.h"

enum { world = 2 };

static const int64_t head_offset[world + 1] = {0, 1, heads};

/* Which records each rank owns of a row's list: rank 1 none of row 1's. */
static const int32_t owned_slots[world][rows * width] = {{0, -1, 1, 2, 0, -1}, {3, 2, -1, -1, -1, -1}};

typedef struct ranks {
    sparsemla_dcp_shape shape;
    sparsemla_loopback* loopback;
    sparsemla_mailbox mailboxes[world];
    int32_t slots[world][rows * width];
    float sinks[heads];
} ranks;

static inline int own_heads(int rank) { return (int)(head_offset[rank + 1] - head_offset[rank]); }

static inline sparsemla_dcp_shape step_shape(void) {
    sparsemla_dcp_shape shape = sparsemla_dcp_shape_default();
    shape.rows = rows;
    shape.head_offset = head_offset;
    shape.world = world;
    return shape;
}

/* Ranks on the CPU; free_ranks ends them. */
static inline ranks* make_ranks(void) {
    static ranks memory;
    ranks* group = &memory;
    memset(group, 0, sizeof *group);
    group->shape = step_shape();
    memcpy(group->slots, owned_slots, sizeof owned_slots);
    for (int h = 0; h < heads; ++h) group->sinks[h] = (float)h - 1;
    expect_ok(sparsemla_loopback_create(&group->shape, SPARSEMLA_CPU, 0, &group->loopback), "loopback_create");
    for (int r = 0; r < world; ++r) {
        group->mailboxes[r].size = sizeof group->mailboxes[r];
        expect_ok(sparsemla_loopback_mailbox(group->loopback, r, &group->mailboxes[r]), "loopback_mailbox");
    }
    return group;
}

static inline void free_ranks(ranks* group) { sparsemla_loopback_destroy(group->loopback); }

/* Numbers of 1/2 to 4 of either sign in place of the step's records and queries: no two heads give the same. */
static inline void randomise(step* s) {
    uint32_t state = 1;
    for (size_t i = 0; i < sizeof s->cache_memory; ++i)
        s->cache_memory[i] = (unsigned char)(((state = state * 1664525 + 1013904223) >> 24 & 0x9F) | 0x20);
    for (size_t i = 0; i < sizeof s->query; ++i)
        s->query[i] = (unsigned char)(((state = state * 1664525 + 1013904223) >> 24 & 0x9F) | 0x20);
    s->args.softmax_scale = 0.05F;
    memset(&s->source_args.counts, 0, sizeof s->source_args.counts);
}

/* A rank's part of what is [rows, padded_heads, columns] of all heads; columns 0: of [rows, padded_heads]. */
static inline sparsemla_tensor part_of(void* data, int32_t dtype, int size_bytes, int rank, int64_t columns) {
    const int64_t last = columns == 0 ? 1 : columns;
    sparsemla_tensor t = TENSOR(data, dtype, rows, own_heads(rank), last);
    t.data = (unsigned char*)data + head_offset[rank] * last * size_bytes;
    t.strides[0] = padded_heads * last;
    if (columns == 0) t.rank = 2;
    return t;
}

static inline sparsemla_gather_query_args gather_args(step* s, int rank) {
    sparsemla_gather_query_args args = sparsemla_gather_query_args_default();
    args.rows = rows;
    args.query = part_of(s->query, SPARSEMLA_F8_E4M3, 1, rank, d_qk);
    return args;
}

static inline sparsemla_merge_pushed_args merge_args(step* s, ranks* group, int rank) {
    sparsemla_merge_pushed_args args = sparsemla_merge_pushed_args_default();
    args.rows = rows;
    args.out = part_of(s->out, SPARSEMLA_F32, sizeof s->out[0], rank, d_v);
    args.lse = part_of(s->lse, SPARSEMLA_F32, sizeof s->lse[0], rank, 0);
    args.sinks = TENSOR(group->sinks + head_offset[rank], SPARSEMLA_F32, own_heads(rank));
    return args;
}

static inline void gather_all(step* s, ranks* group) {
    for (int r = 0; r < world; ++r) {
        const sparsemla_gather_query_args args = gather_args(s, r);
        expect_ok(sparsemla_gather_query(&group->mailboxes[r], &args, NULL), "gather_query");
    }
}

static inline void merge_all(step* s, ranks* group) {
    for (int r = 0; r < world; ++r) {
        const sparsemla_merge_pushed_args args = merge_args(s, group, r);
        expect_ok(sparsemla_merge_pushed(&group->mailboxes[r], &args, NULL), "merge_pushed");
    }
}

/* The step's problem as a rank sees it: no query, no outputs. */
static inline void make_dcp(step* s) {
    s->problem.dcp = 1;
    s->problem.out_dtype = SPARSEMLA_BF16;
    memset(&s->args.query, 0, sizeof s->args.query);
    memset(&s->args.out, 0, sizeof s->args.out);
    memset(&s->args.lse, 0, sizeof s->args.lse);
}

static inline sparsemla_status decode_of_rank(step* s, ranks* group, int rank) {
    memcpy(s->slots, group->slots[rank], sizeof s->slots);
    s->args.mailbox = &group->mailboxes[rank];
    return sparsemla_decode(s->plan, &s->args, NULL);
}

#endif
