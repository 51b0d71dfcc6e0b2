/* A CUDA driver without a GPU, on host memory: the calls that nixl_tiers.swap.driver makes, those that NVIDIA's cuFile
 * makes in its compatibility mode (as libcuda.so.1, beside fake_cudart.c), and memory that processes share.
 *
 * Streams are queues whose work is done as late as CUDA allows, and in any order that CUDA allows: only when a caller
 * waits or (sometimes) asks, a random stream that may go on does one thing, copies of a batch in random order. Kernels
 * are the real ones, compiled for a CPU. What a real driver would answer with an error is an error here, and what it
 * would let pass and no caller should do is counted as a violation. Freed memory is poisoned and never used again.
 */
#define SWAP_HOST_DEVICE "host_device.h"
#include "../../csrc/swap.cu"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>

extern "C" void fake_reset(unsigned seed, int version);

namespace {

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, DEINITIALIZED = 4, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500,
       NOT_READY = 600, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, LAUNCH_FAILED = 719 };

struct event {
    uint64_t recorded = 0, happened = 0; /* generations */
    double time_ms = 0;
    bool timed = false, alive = true;
};

struct op {
    event *waits_for = nullptr; /* with `generation`: may not run before */
    uint64_t generation = 0;
    std::function<void()> run;
    size_t weight = 1;
    bool moves = true; /* bytes: neither a record of an event nor a wait for one */
};

struct stream {
    std::deque<op> ops;
    bool alive = true, held = false;
};

struct kernel {
    const char *name;
    std::function<void(const void *, unsigned, unsigned)> run;
    size_t parameter_bytes;
};

struct failure {
    int after, code;
};

struct machine {
    std::mt19937 rng;
    int version = 13000;
    std::map<uint64_t, size_t> device, registered;
    std::map<void *, uint64_t> unused;
    std::map<uint64_t, int> shared; /* handles of cuMemCreate and of imports -> memfd */
    std::map<uint64_t, size_t> reserved, mapped;
    std::vector<stream *> streams;
    std::vector<event *> events;
    std::map<std::string, failure> failures;
    std::map<std::string, int> calls;
    int sticky = OK, contexts = 0, violations = 0;
    long fail_at_op = -1, ops_done = 0;
    size_t queue_limit = SIZE_MAX, deepest = 0;
    double clock_ms = 0;
    std::set<void *> modules;
    std::string why;
};

machine *now;
std::recursive_mutex guard;
thread_local int depth = 0;
std::vector<kernel> kernels;

void violation(const char *why) {
    now->violations++;
    now->why = why;
}

stream *legacy() { return now->streams[0]; }
stream *stream_of(void *handle) { return handle ? (stream *)handle : legacy(); }

bool within(const std::map<uint64_t, size_t> &ranges, uint64_t address, size_t n) {
    auto next = ranges.upper_bound(address);
    if (next == ranges.begin())
        return false;
    --next;
    return address + n <= next->first + next->second;
}
bool touches(const std::map<uint64_t, size_t> &ranges, uint64_t address, size_t n) {
    for (auto &[start, size] : ranges)
        if (address < start + size && start < address + n)
            return true;
    return false;
}
bool known(uint64_t address, size_t n) { return within(now->device, address, n) || within(now->registered, address, n); }

bool may_run(const op &o) { return !o.waits_for || o.waits_for->happened >= o.generation; }

/* One thing on one stream that may go on; false if there is none. */
bool step() {
    std::vector<stream *> ready;
    for (stream *s : now->streams)
        if (!s->held && !s->ops.empty() && may_run(s->ops.front()))
            ready.push_back(s);
    if (ready.empty())
        return false;
    stream *s = ready[now->rng() % ready.size()];
    op o = std::move(s->ops.front());
    s->ops.pop_front();
    if (now->fail_at_op >= 0 && now->ops_done++ >= now->fail_at_op)
        now->sticky = LAUNCH_FAILED;
    if (o.run && now->sticky == OK)
        o.run();
    return true;
}

bool any_held() {
    return std::any_of(now->streams.begin(), now->streams.end(), [](stream *s) { return s->held; });
}

/* The caller holds the guard once. */
int until(const std::function<bool()> &done) {
    while (!done() && now->sticky == OK)
        if (!step()) {
            if (!any_held()) {
                violation("waits for what can never happen");
                return INVALID_VALUE;
            }
            if (syscall(SYS_gettid) == getpid()) {
                violation("the main thread waits for a stream that is held");
                return INVALID_VALUE;
            }
            guard.unlock();
            usleep(1000);
            guard.lock();
        }
    return now->sticky;
}

void sometimes() {
    for (int n = now->rng() % 8; n > 5; n--)
        step();
}

int enter(const char *name, bool needs_context = true) {
    if (!now) /* loaded by others, as libcuda.so.1 */
        fake_reset(0, 13000);
    now->calls[name]++;
    auto f = now->failures.find(name);
    if (f != now->failures.end() && f->second.after-- == 0) {
        int code = f->second.code;
        now->failures.erase(f);
        return code;
    }
    if (now->sticky != OK)
        return now->sticky;
    if (needs_context && !depth)
        return INVALID_CONTEXT;
    sometimes();
    return OK;
}

#define ENTER(context)                                                                                                   \
    std::lock_guard<std::recursive_mutex> hold(guard);                                                                 \
    if (int code = enter(__func__, context))                                                                           \
        return code;

enum { DEVICE = 40 }; /* a handle is not an ordinal */

#define DEVICE_CALL                                                                                                      \
    ENTER(false)                                                                                                       \
    if (d != DEVICE)                                                                                                   \
        return 101;

void move_bytes(uint64_t to, uint64_t from, size_t n) {
    if (touches(now->device, to, n) != within(now->device, to, n) ||
        touches(now->device, from, n) != within(now->device, from, n))
        violation("a copy leaves its memory");
    std::memcpy((void *)to, (const void *)from, n);
    now->clock_ms += 1e-3 + (double)n / 50e6;
}

/* A real driver blocks its caller when too much is pending on a stream; `weight`: copies of a batch. */
void push(stream *s, std::function<void()> run, size_t weight = 1) {
    size_t pending = weight;
    for (op &o : s->ops)
        pending += o.weight;
    now->deepest = std::max(now->deepest, pending);
    if (pending > now->queue_limit)
        until([&] { return s->ops.empty(); });
    s->ops.push_back({nullptr, 0, std::move(run), weight, true});
}

template <int N>
void add_kernel(const char *name, void (*body)(const swap_launch<N>)) {
    kernels.push_back({name,
                       [body](const void *p, unsigned blocks, unsigned threads) {
                           run_grid(body, *(const swap_launch<N> *)p, blocks, threads, now->rng());
                       },
                       sizeof(swap_launch<N>)});
}

} // namespace

extern "C" {

/* ---- for tests ---- */

void fake_reset(unsigned seed, int version) {
    std::lock_guard<std::recursive_mutex> hold(guard);
    kernels.clear();
    add_kernel<480>("nixl_tiers_stage_480", nixl_tiers_stage_480);
    add_kernel<3968>("nixl_tiers_stage_3968", nixl_tiers_stage_3968);
    now = new machine; /* the one before stays: its handles may still be in use */
    now->rng.seed(seed);
    now->version = version;
    now->streams.push_back(new stream);
}
void fake_device_memory(void *address, size_t n) { now->device[(uint64_t)address] = n; }
void fake_fail(const char *name, int after, int code) { now->failures[name] = {after, code}; }
void fake_fail_running(long after) { now->fail_at_op = now->ops_done + after; }
void fake_leave(void) { now->sticky = DEINITIALIZED; }
int fake_calls(const char *name) { return now->calls[name]; }
int fake_violations(void) { return now->violations; }
const char *fake_why(void) { return now->why.c_str(); }
int fake_depth(void) { return depth; }
long fake_live(const char *what) {
    std::string kind = what;
    if (kind == "streams")
        return std::count_if(now->streams.begin(), now->streams.end(), [](stream *s) { return s->alive; }) - 1;
    if (kind == "events")
        return std::count_if(now->events.begin(), now->events.end(), [](event *e) { return e->alive; });
    if (kind == "registrations")
        return (long)now->registered.size();
    if (kind == "contexts")
        return now->contexts;
    if (kind == "modules")
        return (long)now->modules.size();
    return (long)(now->unused.size() + now->shared.size() + now->reserved.size()); /* allocations */
}
/* The engine's own work: writes `n` bytes of `value`, or takes a copy, when the stream comes to it. */
void fake_write(void *s, void *to, int value, size_t n) {
    std::lock_guard<std::recursive_mutex> hold(guard);
    push(stream_of(s), [=] { std::memset(to, value, n); });
}
void fake_read(void *s, const void *from, void *out, size_t n) {
    std::lock_guard<std::recursive_mutex> hold(guard);
    push(stream_of(s), [=] { std::memcpy(out, from, n); });
}
/* A stream that computes for a long time: what it has to do begins when it is let go. */
void fake_hold(void *s, int held) {
    std::lock_guard<std::recursive_mutex> hold(guard);
    stream_of(s)->held = held;
}
void fake_queue_limit(size_t n) { now->queue_limit = n; }
size_t fake_deepest(void) { return now->deepest; }
void fake_finish(void) {
    std::lock_guard<std::recursive_mutex> hold(guard);
    while (step()) {
    }
}

/* ---- the driver ---- */

int cuInit(unsigned) { ENTER(false) return OK; }
int cuDriverGetVersion(int *v) { ENTER(false) return *v = now->version, OK; }
int cuDeviceGet(int *d, int n) { ENTER(false) return n ? 101 /* CUDA_ERROR_INVALID_DEVICE */ : (*d = DEVICE, OK); }
int cuDeviceGetCount(int *n) { ENTER(false) return *n = 1, OK; }
int cuDeviceGetName(char *name, int n, int d) { DEVICE_CALL return std::strncpy(name, "Fake GPU", n), OK; }
int cuDeviceGetAttribute(int *v, int which, int d) { DEVICE_CALL return *v = which == 75 ? 9 : 0, OK; }
int cuDeviceGetUuid_v2(void *id, int d) { DEVICE_CALL return std::memset(id, 7, 16), OK; }
int cuDeviceGetPCIBusId(char *id, int n, int d) { DEVICE_CALL return std::strncpy(id, "FFFF:FF:00.0", n), OK; }
int cuDevicePrimaryCtxRetain(void **c, int d) { DEVICE_CALL return now->contexts++, *c = now, OK; }
int cuDevicePrimaryCtxRelease_v2(int d) { DEVICE_CALL return now->contexts--, OK; }
/* Both may return what earlier work has come to, as most calls may. */
int cuCtxPushCurrent_v2(void *) {
    ENTER(false)
    depth++;
    return OK;
}
int cuCtxPopCurrent_v2(void **c) {
    std::lock_guard<std::recursive_mutex> hold(guard);
    if (!depth)
        return INVALID_CONTEXT;
    *c = now;
    return depth--, now->sticky;
}
int cuCtxSetCurrent(void *c) {
    ENTER(false)
    depth = c ? std::max(depth, 1) : std::max(depth - 1, 0);
    return OK;
}
int cuCtxGetCurrent(void **c) { ENTER(false) return *c = depth ? now : nullptr, OK; }
int cuCtxGetDevice(int *d) { ENTER(true) return *d = DEVICE, OK; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { ENTER(true) return *least = 0, *greatest = -5, OK; }

int cuStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    ENTER(true)
    if (flags != 1)
        violation("a stream that the default stream would wait for");
    stream *s = new stream;
    (void)priority;
    now->streams.push_back(s);
    return *out = s, OK;
}
int cuStreamDestroy_v2(void *handle) {
    std::lock_guard<std::recursive_mutex> hold(guard);
    now->calls["cuStreamDestroy_v2"]++;
    stream *s = stream_of(handle);
    if (!s->alive || handle == nullptr)
        return INVALID_HANDLE;
    if (!s->ops.empty() && now->sticky == OK)
        violation("a stream destroyed that has work left");
    s->alive = false;
    return now->sticky;
}
int cuStreamSynchronize(void *s) {
    ENTER(true)
    return until([&] { return stream_of(s)->ops.empty(); });
}
int cuStreamWaitEvent(void *s, void *e, unsigned) {
    ENTER(true)
    event *ev = (event *)e;
    if (!ev->alive)
        return INVALID_HANDLE;
    if (ev->recorded)
        stream_of(s)->ops.push_back({ev, ev->recorded, nullptr, 1, false});
    return OK;
}

int cuEventCreate(void **out, unsigned flags) {
    ENTER(true)
    event *e = new event;
    e->timed = !(flags & 2);
    now->events.push_back(e);
    return *out = e, OK;
}
int cuEventDestroy_v2(void *e) {
    std::lock_guard<std::recursive_mutex> hold(guard);
    event *ev = (event *)e;
    if (!ev->alive)
        return INVALID_HANDLE;
    ev->alive = false;
    return now->sticky;
}
int cuEventRecord(void *e, void *s) {
    ENTER(true)
    event *ev = (event *)e;
    if (!ev->alive)
        return INVALID_HANDLE;
    uint64_t generation = ++ev->recorded;
    push(stream_of(s), [=] {
        ev->happened = std::max(ev->happened, generation);
        ev->time_ms = now->clock_ms;
    });
    stream_of(s)->ops.back().moves = false;
    return OK;
}
int cuEventQuery(void *e) {
    ENTER(true)
    event *ev = (event *)e;
    step();
    return now->sticky ? now->sticky : ev->happened >= ev->recorded ? OK : NOT_READY;
}
int cuEventSynchronize(void *e) {
    ENTER(true)
    event *ev = (event *)e;
    if (!ev->alive)
        return INVALID_HANDLE;
    return until([&] { return ev->happened >= ev->recorded; });
}
int cuEventElapsedTime(float *ms, void *a, void *b) {
    ENTER(true)
    event *begin = (event *)a, *end = (event *)b;
    if (!begin->timed || !end->timed)
        return INVALID_HANDLE;
    if (begin->happened < begin->recorded || end->happened < end->recorded)
        return NOT_READY;
    return *ms = (float)(end->time_ms - begin->time_ms), OK;
}

int cuMemAlloc_v2(uint64_t *out, size_t n) {
    ENTER(true)
    if (!n)
        return INVALID_VALUE;
    void *p = std::aligned_alloc(512, (n + 511) / 512 * 512);
    if (!p)
        return OUT_OF_MEMORY;
    std::memset(p, 0xCD, n);
    now->device[(uint64_t)p] = n;
    now->unused[p] = n;
    return *out = (uint64_t)p, OK;
}
int cuMemFree_v2(uint64_t address) {
    std::lock_guard<std::recursive_mutex> hold(guard);
    auto found = now->unused.find((void *)address);
    if (found == now->unused.end())
        return INVALID_VALUE;
    std::memset((void *)address, 0xDD, found->second); /* and kept: who still uses it gets nonsense, not a crash */
    now->device.erase(address);
    now->unused.erase(found);
    return now->sticky;
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t n) {
    ENTER(true)
    std::vector<char> staged((const char *)from, (const char *)from + n); /* pageable: arrives later */
    push(legacy(), [=] { move_bytes(to, (uint64_t)staged.data(), n); });
    return OK;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t n) {
    ENTER(true)
    push(legacy(), [=] { move_bytes((uint64_t)to, from, n); });
    return until([&] { return legacy()->ops.empty(); });
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, void *s) {
    if (!within(now->registered, (uint64_t)from, n))
        return cuMemcpyHtoD_v2(to, from, n);
    ENTER(true)
    push(stream_of(s), [=] { move_bytes(to, (uint64_t)from, n); });
    return OK;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, void *s) {
    ENTER(true)
    push(stream_of(s), [=] { move_bytes((uint64_t)to, from, n); });
    if (!within(now->registered, (uint64_t)to, n))
        return until([&] { return stream_of(s)->ops.empty(); });
    return OK;
}
int cuMemGetAddressRange_v2(uint64_t *base, size_t *n, uint64_t address) {
    ENTER(true)
    auto next = now->device.upper_bound(address);
    if (!within(now->device, address, 1))
        return NOT_FOUND;
    --next;
    return *base = next->first, *n = next->second, OK;
}
int cuMemsetD8_v2(uint64_t to, unsigned char value, size_t n) {
    ENTER(true)
    push(legacy(), [=] { std::memset((void *)to, value, n); });
    return OK;
}
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t n, void *s) {
    ENTER(true)
    push(stream_of(s), [=] { move_bytes(to, from, n); });
    if (!known(to, n) || !known(from, n)) /* pageable memory: the call takes as long as the copy */
        return until([&] { return stream_of(s)->ops.empty(); });
    return OK;
}

struct location {
    unsigned type;
    int id;
};
struct attributes {
    unsigned order;
    location source, destination;
    unsigned flags;
};

static int fake_batch(uint64_t *to, uint64_t *from, size_t *sizes, size_t count, attributes *attrs, size_t *first,
                      size_t n_attrs, size_t *failed, void *s) {
    std::lock_guard<std::recursive_mutex> hold(guard);
    if (int code = enter("cuMemcpyBatchAsync"))
        return code;
    *failed = SIZE_MAX;
    if (!s || !count || n_attrs != 1 || *first != 0 || (attrs->order != 1 && attrs->order != 3))
        return INVALID_VALUE;
    struct one {
        uint64_t to, from;
        size_t n;
        std::vector<char> early;
    };
    std::vector<one> copies;
    for (size_t i = 0; i < count; i++) {
        if (!sizes[i] || !known(to[i], sizes[i]) || !known(from[i], sizes[i]))
            return *failed = i, INVALID_VALUE;
        one copy{to[i], from[i], sizes[i], {}};
        if (attrs->order == 3) { /* the source may be read before the stream's turn: so it is */
            if (touches(now->device, from[i], sizes[i]))
                violation("memory that the GPU writes is read out of the stream's order");
            copy.early.assign((char *)from[i], (char *)from[i] + sizes[i]);
        }
        copies.push_back(std::move(copy));
    }
    std::shuffle(copies.begin(), copies.end(), now->rng);
    push(stream_of(s), [copies = std::move(copies)] {
        for (auto &copy : copies)
            move_bytes(copy.to, copy.early.empty() ? copy.from : (uint64_t)copy.early.data(), copy.n);
    }, count);
    return OK;
}

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t, int *) {
    ENTER(false)
    if (std::string(name) != "cuMemcpyBatchAsync" || version != 12080 || now->version < version)
        return *out = nullptr, NOT_FOUND;
    return *out = (void *)fake_batch, OK;
}

static thread_local int capture_mode; /* CU_STREAM_CAPTURE_MODE_GLOBAL */
int cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER(false)
    std::swap(*mode, capture_mode);
    return OK;
}

int cuMemHostRegister_v2(void *address, size_t n, unsigned flags) {
    ENTER(true)
    if (capture_mode != 2) /* as libraries do; ours must not, while another thread captures a graph */
        now->calls["a capture broken"]++;
    if (flags != 3)
        violation("host memory not mapped for all");
    if ((uint64_t)address % 4096 || touches(now->registered, (uint64_t)address, n))
        return touches(now->registered, (uint64_t)address, n) ? ALREADY_REGISTERED : INVALID_VALUE;
    now->registered[(uint64_t)address] = n;
    return OK;
}
int cuMemHostUnregister(void *address) {
    std::lock_guard<std::recursive_mutex> hold(guard);
    for (stream *s : now->streams)
        if (now->sticky == OK && std::any_of(s->ops.begin(), s->ops.end(), [](op &o) { return o.moves; }))
            violation("host memory unlocked while work is left");
    return now->registered.erase((uint64_t)address) ? now->sticky : NOT_REGISTERED;
}

int cuPointerGetAttribute(void *out, int which, uint64_t address) {
    ENTER(false) /* threads of NIXL's plugin have no context */
    if (!known(address, 1))
        return INVALID_VALUE;
    switch (which) {
    case 1: /* the context */
        return *(void **)out = now, OK;
    case 2: /* the kind of memory */
        return *(unsigned *)out = within(now->registered, address, 1) ? 1 : 2, OK;
    case 7: /* an ID of its allocation: here its number */
        return *(uint64_t *)out = (uint64_t)std::distance(now->device.begin(), now->device.upper_bound(address)), OK;
    case 8: /* whether it is managed */
        return *(unsigned *)out = 0, OK;
    case 9: /* the ordinal of its device */
        return *(int *)out = 0, OK;
    }
    return INVALID_VALUE;
}
int cuPointerSetAttribute(const void *, int which, uint64_t address) {
    ENTER(true)
    return which == 6 /* copies are synchronous, as for DMA by others */ && within(now->device, address, 1) ? OK : INVALID_VALUE;
}

/* ---- memory that processes share: an allocation is a memfd ---- */

enum : size_t { GRANULARITY = 2 << 20 };

struct allocation_properties {
    int type, handle_types;
    location place;
    void *unused;
    unsigned char compression, rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
};
struct access_description {
    location place;
    int flags;
};

static uint64_t own(int descriptor) {
    static uint64_t last = 0x5000;
    now->shared[++last] = descriptor;
    return last;
}

int cuMemGetAllocationGranularity(size_t *n, const allocation_properties *, int) { ENTER(false) return *n = GRANULARITY, OK; }
int cuMemCreate(uint64_t *handle, size_t n, const allocation_properties *about, uint64_t flags) {
    ENTER(true)
    if (!n || n % GRANULARITY || about->type != 1 || about->place.type != 1 || about->place.id != 0 || flags)
        return INVALID_VALUE;
    int descriptor = memfd_create("fake-gpu", MFD_CLOEXEC);
    if (descriptor < 0 || ftruncate(descriptor, (off_t)n))
        return OUT_OF_MEMORY;
    return *handle = own(descriptor), OK;
}
int cuMemRelease(uint64_t handle) {
    ENTER(false)
    auto found = now->shared.find(handle);
    if (found == now->shared.end())
        return INVALID_VALUE;
    close(found->second); /* what is mapped stays */
    now->shared.erase(found);
    return OK;
}
int cuMemExportToShareableHandle(void *out, uint64_t handle, int type, uint64_t) {
    ENTER(false)
    if (type != 1 /* a descriptor */ || !now->shared.count(handle))
        return INVALID_VALUE;
    return *(int *)out = dup(now->shared[handle]), OK;
}
int cuMemImportFromShareableHandle(uint64_t *handle, void *descriptor, int type) {
    ENTER(false)
    int copy = type == 1 ? dup((int)(intptr_t)descriptor) : -1;
    return copy < 0 ? INVALID_VALUE : (*handle = own(copy), OK);
}
int cuMemAddressReserve(uint64_t *address, size_t n, size_t alignment, uint64_t, uint64_t) {
    ENTER(false)
    if (!n || n % GRANULARITY || alignment > GRANULARITY)
        return INVALID_VALUE;
    auto whole = (uint64_t)mmap(nullptr, n + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (whole + GRANULARITY - 1) / GRANULARITY * GRANULARITY; /* the rest is left */
    now->reserved[*address] = n;
    return OK;
}
int cuMemAddressFree(uint64_t address, size_t n) {
    ENTER(false)
    auto found = now->reserved.find(address);
    if (found == now->reserved.end() || found->second != n || touches(now->mapped, address, n))
        return INVALID_VALUE;
    now->reserved.erase(found);
    return OK;
}
int cuMemMap(uint64_t address, size_t n, size_t offset, uint64_t handle, uint64_t) {
    ENTER(false)
    struct stat about;
    if (!within(now->reserved, address, n) || touches(now->mapped, address, n) || !now->shared.count(handle) || offset ||
        fstat(now->shared[handle], &about) || (size_t)about.st_size != n)
        return INVALID_VALUE;
    mmap((void *)address, n, PROT_NONE, MAP_SHARED | MAP_FIXED, now->shared[handle], 0);
    now->mapped[address] = n;
    return OK;
}
int cuMemSetAccess(uint64_t address, size_t n, const access_description *who, size_t count) {
    ENTER(true)
    if (!within(now->mapped, address, n) || count != 1 || who->place.id != 0 || who->flags != 3)
        return INVALID_VALUE;
    mprotect((void *)address, n, PROT_READ | PROT_WRITE);
    now->device[address] = n;
    return OK;
}
int cuMemUnmap(uint64_t address, size_t n) {
    ENTER(false)
    auto found = now->mapped.find(address);
    if (found == now->mapped.end() || found->second != n)
        return INVALID_VALUE;
    mmap((void *)address, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    now->mapped.erase(found);
    now->device.erase(address);
    return OK;
}

/* cuFile opens no driver that lacks any of these. In its compatibility mode it calls none of them. */
#define NOT_SUPPORTED(name)                                                                                              \
    int name() { ENTER(false) return 801; }
NOT_SUPPORTED(cuCtxCreate_v2)
NOT_SUPPORTED(cuCtxDestroy_v2)
NOT_SUPPORTED(cuCtxEnablePeerAccess)
NOT_SUPPORTED(cuDeviceCanAccessPeer)
NOT_SUPPORTED(cuGetExportTable)
NOT_SUPPORTED(cuIpcCloseMemHandle)
NOT_SUPPORTED(cuIpcGetEventHandle)
NOT_SUPPORTED(cuIpcGetMemHandle)
NOT_SUPPORTED(cuIpcOpenEventHandle)
NOT_SUPPORTED(cuIpcOpenMemHandle_v2)
NOT_SUPPORTED(cuLaunchHostFunc)
NOT_SUPPORTED(cuMemAllocHost_v2)
NOT_SUPPORTED(cuMemAllocManaged)
NOT_SUPPORTED(cuMemFreeHost)
NOT_SUPPORTED(cuMemHostAlloc)
NOT_SUPPORTED(cuMemHostGetDevicePointer_v2)
NOT_SUPPORTED(cuMemcpy)
NOT_SUPPORTED(cuMemcpyPeer)
NOT_SUPPORTED(cuMemcpyPeerAsync)
NOT_SUPPORTED(cuMemsetD8Async)
NOT_SUPPORTED(cuPointerGetAttributes)
NOT_SUPPORTED(cuStreamCreate)
NOT_SUPPORTED(cuStreamWaitValue32_v2)
NOT_SUPPORTED(cuStreamWriteValue32_v2)

int cuModuleLoadData(void **out, const void *image) {
    ENTER(true)
    if (std::memcmp(image, "image", 5) && std::memcmp(image, "\x7f" "ELF", 4))
        return 218; /* CUDA_ERROR_INVALID_PTX */
    *out = new int;
    now->modules.insert(*out);
    return OK;
}
int cuModuleUnload(void *module) {
    std::lock_guard<std::recursive_mutex> hold(guard);
    return now->modules.erase(module) ? OK : INVALID_HANDLE;
}
int cuModuleGetFunction(void **out, void *, const char *name) {
    ENTER(true)
    for (kernel &k : kernels)
        if (!std::strcmp(k.name, name))
            return *out = &k, OK;
    return NOT_FOUND;
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *s, void **parameters, void **) {
    ENTER(true)
    kernel *k = (kernel *)f;
    if (!gx || gy * gz * by * bz != 1 || bx > 1024 || shared > 48 << 10)
        return INVALID_VALUE;
    std::vector<char> copy((char *)parameters[0], (char *)parameters[0] + k->parameter_bytes);
    auto *job = (const swap_job *)copy.data();
    if (!touches(now->device, job->staging, 1))
        violation("a kernel whose staging buffer is not the GPU's");
    push(stream_of(s), [=] {
        alignas(16) static char parameter[40000];
        std::memcpy(parameter, copy.data(), copy.size());
        k->run(parameter, gx, bx);
        now->clock_ms += 5e-3 + (double)gx * 1e-4;
    });
    return OK;
}
int cuGetErrorName(int code, const char **name) {
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : nullptr;
    return *name ? OK : INVALID_VALUE;
}
}
