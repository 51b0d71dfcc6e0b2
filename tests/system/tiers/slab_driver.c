/* Moves many units of random rows with csrc/row_worker.c, for the sanitizers: driver FILE SEED. Rows are recorded in
 * FILE.records, which is amended meanwhile. */
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

static struct records *records_in(const char *file, int *fd) {
    char name[4096];
    struct headers headers = {{1}, {1}, {2}};
    int lost;
    snprintf(name, sizeof name, "%s.records", file);
    *fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    must(*fd >= 0 && ftruncate(*fd, PAGE + ROWS * RECORD) == 0, "records");
    struct records *records = nixl_tiers_records_new(*fd, 7, &headers, &lost);
    must(records != NULL && !lost, "records");
    nixl_tiers_records_room(records, ROWS - 2);
    return records;
}

/* Which rows are recorded: those that were stored last into a slot, if they were stored. */
static void check_records(int fd, const uint8_t stored[ROWS]) {
    static struct record found[ROWS];
    static struct content contents[ROWS];
    must(pread(fd, found, sizeof found, PAGE) == sizeof found, "records");
    nixl_tiers_records_decode(found, 0, ROWS, 7, contents);
    for (uint32_t row = 0; row < ROWS; row++)
        must(contents[row].what == (stored[row] && row < ROWS - 2 ? ROW : UNKNOWN), "what is recorded");
}

static void *amend_all(void *records) {
    struct content changes[ROWS];
    for (int round = 0; round < 200; round++) {
        for (uint32_t row = 0; row < ROWS; row++) {
            char key[KEY] = {'k', (char)row, 'x'};
            changes[row] = (struct content){.tag = tag_of((uint8_t *)key, 3), .tick = (uint64_t)round, .slot = row,
                                            .sealed_at = 5, .what = row % 2 ? ROW : NOTHING};
        }
        must(nixl_tiers_records_amend(records, changes, ROWS, 1) == 0, "amend");
    }
    return NULL;
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
        struct unit *unit = worker->units.queues[order.write].first;
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
    int records_fd;
    struct records *records = records_in(words[1], &records_fd);
    pthread_t amends;
    must(pthread_create(&amends, NULL, amend_all, records) == 0, "thread");
    /* A row belongs to one unit at a time: its region row, place and slot have its number. */
    uint8_t busy[ROWS] = {0}, stored[ROWS] = {0}, owner[UNITS + 1][ROWS] = {{0}}, writes[UNITS + 1] = {0};
    int begun = 0, running = 0;
    while (begun < UNITS || running) {
        if (begun < UNITS && running < RUNNING) {
            struct row rows[ROWS];
            uint32_t n = 0;
            uint64_t id = (uint64_t)++begun;
            struct order order = {.id = id, .now = 5, .stage = rand() % 2 ? stage : NULL, .rows = rows, .places = ROWS,
                                  .records = records};
            order.write = writes[id] = (uint8_t)(rand() % 2);
            for (uint32_t row = 0; row < ROWS; row++) {
                if (busy[row] || rand() % 4 || (!order.write && !stored[row]))
                    continue;
                busy[row] = owner[id][n] = 1;
                owner[id][n] = (uint8_t)row;
                rows[n] = (struct row){.slot = row, .tick = id, .offset = row * shape.row_bytes, .fd = rand() % 16 ? fd : 1 << 20, .row = row,
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
            stored[row] = writes[id] ? results[i].verdict == V_OK : stored[row];
        }
    }
    nixl_tiers_row_worker_close(worker);
    pthread_join(amends, NULL);
    check_records(records_fd, stored);
    nixl_tiers_records_close(records, 1);
    uint8_t whole = 0;
    must(pread(records_fd, &whole, 1, 0) == 1 && whole == 2, "whole");
    for (int round = 0; round < 20; round++)
        close_early(&shape, region, fd, round);
    free(region);
    free(stage);
    puts("done");
}
