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

#define SWAP_ABI 1

enum { LANES = 8, STEP = 256, LINE = 64 };

/* Below this much the destination may well be in a cache already, and ordinary stores find it there. */
#define STREAM_BYTES ((swap_u64)512 << 10)

/* Pieces this small end before a hardware prefetcher has noticed them: their lines are asked for well ahead. */
enum { SMALL_PIECE = 768, SMALL_AHEAD = 64 };

enum { KERNEL_AUTO = 0, KERNEL_PLAIN = 1, KERNEL_AVX2 = 2, KERNEL_AVX512 = 3 };

typedef struct {
    char *to;
    const char *from;
    size_t nbytes;
} piece;

/* Walks all pieces of a transfer: pair by pair, so that one side is nearly sequential, and segment by segment. */
typedef struct {
    const swap_rows *rows;
    const swap_segment *segments;
    const swap_pair *pairs;
    size_t n_segments, n_pairs, pair, segment;
    int to_host;
} cursor;

static int next_piece(cursor *at, piece *out) {
    if (at->pair == at->n_pairs)
        return 0;
    swap_pair pair = at->pairs[at->pair];
    const swap_segment *segment = &at->segments[at->segment];
    char *page = (char *)(uintptr_t)swap_page_address(segment, pair.block);
    char *place = (char *)(uintptr_t)(swap_place_address(at->rows, pair.place) + segment->offset);
    out->to = at->to_host ? place : page;
    out->from = at->to_host ? page : place;
    out->nbytes = segment->nbytes;
    if (++at->segment == at->n_segments) {
        at->segment = 0;
        at->pair++;
    }
    return 1;
}

static void copy_plain(cursor at) {
    piece p;
    while (next_piece(&at, &p))
        memcpy(p.to, p.from, p.nbytes);
}

#ifdef SWAP_X86

/* `nbytes` (a multiple of STEP) of each of LANES pieces; destinations stand on cache lines. */
typedef void lanes_fn(char *const *to, const char *const *from, size_t nbytes);
/* The same for one piece. */
typedef void lane_fn(char *to, const char *from, size_t nbytes);

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

#define STREAMER(NAME, ISA)                                                                             \
    __attribute__((target(ISA))) static void lanes_##NAME(char *const *to, const char *const *from,     \
                                                          size_t nbytes) {                              \
        for (size_t i = 0; i < nbytes; i += STEP)                                                       \
            for (int k = 0; k < LANES; k++)                                                             \
                step_##NAME(to[k] + i, from[k] + i);                                                    \
    }                                                                                                   \
    __attribute__((target(ISA))) static void lane_##NAME(char *to, const char *from, size_t nbytes) {   \
        for (size_t i = 0; i < nbytes; i += STEP)                                                       \
            step_##NAME(to + i, from + i);                                                              \
    }

STREAMER(avx2, "avx2")
STREAMER(avx512, "avx512f")

/* What a lane has left when its neighbours are done, or a piece without neighbours. `to` stands on a cache line. */
static void finish(piece p, lanes_fn *lanes, lane_fn *lane) {
    size_t part = p.nbytes / LANES / STEP * STEP;
    if (part) {
        char *to[LANES];
        const char *from[LANES];
        for (int k = 0; k < LANES; k++) {
            to[k] = p.to + k * part;
            from[k] = p.from + k * part;
        }
        lanes(to, from, part);
    }
    size_t done = part * LANES;
    size_t steps = (p.nbytes - done) / STEP * STEP;
    lane(p.to + done, p.from + done, steps);
    done += steps;
    if (p.nbytes > done)
        memcpy(p.to + done, p.from + done, p.nbytes - done);
}

static void prefetch(cursor *ahead) {
    piece p;
    if (!next_piece(ahead, &p))
        return;
    if (p.nbytes <= SMALL_PIECE)
        for (size_t i = 0; i < p.nbytes; i += LINE)
            _mm_prefetch(p.from + i, _MM_HINT_T1);
    else
        _mm_prefetch(p.from, _MM_HINT_T0);
}

static void copy_streaming(cursor at, lanes_fn *lanes, lane_fn *lane) {
    cursor ahead = at;
    piece p;
    size_t lead = at.segments[0].nbytes <= SMALL_PIECE ? SMALL_AHEAD : LANES;
    while (lead-- && next_piece(&ahead, &p))
        ;
    char *to[LANES];
    const char *from[LANES];
    size_t left[LANES];
    int filled = 0;
    while (next_piece(&at, &p)) {
        prefetch(&ahead);
        size_t head = -(uintptr_t)p.to % LINE;
        if (p.nbytes < head + STEP) {
            memcpy(p.to, p.from, p.nbytes);
            continue;
        }
        if (head)
            memcpy(p.to, p.from, head);
        to[filled] = p.to + head;
        from[filled] = p.from + head;
        left[filled] = p.nbytes - head;
        if (++filled < LANES)
            continue;
        size_t common = left[0];
        for (int k = 1; k < LANES; k++)
            common = left[k] < common ? left[k] : common;
        common = common / STEP * STEP;
        lanes(to, from, common);
        for (int k = 0; k < LANES; k++)
            if (left[k] > common)
                finish((piece){to[k] + common, from[k] + common, left[k] - common}, lanes, lane);
        filled = 0;
    }
    for (int k = 0; k < filled; k++)
        finish((piece){to[k], from[k], left[k]}, lanes, lane);
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
        copy_streaming(at, lanes_avx512, lane_avx512);
    else if (kernel == KERNEL_AVX2)
        copy_streaming(at, lanes_avx2, lane_avx2);
    else
#endif
        copy_plain(at);
    return kernel;
}
