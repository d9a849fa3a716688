/* What mailbox.pml becomes with a fault, -DFAULT=name, or with kernels that overlap, -DOVERLAP=name. A model in which
 * spin did not find the faults would say nothing. */

#define ONE_PARITY 1           /* every exchange uses parity 0 */
#define FIRST_READER_REARMS 2  /* decode re-arms q pieces after the first of their readers */
#define UNREAD_NOT_AWAITED 3   /* merge re-arms q pieces that decode did not read without waiting for them */
#define UNREAD_NOT_REARMED 4   /* merge passes over q pieces that decode did not read */
#define FIRST_CTA_ADVANCES 5   /* the first CTA to leave merge advances the epoch */
#define NO_EMPTY 6             /* nothing is pushed for a row of which a rank owns nothing */
#define OWN_PARTIAL_IGNORED 7  /* merge takes its own rank's partial from elsewhere */
#define EMPTY_SOURCE_IGNORED 8 /* merge does not wait for the LSE of a rank that owns nothing of the row */
#define EMPTY_VALUE_AWAITED 9  /* merge waits for the values of all sources */
#define VALUE_NOT_AWAITED 10   /* merge takes the LSE word as the flag of the value */
#define FIRST_WORD_AWAITED 11  /* only the first word of a piece is polled */
#define ALL_ROWS_AWAITED 12    /* merge waits for CAP rows */
#define ROWS_DIFFER 13         /* rank 0 always exchanges CAP rows */
#define LOCKSTEP_CLAIMED 14    /* no fault but a wrong claim: no rank is ever an exchange ahead */
#ifndef FAULT
#define FAULT 0
#endif

/* The kernel whose CTAs do not wait for the end of the kernel before it. Right for DECODE, whose CTAs come from gather
 * here: merge(e - 1) has ended, and what other CTAs have still to gather is awaited by its readers. A fault for GATHER,
 * as other ranks may be in merge(e - 2), and for MERGE, as decode may have readers left. */
#ifndef OVERLAP
#define OVERLAP 0
#endif

#if FAULT == ONE_PARITY
#define PARITY 0
#else
#define PARITY (e % 2)
#endif

#if FAULT == ROWS_DIFFER
#define ROWS (RANK == 0 -> CAP : rows[e % 2])
#elif FAULT == FIRST_CTA_ADVANCES
#define ROWS rows[exchange[RANK] % 2] /* come with the launch, whatever the epoch says */
#else
#define ROWS rows[e % 2]
#endif

#if FAULT == ALL_ROWS_AWAITED
#define ROWS_OF_MERGE CAP
#else
#define ROWS_OF_MERGE ROWS
#endif

/* The CTA, the left-th to leave merge, that advances the epoch. */
#if FAULT == FIRST_CTA_ADVANCES
#define ADVANCES (left[RANK] == 1)
#else
#define ADVANCES (left[RANK] == 0)
#endif

/* Query pieces of the row in merge. */
#define QUERIES_AWAITED (OWNED(RANK) || (FAULT != UNREAD_NOT_AWAITED && FAULT != UNREAD_NOT_REARMED))
#define QUERIES_REARMED (OWNED(RANK) || FAULT != UNREAD_NOT_REARMED)

/* Partials in merge. */
#if FAULT == OWN_PARTIAL_IGNORED
#define IGNORED(source) (source == RANK)
#elif FAULT == EMPTY_SOURCE_IGNORED
#define IGNORED(source) (LSE(source, row, head) == ARMED && !OWNED(source))
#else
#define IGNORED(source) false
#endif
#define WITHOUT_VALUE(source) ((LSE(source, row, head) == EMPTY(e) && FAULT != EMPTY_VALUE_AWAITED) || IGNORED(source))

/* Only these faults need to know in merge what decode read. */
#define OWNED_IN_MERGE (FAULT == UNREAD_NOT_AWAITED || FAULT == UNREAD_NOT_REARMED || FAULT == EMPTY_SOURCE_IGNORED)
