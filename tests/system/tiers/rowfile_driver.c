/* Moves many units of random rows with csrc/row_files.c, for the sanitizers: driver FOLDER SEED. */
#include "row_files.c"

#include <poll.h>

enum { ROWS = 64, UNITS = 100, RUNNING = 8 };

static void must(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static struct row row_of(uint32_t number) {
    struct row row = {.number = number, .row = number, .missing = (uint32_t)rand() % 5, .seal = 1, .key_bytes = 2};
    row.fanout = row.key[1] = (uint8_t)(number % 8);
    row.key[0] = (uint8_t)number;
    return row;
}

/* Close while some rows of a unit move and others wait. */
static void close_early(const struct shape *shape, uint8_t *region, struct order order, int round) {
    int error;
    struct worker *worker = nixl_tiers_row_files_new(shape, region, ROWS, 2, &error);
    must(worker != NULL, "worker");
    struct row rows[ROWS];
    for (uint32_t row = 0; row < ROWS; row++)
        rows[row] = row_of(row);
    order.rows = rows;
    order.count = ROWS;
    order.write = (uint32_t)round % 2;
    must(nixl_tiers_row_files_submit(worker, &order) == 0, "submit");
    for (uint32_t taken = 0; !taken;) {
        pthread_mutex_lock(&worker->lock);
        struct unit *unit = worker->units.queues[order.write].first;
        taken = unit ? unit->taken : ROWS;
        pthread_mutex_unlock(&worker->lock);
    }
    nixl_tiers_row_files_close(worker);
}

int main(int count, char **words) {
    must(count == 3, "driver FOLDER SEED");
    srand((unsigned)atoi(words[2]));
    struct shape shape = {.cell_payload = 70000, .cell_bytes = 73728, .cells = 2, .sub_blocks = 4};
    shape.seal_bytes = 80 + 112 + 8 + 16 * 2 + 16;
    shape.row_bytes = 2 * shape.cell_bytes; /* the seal is in the padding */
    size_t size = ROWS * shape.row_bytes;
    uint8_t *region = aligned_alloc(PAGE, size);
    must(region != NULL, "memory");
    for (size_t i = 0; i < size; i++)
        region[i] = (uint8_t)rand();
    int base = open(words[1], O_RDONLY | O_DIRECTORY), error;
    must(base >= 0, words[1]);
    struct order order = {.now = 5, .touch_before = 1LL << 40, .base = base, .uid = geteuid(), .prefix = "driver-"};
    struct worker *worker = nixl_tiers_row_files_new(&shape, region, ROWS, 8, &error);
    must(worker != NULL, "worker");
    must(nixl_tiers_row_files_new(&shape, region, ROWS, MAX_THREADS + 1, &error) == NULL && error == EINVAL, "threads");
    /* A row belongs to one unit at a time. */
    uint8_t busy[ROWS] = {0}, stored[ROWS] = {0}, owner[UNITS + 1][ROWS] = {{0}}, writes[UNITS + 1] = {0}, keeps[UNITS + 1] = {0};
    int begun = 0, running = 0;
    while (begun < UNITS || running) {
        if (begun < UNITS && running < RUNNING) {
            struct row rows[ROWS];
            uint32_t n = 0;
            order.id = (uint64_t)++begun;
            order.rows = rows;
            order.direct = (uint32_t)rand() % 2;
            order.write = writes[begun] = (uint8_t)(rand() % 2);
            order.keep = keeps[begun] = (uint8_t)(rand() % 2);
            for (uint32_t row = 0; row < ROWS; row++) {
                if (busy[row] || rand() % 4)
                    continue;
                busy[row] = 1;
                owner[begun][n] = (uint8_t)row;
                rows[n++] = row_of(row);
            }
            order.count = n;
            running += n > 0;
            must(nixl_tiers_row_files_submit(worker, &order) == (n ? 0 : EINVAL), "submit");
            if (running < RUNNING && rand() % 2)
                continue;
        }
        if (!running)
            continue;
        struct pollfd ended = {.fd = nixl_tiers_row_files_fd(worker), .events = POLLIN};
        must(poll(&ended, 1, 60000) == 1, "no unit has ended");
        struct result results[ROWS];
        uint64_t id;
        uint32_t n = nixl_tiers_row_files_take(worker, &id, results, ROWS);
        must(n > 0, "readable, and none has ended");
        running--;
        for (uint32_t i = 0; i < n; i++) {
            uint8_t row = owner[id][i];
            busy[row] = 0;
            int found = stored[row] && writes[id] && keeps[id];
            must(results[i].verdict == (found ? FOUND : writes[id] || stored[row] ? V_OK : ABSENT), "verdict");
            stored[row] |= writes[id];
        }
    }
    nixl_tiers_row_files_close(worker);
    for (int round = 0; round < 20; round++)
        close_early(&shape, region, order, round);
    close(base);
    free(region);
    puts("done");
}
