/* Moves many units of random rows with csrc/row_worker.c, for the sanitizers: driver FILE SEED. */
#include "row_worker.c"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/mman.h>

enum { ROWS = 64, UNITS = 200, RUNNING = 8 };

static void must(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

/* Close while some rows of a unit move and others wait. */
static void close_early(const struct shape *shape, uint8_t *region, int fd, int round) {
    int error;
    struct worker *worker = nixl_tiers_row_worker_new(shape, region, ROWS, 2 << 20, 2, &error);
    must(worker != NULL, "worker");
    struct row rows[ROWS];
    for (uint32_t row = 0; row < ROWS; row++)
        rows[row] = (struct row){.offset = row * shape->row_bytes, .fd = fd, .row = row, .seal = 1, .key_bytes = 1};
    struct order order = {.id = 1, .now = 5, .rows = rows, .count = ROWS, .write = (uint32_t)round % 2};
    must(nixl_tiers_row_worker_submit(worker, &order) == 0, "submit");
    for (uint32_t taken = 0; !taken;) {
        pthread_mutex_lock(&worker->lock);
        struct unit *unit = worker->queues[order.write].first;
        taken = unit ? unit->taken : ROWS;
        pthread_mutex_unlock(&worker->lock);
    }
    nixl_tiers_row_worker_close(worker);
}

int main(int count, char **words) {
    must(count == 3, "driver FILE SEED");
    srand((unsigned)atoi(words[2]));
    struct shape shape = {.cell_payload = 70000, .cell_bytes = 73728, .cells = 2, .sub_blocks = 4};
    shape.seal_bytes = 80 + 112 + 8 + 16 * 2 + 16;
    shape.row_bytes = 2 * shape.cell_bytes; /* the seal is in the padding */
    size_t size = ROWS * shape.row_bytes;
    int fd = open(words[1], O_RDWR | O_CREAT | O_TRUNC, 0600), error;
    must(fd >= 0 && ftruncate(fd, 2 * (off_t)size) == 0, "file");
    uint8_t *region = aligned_alloc(PAGE, size), *stage = aligned_alloc(PAGE, size);
    must(region && stage, "memory");
    for (size_t i = 0; i < size; i++)
        region[i] = (uint8_t)rand();
    struct worker *worker = nixl_tiers_row_worker_new(&shape, region, ROWS, 2 << 20, 2, &error);
    must(worker != NULL, "worker");
    /* A row belongs to one unit at a time: its region row, place and slot have its number. */
    uint8_t busy[ROWS] = {0}, stored[ROWS] = {0}, owner[UNITS + 1][ROWS] = {{0}}, writes[UNITS + 1] = {0};
    int begun = 0, running = 0;
    while (begun < UNITS || running) {
        if (begun < UNITS && running < RUNNING) {
            struct row rows[ROWS];
            uint32_t n = 0;
            uint64_t id = (uint64_t)++begun;
            struct order order = {.id = id, .now = 5, .stage = rand() % 2 ? stage : NULL, .rows = rows, .places = ROWS};
            order.write = writes[id] = (uint8_t)(rand() % 2);
            for (uint32_t row = 0; row < ROWS; row++) {
                if (busy[row] || rand() % 4 || (!order.write && !stored[row]))
                    continue;
                busy[row] = owner[id][n] = 1;
                owner[id][n] = (uint8_t)row;
                rows[n] = (struct row){.offset = row * shape.row_bytes, .fd = rand() % 16 ? fd : 1 << 20, .row = row,
                                       .place = row, .missing = (uint32_t)rand() % 5, .seal = 1, .key_bytes = 3};
                memcpy(rows[n].key, (char[]){'k', (char)row, 'x'}, 3);
                n++;
            }
            order.count = n;
            running += n > 0;
            must(nixl_tiers_row_worker_submit(worker, &order) == (n ? 0 : EINVAL), "submit");
            if (running < RUNNING && rand() % 2)
                continue;
        }
        if (!running)
            continue;
        struct pollfd ended = {.fd = nixl_tiers_row_worker_fd(worker), .events = POLLIN};
        must(poll(&ended, 1, 60000) == 1, "no unit has ended");
        struct result results[ROWS];
        uint64_t id;
        uint32_t n = nixl_tiers_row_worker_take(worker, &id, results, ROWS);
        must(n > 0, "readable, and none has ended");
        running--;
        for (uint32_t i = 0; i < n; i++) {
            uint8_t row = owner[id][i];
            busy[row] = 0;
            must(results[i].verdict == V_OK || (results[i].verdict == NOT_MOVED && results[i].error == EBADF), "verdict");
            stored[row] |= writes[id] && results[i].verdict == V_OK;
        }
    }
    nixl_tiers_row_worker_close(worker);
    for (int round = 0; round < 20; round++)
        close_early(&shape, region, fd, round);
    free(region);
    free(stage);
    puts("done");
}
