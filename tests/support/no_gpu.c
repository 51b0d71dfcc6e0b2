/* Preloaded into a process that runs NVIDIA's cuFile on a machine without a GPU: gives cuFile another view of two things
 * that a container or a sandbox may lack, and that must be there, or be missing, for a test. Nothing of cuFile itself is
 * replaced.
 *
 *   /proc/modules  read through NO_GPU_PROC_MODULES. cuFile 1.20 looks there for nvidia_fs, and spins for ever in
 *                  cuFileDriverOpen where the file does not exist: an empty one means no module, a missing one is a real
 *                  hang.
 *   /run/udev      read through NO_GPU_RUN_UDEV. cuFile registers no file of a block device whose udev record lacks
 *                  ID_FS_USAGE or ID_FS_TYPE: a folder with a record, or an empty one.
 *
 * cuFile reads both with C++ streams and through its own copy of libudev; both end in fopen or fopen64.
 *
 * Also removes what a killed process with the same pid has left: cuFile keeps its statistics in a System V segment whose
 * key is the pid, and counts nothing where one of another size is there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/shm.h>
#include <unistd.h>

static const char *redirect(const char *path, char *room) {
    static const struct {
        const char *from, *variable;
    } views[] = {{"/proc/modules", "NO_GPU_PROC_MODULES"}, {"/run/udev", "NO_GPU_RUN_UDEV"}};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) {
        size_t length = strlen(views[i].from);
        const char *to = getenv(views[i].variable);
        if (to && !strncmp(path, views[i].from, length) && (!path[length] || path[length] == '/')) {
            snprintf(room, PATH_MAX, "%s%s", to, path + length);
            return room;
        }
    }
    return path;
}

#define OPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        static __typeof__(name) *next; \
        char room[PATH_MAX]; \
        if (!next) \
            next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name); \
        return next(redirect(path, room), mode); \
    }

OPEN(fopen)
OPEN(fopen64)

__attribute__((constructor)) static void remove_statistics_of_the_dead(void) {
    int segment = shmget(getpid(), 0, 0);
    if (segment >= 0)
        shmctl(segment, IPC_RMID, NULL);
}
