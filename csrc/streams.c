/* Copies rows of loads as they arrive (docs/internals/streams.md), on a thread of its own: beside the engine's step, and
 * no interpreter lock can hold it up.
 *
 * It looks at the words of its streams' rows whenever the doorbell has rung, and every 10 ms. A row counts as copied only
 * if it was below the stream's limit before and after that: a limit is lowered before a row's number may be given to
 * another key, so bytes that changed under a copy are found out.
 */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "row_words.h"
#include "swap.h"

enum { THERE, COMING, COPIED }; /* of a place */
enum { LOOK_NS = 10000000 };

/* Returns when the pairs are copied, with 0; or when nothing of them is being copied any more, with another number. */
typedef int copy_fn(void *context, const swap_pair *pairs, size_t n);

/* One load. The caller keeps it, and what it points to, until it has ended. Place i of its rows takes up `sub_blocks`
 * pairs, the first one without its first `skipped`, the last one as many as there are. */
typedef struct stream {
    struct stream *next;
    const swap_u32 *rows;
    const swap_pair *pairs;
    unsigned char *places;
    swap_u64 n_places, n_pairs, skipped;
    swap_u64 slot, number; /* of its limit */
    double deadline_s;
    copy_fn *copy;
    void *context;
    int cancelled, ended, failed;
    swap_u64 gap, copied; /* the first place that was not copied; pairs that were */
    double copy_s;
} stream;

typedef struct {
    const swap_u32 *words;
    const swap_u64 *limits;
    swap_u32 *bell;
    swap_u64 sub_blocks, most; /* of a row; places that one call copies */
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t queued, some_ended;
    stream *incoming;
    int stop;
} streams;

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static swap_u64 limit_of(const streams *self, const stream *at) {
    swap_u64 word = __atomic_load_n(&self->limits[at->slot], __ATOMIC_ACQUIRE), limit = word & 0xffffffff;
    if (word >> 32 != at->number) /* the slot is another stream's by now */
        return 0;
    return limit < at->n_places ? limit : at->n_places;
}

static int can_be_copied(const streams *self, const stream *at, swap_u64 place) {
    return at->places[place] == THERE ||
           (at->places[place] == COMING && __atomic_load_n(&self->words[at->rows[place]], __ATOMIC_ACQUIRE) == ARRIVED);
}

static swap_u64 first_pair(const streams *self, const stream *at, swap_u64 place) {
    swap_u64 pair = place * self->sub_blocks;
    pair = pair > at->skipped ? pair - at->skipped : 0;
    return pair < at->n_pairs ? pair : at->n_pairs;
}

static void copy_run(const streams *self, stream *at, swap_u64 begin, swap_u64 end) {
    swap_u64 first = first_pair(self, at, begin), last = first_pair(self, at, end);
    double began_s = now_s();
    at->failed = at->copy(at->context, at->pairs + first, last - first);
    at->copy_s += now_s() - began_s;
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* the limit is read behind the bytes */
    swap_u64 limit = limit_of(self, at);
    for (swap_u64 place = begin; place < end && place < limit && !at->failed; place++) {
        at->places[place] = COPIED;
        at->copied += first_pair(self, at, place + 1) - first_pair(self, at, place);
    }
}

static int is_over(const streams *self, const stream *at, swap_u64 limit) {
    return at->gap >= limit || at->failed || __atomic_load_n(&at->cancelled, __ATOMIC_ACQUIRE) ||
           __atomic_load_n(&self->stop, __ATOMIC_ACQUIRE) || now_s() >= at->deadline_s;
}

enum { ENDED, COPIED_SOME, WAITS };

/* Copies the next run of rows that are there. */
static int advance(const streams *self, stream *at) {
    swap_u64 limit = limit_of(self, at);
    while (at->gap < at->n_places && at->places[at->gap] == COPIED)
        at->gap++;
    if (is_over(self, at, limit))
        return ENDED;
    swap_u64 begin = at->gap, end;
    while (begin < limit && !can_be_copied(self, at, begin))
        begin++;
    for (end = begin; end < limit && end - begin < self->most && can_be_copied(self, at, end);)
        end++;
    if (begin == end)
        return WAITS;
    copy_run(self, at, begin, end);
    return COPIED_SOME;
}

static void end_stream(streams *self, stream *at) {
    pthread_mutex_lock(&self->lock);
    __atomic_store_n(&at->ended, 1, __ATOMIC_RELEASE); /* the caller may free it now */
    pthread_cond_broadcast(&self->some_ended);
    pthread_mutex_unlock(&self->lock);
}

/* What was queued is put before the open streams; waits until there are any. NULL: stop. */
static stream *join_incoming(streams *self, stream *open) {
    pthread_mutex_lock(&self->lock);
    while (!open && !self->incoming && !self->stop)
        pthread_cond_wait(&self->queued, &self->lock);
    while (self->incoming) {
        stream *at = self->incoming;
        self->incoming = at->next;
        at->next = open;
        open = at;
    }
    pthread_mutex_unlock(&self->lock);
    return open;
}

static void *run(void *argument) {
    streams *self = argument;
    stream *open = NULL;
    while ((open = join_incoming(self, open))) {
        swap_u32 rung = __atomic_load_n(self->bell, __ATOMIC_ACQUIRE);
        int waits = 1;
        for (stream **link = &open; *link;) {
            stream *at = *link;
            int how = advance(self, at);
            waits &= how == WAITS;
            if (how == ENDED) {
                *link = at->next;
                end_stream(self, at);
            } else {
                link = &at->next;
            }
        }
        struct timespec most = {0, LOOK_NS};
        if (waits)
            syscall(SYS_futex, self->bell, FUTEX_WAIT, rung, &most, NULL, 0);
    }
    return NULL;
}

/* ---- for Python: no call takes the interpreter's lock ---- */

size_t nixl_tiers_streams_size(void) { return sizeof(stream); }

/* Starts the thread; NULL where that fails. What is pointed to must outlive it. */
void *nixl_tiers_streams_open(const swap_u32 *words, const swap_u64 *limits, swap_u32 *bell, swap_u64 sub_blocks,
                              swap_u64 most) {
    streams *self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    self->words = words;
    self->limits = limits;
    self->bell = bell;
    self->sub_blocks = sub_blocks;
    self->most = most;
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->queued, NULL);
    pthread_cond_init(&self->some_ended, NULL);
    /* Signals are for threads of Python. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&self->thread, NULL, run, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        free(self);
        return NULL;
    }
    return self;
}

void nixl_tiers_streams_put(streams *self, stream *at) {
    pthread_mutex_lock(&self->lock);
    at->next = self->incoming;
    self->incoming = at;
    pthread_cond_signal(&self->queued);
    pthread_mutex_unlock(&self->lock);
    ring(self->bell);
}

int nixl_tiers_streams_ended(const stream *at) { return __atomic_load_n(&at->ended, __ATOMIC_ACQUIRE); }

/* Nothing more of it begins to be copied. */
void nixl_tiers_streams_cancel(streams *self, stream *at) {
    __atomic_store_n(&at->cancelled, 1, __ATOMIC_RELEASE);
    ring(self->bell);
}

/* Returns when it has ended. */
void nixl_tiers_streams_wait(streams *self, stream *at) {
    pthread_mutex_lock(&self->lock);
    while (!at->ended)
        pthread_cond_wait(&self->some_ended, &self->lock);
    pthread_mutex_unlock(&self->lock);
}

/* Cancels what is open, and ends the thread; 0 where a copy hangs, so that it has not ended after `most_s`. No other call
 * may run meanwhile or later. */
int nixl_tiers_streams_close(streams *self, unsigned most_s) {
    struct timespec until;
    pthread_mutex_lock(&self->lock);
    __atomic_store_n(&self->stop, 1, __ATOMIC_RELEASE);
    pthread_cond_signal(&self->queued);
    pthread_mutex_unlock(&self->lock);
    ring(self->bell);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += most_s;
    if (pthread_timedjoin_np(self->thread, NULL, &until))
        return 0;
    pthread_cond_destroy(&self->queued);
    pthread_cond_destroy(&self->some_ended);
    pthread_mutex_destroy(&self->lock);
    free(self);
    return 1;
}
