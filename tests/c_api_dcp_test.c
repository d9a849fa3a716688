/* The C interface of decode context parallelism from C11: exchanges of two ranks, one that fails, the global top k. */
#include "c_api_ranks.h"

/* What travels between ranks: bf16, and lse of base 2. */
typedef struct partials {
    uint16_t out[world][rows * padded_heads * d_v];
    float lse[world][rows * padded_heads];
} partials;

static void make_plain_plan(step* s, const char* kernel) {
    s->problem.out_dtype = SPARSEMLA_BF16;
    s->problem.lse_base = SPARSEMLA_LSE_LOG2;
    make_plan(s, kernel);
}

static sparsemla_status decode_plainly(step* s, ranks* group, partials* results, int rank) {
    memcpy(s->slots, group->slots[rank], sizeof s->slots);
    s->args.out = TENSOR(results->out[rank], SPARSEMLA_BF16, rows, padded_heads, d_v);
    s->args.lse = TENSOR(results->lse[rank], SPARSEMLA_F32, rows, padded_heads);
    return sparsemla_decode(s->plan, &s->args, NULL);
}

/* Into the step's outputs: what an exchange must give, by decodes of a plain problem and one merge. */
static void expect_of_merge(const char* kernel, ranks* group, step* s) {
    static partials results;
    sparsemla_partial list[world];
    randomise(s);
    make_plain_plan(s, kernel);
    for (int r = 0; r < world; ++r) {
        expect_ok(decode_plainly(s, group, &results, r), "decode of a rank's records");
        list[r] = (sparsemla_partial){.size = sizeof list[r], .out = s->args.out, .lse = s->args.lse};
    }
    poison_outputs(s);
    sparsemla_merge_args args = {
        .size = sizeof args, .rows = rows, .heads = heads, .partials = list, .num_partials = world};
    args.partial_lse_base = SPARSEMLA_LSE_LOG2;
    args.out = TENSOR(s->out, SPARSEMLA_F32, rows, padded_heads, d_v);
    args.lse = TENSOR(s->lse, SPARSEMLA_F32, rows, padded_heads);
    args.sinks = TENSOR(group->sinks, SPARSEMLA_F32, heads);
    expect_ok(sparsemla_merge(&args, NULL), "merge");
    free_plan(s);
}

static step expected; /* its outputs */

static void check_results(const step* s, const char* what) {
    check(memcmp(s->out, expected.out, sizeof s->out) == 0, "%s: need the bits of merge in out", what);
    check(memcmp(s->lse, expected.lse, sizeof s->lse) == 0, "%s: need the bits of merge in lse", what);
    check(s->out[0] != poison && isfinite(s->out[0]) && s->out[0] != s->out[d_v], "%s: need numbers", what);
}

static void expect_exchanges(const ranks* group, uint32_t exchanges) {
    for (int r = 0; r < world; ++r) {
        sparsemla_mailbox_status status = {.size = sizeof status};
        expect_ok(sparsemla_mailbox_status_of(&group->mailboxes[r], &status, NULL), "mailbox_status_of");
        check(status.exchanges == exchanges && !status.failed && status.missing_rank == -1 &&
                  status.stage == SPARSEMLA_STAGE_NONE,
              "rank %d: need %u exchanges, got: %s", r, exchanges, status.text);
        check(strstr(status.text, "complete") != NULL, "the status in words: %s", status.text);
    }
}

static void test_exchange(const char* kernel) {
    ranks* group = make_ranks();
    step* s = make_step();
    sparsemla_plan_info info = {.size = sizeof info, .fuses_exchange = -1};
    expect_of_merge(kernel, group, s);
    expected = *s;

    s = make_step();
    randomise(s);
    make_dcp(s);
    make_plan(s, kernel);
    expect_ok(sparsemla_plan_describe(s->plan, &info), "plan_describe");
    check(info.fuses_exchange == 0, "no CPU kernel exchanges by itself, got %d", info.fuses_exchange);
    for (uint32_t exchange = 0; exchange < 5; ++exchange) {
        poison_outputs(s);
        gather_all(s, group);
        for (int r = 0; r < world; ++r) expect_ok(decode_of_rank(s, group, r), kernel);
        check(outputs_untouched(s), "decode of a dcp problem has no outputs of its own");
        merge_all(s, group);
        check_results(s, kernel);
        expect_exchanges(group, exchange + 1);
    }
    expect_ok(sparsemla_loopback_reset(group->loopback), "loopback_reset");
    expect_exchanges(group, 0);
    free_plan(s);
    free_ranks(group);
}

/* The same by calls of their own around a decode of a plain problem, in memory that the group did not make. */
static void test_calls_in_own_memory(void) {
    static partials results;
    static alignas(16) unsigned char query[rows * heads * d_qk];
    ranks* group = make_ranks();
    step* s = make_step();
    sparsemla_mailbox_layout layout = {.size = sizeof layout};
    unsigned char* memory[world];
    void* bases[world];
    expect_of_merge("cpu", group, s);
    expected = *s;

    s = make_step();
    randomise(s);
    make_plain_plan(s, "cpu");
    expect_ok(sparsemla_mailbox_layout_of(&group->shape, &layout), "mailbox_layout_of");
    for (int r = 0; r < world; ++r) {
        memory[r] = aligned_alloc(64, (size_t)(layout.bytes + layout.control_bytes + 63) / 64 * 64);
        bases[r] = memory[r] + layout.control_bytes;
    }
    for (int r = 0; r < world; ++r) {
        sparsemla_mailbox mailbox = sparsemla_mailbox_default();
        mailbox.shape = &group->shape;
        mailbox.bases = bases;
        mailbox.control = memory[r];
        mailbox.control_bytes = (uint64_t)layout.control_bytes;
        mailbox.rank = r;
        group->mailboxes[r] = mailbox;
        expect_ok(sparsemla_mailbox_reset(&mailbox, NULL), "mailbox_reset");
    }
    poison_outputs(s);
    gather_all(s, group);
    for (int r = 0; r < world; ++r) {
        sparsemla_push_args push = sparsemla_push_args_default();
        s->args.query = TENSOR(query, SPARSEMLA_F8_E4M3, rows, heads, d_qk);
        expect_ok(sparsemla_receive_query(&group->mailboxes[r], rows, &s->args.query, NULL), "receive_query");
        expect_ok(decode_plainly(s, group, &results, r), "decode of a rank's records");
        push.rows = rows;
        push.out = s->args.out;
        push.lse = s->args.lse;
        expect_ok(sparsemla_push(&group->mailboxes[r], &push, NULL), "push");
    }
    merge_all(s, group);
    check_results(s, "receive_query, decode, push");
    expect_exchanges(group, 1);
    free_plan(s);
    for (int r = 0; r < world; ++r) free(memory[r]);
    free_ranks(group);
}

/* What is quantised on its way is what quantize_query gives. */
static void test_quantised_query(void) {
    static alignas(16) uint16_t values[rows * padded_heads * d_qk];
    static alignas(16) unsigned char received[rows * padded_heads * d_qk], quantised[rows * padded_heads * d_qk];
    ranks* group = make_ranks();
    for (int i = 0; i < rows * padded_heads * d_qk; ++i) values[i] = (uint16_t)(0x3F00 + i % 509);
    const sparsemla_tensor in = TENSOR(values, SPARSEMLA_BF16, rows, padded_heads, d_qk);
    const sparsemla_tensor needed = TENSOR(quantised, SPARSEMLA_F8_E4M3, rows, padded_heads, d_qk);
    const sparsemla_tensor out = TENSOR(received, SPARSEMLA_F8_E4M3, rows, padded_heads, d_qk);
    expect_ok(sparsemla_quantize_query(&in, 0.75F, &needed, NULL), "quantize_query");
    for (int r = 0; r < world; ++r) {
        sparsemla_gather_query_args args = sparsemla_gather_query_args_default();
        args.rows = rows;
        args.query = part_of(values, SPARSEMLA_BF16, sizeof values[0], r, d_qk);
        args.q_scale = 0.75F;
        expect_ok(sparsemla_gather_query(&group->mailboxes[r], &args, NULL), "gather_query of bf16");
    }
    expect_ok(sparsemla_receive_query(&group->mailboxes[1], rows, &out, NULL), "receive_query");
    for (int row = 0; row < rows; ++row) {
        const size_t row_bytes = (size_t)padded_heads * d_qk, first = (size_t)row * row_bytes;
        check(memcmp(received + first, quantised + first, (size_t)heads * d_qk) == 0, "row %d of the query", row);
        check(received[first + (size_t)heads * d_qk] == 0, "a padded head that is not written, row %d", row);
    }
    free_ranks(group);
}

/* Rank 1 never pushes. */
static void test_wait_limit(void) {
    ranks* group = make_ranks();
    step* s = make_step();
    sparsemla_mailbox_status status = {.size = sizeof status};
    make_dcp(s);
    make_plan(s, "cpu");
    poison_outputs(s);
    gather_all(s, group);
    group->mailboxes[0].wait_limit_s = 0.01;
    expect_ok(decode_of_rank(s, group, 0), "decode");
    const sparsemla_merge_pushed_args args = merge_args(s, group, 0);
    expect_ok(sparsemla_merge_pushed(&group->mailboxes[0], &args, NULL), "merge_pushed of what never comes");
    check(isnan(s->out[0]) && isnan(s->lse[0]), "what is missing is NaN, got %g", (double)s->out[0]);
    expect_ok(sparsemla_mailbox_status_of(&group->mailboxes[0], &status, NULL), "mailbox_status_of");
    check(status.failed == 1 && status.exchanges == 0 && status.exchange == 0 && status.missing_rank == 1 &&
              status.row == 0 && status.stage == SPARSEMLA_STAGE_MERGE,
          "need merge of exchange 0 to wait for rank 1, got: %s", status.text);
    check(strstr(status.text, "exchange 0") && strstr(status.text, "merge") && strstr(status.text, "rank 1"),
          "the failure in words: %s", status.text);
    status.size = offsetof(sparsemla_mailbox_status, missing_rank);
    status.missing_rank = -7;
    expect_ok(sparsemla_mailbox_status_of(&group->mailboxes[0], &status, NULL), "a shorter status");
    check(status.failed == 1 && status.missing_rank == -7, "a shorter status is filled as far as it reaches");
    for (int r = 0; r < world; ++r)
        expect_ok(sparsemla_mailbox_reset(&group->mailboxes[r], NULL), "mailbox_reset after a failure");
    expect_exchanges(group, 0);
    free_plan(s);
    free_ranks(group);
}

/* Two ranks' candidates of one row; rank 1 of 2, a token each in turn, owns the odd ones. */
static void test_merge_topk(void) {
    enum { k = 4 };
    float scores[2][1][3] = {{{3, 1, 5}}, {{4, 2, 9}}};
    int32_t ids[2][1][3] = {{{0, 4, 9}}, {{7, 5, 6}}};
    int32_t source_counts[2] = {3, 2}; /* 6 of score 9 is not there */
    int32_t list[k] = {0}, table[1] = {1}, request[1] = {0}, count = -1;
    const int32_t needed_ids[k] = {9, 7, 5, -1}, needed_slots[k] = {12, 11, 10, -1};
    const sparsemla_cache cache = {.size = sizeof cache, .pages = 2, .page_size = 8};
    sparsemla_merge_topk_args args = sparsemla_merge_topk_args_default();
    args.rows = 1;
    args.k = k;
    args.scores = TENSOR(scores, SPARSEMLA_F32, 2, 1, 3);
    args.ids = TENSOR(ids, SPARSEMLA_I32, 2, 1, 3);
    args.source_counts = TENSOR(source_counts, SPARSEMLA_I32, 2, 1);
    args.counts = TENSOR(&count, SPARSEMLA_I32, 1);
    args.world = 2;
    args.rank = 1;
    expect_refused(sparsemla_merge_topk(&args, NULL), SPARSEMLA_INVALID_ARGUMENT, "slots", "neither ids nor slots");
    args.token_ids = TENSOR(list, SPARSEMLA_I32, 1, k);
    scores[1][0][1] = 3.5F; /* 9, 7, 5, 0 */
    expect_ok(sparsemla_merge_topk(&args, NULL), "merge_topk to token ids");
    check(count == 3 && memcmp(list, needed_ids, sizeof list) == 0, "token ids: got %d of %d, %d, %d, %d", count,
          list[0], list[1], list[2], list[3]);

    memset(&args.token_ids, 0, sizeof args.token_ids);
    args.slots = TENSOR(list, SPARSEMLA_I32, 1, k);
    args.block_table = TENSOR(table, SPARSEMLA_I32, 1, 1);
    args.request_of_row = TENSOR(request, SPARSEMLA_I32, 1);
    expect_refused(sparsemla_merge_topk(&args, NULL), SPARSEMLA_INVALID_ARGUMENT, "cache", "slots without a cache");
    args.cache = &cache;
    expect_ok(sparsemla_merge_topk(&args, NULL), "merge_topk to slots");
    check(count == 3 && memcmp(list, needed_slots, sizeof list) == 0, "slots: got %d of %d, %d, %d, %d", count, list[0],
          list[1], list[2], list[3]);
    args.k = -1;
    expect_refused(sparsemla_merge_topk(&args, NULL), SPARSEMLA_INVALID_ARGUMENT, "k", "-1 candidates");
    args.k = k;
    args.rank = 2;
    expect_refused(sparsemla_merge_topk(&args, NULL), SPARSEMLA_INVALID_ARGUMENT, "rank", "rank 2 of 2");
}

int main(void) {
    test_exchange("reference");
    test_exchange("cpu");
    test_calls_in_own_memory();
    test_quantised_query();
    test_wait_limit();
    test_merge_topk();
    return report();
}
