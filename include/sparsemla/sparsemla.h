/* The C interface: the verbs of decode.h, records.h, indices.h and device.h in plain C11.
 *
 * Rules that hold for every function
 * - It returns a status. After any other than SPARSEMLA_OK, sparsemla_last_error() says which argument is at
 *   fault, what was required and what came; nothing was written. Exceptions never leave the library.
 * - A struct begins with its size in bytes: `sparsemla_cache c = {.size = sizeof c, ...}`. Where a default is not
 *   0, the struct has a sparsemla_..._default() function (end of this file). A later version may append fields: a
 *   shorter struct leaves them at their defaults, a longer one is taken if all bytes that this library does not
 *   know are 0. Output structs need their size set, too, and are filled as far as they reach.
 * - A pointer argument may be NULL only where its description says so.
 * - Memory belongs to the caller, and is not kept after the call, but for the plan's. Texts are UTF-8.
 * - Flags are 0 or 1. Strides count elements, sizes with `_bytes` bytes. Shapes stand in brackets; [>= n] may be
 *   larger.
 * - Functions may be called from several threads at once, on different output memory. */
#ifndef SPARSEMLA_SPARSEMLA_H
#define SPARSEMLA_SPARSEMLA_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t sparsemla_status;
enum {
    SPARSEMLA_OK = 0,
    SPARSEMLA_INVALID_ARGUMENT = 1, /* an argument is malformed */
    SPARSEMLA_UNSUPPORTED = 2,      /* well-formed, but not served by this kernel, build or device */
    SPARSEMLA_MALFORMED_FILE = 3,
    SPARSEMLA_IO = 4,
    SPARSEMLA_DEVICE = 5, /* a GPU call failed */
    SPARSEMLA_OUT_OF_MEMORY = 6,
    SPARSEMLA_INTERNAL = 7 /* a fault of the library */
};

/* Values of the int32_t fields of these names: dtype, device_kind, record, form, lse_base, p_format, ..., trigger. */
enum {
    SPARSEMLA_U8 = 0,
    SPARSEMLA_I32 = 1,
    SPARSEMLA_I64 = 2,
    SPARSEMLA_F8_E4M3 = 3,
    SPARSEMLA_BF16 = 4,
    SPARSEMLA_F16 = 5,
    SPARSEMLA_F32 = 6,
    SPARSEMLA_F64 = 7
};
enum { SPARSEMLA_CPU = 0, SPARSEMLA_CUDA = 1 };
enum {
    SPARSEMLA_RECORD_BF16 = 0,
    SPARSEMLA_RECORD_FP8_576 = 1,
    SPARSEMLA_RECORD_FP8_512 = 2,
    SPARSEMLA_RECORD_FP8_DS_MLA = 3,
    SPARSEMLA_RECORD_FP8_DS_MLA_NOROPE = 4,
    SPARSEMLA_RECORD_FP8_V4 = 5,
    SPARSEMLA_RECORD_FP8_V41 = 6,
    SPARSEMLA_RECORD_NVFP4_V41 = 7,
    SPARSEMLA_RECORD_NVFP4_DS_MLA = 8
};
enum { SPARSEMLA_CONTIGUOUS = 0, SPARSEMLA_PLANAR = 1 };
enum { SPARSEMLA_LSE_NATURAL = 0, SPARSEMLA_LSE_LOG2 = 1 };
enum { SPARSEMLA_P_E4M3 = 0, SPARSEMLA_P_F16 = 1, SPARSEMLA_P_BF16 = 2, SPARSEMLA_P_F64 = 3 };
enum { SPARSEMLA_ANCHOR_SPLIT_RUNNING_MAX = 0, SPARSEMLA_ANCHOR_CHUNK_MAX = 1, SPARSEMLA_ANCHOR_ROW_MAX = 2 };
enum { SPARSEMLA_COLUMNS_BLOCKS = 0, SPARSEMLA_COLUMNS_INTERLEAVED = 1, SPARSEMLA_COLUMNS_ROUND_ROBIN = 2 };
enum { SPARSEMLA_GATHER_COPIES = 1, SPARSEMLA_GATHER_BULK = 2 };
enum { SPARSEMLA_TRANSPORT_STORES = 1, SPARSEMLA_TRANSPORT_BULK = 2, SPARSEMLA_TRANSPORT_WEIGHTS = 3 };
enum { SPARSEMLA_TRIGGER_START = 1, SPARSEMLA_TRIGGER_LOADED = 2, SPARSEMLA_TRIGGER_END = 3 };
enum { SPARSEMLA_CHOOSE = -1 }; /* in plan options: the plan chooses */

/* A view of strided memory with DLPack's fields; this struct never changes. Rank 0: an optional tensor not given.
 * The stride of a dimension of size 1 is never looked at. Inputs are not written through `data`. */
typedef struct sparsemla_tensor {
    void* data;
    int32_t dtype;
    int32_t device_kind;
    int32_t device_index;
    int32_t rank; /* 0 .. 4 */
    int64_t shape[4];
    int64_t strides[4]; /* in elements */
} sparsemla_tensor;

/* A factor: a host value, or (pointer not NULL) a float on the problem's device that the call reads. This struct
 * never changes. */
typedef struct sparsemla_scale {
    float value;
    const float* pointer;
} sparsemla_scale;

/* "0.1.0" */
const char* sparsemla_version(void);

/* What the last failing call of this thread said; valid until the next one of this thread. Never NULL. */
const char* sparsemla_last_error(void);

/* ---- devices ---- */

typedef struct sparsemla_device_spec {
    size_t size;
    int32_t device_kind;
    int32_t device_index;
    char name[128];     /* of the GPU, or of the CPU's instruction set in use; ends with 0 */
    int32_t threads;    /* CPU: threads that a call may use */
    int32_t capability; /* GPU: compute capability, 90 for 9.0 */
    int32_t sms;
    int32_t resident_clusters[16]; /* GPU: clusters of i + 1 CTAs resident at once with one CTA an SM */
    int64_t shared_memory_bytes;   /* GPU: opt-in limit of one block */
    int64_t l2_bytes;
} sparsemla_device_spec;

/* The facts about a device of this machine that planning needs. UNSUPPORTED where the device is missing. */
sparsemla_status sparsemla_query_device(int32_t device_kind, int32_t device_index, sparsemla_device_spec* out);

/* ---- records and caches ---- */

typedef struct sparsemla_record_layout {
    size_t size;
    int32_t record;
    int32_t record_bytes; /* data and scales together */
    int32_t data_bytes;   /* planar: bytes of a token in its page's first part */
    int32_t scale_bytes;  /* planar: bytes of a token in its page's second part */
    int32_t d_qk;         /* score width */
    int32_t d_v;          /* value width: the first d_v of the d_qk dimensions */
    int32_t has_contiguous, has_planar;
    int32_t takes_k_scale; /* a k_scale other than 1 is allowed */
    int32_t may_split;     /* latent and rope may be two tensors */
    char name[32];         /* as in case files; ends with 0 */
} sparsemla_record_layout;

/* The layout of a name ("fp8_ds_mla") and a size; record_bytes 0: the name alone must decide. */
sparsemla_status sparsemla_find_record(const char* name, int64_t record_bytes, sparsemla_record_layout* out);

/* A paged cache. Slot s lies at s * record_bytes (contiguous), or in page s / page_size (planar). */
typedef struct sparsemla_cache {
    size_t size;
    int32_t record;
    int32_t form;
    int32_t device_kind, device_index;
    void* data;                /* 16-byte aligned */
    void* rope;                /* bf16 split in two tensors: [slots, 64], `data` is then [slots, 512]; else NULL */
    int64_t pages;             /* block ids 0 .. pages - 1 */
    int64_t page_size;         /* tokens a page holds */
    int64_t slots_per_page;    /* contiguous: slots from page to page; 0: page_size */
    int64_t page_stride_bytes; /* 0: dense */
} sparsemla_cache;

/* Bytes from `data` to the end of the last record; data may be NULL. */
sparsemla_status sparsemla_cache_bytes(const sparsemla_cache* cache, int64_t* out_bytes);

typedef struct sparsemla_pack_options {
    size_t size;
    float k_scale;               /* flat fp8: stored value = x / k_scale; 1 for every other record */
    int32_t power_of_two_scales; /* fp8_ds_mla and its norope form: scales rounded up to a power of two */
} sparsemla_pack_options;

/* Quantises `values` f32 or bf16 [n, d_qk] into the records of `slots` i32 or i64 [n] (negative: skipped). NaN
 * gives NaN codes, infinity saturates. `options` may be NULL; `stream` is a GPU's. */
sparsemla_status sparsemla_pack(const sparsemla_cache* cache, const sparsemla_tensor* values,
                                const sparsemla_tensor* slots, const sparsemla_pack_options* options, void* stream);

/* Dequantises the records of `slots` i32 or i64 [n] into `out` f32, f64 or bf16 [n, d_qk], without k_scale. Slots
 * that the cache does not hold give zeros. */
sparsemla_status sparsemla_unpack(const sparsemla_cache* cache, const sparsemla_tensor* slots,
                                  const sparsemla_tensor* out, void* stream);

/* e4m3 of x / q_scale: `in` bf16 or f32 [rows, heads, d], `out` f8_e4m3 of the same shape. */
sparsemla_status sparsemla_quantize_query(const sparsemla_tensor* in, float q_scale, const sparsemla_tensor* out,
                                          void* stream);

/* ---- token ids to slots ---- */

typedef struct sparsemla_convert_args {
    size_t size;
    sparsemla_tensor token_ids;      /* i32 [rows, width] */
    sparsemla_tensor block_table;    /* i32 [requests, max_pages]: this rank's block ids of each request, in order */
    sparsemla_tensor request_of_row; /* i32 [rows] */
    const sparsemla_cache* cache;    /* only its geometry is used; its data may be NULL */
    sparsemla_tensor slots;          /* out: i32 [rows, width]: kept columns in input order, then -1 */
    sparsemla_tensor counts;         /* out: i32 [rows]: how many columns were kept */
    sparsemla_tensor lengths;        /* i32 [requests], optional: ids at or past a request's length are dropped */
    int64_t world;                   /* ranks that share the tokens: token t belongs to (t / interleave) % world */
    int64_t rank;
    int64_t interleave; /* page_size is a multiple of it */
} sparsemla_convert_args;

/* Outputs may not overlap inputs or each other. `stream`: a cudaStream_t, NULL for the default one or on the CPU. */
sparsemla_status sparsemla_convert_indices(const sparsemla_convert_args* args, void* stream);

/* How many of a request's tokens 0 .. length - 1 the rank holds. */
sparsemla_status sparsemla_local_length(int64_t length, int64_t world, int64_t rank, int64_t interleave,
                                        int64_t* out_length);

/* The token that the rank holds at a local position. */
sparsemla_status sparsemla_global_id(int64_t local, int64_t world, int64_t rank, int64_t interleave,
                                     int64_t* out_token);

/* ---- decode ---- */

/* One cache of a problem: what is fixed at planning time. */
typedef struct sparsemla_source_problem {
    size_t size;
    int32_t record;
    int32_t form;
    int64_t width;        /* columns of the slots list */
    int64_t count_offset; /* column c is active when c < clamp(counts[row] - count_offset, 0, width) */
    int32_t split_rope;   /* bf16 only: latent and rope are two tensors */
    int32_t reserved;     /* 0 */
} sparsemla_source_problem;

/* A family of decode steps that one plan serves. */
typedef struct sparsemla_problem {
    size_t size;
    int64_t rows;                            /* capacity: every number of rows up to it, with the same bits */
    int64_t heads;                           /* 1 .. 128; 0 is a no-op */
    const sparsemla_source_problem* sources; /* array of num_sources, all of one size */
    int32_t num_sources;                     /* 1 or 2, of equal d_qk */
    int32_t query_dtype;                     /* SPARSEMLA_F8_E4M3 (default) or SPARSEMLA_BF16 */
    int32_t out_dtype;                       /* SPARSEMLA_BF16 (default), or SPARSEMLA_F32 for partials to merge */
    int32_t sinks;                           /* default 0 */
    int32_t lse;                             /* default 1 */
    int32_t lse_base;                        /* default SPARSEMLA_LSE_NATURAL */
    int32_t device_kind;                     /* default SPARSEMLA_CPU */
    int32_t device_index;
    int32_t from_ids; /* source 0's list is token ids, which decode itself converts (args.indices); default 0 */
    int32_t dcp; /* one rank of decode context parallelism (sparsemla_dcp.h): calls have a mailbox in place of query,
                    out, lse and sinks; default 0 */
} sparsemla_problem;

/* Wishes; what is SPARSEMLA_CHOOSE, 0 or NULL the plan chooses. */
typedef struct sparsemla_plan_options {
    size_t size;
    const char* kernel; /* forced by name, refused by name if it cannot; NULL: the plan chooses */
    int32_t p_format;
    float p_scale; /* 0: the plan chooses */
    int32_t anchor;
    int32_t column_rule;
    int32_t splits;           /* 0: the plan chooses */
    int32_t chunk;            /* columns per chunk; 0: the plan chooses */
    int32_t allow_unverified; /* offer kernels on architectures where nobody has run them */
    int32_t reserved;         /* 0 */
    int32_t tile_heads; /* heads of a CTA. This and the rest: GPU kernels only; never changes a bit; 0: the plan */
    int32_t stages;     /* chunks of 64 columns (decode_wide: 32) that fit */
    int32_t transport, trigger, gather;
    int32_t cluster_tiles; /* tiles of heads in a cluster */
    int64_t usual_columns; /* active columns that rows usually have, of all sources: what the plan is to be fast for;
                              not a limit; 0: the widths */
} sparsemla_plan_options;

typedef struct sparsemla_plan sparsemla_plan;

/* What a plan fixed. Texts live as long as the plan. */
typedef struct sparsemla_plan_info {
    size_t size;
    const char* kernel;
    const char* schedule;     /* one line: all that fixes a row's bits */
    const char* description;  /* several lines for people, with why each other kernel declined */
    uint64_t workspace_bytes; /* scratch of a call, 64-byte aligned, contents irrelevant */
    uint64_t state_bytes;     /* zeroed once by prepare, restored by every call */
    int64_t row_capacity;
    int32_t p_format;
    float p_scale;
    int32_t anchor, column_rule, splits, chunk;
    int32_t tile_heads, stages, transport, trigger, gather, cluster_tiles; /* of a GPU kernel, else 0 */
    int32_t fuses_exchange; /* of a dcp problem: the kernel itself waits for the query and pushes its results */
    int32_t reserved;
} sparsemla_plan_info;

/* Chooses how a problem runs: a function of its arguments alone. `options` may be NULL. Destroy the plan after use.
 * UNSUPPORTED with every kernel's refusal in sparsemla_last_error(). */
sparsemla_status sparsemla_plan_create(const sparsemla_problem* problem, const sparsemla_device_spec* device,
                                       const sparsemla_plan_options* options, sparsemla_plan** out_plan);

/* NULL is allowed and does nothing. */
void sparsemla_plan_destroy(sparsemla_plan* plan);

sparsemla_status sparsemla_plan_describe(const sparsemla_plan* plan, sparsemla_plan_info* out);

/* Whether sparsemla_plan_create would give a plan. If not, *out_supported is 0, the status SPARSEMLA_OK, and
 * sparsemla_last_error() the refusal. `options` may be NULL. */
sparsemla_status sparsemla_supports(const sparsemla_problem* problem, const sparsemla_device_spec* device,
                                    const sparsemla_plan_options* options, int32_t* out_supported);

/* Loads what the plan's first call would load, and zeroes its state. Once per plan and state, outside graph capture.
 * `state` may be NULL if the plan needs none. */
sparsemla_status sparsemla_prepare(const sparsemla_plan* plan, void* state, uint64_t state_bytes, void* stream);

typedef struct sparsemla_source_args {
    size_t size;
    const sparsemla_cache* cache;
    sparsemla_tensor slots; /* i32 [>= rows, width]; negative = absent; not of source 0 where the problem is from ids */
    sparsemla_tensor counts; /* i32 [>= rows], optional: all columns; the same */
    sparsemla_scale k_scale; /* flat fp8: factor on this source's scores and values; default 1 */
} sparsemla_source_args;

typedef struct sparsemla_mailbox sparsemla_mailbox; /* sparsemla_dcp.h */

typedef struct sparsemla_decode_args {
    size_t size;
    int64_t rows;                         /* <= the plan's capacity */
    const sparsemla_source_args* sources; /* array of num_sources, all of one size */
    int32_t num_sources;
    float softmax_scale;     /* factor on q . k, for a softmax of natural base; positive and finite; default 1 */
    sparsemla_tensor query;  /* [>= rows, >= heads, d_qk], heads 16-byte aligned and dense */
    sparsemla_tensor out;    /* bf16 or f32 [>= rows, >= heads, 512]; only [rows, heads] is written */
    sparsemla_tensor lse;    /* f32 [>= rows, >= heads], iff the problem has lse */
    sparsemla_tensor sinks;  /* f32 [>= heads], iff the problem has sinks */
    sparsemla_scale q_scale; /* default 1 */
    float out_scale;         /* extra factor on out, finite; default 1 */
    int32_t validate;        /* CPU only: refuse out-of-range slots and counts, which are absent else; default 0 */
    void* workspace;         /* 64-byte aligned; not in use by another call */
    uint64_t workspace_bytes;
    void* state; /* prepared; not in use by another call */
    uint64_t state_bytes;
    const sparsemla_convert_args* indices; /* iff the problem is from ids; its cache is not looked at (may be NULL), its
                                              slots and counts, and those of source 0, are not given */
    const sparsemla_mailbox* mailbox;      /* iff the problem is one of dcp, of its heads and query */
} sparsemla_decode_args;

/* For row r, head h over the active columns c of all sources:
 *     s_c = softmax_scale * q_scale * k_scale * (q . k_c)       m = max s_c      l = sum exp(s_c - m)
 *     out = out_scale * sum exp(s_c - m) * k_scale * v_c / (l + exp(sink - m))   lse = m + ln(l)
 * No active column: out = +0, lse = -inf. On the CPU the result is complete on return. */
sparsemla_status sparsemla_decode(const sparsemla_plan* plan, const sparsemla_decode_args* args, void* stream);

/* One of several partial results of the same rows and heads. */
typedef struct sparsemla_partial {
    size_t size;
    sparsemla_tensor out;    /* f32 or bf16 [>= rows, >= heads, 512] */
    sparsemla_tensor lse;    /* f32 [>= rows, >= heads]; -inf: contributes nothing, `out` is not read */
    sparsemla_tensor counts; /* i32 [>= rows], optional: a count <= 0 drops the row of this partial */
} sparsemla_partial;

typedef struct sparsemla_merge_args {
    size_t size;
    int64_t rows;
    int64_t heads;
    const sparsemla_partial* partials; /* array of num_partials, all of one size */
    int64_t num_partials;
    sparsemla_tensor out;     /* bf16 or f32 [>= rows, >= heads, 512] */
    sparsemla_tensor lse;     /* f32 [>= rows, >= heads], optional; excludes the sink */
    sparsemla_tensor sinks;   /* f32 [>= heads], optional */
    int32_t partial_lse_base; /* of every partial's lse */
    int32_t lse_base;
    int32_t plus_inf_is_empty; /* a partial's lse +inf means "no columns"; otherwise it gives NaN */
    int32_t reserved;          /* 0 */
} sparsemla_merge_args;

/* Combines partials with weights exp(lse - max), in the order given. Outputs may not overlap any input. */
sparsemla_status sparsemla_merge(const sparsemla_merge_args* args, void* stream);

#ifdef __cplusplus
}
#endif

/* ---- structs whose defaults are not all 0 ---- */

static inline sparsemla_pack_options sparsemla_pack_options_default(void) {
    sparsemla_pack_options s;
    memset(&s, 0, sizeof s);
    s.size = sizeof s;
    s.k_scale = 1.0F;
    return s;
}

static inline sparsemla_convert_args sparsemla_convert_args_default(void) {
    sparsemla_convert_args s;
    memset(&s, 0, sizeof s);
    s.size = sizeof s;
    s.world = 1;
    s.interleave = 1;
    return s;
}

static inline sparsemla_problem sparsemla_problem_default(void) {
    sparsemla_problem s;
    memset(&s, 0, sizeof s);
    s.size = sizeof s;
    s.query_dtype = SPARSEMLA_F8_E4M3;
    s.out_dtype = SPARSEMLA_BF16;
    s.lse = 1;
    return s;
}

static inline sparsemla_plan_options sparsemla_plan_options_default(void) {
    sparsemla_plan_options s;
    memset(&s, 0, sizeof s);
    s.size = sizeof s;
    s.p_format = SPARSEMLA_CHOOSE;
    s.anchor = SPARSEMLA_CHOOSE;
    s.column_rule = SPARSEMLA_CHOOSE;
    return s;
}

static inline sparsemla_source_args sparsemla_source_args_default(void) {
    sparsemla_source_args s;
    memset(&s, 0, sizeof s);
    s.size = sizeof s;
    s.k_scale.value = 1.0F;
    return s;
}

static inline sparsemla_decode_args sparsemla_decode_args_default(void) {
    sparsemla_decode_args s;
    memset(&s, 0, sizeof s);
    s.size = sizeof s;
    s.softmax_scale = 1.0F;
    s.q_scale.value = 1.0F;
    s.out_scale = 1.0F;
    return s;
}

#endif
