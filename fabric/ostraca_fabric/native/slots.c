/* Slots of chunked memory: what `slots.SlotPool` says, a byte of state for each slot. */

#include "ostraca.h"

enum { FREE, TAKEN, QUARANTINE, NAMED }; /* NAMED: within one call only, to find a slot that is named twice */

struct pool {
    uint8_t *state; /* `width` for each chunk, of which the chunk's slots use the first ones */
    int64_t *slot_bytes; /* of each chunk, 0 when no slot of it is in use */
    int64_t *used; /* slots of each chunk that are not free */
    int64_t chunks;
    int64_t width;
    int64_t chunk_bytes;
};

/* The chunk to take from next: of those cut into this size the fullest that has room, else an empty one; -1 when
 * there is none. */
static int64_t best_chunk(const struct pool *pool, int64_t slot_bytes)
{
    int64_t best = -1, empty = -1, slots = pool->chunk_bytes / slot_bytes;
    for (int64_t chunk = 0; chunk < pool->chunks; chunk++) {
        if (pool->slot_bytes[chunk] == 0) {
            if (empty < 0)
                empty = chunk;
        } else if (pool->slot_bytes[chunk] == slot_bytes && pool->used[chunk] < slots &&
                   (best < 0 || pool->used[chunk] > pool->used[best])) {
            best = chunk;
        }
    }
    return best < 0 ? empty : best;
}

/* Takes `count` slots, writing where each begins; returns 0, and has changed nothing, when there are not as many. */
PUBLIC int64_t ostraca_slots_take(const struct pool *pool, int64_t slot_bytes, int64_t *offsets, int64_t count)
{
    int64_t slots = pool->chunk_bytes / slot_bytes, room = 0, taken = 0;
    for (int64_t chunk = 0; chunk < pool->chunks && room < count; chunk++)
        if (pool->slot_bytes[chunk] == 0 || pool->slot_bytes[chunk] == slot_bytes)
            room += slots - pool->used[chunk];
    if (room < count)
        return 0;
    while (taken < count) {
        int64_t chunk = best_chunk(pool, slot_bytes);
        uint8_t *state = pool->state + chunk * pool->width;
        pool->slot_bytes[chunk] = slot_bytes;
        for (int64_t slot = 0; slot < slots && taken < count; slot++) {
            if (state[slot] != FREE)
                continue;
            state[slot] = TAKEN;
            pool->used[chunk]++;
            offsets[taken++] = chunk * pool->chunk_bytes + slot * slot_bytes;
        }
    }
    return 1;
}

/* The state of the slot that begins there, if the pool has such a slot in use; else NULL. */
static uint8_t *state_at(const struct pool *pool, int64_t offset)
{
    if (offset < 0 || offset >= pool->chunks * pool->chunk_bytes)
        return NULL;
    int64_t chunk = offset / pool->chunk_bytes, within = offset % pool->chunk_bytes;
    if (pool->slot_bytes[chunk] == 0 || within % pool->slot_bytes[chunk])
        return NULL;
    return pool->state + chunk * pool->width + within / pool->slot_bytes[chunk];
}

/* Moves slots from one state to another. Returns their bytes; or -1 - the first that is not a slot in that state, or
 * is named twice, and has changed nothing. */
PUBLIC int64_t ostraca_slots_move(const struct pool *pool, const int64_t *offsets, int64_t count, int32_t from,
                                  int32_t to)
{
    int64_t moved = 0, each;
    for (each = 0; each < count; each++) {
        uint8_t *state = state_at(pool, offsets[each]);
        if (state == NULL || *state != from)
            break;
        *state = NAMED;
    }
    for (int64_t undone = 0; each < count && undone < each; undone++)
        *state_at(pool, offsets[undone]) = (uint8_t)from;
    if (each < count)
        return -1 - each;
    for (each = 0; each < count; each++) {
        int64_t chunk = offsets[each] / pool->chunk_bytes;
        moved += pool->slot_bytes[chunk];
        *state_at(pool, offsets[each]) = (uint8_t)to;
    }
    /* Afterwards, because a chunk's last slot takes its slots' size with it. */
    for (each = 0; to == FREE && each < count; each++) {
        int64_t chunk = offsets[each] / pool->chunk_bytes;
        if (--pool->used[chunk] == 0)
            pool->slot_bytes[chunk] = 0;
    }
    return moved;
}
