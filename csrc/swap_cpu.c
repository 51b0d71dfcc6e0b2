/* The swap on a CPU: engine blocks and region rows are both host memory.
 *
 * A destination is written once and read by somebody else, later: lines that are streamed past the caches
 * need not be read from memory first, which is worth a factor of 1.7. What it takes to keep up with one long
 * memmove is many pages under way at once: eight pieces are copied in lock-step, 256 bytes of each in turn.
 */
#include "swap.h"

#include <stddef.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define SWAP_X86 1
#include <immintrin.h>
#endif

#define SWAP_ABI 4 /* of swap_step.c too, which is in the same library */

enum { LANES = 8, STEP = 256, LINE = 64 };

/* Below this much the destination may well be in a cache already, and ordinary stores find it there. */
#define STREAM_BYTES ((swap_u64)512 << 10)

/* Pieces this small end before a hardware prefetcher has noticed them: all of them is asked for, a batch ahead. */
enum { SMALL_PIECE = 768 };

enum { KERNEL_AUTO = 0, KERNEL_PLAIN = 1, KERNEL_AVX2 = 2, KERNEL_AVX512 = 3 };

/* Pieces of a transfer that are looked at together: piece i is `nbytes[i]` from from[i] to to[i]. */
enum { BATCH = 64 };
typedef struct {
    char *to[BATCH];
    const char *from[BATCH];
    size_t nbytes[BATCH];
    size_t n;
} batch;

/* How far a transfer has come: pair by pair, so that one side is nearly sequential, and segment by segment. */
typedef struct {
    const swap_rows *rows;
    const swap_segment *segments;
    const swap_pair *pairs;
    size_t n_segments, n_pairs, pair, segment;
    int to_host;
} cursor;

static void next_batch(cursor *at, batch *out) {
    size_t n = 0;
    while (n < BATCH && at->pair < at->n_pairs) {
        swap_pair pair = at->pairs[at->pair];
        swap_u64 place = swap_place_address(at->rows, pair.place);
        size_t segment = at->segment;
        for (; n < BATCH && segment < at->n_segments; n++, segment++) {
            char *row = (char *)(uintptr_t)(place + at->segments[segment].offset);
            char *page = (char *)(uintptr_t)swap_page_address(&at->segments[segment], pair.block);
            out->to[n] = at->to_host ? row : page;
            out->from[n] = at->to_host ? page : row;
            out->nbytes[n] = at->segments[segment].nbytes;
        }
        at->segment = segment;
        if (segment == at->n_segments) {
            at->segment = 0;
            at->pair++;
        }
    }
    out->n = n;
}

static void copy_plain(cursor at) {
    batch now;
    for (next_batch(&at, &now); now.n; next_batch(&at, &now))
        for (size_t i = 0; i < now.n; i++)
            memcpy(now.to[i], now.from[i], now.nbytes[i]);
}

#ifdef SWAP_X86

static size_t head_bytes(const char *to, size_t nbytes) {
    size_t head = -(uintptr_t)to % LINE;
    return head < nbytes ? head : nbytes;
}

/* `nbytes` (a multiple of STEP) of each of LANES pieces; destinations stand on cache lines. */
typedef void lanes_fn(char *const *to, const char *const *from, size_t nbytes);

__attribute__((target("avx2"), always_inline)) static inline void step_avx2(char *to, const char *from) {
    __m256i v[STEP / 32];
    for (int j = 0; j < STEP / 32; j++)
        v[j] = _mm256_loadu_si256((const __m256i *)(from + j * 32));
    for (int j = 0; j < STEP / 32; j++)
        _mm256_stream_si256((__m256i *)(to + j * 32), v[j]);
}

__attribute__((target("avx512f"), always_inline)) static inline void step_avx512(char *to, const char *from) {
    __m512i v[STEP / 64];
    for (int j = 0; j < STEP / 64; j++)
        v[j] = _mm512_loadu_si512((const void *)(from + j * 64));
    for (int j = 0; j < STEP / 64; j++)
        _mm512_stream_si512((void *)(to + j * 64), v[j]);
}

__attribute__((target("avx2"))) static void lanes_avx2(char *const *to, const char *const *from, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += STEP)
        for (int k = 0; k < LANES; k++)
            step_avx2(to[k] + i, from[k] + i);
}

__attribute__((target("avx512f"))) static void lanes_avx512(char *const *to, const char *const *from, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += STEP)
        for (int k = 0; k < LANES; k++)
            step_avx512(to[k] + i, from[k] + i);
}

/* One piece without neighbours: its parts are the lanes. */
static void copy_alone(char *to, const char *from, size_t nbytes, lanes_fn *lanes) {
    size_t head = head_bytes(to, nbytes);
    memcpy(to, from, head);
    size_t part = (nbytes - head) / LANES / STEP * STEP;
    char *parts_to[LANES];
    const char *parts_from[LANES];
    for (int k = 0; k < LANES; k++) {
        parts_to[k] = to + head + k * part;
        parts_from[k] = from + head + k * part;
    }
    lanes(parts_to, parts_from, part);
    size_t done = head + LANES * part;
    memcpy(to + done, from + done, nbytes - done);
}

/* LANES pieces of any sizes at any addresses. */
static void copy_ragged(char *const *to, const char *const *from, const size_t *nbytes, lanes_fn *lanes) {
    char *body_to[LANES];
    const char *body_from[LANES];
    size_t left[LANES], common = SIZE_MAX;
    for (int k = 0; k < LANES; k++) {
        size_t head = head_bytes(to[k], nbytes[k]);
        memcpy(to[k], from[k], head);
        body_to[k] = to[k] + head;
        body_from[k] = from[k] + head;
        left[k] = nbytes[k] - head;
        common = left[k] < common ? left[k] : common;
    }
    common = common / STEP * STEP;
    lanes(body_to, body_from, common);
    for (int k = 0; k < LANES; k++)
        copy_alone(body_to[k] + common, body_from[k] + common, left[k] - common, lanes);
}

static void copy_lanes(char *const *to, const char *const *from, const size_t *nbytes, lanes_fn *lanes) {
    uintptr_t ragged = nbytes[0] % STEP;
    for (int k = 0; k < LANES; k++)
        ragged |= (uintptr_t)to[k] % LINE | (nbytes[k] ^ nbytes[0]);
    if (ragged)
        copy_ragged(to, from, nbytes, lanes);
    else
        lanes(to, from, nbytes[0]);
}

/* Ask for what the next LANES pieces begin with, or for all of pieces too small for a hardware prefetcher. */
static void prefetch(const batch *ahead, size_t first, int whole) {
    for (size_t i = first; i < first + LANES && i < ahead->n; i++)
        if (!whole)
            _mm_prefetch(ahead->from[i], _MM_HINT_T0);
        else
            for (size_t at = 0; at < ahead->nbytes[i]; at += LINE)
                _mm_prefetch(ahead->from[i] + at, _MM_HINT_T1);
}

static void copy_streaming(cursor at, lanes_fn *lanes) {
    batch batches[2];
    batch *now = &batches[0], *next = &batches[1];
    int small = 1;
    for (size_t s = 0; s < at.n_segments; s++)
        small &= at.segments[s].nbytes <= SMALL_PIECE;
    next_batch(&at, now);
    while (now->n) {
        next_batch(&at, next);
        size_t i = 0;
        for (; i + LANES <= now->n; i += LANES) {
            if (small)
                prefetch(next, i, small);
            else if (i + LANES < now->n)
                prefetch(now, i + LANES, small);
            else
                prefetch(next, 0, small);
            copy_lanes(now->to + i, now->from + i, now->nbytes + i, lanes);
        }
        for (; i < now->n; i++)
            copy_alone(now->to[i], now->from[i], now->nbytes[i], lanes);
        batch *done = now;
        now = next;
        next = done;
    }
    _mm_sfence(); /* streamed stores are weakly ordered: whoever is told "written" must see them */
}

#endif

static int best_kernel(void) {
#ifdef SWAP_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        return KERNEL_AVX512;
    if (__builtin_cpu_supports("avx2"))
        return KERNEL_AVX2;
#endif
    return KERNEL_PLAIN;
}

/* Which build of this interface a loaded library is: a stale one must not be called. */
int nixl_tiers_swap_abi(void) { return SWAP_ABI; }

/* Copy every segment of every pair, engine -> region if to_host (gaps are zeroed), else region -> engine.
 *
 * The caller has checked blocks and places. `kernel` is KERNEL_AUTO, or another of the enum for tests; one that this
 * processor does not have becomes the best that it has. Returns the kernel that ran.
 */
int nixl_tiers_swap(const swap_rows *rows, const swap_segment *segments, size_t n_segments, const swap_gap *gaps,
                    size_t n_gaps, const swap_pair *pairs, size_t n_pairs, int to_host, int kernel) {
    int best = best_kernel();
    if (kernel == KERNEL_AUTO) {
        swap_u64 block_bytes = 0;
        for (size_t s = 0; s < n_segments; s++)
            block_bytes += segments[s].nbytes;
        kernel = block_bytes * n_pairs < STREAM_BYTES ? KERNEL_PLAIN : best;
    } else if (kernel > best) {
        kernel = best;
    }
    if (to_host)
        for (size_t i = 0; i < n_pairs; i++)
            for (size_t g = 0; g < n_gaps; g++)
                memset((char *)(uintptr_t)(swap_place_address(rows, pairs[i].place) + gaps[g].offset), 0,
                       gaps[g].nbytes);
    if (!n_segments || !n_pairs)
        return kernel;
    cursor at = {.rows = rows, .segments = segments, .pairs = pairs, .n_segments = n_segments, .n_pairs = n_pairs,
                 .to_host = to_host};
#ifdef SWAP_X86
    if (kernel == KERNEL_AVX512)
        copy_streaming(at, lanes_avx512);
    else if (kernel == KERNEL_AVX2)
        copy_streaming(at, lanes_avx2);
    else
#endif
        copy_plain(at);
    return kernel;
}
