/* The table of tier_rows.c: rows of host memory or of a storage tier by their keys, and the order in which they are evicted.
 *
 * A row is found by its key (open addressing in 1024 shards, each of which grows by itself, so that no call takes long),
 * and has a place in a heap: the least recently used tick first, and of a tick the row that was added last (the leaf of a
 * prefix). There is a heap for each tenant that has a quota, so that its own next victim is known too; the first of all
 * is the least of their firsts. Rows that are pinned, not stored yet, or being evicted are not in the heap; they keep
 * tick and sequence, so that they go back to their place. Those that are being evicted, which are few, are in a list, the
 * first selected first: what needs room takes those of them that are not pinned before any other. Everything else is in
 * chunks that are never moved; a row costs about 100 bytes with its key of 36.
 */
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SHARDS = 1024, CHUNK_BITS = 14, CHUNK = 1 << CHUNK_BITS, INLINE_KEY = 36, LONGEST_KEY = 255, TENANTS = 65 };
#define MOST_TICK ((uint64_t)1 << 39) /* a higher one, which only a defect makes, must not be the newest for ever */
enum { STORED = 1, EVICTING = 2, USED = 4, LIVE = 8 };
#define NONE UINT32_MAX

typedef struct {
    uint64_t tick;
    uint32_t seq;    /* of equal ticks, the latest is evicted first */
    uint32_t tag;    /* of the key's hash */
    uint32_t slot;   /* the next free row, if this one is free */
    uint32_t place;  /* in the heap, or NONE */
    uint32_t id;     /* another one each time the row is taken */
    uint32_t pins;   /* each request that waits may pin the rows of a prefix that all share */
    uint8_t flags, listing, length, tenant;
    union {
        char key[INLINE_KEY];
        char *far;  /* of a longer key */
    };
} Row;

typedef struct {
    uint32_t tag, row;  /* row + 1; 0: empty */
} Cell;

typedef struct {
    Cell *cells;
    uint32_t size, used;  /* a power of two, or 0 */
} Shard;

typedef struct {
    uint64_t tick;
    uint32_t seq, row;
} Place;

typedef struct {  /* an array of chunks */
    char **chunks;
    uint32_t count;  /* of chunks */
    size_t item;     /* bytes */
} Chunks;

typedef struct {
    Chunks places;
    uint32_t ordered; /* of these places, those in use */
    uint32_t rows;    /* of the tenant, whether in the order or not */
} Heap;

typedef struct {
    PyObject_HEAD
    Shard shards[SHARDS];
    Chunks rows;
    Heap heaps[TENANTS]; /* 0: of no tenant with a quota */
    uint32_t tenants;    /* no row of a tenant from this one on was ever added */
    uint32_t live, free_row, next_row; /* next_row: no row from it on was ever used */
    uint32_t seq;
    uint8_t listing;
    uint32_t *victims; /* rows that are being evicted, the first selected first */
    uint32_t victims_size, evicting; /* evicting: how many they are */
    uint32_t *used; /* a ring of rows that were used since `take_used` */
    uint32_t used_size, used_first, used_count;
} Rows;

static uint32_t last_id; /* of all tables, so that a row of before a reset is never taken for one of after it */

static void *item(const Chunks *c, uint32_t i) {
    return c->chunks[i >> CHUNK_BITS] + (size_t)(i & (CHUNK - 1)) * c->item;
}
static Row *row_at(const Rows *self, uint32_t i) { return item(&self->rows, i); }
static Place *place_at(const Heap *heap, uint32_t i) { return item(&heap->places, i); }

static int ensure(Chunks *c, uint32_t i) { /* room for item i; 0 if there is no memory */
    if (i >> CHUNK_BITS < c->count) return 1;
    char **chunks = realloc(c->chunks, (c->count + 1) * sizeof *chunks);
    if (!chunks) return 0;
    c->chunks = chunks;
    if (!(chunks[c->count] = calloc(CHUNK, c->item))) return 0;
    c->count++;
    return 1;
}

static const char *key_of(const Row *r) { return r->length > INLINE_KEY ? r->far : r->key; }

/* --- the order of eviction: a heap with four children a node, so that these share a cache line */

static int before(const Place *a, const Place *b) {
    return a->tick != b->tick ? a->tick < b->tick : (int32_t)(a->seq - b->seq) > 0;
}

static void put_place(Rows *self, Heap *heap, uint32_t i, Place p) {
    *place_at(heap, i) = p;
    row_at(self, p.row)->place = i;
}

static void sift(Rows *self, Heap *heap, uint32_t i, Place p) { /* p belongs at i or above or below it */
    while (i) {
        uint32_t up = (i - 1) / 4;
        if (!before(&p, place_at(heap, up))) break;
        put_place(self, heap, i, *place_at(heap, up));
        i = up;
    }
    for (;;) {
        uint64_t down = 4 * (uint64_t)i + 1, least = NONE;
        for (uint64_t c = down; c < down + 4 && c < heap->ordered; c++)
            if (least == NONE || before(place_at(heap, c), place_at(heap, least))) least = c;
        if (least == NONE || !before(place_at(heap, least), &p)) break;
        put_place(self, heap, i, *place_at(heap, least));
        i = least;
    }
    put_place(self, heap, i, p);
}

static void leave_order(Rows *self, Row *r) {
    if (r->place == NONE) return;
    Heap *heap = &self->heaps[r->tenant];
    uint32_t i = r->place;
    Place last = *place_at(heap, --heap->ordered);
    r->place = NONE;
    if (i < heap->ordered) sift(self, heap, i, last);
}

/* There is room: `take_row` has made it. */
static void enter_order(Rows *self, Row *r, uint32_t row) {
    if (r->place != NONE || r->pins || (r->flags & (STORED | EVICTING)) != STORED) return;
    Heap *heap = &self->heaps[r->tenant];
    uint32_t i = heap->ordered++;
    sift(self, heap, i, (Place){r->tick, r->seq, row});
}

/* A later use than the last one: a second one at the same tick is by the same request, and does not count. */
static void use_row(Rows *self, Row *r, uint32_t row, uint64_t tick) {
    if (tick <= r->tick) return;
    r->tick = tick;
    r->seq = ++self->seq;
    if (r->place != NONE) sift(self, &self->heaps[r->tenant], r->place, (Place){tick, r->seq, row});
}

/* The place of the next victim, of one tenant or of all; NULL if there is none. */
static const Place *first(const Rows *self, uint32_t tenant) {
    const Place *least = NULL;
    for (uint32_t t = tenant < TENANTS ? tenant : 0, end = tenant < TENANTS ? tenant + 1 : self->tenants; t < end; t++) {
        if (!self->heaps[t].ordered) continue;
        const Place *top = place_at(&self->heaps[t], 0);
        if (!least || before(top, least)) least = top;
    }
    return least;
}

/* --- victims: rows that are being evicted */

static int room_for_victims(Rows *self, uint32_t count) { /* 0 without memory, and an exception */
    if (count <= self->victims_size) return 1;
    uint32_t *victims = realloc(self->victims, count * sizeof *victims);
    if (!victims) return PyErr_NoMemory(), 0;
    self->victims = victims;
    self->victims_size = count;
    return 1;
}

/* There is room. */
static void begin_eviction(Rows *self, Row *r, uint32_t row) {
    leave_order(self, r);
    r->flags |= EVICTING;
    self->victims[self->evicting++] = row;
}

static void end_eviction(Rows *self, Row *r, uint32_t row) { /* it is in no order */
    if (!(r->flags & EVICTING)) return;
    uint32_t i = 0;
    while (self->victims[i] != row) i++;
    memmove(&self->victims[i], &self->victims[i + 1], (--self->evicting - i) * sizeof *self->victims);
    r->flags &= ~EVICTING;
}

/* --- keys */

typedef struct {
    const char *bytes;
    uint32_t length, tag;
    Shard *shard;
} Key;

static Cell *find_cell(const Rows *self, const Key *key) {
    const Shard *s = key->shard;
    if (!s->size) return NULL;
    for (uint32_t i = key->tag & (s->size - 1);; i = (i + 1) & (s->size - 1)) {
        Cell *cell = &s->cells[i];
        if (!cell->row) return NULL;
        if (cell->tag == key->tag) {
            const Row *r = row_at(self, cell->row - 1);
            if (r->length == key->length && !memcmp(key_of(r), key->bytes, key->length)) return cell;
        }
    }
}

static uint32_t find_row(const Rows *self, const Key *key) {
    Cell *cell = find_cell(self, key);
    return cell ? cell->row - 1 : NONE;
}

static int grow(Shard *s) {
    uint32_t size = s->size ? 2 * s->size : 8;
    Cell *cells = calloc(size, sizeof *cells);
    if (!cells) return 0;
    for (uint32_t i = 0; i < s->size; i++) {
        if (!s->cells[i].row) continue;
        uint32_t j = s->cells[i].tag & (size - 1);
        while (cells[j].row) j = (j + 1) & (size - 1);
        cells[j] = s->cells[i];
    }
    free(s->cells);
    s->cells = cells;
    s->size = size;
    return 1;
}

static void remove_cell(Shard *s, Cell *cell) { /* and move those behind it that belong further ahead */
    uint32_t mask = s->size - 1, hole = (uint32_t)(cell - s->cells);
    for (uint32_t i = (hole + 1) & mask; s->cells[i].row; i = (i + 1) & mask) {
        uint32_t home = s->cells[i].tag & mask;
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            s->cells[hole] = s->cells[i];
            hole = i;
        }
    }
    s->cells[hole] = (Cell){0, 0};
    s->used--;
}

/* A new row, in no order yet; NONE without memory, and an exception. The key must be unknown. */
static uint32_t take_row(Rows *self, const Key *key, uint32_t slot, uint64_t tick, uint8_t flags, uint8_t tenant) {
    Shard *s = key->shard;
    Heap *heap = &self->heaps[tenant];
    uint32_t row = self->free_row != NONE ? self->free_row : self->next_row;
    char *far = NULL;
    if (row >= NONE - 1 || !ensure(&self->rows, row) || !ensure(&heap->places, heap->rows) ||
        (4 * (s->used + 1) > 3 * s->size && !grow(s)) || (key->length > INLINE_KEY && !(far = malloc(key->length)))) {
        PyErr_NoMemory();
        return NONE;
    }
    Row *r = row_at(self, row);
    if (row == self->free_row)
        self->free_row = r->slot;
    else
        self->next_row++;
    last_id += 1 + (last_id == UINT32_MAX); /* 0 is no row's */
    *r = (Row){.tick = tick, .seq = ++self->seq, .tag = key->tag, .slot = slot, .place = NONE, .id = last_id,
               .flags = flags | LIVE, .listing = self->listing, .length = (uint8_t)key->length, .tenant = tenant};
    heap->rows++;
    if (tenant >= self->tenants) self->tenants = tenant + 1;
    if (far) r->far = far;
    memcpy(far ? far : r->key, key->bytes, key->length);
    uint32_t i = key->tag & (s->size - 1);
    while (s->cells[i].row) i = (i + 1) & (s->size - 1);
    s->cells[i] = (Cell){key->tag, row + 1};
    s->used++;
    self->live++;
    return row;
}

static void drop_row(Rows *self, Shard *s, Cell *cell) {
    uint32_t row = cell->row - 1;
    Row *r = row_at(self, row);
    leave_order(self, r);
    end_eviction(self, r, row);
    self->heaps[r->tenant].rows--;
    remove_cell(s, cell);
    if (r->length > INLINE_KEY) free(r->far);
    r->flags = 0;
    r->slot = self->free_row;
    self->free_row = row;
    self->live--;
}
