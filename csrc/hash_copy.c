/* The pieces of a row's cell, hashed and copied in one pass.
 *
 * The hash is XXH3-64 with seed 0 and the default secret, for pieces of more than 240 bytes:
 * https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md. The bytes that are stored are those in the registers
 * that were hashed, so the digest is that of the copy whatever happens to the source. Stores are streamed past the
 * caches. Pieces do not depend on each other: LANES of them advance in lock-step, one block of each in turn, so that
 * many pages are under way at once (see swap_cpu.c).
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define HASH_COPY_ABI 1

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HASH_COPY_X86 1
#include <immintrin.h>

enum { STRIPE = 64, STRIPES = 16, BLOCK = STRIPE * STRIPES, LANES = 8, SECRET = 192, SHORTEST = 241, VECTOR = 32 };

static const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d,
    0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0,
    0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0,
    0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b,
    0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac,
    0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51,
    0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34,
    0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49,
    0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8,
    0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b,
    0x40, 0x7e,
};

#define PRIME32_1 0x9E3779B1ULL
#define PRIME32_2 0x85EBCA77ULL
#define PRIME32_3 0xC2B2AE3DULL
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL

typedef struct {
    __m256i v[2];
} state;

__attribute__((target("avx2"), always_inline)) static inline void stripe(state *acc, const uint8_t *from,
                                                                         const uint8_t *key, uint8_t *to) {
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

__attribute__((target("avx2"), always_inline)) static inline void block(state *acc, const uint8_t *from, uint8_t *to) {
    state now = *acc;
    for (int n = 0; n < STRIPES; n++)
        stripe(&now, from + n * STRIPE, secret + 8 * n, to + n * STRIPE);
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

static uint64_t read64(const void *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* The digest of a piece of `nbytes`, whose whole blocks are in `acc`; copies what is left of it. */
__attribute__((target("avx2"))) static uint64_t finish(state *acc, const uint8_t *from, uint8_t *to, size_t nbytes) {
    size_t at = (nbytes - 1) / BLOCK * BLOCK;
    for (const uint8_t *key = secret; at + STRIPE < nbytes; at += STRIPE, key += 8)
        stripe(acc, from + at, key, to + at);
    memcpy(to + at, from + at, nbytes - at);
    /* The last stripe overlaps with the one before it: read from the copy, so that nothing is read twice. */
    stripe(acc, to + nbytes - STRIPE, secret + SECRET - STRIPE - 7, NULL);
    uint64_t words[8], digest = nbytes * PRIME64_1;
    memcpy(words, acc, sizeof words);
    for (int i = 0; i < 4; i++)
        digest += fold(words[2 * i] ^ read64(secret + 11 + 16 * i), words[2 * i + 1] ^ read64(secret + 19 + 16 * i));
    digest ^= digest >> 37;
    digest *= 0x165667919E3779F9ULL;
    return digest ^ digest >> 32;
}

__attribute__((target("avx2"))) static void begin(state *acc) {
    acc->v[0] = _mm256_set_epi64x((long long)PRIME64_3, (long long)PRIME64_2, (long long)PRIME64_1, PRIME32_3);
    acc->v[1] = _mm256_set_epi64x(PRIME32_1, (long long)PRIME64_5, PRIME32_2, (long long)PRIME64_4);
}

/* `n` (at most LANES) pieces of `nbytes`, one after the other in memory, in lock-step. */
__attribute__((target("avx2"))) static void pieces(const uint8_t *from, uint8_t *to, size_t nbytes, size_t n,
                                                   uint64_t *digests) {
    state acc[LANES];
    for (size_t k = 0; k < n; k++)
        begin(&acc[k]);
    for (size_t at = 0; at + BLOCK < nbytes; at += BLOCK)
        for (size_t k = 0; k < n; k++)
            block(&acc[k], from + k * nbytes + at, to + k * nbytes + at);
    for (size_t k = 0; k < n; k++)
        digests[k] = __builtin_bswap64(finish(&acc[k], from + k * nbytes, to + k * nbytes, nbytes));
}
#endif

/* Which build of this interface a loaded library is: a stale one must not be called. */
int nixl_tiers_hash_copy_abi(void) { return HASH_COPY_ABI; }

/* Copy `nbytes` in pieces of `piece_bytes`, the last one perhaps short, and write the digest of each, big-endian.
 *
 * The ranges do not overlap. Returns how many bytes were copied: a last piece of up to 240 bytes is left to the caller,
 * and everything is where this processor cannot do it, or where `to` or `piece_bytes` is no multiple of 32.
 */
size_t nixl_tiers_hash_copy(uint8_t *to, const uint8_t *from, size_t nbytes, size_t piece_bytes, uint64_t *digests) {
    size_t done = 0;
#ifdef HASH_COPY_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || (uintptr_t)to % VECTOR || piece_bytes % VECTOR || piece_bytes < SHORTEST)
        return 0;
    while (nbytes - done >= SHORTEST) {
        size_t left = nbytes - done, size = left < piece_bytes ? left : piece_bytes, n = left / size;
        n = n < LANES ? n : LANES;
        pieces(from + done, to + done, size, n, digests);
        done += n * size;
        digests += n;
    }
    _mm_sfence(); /* streamed stores are weakly ordered: whoever is told that the row is there must see them */
#endif
    return done;
}
