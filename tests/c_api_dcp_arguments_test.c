/* The C interface of decode context parallelism from C11: every NULL, struct sizes of other versions, values out of
 * range. */
#include "c_api_ranks.h"

static const sparsemla_status bad = SPARSEMLA_INVALID_ARGUMENT;

static void test_nulls(void) {
    ranks* group = make_ranks();
    step* s = make_step();
    sparsemla_mailbox mailbox = group->mailboxes[0];
    sparsemla_mailbox_layout layout = {.size = sizeof layout};
    sparsemla_mailbox_status status = {.size = sizeof status};
    sparsemla_gather_query_args gather = gather_args(s, 0);
    sparsemla_push_args push = sparsemla_push_args_default();
    sparsemla_merge_pushed_args merge = merge_args(s, group, 0);
    sparsemla_loopback* loopback = NULL;
    expect_refused(sparsemla_mailbox_layout_of(NULL, &layout), bad, "shape", "layout_of");
    expect_refused(sparsemla_mailbox_layout_of(&group->shape, NULL), bad, "out", "layout_of");
    expect_refused(sparsemla_mailbox_reset(NULL, NULL), bad, "mailbox", "reset");
    expect_refused(sparsemla_mailbox_status_of(NULL, &status, NULL), bad, "mailbox", "status_of");
    expect_refused(sparsemla_mailbox_status_of(&mailbox, NULL, NULL), bad, "out", "status_of");
    expect_refused(sparsemla_gather_query(NULL, &gather, NULL), bad, "mailbox", "gather_query");
    expect_refused(sparsemla_gather_query(&mailbox, NULL, NULL), bad, "args", "gather_query");
    expect_refused(sparsemla_receive_query(NULL, 1, &s->args.query, NULL), bad, "mailbox", "receive_query");
    expect_refused(sparsemla_receive_query(&mailbox, 1, NULL, NULL), bad, "out", "receive_query");
    expect_refused(sparsemla_push(NULL, &push, NULL), bad, "mailbox", "push");
    expect_refused(sparsemla_push(&mailbox, NULL, NULL), bad, "args", "push");
    expect_refused(sparsemla_merge_pushed(NULL, &merge, NULL), bad, "mailbox", "merge_pushed");
    expect_refused(sparsemla_merge_pushed(&mailbox, NULL, NULL), bad, "args", "merge_pushed");
    expect_refused(sparsemla_loopback_create(NULL, SPARSEMLA_CPU, 0, &loopback), bad, "shape", "loopback_create");
    expect_refused(sparsemla_loopback_create(&group->shape, SPARSEMLA_CPU, 0, NULL), bad, "out_loopback",
                   "loopback_create");
    expect_refused(sparsemla_loopback_mailbox(NULL, 0, &mailbox), bad, "loopback", "loopback_mailbox");
    expect_refused(sparsemla_loopback_mailbox(group->loopback, 0, NULL), bad, "out", "loopback_mailbox");
    expect_refused(sparsemla_loopback_reset(NULL), bad, "loopback", "loopback_reset");
    expect_refused(sparsemla_merge_topk(NULL, NULL), bad, "args", "merge_topk");
    sparsemla_loopback_destroy(NULL);
    free_ranks(group);
}

/* Each field of a mailbox that no call takes. */
static void test_mailboxes(void) {
    ranks* group = make_ranks();
    step* s = make_step();
    const sparsemla_gather_query_args args = gather_args(s, 0);
    void* bases[world] = {group->mailboxes[0].bases[0], NULL};
    struct {
        sparsemla_mailbox mailbox;
        const char* argument;
    } cases[10];
    for (int i = 0; i < 10; ++i) cases[i].mailbox = group->mailboxes[0];
    cases[0].mailbox.shape = NULL, cases[0].argument = "mailbox.shape";
    cases[1].mailbox.bases = NULL, cases[1].argument = "mailbox.bases";
    cases[2].mailbox.bases = bases, cases[2].argument = "mailbox.bases[1]";
    cases[3].mailbox.control = NULL, cases[3].argument = "mailbox.control";
    cases[4].mailbox.control_bytes = 8, cases[4].argument = "mailbox.control";
    cases[5].mailbox.rank = world, cases[5].argument = "rank";
    cases[6].mailbox.device_kind = 2, cases[6].argument = "mailbox.device_kind";
    cases[7].mailbox.wait_limit_s = 0, cases[7].argument = "mailbox.wait_limit_s";
    cases[8].mailbox.delayed_stage = SPARSEMLA_STAGE_MERGE + 1, cases[8].argument = "mailbox.delayed_stage";
    cases[9].mailbox.delay_us = -1, cases[9].argument = "mailbox.delay";
    for (int i = 0; i < 10; ++i)
        expect_refused(sparsemla_gather_query(&cases[i].mailbox, &args, NULL), bad, cases[i].argument, "a mailbox");
    group->mailboxes[0].delayed_stage = SPARSEMLA_STAGE_GATHER;
    group->mailboxes[0].delay_us = 1;
    expect_ok(sparsemla_gather_query(&group->mailboxes[0], &args, NULL), "a late gather_query");
    free_ranks(group);
}

static void expect_no_layout(const sparsemla_dcp_shape* shape, const char* argument) {
    sparsemla_mailbox_layout layout = {.size = sizeof layout, .bytes = -1};
    sparsemla_loopback* loopback = NULL;
    expect_refused(sparsemla_mailbox_layout_of(shape, &layout), bad, argument, "layout_of a shape");
    expect_refused(sparsemla_loopback_create(shape, SPARSEMLA_CPU, 0, &loopback), bad, argument, "a group of a shape");
    check(layout.bytes == -1 && loopback == NULL, "refused calls must leave their outputs alone");
}

static void test_shapes(void) {
    static const int64_t descending[world + 1] = {0, 2, 1};
    sparsemla_dcp_shape shape = step_shape();
    shape.head_offset = NULL;
    expect_no_layout(&shape, "shape.head_offset");
    shape.head_offset = descending;
    expect_no_layout(&shape, "shape.head_offset");
    shape = step_shape();
    for (int32_t ranks_of_shape = 0; ranks_of_shape <= SPARSEMLA_MAX_RANKS + 1;
         ranks_of_shape += SPARSEMLA_MAX_RANKS + 1) {
        shape.world = ranks_of_shape;
        expect_no_layout(&shape, "shape.world");
    }
    shape = step_shape();
    shape.rows = -1;
    expect_no_layout(&shape, "shape.rows");
    shape = step_shape();
    shape.query_dtype = SPARSEMLA_F32;
    expect_no_layout(&shape, "shape.query_dtype");
    shape.query_dtype = 99;
    expect_no_layout(&shape, "shape.query_dtype");
    shape = step_shape();
    shape.padded_heads = heads - 1;
    expect_no_layout(&shape, "shape.padded_heads");
    shape = step_shape();
    shape.d_qk = 575;
    expect_no_layout(&shape, "shape.d_qk");
}

static void test_layout(void) {
    sparsemla_dcp_shape shape = step_shape();
    sparsemla_mailbox_layout layout = {.size = sizeof layout}, other = {.size = sizeof other};
    shape.padded_heads = padded_heads;
    expect_ok(sparsemla_mailbox_layout_of(&shape, &layout), "layout_of");
    check(layout.world == world && layout.rows == rows && layout.heads == heads &&
              layout.padded_heads == padded_heads && layout.most_heads == 2 && layout.d_qk == d_qk &&
              layout.query_dtype == SPARSEMLA_F8_E4M3,
          "the layout's sizes are the shape's");
    check(layout.query_parity_bytes >= rows * padded_heads * d_qk &&
              layout.values_offset_bytes >= layout.query_offset_bytes + 2 * layout.query_parity_bytes &&
              layout.lses_offset_bytes >= layout.values_offset_bytes + 2 * layout.values_parity_bytes &&
              layout.bytes >= layout.lses_offset_bytes + 2 * layout.lses_parity_bytes && layout.control_bytes >= 64,
          "every piece has its place");
    shape.rows = rows + 1;
    expect_ok(sparsemla_mailbox_layout_of(&shape, &other), "layout_of more rows");
    check(other.fingerprint != layout.fingerprint && other.bytes > layout.bytes, "another shape, another layout");
}

/* Callers of other versions. */
static void test_sizes(void) {
    ranks* group = make_ranks();
    step* s = make_step();
    struct {
        sparsemla_mailbox known;
        int64_t later;
    } mailbox = {group->mailboxes[0], 0};
    struct {
        sparsemla_mailbox_layout known;
        int64_t later;
    } layout = {{.size = sizeof layout}, -1};
    sparsemla_dcp_shape shape = step_shape();
    sparsemla_gather_query_args args = gather_args(s, 0);
    sparsemla_merge_pushed_args merge = merge_args(s, group, 0);
    sparsemla_mailbox shorter = {.size = offsetof(sparsemla_mailbox, delayed_stage), .delayed_cta = -7};

    mailbox.known.size = sizeof mailbox;
    expect_ok(sparsemla_mailbox_reset(&mailbox.known, NULL), "a longer mailbox, all 0");
    mailbox.later = 1;
    expect_refused(sparsemla_mailbox_reset(&mailbox.known, NULL), bad, "mailbox.size", "an unknown field set");
    mailbox.known = group->mailboxes[0];
    mailbox.known.size = offsetof(sparsemla_mailbox, delayed_stage);
    mailbox.known.delayed_stage = 99; /* behind the stated end: not looked at */
    expect_ok(sparsemla_mailbox_reset(&mailbox.known, NULL), "a mailbox that ends before the delay");
    --mailbox.known.size;
    expect_refused(sparsemla_mailbox_reset(&mailbox.known, NULL), bad, "mailbox.size", "a mailbox cut short");
    expect_ok(sparsemla_loopback_mailbox(group->loopback, 0, &shorter), "a shorter mailbox as output");
    check(shorter.control == group->mailboxes[0].control && shorter.wait_limit_s == 10 && shorter.delayed_cta == -7,
          "is filled as far as it reaches");

    shape.size = offsetof(sparsemla_dcp_shape, query_dtype);
    shape.query_dtype = 99;
    shape.d_qk = 99;
    expect_ok(sparsemla_mailbox_layout_of(&shape, &layout.known), "a shape of required fields only");
    check(layout.known.d_qk == 576 && layout.known.query_dtype == SPARSEMLA_F8_E4M3, "the others have defaults");
    check(layout.later == 0 && layout.known.size == sizeof layout, "later fields of an output struct become 0");
    shape.size = SIZE_MAX;
    expect_refused(sparsemla_mailbox_layout_of(&shape, &layout.known), bad, "shape.size", "a size never set");
    mailbox.known = group->mailboxes[0];
    mailbox.known.shape = &shape;
    expect_refused(sparsemla_mailbox_reset(&mailbox.known, NULL), bad, "mailbox.shape.size", "a mailbox of that shape");

    args.size = offsetof(sparsemla_gather_query_args, q_scale);
    args.q_scale = -1;
    expect_ok(sparsemla_gather_query(&group->mailboxes[0], &args, NULL), "arguments that end before q_scale");
    args.size = sizeof args.size;
    expect_refused(sparsemla_gather_query(&group->mailboxes[0], &args, NULL), bad, "args.size", "too short");
    merge.size = 0;
    expect_refused(sparsemla_merge_pushed(&group->mailboxes[0], &merge, NULL), bad, "args.size", "a size of 0");
    free_ranks(group);
}

static void test_values(void) {
    ranks* group = make_ranks();
    step* s = make_step();
    const sparsemla_mailbox* mailbox = &group->mailboxes[0];
    sparsemla_gather_query_args gather = gather_args(s, 0);
    sparsemla_push_args push = sparsemla_push_args_default();
    sparsemla_merge_pushed_args merge = merge_args(s, group, 0);
    sparsemla_mailbox out = {.size = sizeof out};
    poison_outputs(s);
    gather.rows = rows + 1;
    expect_refused(sparsemla_gather_query(mailbox, &gather, NULL), bad, "rows", "rows past the capacity");
    gather.rows = rows;
    gather.query.dtype = SPARSEMLA_F32;
    expect_refused(sparsemla_gather_query(mailbox, &gather, NULL), bad, "query", "a query of f32");
    gather = gather_args(s, 0);
    gather.q_scale = 2;
    expect_refused(sparsemla_gather_query(mailbox, &gather, NULL), bad, "q_scale", "codes with a scale");
    gather.reserved = 1;
    expect_refused(sparsemla_gather_query(mailbox, &gather, NULL), bad, "args.reserved", "reserved 1");
    expect_refused(sparsemla_receive_query(mailbox, rows, &s->args.out, NULL), bad, "out", "a query as f32");
    push.rows = rows;
    push.out = s->args.out;
    push.lse = s->args.lse;
    push.lse_base = 2;
    expect_refused(sparsemla_push(mailbox, &push, NULL), bad, "args.lse_base", "lse of base 2 + 1");
    push.lse_base = SPARSEMLA_LSE_NATURAL;
    push.reserved = 1;
    expect_refused(sparsemla_push(mailbox, &push, NULL), bad, "args.reserved", "reserved 1");
    push.reserved = 0;
    push.lse.rank = 0;
    expect_refused(sparsemla_push(mailbox, &push, NULL), bad, "lse", "no lse");
    merge.query_gathered = 2;
    expect_refused(sparsemla_merge_pushed(mailbox, &merge, NULL), bad, "args.query_gathered", "a flag of 2");
    merge.query_gathered = 1;
    merge.out.shape[1] = 0;
    expect_refused(sparsemla_merge_pushed(mailbox, &merge, NULL), bad, "out", "an output without heads");
    expect_refused(sparsemla_loopback_mailbox(group->loopback, world, &out), bad, "rank", "rank 2 of 2");
    expect_refused(sparsemla_loopback_mailbox(group->loopback, -1, &out), bad, "rank", "rank -1");
    check(outputs_untouched(s), "refused calls must write nothing");
    free_ranks(group);
}

/* What decode takes a mailbox for, and what not. */
static void test_decode(void) {
    ranks* group = make_ranks();
    step* s = make_step();
    sparsemla_plan* plan = NULL;
    int32_t supported = -1;
    sparsemla_tensor query;
    make_plan(s, "cpu");
    s->args.mailbox = &group->mailboxes[0];
    poison_outputs(s);
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), bad, "mailbox", "a mailbox for a plain problem");
    s->args.size = offsetof(sparsemla_decode_args, mailbox); /* a caller that knows none */
    expect_ok(sparsemla_decode(s->plan, &s->args, NULL), "arguments that end before the mailbox");
    s->args.size = sizeof s->args;
    free_plan(s);

    s = make_step();
    query = s->args.query;
    s->problem.dcp = 2;
    expect_refused(sparsemla_plan_create(&s->problem, &s->device, NULL, &plan), bad, "problem.dcp", "a flag of 2");
    s->problem.dcp = 1;
    expect_ok(sparsemla_supports(&s->problem, &s->device, NULL, &supported), "supports");
    check(supported == 0 && strstr(sparsemla_last_error(), "out_dtype") != NULL, "f32 does not travel: %s",
          sparsemla_last_error());
    make_dcp(s);
    make_plan(s, "cpu");
    poison_outputs(s);
    expect_refused(sparsemla_decode(s->plan, &s->args, NULL), bad, "mailbox", "no mailbox");
    group->mailboxes[1].rank = -1;
    expect_refused(decode_of_rank(s, group, 1), bad, "rank", "rank -1");
    group->mailboxes[1].bases = NULL;
    expect_refused(decode_of_rank(s, group, 1), bad, "args.mailbox.bases", "a mailbox without bases");
    s->args.query = query;
    expect_refused(decode_of_rank(s, group, 0), bad, "query", "a query besides that of the mailbox");
    check(outputs_untouched(s), "refused calls must write nothing");
    free_plan(s);
    free_ranks(group);
}

int main(void) {
    test_nulls();
    test_mailboxes();
    test_shapes();
    test_layout();
    test_sizes();
    test_values();
    test_decode();
    return report();
}
