/* Slots of chunked memory, as in `slots.SlotPool`, with a state byte per page. */

#include "ostraca.h"

/* Ordered by the effort to free a page. NAMED is used only within a call, to detect a slot named twice. */
enum { FREE, KEPT, TAKEN, QUARANTINE, NAMED };

struct pool {
    uint8_t *state; /* per page: state of its slot */
    int32_t *pages; /* pages of the slot in use that begins with this page, or 0 */
    int64_t *cut_for; /* per chunk: pages of the slots it was first cut for; 0 without a slot in use */
    int64_t *used; /* per chunk: pages not free */
    int64_t chunks;
    int64_t width; /* pages per chunk */
};

/* Returns whether no page is in a state above `most`. */
static int is_to_be_had(const uint8_t *state, int64_t pages, uint8_t most)
{
    uint8_t highest = state[0];
    if (highest > most)
        return 0;
    for (int64_t page = 1; page < pages; page++)
        highest = state[page] > highest ? state[page] : highest;
    return highest <= most;
}

/* Returns a chunk's rank in the order of allocation: chunks first cut for this size, then empty chunks, then
 * others, and within each group the fuller first. Ranks are unique. */
static int64_t place_of(const struct pool *pool, int64_t chunk, int64_t pages)
{
    int64_t kind = pool->cut_for[chunk] == pages ? 0 : pool->cut_for[chunk] == 0 ? 1 : 2;
    return (kind * (pool->width + 1) + pool->width - pool->used[chunk]) * pool->chunks + chunk;
}

/* Returns the next chunk in order of allocation after rank `last`, or -1. */
static int64_t next_chunk(const struct pool *pool, int64_t pages, int64_t last)
{
    int64_t best = -1, best_place = INT64_MAX;
    for (int64_t chunk = 0; chunk < pool->chunks; chunk++) {
        int64_t place = place_of(pool, chunk, pages);
        if (pool->width - pool->used[chunk] >= pages && place > last && place < best_place) {
            best = chunk;
            best_place = place;
        }
    }
    return best;
}

/* Changes the state of the slot that begins with this page; returns its pages. */
static int64_t move(const struct pool *pool, int64_t first, uint8_t to)
{
    int64_t chunk = first / pool->width, pages = pool->pages[first];
    memset(pool->state + first, to, (size_t)pages);
    if (to == FREE) {
        pool->pages[first] = 0;
        pool->used[chunk] -= pages;
        if (pool->used[chunk] == 0)
            pool->cut_for[chunk] = 0;
    }
    return pages;
}

/* Takes `count` slots and writes their offsets. Returns 0, without a change, if too few are free. */
PUBLIC int64_t ostraca_slots_take(const struct pool *pool, int64_t slot_bytes, int64_t *offsets, int64_t count)
{
    int64_t pages = slot_bytes / PAGE_BYTES, free = 0, taken = 0, last = -1;
    for (int64_t chunk = 0; chunk < pool->chunks && free < count * pages; chunk++)
        free += pool->width - pool->used[chunk];
    if (free < count * pages)
        return 0;
    while (taken < count) {
        int64_t chunk = next_chunk(pool, pages, last);
        if (chunk < 0)
            break;
        last = place_of(pool, chunk, pages); /* taking from the chunk lowers its rank, so it is not visited again */
        int64_t first = chunk * pool->width, end = first + pool->width;
        for (; first + pages <= end && taken < count; first += pages) {
            if (!is_to_be_had(pool->state + first, pages, FREE))
                continue;
            memset(pool->state + first, TAKEN, (size_t)pages);
            pool->pages[first] = (int32_t)pages;
            pool->used[chunk] += pages;
            if (pool->cut_for[chunk] == 0)
                pool->cut_for[chunk] = pages;
            offsets[taken++] = first * PAGE_BYTES;
        }
    }
    if (taken == count)
        return 1;
    while (taken > 0)
        move(pool, offsets[--taken] / PAGE_BYTES, FREE);
    return 0;
}

/* Counts the places for slots of a size, up to `count`, without a page in a state above `most`. */
PUBLIC int64_t ostraca_slots_fit(const struct pool *pool, int64_t slot_bytes, int64_t count, int32_t most)
{
    int64_t pages = slot_bytes / PAGE_BYTES, found = 0;
    for (int64_t chunk = 0; chunk < pool->chunks; chunk++) {
        const uint8_t *state = pool->state + chunk * pool->width;
        for (int64_t page = 0; page + pages <= pool->width && found < count; page += pages)
            found += is_to_be_had(state + page, pages, (uint8_t)most);
    }
    return found;
}

/* Returns the first page of the slot in use at this offset, or -1. */
static int64_t first_page(const struct pool *pool, int64_t offset)
{
    if (offset < 0 || offset % PAGE_BYTES || offset / PAGE_BYTES >= pool->chunks * pool->width)
        return -1;
    return pool->pages[offset / PAGE_BYTES] ? offset / PAGE_BYTES : -1;
}

/* Moves slots from one state to another. Returns their bytes. If slot i is not in state `from`, or is named twice,
 * returns -1 - i without a change. */
PUBLIC int64_t ostraca_slots_move(const struct pool *pool, const int64_t *offsets, int64_t count, int32_t from,
                                  int32_t to)
{
    int64_t moved = 0, each;
    for (each = 0; each < count; each++) {
        int64_t first = first_page(pool, offsets[each]);
        if (first < 0 || pool->state[first] != from)
            break;
        pool->state[first] = NAMED;
    }
    for (int64_t undone = 0; each < count && undone < each; undone++)
        pool->state[offsets[undone] / PAGE_BYTES] = (uint8_t)from;
    if (each < count)
        return -1 - each;
    for (each = 0; each < count; each++)
        moved += move(pool, offsets[each] / PAGE_BYTES, (uint8_t)to);
    return moved * PAGE_BYTES;
}

/* Numbers slots chunk by chunk, as if all had `slot_bytes`. Returns whether every slot begins at such a place, and ends
 * within its chunk. */
PUBLIC int64_t ostraca_slots_number(const int64_t *offsets, int64_t count, int64_t chunk_bytes, int64_t slot_bytes,
                                    int32_t *numbers)
{
    int64_t per_chunk = chunk_bytes / slot_bytes, is_grid = 1;
    for (int64_t each = 0; each < count; each++) {
        int64_t chunk = offsets[each] / chunk_bytes, within = offsets[each] % chunk_bytes;
        numbers[each] = (int32_t)(chunk * per_chunk + within / slot_bytes);
        is_grid &= within % slot_bytes == 0 && within + slot_bytes <= chunk_bytes;
    }
    return is_grid;
}

/* Returns whether every block has 1 to `most` bytes, and lies within both memories. */
PUBLIC int64_t ostraca_wave_fits(const int64_t *staging, uint64_t staging_bytes, const int64_t *arena,
                                 uint64_t arena_bytes, const uint32_t *lengths, int64_t most, int64_t count)
{
    int64_t fits = 1;
    for (int64_t each = 0; each < count; each++)
        fits &= lengths[each] >= 1 && lengths[each] <= most;
    return fits && first_outside(staging_bytes, staging, lengths, count) == count &&
           first_outside(arena_bytes, arena, lengths, count) == count;
}
