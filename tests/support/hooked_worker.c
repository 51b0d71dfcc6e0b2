/* csrc/row_worker.c, whose writes a test sees and may refuse: `hook` is called before each, and returns an errno or 0. */
#include <errno.h>
#include <linux/aio_abi.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum { WRITE, FLUSH, ROW_WRITE, CUT };
typedef int hook_type(int what, int fd, const void *from, uint64_t nbytes, int64_t at);
static hook_type *hook;

void nixl_tiers_hook(hook_type *given) { hook = given; }

static int refused(int what, int fd, const void *from, uint64_t nbytes, int64_t at) {
    int error = hook ? hook(what, fd, from, nbytes, at) : 0;
    if (error)
        errno = error;
    return error;
}

static ssize_t hooked_pwrite(int fd, const void *from, size_t nbytes, off_t at) {
    return refused(WRITE, fd, from, nbytes, at) ? -1 : pwrite(fd, from, nbytes, at);
}

static int hooked_fdatasync(int fd) { return refused(FLUSH, fd, NULL, 0, 0) ? -1 : fdatasync(fd); }

static int hooked_ftruncate(int fd, off_t nbytes) {
    return refused(CUT, fd, NULL, 0, nbytes) ? -1 : ftruncate(fd, nbytes);
}

static long hooked_syscall(long number, ...) {
    long words[5];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 5; i++)
        words[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_io_submit && words[1] > 0) {
        struct iocb *block = *(struct iocb **)words[2];
        words[1] = 1; /* one by one */
        if (block->aio_lio_opcode == IOCB_CMD_PWRITE &&
            refused(ROW_WRITE, (int)block->aio_fildes, (void *)block->aio_buf, block->aio_nbytes, block->aio_offset))
            return -1;
    }
    return syscall(number, words[0], words[1], words[2], words[3], words[4]);
}

#define pwrite hooked_pwrite
#define fdatasync hooked_fdatasync
#define ftruncate hooked_ftruncate
#define syscall hooked_syscall
#include "row_worker.c"

/* What the worker's threads do before and after the rows of these slots. */
int nixl_tiers_test_forget(struct records *records, const uint32_t *slots, uint32_t n) {
    return put_records(records, slots, NULL, n);
}

int nixl_tiers_test_record(struct records *records, const struct content *rows, uint32_t n) {
    uint32_t slots[SPAN];
    struct record made[SPAN];
    for (uint32_t i = 0; i < n; i++) {
        slots[i] = rows[i].slot;
        make_record(&made[i], rows[i].key, rows[i].key_bytes, rows[i].tick, rows[i].sealed_at, rows[i].slot,
                    records->salt);
    }
    return put_records(records, slots, made, n);
}
