/* Shared declarations of this folder. No function uses Python. `__init__.py` describes the calls by ctypes, which
 * release the interpreter lock unless they are brief.
 *
 * Conventions: a column is an array with one item per block. Memory of blocks is a base address, a size, and a
 * column of offsets. A block outside of memory is refused before any access. */

#ifndef OSTRACA_H
#define OSTRACA_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* Raise the number, here and in `__init__.py`, after every change of the interface. */
#define OSTRACA_INTERFACE 16

#define PAGE_BYTES 4096
#define TAG_BYTES 16
#define KEY_BYTES 16
#define NEIGHBOURS_BYTES ((uint64_t)64 << 10) /* copied at once: a system call costs as much as 4 KiB */

/* State of a block's tag check; values as in `CheckState` in Python. */
enum check_state { CHECK_PENDING, CHECK_GOOD, CHECK_DAMAGED };

#define PUBLIC __attribute__((visibility("default")))

/* Returns the time on the monotonic clock. */
static inline int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

/* Returns the first block outside of memory, or `blocks` if all are inside. */
int64_t first_outside(uint64_t size, const int64_t *offsets, const uint32_t *lengths, int64_t blocks);

/* Zeroes the rest of a block's last page. Memory ends at a page, so the rest is inside. */
static inline void zero_rest(uint8_t *at, uint32_t length) { memset(at + length, 0, -length % PAGE_BYTES); }

/* Makes or compares the 128-bit XXH3 of bytes, in canonical, big-endian form. */
void tag_of(const void *bytes, size_t length, uint64_t seed, uint8_t tag[TAG_BYTES]);
enum check_state check_tag(const void *bytes, size_t length, uint64_t seed, const uint8_t tag[TAG_BYTES]);
/* Copies the first of some blocks, and small neighbours, out of another process. Returns their number, or -errno. */
int64_t copy_neighbours(int process, const uint64_t *from, uint8_t *memory, const int64_t *offsets,
                        const uint32_t *lengths, int64_t blocks);

/* Incremental form of `tag_of`. */
struct tagging;
struct tagging *tagging_new(void); /* NULL without memory */
void tagging_begin(struct tagging *state, uint64_t seed);
void tagging_add(struct tagging *state, const void *bytes, size_t length);
void tagging_end(struct tagging *state, uint8_t tag[TAG_BYTES]);
void tagging_free(struct tagging *state);

#endif
