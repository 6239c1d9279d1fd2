/* Blocks between the memory of callers, strided as engines keep it, and slots of an arena, verified on the way. */

#include "ostraca.h"

#include <string.h>
#include <time.h>

#define PIECE_BYTES (32u << 10) /* hashed, then copied: the copy reads what the hash brought into the cache */

struct walk {
    const struct part *part;
    uint64_t at[DIMS_MAX];
    uint8_t *run;
};

static void walk_begin(struct walk *walk, const struct part *part)
{
    walk->part = part;
    memset(walk->at, 0, sizeof walk->at);
    walk->run = (uint8_t *)(uintptr_t)part->address;
}

/* Goes to the next run; 0 when there is none. */
static int walk_on(struct walk *walk)
{
    const struct part *part = walk->part;
    for (int axis = (int)part->dims - 1; axis >= 0; axis--) {
        walk->run += part->strides[axis];
        if (++walk->at[axis] < part->shape[axis])
            return 1;
        walk->run -= part->strides[axis] * (int64_t)part->shape[axis];
        walk->at[axis] = 0;
    }
    return 0;
}

static void gather_part(const struct part *part, struct tagging *state, uint8_t **slot)
{
    struct walk walk;
    walk_begin(&walk, part);
    do {
        for (uint64_t done = 0; done < part->run_bytes; done += PIECE_BYTES) {
            uint64_t left = part->run_bytes - done;
            size_t piece = left < PIECE_BYTES ? left : PIECE_BYTES;
            tagging_add(state, walk.run + done, piece);
            memcpy(*slot, walk.run + done, piece);
            *slot += piece;
        }
    } while (walk_on(&walk));
}

static void scatter_part(const struct part *part, const uint8_t **slot)
{
    struct walk walk;
    walk_begin(&walk, part);
    do {
        memcpy(walk.run, *slot, part->run_bytes);
        *slot += part->run_bytes;
    } while (walk_on(&walk));
}

/* Copies blocks from callers' memory into slots, and makes each tag from the bytes that were read there, not from
 * those in the slot: a bad copy is then noticed by whoever checks the slot. Block b has the parts first_part[b] to
 * first_part[b + 1]. Returns `blocks`; the first block outside of memory; or -1 when there is no memory. */
PUBLIC int64_t ostraca_gather(uint8_t *memory, uint64_t size, const int64_t *offsets, const uint32_t *lengths,
                              const uint64_t *seeds, const struct part *parts, const int64_t *first_part,
                              uint8_t *tags, int64_t blocks)
{
    int64_t inside = first_outside(size, offsets, lengths, blocks);
    if (inside < blocks)
        return inside;
    struct tagging *state = tagging_new();
    if (state == NULL)
        return -1;
    for (int64_t block = 0; block < blocks; block++) {
        uint8_t *slot = memory + offsets[block];
        tagging_begin(state, seeds[block]);
        for (int64_t part = first_part[block]; part < first_part[block + 1]; part++)
            gather_part(parts + part, state, &slot);
        tagging_end(state, tags + TAG_BYTES * block);
    }
    tagging_free(state);
    return blocks;
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Copies blocks whose tags agree from slots to callers' memory; others are not copied. `which` says which entry
 * of first_part each block is. No block is begun after `until_s` on the monotonic clock. Returns how many blocks
 * were dealt with; or -1 when one lies outside of memory, and nothing was done. */
PUBLIC int64_t ostraca_scatter(const uint8_t *memory, uint64_t size, const int64_t *offsets,
                               const uint32_t *lengths, const uint64_t *seeds, const uint8_t *tags,
                               const struct part *parts, const int64_t *first_part, const int64_t *which,
                               double until_s, uint8_t *good, int64_t blocks)
{
    if (first_outside(size, offsets, lengths, blocks) < blocks)
        return -1;
    for (int64_t block = 0; block < blocks; block++) {
        if (now_s() >= until_s)
            return block;
        const uint8_t *slot = memory + offsets[block];
        uint8_t found[TAG_BYTES];
        tag_of(slot, lengths[block], seeds[block], found);
        good[block] = memcmp(found, tags + TAG_BYTES * block, TAG_BYTES) == 0;
        if (!good[block])
            continue;
        for (int64_t part = first_part[which[block]]; part < first_part[which[block] + 1]; part++)
            scatter_part(parts + part, &slot);
    }
    return blocks;
}
