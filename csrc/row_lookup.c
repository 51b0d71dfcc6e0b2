/* Which of many keys have a row in a row table, in one call.
 *
 * The layout is in nixl_tiers/memory/row_table_format.py. A key costs one or two cache lines that are in no cache, so
 * BLOCK keys advance together: the lines of all of them are fetched before the first is looked at. The hash is XXH3-64
 * with a seed and the default secret, for keys of 17 to 128 bytes:
 * https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "xxh3.h"

#define ROW_LOOKUP_ABI 1

enum { BLOCK = 32, SHORTEST = 17, LONGEST = 128, ENTRY = 8, FILTER_WIDTH = 28, FILTER_MASK = 1023 };

#define REMOVED 0xFFFFFFFFU

/* A table in memory; in bytes from its start: where its words are, and the record of its first row. */
typedef struct {
    const uint8_t *memory;
    uint64_t words, buckets, rows, records, row_bytes, record_bytes, seed;
} table;

static uint64_t mix(const uint8_t *key, const uint8_t *with, uint64_t seed) {
    uint64_t a = read64(key) ^ (read64(with) + seed), b = read64(key + 8) ^ (read64(with + 8) - seed);
    return fold(a, b);
}

static uint64_t hash(const uint8_t *key, size_t length, uint64_t seed) {
    uint64_t sum = length * PRIME64_1;
    for (size_t n = (length - 1) / 32 + 1; n-- > 0;) {
        sum += mix(key + 16 * n, secret + 32 * n, seed);
        sum += mix(key + length - 16 * (n + 1), secret + 32 * n + 16, seed);
    }
    return avalanche(sum);
}

/* Whether a row from number `first` to `last` is that of `key`. A table may be another process's: nothing beyond it is
 * read, whatever its words say. */
static int has(const table *of, uint64_t first, uint64_t last, const uint8_t *key, size_t length) {
    for (last = last < of->rows ? last : of->rows; first < last; first++) {
        const uint8_t *record = of->memory + of->records + first * of->row_bytes;
        uint32_t slot;
        memcpy(&slot, record - ENTRY, sizeof slot);
        if (record[0] == length && slot != REMOVED && !memcmp(record + 1, key, length))
            return 1;
    }
    return 0;
}

/* Which build of this interface a loaded library is: a stale one must not be called. */
int nixl_tiers_row_lookup_abi(void) { return ROW_LOOKUP_ABI; }

/* Set those of `found` (uint8, `count` of them) to 1 whose key has a row in the table; leave the others. `keys`: one
 * after the other, each of `length` bytes. Returns 0 if it has done nothing, since it does not know the hash of keys of
 * this length. */
int nixl_tiers_row_lookup(const table *of, const uint8_t *keys, size_t count, size_t length, uint8_t *found) {
    if (length < SHORTEST || length > LONGEST)
        return 0;
    if (length >= of->record_bytes)
        return 1;
    const uint64_t *words = (const uint64_t *)(of->memory + of->words);
    for (size_t start = 0; start < count; start += BLOCK) {
        const uint64_t *bucket[BLOCK];
        uint64_t first[BLOCK], filter[BLOCK];
        size_t n = count - start < BLOCK ? count - start : BLOCK;
        for (size_t i = 0; i < n; i++) {
            uint64_t hashed = hash(keys + (start + i) * length, length, of->seed), bits = hashed & FILTER_MASK;
            bucket[i] = words + hashed % of->buckets;
            filter[i] = 1ULL << bits % FILTER_WIDTH | 1ULL << bits / FILTER_WIDTH % FILTER_WIDTH;
            __builtin_prefetch(bucket[i]);
        }
        for (size_t i = 0; i < n; i++) {
            uint64_t at = bucket[i][0] >> FILTER_WIDTH;
            first[i] = at < of->records ? of->rows : (at - of->records) / of->row_bytes;
            first[i] = bucket[i][0] & filter[i] ? of->rows : first[i];
            if (first[i] < of->rows)
                __builtin_prefetch(of->memory + of->records + first[i] * of->row_bytes);
        }
        for (size_t i = 0; i < n; i++) {
            uint64_t end = bucket[i][1] >> FILTER_WIDTH;
            if (first[i] < of->rows && end > of->records)
                found[start + i] |= has(of, first[i], (end - of->records) / of->row_bytes, keys + (start + i) * length,
                                        length);
        }
    }
    return 1;
}
