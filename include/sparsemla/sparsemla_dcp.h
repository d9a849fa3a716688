/* Decode context parallelism in plain C11: ranks that each hold a part of the context decode all ranks' heads over what
 * they hold, and push the results to the heads' owners. Every rule of sparsemla.h holds. One exchange of a rank, in
 * order on one stream (or thread), and the same sequence with the same rows on all ranks:
 *     sparsemla_gather_query    this rank's query heads to all ranks
 *     sparsemla_decode          of a problem with dcp, and with args.mailbox: all heads over the records of this rank
 *     sparsemla_merge_pushed    what the ranks found for this rank's heads -> out, lse
 * Before it, sparsemla_merge_topk makes of every rank's candidates the exact global top k. */
#ifndef SPARSEMLA_SPARSEMLA_DCP_H
#define SPARSEMLA_SPARSEMLA_DCP_H

#include "sparsemla/sparsemla.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SPARSEMLA_MAX_RANKS = 16 };

/* Values of the fields stage and delayed_stage. */
enum {
    SPARSEMLA_STAGE_NONE = 0,
    SPARSEMLA_STAGE_GATHER = 1,
    SPARSEMLA_STAGE_DECODE = 2, /* waits for the query; sparsemla_receive_query too */
    SPARSEMLA_STAGE_PUSH = 3,
    SPARSEMLA_STAGE_MERGE = 4
};

/* ---- the memory in which ranks meet ---- */

/* What all ranks must agree on. */
typedef struct sparsemla_dcp_shape {
    size_t size;
    int64_t rows;               /* capacity: exchanges of every number of rows up to it */
    const int64_t* head_offset; /* [world + 1], ascending from 0: rank r owns heads head_offset[r] .. head_offset[r + 1]
                                   - 1, at least one */
    int32_t world;              /* ranks, 1 .. SPARSEMLA_MAX_RANKS */
    int32_t query_dtype;        /* in the mailbox: SPARSEMLA_F8_E4M3 (default) or SPARSEMLA_BF16 */
    int64_t padded_heads;       /* heads from row to row of the query's mailbox; 0 (default): as many as there are */
    int64_t d_qk;               /* 576 (default) or 512 */
} sparsemla_dcp_shape;

/* Where things lie in a rank's mailbox, in bytes from its begin; equal on all ranks. Each of the three stands there
 * twice, for exchanges of even and of odd number, ..._parity_bytes apart.
 *     query    [rows][padded_heads][d_qk]
 *     values   [world: from whom][rows][most_heads][512] bf16
 *     lses     [world][rows][most_heads] f32, base 2 */
typedef struct sparsemla_mailbox_layout {
    size_t size;
    int64_t bytes;         /* of a rank's mailbox */
    int64_t control_bytes; /* of a rank's control */
    uint64_t fingerprint;  /* of the whole layout: ranks with different ones cannot exchange */
    int32_t world;
    int32_t query_dtype;
    int64_t rows;
    int64_t heads; /* of all ranks */
    int64_t padded_heads;
    int64_t most_heads; /* that any rank owns */
    int64_t d_qk;
    int64_t query_offset_bytes, query_parity_bytes;
    int64_t values_offset_bytes, values_parity_bytes;
    int64_t lses_offset_bytes, lses_parity_bytes;
} sparsemla_mailbox_layout;

/* Of mailboxes of a shape. */
sparsemla_status sparsemla_mailbox_layout_of(const sparsemla_dcp_shape* shape, sparsemla_mailbox_layout* out);

/* One rank's end of a group. The memory is the caller's, whoever made it visible to other ranks: a group of this
 * process (below), PyTorch's symmetric memory, IPC handles. It must stay until every rank has ended its last exchange.
 * Calls read this struct, and do not keep it. */
struct sparsemla_mailbox {
    size_t size;
    const sparsemla_dcp_shape* shape;
    void* const* bases; /* [world], an array in host memory: every rank's mailbox as this rank's device addresses it, of
                           the layout's bytes each, 16-byte aligned, writable; bases[rank] is this rank's own */
    void* control;      /* 64-byte aligned, on the device; no other rank sees it */
    uint64_t control_bytes; /* the layout's, or more */
    double wait_limit_s;    /* how long a call waits for a rank before the exchange fails; default 10 */
    int32_t rank;
    int32_t device_kind, device_index;
    int32_t delayed_stage; /* for tests: calls of this stage begin delay_us late; default SPARSEMLA_STAGE_NONE */
    int32_t delayed_cta;   /* GPU: the one of the kernel that does */
    float delay_us;
};

/* Arms this rank's mailbox and counts exchanges from 0 again. Once before the first exchange, and after one that
 * failed; by all ranks together: everything in flight ended on all of them, then this on each, then no exchange before
 * all have done it (a barrier of the caller's on either side). */
sparsemla_status sparsemla_mailbox_reset(const sparsemla_mailbox* mailbox, void* stream);

/* What became of a rank's exchanges. */
typedef struct sparsemla_mailbox_status {
    size_t size;
    uint32_t exchanges; /* that are complete */
    int32_t failed;     /* a wait passed the limit: results are NaN, here and for whoever waits for this rank, until all
                           have reset. Where it waited, and for whom: */
    int32_t stage;
    int32_t missing_rank; /* -1: none */
    int64_t row;
    uint32_t exchange; /* its number */
    char text[220];    /* all this as a sentence; ends with 0 */
} sparsemla_mailbox_status;

/* Waits for the stream, and looks: calls of an exchange succeed whether ranks are there or not. */
sparsemla_status sparsemla_mailbox_status_of(const sparsemla_mailbox* mailbox, sparsemla_mailbox_status* out,
                                             void* stream);

/* ---- one exchange ---- */

typedef struct sparsemla_gather_query_args {
    size_t size;
    int64_t rows;           /* <= the shape's */
    sparsemla_tensor query; /* this rank's heads: [>= rows, >= own heads, d_qk] bf16, or f8_e4m3 where the mailbox is;
                               heads dense and 16-byte aligned */
    float q_scale;          /* stored code = e4m3(x / q_scale) where bf16 becomes f8_e4m3, otherwise 1; default 1 */
    int32_t reserved;       /* 0 */
} sparsemla_gather_query_args;

/* This rank's query heads to the mailbox of every rank. */
sparsemla_status sparsemla_gather_query(const sparsemla_mailbox* mailbox, const sparsemla_gather_query_args* args,
                                        void* stream);

/* For kernels of the caller's own, between gather_query and push: waits for all ranks' heads of the first `rows` rows;
 * `out` [>= rows, >= heads, d_qk] of the mailbox's dtype. sparsemla_decode of a dcp problem does both by itself. */
sparsemla_status sparsemla_receive_query(const sparsemla_mailbox* mailbox, int64_t rows, const sparsemla_tensor* out,
                                         void* stream);

typedef struct sparsemla_push_args {
    size_t size;
    int64_t rows;
    sparsemla_tensor out;    /* bf16 or f32 [>= rows, >= heads, 512]: of all ranks' heads, over this rank's records */
    sparsemla_tensor lse;    /* f32 [>= rows, >= heads]; -inf: `out` is not read */
    sparsemla_tensor counts; /* i32 [>= rows], optional: a count <= 0 empties the row, whatever its lse */
    int32_t lse_base;        /* of lse; default SPARSEMLA_LSE_LOG2 */
    int32_t reserved;        /* 0 */
} sparsemla_push_args;

/* Results of a decode to the heads' owners. */
sparsemla_status sparsemla_push(const sparsemla_mailbox* mailbox, const sparsemla_push_args* args, void* stream);

typedef struct sparsemla_merge_pushed_args {
    size_t size;
    int64_t rows;
    sparsemla_tensor out;   /* bf16 or f32 [>= rows, >= own heads, 512] */
    sparsemla_tensor lse;   /* f32 [>= rows, >= own heads], optional; excludes the sink */
    sparsemla_tensor sinks; /* f32 [>= own heads], optional */
    int32_t lse_base;       /* default SPARSEMLA_LSE_NATURAL */
    int32_t query_gathered; /* gather_query was part of the exchange, on all ranks; 0: on none. Default 1 */
} sparsemla_merge_pushed_args;

/* Waits for what all ranks pushed for this rank's heads, and merges it as sparsemla_merge does, in order of ranks. Ends
 * the exchange. Outputs may not overlap each other or the sinks. */
sparsemla_status sparsemla_merge_pushed(const sparsemla_mailbox* mailbox, const sparsemla_merge_pushed_args* args,
                                        void* stream);

/* ---- ranks of one process on one device ---- */

typedef struct sparsemla_loopback sparsemla_loopback;

/* On a CPU for a thread each, or for calls of all ranks stage by stage in one; on a GPU for calls of all ranks stage by
 * stage on one stream, or on streams of their own where every kernel of all ranks fits the device at once. Owns the
 * memory, and is reset. Destroy it after use, with nothing in flight. */
sparsemla_status sparsemla_loopback_create(const sparsemla_dcp_shape* shape, int32_t device_kind, int32_t device_index,
                                           sparsemla_loopback** out_loopback);

/* NULL is allowed and does nothing. */
void sparsemla_loopback_destroy(sparsemla_loopback* loopback);

/* The rank's end: what it points to lives as long as the group; limit and delay are the caller's to change. */
sparsemla_status sparsemla_loopback_mailbox(const sparsemla_loopback* loopback, int32_t rank, sparsemla_mailbox* out);

/* Of all ranks. Nothing may be in flight. */
sparsemla_status sparsemla_loopback_reset(sparsemla_loopback* loopback);

/* ---- the global top k ---- */

/* The candidates of a row are the columns of `sources` lists, one from each rank: a score and a global token id. An id
 * below 0 is absent. */
typedef struct sparsemla_merge_topk_args {
    size_t size;
    int64_t rows;
    int64_t k;                       /* 0 .. 2^31-1, on a GPU 4096 */
    sparsemla_tensor scores;         /* f32 [sources, >= rows, width] */
    sparsemla_tensor ids;            /* i32 [sources, >= rows, width] */
    sparsemla_tensor counts;         /* out: i32 [>= rows]: how many columns of a row's list are there; others are -1 */
    sparsemla_tensor token_ids;      /* out: i32 [>= rows, k]; either this or slots */
    sparsemla_tensor slots;          /* out: i32 [>= rows, k]; then as in sparsemla_convert_args: */
    sparsemla_tensor block_table;    /* i32 [requests, max_pages] */
    sparsemla_tensor request_of_row; /* i32 [>= rows] */
    sparsemla_tensor lengths;        /* i32 [>= requests], optional */
    const sparsemla_cache* cache;    /* not looked at where token_ids are wanted */
    sparsemla_tensor source_counts;  /* i32 [sources, >= rows], optional: columns of each list */
    int64_t world;                   /* which of the selected tokens are this rank's, as in sparsemla_convert_args; */
    int64_t rank;                    /* default: all */
    int64_t interleave;
} sparsemla_merge_topk_args;

/* The k first candidates of each row, by score descending, then by the lowest id (NaN last, -0 is +0); of them those
 * that this rank owns, in that order: as token ids, or as slots, as sparsemla_convert_indices makes them. Outputs may
 * not overlap inputs or each other. On a CPU it allocates 8 bytes a candidate of a row. */
sparsemla_status sparsemla_merge_topk(const sparsemla_merge_topk_args* args, void* stream);

#ifdef __cplusplus
}
#endif

/* ---- structs whose defaults are not all 0 ---- */

static inline sparsemla_dcp_shape sparsemla_dcp_shape_default(void) {
    sparsemla_dcp_shape s;
    memset(&s, 0, sizeof s);
    s.size = sizeof s;
    s.query_dtype = SPARSEMLA_F8_E4M3;
    s.d_qk = 576;
    return s;
}

static inline sparsemla_mailbox sparsemla_mailbox_default(void) {
    sparsemla_mailbox s;
    memset(&s, 0, sizeof s);
    s.size = sizeof s;
    s.wait_limit_s = 10;
    return s;
}

static inline sparsemla_gather_query_args sparsemla_gather_query_args_default(void) {
    sparsemla_gather_query_args s;
    memset(&s, 0, sizeof s);
    s.size = sizeof s;
    s.q_scale = 1.0F;
    return s;
}

static inline sparsemla_push_args sparsemla_push_args_default(void) {
    sparsemla_push_args s;
    memset(&s, 0, sizeof s);
    s.size = sizeof s;
    s.lse_base = SPARSEMLA_LSE_LOG2;
    return s;
}

static inline sparsemla_merge_pushed_args sparsemla_merge_pushed_args_default(void) {
    sparsemla_merge_pushed_args s;
    memset(&s, 0, sizeof s);
    s.size = sizeof s;
    s.query_gathered = 1;
    return s;
}

static inline sparsemla_merge_topk_args sparsemla_merge_topk_args_default(void) {
    sparsemla_merge_topk_args s;
    memset(&s, 0, sizeof s);
    s.size = sizeof s;
    s.world = 1;
    s.interleave = 1;
    return s;
}

#endif
