/* Tags of many blocks in one call. `ostraca_use_xxh3` receives the functions of the xxhash package's shared
 * library, so that the process has a single, maintained XXH3. */

#include "ostraca.h"

#include <endian.h>
#include <errno.h>
#include <sys/uio.h>

PUBLIC int64_t ostraca_interface(void) { return OSTRACA_INTERFACE; }

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

enum check_state check_tag(const void *bytes, size_t length, uint64_t seed, const uint8_t tag[TAG_BYTES])
{
    uint8_t found[TAG_BYTES];
    tag_of(bytes, length, seed, found);
    return memcmp(found, tag, TAG_BYTES) ? CHECK_DAMAGED : CHECK_GOOD;
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

int64_t copy_neighbours(int process, const uint64_t *from, uint8_t *memory, const int64_t *offsets,
                        const uint32_t *lengths, int64_t blocks)
{
    uint64_t bytes = *lengths, done = 0;
    int64_t end = 1;
    for (; end < blocks && bytes < NEIGHBOURS_BYTES && from[end] - *from == bytes &&
           (uint64_t)(offsets[end] - *offsets) == bytes; end++)
        bytes += lengths[end];
    for (ssize_t step; done < bytes; done += (uint64_t)step) {
        struct iovec here = {memory + *offsets + done, bytes - done}, there = {(void *)(*from + done), bytes - done};
        if ((step = process_vm_readv(process, &here, 1, &there, 1, 0)) <= 0)
            return step ? -errno : -EFAULT;
    }
    return end;
}

/* Verifies blocks, each a `check_state`. With `addresses`, blocks are copied out of another
 * process first. With `in_pages`, the rest of its last page is zeroed. Returns as `ostraca_tags`, or -errno. */
PUBLIC int64_t ostraca_verify(uint8_t *memory, uint64_t size, const int64_t *offsets, const uint32_t *lengths,
                              const uint64_t *seeds, const uint8_t *tags, uint8_t *states, int64_t blocks,
                              int in_pages, int process, const uint64_t *addresses)
{
    int64_t run = 0, inside = first_outside(size, offsets, lengths, blocks), end = inside < blocks ? 0 : blocks;
    for (int64_t block = 0; block < end; block++, run--) {
        uint8_t *at = memory + offsets[block];
        if (addresses && !run && (run = copy_neighbours(process, addresses + block, memory, offsets + block,
                                                        lengths + block, end - block)) < 0)
            return run;
        if (in_pages)
            zero_rest(at, lengths[block]);
        states[block] = (uint8_t)check_tag(at, lengths[block], seeds[block], tags + TAG_BYTES * block);
    }
    return inside;
}
