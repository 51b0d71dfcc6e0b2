/* A fake libcuda.so.1 and libcufile.so.0 in one library, whose device memory is host memory.

   FAKE_CUFILE in the environment says how it behaves:
     native   says nvidia-fs, moves the bytes, and its statistics count them as direct
     claims   says nvidia-fs, but counts everything as POSIX
     spin     cuFileDriverOpen never returns
     abort    registering memory aborts the process
     refuse   no file can be registered (5018)
     no_vmm   native, but memory of cuMemCreate cannot be registered (5013)
     wrong    one byte of a read is wrong
     short    reads of 1 MiB and more are short */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char UUID[17] = "fake-gpu-uuid-00";
static char *vmm;
static uint64_t direct[2], posix[2];

static bool behaves(const char *how) {
    const char *set = getenv("FAKE_CUFILE");
    return set && !strcmp(set, how);
}

/* --- the CUDA driver --- */

int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDriverGetVersion(int *out) { *out = 13000; return 0; }
int cuDeviceGetCount(int *out) { *out = 1; return 0; }
int cuDeviceGet(int *out, int ordinal) { *out = ordinal; return 0; }
int cuDeviceGetName(char *out, int n, int device) { (void)device; strncpy(out, "Fake H100", n); return 0; }
int cuDeviceGetPCIBusId(char *out, int n, int device) { (void)device; strncpy(out, "0000:1B:00.0", n); return 0; }
int cuDeviceGetAttribute(int *out, int which, int device) { (void)which; (void)device; *out = 1; return 0; }
int cuDeviceGetUuid(char *out, int device) { (void)device; memcpy(out, UUID, 16); return 0; }
int cuDevicePrimaryCtxRetain(void **out, int device) { (void)device; *out = &vmm; return 0; }
int cuCtxSetCurrent(void *context) { (void)context; return 0; }
int cuStreamSynchronize(void *stream) { return stream ? 1 : 0; }
int cuMemAlloc_v2(uint64_t *out, size_t n) { return posix_memalign((void **)out, 4096, n); }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t n) { memcpy((void *)to, from, n); return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t n) { memcpy(to, (void *)from, n); return 0; }

struct properties { int kind, handles, location, device; void *windows; unsigned char compression, rdma; };
int cuMemGetAllocationGranularity(size_t *out, const struct properties *wanted, int option) {
    (void)option;
    *out = 2 << 20;
    return wanted->kind == 1 && wanted->handles == 1 && wanted->location == 1 && wanted->rdma == 1 ? 0 : 1;
}
int cuMemAddressReserve(uint64_t *out, size_t n, size_t alignment, uint64_t address, uint64_t flags) {
    (void)alignment, (void)address, (void)flags;
    vmm = mmap(NULL, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *out = (uintptr_t)vmm;
    return 0;
}
int cuMemCreate(uint64_t *out, size_t n, const struct properties *wanted, uint64_t flags) {
    (void)n, (void)wanted, (void)flags;
    *out = 7;
    return 0;
}
int cuMemMap(uint64_t address, size_t n, size_t offset, uint64_t handle, uint64_t flags) {
    (void)address, (void)n, (void)offset, (void)flags;
    return handle == 7 ? 0 : 1;
}
int cuMemSetAccess(uint64_t address, size_t n, const int *access, size_t count) {
    return access[0] == 1 && access[2] == 3 && count == 1 ? mprotect((void *)address, n, PROT_READ | PROT_WRITE) : 1;
}

/* --- cuFile --- */

typedef struct { int code, cuda; } error;
static const error OK = {0, 0};
typedef struct { int kind; union { int fd; void *handle; }; void *operations; } descriptor;

error cuFileGetVersion(int *out) { *out = 1150; return OK; }
error cuFileDriverOpen(void) {
    for (volatile int i = 0; behaves("spin"); i++) {
    }
    return OK;
}
error cuFileDriverClose(void) { return OK; }
error cuFileDriverGetProperties(unsigned *out) {
    out[0] = 2, out[1] = 26; /* nvidia-fs 2.26 */
    out[6] = 1 << 4;         /* NVMe */
    out[8] = 15;
    return OK;
}
error cuFileGetParameterBool(int which, bool *out) {
    *out = which == 1;
    return OK;
}
error cuFileHandleRegister(void **out, const descriptor *file) {
    if (behaves("refuse"))
        return (error){5018, 0};
    *out = (void *)(intptr_t)(file->fd + 1);
    return OK;
}
void cuFileHandleDeregister(void *handle) { (void)handle; }
error cuFileBufRegister(const void *base, size_t n, int flags) {
    (void)n, (void)flags;
    if (behaves("abort"))
        abort();
    return behaves("no_vmm") && base == vmm ? (error){5013, 0} : OK;
}
error cuFileBufDeregister(const void *base) { (void)base; return OK; }

static void count(int direction) {
    (behaves("native") || behaves("no_vmm") ? direct : posix)[direction]++;
}
ssize_t cuFileRead(void *handle, char *base, size_t n, off_t at, off_t offset) {
    if (behaves("short") && n >= 1 << 20)
        n /= 2;
    ssize_t moved = pread((intptr_t)handle - 1, base + offset, n, at);
    if (behaves("wrong"))
        base[offset + n / 2] ^= 1;
    count(0);
    return moved;
}
ssize_t cuFileWrite(void *handle, const char *base, size_t n, off_t at, off_t offset) {
    count(1);
    return pwrite((intptr_t)handle - 1, base + offset, n, at);
}
error cuFileSetStatsLevel(int level) { return level == 3 ? OK : (error){5022, 0}; }
error cuFileStatsStart(void) { return OK; }
error cuFileGetStatsL3(uint64_t *out) {
    uint64_t *gpu = out + 64 + 64 + 1; /* as in 1.15: two levels of 64 words, then the number of GPUs */
    if (direct[0] + posix[0] == 0)
        return OK; /* a GPU appears with its first transfer */
    memcpy(gpu, UUID, 16);
    gpu[6] = direct[0] + posix[0], gpu[8] = direct[0], gpu[9] = posix[0];
    gpu[19] = direct[1] + posix[1], gpu[21] = direct[1], gpu[22] = posix[1];
    return OK;
}
