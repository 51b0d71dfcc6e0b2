/* Submits the copies of the CUDA swap from a thread of its own, which no interpreter lock can hold up.
 *
 * The engine's step thread records an event behind its compute and queues a request; everything that costs time per
 * block, and every call of the driver that may block its caller (a stream with about a thousand operations pending
 * does), happens here. The thread keeps only a few slots of work outstanding, so that it, and nobody else, waits.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "swap_submit.h"

typedef struct submitter {
    swap_setup setup;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t queued, moved;
    swap_request *first, **last;
    int busy, stop;
    /* of the thread alone */
    const char *call;
    swap_u32 turn, before; /* slots taken so far; the strategy of the transfer before, plus one */
    struct {
        CUdeviceptr to[BATCH], from[BATCH];
        size_t nbytes[BATCH];
        size_t n;
        CUstream stream;
        int any_order;
    } batch;
    struct {
        swap_job job;
        swap_pair pairs[3968];
    } parameter;
} submitter;

#define CALL(NAME, CODE)                                                                                                \
    do {                                                                                                               \
        CUresult code_ = (CODE);                                                                                       \
        if (code_) {                                                                                                   \
            self->call = NAME;                                                                                         \
            return code_;                                                                                              \
        }                                                                                                              \
    } while (0)
#define TRY(CODE)                                                                                                       \
    do {                                                                                                               \
        CUresult code_ = (CODE);                                                                                       \
        if (code_)                                                                                                     \
            return code_;                                                                                              \
    } while (0)

/* ---- copies, gathered into batches ---- */

static void begin_batch(submitter *self, CUstream stream, int any_order) {
    self->batch.n = 0;
    self->batch.stream = stream;
    self->batch.any_order = any_order;
}

static CUresult flush(submitter *self) {
    const swap_driver *driver = &self->setup.driver;
    size_t n = self->batch.n;
    self->batch.n = 0;
    if (!n)
        return 0;
    if (driver->memcpy_batch) {
        CUmemcpyAttributes attributes;
        size_t first_of_attributes = 0, failed = 0;
        memset(&attributes, 0, sizeof attributes);
        attributes.srcAccessOrder =
            self->batch.any_order ? CU_MEMCPY_SRC_ACCESS_ORDER_ANY : CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
        CALL("cuMemcpyBatchAsync",
             driver->memcpy_batch(self->batch.to, self->batch.from, self->batch.nbytes, n, &attributes,
                                  &first_of_attributes, 1, &failed, self->batch.stream));
        return 0;
    }
    for (size_t i = 0; i < n; i++)
        CALL("cuMemcpyAsync", driver->memcpy_async(self->batch.to[i], self->batch.from[i], self->batch.nbytes[i],
                                                   self->batch.stream));
    return 0;
}

/* The next slot, once the GPU has finished what was submitted into it last. */
static CUresult take_slot(submitter *self, swap_u32 *slot) {
    *slot = self->turn++ % SLOTS;
    CALL("cuEventSynchronize", self->setup.driver.event_synchronize(self->setup.free[*slot]));
    return 0;
}

static void add_copy(submitter *self, swap_u64 row, swap_u64 other, swap_u64 nbytes) {
    size_t i = self->batch.n++;
    self->batch.to[i] = self->setup.to_host ? row : other;
    self->batch.from[i] = self->setup.to_host ? other : row;
    self->batch.nbytes[i] = nbytes;
}

/* ---- kernels ---- */

static CUresult gather_or_scatter(submitter *self, const swap_request *request, const swap_pair *pairs, swap_u64 n,
                                  swap_u64 staging) {
    const swap_setup *setup = &self->setup;
    const swap_group *group = &setup->groups[request->group];
    for (swap_u64 done = 0; done < n;) {
        swap_u64 left = n - done, most = setup->capacities[CAPACITIES - 1];
        swap_u32 part = (swap_u32)(left < most ? left : most);
        int size = 0;
        while (setup->capacities[size] < part)
            size++;
        swap_job job = {setup->rows, group->parts, group->first_part, staging + done * setup->rows.sub_block_bytes,
                        group->n_parts, group->n_tiles, part, setup->to_host};
        self->parameter.job = job;
        memcpy(self->parameter.pairs, pairs + done, part * sizeof *pairs);
        swap_u64 warps = (swap_u64)part * group->n_tiles, enough = (warps + WARPS_OF_A_BLOCK - 1) / WARPS_OF_A_BLOCK;
        void *parameters[1] = {&self->parameter};
        CALL("cuLaunchKernel",
             setup->driver.launch(setup->stage[size],
                                  (unsigned)(enough < setup->stage_blocks ? enough : setup->stage_blocks), 1, 1, THREADS,
                                  1, 1, 0, setup->work, parameters, NULL));
        done += part;
    }
    return 0;
}

/* ---- the strategies ---- */

/* A batch counts as a slot, so that few are pending. */
static CUresult room_for_copy(submitter *self, swap_u32 *slot) {
    if (self->batch.n < BATCH)
        return 0;
    TRY(flush(self));
    CALL("cuEventRecord", self->setup.driver.event_record(self->setup.free[*slot], self->setup.work));
    return take_slot(self, slot);
}

/* One descriptor per layer and block: takes no multiprocessor, and is slow for small pages. */
static CUresult by_copy_engine(submitter *self, const swap_request *request) {
    const swap_setup *setup = &self->setup;
    const swap_group *group = &setup->groups[request->group];
    const swap_segment *segments = group->segments;
    /* Neighbouring blocks are contiguous on both sides where one segment leaves nothing out. */
    int whole = group->n_segments == 1 && segments[0].nbytes == segments[0].block_stride &&
                segments[0].nbytes == setup->rows.sub_block_bytes;
    swap_u32 slot;
    TRY(take_slot(self, &slot));
    /* Rows are complete when a load is submitted; pages may still be computed when a store is. */
    begin_batch(self, setup->work, !setup->to_host);
    for (swap_u64 i = 0; i < request->n_pairs; i++) {
        swap_u64 cell = swap_place_address(&setup->rows, request->pairs[i].place);
        for (swap_u64 s = 0; s < group->n_segments; s++) {
            swap_u64 row = cell + segments[s].offset, page = swap_page_address(&segments[s], request->pairs[i].block);
            swap_u64 n = self->batch.n;
            if (whole && n && (setup->to_host ? self->batch.to : self->batch.from)[n - 1] + self->batch.nbytes[n - 1] == row &&
                (setup->to_host ? self->batch.from : self->batch.to)[n - 1] + self->batch.nbytes[n - 1] == page) {
                self->batch.nbytes[n - 1] += segments[s].nbytes;
                continue;
            }
            TRY(room_for_copy(self, &slot));
            add_copy(self, row, page, segments[s].nbytes);
        }
    }
    TRY(flush(self));
    if (setup->to_host && group->n_gaps) {
        begin_batch(self, setup->work, 0);
        for (swap_u64 i = 0; i < request->n_pairs; i++)
            for (swap_u64 g = 0; g < group->n_gaps; g++) {
                TRY(room_for_copy(self, &slot));
                add_copy(self, swap_place_address(&setup->rows, request->pairs[i].place) + group->gaps[g].offset,
                         setup->zeros, group->gaps[g].nbytes);
            }
        TRY(flush(self));
    }
    CALL("cuEventRecord", setup->driver.event_record(setup->free[slot], setup->work));
    return 0;
}

/* Runs of places, between the rows and a slot of the staging buffer. Rows never continue one another (a seal stands
 * between), so that no copy leaves the row that it begins in. */
static CUresult copy_rows(submitter *self, const swap_pair *pairs, swap_u64 n, swap_u64 staging) {
    const swap_setup *setup = &self->setup;
    swap_u64 size = setup->rows.sub_block_bytes;
    begin_batch(self, setup->copies, !setup->to_host);
    for (swap_u64 i = 0; i < n;) {
        swap_u64 begin = swap_place_address(&setup->rows, pairs[i].place), run = 1;
        while (i + run < n && swap_place_address(&setup->rows, pairs[i + run].place) == begin + run * size)
            run++;
        if (self->batch.n == BATCH)
            TRY(flush(self));
        add_copy(self, begin, staging + i * size, run * size);
        i += run;
    }
    return flush(self);
}

/* Gather on the GPU, whole rows over the bus by the copy engine; the reverse for loads. */
static CUresult by_staging(submitter *self, const swap_request *request) {
    const swap_setup *setup = &self->setup;
    const swap_driver *driver = &setup->driver;
    CUstream filler = setup->to_host ? setup->work : setup->copies, emptier = setup->to_host ? setup->copies : setup->work;
    for (swap_u64 done = 0; done < request->n_pairs; done += setup->slot_pairs) {
        swap_u64 left = request->n_pairs - done, n = left < setup->slot_pairs ? left : setup->slot_pairs;
        const swap_pair *pairs = request->pairs + done;
        swap_u32 slot;
        TRY(take_slot(self, &slot));
        swap_u64 staging = setup->staging + slot * setup->slot_pairs * setup->rows.sub_block_bytes;
        for (int filling = 1; filling >= 0; filling--) {
            if (filling == (int)setup->to_host)
                TRY(gather_or_scatter(self, request, pairs, n, staging));
            else
                TRY(copy_rows(self, pairs, n, staging));
            if (!filling)
                break;
            CALL("cuEventRecord", driver->event_record(setup->full[slot], filler));
            CALL("cuStreamWaitEvent", driver->stream_wait_event(emptier, setup->full[slot], 0));
        }
        CALL("cuEventRecord", driver->event_record(setup->free[slot], emptier));
    }
    return 0;
}

static CUresult submit(submitter *self, swap_request *request) {
    const swap_setup *setup = &self->setup;
    const swap_driver *driver = &setup->driver;
    /* Without copies nothing would order a strategy's last stream behind its first. */
    swap_u32 strategy = request->n_pairs ? request->strategy : COPY_ENGINE;
    CUstream first = setup->work, last = setup->work;
    if (strategy == STAGED)
        *(setup->to_host ? &last : &first) = setup->copies;
    CALL("cuStreamWaitEvent", driver->stream_wait_event(first, request->computed, 0));
    if (self->before && self->before != strategy + 1)
        CALL("cuStreamWaitEvent", driver->stream_wait_event(first, setup->tail, 0));
    CALL("cuEventRecord", driver->event_record(request->begin, first));
    if (request->n_pairs && strategy == COPY_ENGINE)
        TRY(by_copy_engine(self, request));
    else if (strategy == STAGED)
        TRY(by_staging(self, request));
    CALL("cuEventRecord", driver->event_record(request->end, last));
    CALL("cuEventRecord", driver->event_record(setup->tail, last));
    self->before = strategy + 1;
    return 0;
}

/* A transfer that failed leaves nothing in flight: its rows may be given to others at once. */
static CUresult submit_all_or_nothing(submitter *self, swap_request *request) {
    const swap_driver *driver = &self->setup.driver;
    CUcontext ignored;
    CALL("cuCtxPushCurrent_v2", driver->ctx_push(self->setup.context));
    CUresult code = submit(self, request);
    if (code) {
        driver->stream_synchronize(self->setup.work);
        driver->stream_synchronize(self->setup.copies);
    }
    driver->ctx_pop(&ignored);
    return code;
}

/* ---- the thread ---- */

static void *run(void *argument) {
    submitter *self = argument;
    pthread_mutex_lock(&self->lock);
    for (;;) {
        while (!self->first && !self->stop)
            pthread_cond_wait(&self->queued, &self->lock);
        swap_request *request = self->first;
        if (!request)
            break;
        self->first = request->next;
        if (!self->first)
            self->last = &self->first;
        self->busy = 1;
        pthread_mutex_unlock(&self->lock);
        CUresult code = submit_all_or_nothing(self, request);
        pthread_mutex_lock(&self->lock);
        request->code = code;
        request->call = self->call;
        __atomic_store_n(&request->state, code ? FAILED : SUBMITTED, __ATOMIC_RELEASE); /* the caller may free it now */
        self->busy = 0;
        pthread_cond_broadcast(&self->moved);
    }
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

/* ---- for Python: no call takes the interpreter's lock ---- */

int nixl_tiers_submit_abi(void) { return SUBMIT_ABI; }

/* Sizes of the structures that both languages declare. */
size_t nixl_tiers_submit_sizes(int which) {
    return which == 0 ? sizeof(swap_setup) : which == 1 ? sizeof(swap_request) : which == 2 ? sizeof(swap_group) : sizeof(swap_load);
}

/* Starts the thread; NULL where that fails. `setup` is copied, what it points to must outlive the thread. */
void *nixl_tiers_submit_open(const swap_setup *setup) {
    submitter *self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    self->setup = *setup;
    self->last = &self->first;
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->queued, NULL);
    pthread_cond_init(&self->moved, NULL);
    if (pthread_create(&self->thread, NULL, run, self)) {
        free(self);
        return NULL;
    }
    return self;
}

static void enqueue(submitter *self, swap_request *request) {
    request->next = NULL;
    pthread_mutex_lock(&self->lock);
    *self->last = request;
    self->last = &request->next;
    pthread_cond_signal(&self->queued);
    pthread_mutex_unlock(&self->lock);
}

/* Queues a request behind what the stream `compute` has to do so far, and returns. After an error, of the call that the
 * request names, it is not queued. */
CUresult nixl_tiers_submit_put(submitter *self, swap_request *request, CUstream compute) {
    const swap_driver *driver = &self->setup.driver;
    CUcontext ignored;
    request->call = "cuCtxPushCurrent_v2";
    CUresult code = driver->ctx_push(self->setup.context);
    if (code)
        return code;
    request->call = "cuEventRecord";
    code = driver->event_record(request->computed, compute);
    driver->ctx_pop(&ignored);
    if (!code)
        enqueue(self, request);
    return code;
}

int nixl_tiers_submit_state(const swap_request *request) { return __atomic_load_n(&request->state, __ATOMIC_ACQUIRE); }

/* How long the request took on the GPU, in ms, once all of it has arrived; until then -1. Waits for nothing. -2 where it
 * failed: its `code` and `call` say how. */
double nixl_tiers_submit_ended(submitter *self, swap_request *request) {
    const swap_driver *driver = &self->setup.driver;
    CUcontext ignored;
    float milliseconds = 0;
    int state = nixl_tiers_submit_state(request);
    if (state != SUBMITTED)
        return state == QUEUED ? -1 : -2;
    const char *call = "cuCtxPushCurrent_v2";
    CUresult code = driver->ctx_push(self->setup.context);
    if (!code) {
        call = "cuEventQuery";
        code = driver->event_query(request->end);
        if (!code) {
            call = "cuEventElapsedTime";
            code = driver->event_elapsed(&milliseconds, request->begin, request->end);
        }
        driver->ctx_pop(&ignored);
    }
    if (code == CUDA_ERROR_NOT_READY)
        return -1;
    if (code) {
        request->code = code;
        request->call = call;
        return -2;
    }
    return milliseconds;
}

/* Returns the state once it is not QUEUED. */
int nixl_tiers_submit_wait(submitter *self, swap_request *request) {
    pthread_mutex_lock(&self->lock);
    while (request->state == QUEUED)
        pthread_cond_wait(&self->moved, &self->lock);
    int state = request->state;
    pthread_mutex_unlock(&self->lock);
    return state;
}

/* For streams.c. Returns 0 when the pairs have arrived, another number when they will not and nothing of them is in flight. */
int nixl_tiers_submit_load(swap_load *load, const swap_pair *pairs, size_t n_pairs) {
    const swap_setup *setup = &load->thread->setup;
    CUcontext ignored;
    if (setup->driver.ctx_push(setup->context))
        return -1;
    load->request.pairs = pairs;
    load->request.n_pairs = n_pairs;
    load->request.state = QUEUED;
    enqueue(load->thread, &load->request);
    int failed = nixl_tiers_submit_wait(load->thread, &load->request) == FAILED;
    if (!failed && setup->driver.event_synchronize(load->request.end)) {
        setup->driver.stream_synchronize(setup->work);
        setup->driver.stream_synchronize(setup->copies);
        failed = 1;
    }
    setup->driver.ctx_pop(&ignored);
    return failed;
}

/* Returns once nothing is queued: what was is on the GPU's streams, or has failed. */
void nixl_tiers_submit_drain(submitter *self) {
    pthread_mutex_lock(&self->lock);
    while (self->first || self->busy)
        pthread_cond_wait(&self->moved, &self->lock);
    pthread_mutex_unlock(&self->lock);
}

/* Ends the thread after what is queued. No other call may run meanwhile or later. */
void nixl_tiers_submit_close(submitter *self) {
    pthread_mutex_lock(&self->lock);
    self->stop = 1;
    pthread_cond_signal(&self->queued);
    pthread_mutex_unlock(&self->lock);
    pthread_join(self->thread, NULL);
    pthread_cond_destroy(&self->queued);
    pthread_cond_destroy(&self->moved);
    pthread_mutex_destroy(&self->lock);
    free(self);
}
