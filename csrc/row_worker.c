/* Threads that move rows between a host region and files, for a mover's Python (tiers/slab/worker.py).
 *
 * A unit is a number of rows, all read or all written. Threads take rows of units, a few megabytes at a time, and move
 * them by Linux AIO in contexts of their own: rows are sealed before they are written and verified after they were
 * read, or are hashed and copied in one pass where they are staged. A row that is written gets its record from the same
 * thread (records.h), before and after. Each row has a verdict of its own. One eventfd says that units have ended.
 *
 * Linux AIO and not io_uring: a killed process's memory goes only after what its AIO contexts have in flight has ended,
 * which is what counts as its end here (memory/address_space.py). An io_uring goes on reading after that.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "row_worker.h"

static uint8_t *region_row(const struct worker *worker, const struct row *row) {
    return worker->region + row->row * worker->shape.row_bytes;
}

/* Where the medium reads or writes a row. */
static uint8_t *moved_row(const struct worker *worker, const struct unit *unit, const struct row *row) {
    return unit->order.stage ? unit->order.stage + row->place * worker->shape.row_bytes : region_row(worker, row);
}

/* --- the end of a row --------------------------------------------------------------------------------------------- */

static uint64_t sealed_at(const struct worker *worker, const uint8_t *row) {
    return read64(row + worker->shape.row_bytes - worker->shape.seal_bytes + offsetof(struct head, sealed_at));
}

static void report_row(struct worker *worker, struct unit *unit) {
    pthread_mutex_lock(&worker->lock);
    row_ended(&worker->units, unit);
    pthread_mutex_unlock(&worker->lock);
}

/* The records of rows that are there now, in order of their slots; then the rows have ended. */
static void record_rows(struct thread *thread) {
    uint32_t slots[DEPTH], count = thread->written_count;
    struct record made[DEPTH];
    struct records *records = count ? thread->written[0].unit->order.records : NULL;
    for (uint32_t i = 0; i < count; i++) {
        const struct moved *each = &thread->written[i];
        const struct row *row = &each->unit->rows[each->row];
        slots[i] = row->slot;
        uint64_t at = each->unit->results[each->row].sealed_at;
        make_record(&made[i], row->key, row->key_bytes, row->tick, at ? at : 1, row->slot, records->salt);
    }
    int error = count ? put_records(records, slots, made, count) : 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct moved *each = &thread->written[i];
        each->unit->results[each->row].error = abs(error);
        report_row(thread->worker, each->unit);
    }
    thread->written_count = 0;
}

static void record_later(struct thread *thread, struct unit *unit, uint32_t number) {
    struct moved *written = thread->written;
    if (thread->written_count && written[0].unit->order.records != unit->order.records)
        record_rows(thread);
    uint32_t place = thread->written_count++;
    for (; place && written[place - 1].unit->rows[written[place - 1].row].slot > unit->rows[number].slot; place--)
        written[place] = written[place - 1];
    written[place] = (struct moved){unit, number};
}

static void end_row(struct thread *thread, struct unit *unit, uint32_t number) {
    struct worker *worker = thread->worker;
    const struct row *row = &unit->rows[number];
    struct result *result = &unit->results[number];
    uint8_t *moved = moved_row(worker, unit, row);
    if (result->error) {
        result->verdict = NOT_MOVED;
    } else if (!unit->order.write) {
        result->verdict = verify_row(&worker->shape, &unit->order.space, moved,
                                     unit->order.stage ? region_row(worker, row) : NULL, row->key, row->key_bytes,
                                     thread->scratch);
        result->sealed_at = sealed_at(worker, moved);
    } else if (unit->order.records) {
        record_later(thread, unit, number);
        return;
    }
    report_row(worker, unit);
}

static void end_request(struct thread *thread, struct request *request, int64_t moved) {
    struct unit *unit = request->unit;
    uint32_t number = request->row;
    if (moved != (int64_t)request->block.aio_nbytes) /* a read is short where the file ends */
        unit->results[number].error = moved < 0 ? (int32_t)-moved : ENODATA;
    request->next = thread->unused;
    thread->unused = request;
    thread->idle++;
    if (!--unit->pending[number])
        end_row(thread, unit, number);
}

/* End what has; returns how many requests that were. */
static long end_some(struct thread *thread) {
    struct io_event events[DEPTH];
    struct timespec none = {0, 0};
    long count = 0;
    if (thread->idle < DEPTH)
        do
            count = syscall(SYS_io_getevents, thread->context, 0, thread->worker->batch, events, &none);
        while (count < 0 && errno == EINTR);
    for (long i = 0; i < count; i++)
        end_request(thread, (struct request *)(uintptr_t)events[i].data, events[i].res);
    record_rows(thread);
    return count;
}

/* --- the beginning of a row --------------------------------------------------------------------------------------- */

/* Some rows of one unit: its first number, and how many. Reads and writes take turns where both wait. */
static struct unit *take(struct thread *thread, uint32_t *first, uint32_t *count) {
    struct worker *worker = thread->worker;
    uint64_t rows = TAKE_BYTES / worker->shape.row_bytes, room = thread->idle / worker->requests;
    rows = rows < 1 ? 1 : rows;
    rows = rows < room ? rows : room;
    struct unit *unit = NULL;
    pthread_mutex_lock(&worker->lock);
    bool write = worker->units.queues[!thread->wrote].first ? !thread->wrote : thread->wrote;
    struct queue *queue = &worker->units.queues[write];
    if (rows && queue->first) {
        unit = queue->first;
        *first = unit->taken;
        *count = unit->order.count - unit->taken < rows ? unit->order.count - unit->taken : (uint32_t)rows;
        unit->taken += *count;
        if (unit->taken == unit->order.count)
            pop(queue);
        thread->wrote = write;
    }
    thread->asleep = !queue->first && !unit;
    pthread_mutex_unlock(&worker->lock);
    return unit;
}

/* Seal a row that is to be written, or copy it to its place in the buffer. */
static void prepare(struct thread *thread, struct unit *unit, uint32_t number) {
    struct worker *worker = thread->worker;
    const struct row *row = &unit->rows[number];
    uint8_t *from = region_row(worker, row), *to = unit->order.stage ? moved_row(worker, unit, row) : NULL;
    if (row->seal)
        seal_row(&worker->shape, &unit->order.space, from, to, row->key, row->key_bytes, row->missing, unit->order.now,
                 thread->scratch);
    else if (to)
        memcpy(to, from, worker->shape.row_bytes);
    unit->results[number].sealed_at = sealed_at(worker, to ? to : from);
}

static struct request *unused_request(struct thread *thread) {
    struct request *request = thread->unused;
    thread->unused = request->next;
    thread->idle--;
    return request;
}

static void submit(struct thread *thread, struct iocb **blocks, long count) {
    for (long done = 0; done < count;) {
        long got = syscall(SYS_io_submit, thread->context, count - done, blocks + done);
        if (got > 0)
            done += got;
        else if (got == 0 || errno != EINTR) /* the first of them is refused */
            end_request(thread, (struct request *)(uintptr_t)blocks[done++]->aio_data, got ? -errno : -EAGAIN);
    }
}

/* The records of rows that are about to be written over: negative if they must not be, as by `put_records`. */
static int forget_rows(const struct unit *unit, uint32_t first, uint32_t count) {
    uint32_t slots[DEPTH];
    for (uint32_t i = 0; i < count; i++)
        slots[i] = unit->rows[first + i].slot;
    return unit->order.write && unit->order.records ? put_records(unit->order.records, slots, NULL, count) : 0;
}

/* Whether anything was there to begin with. */
static bool begin_some(struct thread *thread) {
    struct worker *worker = thread->worker;
    struct iocb *blocks[DEPTH];
    uint32_t first = 0, count = 0;
    long ready = 0;
    struct unit *unit = take(thread, &first, &count);
    if (!unit)
        return false;
    int denied = forget_rows(unit, first, count);
    for (uint32_t number = first; number < first + count; number++) {
        const struct row *row = &unit->rows[number];
        if (denied < 0) {
            unit->results[number].error = -denied;
            end_row(thread, unit, number);
            continue;
        }
        if (unit->order.write)
            prepare(thread, unit, number);
        unit->pending[number] = worker->requests;
        uint8_t *memory = moved_row(worker, unit, row);
        for (uint64_t at = 0; at < worker->shape.row_bytes; at += worker->request_bytes) {
            uint64_t left = worker->shape.row_bytes - at;
            struct request *request = unused_request(thread);
            request->unit = unit;
            request->row = number;
            request->block = (struct iocb){
                .aio_data = (uintptr_t)request,
                .aio_lio_opcode = unit->order.write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD,
                .aio_fildes = (uint32_t)row->fd,
                .aio_buf = (uintptr_t)memory + at,
                .aio_nbytes = left < worker->request_bytes ? left : worker->request_bytes,
                .aio_offset = (int64_t)(row->offset + at),
                .aio_flags = IOCB_FLAG_RESFD,
                .aio_resfd = (uint32_t)thread->kick,
            };
            blocks[ready++] = &request->block;
        }
    }
    submit(thread, blocks, ready);
    return true;
}

static void *run(void *argument) {
    struct thread *thread = argument;
    struct worker *worker = thread->worker;
    for (;;) {
        bool began = begin_some(thread);
        if (end_some(thread) > 0 || began)
            continue;
        pthread_mutex_lock(&worker->lock);
        bool stopped = worker->stopped;
        pthread_mutex_unlock(&worker->lock);
        if (stopped && thread->idle == DEPTH)
            return NULL;
        uint64_t kicks;
        while (read(thread->kick, &kicks, sizeof kicks) < 0 && errno == EINTR)
            ;
    }
}

/* --- for Python --------------------------------------------------------------------------------------------------- */

/* Which build of this interface a loaded library is: a stale one must not be called. */
int nixl_tiers_row_worker_abi(void) { return ROW_WORKER_ABI; }

/* Let what runs end, then stop the threads. What no thread has taken is dropped. */
void nixl_tiers_row_worker_close(struct worker *worker) {
    pthread_mutex_lock(&worker->lock);
    worker->stopped = true;
    drop_waiting(&worker->units);
    pthread_mutex_unlock(&worker->lock);
    for (uint32_t i = 0; i < worker->count; i++)
        signal_fd(worker->threads[i].kick);
    for (uint32_t i = 0; i < worker->count; i++) {
        struct thread *thread = &worker->threads[i];
        pthread_join(thread->id, NULL);
        syscall(SYS_io_destroy, thread->context);
        close(thread->kick);
        free(thread->scratch.seal);
        free(thread->scratch.digests);
    }
    close_units(&worker->units);
    pthread_mutex_destroy(&worker->lock);
    free(worker);
}

static int start(struct worker *worker, struct thread *thread) {
    int error = 0;
    thread->worker = worker;
    thread->scratch.seal = malloc(worker->shape.seal_bytes);
    thread->scratch.digests = malloc(8 * ((worker->shape.cell_payload >> 10) + 1));
    thread->kick = eventfd(0, EFD_CLOEXEC);
    for (int i = 0; i < DEPTH; i++) {
        thread->requests[i].next = thread->unused;
        thread->unused = &thread->requests[i];
    }
    thread->idle = DEPTH;
    if (!thread->scratch.seal || !thread->scratch.digests)
        error = ENOMEM;
    else if (thread->kick < 0 || syscall(SYS_io_setup, DEPTH, &thread->context) < 0)
        error = errno;
    /* Signals are for threads of Python. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (!error)
        error = pthread_create(&thread->id, NULL, run, thread);
    if (!error)
        pthread_setname_np(thread->id, "rows");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        if (thread->context)
            syscall(SYS_io_destroy, thread->context);
        if (thread->kick >= 0)
            close(thread->kick);
        free(thread->scratch.seal);
        free(thread->scratch.digests);
    }
    return error;
}

/* A worker for `rows` rows at `region`, which outlives it; a row is moved by requests of `request_bytes`, or larger ones
 * where these were too many. NULL, and why (`error`, an errno), if it cannot start. */
struct worker *nixl_tiers_row_worker_new(const struct shape *shape, uint8_t *region, uint64_t rows,
                                         uint64_t request_bytes, uint32_t threads, int32_t *error) {
    struct worker *worker = calloc(1, sizeof *worker);
    *error = ENOMEM;
    if (!worker)
        return NULL;
    worker->shape = *shape;
    worker->region = region;
    worker->rows = rows;
    worker->request_bytes = request_bytes;
    while (shape->row_bytes > worker->request_bytes * (DEPTH / 2))
        worker->request_bytes *= 2;
    worker->requests = (uint32_t)((shape->row_bytes + worker->request_bytes - 1) / worker->request_bytes);
    worker->batch = shape->row_bytes < TAKE_BYTES / DEPTH ? DEPTH : (uint32_t)(TAKE_BYTES / shape->row_bytes);
    worker->batch = worker->batch ? worker->batch : 1;
    pthread_mutex_init(&worker->lock, NULL);
    *error = open_units(&worker->units);
    if (shape->seal_bytes > MAX_SEAL || threads > MAX_THREADS)
        *error = EINVAL;
    while (!*error && worker->count < threads)
        if (!(*error = start(worker, &worker->threads[worker->count])))
            worker->count++;
    if (!*error)
        return worker;
    nixl_tiers_row_worker_close(worker);
    return NULL;
}

/* The descriptor that is readable when units have ended. */
int nixl_tiers_row_worker_fd(const struct worker *worker) { return worker->units.ended_fd; }

/* Begin to move the rows of a unit, at least one. Returns 0, or an errno: EINVAL for rows outside region or buffer. */
int nixl_tiers_row_worker_submit(struct worker *worker, const struct order *order) {
    uint32_t count = order->count;
    for (uint32_t i = 0; i < count; i++) {
        const struct row *row = &order->rows[i];
        if (row->row >= worker->rows || (order->stage && row->place >= order->places) || !row->key_bytes ||
            row->key_bytes > KEY)
            return EINVAL;
    }
    struct unit *unit = new_unit(order);
    if (!unit)
        return count ? ENOMEM : EINVAL;
    uint64_t nbytes = count * worker->shape.row_bytes;
    pthread_mutex_lock(&worker->lock);
    push(&worker->units.queues[!!order->write], unit);
    for (uint32_t i = 0; i < worker->count; i++) {
        struct thread *thread = &worker->threads[i];
        if (!thread->asleep)
            continue;
        thread->asleep = false;
        signal_fd(thread->kick);
        if (nbytes <= TAKE_BYTES)
            break; /* one thread would find nothing */
        nbytes -= TAKE_BYTES;
    }
    pthread_mutex_unlock(&worker->lock);
    return 0;
}

/* Hand over a unit that has ended: its ID and the results of its rows, at most so many. Returns how many rows that are;
 * 0 if none has ended. The descriptor is readable as long as there is one. */
uint32_t nixl_tiers_row_worker_take(struct worker *worker, uint64_t *id, struct result *results, uint32_t most) {
    pthread_mutex_lock(&worker->lock);
    uint32_t count = take_ended(&worker->units, id, results, most);
    pthread_mutex_unlock(&worker->lock);
    return count;
}
