/* A CUDA driver without a GPU: the calls that nixl_tiers.swap.driver makes, on host memory.
 *
 * Streams are queues whose work is done as late as CUDA allows, and in any order that CUDA allows: only when a caller
 * waits or (sometimes) asks, a random stream that may go on does one thing, copies of a batch in random order. Kernels
 * are the real ones, compiled for a CPU. What a real driver would answer with an error is an error here, and what it
 * would let pass and no caller should do is counted as a violation. Freed memory is poisoned and never used again.
 */
#define SWAP_HOST_DEVICE "host_device.h"
#include "../../csrc/swap.cu"

#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>

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
};

struct stream {
    std::deque<op> ops;
    int priority = 0;
    bool alive = true;
};

struct kernel {
    const char *name;
    std::function<void(const void *, unsigned, unsigned, size_t)> run;
    size_t parameter_bytes;
    size_t shared_allowed = 48 << 10;
};

struct failure {
    int after, code;
};

struct machine {
    std::mt19937 rng;
    int version = 13000;
    bool stays_at_host_address = true;
    std::map<uint64_t, size_t> device, registered;
    std::map<void *, uint64_t> unused;
    std::vector<stream *> streams;
    std::vector<event *> events;
    std::map<std::string, failure> failures;
    std::map<std::string, int> calls;
    int sticky = OK, contexts = 0, violations = 0;
    long fail_at_op = -1, ops_done = 0;
    size_t largest_batch = 0;
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
        if (!s->ops.empty() && may_run(s->ops.front()))
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

int until(const std::function<bool()> &done) {
    while (!done() && now->sticky == OK)
        if (!step()) {
            violation("waits for what can never happen");
            return INVALID_VALUE;
        }
    return now->sticky;
}

void sometimes() {
    for (int n = now->rng() % 8; n > 5; n--)
        step();
}

int enter(const char *name, bool needs_context = true) {
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

void push(stream *s, std::function<void()> run) { s->ops.push_back({nullptr, 0, std::move(run)}); }

template <int N>
void add_kernels(const char *stage_name, void (*stage_)(const swap_launch<N>), const char *ring_name,
                 void (*ring_)(const swap_launch<N>)) {
    for (auto [name, body] : {std::pair{stage_name, stage_}, std::pair{ring_name, ring_}})
        kernels.push_back({name,
                           [body = body](const void *p, unsigned blocks, unsigned threads, size_t shared) {
                               auto *launch = (const swap_launch<N> *)p;
                               run_grid(body, *launch, blocks, threads, shared, now->rng());
                           },
                           sizeof(swap_launch<N>)});
}

} // namespace

extern "C" {

/* ---- for tests ---- */

void fake_reset(unsigned seed, int version) {
    std::lock_guard<std::recursive_mutex> hold(guard);
    kernels.clear();
    add_kernels<480>("nixl_tiers_stage_480", nixl_tiers_stage_480, "nixl_tiers_ring_480", nixl_tiers_ring_480);
    add_kernels<3968>("nixl_tiers_stage_3968", nixl_tiers_stage_3968, "nixl_tiers_ring_3968", nixl_tiers_ring_3968);
    now = new machine; /* the one before stays: its handles may still be in use */
    now->rng.seed(seed);
    now->version = version;
    now->streams.push_back(new stream);
}
void fake_device_memory(void *address, size_t n) { now->device[(uint64_t)address] = n; }
void fake_other_host_address(void) { now->stays_at_host_address = false; }
void fake_fail(const char *name, int after, int code) { now->failures[name] = {after, code}; }
void fake_fail_running(long after) { now->fail_at_op = now->ops_done + after; }
void fake_leave(void) { now->sticky = DEINITIALIZED; }
int fake_calls(const char *name) { return now->calls[name]; }
int fake_violations(void) { return now->violations; }
const char *fake_why(void) { return now->why.c_str(); }
size_t fake_largest_batch(void) { return now->largest_batch; }
int fake_priority(void *s) { return stream_of(s)->priority; }
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
    return (long)now->unused.size(); /* allocations */
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
    *c = now;
    return depth-- > 0 ? now->sticky : INVALID_CONTEXT;
}
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { ENTER(true) return *least = 0, *greatest = -5, OK; }

int cuStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    ENTER(true)
    if (flags != 1)
        violation("a stream that the default stream would wait for");
    stream *s = new stream;
    s->priority = priority;
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
        stream_of(s)->ops.push_back({ev, ev->recorded, nullptr});
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
    now->largest_batch = std::max(now->largest_batch, count);
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
    });
    return OK;
}

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t, int *) {
    ENTER(false)
    if (std::string(name) != "cuMemcpyBatchAsync" || version != 12080 || now->version < version)
        return *out = nullptr, NOT_FOUND;
    return *out = (void *)fake_batch, OK;
}

int cuMemHostRegister_v2(void *address, size_t n, unsigned flags) {
    ENTER(true)
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
        if (!s->ops.empty() && now->sticky == OK)
            violation("host memory unlocked while work is left");
    return now->registered.erase((uint64_t)address) ? now->sticky : NOT_REGISTERED;
}
int cuMemHostGetDevicePointer_v2(uint64_t *out, void *address, unsigned) {
    ENTER(true)
    if (!within(now->registered, (uint64_t)address, 1))
        return INVALID_VALUE;
    return *out = (uint64_t)address + (now->stays_at_host_address ? 0 : 1 << 20), OK;
}

int cuPointerGetAttribute(void *out, int which, uint64_t address) {
    ENTER(true)
    if (which != 2 || !known(address, 1))
        return INVALID_VALUE;
    return *(unsigned *)out = within(now->registered, address, 1) ? 1 : 2, OK;
}

int cuModuleLoadData(void **out, const void *image) {
    ENTER(true)
    if (std::memcmp(image, "image", 5))
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
int cuFuncSetAttribute(void *f, int which, int value) {
    ENTER(true)
    if (which != 8)
        return INVALID_VALUE;
    return ((kernel *)f)->shared_allowed = value, OK;
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *s, void **parameters, void **) {
    ENTER(true)
    kernel *k = (kernel *)f;
    if (!gx || gy * gz * by * bz != 1 || bx > 1024 || shared > k->shared_allowed)
        return INVALID_VALUE;
    std::vector<char> copy((char *)parameters[0], (char *)parameters[0] + k->parameter_bytes);
    auto *job = (const swap_job *)copy.data();
    if (!job->staging && !within(now->registered, job->rows.region, 1))
        violation("a kernel on host memory that is not mapped");
    push(stream_of(s), [=] {
        alignas(16) static char parameter[40000];
        std::memcpy(parameter, copy.data(), copy.size());
        k->run(parameter, gx, bx, shared);
        now->clock_ms += 5e-3 + (double)gx * 1e-4;
    });
    return OK;
}
int cuGetErrorName(int code, const char **name) {
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : nullptr;
    return *name ? OK : INVALID_VALUE;
}
}
