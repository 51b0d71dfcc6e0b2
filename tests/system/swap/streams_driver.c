/* Streams under ThreadSanitizer: a mover's thread writes rows and says so, the core's lowers limits, and what opens,
 * cancels and closes streams checks what was copied. streams_driver SEED ROUNDS: exits with 0, or says what is wrong.
 */
#include "../../csrc/arrive.c"
#include "../../csrc/streams.c"
#include "../../csrc/swap_cpu.c"

#include <sched.h>
#include <stdio.h>
#include <string.h>

enum { ROWS = 24, SUB_BLOCKS = 2, BLOCK = 192, OPEN = 3, PLACES = ROWS / OPEN, ROW = SUB_BLOCKS * BLOCK };

static unsigned char rows[ROWS][ROW], blocks[ROWS * SUB_BLOCKS][BLOCK];
static swap_u32 words[ROWS], bell, unheard;
static swap_u64 limits[OPEN];
static swap_u32 order[ROWS];

static unsigned next_random(unsigned *state) { return *state = *state * 1103515245u + 12345u, *state >> 8; }

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static void *mover(void *seed) {
    unsigned state = *(unsigned *)seed;
    for (int at = 0; at < ROWS;) {
        swap_u32 ready[4];
        size_t n = 0;
        for (; n < 1 + next_random(&state) % 4 && at < ROWS; at++) {
            memset(rows[order[at]], (int)order[at] + 1, ROW);
            ready[n++] = order[at];
        }
        nixl_tiers_arrive(words, ready, n, next_random(&state) % 2 ? &bell : &unheard);
    }
    return NULL;
}

static void *core(void *seed) {
    unsigned state = *(unsigned *)seed + 1;
    for (swap_u32 cut = 0; cut < next_random(&state) % 3; cut++) {
        while (__atomic_load_n(&words[order[ROWS / 2]], __ATOMIC_RELAXED) != ARRIVED)
            sched_yield();
        swap_u64 slot = next_random(&state) % OPEN, word = __atomic_load_n(&limits[slot], __ATOMIC_RELAXED);
        swap_u64 limit = next_random(&state) % (PLACES + 1);
        if (limit < (word & 0xffffffff))
            __atomic_store_n(&limits[slot], word >> 32 << 32 | limit, __ATOMIC_RELEASE);
    }
    return NULL;
}

static void check(const stream *at) {
    if (!at->failed && !at->cancelled && at->gap < PLACES && at->gap < (limits[at->slot] & 0xffffffff))
        fail("a stream ended before its limit");
    for (swap_u64 i = 0; i < at->gap * SUB_BLOCKS; i++)
        for (int byte = 0; byte < BLOCK; byte++)
            if (blocks[at->pairs[i].block][byte] != at->rows[i / SUB_BLOCKS] + 1)
                fail("a block that counts as copied holds other bytes");
}

static void one_round(unsigned seed, swap_u64 number) {
    unsigned state = seed;
    swap_segment segment = {(uintptr_t)blocks, BLOCK, BLOCK, 0};
    load_context context = {{(uintptr_t)rows, ROW, 0, BLOCK, SUB_BLOCKS}, &segment, 1};
    stream open[OPEN];
    swap_pair pairs[OPEN][PLACES * SUB_BLOCKS];
    unsigned char places[OPEN][PLACES];
    pthread_t threads[2];
    memset(rows, 0, sizeof rows);
    memset(blocks, 0, sizeof blocks);
    for (swap_u32 i = 0; i < ROWS; i++) {
        swap_u32 other = next_random(&state) % (i + 1);
        order[i] = order[other];
        order[other] = i;
        words[i] = 1;
    }
    for (int slot = 0; slot < OPEN; slot++)
        limits[slot] = number << 32 | PLACES;
    streams *self = nixl_tiers_streams_open(words, limits, &bell, SUB_BLOCKS, 1 + next_random(&state) % 4);
    for (swap_u32 s = 0; s < OPEN; s++) {
        static swap_u32 numbers[OPEN][PLACES];
        for (swap_u32 i = 0; i < PLACES; i++) {
            numbers[s][i] = s * PLACES + i;
            for (swap_u32 sub = 0; sub < SUB_BLOCKS; sub++)
                pairs[s][i * SUB_BLOCKS + sub] = (swap_pair){numbers[s][i] * SUB_BLOCKS + sub,
                                                             numbers[s][i] * SUB_BLOCKS + sub};
        }
        memset(places[s], COMING, PLACES);
        open[s] = (stream){.rows = numbers[s], .pairs = pairs[s], .places = places[s], .n_places = PLACES,
                           .n_pairs = PLACES * SUB_BLOCKS, .slot = s, .number = number, .deadline_s = 1e18,
                           .copy = (copy_fn *)(void *)nixl_tiers_swap_load, .context = &context};
        nixl_tiers_streams_put(self, &open[s]);
        if (!s) {
            pthread_create(&threads[0], NULL, mover, &seed);
            pthread_create(&threads[1], NULL, core, &seed);
        }
    }
    unsigned how = next_random(&state) % 3;
    if (how == 1)
        nixl_tiers_streams_cancel(self, &open[1]);
    for (swap_u32 s = 0; s < OPEN && how < 2; s++)
        if (s)
            nixl_tiers_streams_wait(self, &open[s]);
        else
            while (!nixl_tiers_streams_ended(&open[s]))
                sched_yield();
    for (swap_u32 s = 0; s < OPEN && how < 2; s++)
        check(&open[s]);
    if (!nixl_tiers_streams_close(self, 60))
        fail("the thread does not end");
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    for (swap_u32 s = 0; s < OPEN; s++) {
        if (!nixl_tiers_streams_ended(&open[s]))
            fail("a stream is open behind the end");
        open[s].cancelled |= how == 2;
        check(&open[s]);
    }
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    for (unsigned round = 0; round < (unsigned)atoi(argv[2]); round++)
        one_round((unsigned)atoi(argv[1]) + round, round + 1);
    return 0;
}
