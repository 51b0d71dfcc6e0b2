/* How swap_submit.c copies: batches for the copy engine, kernels, and the strategies of them. */
#include <pthread.h>
#include <string.h>

#include "swap_submit.h"

typedef struct {
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
