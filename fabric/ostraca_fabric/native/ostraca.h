/* What the files of this folder share. Every function here is called through ctypes, which lets go of the
 * interpreter lock meanwhile; none of them knows of Python. `__init__.py` says what they promise.
 *
 * Conventions. A column is an array with one item per block. Memory that blocks lie in is a base address, its
 * size, and a column of offsets: a block that reaches outside of it is refused before anything is touched. */

#ifndef OSTRACA_H
#define OSTRACA_H

#include <stddef.h>
#include <stdint.h>

/* Raise it, here and in `__init__.py`, whenever what the two give each other changes. */
#define OSTRACA_INTERFACE 7

#define TAG_BYTES 16
#define KEY_BYTES 16
#define DIMS_MAX 4

#define PUBLIC __attribute__((visibility("default")))

/* As in `parts.PART`: some runs of contiguous bytes, laid out by shape and strides, the first axis outermost. */
struct part {
    uint64_t address;
    uint64_t run_bytes;
    uint64_t dims;
    uint64_t shape[DIMS_MAX];
    int64_t strides[DIMS_MAX]; /* bytes */
};

/* Returns the first block that reaches outside of memory, or `blocks` when none does. */
int64_t first_outside(uint64_t size, const int64_t *offsets, const uint32_t *lengths, int64_t blocks);

/* The 128-bit XXH3 of some bytes in its canonical, big-endian form. */
void tag_of(const void *bytes, size_t length, uint64_t seed, uint8_t tag[TAG_BYTES]);

/* The same of bytes that come piece by piece. */
struct tagging;
struct tagging *tagging_new(void); /* NULL when there is no memory */
void tagging_begin(struct tagging *state, uint64_t seed);
void tagging_add(struct tagging *state, const void *bytes, size_t length);
void tagging_end(struct tagging *state, uint8_t tag[TAG_BYTES]);
void tagging_free(struct tagging *state);

#endif
