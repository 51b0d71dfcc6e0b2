/* What row_worker.c works with: rows and units as they are ordered by tiers/slab/worker.py, queues of them, threads. */
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "records.h"

#define ROW_WORKER_ABI 4

enum {
    DEPTH = 64,           /* requests in flight, of a thread */
    TAKE_BYTES = 2 << 20, /* so many bytes of rows, or one row, are taken, and looked for among what has ended */
    MAX_THREADS = 8,
    MAX_SEAL = 0xFFFF,
    NOT_MOVED = -1, /* as a verdict: an I/O error */
};

/* As `_ROW` of worker.py. */
struct row {
    uint64_t offset; /* in the file */
    uint64_t tick;   /* of its record */
    int32_t fd;
    uint32_t row;   /* of the region */
    uint32_t place; /* of the buffer, if the unit is staged */
    uint32_t slot;  /* of its record */
    uint32_t missing;
    uint8_t seal; /* whether to seal it before it is written */
    uint8_t key_bytes;
    uint8_t key[KEY];
    uint8_t reserved[2];
};
_Static_assert(sizeof(struct row) == 152, "_ROW of worker.py is as large");

/* As `_RESULT` of worker.py. */
struct result {
    uint64_t sealed_at;
    int32_t verdict;
    int32_t error; /* why it is NOT_MOVED, or has no record though it was written */
};

/* As `_Order` of worker.py. */
struct order {
    uint64_t id, now;
    uint8_t *stage; /* NULL: rows are moved straight between region and file */
    const struct row *rows;
    struct records *records; /* that say which rows were written; NULL: none do */
    struct space space;
    uint32_t count, places, write;
};

#include "units.h"

struct request {
    struct iocb block;
    struct unit *unit;
    struct request *next;
    uint32_t row;
};

struct moved {
    struct unit *unit;
    uint32_t row;
};

struct worker;

struct thread {
    struct worker *worker;
    pthread_t id;
    int kick; /* eventfd: something was queued, or has ended */
    aio_context_t context;
    struct request requests[DEPTH], *unused;
    uint32_t idle; /* how many are unused */
    struct moved written[DEPTH]; /* rows whose records are to be written */
    uint32_t written_count;
    bool wrote;    /* what was taken last */
    bool asleep;   /* it has found nothing in the queues */
    struct scratch scratch;
};

struct worker {
    struct shape shape;
    uint8_t *region;
    uint64_t rows;
    uint64_t request_bytes;
    uint32_t requests, batch; /* of a row; of which ends are looked for together */
    bool stopped;
    pthread_mutex_t lock; /* of units, `stopped` and `asleep` */
    struct units units;
    uint32_t count;
    struct thread threads[MAX_THREADS];
};
