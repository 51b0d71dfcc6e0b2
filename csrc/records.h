/* The file of records of a shard, for the threads that move its rows: which key is in which slot (tiers/slab/journal.py;
 * the bytes are in docs/reference/formats.md).
 *
 * Every record is written here, inside one lock and into the page cache, from which a kill takes nothing. Before a slot
 * is written over its record becomes "unknown", which is all zeroes; once the row is there it names the row. So none
 * ever stands over other bytes than its own. Where records cannot be written, the header gets the ID of no boot, which
 * has the next open take no slot for empty, and rows go on without records until they can be written again. Where not
 * even the header can be written, no row may be.
 */
#ifndef NIXL_TIERS_RECORDS_H
#define NIXL_TIERS_RECORDS_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "seal.h"

enum { RECORD = 128, SPAN = 64 /* records at a time */, HEADER = 64 };
#define MAX_TICK ((1ULL << 40) - 1)

struct record {
    uint32_t check_low;
    uint16_t check_high;
    uint8_t key_bytes, tick_high;
    uint32_t tick_low, sealed_at;
    uint8_t key[KEY];
};
_Static_assert(sizeof(struct record) == RECORD, "a record has no padding");

struct records {
    pthread_mutex_t lock; /* of what follows, and of the file */
    int fd, error;        /* `error`: why no records are written now, which the header says; 0: they are */
    int lost;             /* why a flush has failed, so that none of the next says what is missing; 0: none has */
    bool marked;          /* the header says that the file is open */
    uint64_t salt, room;  /* `room`: how many slots have a place in the file */
    struct headers {
        uint8_t opened[HEADER], distrusted[HEADER], closed[HEADER];
    } headers;
};

/* As `SLOT` of journal.py: what the record of a slot says, or is to say. To be written: NOTHING once a store into
 * the slot has begun; ROW: with the key, or the one of this tag that the file has; if it has another one, the slot is
 * unknown. */
enum { NOTHING, UNKNOWN, EMPTY, ROW };
struct content {
    uint64_t tag, tick;
    uint32_t slot, sealed_at, what;
    uint8_t key_bytes, key[KEY], reserved[3];
};

/* XXH3-64 of the padded key, seeded with its length; 0: no key. */
static inline uint64_t tag_of(const uint8_t key[KEY], uint64_t key_bytes) {
    uint64_t sum = KEY * PRIME64_1;
    for (int i = 3; i >= 0; i--)
        for (int j = 0; j < 2; j++) {
            const uint8_t *from = key + (j ? KEY - 16 * (i + 1) : 16 * i), *with = secret + 32 * i + 16 * j;
            sum += fold(read64(from) ^ (read64(with) + key_bytes), read64(from + 8) ^ (read64(with + 8) - key_bytes));
        }
    sum = key_bytes ? avalanche(sum) : 0;
    return sum || !key_bytes ? sum : 1;
}

static inline uint64_t check_of(const struct record *record, uint64_t tag, uint32_t slot, uint64_t salt) {
    static const uint64_t multipliers[3] = {0x9FB21C651E98DF25, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB};
    uint64_t words[3] = {slot, record->tick_low | (uint64_t)record->tick_high << 32,
                         record->sealed_at | (uint64_t)record->key_bytes << 32};
    uint64_t check = tag ^ salt;
    for (int i = 0; i < 3; i++) {
        check = (check ^ words[i]) * multipliers[i];
        check ^= check >> 32;
    }
    return (check & ((1ULL << 48) - 1)) | 1;
}

static inline bool is_of(const struct record *record, uint64_t tag, uint32_t slot, uint64_t salt) {
    return (record->check_low | (uint64_t)record->check_high << 32) == check_of(record, tag, slot, salt);
}

/* The record of a slot whose key, if any, is there already. */
static inline void complete_record(struct record *record, uint64_t tick, uint64_t sealed_at, uint32_t slot,
                                   uint64_t salt) {
    tick = tick < MAX_TICK ? tick : MAX_TICK;
    record->tick_low = (uint32_t)tick;
    record->tick_high = (uint8_t)(tick >> 32);
    record->sealed_at = sealed_at < UINT32_MAX ? (uint32_t)sealed_at : UINT32_MAX;
    uint64_t check = check_of(record, tag_of(record->key, record->key_bytes), slot, salt);
    record->check_low = (uint32_t)check;
    record->check_high = (uint16_t)(check >> 32);
}

static inline void make_record(struct record *record, const uint8_t key[KEY], uint8_t key_bytes, uint64_t tick,
                               uint64_t sealed_at, uint32_t slot, uint64_t salt) {
    memset(record, 0, sizeof *record);
    memcpy(record->key, key, key_bytes);
    record->key_bytes = key_bytes;
    complete_record(record, tick, sealed_at, slot, salt);
}

/* --- inside the lock: 0, or an errno ------------------------------------------------------------------------------- */

static int write_at(const struct records *records, const void *from, size_t nbytes, uint64_t at) {
    for (size_t done = 0; done < nbytes;) {
        ssize_t wrote = pwrite(records->fd, (const uint8_t *)from + done, nbytes - done, (off_t)(at + done));
        if (wrote < 0 && errno != EINTR)
            return errno;
        done += wrote > 0 ? (size_t)wrote : 0;
    }
    return 0;
}

static int flush(struct records *records) {
    if (fdatasync(records->fd) == 0)
        return 0;
    memcpy(records->headers.opened, records->headers.distrusted, HEADER);
    return records->lost = errno;
}

/* The first time it is flushed, else a power failure could leave the old header over new records. */
static int write_header(struct records *records, const uint8_t *header) {
    int error = write_at(records, header, HEADER, 0);
    error = error || records->marked ? error : flush(records);
    records->marked = records->marked || !error;
    return error;
}

static int mark_open(struct records *records) {
    return records->marked ? 0 : write_header(records, records->headers.opened);
}

/* A flush has failed: have the next process know it, if only by an empty file. */
static void admit_loss(struct records *records) {
    if (write_at(records, records->headers.distrusted, HEADER, 0) && ftruncate(records->fd, 0) < 0)
        records->lost = errno;
}

/* A record could not be written. Negative if not even the header can be. */
static int distrust(struct records *records, int error) {
    return write_header(records, records->headers.distrusted) ? -error : (records->error = error);
}

/* Write the records of these slots, neighbours together, but for those that have no room. NULL: unknown. */
static int write_records(const struct records *records, const uint32_t *slots, const struct record *made, uint32_t n) {
    static const struct record unknown[SPAN];
    int error = 0;
    for (uint32_t i = 0, run; i < n && !error; i += run) {
        for (run = 1; i + run < n && run < SPAN && slots[i + run] == slots[i] + run; run++)
            ;
        uint64_t room = records->room > slots[i] ? records->room - slots[i] : 0;
        error = write_at(records, made ? made + i : unknown, RECORD * (run < room ? run : room),
                         PAGE + RECORD * (uint64_t)slots[i]);
    }
    return error;
}

/* Bring the records of some slots, of less than SPAN from the first to the last, to what changes say. */
static int amend(struct records *records, const struct content *changes, uint32_t n) {
    struct record found[SPAN] = {0}, made[SPAN];
    uint32_t slots[SPAN], count = 0, first = changes[0].slot;
    size_t nbytes = RECORD * (changes[n - 1].slot - first + 1UL);
    int error = mark_open(records);
    if (!error && pread(records->fd, found, nbytes, (off_t)(PAGE + RECORD * (uint64_t)first)) < 0)
        error = errno;
    for (uint32_t i = 0; i < n; i++) {
        const struct content *change = &changes[i];
        uint32_t what = __atomic_load_n(&change->what, __ATOMIC_RELAXED), slot = change->slot;
        struct record *record = &made[count], *old = &found[slot - first];
        if (what == NOTHING)
            continue;
        slots[count++] = slot;
        memset(record, 0, sizeof *record);
        if (what == EMPTY || (what == ROW && change->key_bytes)) {
            make_record(record, change->key, change->key_bytes, change->tick, change->sealed_at, slot, records->salt);
        } else if (what == ROW && is_of(old, change->tag, slot, records->salt)) {
            uint64_t tick = old->tick_low | (uint64_t)old->tick_high << 32;
            *record = *old;
            complete_record(record, tick > change->tick ? tick : change->tick, change->sealed_at, slot, records->salt);
        }
    }
    return error ? error : write_records(records, slots, made, count);
}

/* --- for the threads that move rows -------------------------------------------------------------------------------- */

/* `write_records`, unless none are written now. 0; an errno: the file has no such records; negative: and nothing may be
 * written into these slots, as the file may say that they hold something else. */
static inline int put_records(struct records *records, const uint32_t *slots, const struct record *made, uint32_t n) {
    pthread_mutex_lock(&records->lock);
    int error = records->error;
    if (!error) {
        error = mark_open(records);
        error = error ? error : write_records(records, slots, made, n);
        error = error ? distrust(records, error) : 0;
    }
    pthread_mutex_unlock(&records->lock);
    return error;
}

/* --- for Python ---------------------------------------------------------------------------------------------------- */

/* Marks the header, so that no thread that moves rows waits for its flush, unless that fails now. NULL: no memory.
 * `lost`: why what was written before is not all on the disk; 0: nothing says so. */
struct records *nixl_tiers_records_new(int fd, uint64_t salt, const struct headers *headers, int *lost) {
    struct records *records = calloc(1, sizeof *records);
    if (!records)
        return NULL;
    records->fd = fd;
    records->salt = salt;
    records->headers = *headers;
    pthread_mutex_init(&records->lock, NULL);
    if ((*lost = flush(records)))
        admit_loss(records);
    mark_open(records);
    return records;
}

/* The file has room for so many records. */
void nixl_tiers_records_room(struct records *records, uint64_t slots) {
    pthread_mutex_lock(&records->lock);
    records->room = slots;
    pthread_mutex_unlock(&records->lock);
}

/* Make these changes, in order of their slots, also while no records are written otherwise. `all`: once they are made
 * nothing is missing, and records are written again. One that fails meanwhile is made by a later call, as the columns
 * say; until the file is closed the header distrusts it all the same. As `put_records`. */
int nixl_tiers_records_amend(struct records *records, const struct content *changes, uint32_t n, int all) {
    int error = 0;
    for (uint32_t i = 0, run; i < n && !error; i += run) {
        for (run = 1; i + run < n && changes[i + run].slot - changes[i].slot < SPAN; run++)
            ;
        pthread_mutex_lock(&records->lock);
        error = amend(records, changes + i, run);
        error = error ? distrust(records, error) : 0;
        pthread_mutex_unlock(&records->lock);
    }
    pthread_mutex_lock(&records->lock);
    records->error = all && !error ? 0 : records->error;
    pthread_mutex_unlock(&records->lock);
    return error;
}

/* What these records of the slots from `first` on say. */
void nixl_tiers_records_decode(const struct record *found, uint32_t first, uint32_t n, uint64_t salt,
                               struct content *contents) {
    for (uint32_t i = 0; i < n; i++) {
        const struct record *record = &found[i];
        struct content *to = &contents[i];
        uint64_t tag = tag_of(record->key, record->key_bytes);
        *to = (struct content){.slot = first + i, .what = UNKNOWN};
        if (record->key_bytes > KEY || !is_of(record, tag, first + i, salt))
            continue;
        to->what = record->key_bytes ? ROW : EMPTY;
        to->tag = tag;
        to->tick = record->tick_low | (uint64_t)record->tick_high << 32;
        to->sealed_at = record->sealed_at;
        to->key_bytes = record->key_bytes;
        memcpy(to->key, record->key, KEY);
    }
}

/* Nobody uses it any more. `right`: so are all records: make them durable, and say so, unless an earlier flush has
 * failed: this one would not report again what was lost then. */
void nixl_tiers_records_close(struct records *records, int right) {
    if (right && records->marked && !records->lost &&
        (flush(records) || write_at(records, records->headers.closed, HEADER, 0)))
        admit_loss(records);
    pthread_mutex_destroy(&records->lock);
    free(records);
}

#endif
