/* Tags of many blocks in one call. `ostraca_use_xxh3` receives the functions of the xxhash package's shared
 * library, so that the process has a single, maintained XXH3. */

#include "ostraca.h"

#include <string.h>

typedef struct {
    uint64_t low;
    uint64_t high;
} xxh128; /* XXH128_hash_t */

typedef xxh128 once_function(const void *, size_t, uint64_t);
typedef void *create_function(void);
typedef int reset_function(void *, uint64_t);
typedef int update_function(void *, const void *, size_t);
typedef xxh128 digest_function(const void *);
typedef int free_function(void *);

static once_function *xxh_once;
static create_function *xxh_create;
static reset_function *xxh_reset;
static update_function *xxh_update;
static digest_function *xxh_digest;
static free_function *xxh_free;

PUBLIC void ostraca_use_xxh3(once_function *once, create_function *create, reset_function *reset,
                             update_function *update, digest_function *digest, free_function *free_state)
{
    xxh_once = once;
    xxh_create = create;
    xxh_reset = reset;
    xxh_update = update;
    xxh_digest = digest;
    xxh_free = free_state;
}

static void canonical(xxh128 hash, uint8_t tag[TAG_BYTES])
{
    for (int byte = 0; byte < 8; byte++) {
        tag[byte] = (uint8_t)(hash.high >> (56 - 8 * byte));
        tag[8 + byte] = (uint8_t)(hash.low >> (56 - 8 * byte));
    }
}

void tag_of(const void *bytes, size_t length, uint64_t seed, uint8_t tag[TAG_BYTES])
{
    canonical(xxh_once(bytes, length, seed), tag);
}

struct tagging *tagging_new(void) { return xxh_create(); }
void tagging_begin(struct tagging *state, uint64_t seed) { xxh_reset(state, seed); }
void tagging_add(struct tagging *state, const void *bytes, size_t length) { xxh_update(state, bytes, length); }
void tagging_end(struct tagging *state, uint8_t tag[TAG_BYTES]) { canonical(xxh_digest(state), tag); }
void tagging_free(struct tagging *state) { xxh_free(state); }

int64_t first_outside(uint64_t size, const int64_t *offsets, const uint32_t *lengths, int64_t blocks)
{
    int64_t block = 0;
    while (block < blocks && offsets[block] >= 0 && (uint64_t)offsets[block] <= size &&
           lengths[block] <= size - (uint64_t)offsets[block])
        block++;
    return block;
}

/* Makes the tags of blocks. Returns `blocks`, or the first block outside of memory, with no tag made. */
PUBLIC int64_t ostraca_tags(const uint8_t *memory, uint64_t size, const int64_t *offsets, const uint32_t *lengths,
                            const uint64_t *seeds, uint8_t *tags, int64_t blocks)
{
    int64_t inside = first_outside(size, offsets, lengths, blocks);
    if (inside < blocks)
        return inside;
    for (int64_t block = 0; block < blocks; block++)
        tag_of(memory + offsets[block], lengths[block], seeds[block], tags + TAG_BYTES * block);
    return blocks;
}

/* Tells for each block whether the tag matches the bytes. Returns as `ostraca_tags`. */
PUBLIC int64_t ostraca_check(const uint8_t *memory, uint64_t size, const int64_t *offsets, const uint32_t *lengths,
                             const uint64_t *seeds, const uint8_t *tags, uint8_t *good, int64_t blocks)
{
    int64_t inside = first_outside(size, offsets, lengths, blocks);
    if (inside < blocks)
        return inside;
    for (int64_t block = 0; block < blocks; block++) {
        uint8_t found[TAG_BYTES];
        tag_of(memory + offsets[block], lengths[block], seeds[block], found);
        good[block] = memcmp(found, tags + TAG_BYTES * block, TAG_BYTES) == 0;
    }
    return blocks;
}

/* Zeroes the bytes after each block up to the next multiple of `page`. Returns as `ostraca_tags`. Memory ends at a
 * page, so the rest of an inside block is inside as well. */
PUBLIC int64_t ostraca_blank_rests(uint8_t *memory, uint64_t size, const int64_t *offsets, const uint32_t *lengths,
                                   uint64_t page, int64_t blocks)
{
    int64_t inside = first_outside(size, offsets, lengths, blocks);
    if (inside < blocks)
        return inside;
    for (int64_t block = 0; block < blocks; block++) {
        uint64_t end = (uint64_t)offsets[block] + lengths[block];
        uint64_t rest = (page - lengths[block] % page) % page;
        memset(memory + end, 0, rest < size - end ? rest : size - end);
    }
    return blocks;
}
