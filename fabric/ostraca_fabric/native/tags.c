/* Tags of many blocks in one call. `ostraca_use_xxh3` receives the functions of the xxhash package's shared
 * library, so that the process has a single, maintained XXH3. */

#include "ostraca.h"

#include <endian.h>
#include <errno.h>
#include <string.h>
#include <sys/uio.h>

typedef struct {
    uint64_t low;
    uint64_t high;
} xxh128; /* XXH128_hash_t */

/* As in `native._XXH3`. */
struct xxh3 {
    xxh128 (*once)(const void *, size_t, uint64_t);
    void *(*create)(void);
    int (*reset)(void *, uint64_t);
    int (*update)(void *, const void *, size_t);
    xxh128 (*digest)(const void *);
    int (*free)(void *);
};

static struct xxh3 xxh3;

PUBLIC void ostraca_use_xxh3(const struct xxh3 *functions) { xxh3 = *functions; }

static void canonical(xxh128 hash, uint8_t tag[TAG_BYTES])
{
    uint64_t words[2] = {htobe64(hash.high), htobe64(hash.low)};
    memcpy(tag, words, TAG_BYTES);
}

void tag_of(const void *bytes, size_t length, uint64_t seed, uint8_t tag[TAG_BYTES])
{
    canonical(xxh3.once(bytes, length, seed), tag);
}

int is_tagged(const void *bytes, size_t length, uint64_t seed, const uint8_t tag[TAG_BYTES])
{
    uint8_t found[TAG_BYTES];
    tag_of(bytes, length, seed, found);
    return memcmp(found, tag, TAG_BYTES) == 0;
}

struct tagging *tagging_new(void) { return xxh3.create(); }
void tagging_begin(struct tagging *state, uint64_t seed) { xxh3.reset(state, seed); }
void tagging_add(struct tagging *state, const void *bytes, size_t length) { xxh3.update(state, bytes, length); }
void tagging_end(struct tagging *state, uint8_t tag[TAG_BYTES]) { canonical(xxh3.digest(state), tag); }
void tagging_free(struct tagging *state) { xxh3.free(state); }

int64_t first_outside(uint64_t size, const int64_t *offsets, const uint32_t *lengths, int64_t blocks)
{
    for (int64_t block = 0; block < blocks; block++)
        if ((uint64_t)offsets[block] > size || lengths[block] > size - (uint64_t)offsets[block])
            return block; /* also below 0 */
    return blocks;
}

/* Makes the tags of blocks. Returns `blocks`, or the first block outside of memory, with no tag made. */
PUBLIC int64_t ostraca_tags(const uint8_t *memory, uint64_t size, const int64_t *offsets, const uint32_t *lengths,
                            const uint64_t *seeds, uint8_t *tags, int64_t blocks)
{
    int64_t inside = first_outside(size, offsets, lengths, blocks);
    for (int64_t block = 0; inside == blocks && block < blocks; block++)
        tag_of(memory + offsets[block], lengths[block], seeds[block], tags + TAG_BYTES * block);
    return inside;
}

int64_t copy_from(int process, uint64_t address, uint8_t *to, uint64_t left)
{
    ssize_t step = 1;
    for (; left && step > 0; address += (uint64_t)step, to += step, left -= (uint64_t)step) {
        struct iovec here = {to, left}, there = {(void *)(uintptr_t)address, left};
        step = process_vm_readv(process, &here, 1, &there, 1, 0);
    }
    return step > 0 ? 0 : step ? errno : EFAULT;
}

/* Verifies blocks, each a state (`enum piece_state` of io/io.h), until `stop`, if any, is not 0. With `addresses`, each
 * block is copied out of another process first. With `page`, the rest of its last page is zeroed: memory ends at a
 * page, so the rest is inside. Returns as `ostraca_tags`, or -errno of a failed copy. */
PUBLIC int64_t ostraca_verify(uint8_t *memory, uint64_t size, const int64_t *offsets, const uint32_t *lengths,
                              const uint64_t *seeds, const uint8_t *tags, uint8_t *states, int64_t blocks,
                              uint64_t page, int process, const uint64_t *addresses, const uint8_t *stop)
{
    int64_t failed, inside = first_outside(size, offsets, lengths, blocks), end = inside < blocks ? 0 : blocks;
    for (int64_t block = 0; block < end && !(stop && __atomic_load_n(stop, __ATOMIC_RELAXED)); block++) {
        uint8_t *at = memory + offsets[block];
        if (addresses && (failed = copy_from(process, addresses[block], at, lengths[block])))
            return -failed;
        if (page)
            memset(at + lengths[block], 0, (page - lengths[block] % page) % page);
        states[block] = is_tagged(at, lengths[block], seeds[block], tags + TAG_BYTES * block) ? 1 : 2;
    }
    return inside;
}
