/* Preloaded into a mover: injects faults into its disk I/O and its clock, as a control page specifies.
 *
 * Only files below FAULT_PATH are affected. The page is shared with the test, which may change it at any time.
 * Linux AIO, of NIXL and of the native worker, is intercepted where results are fetched: the I/O was done, but is
 * reported as failed, or late. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    volatile int64_t write_errno;  /* of writes, allocations and truncations */
    volatile int64_t read_errno;
    volatile int64_t change_errno; /* of opening for writing, creating, renaming and removing */
    volatile int64_t delay_us;     /* of each call, and between two results of asynchronous I/O */
    volatile int64_t clock_offset_s;
    volatile int64_t injected;
};

static struct control none;
static struct control *control = &none;
static const char *root;
static size_t root_length;

__attribute__((constructor)) static void begin(void) {
    const char *page = getenv("FAULT_CONTROL");
    root = getenv("FAULT_PATH");
    root_length = root ? strlen(root) : 0;
    if (!page)
        return;
    int fd = syscall(SYS_openat, AT_FDCWD, page, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    void *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (at != MAP_FAILED)
        control = at;
}

static int active(void) {
    return root && (control->write_errno || control->read_errno || control->change_errno || control->delay_us);
}

static int path_matches(const char *path) { return strncmp(path, root, root_length) == 0; }

static int fd_matches(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return path_matches(path);
}

/* 1 if the call has to fail with errno set. */
static int fails(int64_t error) {
    if (control->delay_us)
        usleep(control->delay_us);
    if (!error)
        return 0;
    __sync_fetch_and_add(&control->injected, 1);
    errno = error;
    return 1;
}

#define NEXT(name) \
    static __typeof__(name) *next; \
    if (!next) \
        next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int opening_fails(int matches, int flags) {
    int changes = (flags & (O_CREAT | O_TRUNC)) || (flags & O_ACCMODE) != O_RDONLY;
    return matches && fails(changes ? control->change_errno : 0);
}

#define MODE \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

#define OPEN(name, ...) \
    MODE \
    NEXT(name); \
    if (opening_fails(active() && path_matches(path), flags)) \
        return -1; \
    return next(__VA_ARGS__, flags, mode)

int open(const char *path, int flags, ...) { OPEN(open, path); }
int open64(const char *path, int flags, ...) { OPEN(open64, path); }

static int at_matches(int directory, const char *path) {
    return path[0] == '/' ? path_matches(path) : directory != AT_FDCWD && fd_matches(directory);
}

#define OPENAT(name) \
    MODE \
    NEXT(name); \
    if (opening_fails(active() && at_matches(directory, path), flags)) \
        return -1; \
    return next(directory, path, flags, mode)

int openat(int directory, const char *path, int flags, ...) { OPENAT(openat); }
int openat64(int directory, const char *path, int flags, ...) { OPENAT(openat64); }

#define ON_FD(result, name, parameters, error, ...) \
    result name parameters { \
        NEXT(name); \
        if (active() && fd_matches(fd) && fails(control->error)) \
            return -1; \
        return next(__VA_ARGS__); \
    }

ON_FD(ssize_t, write, (int fd, const void *from, size_t n), write_errno, fd, from, n)
ON_FD(ssize_t, pwrite, (int fd, const void *from, size_t n, off_t at), write_errno, fd, from, n, at)
ON_FD(ssize_t, pwrite64, (int fd, const void *from, size_t n, off64_t at), write_errno, fd, from, n, at)
ON_FD(ssize_t, pwritev, (int fd, const struct iovec *v, int n, off_t at), write_errno, fd, v, n, at)
ON_FD(ssize_t, pwritev64, (int fd, const struct iovec *v, int n, off64_t at), write_errno, fd, v, n, at)
ON_FD(int, fallocate, (int fd, int mode, off_t at, off_t n), write_errno, fd, mode, at, n)
ON_FD(int, fallocate64, (int fd, int mode, off64_t at, off64_t n), write_errno, fd, mode, at, n)
ON_FD(int, ftruncate, (int fd, off_t n), change_errno, fd, n)
ON_FD(int, ftruncate64, (int fd, off64_t n), change_errno, fd, n)
ON_FD(ssize_t, read, (int fd, void *to, size_t n), read_errno, fd, to, n)
ON_FD(ssize_t, pread, (int fd, void *to, size_t n, off_t at), read_errno, fd, to, n, at)
ON_FD(ssize_t, pread64, (int fd, void *to, size_t n, off64_t at), read_errno, fd, to, n, at)
ON_FD(ssize_t, preadv, (int fd, const struct iovec *v, int n, off_t at), read_errno, fd, v, n, at)
ON_FD(ssize_t, preadv64, (int fd, const struct iovec *v, int n, off64_t at), read_errno, fd, v, n, at)
ON_FD(int, fsync, (int fd), write_errno, fd)
ON_FD(int, fdatasync, (int fd), write_errno, fd)

#define ON_PATH(name, parameters, ...) \
    int name parameters { \
        NEXT(name); \
        if (active() && path_matches(path) && fails(control->change_errno)) \
            return -1; \
        return next(__VA_ARGS__); \
    }

ON_PATH(mkdir, (const char *path, mode_t mode), path, mode)
ON_PATH(unlink, (const char *path), path)
ON_PATH(rmdir, (const char *path), path)
ON_PATH(truncate, (const char *path, off_t n), path, n)
ON_PATH(truncate64, (const char *path, off64_t n), path, n)
ON_PATH(rename, (const char *path, const char *to), path, to)

int renameat(int directory, const char *path, int other, const char *to) {
    NEXT(renameat);
    if (active() && at_matches(directory, path) && fails(control->change_errno))
        return -1;
    return next(directory, path, other, to);
}

int unlinkat(int directory, const char *path, int flags) {
    NEXT(unlinkat);
    if (active() && at_matches(directory, path) && fails(control->change_errno))
        return -1;
    return next(directory, path, flags);
}

/* The part of libaio's ABI that is needed here. */
struct io_event {
    void *data;
    struct request {
        void *data;
        uint32_t key, flags;
        int16_t opcode, priority;
        int32_t fd;
    } *request;
    int64_t result, result2;
};

/* `syscall` without the library's function of that name, which is defined below. */
static long call(long number, long a, long b, long c, long d, long e, long f) {
    static long (*next)(long, ...);
    if (!next)
        next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return next(number, a, b, c, d, e, f);
}

static void fail_events(struct io_event *events, long count) {
    for (long i = 0; i < count; i++) {
        int64_t error = events[i].request->opcode == 1 ? control->write_errno : control->read_errno;
        if (error && fd_matches(events[i].request->fd)) {
            __sync_fetch_and_add(&control->injected, 1);
            events[i].result = -error;
        }
    }
}

/* The native worker's, whose threads may wait. A hang is one of a call: no thread of the loop is stuck. */
long syscall(long number, ...) {
    long v[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        v[i] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_io_getevents && control->delay_us) {
        v[2] = 1;
        usleep(control->delay_us);
    }
    long count = call(number, v[0], v[1], v[2], v[3], v[4], v[5]);
    if (number == SYS_io_getevents && count > 0)
        fail_events((struct io_event *)v[3], count);
    return count;
}

int io_getevents(void *context, long least, long most, struct io_event *events, struct timespec *timeout);
int io_getevents(void *context, long least, long most, struct io_event *events, struct timespec *timeout) {
    static volatile int64_t not_before_us;
    if (control->delay_us) {
        struct timespec now;
        syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
        int64_t now_us = now.tv_sec * 1000000LL + now.tv_nsec / 1000;
        if (now_us < not_before_us)
            return 0;
        not_before_us = now_us + control->delay_us;
        most = 1;
        least = 0;
    }
    /* Not by dlsym: NIXL loads a private copy of libaio, which RTLD_NEXT does not find. */
    int count = call(SYS_io_getevents, (long)context, least, most, (long)events, (long)timeout, 0);
    if (count < 0)
        return -errno;
    fail_events(events, count);
    return count;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    NEXT(clock_gettime);
    int result = next(clock, at);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) && control->clock_offset_s) {
        control->injected++;
        at->tv_sec += control->clock_offset_s;
    }
    return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    NEXT(gettimeofday);
    int result = next(at, zone);
    if (result == 0)
        at->tv_sec += control->clock_offset_s;
    return result;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}
