/* What a step's jobs copy, and what became of it: everything of a worker's jobs that goes by row or by block, but for
 * the bytes. One call plans all jobs of a direction, one marks the rows of all stores.
 *
 * After a forward pass no code is in a processor's cache: what counts for the engine's thread is how much of it is
 * touched. tests/support/plain_steps.py says the same in Python.
 */
#include <stddef.h>

#include "swap.h"

typedef int64_t step_i64;

typedef struct {
    swap_u64 blocks;          /* how many there are */
    swap_u64 block_bytes;
    swap_u64 last_block_only; /* of whose chunks loads read only the last block */
} step_group;

typedef struct {
    const step_group *groups;
    swap_u64 n_groups;
    swap_u64 rows, sub_blocks;
    swap_u64 turn, turns; /* this rank stores the rows whose number is `turn` modulo `turns` */
    swap_u64 *control;    /* of row 0's cell of this rank; NULL: the region is closed */
    swap_u64 cells;
} step_layout;

/* All jobs of a step. `numbers`, of each job: its rows, its blocks, its store_seq, how many rows lack sub-blocks; then
 * of each group its rows, its blocks, and the first block's index in its request; then of each row that lacks
 * sub-blocks its place among the job's rows, and how many. Rows and blocks follow each other job by job. */
typedef struct {
    const step_i64 *numbers;
    swap_u64 n_numbers, n_jobs;
    const swap_u32 *rows;
    const void *blocks;
    swap_u64 n_rows, n_blocks;
    swap_u64 block_size; /* of a number in `blocks`: 4 or 8, signed */
} step_jobs;

/* What is planned. `pairs`: room for one a block; those of group 0 first, in each group job by job.
 * `counts`: of each job, of each group, how many. `nbytes`, `verdicts`: of each job. */
typedef struct {
    swap_pair *pairs;
    swap_u64 *counts, *nbytes, *verdicts;
} step_plan;

enum { GOOD, MISMATCH, ROW_RANGE, BLOCK_RANGE, NOT_HELD, COPY_FAILED };
enum { HEAD = 4, OF_GROUP = 3 };
enum { WRITTEN = 1, FAILED = 2, INCOMPLETE = 3, MISSING_AT = 8, STORE_SEQ_AT = 24, MAX_MISSING = 0xffff };

/* Where a job stands in the arrays of its step. */
typedef struct {
    const step_i64 *head, *groups, *missing;
    const swap_u32 *rows;
    swap_u64 n_rows, first_block, n_blocks, n_missing;
} job;

/* One group's share of a job. */
typedef struct {
    swap_u64 rows, blocks, first; /* `first`: the sub-block of the first row in which the first block stands */
    int last_alone;               /* one block a row, the last one */
    int known;                    /* whether it is known which block stands where */
} part;

static step_i64 block_at(const step_jobs *jobs, swap_u64 at) {
    return jobs->block_size == 8 ? ((const step_i64 *)jobs->blocks)[at] : ((const int32_t *)jobs->blocks)[at];
}

/* The next job; 0 where the arrays are shorter than it says. */
static int next_job(const step_layout *layout, const step_jobs *jobs, job *at) {
    const step_i64 *end = jobs->numbers + jobs->n_numbers;
    const step_i64 *head = at->head ? at->missing + 2 * at->n_missing : jobs->numbers;
    const swap_u32 *rows = at->head ? at->rows + at->n_rows : jobs->rows;
    swap_u64 first_block = at->first_block + at->n_blocks, numbers = HEAD + OF_GROUP * layout->n_groups;
    if ((swap_u64)(end - head) < numbers || (swap_u64)head[3] > ((swap_u64)(end - head) - numbers) / 2)
        return 0;
    if ((swap_u64)head[0] > jobs->n_rows - (swap_u64)(rows - jobs->rows) ||
        (swap_u64)head[1] > jobs->n_blocks - first_block)
        return 0;
    *at = (job){head, head + HEAD, head + numbers, rows, (swap_u64)head[0], first_block, (swap_u64)head[1],
                (swap_u64)head[3]};
    return 1;
}

/* Whether the groups' shares add up to the job, and so none reaches beyond it; and its store_seq has its 40 bits. */
static int adds_up(const step_layout *layout, const job *at) {
    swap_u64 rows = 0, blocks = 0;
    for (swap_u64 g = 0; g < layout->n_groups; g++) {
        const step_i64 *of = at->groups + OF_GROUP * g;
        if ((swap_u64)of[0] > at->n_rows - rows || (swap_u64)of[1] > at->n_blocks - blocks || of[2] < 0)
            return 0;
        rows += (swap_u64)of[0];
        blocks += (swap_u64)of[1];
    }
    return rows == at->n_rows && blocks == at->n_blocks && !((swap_u64)at->head[2] >> (64 - STORE_SEQ_AT));
}

static part part_of(const step_layout *layout, const job *at, swap_u64 group) {
    const step_i64 *of = at->groups + OF_GROUP * group;
    swap_u64 sub_blocks = layout->sub_blocks;
    part p = {(swap_u64)of[0], (swap_u64)of[1], (swap_u64)of[2] % sub_blocks, 0, 0};
    /* vLLM leaves null blocks out of a store without their positions, and lists a chunk only with its last block. */
    p.last_alone = p.blocks == p.rows && p.rows > 1 && p.first == sub_blocks - 1 && sub_blocks > 1;
    p.known = p.last_alone || p.blocks + p.first == p.rows * sub_blocks;
    return p;
}

/* Sub-blocks that a load reads and the row does not hold. */
static int reads_missing(const job *at, swap_u64 first_row, const part *p) {
    for (swap_u64 i = 0; i < at->n_missing; i++) {
        swap_u64 place = (swap_u64)at->missing[2 * i], count = (swap_u64)at->missing[2 * i + 1];
        if (place >= first_row && place - first_row < p->rows && count > (place == first_row ? p->first : 0))
            return 1;
    }
    return 0;
}

static int verdict_of(const step_layout *layout, const step_jobs *jobs, const job *at, int to_host) {
    if (!adds_up(layout, at))
        return MISMATCH;
    for (swap_u64 i = 0; i < at->n_rows; i++)
        if (at->rows[i] >= layout->rows)
            return ROW_RANGE;
    swap_u64 block = at->first_block, row = 0;
    for (swap_u64 g = 0; g < layout->n_groups; g++) {
        part p = part_of(layout, at, g);
        if (!to_host) {
            if (reads_missing(at, row, &p))
                return NOT_HELD;
            if (p.rows != (p.blocks ? (p.first + p.blocks + layout->sub_blocks - 1) / layout->sub_blocks : 0))
                return MISMATCH;
        }
        for (swap_u64 i = 0; i < p.blocks; i++)
            if ((swap_u64)block_at(jobs, block + i) >= layout->groups[g].blocks)
                return BLOCK_RANGE;
        block += p.blocks;
        row += p.rows;
    }
    return GOOD;
}

/* One group's pairs of a job; returns how many. */
static swap_u64 pair_up(const step_layout *layout, const step_jobs *jobs, const job *at, swap_u64 group, int to_host,
                        swap_pair *pairs) {
    const swap_u32 *rows = at->rows;
    swap_u64 block = at->first_block, n = 0, sub_blocks = layout->sub_blocks;
    for (swap_u64 g = 0; g < group; g++) {
        rows += at->groups[OF_GROUP * g];
        block += (swap_u64)at->groups[OF_GROUP * g + 1];
    }
    part p = part_of(layout, at, group);
    if (to_host && (!p.known || !p.rows))
        return 0;
    for (swap_u64 i = 0; i < p.blocks; i++) {
        swap_u64 index = to_host && p.last_alone ? i * sub_blocks + p.first : p.first + i;
        swap_u32 row = rows[index / sub_blocks];
        if (to_host && row % layout->turns != layout->turn)
            continue;
        pairs[n].block = (swap_u32)block_at(jobs, block + i);
        pairs[n++].place = (swap_u32)(row * sub_blocks + index % sub_blocks);
    }
    return n;
}

/* Plans all jobs; of one that is not as it should be nothing is copied, and its verdict says why. Returns how many pairs
 * there are, or -1 where the arrays are not as long as the jobs say: nothing is planned then. */
step_i64 nixl_tiers_step_plan(const step_layout *layout, const step_jobs *jobs, int to_host, const step_plan *plan) {
    job at = {0};
    for (swap_u64 j = 0; j < jobs->n_jobs; j++) {
        if (!next_job(layout, jobs, &at))
            return -1;
        plan->verdicts[j] = (swap_u64)verdict_of(layout, jobs, &at, to_host);
        plan->nbytes[j] = 0;
    }
    if (jobs->n_jobs && (at.rows + at.n_rows != jobs->rows + jobs->n_rows || at.first_block + at.n_blocks != jobs->n_blocks))
        return -1;
    swap_u64 n = 0;
    for (swap_u64 g = 0; g < layout->n_groups; g++) {
        at = (job){0};
        for (swap_u64 j = 0; j < jobs->n_jobs; j++) {
            next_job(layout, jobs, &at);
            swap_u64 count =
                plan->verdicts[j] ? 0 : pair_up(layout, jobs, &at, g, to_host, plan->pairs + n);
            plan->counts[j * layout->n_groups + g] = count;
            plan->nbytes[j] += count * layout->groups[g].block_bytes;
            n += count;
        }
    }
    return (step_i64)n;
}

/* Says in the control words of all rows that this rank writes what became of them. A job whose parts do not add up has
 * none that could be told. Returns 0 where the region is closed. */
int nixl_tiers_step_mark(const step_layout *layout, const step_jobs *jobs, const swap_u64 *verdicts) {
    job at = {0};
    for (swap_u64 j = 0; j < jobs->n_jobs && layout->control; j++) {
        if (!next_job(layout, jobs, &at))
            break;
        if (verdicts[j] == MISMATCH)
            continue;
        const swap_u32 *rows = at.rows;
        for (swap_u64 g = 0; g < layout->n_groups; g++) {
            part p = part_of(layout, &at, g);
            for (swap_u64 i = 0; i < p.rows; i++) {
                swap_u64 missing = i && !p.last_alone ? 0 : p.first, state = WRITTEN;
                if (rows[i] >= layout->rows || rows[i] % layout->turns != layout->turn)
                    continue;
                /* In other groups a look-up cannot know whether the load would read the missing blocks. */
                if (!p.known || (missing && !layout->groups[g].last_block_only) || missing > MAX_MISSING)
                    state = INCOMPLETE;
                if (verdicts[j])
                    state = FAILED;
                missing = missing < MAX_MISSING ? missing : MAX_MISSING;
                __atomic_store_n(layout->control + (swap_u64)rows[i] * layout->cells,
                                 (swap_u64)at.head[2] << STORE_SEQ_AT | missing << MISSING_AT | state, __ATOMIC_RELEASE);
            }
            rows += p.rows;
        }
    }
    return layout->control != NULL;
}
