/* Sealing and verifying a row, as memory/seal.py does it: the format is in docs/reference/formats.md. */
#ifndef NIXL_TIERS_SEAL_H
#define NIXL_TIERS_SEAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "pieces.h"

enum { PAGE = 4096, KEY = 112, HEAD = 80, PRESENT = HEAD + KEY, DIGEST = 16, PIECE_LOG2 = 16, XXH3 = 1 };

/* As `Verdict` of memory/seal.py. */
enum { V_OK, V_NOT_A_SEAL, V_VERSION, V_NAMESPACE, V_KEY, V_SHAPE, V_DIGEST };

struct head {
    uint8_t magic[8];
    uint16_t version, seal_bytes;
    uint32_t flags;
    uint64_t epoch, sealed_at;
    uint8_t space[16];
    uint64_t payload_bytes, cell_payload;
    uint32_t cells, sub_blocks;
    uint8_t piece_log2, hash;
    uint16_t key_bytes;
    uint32_t reserved;
};
_Static_assert(sizeof(struct head) == HEAD, "the head has no padding");

/* How rows lie in memory, in bytes. `seal` and `digests`: room for a thread's seal, and for those of a cell's pieces. */
struct shape {
    uint64_t row_bytes, cell_payload, cell_bytes, seal_bytes;
    uint32_t cells, sub_blocks;
};

struct scratch {
    uint8_t *seal;
    uint64_t *digests;
};

/* Whose rows. */
struct space {
    uint8_t name[16];
    uint64_t epoch;
};

static const uint8_t seal_magic[8] = "nixltier";

static inline void big_endian(hash128 hash, uint8_t to[DIGEST]) {
    uint64_t words[2] = {__builtin_bswap64(hash.high), __builtin_bswap64(hash.low)};
    memcpy(to, words, DIGEST);
}

/* Of a cell, or any part of memory in pieces of this size; copied too if `to` is given. */
static inline void cell_digest(const uint8_t *from, uint8_t *to, size_t nbytes, size_t piece_bytes, uint64_t *digests,
                               uint8_t digest[DIGEST]) {
    size_t done = fast_pieces(to, from, nbytes, piece_bytes, digests), n = (done + piece_bytes - 1) / piece_bytes;
    for (; done < nbytes; done += piece_bytes) {
        size_t size = nbytes - done < piece_bytes ? nbytes - done : piece_bytes;
        const uint8_t *piece = from + done;
        if (to)
            piece = memcpy(to + done, piece, size); /* the digest is that of the copy */
        digests[n++] = __builtin_bswap64(xxh3_64(piece, size));
    }
    big_endian(xxh3_128((const uint8_t *)digests, 8 * n), digest);
}

/* Where what is neither payload nor seal begins behind a cell, and where it ends. */
static inline size_t gap_at(const struct shape *shape, uint32_t cell) {
    return cell * shape->cell_bytes + shape->cell_payload;
}

static inline size_t gap_end(const struct shape *shape, uint32_t cell) {
    return cell + 1 < shape->cells ? (cell + 1) * shape->cell_bytes : shape->row_bytes - shape->seal_bytes;
}

/* `copy`, whose payload is there, becomes the row: gaps and seal. */
static inline void complete(const struct shape *shape, uint8_t *copy, const uint8_t *seal) {
    for (uint32_t cell = 0; cell < shape->cells; cell++)
        memset(copy + gap_at(shape, cell), 0, gap_end(shape, cell) - gap_at(shape, cell));
    memcpy(copy + shape->row_bytes - shape->seal_bytes, seal, shape->seal_bytes);
}

/* Seal `row` in place; `copy`, if given, becomes the sealed row too. The first `missing` sub-blocks hold nothing. */
static inline void seal_row(const struct shape *shape, const struct space *space, uint8_t *row, uint8_t *copy,
                            const uint8_t key[KEY], size_t key_bytes, uint32_t missing, uint64_t sealed_at,
                            struct scratch scratch) {
    uint8_t *seal = scratch.seal, *digest = seal + shape->seal_bytes - DIGEST * (shape->cells + 1);
    struct head head = {.version = 1, .seal_bytes = (uint16_t)shape->seal_bytes, .epoch = space->epoch,
                        .sealed_at = sealed_at, .payload_bytes = shape->cells * shape->cell_payload,
                        .cell_payload = shape->cell_payload, .cells = shape->cells, .sub_blocks = shape->sub_blocks,
                        .piece_log2 = PIECE_LOG2, .hash = XXH3, .key_bytes = (uint16_t)key_bytes};
    memcpy(head.magic, seal_magic, sizeof head.magic);
    memcpy(head.space, space->name, sizeof head.space);
    memset(seal, 0, shape->seal_bytes);
    memcpy(seal, &head, HEAD);
    memcpy(seal + HEAD, key, key_bytes);
    missing = missing < shape->sub_blocks ? missing : shape->sub_blocks;
    for (uint32_t bit = missing; bit < shape->sub_blocks; bit++)
        seal[PRESENT + bit / 8] |= (uint8_t)(1 << bit % 8);
    for (uint32_t cell = 0; cell < shape->cells; cell++) {
        size_t at = cell * shape->cell_bytes, gap = gap_at(shape, cell);
        memset(row + at, 0, missing * (shape->cell_payload / shape->sub_blocks));
        memset(row + gap, 0, gap_end(shape, cell) - gap);
        cell_digest(row + at, copy ? copy + at : NULL, shape->cell_payload, (size_t)1 << PIECE_LOG2, scratch.digests,
                    digest + DIGEST * cell);
    }
    size_t rest = shape->seal_bytes - DIGEST;
    big_endian(xxh3_128(seal, rest), seal + rest);
    memcpy(row + shape->row_bytes - shape->seal_bytes, seal, shape->seal_bytes);
    if (copy)
        complete(shape, copy, seal);
}

/* Whether `row` is that of the key, every bit of it; if so, `copy`, if given, is the row from now on. */
static inline int verify_row(const struct shape *shape, const struct space *space, const uint8_t *row, uint8_t *copy,
                             const uint8_t key[KEY], size_t key_bytes, struct scratch scratch) {
    uint8_t *seal = scratch.seal, *digest = seal + shape->seal_bytes - DIGEST * (shape->cells + 1);
    uint8_t found[DIGEST];
    struct head head;
    memcpy(seal, row + shape->row_bytes - shape->seal_bytes, shape->seal_bytes);
    memcpy(&head, seal, HEAD);
    if (memcmp(head.magic, seal_magic, sizeof head.magic))
        return V_NOT_A_SEAL;
    if (head.version != 1 || head.flags || head.hash != XXH3 || head.piece_log2 < 10 || head.piece_log2 > 40)
        return V_VERSION;
    size_t rest = shape->seal_bytes - DIGEST;
    big_endian(xxh3_128(seal, rest), found);
    if (memcmp(seal + rest, found, DIGEST))
        return V_DIGEST;
    if (head.seal_bytes != shape->seal_bytes || head.payload_bytes != shape->cells * shape->cell_payload ||
        head.cell_payload != shape->cell_payload || head.cells != shape->cells ||
        head.sub_blocks != shape->sub_blocks)
        return V_SHAPE;
    if (memcmp(head.space, space->name, sizeof head.space) || head.epoch != space->epoch)
        return V_NAMESPACE;
    if (head.key_bytes != key_bytes || memcmp(seal + HEAD, key, KEY))
        return V_KEY;
    for (uint32_t cell = 0; cell < shape->cells; cell++) {
        uint8_t any = 0;
        for (size_t at = gap_at(shape, cell); at < gap_end(shape, cell); at++)
            any |= row[at];
        if (any)
            return V_DIGEST;
    }
    for (uint32_t cell = 0; cell < shape->cells; cell++) {
        size_t at = cell * shape->cell_bytes;
        cell_digest(row + at, copy ? copy + at : NULL, shape->cell_payload, (size_t)1 << head.piece_log2,
                    scratch.digests, found);
        if (memcmp(digest + DIGEST * cell, found, DIGEST))
            return V_DIGEST;
    }
    if (copy)
        complete(shape, copy, seal);
    return V_OK;
}

#endif
