/* Threads that move rows between a host region and files of their own, which other machines may write, too, for a
 * mover's Python (tiers/rowfile/worker.py).
 *
 * A unit is a number of rows, all stored or all loaded. A thread takes one row at a time and does all of it, by calls
 * that may wait for a server. Every directory is opened in the one above it, and no link is followed. A row is written
 * to a file in `.incoming`, which gets the row's name once it is whole and closed: nothing ever opens a row's name to
 * write. Rows go through a private buffer of the thread: what a server still sends after the process was killed cannot
 * land in the region, and rows are hashed and copied in one pass.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "seal.h"

#define ROW_FILES_ABI 2
#define INCOMING ".incoming"
#define AGAIN(result, call) while (((result) = (call)) < 0 && errno == EINTR)

/* Verdicts beside those of seal.h: an error, which `error` names; no file; a file that no engine of this user has made;
 * one that is no whole row; one that was there before the store. */
enum { NOT_MOVED = -1, ABSENT = -2, FOREIGN = -3, CUT = -4, FOUND = -5 };
enum { MAX_THREADS = 16, MAX_SEAL = 0xFFFF, HUGE_PAGE = 2 << 20, PREFIX = 88, NAME = 256, GONE_AGAIN = 1 << 20 };

/* As `_ROW` of worker.py. */
struct row {
    uint64_t number; /* of its unfinished file, which others of this process do not have modulo 2^32 */
    uint32_t row;    /* of the region */
    uint32_t missing;
    uint8_t seal; /* whether to seal it before it is written */
    uint8_t fanout, key_bytes, key[KEY];
    uint8_t reserved[5];
};
_Static_assert(sizeof(struct row) == 136, "_ROW of worker.py is as large");

/* As `_RESULT` of worker.py. Of a file that was read: `inode`, and its time before the load. */
struct result {
    uint64_t sealed_at, inode;
    int64_t mtime_ns;
    int32_t verdict, error;
};

/* As `_Order` of worker.py. `now`: what seals say, or the server's time; Unix seconds all. */
struct order {
    uint64_t id, now;
    int64_t touch_before, expired; /* a good row that was last used before is touched, unless its age began by then */
    const struct row *rows;
    struct space space;
    int32_t base; /* the tier's directory */
    uint32_t uid, count, write, direct, keep; /* `keep`: a row that is there is not stored again */
    char prefix[PREFIX]; /* of names of unfinished files */
};

#include "units.h"

struct thread {
    struct worker *worker;
    pthread_t id;
    uint8_t *buffer; /* of one row, and page-aligned */
    struct scratch scratch;
};

struct worker {
    struct shape shape;
    uint8_t *region, *memory;
    uint64_t rows, memory_bytes;
    bool stopped, wrote; /* `wrote`: what was taken last */
    pthread_mutex_t lock; /* of units, `stopped` and `wrote` */
    pthread_cond_t queued;
    struct units units;
    uint32_t count;
    struct thread threads[MAX_THREADS];
};

/* --- directories and names ---------------------------------------------------------------------------------------- */

static void hex(char *to, const uint8_t *from, size_t nbytes, const char *end) {
    for (size_t i = 0; i < 2 * nbytes; i++)
        *to++ = "0123456789abcdef"[i % 2 ? from[i / 2] & 15 : from[i / 2] >> 4];
    strcpy(to, end);
}

/* A directory that only the tier's user can write to: its descriptor, or a negative errno. */
static int folder(int in, const char *name, uint32_t uid) {
    struct stat status;
    int fd, error = 0;
    AGAIN(fd, openat(in, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (fd < 0)
        return -errno;
    if (fstat(fd, &status))
        error = errno;
    else if (status.st_uid != uid || status.st_mode & (S_IWGRP | S_IWOTH))
        error = EPERM;
    if (!error)
        return fd;
    close(fd);
    return -error;
}

/* The same, made if it is missing; -GONE_AGAIN if another process has removed it since. */
static int made_folder(int in, const char *name, uint32_t uid) {
    int fd = folder(in, name, uid);
    if (fd != -ENOENT)
        return fd;
    if (mkdirat(in, name, 0700) && errno != EEXIST)
        return -errno;
    fd = folder(in, name, uid);
    return fd == -ENOENT ? -GONE_AGAIN : fd;
}

/* The row's fan-out directory. With `make` it is made if it is missing, and so is that of the namespace. */
static int fanout_folder(const struct order *order, const struct row *row, bool make) {
    char name[NAME];
    hex(name, order->space.name, sizeof order->space.name, "");
    int home = make ? made_folder(order->base, name, order->uid) : folder(order->base, name, order->uid);
    if (home < 0)
        return home;
    hex(name, &row->fanout, 1, "");
    int fd = make ? made_folder(home, name, order->uid) : folder(home, name, order->uid);
    close(home);
    return make && fd == -ENOENT ? -GONE_AGAIN : fd;
}

/* The row's file, to read: its descriptor, or a negative errno. By one call, where the kernel has it (Linux 5.6), no
 * sandbox forbids it, and nothing on the way is a link. It does not look at who owns the directories: the caller does
 * at the file. */
static int row_file(const struct order *order, const struct row *row, int flags) {
    enum { OPENAT2 = 437, BENEATH_NO_SYMLINKS = 0x08 | 0x04 };
    char path[2 * NAME], *name = path + 2 * sizeof order->space.name;
    int fd, fanout;
    flags |= O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    uint64_t how[3] = {(uint64_t)flags, 0, BENEATH_NO_SYMLINKS};
    hex(path, order->space.name, sizeof order->space.name, "/");
    hex(name + 1, &row->fanout, 1, "/");
    hex(name + 4, row->key, row->key_bytes, ".row");
    AGAIN(fd, (int)syscall(OPENAT2, order->base, path, how, sizeof how));
    if (fd >= 0 || (errno != ENOSYS && errno != EPERM && errno != ELOOP))
        return fd < 0 ? -errno : fd;
    if ((fanout = fanout_folder(order, row, false)) < 0)
        return fanout;
    AGAIN(fd, openat(fanout, name + 4, flags));
    fd = fd < 0 ? -errno : fd;
    close(fanout);
    return fd;
}

/* --- a store ------------------------------------------------------------------------------------------------------ */

/* Whether the row's name has a file as large as a row, which counts as used now: a load verifies it. */
static bool is_there(const struct shape *shape, const struct order *order, const struct row *row) {
    struct stat status;
    int fd = row_file(order, row, 0);
    if (fd < 0)
        return false;
    bool there = !fstat(fd, &status) && S_ISREG(status.st_mode) && status.st_uid == order->uid &&
                 (uint64_t)status.st_size == shape->row_bytes;
    if (there && status.st_mtim.tv_sec < order->touch_before)
        futimens(fd, NULL);
    close(fd);
    return there;
}

static int write_whole(int fd, const uint8_t *from, uint64_t nbytes) {
    for (uint64_t done = 0; done < nbytes;) {
        ssize_t got;
        AGAIN(got, pwrite(fd, from + done, nbytes - done, (off_t)done));
        if (got <= 0)
            return got ? errno : EIO;
        done += (uint64_t)got;
    }
    return 0;
}

/* Give the file the row's name. Whoever deletes the last row of a directory removes that too, at any moment before the
 * rename. There is no number of tries: each loss takes another row that was stored and deleted meanwhile. */
static int publish(const struct order *order, const struct row *row, int incoming, const char *temporary,
                   ino_t inode) {
    char name[NAME];
    struct stat status, own;
    hex(name, row->key, row->key_bytes, ".row");
    for (;;) {
        int fanout = fanout_folder(order, row, true);
        if (fanout == -GONE_AGAIN)
            continue;
        if (fanout < 0)
            return -fanout;
        int error = renameat(incoming, temporary, fanout, name) ? errno : 0;
        bool found = error == ENOENT && !fstatat(fanout, name, &status, AT_SYMLINK_NOFOLLOW);
        close(fanout);
        if (error == ENOENT && !fstatat(incoming, temporary, &own, AT_SYMLINK_NOFOLLOW))
            continue; /* it is a directory that was missing */
        return found && status.st_ino == inode ? 0 : error; /* NFS has sent the question again */
    }
}

/* Returns 0, or an errno. */
static int store_row(struct thread *thread, const struct order *order, const struct row *row) {
    const struct shape *shape = &thread->worker->shape;
    uint8_t *from = thread->worker->region + row->row * shape->row_bytes;
    int incoming, fd, flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | (order->direct ? O_DIRECT : 0);
    char temporary[NAME];
    struct stat status;
    if (row->seal)
        seal_row(shape, &order->space, from, thread->buffer, row->key, row->key_bytes, row->missing, order->now,
                 thread->scratch);
    else
        memcpy(thread->buffer, from, shape->row_bytes);
    while ((incoming = made_folder(order->base, INCOMING, order->uid)) == -GONE_AGAIN)
        ;
    if (incoming < 0)
        return -incoming;
    for (uint64_t tries = 0; tries < 8; tries++) {
        sprintf(temporary, "%s%llu.tmp", order->prefix, (unsigned long long)(row->number + (tries << 32)));
        AGAIN(fd, openat(incoming, temporary, flags, 0600));
        if (fd >= 0 || errno != EEXIST)
            break;
    }
    int error = fd < 0 ? errno : 0;
    if (!error) {
        error = write_whole(fd, thread->buffer, shape->row_bytes);
        if (!error && fstat(fd, &status))
            error = errno;
        if (close(fd) && !error) /* NFS reports here that there is no space */
            error = errno;
        if (!error)
            error = publish(order, row, incoming, temporary, status.st_ino);
    }
    if (error && error != EEXIST)
        unlinkat(incoming, temporary, 0);
    close(incoming);
    return error;
}

/* --- a load ------------------------------------------------------------------------------------------------------- */

static int failed(struct result *result, int error) {
    result->error = error;
    return NOT_MOVED;
}

/* Of a row whose directories or file cannot be opened or read. */
static int not_there(const struct order *order, struct result *result, int error) {
    struct stat status;
    bool stale = error == ESTALE && !fstat(order->base, &status);
    return error == ENOENT || stale ? ABSENT : failed(result, error);
}

/* Read and verify the file. Returns a verdict. */
static int read_row(struct thread *thread, const struct order *order, const struct row *row, int fd,
                    struct result *result) {
    const struct shape *shape = &thread->worker->shape;
    struct stat status;
    struct head head;
    if (fstat(fd, &status))
        return not_there(order, result, errno);
    if (!S_ISREG(status.st_mode) || status.st_uid != order->uid)
        return FOREIGN;
    result->inode = status.st_ino;
    result->mtime_ns = status.st_mtim.tv_sec * 1000000000LL + status.st_mtim.tv_nsec;
    if ((uint64_t)status.st_size != shape->row_bytes)
        return CUT;
    for (uint64_t done = 0; done < shape->row_bytes;) {
        ssize_t got;
        AGAIN(got, pread(fd, thread->buffer + done, shape->row_bytes - done, (off_t)done));
        if (got <= 0)
            return got ? not_there(order, result, errno) : CUT;
        done += (uint64_t)got;
    }
    memcpy(&head, thread->buffer + shape->row_bytes - shape->seal_bytes, sizeof head);
    result->sealed_at = head.sealed_at;
    int verdict = verify_row(shape, &order->space, thread->buffer, thread->worker->region + row->row * shape->row_bytes,
                             row->key, row->key_bytes, thread->scratch);
    int64_t sealed_s = (int64_t)head.sealed_at, used_s = status.st_mtim.tv_sec;
    if (verdict == V_OK && used_s < order->touch_before && head.sealed_at <= order->now &&
        (sealed_s < used_s ? sealed_s : used_s) > order->expired)
        futimens(fd, NULL);
    return verdict;
}

static int load_row(struct thread *thread, const struct order *order, const struct row *row, struct result *result) {
    for (int direct = order->direct ? O_DIRECT : 0;; direct = 0) {
        int fd = row_file(order, row, direct), verdict;
        *result = (struct result){0};
        if (fd >= 0) {
            verdict = read_row(thread, order, row, fd, result);
            close(fd);
        } else if (fd == -ELOOP || fd == -ENXIO || fd == -EISDIR) {
            verdict = FOREIGN;
        } else {
            verdict = not_there(order, result, -fd);
        }
        if (!direct || verdict != NOT_MOVED || (result->error != EINVAL && result->error != EOPNOTSUPP))
            return verdict;
    }
}

/* --- threads ------------------------------------------------------------------------------------------------------ */

static void move_row(struct thread *thread, struct unit *unit, uint32_t number) {
    const struct row *row = &unit->rows[number];
    struct result *result = &unit->results[number];
    if (!unit->order.write) {
        result->verdict = load_row(thread, &unit->order, row, result);
        return;
    }
    if (unit->order.keep && is_there(&thread->worker->shape, &unit->order, row)) {
        result->verdict = FOUND;
        return;
    }
    result->error = store_row(thread, &unit->order, row);
    result->verdict = result->error ? NOT_MOVED : V_OK;
}

static void *run(void *argument) {
    struct thread *thread = argument;
    struct worker *worker = thread->worker;
    pthread_mutex_lock(&worker->lock);
    while (!worker->stopped) {
        /* Reads and writes take turns where both wait. */
        bool write = worker->units.queues[!worker->wrote].first ? !worker->wrote : worker->wrote;
        struct unit *unit = worker->units.queues[write].first;
        if (!unit) {
            pthread_cond_wait(&worker->queued, &worker->lock);
            continue;
        }
        uint32_t number = unit->taken++;
        if (unit->taken == unit->order.count)
            pop(&worker->units.queues[write]);
        worker->wrote = write;
        pthread_mutex_unlock(&worker->lock);
        move_row(thread, unit, number);
        pthread_mutex_lock(&worker->lock);
        row_ended(&worker->units, unit);
    }
    pthread_mutex_unlock(&worker->lock);
    return NULL;
}

/* --- for Python --------------------------------------------------------------------------------------------------- */

/* Which build of this interface a loaded library is: a stale one must not be called. */
int nixl_tiers_row_files_abi(void) { return ROW_FILES_ABI; }

/* Let what runs end, then stop the threads. What no thread has taken is dropped. */
void nixl_tiers_row_files_close(struct worker *worker) {
    pthread_mutex_lock(&worker->lock);
    worker->stopped = true;
    drop_waiting(&worker->units);
    pthread_cond_broadcast(&worker->queued);
    pthread_mutex_unlock(&worker->lock);
    for (uint32_t i = 0; i < worker->count; i++)
        pthread_join(worker->threads[i].id, NULL);
    close_units(&worker->units);
    munmap(worker->memory, worker->memory_bytes);
    pthread_cond_destroy(&worker->queued);
    pthread_mutex_destroy(&worker->lock);
    free(worker);
}

/* Memory and descriptor, then so many threads. Returns 0, or an errno. */
static int start(struct worker *worker, uint32_t threads) {
    const struct shape *shape = &worker->shape;
    uint64_t digests = 8 * ((shape->cell_payload >> 10) + 1), each = shape->row_bytes + shape->seal_bytes + digests;
    each += -each % PAGE;
    if (shape->seal_bytes > MAX_SEAL || threads > MAX_THREADS)
        return EINVAL;
    worker->memory_bytes = threads * each + HUGE_PAGE;
    worker->memory = mmap(NULL, worker->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (worker->memory == MAP_FAILED)
        return errno;
    /* A core file must not hold prompts; a child needs none, and before Linux 5.19 might have got a page that a file
     * system writes to. A kernel without huge pages refuses the last advice. */
    for (int i = 0; i < 3; i++)
        madvise(worker->memory, worker->memory_bytes, (int[]){MADV_DONTDUMP, MADV_DONTFORK, MADV_HUGEPAGE}[i]);
    uint8_t *at = worker->memory + -(uintptr_t)worker->memory % HUGE_PAGE;
    int error = 0;
    sigset_t all, before; /* signals are for threads of Python */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; !error && worker->count < threads; at += each) {
        struct thread *thread = &worker->threads[worker->count];
        *thread = (struct thread){.worker = worker, .buffer = at};
        thread->scratch.digests = (uint64_t *)(at + shape->row_bytes);
        thread->scratch.seal = at + shape->row_bytes + digests;
        error = pthread_create(&thread->id, NULL, run, thread);
        worker->count += !error;
        if (!error)
            pthread_setname_np(thread->id, "row files");
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* A worker for `rows` rows at `region`, which outlives it. NULL, and why (`error`, an errno), if it cannot start. */
struct worker *nixl_tiers_row_files_new(const struct shape *shape, uint8_t *region, uint64_t rows, uint32_t threads,
                                        int32_t *error) {
    struct worker *worker = calloc(1, sizeof *worker);
    *error = ENOMEM;
    if (!worker)
        return NULL;
    *worker = (struct worker){.shape = *shape, .region = region, .rows = rows};
    pthread_mutex_init(&worker->lock, NULL);
    pthread_cond_init(&worker->queued, NULL);
    if (!(*error = open_units(&worker->units)) && !(*error = start(worker, threads)))
        return worker;
    nixl_tiers_row_files_close(worker);
    return NULL;
}

/* The descriptor that is readable when units have ended. */
int nixl_tiers_row_files_fd(const struct worker *worker) { return worker->units.ended_fd; }

/* Begin to move the rows of a unit, at least one. Returns 0, or an errno: EINVAL for rows outside the region. */
int nixl_tiers_row_files_submit(struct worker *worker, const struct order *order) {
    uint32_t count = order->count;
    for (uint32_t i = 0; i < count; i++) {
        const struct row *row = &order->rows[i];
        if (row->row >= worker->rows || !row->key_bytes || row->key_bytes > KEY)
            return EINVAL;
    }
    struct unit *unit = new_unit(order);
    if (!unit)
        return count ? ENOMEM : EINVAL;
    unit->order.prefix[PREFIX - 1] = 0;
    pthread_mutex_lock(&worker->lock);
    push(&worker->units.queues[!!order->write], unit);
    for (uint32_t i = 0; i < count && i < worker->count; i++)
        pthread_cond_signal(&worker->queued);
    pthread_mutex_unlock(&worker->lock);
    return 0;
}

/* Hand over a unit that has ended: its ID and the results of its rows, at most so many. Returns how many rows that are;
 * 0 if none has ended. The descriptor is readable as long as there is one. */
uint32_t nixl_tiers_row_files_take(struct worker *worker, uint64_t *id, struct result *results, uint32_t most) {
    pthread_mutex_lock(&worker->lock);
    uint32_t count = take_ended(&worker->units, id, results, most);
    pthread_mutex_unlock(&worker->lock);
    return count;
}
