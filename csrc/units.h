/* Units of rows between a mover's Python and threads in C: queues of what is to be moved and of what has ended.
 *
 * Whoever includes this has defined `struct row`, `struct result` and `struct order` before, as its Python has them; an
 * order has `id`, `rows`, `count` and `write`. One lock is held around every call but `new_unit`.
 */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct unit {
    struct unit *next;
    struct order order;
    uint32_t taken, left; /* rows that a thread has begun, and that have not ended */
    struct result *results;
    uint32_t *pending; /* of each row, for its thread */
    struct row rows[];
};

struct queue {
    struct unit *first, **end;
};

struct units {
    struct queue queues[2], ended; /* of loads, of stores */
    int ended_fd;                  /* readable when something has ended */
};

static void signal_fd(int fd) {
    while (eventfd_write(fd, 1) && errno == EINTR)
        ;
}

static void push(struct queue *queue, struct unit *unit) {
    unit->next = NULL;
    *queue->end = unit;
    queue->end = &unit->next;
}

static struct unit *pop(struct queue *queue) {
    struct unit *unit = queue->first;
    queue->first = unit->next;
    if (!queue->first)
        queue->end = &queue->first;
    return unit;
}

/* Returns 0, or an errno. */
static int open_units(struct units *units) {
    for (int i = 0; i < 2; i++)
        units->queues[i] = (struct queue){.end = &units->queues[i].first};
    units->ended = (struct queue){.end = &units->ended.first};
    units->ended_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return units->ended_fd < 0 ? errno : 0;
}

/* A copy of the order and its rows. NULL: there is no memory, or no row. */
static struct unit *new_unit(const struct order *order) {
    size_t count = order->count, row_bytes = sizeof(struct row) + sizeof(struct result) + sizeof(uint32_t);
    struct unit *unit = count ? calloc(1, sizeof *unit + count * row_bytes) : NULL;
    if (!unit)
        return NULL;
    unit->order = *order;
    unit->left = order->count;
    memcpy(unit->rows, order->rows, count * sizeof *unit->rows);
    unit->results = (struct result *)(unit->rows + count);
    unit->pending = (uint32_t *)(unit->results + count);
    return unit;
}

/* One row of a unit has ended. */
static void row_ended(struct units *units, struct unit *unit) {
    if (--unit->left)
        return;
    push(&units->ended, unit);
    signal_fd(units->ended_fd);
}

/* A unit that has ended: its ID and the results of its rows, at most so many. Returns how many rows that are; 0 if none
 * has ended. */
static uint32_t take_ended(struct units *units, uint64_t *id, struct result *results, uint32_t most) {
    eventfd_t signals;
    struct unit *unit = units->ended.first ? pop(&units->ended) : NULL;
    if (!unit)
        return 0;
    while (!units->ended.first && eventfd_read(units->ended_fd, &signals) && errno == EINTR)
        ;
    uint32_t count = unit->order.count < most ? unit->order.count : most;
    *id = unit->order.id;
    memcpy(results, unit->results, count * sizeof *results);
    free(unit);
    return count;
}

/* Drop the rows that no thread has taken. A unit of which others still move ends with these. */
static void drop_waiting(struct units *units) {
    for (int i = 0; i < 2; i++)
        while (units->queues[i].first) {
            struct unit *unit = pop(&units->queues[i]);
            unit->left -= unit->order.count - unit->taken;
            if (!unit->left)
                free(unit);
        }
}

/* The threads have ended. */
static void close_units(struct units *units) {
    while (units->ended.first)
        free(pop(&units->ended));
    if (units->ended_fd >= 0)
        close(units->ended_fd);
}
