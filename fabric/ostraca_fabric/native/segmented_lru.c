/* Order of eviction of a cache's rows. `segmented_lru.py` describes the two queues. A held row is in neither queue,
 * so every row of a queue may be evicted, and no step examines a row twice. Each part of the cache has its own two
 * queues, and a row has the number of its part. */

#include "ostraca.h"

enum { OUTSIDE, HELD, PROBATION, PROTECTED };
enum { USES_MAX = 2 }; /* only more than one use matters */

/* As in `segmented_lru.ROW` and `segmented_lru.STATE`. Rows are numbers; -1 is none. */
struct row {
    int64_t bytes;
    int32_t next, previous;
    int32_t users;
    uint8_t uses, where;
    uint16_t part;
};

struct queue {
    int64_t first, last, bytes;
};

struct state {
    struct queue probation, protected;
    int64_t entered_bytes, protected_max_bytes;
};

static struct queue *queue_of(struct state *state, const struct row *row)
{
    return row->where == PROTECTED ? &state->protected : &state->probation;
}

static void append(struct state *state, struct row *rows, int64_t number, uint8_t where)
{
    struct row *row = &rows[number];
    row->where = where;
    struct queue *queue = queue_of(state, row);
    row->previous = (int32_t)queue->last;
    row->next = -1;
    if (queue->last < 0)
        queue->first = number;
    else
        rows[queue->last].next = (int32_t)number;
    queue->last = number;
    queue->bytes += row->bytes;
}

static void unlink_row(struct state *state, struct row *rows, int64_t number, uint8_t where)
{
    struct row *row = &rows[number];
    struct queue *queue = queue_of(state, row);
    if (row->previous < 0)
        queue->first = row->next;
    else
        rows[row->previous].next = row->next;
    if (row->next < 0)
        queue->last = row->previous;
    else
        rows[row->next].previous = row->previous;
    queue->bytes -= row->bytes;
    row->where = where;
}

/* Moves the overflow of protected to the end of probation. */
static void settle(struct state *state, struct row *rows)
{
    while (state->protected.bytes > state->protected_max_bytes) {
        int64_t oldest = state->protected.first;
        unlink_row(state, rows, oldest, OUTSIDE);
        append(state, rows, oldest, PROBATION);
    }
}

/* Enters rows into a part; `bytes` and `uses` must be written. */
PUBLIC void ostraca_lru_enter(struct state *states, struct row *rows, const int64_t *numbers, int64_t count,
                              int64_t part)
{
    struct state *state = &states[part];
    for (int64_t each = 0; each < count; each++) {
        rows[numbers[each]].users = 0;
        rows[numbers[each]].part = (uint16_t)part;
        state->entered_bytes += rows[numbers[each]].bytes;
        append(state, rows, numbers[each], PROBATION);
    }
}

/* Holds rows, once per mention; negative numbers are skipped. */
PUBLIC void ostraca_lru_hold(struct state *states, struct row *rows, const int64_t *numbers, int64_t count)
{
    for (int64_t each = 0; each < count; each++) {
        if (numbers[each] < 0)
            continue;
        struct row *row = &rows[numbers[each]];
        if (row->users++ == 0)
            unlink_row(&states[row->part], rows, numbers[each], HELD);
        if (row->uses < USES_MAX)
            row->uses++;
    }
}

/* Ends a hold of each row. Returns the number of rows, below `count` if the next row was not held. */
PUBLIC int64_t ostraca_lru_let_go(struct state *states, struct row *rows, const int64_t *numbers, int64_t count)
{
    struct state *last = NULL;
    for (int64_t each = 0; each < count; each++) {
        struct row *row = &rows[numbers[each]];
        if (row->where != HELD)
            return each;
        struct state *state = &states[row->part];
        if (last != NULL && last != state)
            settle(last, rows);
        last = state;
        if (--row->users == 0)
            append(state, rows, numbers[each], row->uses < USES_MAX ? PROBATION : PROTECTED);
    }
    if (last != NULL)
        settle(last, rows);
    return count;
}

/* Sets the maximum bytes of protected, per part. */
PUBLIC void ostraca_lru_protect(struct state *states, struct row *rows, const int64_t *most_bytes, int64_t parts)
{
    for (int64_t part = 0; part < parts; part++) {
        states[part].protected_max_bytes = most_bytes[part];
        settle(&states[part], rows);
    }
}

/* Removes rows of a part in order of eviction, until `wanted_bytes` are removed or no row is left. Returns the
 * number of rows; `numbers` has room for `most`. */
PUBLIC int64_t ostraca_lru_evict(struct state *states, struct row *rows, int64_t wanted_bytes, int64_t *numbers,
                                 int64_t most, int64_t part)
{
    struct state *state = &states[part];
    int64_t count = 0;
    while (wanted_bytes > 0 && count < most) {
        int64_t oldest = state->probation.first < 0 ? state->protected.first : state->probation.first;
        if (oldest < 0)
            break;
        unlink_row(state, rows, oldest, OUTSIDE);
        wanted_bytes -= rows[oldest].bytes;
        state->entered_bytes -= rows[oldest].bytes;
        numbers[count++] = oldest;
    }
    return count;
}
