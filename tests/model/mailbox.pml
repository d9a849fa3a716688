/* The mailbox protocol of decode context parallelism, for spin; mailbox_model_test.sh runs it.
 *
 * N ranks exchange query pieces and partial results through one mailbox a rank, without flags: a piece that is not yet
 * written is armed (all ones), its reader polls the piece itself, and it is re-armed afterwards. Exchange e uses parity
 * e % 2. What keeps an early writer away from a late reader is
 *
 *   the invariant: a rank writes for exchange e only after every rank's merge(e - 2) has ended
 *
 * which holds because the writer's merge(e - 1) waited for an LSE word of every rank's decode(e - 1), which that rank
 * began after its merge(e - 2) had ended, and there all of the parity was re-armed. (Its wait for every rank's query
 * pieces says the same, so a rank without heads is no exception.) Checked are the invariant itself and what follows:
 * only armed words are written (`write`), only data of the own exchange are read (`await`), all of the parity is armed
 * when merge has ended, rows beyond the batch too (`end_merge`), and nobody waits forever (no invalid end state).
 *
 * Exchanges go on forever and epochs count modulo PERIOD, so this is about any number of exchanges, not a first few.
 *
 * The grain. With EACH_WORD, each word is written in a step of its own, in any order, each word is waited for, and
 * reading and re-arming are steps apart. Without it a CTA goes through a kernel in one step, interrupted only where it
 * has to wait. That loses nothing, as long as the assertions hold:
 *   - A word written earlier than need be is armed already (asserted), and nobody but its readers looks at it. They may
 *     go on earlier, and among the interleavings they also go on later. So this covers words that become visible late
 *     too, even after the kernel that wrote them has ended.
 *   - A word that has arrived stays until merge re-arms it, so to wait for many is to wait for the last of them.
 *   - A word re-armed earlier than need be is looked at by writers only, and none writes before merge has ended
 *     (asserted).
 *
 * Not in the model: waits that expire; rows = 0, which is no exchange; and how kernel boundaries order memory accesses.
 * Assumed is that what merge re-armed is armed for every rank that has seen a word of a later kernel of that stream. */

#ifndef N
#define N 2 /* ranks */
#endif
#ifndef HEADS
#define HEADS N /* head h is owned by rank h % N: N - 1 leaves the last rank without, N + 1 gives two to rank 0 */
#endif
#ifndef CAP
#define CAP 2 /* rows of a mailbox */
#endif
#ifndef WORDS
#define WORDS 1 /* of a q piece, and of a value piece */
#endif
#ifndef ROWS_ALIKE
#define ROWS_ALIKE 0 /* a rank owns records of all rows or of none: fewer states */
#endif
#ifndef PERIOD
#define PERIOD 6 /* even, so that the parity survives the wrap; tells e from e - 2 and e - 4, and 4 from e - 2 only */
#endif
#define CTAS 2   /* of each kernel */

/* The kernels of an exchange, in stream order. */
#define GATHER 1
#define DECODE 2
#define MERGE 3

#include "mailbox_faults.pml"

#define next(e) (((e) + 1) % PERIOD)
#define previous(e) (((e) + PERIOD - 1) % PERIOD)

/* What a word may hold. Data say of which exchange they are. */
#define ARMED 0
#define DATA(e) (1 + (e))
#define EMPTY(e) (1 + PERIOD + (e)) /* an LSE only: the source owns nothing of the row */

/* All mailboxes. Values and LSE words lie in the mailbox of their head's owner. */
byte q[2 * N * CAP * HEADS * WORDS];
byte value[2 * N * CAP * HEADS * WORDS];
byte lse[2 * N * CAP * HEADS];
#define OWNER(head) ((head) % N)
#define PIECE(rank, row, head) (((PARITY * N + (rank)) * CAP + (row)) * HEADS + (head))
#define Q(rank, row, head, word) q[PIECE(rank, row, head) * WORDS + (word)]
#define VALUE(source, row, head, word) value[PIECE(source, row, head) * WORDS + (word)]
#define LSE(source, row, head) lse[PIECE(source, row, head)]

/* Each rank's stream and device memory. */
byte kernel[N] = GATHER; /* the one that runs */
byte left[N];            /* ticket counter: CTAs that have left it */
byte epoch[N];

/* Given from outside: the rows of an exchange, chosen by the first CTA that comes to it, and of which of them a rank
 * owns records (a bit each), chosen by the first CTA of its decode. 0 while not in use, which saves states. */
byte rows[2];
byte scheduled;
byte owned[N];
#define CHOSEN (1 << CAP)
#define OWNED(rank) (owned[rank] >> row & 1)

/* For assertions: the exchange that a rank is in, counted by ends of merge, whatever its epoch says. */
byte exchange[N];

#define RANK (_pid / CTAS)
#define CTA (_pid % CTAS)
hidden byte i, j; /* loop counters inside d_step */

/* The grain: what is one step. */
#ifdef EACH_WORD
#define KERNEL
#define UNINTERRUPTED
#define ONE_STEP atomic
#else
#define EACH_WORD 0
#define KERNEL atomic
#define UNINTERRUPTED d_step
#define ONE_STEP
#endif

/* One element out of a set of bits that is not empty: any, or the first from `one` on. */
inline take(set, one, any) {
    one = (any -> 0 : one);
    do
    :: set >> one & 1 -> break
    :: (any -> set >> (one + 1) : !(set >> one & 1)) -> one++
    od;
    set = set & ~(1 << one)
}

/* A word of exchange e into a rank's mailbox. */
inline write(rank, word, data) {
    assert(word == ARMED);
    assert(exchange[rank] == e || (exchange[rank] == previous(e) && FAULT != LOCKSTEP_CLAIMED));
    word = data
}

/* A word of exchange e, number `position` of its piece. */
inline await(word, position, at_once) {
    word != ARMED || (FAULT == FIRST_WORD_AWAITED && position > 0) || at_once;
    assert(word == DATA(e))
}

inline start(name) {
    kernel[RANK] == name || OVERLAP == name;
    e = (OVERLAP == GATHER -> e : epoch[RANK])
}

/* The last CTA to leave lets the next kernel start. */
inline leave(name, following) {
    kernel[RANK] == name; /* it is, unless kernels overlap */
    left[RANK]++;
    if
    :: left[RANK] == CTAS ->
        left[RANK] = 0;
        kernel[RANK] = following
    :: else
    fi
}

/* 1. Query pieces of the own heads, into every rank's mailbox; CTAs share out the ranks. */
inline gather() {
    atomic {
        start(GATHER);
        if
        :: scheduled == e ->
            scheduled = next(e);
            select (item : 1 .. CAP);
            rows[e % 2] = item
        :: else
        fi;
        words = 0;
        d_step {
            for (item : 0 .. N * CAP * HEADS * WORDS - 1) {
                words = words | (item / (CAP * HEADS * WORDS) % CTAS == CTA && item / (HEADS * WORDS) % CAP < ROWS &&
                                 OWNER(item / WORDS % HEADS) == RANK -> 1 << item : 0)
            };
            item = 0
        }
    };
    UNINTERRUPTED {
        item = 0;
        do
        :: words -> ONE_STEP {
            take(words, item, EACH_WORD);
            write(item / (CAP * HEADS * WORDS), Q(0, 0, 0, item), DATA(e));
            item = (EACH_WORD -> 0 : item)
        }
        :: !words -> break
        od;
        item = 0
    };
    atomic {
        leave(GATHER, DECODE)
    }
}

/* In the coarse grain, all that the next step reads has arrived; in the fine one, its loop waits word by word. */
#define ARRIVED_Q(head) (Q(RANK, row, (head) % HEADS, 0) != ARMED)
#define ARRIVED_LSE(source) (LSE((source) % N, row, head) != ARMED)
#define QUERIES_ARRIVED (EACH_WORD || (ARRIVED_Q(0) && ARRIVED_Q(1) && ARRIVED_Q(2) && ARRIVED_Q(3)))
#define PARTIALS_ARRIVED (EACH_WORD || (ARRIVED_LSE(0) && ARRIVED_LSE(1) && ARRIVED_LSE(2)))

/* A row's query pieces of all heads. */
inline read_queries() {
    QUERIES_ARRIVED;
    UNINTERRUPTED {
        item = 0;
        do
        :: item < HEADS * WORDS ->
            await(Q(RANK, row, 0, item), item % WORDS, false);
            item++
        :: else -> break
        od;
        item = 0
    }
}

inline rearm_queries() {
    for (i : 0 .. HEADS * WORDS - 1) {
        Q(RANK, row, 0, i) = ARMED
    }
}

/* The CTA's share of a row's partials, into the mailboxes of the heads' owners. A partial's last word is its LSE. */
inline push() {
    words = 0;
    d_step {
        for (item : 0 .. HEADS * (WORDS + 1) - 1) {
            words = words | (item / (WORDS + 1) % CTAS == CTA &&
                             (OWNED(RANK) || (item % (WORDS + 1) == WORDS && FAULT != NO_EMPTY)) -> 1 << item : 0)
        };
        item = 0
    };
    UNINTERRUPTED {
        item = 0;
        do
        :: words -> ONE_STEP {
            take(words, item, EACH_WORD);
            head = item / (WORDS + 1);
            if
            :: item % (WORDS + 1) < WORDS -> write(OWNER(head), VALUE(RANK, row, head, item % (WORDS + 1)), DATA(e))
            :: item % (WORDS + 1) == WORDS && OWNED(RANK) -> write(OWNER(head), LSE(RANK, row, head), DATA(e))
            :: else -> write(OWNER(head), LSE(RANK, row, head), EMPTY(e))
            fi;
            head = 0;
            item = (EACH_WORD -> 0 : item)
        }
        :: !words -> break
        od;
        item = 0;
        row = 0
    }
}

/* 2. Attention over the own records. Every CTA reads the pieces of all heads, as if each had some of the records. Rows
 * come in any order, as they would with CTAs of their own; not so with EACH_WORD, where states would be too many. */
inline decode() {
    atomic {
        start(DECODE);
        if
        :: owned[RANK] & CHOSEN
        :: else ->
            select (item : 0 .. (ROWS_ALIKE -> 1 : CHOSEN - 1));
            owned[RANK] = CHOSEN | (ROWS_ALIKE -> item * (CHOSEN - 1) : item);
            item = 0
        fi;
        todo = (1 << ROWS) - 1
    };
    do
    :: atomic {
        todo ->
        take(todo, row, !EACH_WORD);
        if
        :: OWNED(RANK) ->
            read_queries();
#if FAULT == FIRST_READER_REARMS
            d_step { rearm_queries(); i = 0 }
#endif
        :: else
        fi
       };
       push()
    :: !todo -> break
    od;
    atomic {
        leave(DECODE, MERGE);
        owned[RANK] = (kernel[RANK] == MERGE && !OWNED_IN_MERGE -> 0 : owned[RANK])
    }
}

/* An own head's partials of a row, from all sources. */
inline read_partials() {
    PARTIALS_ARRIVED;
    UNINTERRUPTED {
        item = 0;
        do
        :: item < N ->
            LSE(item, row, head) != ARMED || IGNORED(item);
            assert(LSE(item, row, head) == DATA(e) || LSE(item, row, head) == EMPTY(e) || IGNORED(item));
            item++
        :: else -> break
        od;
        item = 0;
        do
        :: item < N * WORDS ->
            if
            :: WITHOUT_VALUE(item / WORDS)
            :: else ->
                await(VALUE(item / WORDS, row, head, item % WORDS), item % WORDS, FAULT == VALUE_NOT_AWAITED)
            fi;
            item++
        :: else -> break
        od;
        item = 0
    }
}

inline rearm_partials() {
    for (i : 0 .. N - 1) {
        for (j : 0 .. WORDS - 1) {
            VALUE(i, row, head, j) = (LSE(i, row, head) == EMPTY(e) -> VALUE(i, row, head, j) : ARMED)
        };
        LSE(i, row, head) = (IGNORED(i) -> LSE(i, row, head) : ARMED)
    }
}

/* When the last CTA has left merge, all of the parity is armed again. */
inline end_merge() {
    for (i : 0 .. CAP * HEADS - 1) {
        for (j : 0 .. N * WORDS - 1) {
            assert(Q(RANK, 0, i, j % WORDS) == ARMED);
            assert(VALUE(j / WORDS, 0, i, j % WORDS) == ARMED || OWNER(i % HEADS) != RANK);
            assert(LSE(j / WORDS, 0, i) == ARMED || OWNER(i % HEADS) != RANK)
        }
    };
    exchange[RANK] = next(exchange[RANK]);
    owned[RANK] = 0;
    j = 0;
    for (i : 0 .. N - 1) {
        j = j + (exchange[i] == e)
    };
    rows[e % 2] = (j == 0 -> 0 : rows[e % 2])
}

/* 3. A row's partials for each own head, and, as if they were one more head but by the other CTA, its query pieces:
 * awaited and re-armed. The readers of query pieces have all ended with decode, however many they were. */
inline merge() {
    atomic {
        start(MERGE);
        d_step {
            for (item : 0 .. CAP * (HEADS + 1) - 1) {
                row = item / (HEADS + 1);
                head = item % (HEADS + 1);
                todo = todo | (row < ROWS_OF_MERGE &&
                               (head == HEADS -> row % CTAS != CTA : row % CTAS == CTA && OWNER(head) == RANK)
                               -> 1 << item : 0)
            };
            row = 0;
            head = 0;
            item = 0
        }
    };
    do
    :: atomic {
        todo ->
        take(todo, item, false);
        row = item / (HEADS + 1);
        head = item % (HEADS + 1);
        item = 0;
        if
        :: head < HEADS -> read_partials()
        :: head == HEADS && QUERIES_AWAITED -> read_queries()
        :: else
        fi
       };
       d_step {
        if
        :: head < HEADS -> rearm_partials()
        :: head == HEADS && QUERIES_REARMED -> rearm_queries()
        :: else
        fi;
        row = 0;
        head = 0;
        i = 0
       }
    :: !todo -> break
    od;
    atomic {
        leave(MERGE, GATHER);
        epoch[RANK] = (ADVANCES -> next(epoch[RANK]) : epoch[RANK]);
        if
        :: kernel[RANK] == GATHER -> d_step { end_merge(); i = 0 }
        :: else
        fi;
        e = (OVERLAP == GATHER -> next(e) : 0)
    }
}

active [N * CTAS] proctype cta() {
    byte e;          /* the exchange, as this CTA read it when the kernel began */
    int todo, words; /* sets of bits: what is left to do in the kernel, what is left to write */
    byte row, head, item;
    do
    :: KERNEL { gather() };
       KERNEL { decode() };
       KERNEL { merge() }
    od
}

#ifdef LIVENESS
ltl exchanges_go_on { []<> (exchange[N - 1] == 0) && []<> (exchange[N - 1] == 1) }
#endif
