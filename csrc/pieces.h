/* The pieces of a row's cell: hashed with XXH3-64, or hashed and copied in one pass.
 *
 * The bytes that are copied are those in the registers that were hashed, so the digest is that of the copy whatever
 * happens to the source. Copies are streamed past the caches. Pieces do not depend on each other: LANES of them advance
 * in lock-step, one block of each in turn, so that many pages are under way at once (see swap_cpu.c).
 */
#ifndef NIXL_TIERS_PIECES_H
#define NIXL_TIERS_PIECES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "xxh3.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define PIECES_X86 1
#include <immintrin.h>

enum { LANES = 8, VECTOR = 32, AHEAD = 2 * BLOCK };

typedef struct {
    __m256i v[2];
} state;

#define INLINE __attribute__((target("avx2"), always_inline)) static inline

INLINE void stripe(state *acc, const uint8_t *from, const uint8_t *key, uint8_t *to) {
    for (int i = 0; i < 2; i++) {
        __m256i data = _mm256_loadu_si256((const __m256i *)(from + 32 * i));
        __m256i mixed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)(key + 32 * i)));
        __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
        __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
        acc->v[i] = _mm256_add_epi64(product, _mm256_add_epi64(acc->v[i], swapped));
        if (to)
            _mm256_stream_si256((__m256i *)(to + 32 * i), data);
    }
}

INLINE void block(state *acc, const uint8_t *from, uint8_t *to) {
    state now = *acc;
    for (int n = 0; n < STRIPES; n++) {
        if (!to) /* processors prefetch up to the end of a page; it takes a fifth off, and nothing off a copy */
            _mm_prefetch((const char *)from + n * STRIPE + AHEAD, _MM_HINT_T0);
        stripe(&now, from + n * STRIPE, secret + 8 * n, to ? to + n * STRIPE : NULL);
    }
    for (int i = 0; i < 2; i++) {
        __m256i v = now.v[i];
        v = _mm256_xor_si256(v, _mm256_srli_epi64(v, 47));
        v = _mm256_xor_si256(v, _mm256_loadu_si256((const __m256i *)(secret + SECRET - STRIPE + 32 * i)));
        __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
        __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(v, 32), prime), 32);
        now.v[i] = _mm256_add_epi64(_mm256_mul_epu32(v, prime), high);
    }
    *acc = now;
}

/* The digest of a piece of `nbytes`, whose whole blocks are in `acc`; copies what is left of it. */
INLINE uint64_t finish(state *acc, const uint8_t *from, uint8_t *to, size_t nbytes) {
    size_t at = (nbytes - 1) / BLOCK * BLOCK;
    for (const uint8_t *key = secret; at + STRIPE < nbytes; at += STRIPE, key += 8)
        stripe(acc, from + at, key, to ? to + at : NULL);
    if (to)
        memcpy(to + at, from + at, nbytes - at);
    /* The last stripe overlaps with the one before it: read from the copy, so that nothing is read twice. */
    stripe(acc, (to ? to : from) + nbytes - STRIPE, secret + SECRET - STRIPE - 7, NULL);
    uint64_t words[8];
    memcpy(words, acc, sizeof words);
    return merged(words, secret + 11, nbytes * PRIME64_1);
}

/* `n` (at most LANES) pieces of `nbytes`, one after the other in memory, in lock-step. */
INLINE void lock_step(const uint8_t *from, uint8_t *to, size_t nbytes, size_t n, uint64_t *digests) {
    state acc[LANES];
    for (size_t k = 0; k < n; k++) {
        acc[k].v[0] = _mm256_set_epi64x((long long)PRIME64_3, (long long)PRIME64_2, (long long)PRIME64_1, PRIME32_3);
        acc[k].v[1] = _mm256_set_epi64x(PRIME32_1, (long long)PRIME64_5, PRIME32_2, (long long)PRIME64_4);
    }
    for (size_t at = 0; at + BLOCK < nbytes; at += BLOCK)
        for (size_t k = 0; k < n; k++)
            block(&acc[k], from + k * nbytes + at, to ? to + k * nbytes + at : NULL);
    for (size_t k = 0; k < n; k++)
        digests[k] = __builtin_bswap64(finish(&acc[k], from + k * nbytes, to ? to + k * nbytes : NULL, nbytes));
}

__attribute__((target("avx2"))) static void copied(const uint8_t *from, uint8_t *to, size_t nbytes, size_t n,
                                                   uint64_t *digests) {
    lock_step(from, to, nbytes, n, digests);
}

__attribute__((target("avx2"))) static void hashed(const uint8_t *from, uint8_t *to, size_t nbytes, size_t n,
                                                   uint64_t *digests) {
    (void)to;
    lock_step(from, NULL, nbytes, n, digests);
}
#endif

/* Hash `nbytes` in pieces of `piece_bytes`, the last one perhaps short, and write the digest of each, big-endian; copy
 * them too if `to` is given. The ranges do not overlap.
 *
 * Returns how many bytes that were: a last piece of up to 240 bytes is left to the caller, and everything is where this
 * processor cannot do it, or where `to` or `piece_bytes` is no multiple of 32.
 */
static inline size_t fast_pieces(uint8_t *to, const uint8_t *from, size_t nbytes, size_t piece_bytes,
                                 uint64_t *digests) {
    size_t done = 0;
#ifdef PIECES_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || (uintptr_t)to % VECTOR || piece_bytes % VECTOR || piece_bytes < SHORTEST)
        return 0;
    while (nbytes - done >= SHORTEST) {
        size_t left = nbytes - done, size = left < piece_bytes ? left : piece_bytes, n = left / size;
        n = n < LANES ? n : LANES;
        (to ? copied : hashed)(from + done, to ? to + done : NULL, size, n, digests);
        done += n * size;
        digests += n;
    }
    if (to)
        _mm_sfence(); /* streamed stores are weakly ordered: whoever is told that the row is there must see them */
#else
    (void)to, (void)from, (void)nbytes, (void)piece_bytes, (void)digests;
#endif
    return done;
}

#endif
