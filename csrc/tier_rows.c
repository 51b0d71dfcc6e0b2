/* Rows of host memory or of a storage tier, as a type for Python (core/rows.py): which keys it holds, in which slots,
 * and in which order they are evicted. How is in tier_rows.h.
 *
 * The interpreter's lock guards it, and is kept: every call takes microseconds, or so many for each key that it is given.
 * Only the limited API is used, so one build serves every version of Python.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include "tier_rows.h"

int nixl_tiers_tier_rows_abi(void) { return 4; } /* which build of this interface it is: a stale one must not be used */

static hashfunc hash_bytes; /* that of bytes, seeded and kept by the object: a subclass's own may be code of Python */

static int read_key(Rows *self, PyObject *object, Key *key) { /* 0 with an exception set */
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(object, &bytes, &length) < 0) return 0;
    if (length > LONGEST_KEY) {
        PyErr_SetString(PyExc_ValueError, "a key of more than 255 bytes");
        return 0;
    }
    uint64_t hash = (uint64_t)hash_bytes(object);
    *key = (Key){bytes, (uint32_t)length, (uint32_t)hash, &self->shards[hash >> 54]};
    return 1;
}

static PyObject *key_object(const Row *r) { return PyBytes_FromStringAndSize(key_of(r), r->length); }

/* Append a row's key, or with `drop` (key, slot) of a row that is gone then. 0 with an exception. */
static int append(Rows *self, PyObject *list, Row *r, int drop) {
    PyObject *entry = key_object(r);
    Key key;
    int done = 0;
    if (entry && !drop) {
        done = PyList_Append(list, entry) == 0;
    } else if (entry && read_key(self, entry, &key)) {
        PyObject *pair = Py_BuildValue("(OI)", entry, r->slot);
        done = pair && PyList_Append(list, pair) == 0;
        if (done) drop_row(self, key.shard, find_cell(self, &key));
        Py_XDECREF(pair);
    }
    Py_XDECREF(entry);
    return done;
}

/* --- arguments */

static int number(PyObject *object, uint64_t most, uint64_t *value) {
    *value = PyLong_AsUnsignedLongLong(object);
    if (*value == (uint64_t)-1 && PyErr_Occurred()) return 0;
    if (*value > most) {
        PyErr_SetString(PyExc_OverflowError, "too large a number");
        return 0;
    }
    return 1;
}

static int arity(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments instead of %zd", given, wanted);
    return 0;
}
/* The collector does not run within a call, as it may wherever an object is made: what it finalizes may call this table,
 * and the rows that a call works on would be others afterwards. */
#define METHOD(name)                                                                                  \
    static PyObject *do_##name(Rows *self, PyObject *const *args, Py_ssize_t nargs);                  \
    static PyObject *rows_##name(Rows *self, PyObject *const *args, Py_ssize_t nargs) {               \
        int collects = PyGC_Disable();                                                                \
        PyObject *answer = do_##name(self, args, nargs);                                              \
        if (collects) PyGC_Enable();                                                                  \
        return answer;                                                                                \
    }                                                                                                 \
    static PyObject *do_##name(Rows *self, PyObject *const *args, Py_ssize_t nargs)
#define NEED(n) \
    if (!arity(nargs, n)) return NULL
#define KEY(i) \
    Key key;   \
    if (!read_key(self, args[i], &key)) return NULL
#define NUMBER(i, name, most) \
    uint64_t name;            \
    if (!number(args[i], most, &name)) return NULL

/* add(key, slot, tick, stored[, tenant]) -> its id, or 0 if the key is known: its row is confirmed then */
METHOD(add) {
    if (nargs != 4) NEED(5);
    KEY(0);
    NUMBER(1, slot, NONE);
    NUMBER(2, tick, UINT64_MAX);
    uint64_t tenant = 0;
    if (nargs == 5 && !number(args[4], TENANTS - 1, &tenant)) return NULL;
    int stored = PyObject_IsTrue(args[3]);
    if (stored < 0) return NULL;
    uint32_t row = find_row(self, &key);
    if (row != NONE) {
        row_at(self, row)->listing = self->listing;
        return PyLong_FromLong(0);
    }
    row = take_row(self, &key, (uint32_t)slot, tick, stored ? STORED : 0, (uint8_t)tenant);
    if (row == NONE) return NULL;
    enter_order(self, row_at(self, row), row);
    return PyLong_FromUnsignedLong(row_at(self, row)->id);
}

/* get(key) -> (slot, tick, id, pins, stored, evicting, tenant), or None */
METHOD(get) {
    NEED(1);
    KEY(0);
    uint32_t row = find_row(self, &key);
    if (row == NONE) Py_RETURN_NONE;
    Row *r = row_at(self, row);
    return Py_BuildValue("(IKIIOOB)", r->slot, (unsigned long long)r->tick, r->id, r->pins,
                         r->flags & STORED ? Py_True : Py_False, r->flags & EVICTING ? Py_True : Py_False, r->tenant);
}

/* is_stored(key) */
METHOD(is_stored) {
    NEED(1);
    KEY(0);
    uint32_t row = find_row(self, &key);
    return PyBool_FromLong(row != NONE && row_at(self, row)->flags & STORED);
}

/* has_many(list of keys, stored) -> list of bool: `in`, or `is_stored` */
METHOD(has_many) {
    NEED(2);
    Py_ssize_t count = PyList_Size(args[0]);
    int stored = PyObject_IsTrue(args[1]);
    if (count < 0 || stored < 0) return NULL;
    PyObject *found = PyList_New(count);
    for (Py_ssize_t i = 0; found && i < count; i++) {
        Key key;
        if (!read_key(self, PyList_GetItem(args[0], i), &key)) {
            Py_DECREF(found);
            return NULL;
        }
        uint32_t row = self->live ? find_row(self, &key) : NONE;
        PyObject *is = row != NONE && (!stored || row_at(self, row)->flags & STORED) ? Py_True : Py_False;
        Py_INCREF(is);
        PyList_SetItem(found, i, is);
    }
    return found;
}

static void note_used(Rows *self, Row *r, uint32_t row) {
    if (r->flags & USED || self->used_count == self->used_size) return;
    r->flags |= USED;
    self->used[(self->used_first + self->used_count++) % self->used_size] = row;
}

/* The i-th of a list of keys, if it has a row: *row, else NONE. 0 with an exception. */
static int known_row(Rows *self, PyObject *keys, Py_ssize_t i, uint32_t *row) {
    Key key;
    if (!read_key(self, PyList_GetItem(keys, i), &key)) return 0;
    *row = self->live ? find_row(self, &key) : NONE;
    return 1;
}

/* touch_many(list of keys, tick): what is being evicted, and is used, stays */
METHOD(touch_many) {
    NEED(2);
    NUMBER(1, tick, UINT64_MAX);
    Py_ssize_t count = PyList_Size(args[0]);
    if (count < 0) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t row;
        if (!known_row(self, args[0], i, &row)) return NULL;
        if (row == NONE) continue;
        Row *r = row_at(self, row);
        end_eviction(self, r, row);
        use_row(self, r, row, tick);
        enter_order(self, r, row);
        if (self->used_size) note_used(self, r, row);
    }
    Py_RETURN_NONE;
}

/* take_used(most) -> list of (slot, tick): rows that were used since they were taken last, the first used first. Those
 * that are still being stored stay. */
METHOD(take_used) {
    NEED(1);
    NUMBER(0, most, NONE);
    PyObject *taken = PyList_New(0);
    for (uint32_t n = self->used_count < most ? self->used_count : (uint32_t)most; taken && n; n--) {
        uint32_t row = self->used[self->used_first];
        self->used_first = (self->used_first + 1) % self->used_size;
        self->used_count--;
        Row *r = row_at(self, row);
        if (!(r->flags & USED)) continue; /* it has gone; or another one is there by now */
        r->flags &= ~USED;
        if (!(r->flags & STORED)) {
            note_used(self, r, row);
            continue;
        }
        PyObject *pair = Py_BuildValue("(IK)", r->slot, (unsigned long long)r->tick);
        if (!pair || PyList_Append(taken, pair) < 0) Py_CLEAR(taken);
        Py_XDECREF(pair);
    }
    return taken;
}

static int pin_row(Rows *self, Row *r, uint32_t row) { /* 0 with an exception */
    (void)row;
    if (r->pins == UINT32_MAX) return PyErr_SetString(PyExc_OverflowError, "too many pins of a row"), 0;
    leave_order(self, r);
    r->pins++;
    return 1;
}

static int unpin_row(Rows *self, Row *r, uint32_t row) {
    r->pins -= r->pins > 0;
    enter_order(self, r, row);
    return 1;
}

/* pin(key) -> (slot, id), or None if it is unknown: it is not evicted until `unpin` */
METHOD(pin) {
    NEED(1);
    KEY(0);
    uint32_t row = find_row(self, &key);
    if (row == NONE) Py_RETURN_NONE;
    Row *r = row_at(self, row);
    return pin_row(self, r, row) ? Py_BuildValue("(II)", r->slot, r->id) : NULL;
}

/* unpin(key, id): does nothing if the key has another row by now; id 0: whichever it has */
METHOD(unpin) {
    NEED(2);
    KEY(0);
    NUMBER(1, id, NONE);
    uint32_t row = find_row(self, &key);
    if (row != NONE && (!id || row_at(self, row)->id == id)) unpin_row(self, row_at(self, row), row);
    Py_RETURN_NONE;
}

static int store_row(Rows *self, Row *r, uint32_t row) {
    r->flags |= STORED;
    enter_order(self, r, row);
    return 1;
}

/* `change` the rows of those of a list of keys that are known, the last first: of a prefix, as a rule, whose root, which is
 * evicted last, so enters the order last, and stays where it enters. */
static PyObject *change_all(Rows *self, PyObject *keys, int (*change)(Rows *, Row *, uint32_t)) {
    Py_ssize_t count = PyList_Size(keys);
    if (count < 0) return NULL;
    while (count--) {
        uint32_t row;
        if (!known_row(self, keys, count, &row)) return NULL;
        if (row != NONE && !change(self, row_at(self, row), row)) return NULL;
    }
    Py_RETURN_NONE;
}

/* pin_many(list of keys): those that are known */
METHOD(pin_many) {
    NEED(1);
    return change_all(self, args[0], pin_row);
}

/* unpin_many(list of keys): whichever rows they have */
METHOD(unpin_many) {
    NEED(1);
    return change_all(self, args[0], unpin_row);
}

/* stored_many(list of keys): whichever rows they have */
METHOD(stored_many) {
    NEED(1);
    return change_all(self, args[0], store_row);
}

/* stored(key, id) -> whether the key still has this row, which is a hit from now on */
METHOD(stored) {
    NEED(2);
    KEY(0);
    NUMBER(1, id, NONE);
    uint32_t row = find_row(self, &key);
    if (row == NONE || row_at(self, row)->id != id) Py_RETURN_FALSE;
    store_row(self, row_at(self, row), row);
    Py_RETURN_TRUE;
}

/* select(count) -> list of keys: the next victims leave the order; they are being evicted */
METHOD(select) {
    NEED(1);
    NUMBER(0, count, NONE);
    const Place *next;
    PyObject *found = PyList_New(0);
    while (found && count-- && (next = first(self, TENANTS))) {
        Row *r = row_at(self, next->row);
        if (room_for_victims(self, self->evicting + 1) && append(self, found, r, 0))
            begin_eviction(self, r, next->row);
        else
            Py_CLEAR(found);
    }
    return found;
}

/* Rows of a tenant, or of all, that are not pinned, which are gone: those that are being evicted, then those in the order. */
static PyObject *evict(Rows *self, uint32_t tenant, uint64_t count) {
    const Place *next;
    PyObject *found = PyList_New(0);
    for (uint32_t i = 0; found && count && i < self->evicting;) {
        Row *r = row_at(self, self->victims[i]);
        if (r->pins || (tenant < TENANTS && r->tenant != tenant)) {
            i++;
        } else if (append(self, found, r, 1)) { /* it is the list's no more */
            count--;
        } else {
            Py_CLEAR(found);
        }
    }
    while (found && count-- && (next = first(self, tenant)))
        if (!append(self, found, row_at(self, next->row), 1)) Py_CLEAR(found);
    return found;
}

/* evict(count) -> list of (key, slot) */
METHOD(evict) {
    NEED(1);
    NUMBER(0, count, NONE);
    return evict(self, TENANTS, count);
}

/* evict_of(tenant, count) -> the same of this tenant's rows */
METHOD(evict_of) {
    NEED(2);
    NUMBER(0, tenant, TENANTS - 1);
    NUMBER(1, count, NONE);
    return evict(self, (uint32_t)tenant, count);
}

/* evicting() -> how many rows are being evicted */
METHOD(evicting) {
    NEED(0);
    (void)args;
    return PyLong_FromUnsignedLong(self->evicting);
}

/* is_evicting(key) */
METHOD(is_evicting) {
    NEED(1);
    KEY(0);
    uint32_t row = find_row(self, &key);
    return PyBool_FromLong(row != NONE && row_at(self, row)->flags & EVICTING);
}

/* count_of(tenant) -> how many rows are there of it */
METHOD(count_of) {
    NEED(1);
    NUMBER(0, tenant, TENANTS - 1);
    return PyLong_FromUnsignedLong(self->heaps[tenant].rows);
}

/* cancel(key, tick) -> whether it was being evicted: it is back in its place, or where a use at this tick puts it */
METHOD(cancel) {
    NEED(2);
    KEY(0);
    NUMBER(1, tick, UINT64_MAX);
    uint32_t row = find_row(self, &key);
    if (row == NONE || !(row_at(self, row)->flags & EVICTING)) Py_RETURN_FALSE;
    Row *r = row_at(self, row);
    end_eviction(self, r, row);
    use_row(self, r, row, tick);
    enter_order(self, r, row);
    Py_RETURN_TRUE;
}

/* cancel_all(): every row that is being evicted is back in its place */
METHOD(cancel_all) {
    NEED(0);
    (void)args;
    while (self->evicting) {
        uint32_t row = self->victims[self->evicting - 1];
        end_eviction(self, row_at(self, row), row);
        enter_order(self, row_at(self, row), row);
    }
    Py_RETURN_NONE;
}

/* remove(key, id) -> its slot, or -1 if the key has another row by now, or none; id 0: whichever it has */
METHOD(remove) {
    NEED(2);
    KEY(0);
    NUMBER(1, id, NONE);
    Cell *cell = find_cell(self, &key);
    if (!cell || (id && row_at(self, cell->row - 1)->id != id)) return PyLong_FromLong(-1);
    uint32_t slot = row_at(self, cell->row - 1)->slot;
    drop_row(self, key.shard, cell);
    return PyLong_FromUnsignedLong(slot);
}

/* begin_listing(): rows are confirmed anew from now on; `sweep` removes those that are not */
METHOD(begin_listing) {
    NEED(0);
    (void)args;
    self->listing++;
    Py_RETURN_NONE;
}

/* list_columns(slots, ticks, records, width, start, stop, taken, limit, [base])
 *     -> (added, highest slot + 1, highest tick, [(slot, key)]): see TierRows of core/rows.py */
METHOD(list_columns) {
    NEED(nargs == 9 ? 9 : 8);
    Py_buffer slots = {0}, ticks = {0}, records = {0}, taken = {0};
    PyObject *result = NULL, *surplus = NULL;
    NUMBER(3, width, LONGEST_KEY + 1);
    NUMBER(4, start, NONE);
    NUMBER(5, stop, NONE);
    NUMBER(7, limit, UINT64_MAX);
    uint64_t base = 0;
    if (nargs == 9 && !number(args[8], NONE, &base)) return NULL;
    int physical = args[6] != Py_None;
    if (PyObject_GetBuffer(args[0], &slots, PyBUF_SIMPLE) < 0 || PyObject_GetBuffer(args[1], &ticks, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(args[2], &records, PyBUF_SIMPLE) < 0 ||
        (physical && PyObject_GetBuffer(args[6], &taken, PyBUF_WRITABLE) < 0) || !(surplus = PyList_New(0)))
        goto done;
    if (width < 2 || stop < start || 4 * stop > (uint64_t)slots.len || 8 * stop > (uint64_t)ticks.len ||
        width * stop > (uint64_t)records.len) {
        PyErr_SetString(PyExc_ValueError, "columns that are shorter than they should be");
        goto done;
    }
    uint64_t added = 0, end = 0, newest = 0;
    for (uint64_t i = start; i < stop; i++) {
        uint32_t slot;
        uint64_t tick;
        memcpy(&slot, (char *)slots.buf + 4 * i, 4);
        memcpy(&tick, (char *)ticks.buf + 8 * i, 8);
        if (tick > MOST_TICK) tick = MOST_TICK;
        if (tick > newest) newest = tick;
        const unsigned char *record = (unsigned char *)records.buf + width * i;
        Py_ssize_t length = record[0];
        if (length > (Py_ssize_t)width - 1) length = (Py_ssize_t)width - 1;
        PyObject *object = PyBytes_FromStringAndSize((const char *)record + 1, length);
        Key key;
        if (!object || !read_key(self, object, &key)) {
            Py_XDECREF(object);
            goto done;
        }
        uint32_t row = find_row(self, &key);
        int drop = 0, failed = 0;
        if (row != NONE) {
            Row *r = row_at(self, row);
            drop = physical && r->slot != base + slot; /* of two rows, the one that is known is as good */
            if (!drop) r->listing = self->listing;
        } else if (!length || (physical && (slot >= limit || slot >= (uint64_t)taken.len || ((char *)taken.buf)[slot]))) {
            drop = 1;
        } else if ((row = take_row(self, &key, (uint32_t)(base + slot), tick, STORED, 0)) == NONE) {
            failed = 1;
        } else {
            enter_order(self, row_at(self, row), row);
            if (physical) ((char *)taken.buf)[slot] = 1;
            if (physical && slot >= end) end = (uint64_t)slot + 1;
            added++;
        }
        if (drop) {
            PyObject *pair = Py_BuildValue("(KO)", (unsigned long long)(base + slot), object);
            failed = !pair || PyList_Append(surplus, pair) < 0;
            Py_XDECREF(pair);
        }
        Py_DECREF(object);
        if (failed) goto done;
    }
    result = Py_BuildValue("(KKKO)", (unsigned long long)added, (unsigned long long)end, (unsigned long long)newest, surplus);
done:
    if (slots.obj) PyBuffer_Release(&slots);
    if (ticks.obj) PyBuffer_Release(&ticks);
    if (records.obj) PyBuffer_Release(&records);
    if (taken.obj) PyBuffer_Release(&taken);
    Py_XDECREF(surplus);
    return result;
}

/* sweep(start, count, limit, low, high) -> (next start or -1, [(key, slot)]): of `count` places from `start` on, the rows
 * in slots from `low` to `high` that are not confirmed, or whose slot is not below `limit`, unless they are pinned */
METHOD(sweep) {
    NEED(5);
    NUMBER(0, start, NONE);
    NUMBER(1, count, NONE);
    NUMBER(2, limit, UINT64_MAX);
    NUMBER(3, low, UINT64_MAX);
    NUMBER(4, high, UINT64_MAX);
    uint64_t stop = start + count < self->next_row ? start + count : self->next_row;
    PyObject *gone = PyList_New(0);
    for (uint64_t i = start; gone && i < stop; i++) {
        Row *r = row_at(self, (uint32_t)i);
        if (!(r->flags & STORED) || r->pins || r->slot < low || r->slot >= high) continue;
        if (r->listing == self->listing && r->slot < limit) continue;
        if (!append(self, gone, r, 1)) Py_CLEAR(gone);
    }
    if (!gone) return NULL;
    return Py_BuildValue("(LN)", stop < self->next_row ? (long long)stop : -1LL, gone);
}

/* some(start, count) -> (next start, list of keys): those of the rows in `count` places from `start` downwards; from the
 * last one on again after the first, each once */
METHOD(some) {
    NEED(2);
    NUMBER(0, start, NONE);
    NUMBER(1, count, NONE);
    PyObject *keys = PyList_New(0);
    uint64_t i = start < self->next_row ? start : self->next_row;
    if (count > self->next_row) count = self->next_row;
    for (; keys && count; count--) {
        i = i ? i - 1 : (uint64_t)self->next_row - 1;
        Row *r = row_at(self, (uint32_t)i);
        if (r->flags & LIVE && !append(self, keys, r, 0)) Py_CLEAR(keys);
    }
    return keys ? Py_BuildValue("(KN)", (unsigned long long)i, keys) : NULL;
}

/* oldest() -> the tick of the next victim, or None */
METHOD(oldest) {
    NEED(0);
    (void)args;
    const Place *next = first(self, TENANTS);
    if (!next) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(next->tick);
}

static Py_ssize_t rows_length(PyObject *self) { return ((Rows *)self)->live; }

static int rows_contains(PyObject *object, PyObject *key_) {
    Rows *self = (Rows *)object;
    Key key;
    if (!read_key(self, key_, &key)) return -1;
    return find_row(self, &key) != NONE;
}

static PyObject *rows_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)named;
    unsigned int used;
    if (!PyArg_ParseTuple(args, "I", &used)) return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Rows *self = (Rows *)alloc(type, 0); /* zeroed */
    if (!self) return NULL;
    self->rows.item = sizeof(Row);
    for (uint32_t t = 0; t < TENANTS; t++) self->heaps[t].places.item = sizeof(Place);
    self->free_row = NONE;
    self->used_size = used;
    if (used && !(self->used = malloc(used * sizeof *self->used))) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void free_all(Chunks *c) {
    for (uint32_t i = 0; i < c->count; i++) free(c->chunks[i]);
    free(c->chunks);
}

/* Without the interpreter's lock: five million rows take some 50 ms, and nobody else has the table any more. */
static void rows_dealloc(PyObject *object) {
    Rows *self = (Rows *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyThreadState *released = PyEval_SaveThread();
    for (uint32_t i = 0; i < self->next_row; i++)
        if (row_at(self, i)->flags && row_at(self, i)->length > INLINE_KEY) free(row_at(self, i)->far);
    free_all(&self->rows);
    for (uint32_t t = 0; t < TENANTS; t++) free_all(&self->heaps[t].places);
    for (uint32_t i = 0; i < SHARDS; i++) free(self->shards[i].cells);
    free(self->victims);
    free(self->used);
    PyEval_RestoreThread(released);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

#define ENTRY(name) {#name, (PyCFunction)(void (*)(void))rows_##name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    ENTRY(add),        ENTRY(get),        ENTRY(is_stored), ENTRY(has_many),      ENTRY(touch_many),   ENTRY(take_used),
    ENTRY(pin),        ENTRY(unpin),      ENTRY(pin_many),  ENTRY(unpin_many),    ENTRY(stored),       ENTRY(select),
    ENTRY(cancel),     ENTRY(cancel_all), ENTRY(evict),     ENTRY(evict_of),      ENTRY(evicting),     ENTRY(is_evicting),
    ENTRY(remove),     ENTRY(sweep),      ENTRY(some),      ENTRY(begin_listing), ENTRY(list_columns), ENTRY(oldest),
    ENTRY(count_of),   ENTRY(stored_many), {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, rows_new},       {Py_tp_dealloc, rows_dealloc}, {Py_tp_methods, methods},
    {Py_sq_length, rows_length}, {Py_sq_contains, rows_contains}, {0, NULL},
};
static PyType_Spec spec = {"nixl_tiers.core._tier_rows.TierRows", sizeof(Rows), 0, Py_TPFLAGS_DEFAULT, slots};

static int execute(PyObject *module) {
    hash_bytes = (hashfunc)PyType_GetSlot(&PyBytes_Type, Py_tp_hash);
    PyObject *type = PyType_FromSpec(&spec);
    if (!type) return -1;
    int added = PyModule_AddObjectRef(module, "TierRows", type);
    Py_DECREF(type);
    return added;
}
static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_tier_rows", NULL, 0, NULL, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tier_rows(void) { return PyModuleDef_Init(&module); }
