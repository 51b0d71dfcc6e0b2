/* Submits the copies of the CUDA swap from a thread of its own, which no interpreter lock can hold up.
 *
 * The engine's step thread records an event behind its compute and queues a request; everything that costs time per
 * block, and every call of the driver that may block its caller (a stream with about a thousand operations pending
 * does), happens here. The thread keeps only a few slots of work outstanding, so that it, and nobody else, waits.
 */
#include <pthread.h>
#include <stdlib.h>

#include "swap_copies.h"

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
    return which == 0 ? sizeof(swap_setup) : which == 1 ? sizeof(swap_request) : sizeof(swap_group);
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

/* Records `event` behind what the stream `compute` has to do so far. After an error `call` names the driver's. */
CUresult nixl_tiers_submit_record(submitter *self, CUevent event, CUstream compute, const char **call) {
    const swap_driver *driver = &self->setup.driver;
    CUcontext ignored;
    *call = "cuCtxPushCurrent_v2";
    CUresult code = driver->ctx_push(self->setup.context);
    if (code)
        return code;
    *call = "cuEventRecord";
    code = driver->event_record(event, compute);
    driver->ctx_pop(&ignored);
    return code;
}

/* Queues a request behind its event `computed`, which is recorded, and returns. */
void nixl_tiers_submit_put(submitter *self, swap_request *request) {
    request->next = NULL;
    pthread_mutex_lock(&self->lock);
    *self->last = request;
    self->last = &request->next;
    pthread_cond_signal(&self->queued);
    pthread_mutex_unlock(&self->lock);
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
