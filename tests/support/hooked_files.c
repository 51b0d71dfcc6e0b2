/* csrc/row_files.c, whose calls a test sees and may have fail: `hook` is called before each, with its flags and the name
 * that it is given. It returns 0; an errno, for a call that fails and does nothing; a negative errno, for one that does
 * what it is to do and then fails; or DONE, for one that the hook has made. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum { DONE = -100000 };
typedef int hook_type(const char *call, int fd, const char *name, int flags);
static hook_type *hook;

void nixl_tiers_hook(hook_type *given) { hook = given; }

#define HOOKED(call, fd, name, flags, real)                                                                            \
    do {                                                                                                               \
        int said = hook ? hook(call, fd, name, flags) : 0;                                                             \
        if (said > 0)                                                                                                  \
            errno = said;                                                                                              \
        if (said > 0 || said == DONE)                                                                                  \
            return said == DONE ? 0 : -1;                                                                              \
        long result = real;                                                                                            \
        if (said < 0)                                                                                                  \
            errno = -said;                                                                                             \
        return said < 0 ? -1 : result;                                                                                 \
    } while (0)

static int hooked_openat(int fd, const char *name, int flags, ...) {
    va_list list;
    va_start(list, flags);
    unsigned mode = flags & O_CREAT ? va_arg(list, unsigned) : 0;
    va_end(list);
    HOOKED("openat", fd, name, flags, openat(fd, name, flags, mode));
}

/* As `openat` of the file, too, if the kernel has openat2. */
static long hooked_syscall(long number, int fd, const char *name, uint64_t *how, size_t nbytes) {
    const char *file = strrchr(name, '/') + 1;
    int said = hook ? hook("openat2", fd, file, (int)how[0]) : 0;
    if (said) {
        errno = said;
        return -1;
    }
    HOOKED("openat", fd, file, (int)how[0], syscall(number, fd, name, how, nbytes));
}

static int hooked_mkdirat(int fd, const char *name, mode_t mode) { HOOKED("mkdirat", fd, name, 0, mkdirat(fd, name, mode)); }

static int hooked_renameat(int fd, const char *name, int to, const char *new) {
    HOOKED("renameat", fd, new, 0, renameat(fd, name, to, new));
}

static int hooked_unlinkat(int fd, const char *name, int flags) {
    HOOKED("unlinkat", fd, name, flags, unlinkat(fd, name, flags));
}

static int hooked_fstat(int fd, struct stat *status) { HOOKED("fstat", fd, "", 0, fstat(fd, status)); }

static int hooked_futimens(int fd, const struct timespec *times) { HOOKED("futimens", fd, "", 0, futimens(fd, times)); }

static int hooked_close(int fd) { HOOKED("close", fd, "", 0, close(fd)); }

static ssize_t hooked_pread(int fd, void *to, size_t nbytes, off_t at) {
    HOOKED("pread", fd, "", 0, pread(fd, to, nbytes, at));
}

static ssize_t hooked_pwrite(int fd, const void *from, size_t nbytes, off_t at) {
    HOOKED("pwrite", fd, "", 0, pwrite(fd, from, nbytes, at));
}

#define openat hooked_openat
#define syscall hooked_syscall
#define mkdirat hooked_mkdirat
#define renameat hooked_renameat
#define unlinkat hooked_unlinkat
#define fstat hooked_fstat
#define futimens hooked_futimens
#define close hooked_close
#define pread hooked_pread
#define pwrite hooked_pwrite
#include "row_files.c"
